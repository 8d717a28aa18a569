"""``python -m node`` is ``grpo-node``."""

from __future__ import annotations

from node.cli.main import main

if __name__ == "__main__":
    main()
