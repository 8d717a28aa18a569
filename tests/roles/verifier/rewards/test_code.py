r"""The code reward in real, locked processes: what passes, what does not, and what cannot get out."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec
from roles.verifier.rewards.code import CodeReward
from roles.verifier.rewards.pool import WorkerPool
from roles.verifier.rewards.registry import Place
from roles.verifier.rewards.reward import Item, Score

CODE = RewardSpec(name="code", timeout_s=4.0, memory_bytes_max=512 << 20)
SOLVE = "assert solve(2) == 4"
FULL = {"namespaces", "landlock", "seccomp", "limits"}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[WorkerPool]:
    async with WorkerPool([CODE], workers=2, place=Place.LAUNCHER) as pool:
        yield pool


async def score(pool: WorkerPool, program: str, tests: str | None, **metadata: object) -> Score:
    (found,) = await pool.score(CODE, [Item(f"So:\n```python\n{program}\n```\n", tests, metadata=metadata)])
    return found


def confined(pool: WorkerPool) -> None:
    if not set(pool.protections) >= FULL:
        pytest.skip(f"this kernel gives only {', '.join(pool.protections)}")


# --- the cases of verl#7853 ---------------------------------------------------------------------

EQUAL_TO_ALL = """
class Anything:
    def __eq__(self, other): return True
    def __hash__(self): return 0
