"""Child processes: what they print is kept, they end in order, and they end with their parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from node.children import Child, kill, last_words, start_child, stop_children
from tests.contract.brokers import eventually

WAITS = "import signal; print('ready', flush=True); signal.pause()"
IS_DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS
TELLS = "import os; print(os.environ['WORD'], os.getsid(0) == os.getpid()); raise SystemExit(3)"

IS_A_PARENT = """
import asyncio, sys
from pathlib import Path
from node.children import start_child

async def main():
    child = await start_child("child", [sys.executable, "-c", sys.argv[2]], {}, Path(sys.argv[1]))
    print(child.process.pid, flush=True)
    await child.process.wait()

asyncio.run(main())
"""

Start = Callable[..., Awaitable[Child]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start a Python program as a child; all of them are gone after the test."""
    started: list[Child] = []

    async def start(program: str, **environ: str) -> Child:
        log = tmp_path / "logs" / f"{len(started)}.log"
        child = await start_child(str(len(started)), [sys.executable, "-c", program], environ, log)
        started.append(child)
        return child

    yield start
    for child in started:
        kill(child)
        await child.process.wait()


async def ready(child: Child) -> None:
    async def has_said_so() -> bool:
        return "ready" in child.log.read_text()

    await eventually(has_said_so)


async def test_a_child_has_its_environment_a_session_of_its_own_and_a_log(start: Start):
    child = await start(TELLS, WORD="hello")
    assert await child.process.wait() == 3
    assert not child.alive
    assert child.log.read_text() == "hello True\n"


async def test_stopping_lets_children_end_and_kills_those_that_do_not(start: Start):
    children = [await start(WAITS), await start(IS_DEAF), await start("pass")]
    for child in children[:2]:
        await ready(child)
    await children[2].process.wait()
    await stop_children(children, grace_s=0.2)
    codes = [child.process.returncode for child in children]
    assert codes == [-signal.SIGTERM, -signal.SIGKILL, 0]


async def test_stopping_nobody_is_nothing(start: Start):
    await stop_children([], grace_s=60)
    child = await start("pass")
    await child.process.wait()
    await stop_children([child], grace_s=60)
    assert child.process.returncode == 0


async def test_a_killed_child_is_dead_and_killing_the_dead_is_harmless(start: Start):
    child = await start(IS_DEAF)
    await ready(child)
    kill(child)
    assert await child.process.wait() == -signal.SIGKILL
    kill(child)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_children_end_with_a_parent_that_is_killed(tmp_path: Path):
    command = [sys.executable, "-c", IS_A_PARENT, str(tmp_path / "log"), WAITS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            assert select.select([child], [], [], 10.0)[0], "the child outlives its parent"
        finally:
            os.close(child)


def test_last_words_are_the_end_of_a_log_whatever_is_in_it(tmp_path: Path):
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n" % i for i in range(10)) + b"\xff end")
    assert last_words(log, lines=3) == "line 8\nline 9\n\N{REPLACEMENT CHARACTER} end"
    assert len(last_words(log).splitlines()) == 8
    assert last_words(tmp_path / "none") == ""
