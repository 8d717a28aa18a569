"""The ``code`` reward: 1.0 when the last fenced block of a completion passes all tests of its row, else 0.0.

    this worker                                   a process per run, locked (sandbox/confinement.py)
    tests ─▶ expressions, input ────────────────▶ program, then each expression
    compare with what is wanted ◀── plain values ─┘  (what is wanted never goes there)

A run counts only if its end mark, a number that it was not told, comes after everything else: leaving early
passes nothing. Tests are read by ``code_tests.py``; the process runs ``code_driver.py``.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec
from roles.sandbox.confinement import Limits, Lock
from roles.sandbox.view import readable_paths
from roles.verifier.rewards.code_tests import Call, NotTests, Program, Tests, read_tests
from roles.verifier.rewards.reward import Item, Score

TEST_COLUMNS = ("tests", "test_list")
"""Columns that hold the tests when the answer is something else, such as a solution."""

OUTPUT_BYTES_MAX = 1 << 20
"""What a program may print or return in one run; it is stopped beyond."""

PROGRAM_CHARS_MAX = 200_000

_FENCE = re.compile(
    r"^```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
_DRIVER = Path(__file__).with_name("code_driver.py")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run told: a finding per expression, in order, and whether it came to its end."""

    findings: tuple[dict[str, Any], ...]
    printed: str
    ended: bool


class CodeReward:
    """Runs programs in processes of their own."""

    def __init__(self, spec: RewardSpec, *, isolated: bool) -> None:
        """``isolated`` tells that this process has left network and files behind."""
        self._driver = _DRIVER.read_text("utf-8")
        self._isolated = isolated
        self._readable = readable_paths()
        self._limits = Limits(
            cpu_s=math.ceil(spec.timeout_s) + 1,
            memory_bytes=spec.memory_bytes_max,
            file_bytes=OUTPUT_BYTES_MAX,
            files=64,
            processes=None if isolated else 256,
        )

    async def score(self, item: Item) -> Score:
        """1.0 or 0.0; NO_ANSWER without tests, GOLD_UNPARSEABLE when they cannot be judged from outside."""
        given = next((item.metadata[name] for name in TEST_COLUMNS if item.metadata.get(name)), item.answer)
        if not given:
            return Score.none(Unscorable.NO_ANSWER)
        try:
            tests = _tests(given) if isinstance(given, str) else read_tests(given)
        except NotTests as exc:
            return Score.none(Unscorable.GOLD_UNPARSEABLE, str(exc))
        if not len(tests):
            return Score.none(Unscorable.NO_ANSWER)
        program = last_block(item.completion)
        if program is None or len(program) > PROGRAM_CHARS_MAX:
            return Score(0.0, note="no code block" if program is None else "program too long")
        fault = self._first_fault(program, tests)
        return Score(1.0) if fault is None else Score(0.0, note=fault)

    def _first_fault(self, program: str, tests: Tests) -> str | None:
        if tests.calls:
            code = f"{program}\n{tests.prelude}"
            fault = _fault_of_calls(tests.calls, self._run(code, [call.expression for call in tests.calls]))
            if fault is not None:
                return fault
        for number, test in enumerate(tests.programs, 1):
            fault = _fault_of_program(test, self._run(program, None, test.stdin))
            if fault is not None:
                return f"test {number} of {len(tests.programs)}: {fault}"
        return None

    def _run(self, code: str, calls: Sequence[str] | None, stdin: str = "") -> Outcome:
        """One process, start to end. ``calls`` None runs the code as a program that reads ``stdin``."""
        mark = secrets.token_hex(16)
        job = {"code": code, "calls": list(calls or ()), "program": calls is None, "mark": mark}
        with (
            _holding(json.dumps(job)) as asked,
            _holding(stdin) as read,
            _write_only() as (told, told_handle),
            tempfile.TemporaryFile() as printed,
            self._scratch() as scratch,
        ):
            lock = Lock(self._readable, self._limits, isolated=self._isolated, scratch=scratch)
            handles = (asked.fileno(), told_handle)
            subprocess.run(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", self._driver, *map(str, handles)],
                stdin=read,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                pass_fds=handles,
                env={},
                preexec_fn=lock.put_on,
                check=False,
            )
            return _outcome(_content(told), _content(printed), mark)

    @contextmanager
    def _scratch(self) -> Iterator[str]:
        """A directory for the run; isolated runs bring their own file system."""
        if self._isolated:
            yield "/"
            return
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            yield scratch


def last_block(completion: str) -> str | None:
    """The code of the last closed fence that is Python or names no language."""
    blocks: list[str] = _FENCE.findall(completion)
    return blocks[-1] if blocks else None


@lru_cache(maxsize=256)
def _tests(text: str) -> Tests:
    return read_tests(text)


@contextmanager
def _holding(text: str) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "replace"))
        file.seek(0)
        yield file


@contextmanager
def _write_only() -> Iterator[tuple[IO[bytes], int]]:
    """A file, and a handle that can only add to it: the program must not read the mark there."""
    with tempfile.NamedTemporaryFile() as file:
        handle = os.open(file.name, os.O_WRONLY | os.O_APPEND)
        try:
            yield file, handle
        finally:
            os.close(handle)


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(OUTPUT_BYTES_MAX)


def _outcome(told: bytes, printed: bytes, mark: str) -> Outcome:
    """Read what was told; lines without the mark are the program's own and count for nothing."""
    findings, ended = [], False
    for line in told.splitlines():
        found, _, text = line.partition(b" ")
        if found != mark.encode():
            continue
        try:
            finding = json.loads(text)
        except ValueError:
            break
        ended = isinstance(finding, dict) and finding == {"end": True}
        if not ended:
            findings.append(finding)
    return Outcome(tuple(findings), printed.decode("utf-8", "replace"), ended)


def _fault_of_calls(calls: Sequence[Call], outcome: Outcome) -> str | None:
    for number, (call, finding) in enumerate(zip(calls, outcome.findings, strict=False), 1):
        where = f"test {number} of {len(calls)}"
        if "value" not in finding:
            return f"{where} raised {finding.get('raised')}"
        try:
            passes = call.passes(_value(finding["value"]))
        except (TypeError, ValueError, KeyError, RecursionError):
            passes = False
        if not passes:
            return f"{where} gave another value"
    if not outcome.ended or len(outcome.findings) != len(calls):
        return "the program did not come to its end"
    return None


def _fault_of_program(test: Program, outcome: Outcome) -> str | None:
    if not outcome.ended:
        raised = next((finding["raised"] for finding in outcome.findings if "raised" in finding), None)
        return f"raised {raised}" if raised else "the program did not come to its end"
    return None if test.passes(outcome.printed) else "printed something else"


def _value(told: Any) -> Any:
    """A plain value as the driver tells it."""
    if not isinstance(told, dict):
        return told
    ((kind, inside),) = told.items()
    match kind:
        case "list" | "tuple" | "set" | "frozenset":
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](
                map(_value, inside)
            )
        case "dict":
            return {_value(key): _value(one) for key, one in inside}
        case "bytes":
            return bytes.fromhex(inside)
        case "complex":
            return complex(*inside)
    raise ValueError(f"no plain value: {kind}")
