"""The template of a pool's workers: imports everything once, then forks a worker in milliseconds.

    python -m roles.verifier.rewards.template        (its standard input is a socket to the parent)

    → settings, pickled                 ← {"protections", "for_groups"} or {"error": "one line"}
    → fork + the worker's own socket    ← its process id
    → kill PID                          ← 0, once it is gone

It has one thread, scores nothing, and ends when its socket does. Workers that it forked see that their own
sockets end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import protocol
import roles
from protocol.errors import OperatorError
from protocol.runspec import RewardSpec
from roles.sandbox.confinement import Limits, Lock, isolate
from roles.sandbox.view import readable_paths
from roles.verifier.rewards.registry import Place, open_reward, user_modules
from roles.verifier.rewards.reward import GroupReward, Preparing, Reward
from roles.verifier.rewards.worker import Worker

COMMAND_BYTES_MAX = 64
_STATM = Path("/proc/self/statm")


def main() -> None:
    """Serve the parent until it goes."""
    control = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    settings = pickle.loads(_framed(control))  # noqa: S301 from the parent, who started us
    place = Place(settings["place"])
    sys.path[:] = settings["path"]
    os.chdir(settings["cwd"])
    own = [str(Path(package.__path__[0])) for package in (protocol, roles)]
    readable = readable_paths(own)
    statm = _STATM.open("rb", buffering=0) if _STATM.exists() else None
    protections = isolate(readable) if place.confined and place is not Place.LOADED else frozenset()
    specs = [RewardSpec.model_validate(spec) for spec in settings["rewards"]]
    try:
        rewards = [open_reward(spec, settings["arguments"], isolated=bool(protections)) for spec in specs]
    except OperatorError as exc:
        _reply(control, json.dumps({"error": str(exc)}))
        return
    for reward in rewards:
        if isinstance(reward, Preparing):
            reward.prepare()
    if place is Place.LOADED:
        readable = (*readable, *_folders(specs))
        protections = isolate(readable)  # refused by the kernel where loading has started threads
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        lock = Lock(readable, Limits(), isolated=bool(protections), scratch=scratch)
        if place.confined:
            protections |= lock.protections
        groups = [s.name for s, reward in zip(specs, rewards, strict=True) if isinstance(reward, GroupReward)]
        gc.freeze()  # what is imported is never collected, so its pages stay shared
        _reply(control, json.dumps({"protections": sorted(protections), "for_groups": groups}))
        _serve(control, specs, rewards, lock if place in {Place.LOCKED, Place.LOADED} else None, statm)


def _folders(specs: list[RewardSpec]) -> list[str]:
    """Where the modules of these rewards lie, which they may go on to import from."""
    files = [getattr(sys.modules.get(module), "__file__", None) for module in user_modules(specs)]
    return [str(Path(file).parent) for file in files if file]


def _serve(
    control: socket.socket,
    specs: list[RewardSpec],
    rewards: list[Reward | GroupReward],
    lock: Lock | None,
    statm: Any,
) -> None:
    while True:
        data, handles, _, _ = socket.recv_fds(control, COMMAND_BYTES_MAX, 1)
        if not data:
            return
        command, _, argument = data.decode().partition(" ")
        if command == "kill":
            _reply(control, str(_kill(int(argument))))
            continue
        address_space = _address_space_bytes(statm)
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            control.close()
            Worker(socket.socket(fileno=handles[0]), specs, rewards, address_space, lock).run()
            os._exit(0)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # whoever of the two comes first
        os.close(handles[0])
        _reply(control, str(pid))


def _kill(pid: int) -> int:
    """End a worker and everything in its process group. Its id stays its own until it is waited for here."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return 0


def _address_space_bytes(statm: Any) -> int:
    """Address space in use; 0 where the platform does not say, which leaves memory unlimited."""
    return int(os.pread(statm.fileno(), 200, 0).split()[0]) * resource.getpagesize() if statm else 0


def _framed(control: socket.socket) -> bytes:
    (size,) = struct.unpack("!I", control.recv(4, socket.MSG_WAITALL))
    return control.recv(size, socket.MSG_WAITALL)


def _reply(control: socket.socket, line: str) -> None:
    control.sendall(line.encode() + b"\n")


if __name__ == "__main__":
    main()
