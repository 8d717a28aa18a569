"""Scorers of reasoning-gym, and the answers that would run as code beside them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from protocol.errors import OperatorError
from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec, TasksSpec
from roles.tasks.reasoning_gym import read
from roles.tasks.taskset import Row
from roles.verifier.rewards.pool import WorkerPool
from roles.verifier.rewards.reasoning_gym import ReasoningGymReward, is_inert, tagged
from roles.verifier.rewards.registry import Place
from roles.verifier.rewards.reward import Item, Score

NAMES = "chain_sum,countdown,graph_color"
SPEC = RewardSpec(name=f"reasoning-gym:{NAMES}", timeout_s=5.0)
ROWS = [
    row
    for row in read(NAMES, TasksSpec(source=f"reasoning-gym:{NAMES}", rows_max=6), 3)
    if isinstance(row, Row)
]
SUM, COUNTDOWN, COLOURS = ROWS[0], ROWS[2], ROWS[4]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[WorkerPool]:
    async with WorkerPool([SPEC], workers=1, place=Place.LOCKED) as pool:
        yield pool


async def score(pool: WorkerPool, row: Row, completion: str) -> Score:
    (found,) = await pool.score(SPEC, [Item(completion, row.answer, row.prompt, row.metadata)])
    return found


@pytest.mark.asyncio(loop_scope="module")
async def test_a_datasets_own_scorer_decides(pool: WorkerPool):
    assert await score(pool, SUM, f"So <answer>{SUM.answer}</answer>.") == Score(1.0)
    assert await score(pool, COUNTDOWN, f"<answer>{COUNTDOWN.answer}</answer>") == Score(1.0)
    wrong = await score(pool, COUNTDOWN, "<answer>1 + 1</answer>")
    assert wrong.value is not None
    assert wrong.value < 0.5
    assert (await score(pool, COLOURS, "<answer>red</answer>")).value == 0.0


@pytest.mark.asyncio(loop_scope="module")
async def test_each_completion_gets_a_worker_of_its_own(pool: WorkerPool):
    await pool.warm()
    before = pool.pids
    await score(pool, SUM, "<answer>1</answer>")
    await pool.warm()
    assert len(before - pool.pids) == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_that_is_code_is_not_run(pool: WorkerPool):
    answer = f"(lambda: {COUNTDOWN.metadata['target']})()"
    found = await score(pool, COUNTDOWN, f"<answer>{answer}</answer>")
    assert found == Score(0.0, note="the answer is code, and the scorer would run it")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_row_of_another_dataset_is_unscorable(pool: WorkerPool):
    (found,) = await pool.score(SPEC, [Item("1", "1", metadata={"source_dataset": "sudoku"})])
    assert found.unscorable is Unscorable.NO_ANSWER


@pytest.mark.parametrize(
    ("completion", "answer"),
    [("<answer>1</answer> no, <ANSWER> 2 </ANSWER>", "2"), (" 3 ", "3"), ("<answer>4", "<answer>4")],
)
def test_the_last_tag_holds_the_answer(completion: str, answer: str):
    assert tagged(completion) == answer


@pytest.mark.parametrize(
    "text",
    [
        "3*(4 + 5)/2",
        "x**2/2 + C",
        "sin(x)*exp(-x) + C",
        "[[1, 0], [0, 2.5]]",
        "['a', 'b']",
        "3(x+1)",
        "2.5*x",
    ],
)
def test_arithmetic_and_literals_are_inert(text: str):
    assert is_inert(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('x')", "().__class__", "open('x')", "exit()", "[x for x in y]",
        "(lambda: 1)()", "x.y", "'a'.join([])", "1 .real", "getattr(x, 'y')", "(x := 1)", "globals()",
        "x if y else z", "breakpoint ( )", "[].append(1)", "1.0.hex()",
    ],
)  # fmt: skip
def test_whatever_else_is_not(text: str):
    assert not is_inert(text)


def test_the_scorers_that_evaluate_answers_are_known():
    every = (
        "binary_matrix,countdown,n_queens,polynomial_multiplication,puzzle24,simple_integration,spiral_matrix"
    )
    assert ReasoningGymReward(every)._evaluating == set(every.split(","))
    assert ReasoningGymReward("chain_sum,codeio")._evaluating == set()


def test_a_dataset_that_does_not_exist_is_the_operators_mistake():
    with pytest.raises(OperatorError, match="there is no dataset 'sums'"):
        ReasoningGymReward("sums")
