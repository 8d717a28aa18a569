"""The worker pool with real processes: hangs, memory bombs, crashes, and the death of the parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from protocol.errors import OperatorError
from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec
from roles.verifier.rewards.pool import WorkerPool
from roles.verifier.rewards.reward import Item, Score
from roles.verifier.rewards.scorer import Scorer

FUNCTIONS = "tests.roles.verifier.rewards.reward_functions"
LIMIT_S = 1.0
MATH = RewardSpec(name="math", timeout_s=LIMIT_S, memory_bytes_max=512 << 20)
OBEDIENT = RewardSpec(name=f"{FUNCTIONS}:obedient", timeout_s=LIMIT_S, memory_bytes_max=256 << 20)
PATIENT = RewardSpec(name=f"{FUNCTIONS}:obedient", timeout_s=30.0)
CHATTY = RewardSpec(name=f"{FUNCTIONS}:chatty")
MISSING = RewardSpec(name=f"{FUNCTIONS}:missing_column")
ALL = (OBEDIENT, PATIENT, CHATTY, MISSING, RewardSpec(name=f"{FUNCTIONS}:rank", timeout_s=LIMIT_S))
TIMEOUT = Score(0.0, note="timeout")


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[WorkerPool]:
    async with WorkerPool(ALL, workers=1) as pool:
        yield pool


async def one(pool: WorkerPool, spec: RewardSpec, item: Item) -> Score:
    (score,) = await pool.score(spec, [item])
    return score


async def do(pool: WorkerPool, command: str) -> Score:
    return await one(pool, OBEDIENT, Item(command, "x"))


async def gone(pid: int) -> None:
    """Return once process ``pid`` has ended."""
    ended = asyncio.Event()
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    asyncio.get_running_loop().add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)


# --- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["sleep", "spin", "power"])
async def test_a_hanging_sample_scores_zero_at_its_limit(pool: WorkerPool, command: str):
    await pool.warm()
    began = time.monotonic()
    assert await do(pool, command) == TIMEOUT
    assert LIMIT_S <= time.monotonic() - began < LIMIT_S + 1.0


async def test_hanging_samples_do_not_delay_their_neighbours(pool: WorkerPool):
    hanging = [asyncio.create_task(one(pool, PATIENT, Item("sleep", "x"))) for _ in range(2)]
    neighbours = [asyncio.create_task(do(pool, "pid")) for _ in range(8)]
    assert all(score.value for score in await asyncio.gather(*neighbours))
    assert not any(task.done() for task in hanging)  # one worker: in turn the neighbours would come last
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


async def test_a_killed_worker_is_replaced(pool: WorkerPool):
    await pool.warm()
    before = pool.pids
    assert await do(pool, "spin") == TIMEOUT
    await pool.warm()
    (killed,) = before - pool.pids
    assert len(pool.pids) == len(before)
    await gone(killed)


async def test_a_memory_bomb_is_contained(pool: WorkerPool):
    assert await do(pool, "eat") == Score(0.0, note="memory")
    assert (await do(pool, "pid")).value


async def test_what_a_reward_prints_is_not_taken_for_a_reply(pool: WorkerPool):
    assert await one(pool, CHATTY, Item("x", "x")) == Score(1.0)


async def test_children_of_a_killed_worker_die_with_it(pool: WorkerPool, tmp_path: Path):
    assert await do(pool, f"child {tmp_path / 'pid'}") == TIMEOUT
    await gone(int((tmp_path / "pid").read_text()))


async def test_the_neighbours_of_a_hanging_sample_in_its_group_get_their_scores(pool: WorkerPool):
    commands = ["pid", "sleep", "pid", "eat", "raise", "pid"]
    scores = await pool.score(OBEDIENT, [Item(command, "x") for command in commands])
    assert scores[1] == TIMEOUT
    assert scores[3] == Score(0.0, note="memory")
    assert scores[4].unscorable is Unscorable.REWARD_FAILED
    assert all(scores[index].value for index in (0, 2, 5))


async def test_a_group_is_scored_by_one_worker(pool: WorkerPool):
    scores = await pool.score(OBEDIENT, [Item("pid", "x")] * 8)
    assert len({score.value for score in scores}) == 1


async def test_what_a_slow_sample_gives_in_the_end_counts(pool: WorkerPool):
    assert (await one(pool, PATIENT, Item("slow", "x"))).value == 7.0


async def test_more_hanging_samples_than_workers_do_not_stop_the_others(pool: WorkerPool):
    hanging = [asyncio.create_task(do(pool, "spin")) for _ in range(6)]
    assert (await do(pool, "pid")).value
    assert await asyncio.gather(*hanging) == [TIMEOUT] * 6


async def test_a_template_that_dies_is_replaced(pool: WorkerPool):
    assert pool._template is not None
    template = pool._template._process
    template.kill()
    await template.wait()
    assert await do(pool, "spin") == TIMEOUT
    scores = await asyncio.gather(*(do(pool, "pid") for _ in range(3)))
    assert all(score.value for score in scores)


# --- groups as one ------------------------------------------------------------------------------

GROUP = RewardSpec(name=f"{FUNCTIONS}:rank", timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("completions", "scores"),
    [
        (["a", "ccc", "bb"], [Score(0.0), Score(2.0), Score(1.0)]),
        (
            ["a", "short"],
            [Score(None, Unscorable.REWARD_FAILED, "ValueError: returned 1 rewards for 2 completions")] * 2,
        ),
        (["a", "none"], [Score(0.0), Score(None, Unscorable.REWARD_FAILED, "returned None")]),
        (["a", "sleep"], [Score(None, Unscorable.REWARD_FAILED, "timeout")] * 2),
        (["a", "die"], [Score(None, Unscorable.REWARD_FAILED, "the reward's process died")] * 2),
    ],
)
async def test_a_function_of_completions_scores_a_whole_group(
    pool: WorkerPool, completions: list[str], scores: list[Score]
):
    assert await pool.score(GROUP, [Item(text, "x") for text in completions]) == scores


# --- faults -------------------------------------------------------------------------------------


async def test_an_exception_is_unscorable_with_its_first_line(pool: WorkerPool):
    assert await do(pool, "raise") == Score(None, Unscorable.REWARD_FAILED, "ValueError: first line")


async def test_a_missing_column_is_unscorable_and_not_zero(pool: WorkerPool):
    found = await one(pool, MISSING, Item("x", "10", metadata={"level": 3}))
    assert found == Score(None, Unscorable.REWARD_FAILED, "KeyError: 'difficulty'")


async def test_a_worker_that_dies_once_costs_nothing(pool: WorkerPool, tmp_path: Path):
    assert (await do(pool, f"die-once {tmp_path / 'died'}")).value == 1.0


@pytest.mark.parametrize("command", ["die", "exit"])
async def test_an_item_that_kills_its_worker_twice_is_unscorable(pool: WorkerPool, command: str):
    assert (await do(pool, command)).unscorable is Unscorable.REWARD_FAILED
    assert (await do(pool, "pid")).value


async def test_a_cancelled_score_leaves_no_busy_worker(pool: WorkerPool, tmp_path: Path):
    os.mkfifo(tmp_path / "started")
    task = asyncio.create_task(do(pool, f"tell-and-sleep {tmp_path / 'started'}"))
    await asyncio.to_thread((tmp_path / "started").read_text)
    (busy,) = pool._busy
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await gone(busy.pid)
    assert (await do(pool, "pid")).value


async def test_a_reward_is_found_beside_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_reward.py").write_text("def seven(completion, answer):\n    return 7\n")
    monkeypatch.chdir(tmp_path)
    spec = RewardSpec(name="own_reward:seven")
    async with WorkerPool([spec], workers=1) as pool:
        assert await one(pool, spec, Item("x", "x")) == Score(7.0)


async def test_a_reward_that_cannot_be_imported_stops_the_start():
    with pytest.raises(OperatorError, match="no module 'no_such_module'"):
        await WorkerPool([RewardSpec(name="no_such_module:f")], workers=1).open()


# --- mathematics under limits -------------------------------------------------------------------


async def test_power_towers_and_factorials_time_out_and_the_next_item_is_right():
    async with WorkerPool([MATH], workers=1) as pool:
        await pool.warm()
        for completion in (r"\boxed{9^{9^{9^{9}}}}", r"\boxed{(10^{9})!}"):
            began = time.monotonic()
            assert await one(pool, MATH, Item(completion, "1")) == TIMEOUT
            assert time.monotonic() - began < LIMIT_S + 1.0
            assert await one(pool, MATH, Item(r"\boxed{2}", "2")) == Score(1.0)


async def test_math_is_right_in_a_thread_that_is_not_the_main_one():
    async def score() -> float | None:
        async with Scorer([MATH], workers=1) as scorer:
            return (await scorer.score([Item(r"\boxed{2}", "2")]))[0].reward

    assert await asyncio.to_thread(lambda: asyncio.run(score())) == 1.0


# --- orphans ------------------------------------------------------------------------------------

PARENT = f"""
import asyncio, sys
from protocol.runspec import RewardSpec
from roles.verifier.rewards.pool import WorkerPool
from roles.verifier.rewards.reward import Item

SPEC = RewardSpec(name="{FUNCTIONS}:obedient", timeout_s=1.0)

async def main():
    async with WorkerPool([SPEC], workers=2) as pool:
        await pool.warm()
        print(*pool.pids, flush=True)
        await pool.score(SPEC, [Item(sys.argv[1], "x")])

asyncio.run(main())
"""


@pytest.mark.parametrize("command", ["tell-and-sleep", "tell-and-power"])
async def test_no_worker_survives_a_parent_that_was_killed(command: str, tmp_path: Path):
    os.mkfifo(tmp_path / "started")
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, f"{command} {tmp_path / 'started'}", stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    await asyncio.to_thread((tmp_path / "started").read_text)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    assert len(pids) == 3
    async with asyncio.timeout(5.0):
        await asyncio.gather(*(gone(pid) for pid in pids))
