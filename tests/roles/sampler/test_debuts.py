"""Debuts: a policy's first group tells how soon its first token came, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.virtual_time import in_virtual_time
from roles.policy.policies import PolicyVersion
from roles.sampler.debuts import AWAITED_MAX, Debuts
from roles.sampler.engine import Sampled
from tests.build import a_clock
from tests.roles.sampler.scene import TOKEN_S, LateLoads, Scene

AT_1 = a_clock(**{"learner-1": 1})


def a_policy(count: int) -> PolicyVersion:
    return PolicyVersion(a_clock(**{"learner-1": count}), float(count), f"{count:064}", {})


def a_group(policy: PolicyVersion, first_token_s: float | None = 0.5) -> Sampled:
    """It took three seconds."""
    return Sampled(policy.name, (), 3.0, first_token_s)


def test_the_first_group_tells_and_no_other():
    debuts = Debuts()
    debuts.loaded(a_policy(1), 10.0)
    assert debuts.take(a_group(a_policy(1)), 15.0) == {
        "version": 1.0,
        "clock": "learner-1:1",
        "start_s": 2.0,
        "first_token_s": 0.5,
    }
    assert debuts.take(a_group(a_policy(1)), 16.0) is None


def test_an_engine_that_cannot_tell_and_a_pinned_policy_make_no_debut():
    debuts = Debuts()
    debuts.loaded(a_policy(1), 10.0)
    assert debuts.take(a_group(a_policy(1), None), 15.0) is None
    assert debuts.take(a_group(a_policy(2)), 15.0) is None


def test_policies_under_which_nothing_is_sampled_are_forgotten():
    debuts = Debuts()
    for count in range(1, AWAITED_MAX + 2):
        debuts.loaded(a_policy(count), 0.0)
    assert debuts.take(a_group(a_policy(1)), 9.0) is None
    assert debuts.take(a_group(a_policy(2)), 9.0) is not None


@in_virtual_time
async def test_it_tells_how_a_policy_came_and_when_it_was_first_sampled_from(tmp_path: Path):
    scene = await Scene.at(tmp_path, engine_type=LateLoads)
    await scene.pass_time(1.0)
    await scene.commit(1)
    await scene.pass_time(4.0)
    for number in (0, 1):
        await scene.task(number)
        await scene.pass_time(2 * TOKEN_S + 1)
    _, loaded = scene.ground.told("policy_loaded")
    assert (loaded["version"], loaded["load_s"], loaded["waited_s"]) == (1.0, pytest.approx(1.0), 0.0)
    (first,) = scene.ground.told("policy_sampled")
    assert (first["clock"], first["first_token_s"]) == (AT_1.text, TOKEN_S)
    assert first["start_s"] == pytest.approx(3.0, abs=0.1)
    assert [group["held_s"] for group in scene.ground.told("group_sampled")] == [0.0, 0.0]
    await scene.drain()
