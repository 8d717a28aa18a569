"""Landlock: which files a process may read and write, without any privilege (``man 7 landlock``)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from roles.sandbox.linux_calls import PR_SET_NO_NEW_PRIVS, prctl, syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1

_READ = 0b1101
"""Execute, read a file, list a directory."""
_WRITES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights on files that a kernel of at least this ABI knows."""
_OF_FILES = 0b1000000000000111 | 1 << 14
"""Rights that a rule about a file, and not a directory, may name."""
_NET_SINCE, _SCOPE_SINCE = 4, 6
_BIND_AND_CONNECT = 0b11
_SIGNALS_AND_ABSTRACT_SOCKETS = 0b11


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("directory", ctypes.c_int32))


def abi() -> int:
    """The kernel's version of Landlock; 0 without it."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Nothing but these paths, for good; no TCP and no signals to others where the kernel knows that.

    Paths that do not exist are skipped. Raises OSError where there is no Landlock.
    """
    version = abi()
    everything = max((rights for since, rights in _WRITES.items() if since <= version), default=0)
    ruleset = _Ruleset(
        everything,
        _BIND_AND_CONNECT if version >= _NET_SINCE else 0,
        _SIGNALS_AND_ABSTRACT_SOCKETS if version >= _SCOPE_SINCE else 0,
    )
    size = 8 * (1 + (version >= _NET_SINCE) + (version >= _SCOPE_SINCE))
    handle = syscall(_CREATE_RULESET, ruleset, size, 0)
    try:
        for path in readable:
            _allow(handle, path, _READ)
        for path in writable:
            _allow(handle, path, everything)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        syscall(_RESTRICT_SELF, handle, 0)
    finally:
        os.close(handle)


def _allow(handle: int, path: str, rights: int) -> None:
    try:
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        of_file = not os.path.isdir(path)  # noqa: PTH112 also used between fork and exec, where less is better
        syscall(_ADD_RULE, handle, _PATH_BENEATH, _Beneath(rights & _OF_FILES if of_file else rights, at), 0)
    finally:
        os.close(at)
