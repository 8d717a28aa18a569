"""Confinement in two moves: ``isolate`` a process that will start others, then ``Lock`` each one for good.

    isolate   own user, mount, network and IPC namespaces: no network, a root of libraries only, read-only
    Lock      an empty scratch directory, limits, Landlock, seccomp: after this nothing is given back

What the kernel refuses (or another system than Linux lacks) is left out and told: ``Protection`` names what
holds. docs/rewards.md says what each of them protects against.
"""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from roles.sandbox import landlock
from roles.sandbox import linux_calls as linux
from roles.sandbox.seccomp import Filter
from roles.sandbox.view import DEVICES, SCRATCH, TEMPORARY


class Protection(StrEnum):
    """What holds a confined process."""

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    SECCOMP = "seccomp"
    LIMITS = "limits"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one process by ``setrlimit``; None leaves what is set."""

    cpu_s: int | None = None
    memory_bytes: int | None = None
    file_bytes: int = 16 << 20
    scratch_bytes: int = 64 << 20
    files: int = 256
    processes: int | None = None
    """Counts all processes of the user, and none of root's: seccomp is what forbids new ones."""


_ISOLATED = (
    linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
)
_NOBODY = 65534
_STAGE = "/proc"
"""A directory that every Linux has and no library lies in: the new root is built over it."""


def isolate(readable: Sequence[str]) -> frozenset[Protection]:
    """Leave the network and the file system behind. Only a process of one thread can.

    Its user becomes ``nobody`` to itself, so a program that it starts has no rights over the namespaces.
    """
    if not linux.AVAILABLE:
        return frozenset()
    user, group = os.getuid(), os.getgid()
    try:
        linux.unshare(_ISOLATED)
    except OSError:  # forbidden by a sysctl, a container's seccomp or AppArmor
        return frozenset()
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{_NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{_NOBODY} {group} 1")
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    _build_root(readable)
    return frozenset({Protection.NAMESPACES})


def _build_root(readable: Sequence[str]) -> None:
    linux.mount("tmpfs", _STAGE, "tmpfs", linux.MS_NOSUID, "mode=755,size=1m")
    for path in (*readable, *DEVICES):
        _show(path)
    _place(SCRATCH).mkdir(exist_ok=True)
    if not _place(TEMPORARY).exists():  # it does where Python itself is installed below it
        _place(TEMPORARY).symlink_to(SCRATCH)
    linux.set_read_only(_STAGE)
    _fresh_scratch(str(_place(SCRATCH)), Limits().scratch_bytes)
    linux.enter_root(_STAGE)
    os.chdir(SCRATCH)


def _show(path: str) -> None:
    """Make ``path`` appear in the new root."""
    place = _place(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    if Path(path).is_symlink() and Path(path).parent == Path("/"):
        place.symlink_to(Path(path).readlink())
        return
    if stat.S_ISDIR(os.stat(path).st_mode):  # noqa: PTH116
        place.mkdir(exist_ok=True)
    else:
        place.touch(exist_ok=True)
    linux.mount(path, str(place), None, linux.MS_BIND | linux.MS_REC)


def _place(path: str) -> Path:
    return Path(_STAGE) / path.lstrip("/")


def _fresh_scratch(where: str, size: int) -> None:
    linux.mount("tmpfs", where, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, f"mode=1777,size={size}")


class Lock:
    """The second move, prepared while there is time and put on between fork and exec, or by a worker."""

    def __init__(
        self,
        readable: Sequence[str],
        limits: Limits,
        *,
        isolated: bool,
        processes: bool = False,
        scratch: str = SCRATCH,
    ) -> None:
        """``isolated`` tells that ``isolate`` succeeded; without it ``scratch`` is the caller's directory."""
        self._readable = (*readable, "/dev/urandom", "/dev/random", "/dev/zero")
        self._limits = limits
        self._isolated = isolated
        self._scratch = SCRATCH if isolated else scratch
        self._landlock = linux.AVAILABLE and landlock.abi() > 0
        self._filter = Filter(processes=processes) if linux.AVAILABLE else None

    @property
    def protections(self) -> frozenset[Protection]:
        """What ``put_on`` adds here."""
        return frozenset(
            {Protection.LIMITS}
            | ({Protection.LANDLOCK} if self._landlock else set())
            | ({Protection.SECCOMP} if self._filter else set())
        )

    def put_on(self) -> None:
        """Confine this process and all that it starts. Raises OSError: then nothing untrusted may run."""
        if self._isolated:
            linux.unshare(linux.CLONE_NEWNS)
            _fresh_scratch(SCRATCH, self._limits.scratch_bytes)
            linux.drop_capabilities()
        os.chdir(self._scratch)
        _limit(self._limits)
        if self._landlock:
            landlock.restrict(self._readable, (self._scratch, "/dev/null"))
        if self._filter is not None:
            self._filter.install()


def _limit(limits: Limits) -> None:
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_NPROC, limits.processes),
    ):
        if value is not None:
            hard = resource.getrlimit(kind)[1]
            kept = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (kept, kept))
