"""What a run may use of this machine: decided by whoever runs the node, never by the run's owner.

A RunSpec comes from the broker. It may name a module to import, a directory with a model or adapters, a file
of tasks. Modules are imported only if this node's own command line names them. Files are opened only if they
belong to this node, or its operator came by a login that is trusted with them: a guest, who joined by an
invitation, is asked for each place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from protocol.errors import OperatorError, one_line
from protocol.runspec import RunSpec
from roles.tasks.environment import environment_module
from roles.verifier.rewards.registry import refuse_module, user_modules


@dataclass(frozen=True, slots=True)
class Consent:
    """What the operator allows."""

    guest: bool = False
    modules: tuple[str, ...] = ()
    """Modules that rewards, tools, users and environments may be imported from."""
    paths: tuple[Path, ...] = ()
    """Directories that a run may name, for guests."""

    def check(self, spec: RunSpec, roles: tuple[str, ...], base_dir: Path) -> None:
        """Raise OperatorError on the first thing that ``spec`` wants and nobody allowed; opens nothing."""
        for role in roles:
            for module, what in modules_of(spec, role).items():
                refuse_module(module, self.modules, what, role)
        if not self.guest:
            return
        self._check_path("model.ref", _local(spec.model.ref, base_dir))
        if {"learner", "verifier"} & set(roles):
            source = spec.tasks.source
            self._check_path("tasks.source", _local(source.removeprefix("hf:"), base_dir))
            for text in _texts(spec.tasks.arguments):
                self._check_path("tasks.arguments", _local(text, base_dir))
        if urlsplit(spec.store.url).scheme in {"", "file"}:
            self._check_path("store.url", Path(unquote(urlsplit(spec.store.url).path)))

    def _check_path(self, setting: str, path: Path | None) -> None:
        if path is None:
            return
        real = path.resolve()
        if not any(real.is_relative_to(allowed.resolve()) for allowed in self.paths):
            raise OperatorError(
                f"this run's owner wants {setting} {_shown(str(path))} of this machine; if that is meant so, "
                "allow it with: --allow-path DIRECTORY"
            )


def modules_of(spec: RunSpec, role: str) -> dict[str, str]:
    """Modules that a run imports on a node of this role, and what they are to it."""
    wanted: dict[str, str] = {}
    kind, _, name = spec.tasks.source.partition(":")
    if role in {"learner", "verifier"} and kind == "verifiers":
        wanted[environment_module(name)] = "the task set"
    if role == "verifier":
        wanted |= dict.fromkeys(user_modules(spec.rewards), "a reward")
    if role == "sampler" and spec.tools:
        wanted |= dict.fromkeys((name.partition(":")[0] for name in spec.tools.functions), "a tool")
    if role == "sampler" and spec.user:
        wanted.setdefault(spec.user.function.partition(":")[0], "the user")
    return wanted


def _texts(value: Any) -> Iterator[str]:
    """All texts in a table of arguments: an environment may take one for a path."""
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(part)


def _local(ref: str, base_dir: Path) -> Path | None:
    """The file or directory that a setting names, or None if it names something elsewhere."""
    path = base_dir / Path(ref).expanduser()
    looks_local = ref.startswith((".", "/", "~")) or ref.endswith((".jsonl", ".parquet"))
    try:
        return path if looks_local or path.exists() else None
    except OSError:  # a name that no file system has
        return None


def _shown(text: str) -> str:
    return one_line(text, 120)
