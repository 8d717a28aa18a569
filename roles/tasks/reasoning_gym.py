"""Generated task sets of reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760)."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from protocol.errors import OperatorError
from protocol.runspec import TasksSpec
from roles.tasks.record import row_from
from roles.tasks.taskset import Row, Skipped

INSTALL = "pip install 'grpo-node[reasoning-gym]'"
ROWS_DEFAULT = 2000

ANY_ANSWER = "(whatever its scorer accepts)"
"""The answer of a problem that has many and names none."""


def read(names: str, spec: TasksSpec, seed: int) -> Iterator[Row | Skipped]:
    """``rows_max`` problems (2000 when it is not set) that depend on names and seed alone.

    ``names`` are datasets, separated by commas; each gives its even share. Raises OperatorError if the
    library is missing or has no dataset of that name.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as exc:
        raise OperatorError(f"tasks.source reasoning-gym:{names} needs a library: {INSTALL}") from exc
    chosen = names.split(",")
    for name in chosen:
        if name not in DATASETS:
            near = ", ".join(get_close_matches(name, DATASETS)) or "see `python -m pydoc reasoning_gym`"
            raise OperatorError(f"tasks.source: reasoning-gym has no dataset {name!r}; did you mean: {near}")
    columns = spec.model_copy(update={"prompt_column": "question", "answer_column": "answer"})
    each, rest = divmod(spec.rows_max or ROWS_DEFAULT, len(chosen))
    for position, name in enumerate(chosen):
        if not (size := each + (position < rest)):
            continue
        for index, problem in enumerate(reasoning_gym.create_dataset(name, size=size, seed=seed)):
            record = {
                **problem["metadata"],
                "source_dataset": name,
                "question": problem["question"],
                "answer": ANY_ANSWER if problem["answer"] is None else problem["answer"],
            }
            yield row_from(record, columns, f"reasoning-gym:{name} {index}")