def solve(x): return Anything()
"""


@pytest.mark.parametrize(
    ("program", "value"),
    [
        ("import sys\nsys.exit(0)\ndef solve(x): return x * 2", 0.0),
        (EQUAL_TO_ALL, 0.0),
        ("import os\ndef solve(x): os._exit(0)", 0.0),
        ("import os\nprint('ALL TESTS PASSED', flush=True)\nos._exit(0)", 0.0),
        ("def solve(x): return x * 2", 1.0),
        ("def solve(x): return x + 3", 0.0),
        ("class Four(int): pass\ndef solve(x): return Four(4)", 0.0),
        ("def solve(x): raise SystemExit(0)", 0.0),
        ("def solve(x)\n    return x * 2", 0.0),
        ("import builtins\nbuiltins.eval = lambda *a: 4\ndef solve(x): return 5", 0.0),
        ("from __future__ import annotations\ndef solve(x): return x * 2", 1.0),
        ("if __name__ == '__main__':\n    raise ValueError\ndef solve(x): return x * 2", 1.0),
    ],
)
async def test_only_what_returns_the_value_passes(pool: WorkerPool, program: str, value: float):
    assert (await score(pool, program, SOLVE)).value == value


async def test_a_program_that_raises_does_not_pass_where_no_output_is_wanted(pool: WorkerPool):
    tests = json.dumps([{"input": "", "output": ""}])
    assert (await score(pool, "raise ValueError('x')", tests)) == Score(
        0.0, note="test 1 of 1: raised ValueError: x"
    )
    assert (await score(pool, "import os; os._exit(0)", tests)).value == 0.0
    assert (await score(pool, "pass", tests)).value == 1.0


# --- forms of tests -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tests", "program", "value"),
    [
        ("import math\nassert math.isclose(f(2), 1.414213, rel_tol=1e-5)", "def f(x): return x ** 0.5", 1.0),
        (
            "assert math.isclose(f(2), 1.5)",
            "import math\nmath.isclose = lambda *a: True\ndef f(x): return 1",
            0.0,
        ),
        ("assert abs(f(1) - 0.3) < 1e-6", "def f(x): return 0.1 + 0.2", 1.0),
        ("assert f(1) == {'a': [1, (2, 3)], 'b': {4}}", "def f(x): return {'a': [1, (2, 3)], 'b': {4}}", 1.0),
        ("assert f(1) == [1, 2]", "def f(x): return (1, 2)", 0.0),
        ("assert f(1) is None", "def f(x): pass", 1.0),
        ("assert not f(1)", "def f(x): return []", 1.0),
        ("assert f(1)", "def f(x): return 7", 1.0),
        ("assert f(1)", "def f(x): return 0", 0.0),
        ("assert f(1) != 2", "def f(x): return 3", 1.0),
        ("assert b'x' == f(1)", "def f(x): return b'x'", 1.0),
        ("assert f(1) == 1+2j", "def f(x): return 1+2j", 1.0),
        ("assert f(1) == 1\nassert f(2) == 2", "def f(x): return 1", 0.0),
        (
            json.dumps({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3, [4]]]}),
            "def f(a, b): return (3, [4])",
            1.0,
        ),
        (json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]}), "print(sum(map(int, input().split())))", 1.0),
        (json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]}), "print(4)", 0.0),
        (
            json.dumps([{"input": "a\nb", "output": "b \na\n\n"}]),
            "x = input(); print(input()); print(x)\nexit()",
            1.0,
        ),
        (json.dumps(["assert f(1) == 1"]), "def f(x): return x", 1.0),
    ],
)
async def test_a_form_of_tests(pool: WorkerPool, tests: str, program: str, value: float):
    assert (await score(pool, program, tests)).value == value


async def test_tests_may_stand_in_a_column_of_their_own(pool: WorkerPool):
    found = await score(
        pool, "def f(x): return x", "def f(x): return x  # the solution", test_list=["assert f(1) == 1"]
    )
    assert found == Score(1.0)


async def test_a_row_without_tests_or_with_strange_ones_is_unscorable(pool: WorkerPool):
    assert (await score(pool, "pass", "")).unscorable is Unscorable.NO_ANSWER
    assert (await score(pool, "pass", "[]")).unscorable is Unscorable.NO_ANSWER
    assert (await score(pool, "pass", "see above")).unscorable is Unscorable.GOLD_UNPARSEABLE


# --- what cannot get out ------------------------------------------------------------------------


def trying(statement: str) -> str:
    """A program whose ``f`` says whether ``statement`` was let through."""
    lines = "\n        ".join(statement.splitlines())
    return (
        f"def f(x):\n    try:\n        {lines}\n    except BaseException as exc:\n"
        "        return str(type(exc).__name__)\n    return 'done'\n"
    )


ESCAPES = (
    "import socket\nsocket.create_connection(('127.0.0.1', 4222), 1)",
    "import os\nos.fork()",
    "import subprocess\nsubprocess.run(['/bin/true'])",
    "import os\nos.kill(-1, 9)",
    "import os\nos.kill(os.getppid(), 9)",
    "import os\nos.setsid()",
    "open('/usr/lib/x', 'w')",
    "open('/etc/passwd').read()",
    "import os\nos.listdir('/home')",
    "import os\nos.listdir('/proc')",
    "open('/tmp/x', 'wb').write(bytes(100 << 20))",
    "bytearray(1 << 30)",
)


@pytest.mark.parametrize("statement", ESCAPES)
async def test_a_program_cannot(pool: WorkerPool, statement: str):
    confined(pool)
    found = await score(pool, trying(statement), "assert f(1) != 'done'")
    assert found == Score(1.0)


@pytest.mark.parametrize("statement", ESCAPES)
async def test_a_program_cannot_either_where_there_are_no_namespaces(pool: WorkerPool, statement: str):
    confined(pool)
    reward = CodeReward(CODE, isolated=False)
    completion = f"```python\n{trying(statement)}\n```"
    assert await reward.score(Item(completion, "assert f(1) != 'done'")) == Score(1.0)


async def test_a_program_has_an_empty_directory_of_its_own(pool: WorkerPool):
    program = (
        "import os\ndef f(x):\n    seen = os.listdir('.')\n    open('note', 'w').write('x')\n    return seen"
    )
    for _ in range(2):
        assert await score(pool, program, "assert f(1) == []") == Score(1.0)


async def test_threads_and_the_standard_library_work(pool: WorkerPool):
    program = (
        "import threading, asyncio, random, collections, itertools, heapq, re, math\n"
        "def f(x):\n    out = []\n    t = threading.Thread(target=out.append, args=(x,))\n"
        "    t.start(); t.join()\n"
        "    asyncio.run(asyncio.sleep(0))\n    return out"
    )
    assert await score(pool, program, "assert f(1) == [1]") == Score(1.0)


async def test_wanted_values_are_nowhere_in_the_process(pool: WorkerPool):
    program = (
        "import gc, sys\ndef f(x):\n    wanted = ''.join(['4815', '1623'])\n"
        "    return wanted in repr(gc.get_objects()) + repr(sys.argv)"
    )
    found = await score(pool, program, "assert f(1) == False\nassert not f(2)\nassert f(3) != 48151623")
    assert found == Score(1.0)


async def test_a_hanging_program_costs_its_limit(pool: WorkerPool):
    began = time.monotonic()
    assert await score(pool, "while True: pass", SOLVE) == Score(0.0, note="timeout")
    assert time.monotonic() - began < CODE.timeout_s + 1.5
    assert await score(pool, "def solve(x): return 4", SOLVE) == Score(1.0)


async def test_a_program_that_prints_without_end_is_stopped(pool: WorkerPool):
    found = await score(pool, "while True: print('x' * 10000)", SOLVE)
    assert found.value == 0.0
    assert await score(pool, "def solve(x): return 4", SOLVE) == Score(1.0)
