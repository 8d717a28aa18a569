"""Hypothesis strategies: any valid message, with the extremes that a wire format must survive."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from protocol.clock import VectorClock
from protocol.limits import COUNT_MAX, GROUP_SIZE_MAX
from protocol.message import Message
from protocol.messages import (
    DeadLetter,
    Event,
    FinishReason,
    Head,
    NodeState,
    Rollout,
    RolloutGroup,
    RunState,
    SamplingParams,
    Task,
    Verdict,
    VerifiedGroup,
)
from protocol.reasons import DeadReason, Unscorable

names = st.one_of(
    st.text("ab09-", max_size=6).map("a".__add__),
    st.sampled_from(["0", "z" * 48, "a-", "eval", "task", "genesis"]),
)
tallies = st.integers(0, COUNT_MAX)
group_ids = st.tuples(names, tallies.map(str)).map(".".join) | st.sampled_from(["a", "a._-.0", "z" * 96])
clocks = st.dictionaries(st.sampled_from(["a", "b", "c", "learner-1"]), st.integers(0, 5)).map(VectorClock.of)
texts = st.one_of(st.text(max_size=30), st.sampled_from(['{"$":0}', "\x00", "\u2028", "😀", '"\\'])).filter(
    lambda text: text.isascii() or text == text.encode("utf-8", "replace").decode()
)
seconds = st.floats(0, allow_infinity=False)
finite = st.floats(allow_nan=False, allow_infinity=False)
keys = st.one_of(texts, st.just("$"))


def _arrays(dtype: str, numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(numbers, max_size=9).map(lambda items: np.array(items, dtype))


ints = _arrays("<i4", st.integers(-(1 << 31), (1 << 31) - 1))
floats = _arrays("<f4", st.floats(width=32))
blobs = st.binary(max_size=40).map(lambda data: np.frombuffer(data, np.uint8))

params = st.builds(
    SamplingParams,
    temperature=st.floats(0, exclude_min=True, allow_infinity=False),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, (1 << 31) - 1),
    min_p=st.floats(0, 1, exclude_max=True),
    max_new_tokens=st.integers(1, 1 << 20),
)
tasks = st.builds(
    Task,
    run=names,
    group_id=group_ids,
    split=st.sampled_from(["train", "held_out"]),
    row=tallies,
    prompt_token_ids=ints,
    group_size=st.integers(1, GROUP_SIZE_MAX),
    params=params,
    seed=st.integers(0, (1 << 63) - 1),
    clock=clocks,
    pinned=st.booleans(),
    deadline_s=st.floats(0, exclude_min=True, allow_infinity=False),
)
rollouts = st.builds(
    Rollout,
    index=st.integers(0, GROUP_SIZE_MAX - 1),
    token_ids=ints,
    sampler_logprobs=floats,
    finish=st.sampled_from(FinishReason),
    loss_mask=st.none() | blobs,
)
groups = st.builds(
    RolloutGroup,
    run=names,
    group_id=group_ids,
    task=blobs,
    sampler=names,
    engine=texts,
    clock=clocks,
    generation_s=seconds,
    rollouts=st.lists(rollouts, min_size=1, max_size=3).map(tuple),
)
verdicts = st.builds(
    Verdict,
    index=st.integers(0, GROUP_SIZE_MAX - 1),
    reward=st.none() | finite,
    scores=st.dictionaries(keys, st.none() | finite, max_size=3),
    unscorable=st.none() | st.sampled_from(Unscorable),
    note=texts,
)
verified_groups = st.builds(
    VerifiedGroup,
    run=names,
    group_id=group_ids,
    group=blobs,
    verifier=names,
    verdicts=st.lists(verdicts, max_size=3).map(tuple),
    scoring_s=seconds,
)
heads = st.builds(
    Head,
    run=names,
    learner=names,
    count=tallies,
    clock=clocks,
    weight=st.floats(0, COUNT_MAX),
    path=st.just("") | st.just("run/updates/a/1-0123456789abcdef"),
    policy_digest=texts,
    nonce=texts,
    cursor=tallies,
    groups_trained=tallies,
    groups_dropped=st.dictionaries(keys, tallies, max_size=3),
)
node_states = st.builds(
    NodeState,
    run=names,
    node=names,
    roles=st.lists(texts, max_size=3).map(tuple),
    public_key=texts,
    host=texts,
    started_at=finite,
    clock=clocks,
    busy=tallies,
    detail=st.dictionaries(keys, texts, max_size=3),
)
dead_letters = st.builds(
    DeadLetter,
    run=names,
    queue=texts,
    reason=st.sampled_from(DeadReason),
    node=names,
    detail=texts,
    group_id=st.none() | texts,
    payload=blobs,
)
observed = st.one_of(finite, st.integers(-(1 << 63), (1 << 63) - 1), texts, st.booleans(), st.none())
events = st.builds(
    Event,
    run=names,
    node=names,
    role=texts,
    name=texts,
    at=finite,
    fields=st.dictionaries(keys, observed, max_size=4),
)
run_states = st.builds(RunState, spec_json=texts, spec_digest=texts, creator=names)

messages: st.SearchStrategy[Message] = st.one_of(
    tasks, groups, verified_groups, heads, node_states, dead_letters, events, run_states
)
