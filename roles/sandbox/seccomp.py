"""A seccomp filter: system calls that code under test has no business with fail (``man 2 seccomp``).

It is a list of what is denied. The kernel's namespaces and Landlock decide what a process may reach; the
filter takes away what would undo them or reach other processes: mounts, namespaces, signals, tracing,
sockets, leaving the process group, and, with ``processes=False``, new processes. Threads stay.
"""

from __future__ import annotations

import ctypes
import errno
import platform

from roles.sandbox.linux_calls import (
    CLONE_THREAD,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_SECCOMP,
    SECCOMP_MODE_FILTER,
    prctl,
)

_X86_64 = platform.machine() == "x86_64"
_AUDIT_ARCH = 0xC000003E if _X86_64 else 0xC00000B7
_X32_BIT = 0x40000000
_CLONE = 56 if _X86_64 else 220
_CLONE3 = 435

_EVERYWHERE = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsmount": 432, "pidfd_open": 434, "pidfd_getfd": 438, "mount_setattr": 442,
}  # fmt: skip
_ON_X86_64 = {
    "socket": 41, "kill": 62, "ptrace": 101, "setpgid": 109, "setsid": 112, "rt_sigqueueinfo": 129,
    "pivot_root": 155, "chroot": 161, "mount": 165, "umount2": 166, "init_module": 175, "tkill": 200,
    "tgkill": 234, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
    "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "setns": 308, "process_vm_readv": 310,
    "process_vm_writev": 311, "finit_module": 313, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
_ON_AARCH64 = {
    "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "unshare": 97, "kexec_load": 104,
    "init_module": 105, "ptrace": 117, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138,
    "setpgid": 154, "setsid": 157, "socket": 198, "add_key": 217, "request_key": 218, "keyctl": 219,
    "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "setns": 268, "process_vm_readv": 270,
    "process_vm_writev": 271, "finit_module": 273, "bpf": 280, "userfaultfd": 282,
}  # fmt: skip
_FORKS = (57, 58) if _X86_64 else ()
"""``fork`` and ``vfork``; aarch64 has neither."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("yes", ctypes.c_uint8),
        ("no", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


class Filter:
    """A program for the kernel, built before it is needed: ``install`` allocates nothing of note."""

    def __init__(self, *, processes: bool) -> None:
        """``processes`` allows new processes."""
        code = _instructions(processes=processes)
        self._code = (_Instruction * len(code))(*(_Instruction(*one) for one in code))
        self._program = _Program(len(code), self._code)

    def install(self) -> None:
        """Hold this process and all its children to the filter, for good. Raises OSError."""
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, self._program)


def _instructions(*, processes: bool) -> list[tuple[int, int, int, int]]:
    code = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if _X86_64:
        code += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    denied = [*_EVERYWHERE.values(), *(_ON_X86_64 if _X86_64 else _ON_AARCH64).values()]
    for number in denied + ([] if processes else list(_FORKS)):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    # glibc falls back to clone, whose flags a filter can read.
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    if not processes:
        code += [
            (_EQUAL, 0, 3, _CLONE),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_ANY_BIT, 1, 0, CLONE_THREAD),
            (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        ]
    return [*code, (_RETURN, 0, 0, _ALLOW)]
