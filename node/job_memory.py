"""What the launching machine remembers of its jobs: settings and secrets, for its owner only."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from node.job_plan import SwarmSecrets, SwarmSpec
from node.private_file import write_private
from protocol.errors import OperatorError

_SECRETS = TypeAdapter(SwarmSecrets)


def remember(file: Path, swarm: SwarmSpec, secrets: SwarmSecrets) -> None:
    """Write both, whole or not at all, and the owner's login beside them: ``NAME.creds``.

    Raises OperatorError if the place cannot be written.
    """
    from node.job_logins import operator_login, read_keys

    content = {"swarm": swarm.model_dump(mode="json"), **asdict(secrets)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as exc:
        raise OperatorError(f"{file}: cannot be written: {exc.strerror}; set GRPO_HOME to another") from exc
    write_private(file, json.dumps(content, indent=1), durable=True)
    write_private(file.with_suffix(".creds"), operator_login(read_keys(secrets.keys)))


def recall(file: Path) -> tuple[SwarmSpec, SwarmSecrets] | None:
    """What ``remember`` wrote, or None. Raises OperatorError for a file that holds anything else; no part of
    it is quoted, for it holds secrets."""
    try:
        content = json.loads(file.read_bytes())
        swarm = SwarmSpec.model_validate_json(json.dumps(content["swarm"]))
        secrets = _SECRETS.validate_python({name: content[name] for name in ("keys", "seeds", "invitations")})
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise OperatorError(f"{file}: cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, ValidationError) as exc:
        raise OperatorError(
            f"{file} is not what this version wrote; `grpo-node jobs down` the run, then remove the file"
        ) from exc
    return swarm, secrets
