"""System calls that Python does not have, through libc: names, errors as OSError, nothing else."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

AVAILABLE = sys.platform == "linux" and platform.machine() in {"x86_64", "aarch64"}
"""The numbers below are those of these two; elsewhere nothing of this package works."""

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWNET, CLONE_THREAD = 0x10000000, 0x40000000, 0x00010000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2

_PIVOT_ROOT, _CAPSET = (155, 126) if platform.machine() == "x86_64" else (41, 91)
_CAPABILITY_VERSION_3 = 0x20080522
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_libc = ctypes.CDLL(None, use_errno=True) if AVAILABLE else None


def syscall(number: int, *arguments: int | bytes | ctypes.Structure | None) -> int:
    """A raw system call; structures are passed by reference. Raises OSError."""
    if _libc is None:
        raise OSError("this platform has no such system calls")
    given = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else _word(a) for a in arguments]
    result = _libc.syscall(ctypes.c_long(number), *given)
    return _checked(int(result))


def prctl(option: int, first: int, second: ctypes.Structure | int = 0) -> None:
    """``prctl(2)`` with two arguments. Raises OSError."""
    if _libc is None:
        raise OSError("this platform has no prctl")
    given = ctypes.byref(second) if isinstance(second, ctypes.Structure) else ctypes.c_ulong(second)
    _checked(_libc.prctl(option, ctypes.c_ulong(first), given, ctypes.c_ulong(0), ctypes.c_ulong(0)))


def unshare(flags: int) -> None:
    """Enter new namespaces. Raises OSError."""
    assert _libc is not None
    _checked(_libc.unshare(flags))


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """``mount(2)``. Raises OSError."""
    assert _libc is not None
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _checked(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]))


def set_read_only(tree: str) -> None:
    """Make a whole tree of mounts read-only and without set-user-id (Linux 5.12). Raises OSError."""

    class Attributes(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))

    wanted = Attributes(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    syscall(_MOUNT_SETATTR, _AT_FDCWD, tree.encode(), _AT_RECURSIVE, wanted, ctypes.sizeof(wanted))


def enter_root(directory: str) -> None:
    """Make ``directory``, a mount, the root, and let go of the old one. Raises OSError."""
    assert _libc is not None
    os.chdir(directory)
    syscall(_PIVOT_ROOT, b".", b".")
    _checked(_libc.umount2(b".", MNT_DETACH))
    os.chdir("/")


def drop_capabilities() -> None:
    """Give up all capabilities, which a process has in a user namespace that it made. Raises OSError."""

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    class Nothing(ctypes.Structure):
        _fields_ = (("words", ctypes.c_uint32 * 6),)

    syscall(_CAPSET, Header(_CAPABILITY_VERSION_3, 0), Nothing())


def _word(value: int | bytes | ctypes.Structure | None) -> ctypes.c_long | bytes | None:
    return ctypes.c_long(value) if isinstance(value, int) else value  # type: ignore[return-value]


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
