"""The runtime: signals drain, haste exits, and what ended a process is told in one way."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from node.runtime import ThreadOffload, explain, flatten
from protocol.errors import (
    BrokerAbsent,
    BusError,
    FencedError,
    GrpoError,
    OperatorError,
    StoreDenied,
    StoreUnavailable,
)

PROGRAM = """
import asyncio, signal, sys
from node.runtime import run_until_stopped
from node.telemetry import set_up_logs
from protocol.errors import OperatorError
set_up_logs("info")

def say(text):
    print(text, flush=True)

{main}

sys.exit(run_until_stopped(main, grace_s={grace_s}))
"""

DRAINS = """
async def main(stop):
    say("ready")
    await stop.wait()
    say("finished what was in hand")
"""

NEVER_ENDS = """
async def main(stop):
    say("ready")
    try:
        await stop.wait()
        say("draining")
        await asyncio.Event().wait()
    finally:
        say("cancelled")
"""

CRASHES = """
async def main(stop):
    async with asyncio.TaskGroup() as group:
        group.create_task(work())

async def work():
    {fault}
"""

Program = subprocess.Popen[str]
Start = Callable[..., Program]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program around a ``main``; the test ends with it dead."""
    started: list[Program] = []

    def start(main: str, grace_s: float = 60.0) -> Program:
        command = [sys.executable, "-c", PROGRAM.format(main=main, grace_s=grace_s)]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(program)
        return program

    yield start
    for program in started:
        program.kill()
        program.communicate(timeout=10)


def line_of(program: Program) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def ended(program: Program) -> tuple[int, str, str]:
    out, err = program.communicate(timeout=10)
    return program.returncode, out.strip(), err.strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_work_finish_and_the_process_ends_well(start: Start, number: signal.Signals):
    program = start(DRAINS)
    assert line_of(program) == "ready"
    program.send_signal(number)
    code, out, err = ended(program)
    assert (code, out) == (0, "finished what was in hand")
    assert "draining" in err
    assert number.name in err


def test_the_second_signal_exits_at_once(start: Start):
    program = start(NEVER_ENDS)
    assert line_of(program) == "ready"
    program.send_signal(signal.SIGINT)
    assert line_of(program) == "draining"
    program.send_signal(signal.SIGINT)
    code, out, _ = ended(program)
    assert (code, out) == (130, "")


def test_work_that_outlives_the_grace_time_is_cancelled(start: Start):
    program = start(NEVER_ENDS, grace_s=0.05)
    assert line_of(program) == "ready"
    program.send_signal(signal.SIGTERM)
    code, out, err = ended(program)
    assert (code, out) == (0, "draining\ncancelled")
    assert "grace_time_over" in err


def test_work_that_ends_by_itself_ends_the_process(start: Start):
    assert ended(start("async def main(stop):\n    say('done')"))[:2] == (0, "done")


def test_a_mistake_of_a_person_is_one_line_and_code_2(start: Start):
    code, out, err = ended(start(CRASHES.format(fault="raise OperatorError('no such run; create it')")))
    assert (code, out, err) == (2, "", "grpo-node: no such run; create it")


def test_a_fault_of_our_own_is_a_traceback_and_code_1(start: Start):
    code, _, err = ended(start(CRASHES.format(fault="1 / 0")))
    assert code == 1
    assert "node_crashed" in err
    assert "Traceback" in err
    assert "ZeroDivisionError" in err


@pytest.mark.parametrize("kind", [OperatorError, FencedError, StoreDenied])
def test_what_a_person_must_change_is_told_in_one_line(
    kind: type[GrpoError], capsys: pytest.CaptureFixture[str]
):
    assert explain(kind("do this")) == 2
    nested = ExceptionGroup("outer", [ExceptionGroup("inner", [kind("do that"), kind("or this")])])
    assert explain(nested) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "grpo-node: do this\ngrpo-node: do that\n")


def test_what_a_person_must_change_goes_before_what_only_failed(capsys: pytest.CaptureFixture[str]):
    assert explain(ExceptionGroup("both", [BrokerAbsent("away"), OperatorError("do this")])) == 2
    assert capsys.readouterr().err == "grpo-node: do this\n"


def test_a_bug_does_not_hide_behind_the_mistake_of_a_person(capsys: pytest.CaptureFixture[str]):
    assert explain(ExceptionGroup("both", [OperatorError("do this"), ZeroDivisionError("our bug")])) == 2
    captured = capsys.readouterr()
    assert captured.err == "grpo-node: do this\n"
    assert "our bug" in captured.out


@pytest.mark.parametrize("kind", [BusError, StoreUnavailable])
def test_a_failed_broker_or_store_is_named_without_a_traceback_and_is_code_1(
    kind: type[GrpoError], capsys: pytest.CaptureFixture[str]
):
    assert explain(ExceptionGroup("one", [kind("no answer")])) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"grpo-node: {kind.__name__}: no answer\n")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_interruption_is_code_130_and_no_word(
    kind: type[BaseException], capsys: pytest.CaptureFixture[str]
):
    assert explain(kind()) == 130
    assert explain(BaseExceptionGroup("one", [kind()])) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_the_leaves_of_nested_groups_are_found_in_order():
    a, b, c = ValueError("a"), KeyError("b"), TypeError("c")
    assert flatten(ExceptionGroup("o", [a, ExceptionGroup("i", [b]), c])) == [a, b, c]
    assert flatten(a) == [a]


async def test_heavy_work_runs_in_order_on_one_thread_of_its_own():
    offload = ThreadOffload("heavy")
    names = [await offload(lambda: threading.current_thread().name) for _ in range(2)]
    assert names[0].startswith("heavy")
    assert names[0] == names[1]
    with pytest.raises(ZeroDivisionError):
        await offload(lambda: 1 // 0)
    await offload.close()
