"""What the launching machine remembers of its jobs: settings and secrets, for its owner only."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic import ValidationError

from node.job_plan import SwarmSecrets, SwarmSpec
from protocol.errors import OperatorError

OWNER_ONLY = 0o600


def remember(file: Path, swarm: SwarmSpec, secrets: SwarmSecrets) -> None:
    """Write both, whole or not at all. Raises OperatorError if the place cannot be written."""
    content = {"swarm": swarm.model_dump(mode="json"), "token": secrets.token, "seeds": secrets.seeds}
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, OWNER_ONLY)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            json.dump(content, opened, indent=1)
            opened.flush()
            os.fsync(opened.fileno())
        draft.replace(file)
    except OSError as exc:
        raise OperatorError(f"{file}: cannot be written: {exc.strerror}; set GRPO_HOME to another") from exc


def recall(file: Path) -> tuple[SwarmSpec, SwarmSecrets] | None:
    """What ``remember`` wrote, or None. Raises OperatorError for a file that holds anything else; no part of
    it is quoted, for it holds secrets."""
    try:
        content = json.loads(file.read_bytes())
        swarm = SwarmSpec.model_validate_json(json.dumps(content["swarm"]))
        token, seeds = content["token"], content["seeds"]
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise OperatorError(f"{file}: cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, ValidationError) as exc:
        raise OperatorError(
            f"{file} is not what this version wrote; `grpo-node jobs down` the run, then remove the file"
        ) from exc
    return swarm, SwarmSecrets(str(token), {str(slot): str(seed) for slot, seed in seeds.items()})
