"""Opens the task set that a TasksSpec names: reads, shuffles, splits, and proves what it read by a digest."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

import structlog

from protocol.errors import OperatorError
from protocol.runspec import TasksSpec
from roles.tasks import environment_rows, hf_dataset, jsonl, reasoning_gym, sort_digits
from roles.tasks.taskset import Row, Skipped, TaskSet

SORT_DIGITS = "builtin:sort-digits"
FORMS = (
    f"{SORT_DIGITS}, <file>.jsonl, hf:<dataset>[/<config>], reasoning-gym:<dataset> "
    "or verifiers:<environment>"
)

log = structlog.get_logger()


def open_tasks(spec: TasksSpec, seed: int, base_dir: Path) -> TaskSet:
    """The same rows in the same order on every peer that has the same source.

    All usable rows are shuffled by ``seed`` and cut to ``rows_max``; the first ``held_out`` become the
    held-out split and the rest is for training, less any row whose prompt is held out. Relative paths
    start at ``base_dir``. Raises OperatorError if the source cannot be read, has no usable row or fewer
    than ``held_out`` + 1, if a row is bad and ``strict`` is set, or if ``spec.digest`` says otherwise.
    """
    found, skipped = _sort_out(_read(spec, seed, base_dir), strict=spec.strict)
    if not found:
        why = f": {describe_skipped(skipped)}" if skipped else ""
        raise OperatorError(f"tasks.source {spec.source} has no usable row{why}")
    rows = _shuffled(found, seed)[: spec.rows_max]
    if spec.held_out >= len(rows):
        raise OperatorError(
            f"tasks.held_out is {spec.held_out} but {spec.source} gives only {len(rows)} rows: lower held_out"
        )
    held_out = tuple(rows[: spec.held_out])
    train, overlap = _without_prompts_of(held_out, rows[spec.held_out :])
    if not train:
        raise OperatorError(f"tasks.source {spec.source}: every row has a prompt that is held out")
    skipped.extend(overlap)
    if skipped:
        log.warning("rows_skipped", source=spec.source, skipped=len(skipped), first=describe_skipped(skipped))
    digest = rows_digest(train, held_out)
    if spec.digest not in (None, digest):
        raise OperatorError(
            f"tasks.source {spec.source} is not what the run was created with: "
            f"its rows have digest {digest}, the run says {spec.digest}"
        )
    return TaskSet(train, held_out, tuple(skipped), digest)


def describe_skipped(skipped: Sequence[Skipped], shown: int = 3) -> str:
    """One line for a person: how many rows were skipped, and why the first ones were."""
    parts = [f"{row.origin}: {row.reason}" for row in skipped[:shown]]
    more = [f"and {len(skipped) - shown} more"] if len(skipped) > shown else []
    return f"{len(skipped)} skipped ({'; '.join(parts + more)})"


def rows_digest(train: Sequence[Row], held_out: Sequence[Row]) -> str:
    """sha256 over prompts (and system prompts of their own) and answers in order, and where the split is."""
    digest = hashlib.sha256()
    for split in (held_out, train):
        digest.update(f"{len(split)}\n".encode())
        for row in split:
            own = [] if row.system_prompt is None else [row.system_prompt]
            digest.update(json.dumps([row.prompt, row.answer, *own]).encode())
    return digest.hexdigest()


def _read(spec: TasksSpec, seed: int, base_dir: Path) -> Iterable[Row | Skipped]:
    scheme, _, name = spec.source.partition(":")
    if spec.source == SORT_DIGITS:
        return sort_digits.read()
    if spec.source.endswith(".jsonl"):
        return jsonl.read(base_dir / Path(spec.source).expanduser(), spec)
    if scheme == "hf" and name:
        return hf_dataset.read(name, spec, base_dir)
    if scheme == "reasoning-gym" and name:
        return reasoning_gym.read(name, spec, seed)
    if scheme == "verifiers" and name:
        return environment_rows.read(name, spec)
    known = [SORT_DIGITS, *(f"{kind}:{name}" for kind in ("hf", "reasoning-gym", "verifiers"))]
    near = get_close_matches(spec.source, known, n=1)
    hint = f"did you mean {near[0]}? " if near and name else ""
    raise OperatorError(f"tasks.source {spec.source!r} is no task set; {hint}write {FORMS}")


def _sort_out(rows: Iterable[Row | Skipped], *, strict: bool) -> tuple[list[Row], list[Skipped]]:
    found: list[Row] = []
    skipped: list[Skipped] = []
    for row in rows:
        if isinstance(row, Row):
            found.append(row)
        elif strict:
            raise OperatorError(f"tasks: {row.origin}: {row.reason} (tasks.strict refuses bad rows)")
        else:
            skipped.append(row)
    return found, skipped


def _shuffled(rows: Sequence[Row], seed: int) -> list[Row]:
    """Sorted by random keys: ``random()`` is the same on every Python, ``shuffle`` promises nothing."""
    rng = random.Random(seed)
    keys = [rng.random() for _ in rows]
    return [rows[i] for i in sorted(range(len(rows)), key=keys.__getitem__)]


def _without_prompts_of(
    held_out: Sequence[Row], rows: Sequence[Row]
) -> tuple[tuple[Row, ...], list[Skipped]]:
    """Files and generators repeat themselves; a repeated prompt must not be in both splits."""
    held = {row.prompt for row in held_out}
    train = tuple(row for row in rows if row.prompt not in held)
    return train, [Skipped(row.origin, "the same prompt is held out") for row in rows if row.prompt in held]
