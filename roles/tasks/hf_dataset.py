"""The task set in a Hugging Face dataset: by name on the Hub, or a local copy (saved folder or Parquet)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from protocol.errors import OperatorError
from protocol.runspec import TasksSpec
from roles.tasks.record import row_from
from roles.tasks.taskset import Row, Skipped

INSTALL = "pip install 'grpo-node[datasets]'"

Table = Iterable[Mapping[str, Any]]


def read(name: str, spec: TasksSpec, base_dir: Path) -> Iterator[Row | Skipped]:
    """Rows of ``spec.split`` in dataset order.

    ``name`` is ``<dataset>[/<config>][@<revision>]`` or a path that begins with ``.``, ``/`` or ``~``.
    Raises OperatorError if the library, the dataset, the split or a column is missing.
    """
    table = _open(name, spec.split, base_dir)
    columns: list[str] | None = getattr(table, "column_names", None)
    for column in (spec.prompt_column, spec.answer_column):
        if columns is not None and column not in columns:
            raise OperatorError(
                f"tasks: hf:{name} has no column {column!r}, only {', '.join(columns)}: "
                "set tasks.prompt_column and tasks.answer_column"
            )
    for index, record in enumerate(table):
        yield row_from(record, spec, f"{name} {spec.split} row {index}")


def _open(name: str, split: str, base_dir: Path) -> Table:
    try:
        import datasets
    except ImportError as exc:
        raise OperatorError(f"tasks.source hf:{name} needs the datasets library: {INSTALL}") from exc
    try:
        if name.startswith((".", "/", "~")):
            return _open_local(base_dir / Path(name).expanduser(), split)
        dataset, config, revision = parse_name(name)
        table: Table = datasets.load_dataset(dataset, config, split=split, revision=revision)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as exc:
        if isinstance(exc, OperatorError):
            raise
        if isinstance(exc, ConnectionError):
            raise OperatorError(
                f"tasks.source hf:{name}: not in the cache, and the Hub is out of reach"
            ) from exc
        first_line = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise OperatorError(f"tasks.source hf:{name} split {split!r}: {first_line}") from exc
    return table


def _open_local(path: Path, split: str) -> Table:
    import datasets

    if not path.exists():
        raise OperatorError(f"tasks.source: there is no file or directory {path}")
    if path.suffix == ".parquet":
        # Streaming reads the file where it lies; otherwise it is first copied into the user's cache.
        file: Table = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        return file
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        saved = datasets.load_from_disk(str(path))
        table: Table = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        return table
    folder: Table = datasets.load_dataset(str(path), split=split)
    return folder


def parse_name(name: str) -> tuple[str, str | None, str | None]:
    """Dataset id, config and revision of ``[<owner>/]<dataset>[/<config>][@<revision>]``."""
    path, _, revision = name.partition("@")
    parts = path.split("/")
    if not all(parts) or len(parts) > 3:  # noqa: PLR2004  # owner, dataset, config
        raise OperatorError(f"tasks.source hf:{name}: write hf:<owner>/<dataset>[/<config>][@<revision>]")
    return "/".join(parts[:2]), (parts[2] if parts[2:] else None), revision or None
