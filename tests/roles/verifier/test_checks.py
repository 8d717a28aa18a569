"""Structure checks: each way of being wrong is found as exactly that fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.message import Message
from protocol.messages import FinishReason, Rollout, RolloutGroup, SamplingParams, Task
from protocol.reasons import StructureFault
from roles.tasks.taskset import Row, TaskSet
from roles.verifier.checks import LOGPROB_ROUNDING, Rules, signer_fault, structure_fault
from tests.build import a_clock, a_group, a_rollout, a_task

VOCAB = 20
EOS = (2, 7)
ROWS = [Row("p", "a", f"row {i}") for i in range(3)]
RULES = Rules(frozenset(EOS), VOCAB, TaskSet(ROWS, ROWS[:1], [], "d"), prompt_of=lambda row: [1, 5, 6, 7])
M = TypeVar("M", bound=Message)
PLAIN = [i for i in range(VOCAB) if i not in EOS]


def fault(group: RolloutGroup, task: Task | None = None, rules: Rules = RULES) -> StructureFault | None:
    found = structure_fault(group, task or a_task(), rules=rules)
    return found[0] if found else None


def alone(**changes: Any) -> RolloutGroup:
    """A group of one evaluation completion."""
    return a_group(a_task(group_size=1), rollouts=(a_rollout(**changes),))


def of_one(max_new_tokens: int) -> Task:
    return a_task(group_size=1, params=SamplingParams(max_new_tokens=max_new_tokens))


def edited(model: M, **changes: Any) -> M:
    """A copy with other fields, validated."""
    return type(model)(**({name: getattr(model, name) for name in type(model).model_fields} | changes))


# --- the rules one by one -----------------------------------------------------------------------


def test_a_complete_group_is_sound():
    assert fault(a_group()) is None


def test_a_group_with_the_task_of_another_group_has_no_task():
    assert fault(a_group(), a_task(group_id="learner-1.1")) is StructureFault.TASK_UNKNOWN
    assert fault(a_group(), a_task(run="other")) is StructureFault.TASK_UNKNOWN


def test_a_row_that_does_not_exist_is_an_unknown_task():
    task = a_task(row=3)
    assert fault(a_group(task), task) is StructureFault.TASK_UNKNOWN
    held_out = a_task(row=1, split="held_out")
    assert fault(a_group(held_out), held_out) is StructureFault.TASK_UNKNOWN


def test_a_prompt_that_the_row_does_not_give_is_found():
    task = a_task(prompt_token_ids=[1, 5, 6])
    assert fault(a_group(task), task) is StructureFault.PROMPT_MISMATCH


def test_without_a_prompt_builder_the_prompt_is_not_checked():
    task = a_task(prompt_token_ids=[9])
    assert fault(a_group(task), task, Rules(RULES.eos_ids, VOCAB, RULES.tasks)) is None


def test_a_pinned_group_must_be_sampled_under_its_clock():
    task = a_task(pinned=True, clock=a_clock(a=2))
    assert fault(a_group(task), task) is None
    assert fault(a_group(task, clock=a_clock(a=3)), task) is StructureFault.CLOCK_UNKNOWN


def test_an_unpinned_group_may_start_under_a_newer_policy():
    assert fault(a_group(clock=a_clock(a=3))) is None


def partial(rollouts: int, generation_s: float, **changes: Any) -> StructureFault | None:
    task = a_task(group_size=4, deadline_s=60.0, **changes)
    group = a_group(
        task, generation_s=generation_s, rollouts=tuple(a_rollout(index=i) for i in range(rollouts))
    )
    return fault(group, task)


def test_a_partial_group_past_its_deadline_is_excused_with_two_rollouts():
    assert partial(2, 60.0) is None
    assert partial(1, 60.0) is StructureFault.GROUP_TOO_SMALL


def test_a_partial_group_before_its_deadline_is_not_excused():
    assert partial(3, 30.0) is StructureFault.GROUP_TOO_SMALL


def test_an_evaluation_may_be_left_with_one_completion():
    assert partial(1, 60.0, split="held_out") is None


def test_a_group_of_one_is_sound_when_one_was_asked_for():
    assert fault(alone(), of_one(5)) is None


def test_ids_and_logprobs_stay_as_sampled_and_of_one_length():
    kept = a_rollout(token_ids=[4, 6, 2], sampler_logprobs=[-0.2, -0.7, -0.1])
    assert kept.token_ids.tolist() == [4, 6, 2]
    short = alone(token_ids=[4, 6, 2], sampler_logprobs=[-0.2, -0.7])
    assert fault(short, of_one(5)) is StructureFault.LENGTHS_DIFFER


@pytest.mark.parametrize(
    ("ids", "finish", "expected"),
    [
        ([3, 4, 7], FinishReason.STOP, None),  # EOS as the last permitted token is not truncation
        ([3, 7], FinishReason.STOP, None),  # an EOS that only the generation config lists
        ([3, 4, 5], FinishReason.LENGTH, None),
        ([3, 4, 7], FinishReason.LENGTH, StructureFault.LENGTH_WITHOUT_LIMIT),
        ([3, 4], FinishReason.LENGTH, StructureFault.LENGTH_WITHOUT_LIMIT),
        ([3, 4, 5], FinishReason.STOP, StructureFault.STOP_WITHOUT_EOS),
        ([7, 4, 7], FinishReason.STOP, StructureFault.EOS_INSIDE),
        ([3, 2, 5], FinishReason.LENGTH, StructureFault.EOS_INSIDE),
        ([3, 4, 5, 7], FinishReason.STOP, StructureFault.COMPLETION_TOO_LONG),
    ],
)
def test_an_ending_must_be_what_it_says(
    ids: list[int], finish: FinishReason, expected: StructureFault | None
):
    group = alone(token_ids=ids, sampler_logprobs=[-0.1] * len(ids), finish=finish)
    assert fault(group, of_one(3)) is expected


def test_rounding_above_zero_is_tolerated_and_no_more():
    assert fault(alone(sampler_logprobs=[1e-6, -0.1, 0.0]), of_one(5)) is None
    above = alone(sampler_logprobs=[2 * LOGPROB_ROUNDING, -0.1, 0.0])
    assert fault(above, of_one(5)) is StructureFault.LOGPROB_POSITIVE


def test_the_detail_names_the_rollout():
    rollouts = (a_rollout(), a_rollout(index=1, token_ids=[], sampler_logprobs=[]))
    found = structure_fault(a_group(rollouts=rollouts), a_task(), rules=RULES)
    assert found == (StructureFault.EMPTY_COMPLETION, "rollout 1: no tokens")


# --- signers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, None),
        ({"sampler-1": "GROUP", "learner-1": "TASK"}, None),
        ({"sampler-1": "OTHER"}, StructureFault.SAMPLER_MISMATCH),
        ({"learner-1": "OTHER"}, StructureFault.ISSUER_UNKNOWN),
        ({"sampler-2": "OTHER"}, None),
    ],
)
def test_a_name_with_another_key_is_found(known: dict[str, str], expected: StructureFault | None):
    found = signer_fault(a_group(), task_signer="TASK", group_signer="GROUP", trust=known.get)
    assert (found[0] if found else None) is expected


# --- any valid group, damaged in one way --------------------------------------------------------


@st.composite
def valid(draw: st.DrawFn) -> tuple[RolloutGroup, Task]:
    size = draw(st.integers(2, 5))
    limit = draw(st.integers(2, 8))
    task = a_task(group_size=size, row=draw(st.integers(0, 2)), params=SamplingParams(max_new_tokens=limit))
    rollouts = []
    for index in draw(st.permutations(range(size))):
        stops = draw(st.booleans())
        body = draw(st.lists(st.sampled_from(PLAIN), min_size=limit - 1, max_size=limit - 1))
        body = body[: draw(st.integers(1, limit - 1))] if stops else body
        ids = [*body, draw(st.sampled_from(EOS if stops else PLAIN))]
        logprobs = draw(st.lists(st.floats(-30, 0, width=32), min_size=len(ids), max_size=len(ids)))
        finish = FinishReason.STOP if stops else FinishReason.LENGTH
        rollouts.append(a_rollout(index=index, token_ids=ids, sampler_logprobs=logprobs, finish=finish))
    return a_group(task, rollouts=tuple(rollouts)), task


def on_one(change: Callable[[Rollout], Rollout]) -> Callable[[RolloutGroup, Task], tuple[RolloutGroup, Task]]:
    """Damage the last rollout."""
    return lambda group, task: (
        edited(group, rollouts=(*group.rollouts[:-1], change(group.rollouts[-1]))),
        task,
    )


def with_token(rollout: Rollout, position: int, token: int) -> Rollout:
    ids = rollout.token_ids.copy()
    ids[position] = token
    return edited(rollout, token_ids=ids)


def with_logprob(rollout: Rollout, value: float) -> Rollout:
    logprobs = rollout.sampler_logprobs.copy()
    logprobs[-1] = value
    return edited(rollout, sampler_logprobs=logprobs)


def lengthened(rollout: Rollout) -> Rollout:
    ids = np.full(50, PLAIN[0], np.int32)
    return edited(rollout, token_ids=ids, sampler_logprobs=np.zeros(50, np.float32))


def swapped_end(rollout: Rollout) -> Rollout:
    return with_token(rollout, -1, PLAIN[0] if rollout.finish is FinishReason.STOP else EOS[0])


def repeat_first(group: RolloutGroup, task: Task) -> tuple[RolloutGroup, Task]:
    last = edited(group.rollouts[-1], index=group.rollouts[0].index)
    return edited(group, rollouts=(*group.rollouts[:-1], last)), task


def add_one(group: RolloutGroup, task: Task) -> tuple[RolloutGroup, Task]:
    return edited(group, rollouts=(*group.rollouts, edited(group.rollouts[0], index=task.group_size))), task


def drop_one(group: RolloutGroup, task: Task) -> tuple[RolloutGroup, Task]:
    return edited(group, rollouts=group.rollouts[1:]), task


F = StructureFault
DAMAGE: dict[str, tuple[Callable[..., tuple[RolloutGroup, Task]], set[StructureFault]]] = {
    "another group's task": (lambda g, t: (g, edited(t, group_id="x.1")), {F.TASK_UNKNOWN}),
    "no such row": (lambda g, t: (g, edited(t, row=99)), {F.TASK_UNKNOWN}),
    "another prompt": (lambda g, t: (g, edited(t, prompt_token_ids=[1])), {F.PROMPT_MISMATCH}),
    "another clock": (
        lambda g, t: (edited(g, clock=a_clock(a=1)), edited(t, pinned=True)),
        {F.CLOCK_UNKNOWN},
    ),
    "an index twice": (repeat_first, {F.INDEX_REPEATED}),
    "an index beyond": (on_one(lambda r: edited(r, index=99)), {F.INDEX_OUT_OF_RANGE}),
    "one too many": (add_one, {F.GROUP_TOO_LARGE}),
    "one too few": (drop_one, {F.GROUP_TOO_SMALL}),
    "no tokens": (on_one(lambda r: edited(r, token_ids=[], sampler_logprobs=[])), {F.EMPTY_COMPLETION}),
    "too long": (on_one(lengthened), {F.COMPLETION_TOO_LONG}),
    "a logprob less": (
        on_one(lambda r: edited(r, sampler_logprobs=r.sampler_logprobs[:-1])),
        {F.LENGTHS_DIFFER},
    ),
    "an id too high": (on_one(lambda r: with_token(r, 0, VOCAB)), {F.TOKEN_OUT_OF_VOCABULARY}),
    "a negative id": (on_one(lambda r: with_token(r, 0, -1)), {F.TOKEN_OUT_OF_VOCABULARY}),
    "nan": (on_one(lambda r: with_logprob(r, float("nan"))), {F.LOGPROB_NOT_FINITE}),
    "minus infinity": (on_one(lambda r: with_logprob(r, -np.inf)), {F.LOGPROB_NOT_FINITE}),
    "a probability": (on_one(lambda r: with_logprob(r, 0.5)), {F.LOGPROB_POSITIVE}),
    "EOS inside": (on_one(lambda r: with_token(r, 0, EOS[1])), {F.EOS_INSIDE}),
    "a false ending": (on_one(swapped_end), {F.STOP_WITHOUT_EOS, F.LENGTH_WITHOUT_LIMIT}),
}


@given(made=valid())
@settings(max_examples=40, deadline=None)
def test_any_valid_group_is_sound(made: tuple[RolloutGroup, Task]):
    assert fault(*made) is None


@pytest.mark.parametrize("way", DAMAGE)
@given(made=valid())
@settings(max_examples=8, deadline=None)
def test_damage_is_found_as_exactly_that_fault(way: str, made: tuple[RolloutGroup, Task]):
    damage, expected = DAMAGE[way]
    assert fault(*damage(*made)) in expected
