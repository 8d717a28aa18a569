"""``python -m bench`` lists the benches; ``python -m bench NAME …`` runs one."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

NOT_BENCHES = {"__init__", "__main__", "harness"}


def benches() -> dict[str, str]:
    """Each bench's name and the first line of its docstring, without importing it."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if file.stem not in NOT_BENCHES:
            found[file.stem] = (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").split("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    """List, or run the bench that the first argument names with the others."""
    known = benches()
    if not arguments:
        for name, about in known.items():
            print(f"{name:20} {about}")
        return 0
    if arguments[0] not in known:
        print(f"no bench {arguments[0]!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    sys.argv = arguments
    runpy.run_module(f"bench.{arguments[0]}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
