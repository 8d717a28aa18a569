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
    print('{"value": 99.0, "unscorable": null, "note": ""}' * 1000, flush=True)  # noqa: T201 that is its fault
    return 1.0


def obedient(completion: str, answer: str | None) -> float:
    """Does what the completion says: one function that every fault can be sent to."""
    command, _, argument = completion.partition(" ")
    return COMMANDS[command](argument)


def power(argument: str) -> float:
    """One C call that holds the interpreter."""
    return float(9**9**9 > 0)


def sleep(argument: str) -> float:
    time.sleep(60)
    return 1.0


def spin(argument: str) -> float:
    while True:
        pass


def tell_and_sleep(argument: str) -> float:
    Path(argument).write_text("started")
    return sleep("")


def tell_and_power(argument: str) -> float:
    Path(argument).write_text("started")
    return power("")


def die(argument: str) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


def die_once(argument: str) -> float:
    if not Path(argument).exists():
        Path(argument).touch()
        die("")
    return 1.0


def start_a_child(argument: str) -> float:
    child = subprocess.Popen(["sleep", "60"])
    Path(argument).write_text(str(child.pid))
    return sleep("")


def leave(argument: str) -> float:
    raise SystemExit(0)


def fail(argument: str) -> float:
    raise ValueError("first line\nsecond line")


def slow(argument: str) -> float:
    """Takes longer than patience lasts, and then has a score."""
    time.sleep(1.2)
    return 7.0


def rank(completions: list[str], answer: str | None, **metadata: Any) -> list[float | None]:
    """How many of the group are shorter, unless one of them asks for trouble."""
    if completions[-1] in COMMANDS:
        obedient(completions[-1], answer)
    if completions[-1] == "short":
        return [1.0]
    ranks = [float(sum(len(other) < len(one) for other in completions)) for one in completions]
    return [*ranks[:-1], None] if completions[-1] == "none" else list(ranks)


COMMANDS = {
    "child": start_a_child,
    "die": die,
    "die-once": die_once,
    "eat": lambda _: float(len(b"x" * (1 << 40))),
    "exit": leave,
    "pid": lambda _: float(os.getpid()),
    "power": power,
    "raise": fail,
    "sleep": sleep,
    "slow": slow,
    "spin": spin,
    "tell-and-power": tell_and_power,
    "tell-and-sleep": tell_and_sleep,
}
