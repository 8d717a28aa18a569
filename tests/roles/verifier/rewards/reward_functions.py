"""Reward functions as users write them, good and bad; imported by workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

TUPLE = (1, 2)


def length(completion: str, answer: str | None) -> float:
    return float(len(completion))


async def slowly_right(completion: str, answer: str | None) -> bool:
    await asyncio.sleep(0)
    return completion == answer


def level(completion: str, answer: str | None, level: int) -> float:
    return level / 10


def everything(completion: str, answer: str | None, **metadata: Any) -> int:
    return len(metadata)


def missing_column(completion: str, answer: str | None, **metadata: Any) -> float:
    return float(metadata["difficulty"])


def nothing(completion: str, answer: str | None) -> None:
    return None


def not_a_number(completion: str, answer: str | None) -> float:
    return float("nan")


def chatty(completion: str, answer: str | None) -> float:
    print('{"value": 99.0, "unscorable": null, "note": ""}' * 1000, flush=True)
    return 1.0


def obedient(completion: str, answer: str | None) -> float:
    """Does what the completion says: one function that every fault can be sent to."""
    command, _, argument = completion.partition(" ")
    if command == "sleep":
        time.sleep(float(argument))
    elif command == "spin":
        while True:
            pass
    elif command == "power":
        return float(9**9**9 > 0)  # one C call that holds the interpreter
    elif command == "eat":
        return float(len(b"x" * (1 << 40)))
    elif command == "exit":
        raise SystemExit(int(argument))
    elif command == "die-once":
        if not Path(argument).exists():
            Path(argument).touch()
            os.kill(os.getpid(), signal.SIGSEGV)
    elif command == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif command == "child":
        child = subprocess.Popen(["sleep", "60"])
        Path(argument).write_text(str(child.pid))
        time.sleep(60)
    elif command == "raise":
        raise ValueError("first line\nsecond line")
    elif command == "pid":
        return float(os.getpid())
    return 1.0
