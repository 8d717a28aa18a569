"""The nouns: every message that peers exchange, as frozen classes.

    learner ── Task ──▶ sampler ── RolloutGroup ──▶ verifier ── VerifiedGroup ──▶ learner ── Head ──▶ all

Each message travels as one signed frame (``codec.py``). A ``RolloutGroup`` carries the learner's
signed task frame inside it, and a ``VerifiedGroup`` the sampler's signed group frame: whoever acts
on a message can check everyone who had a hand in it.

Every number is finite and bounded, so that no peer's message can overflow arithmetic here; only the
contents of arrays are judged later, by the verifier, with a reason. Log-probabilities are natural
logarithms.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, FailFast, Field, ValidationInfo

from protocol.arrays import ByteArray, FloatArray, IntArray
from protocol.clock import VectorClock
from protocol.limits import COMPLETION_TOKENS_MAX, COUNT_MAX, GROUP_SIZE_MAX
from protocol.message import Message
from protocol.reasons import DeadReason, Judgement, Unscorable
from protocol.spec import Name


def _writable(value: object) -> object:
    """Text that UTF-8 can write: lone surrogates (of undecodable file names, say) become ``?``."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _observed(value: object, info: ValidationInfo) -> object:
    """A telemetry value: our own float that is not finite becomes None, for telemetry must not fail."""
    if info.mode == "python" and isinstance(value, float | np.floating) and not math.isfinite(value):
        return None
    return _writable(value)


Text = Annotated[str, BeforeValidator(_writable)]
Tally = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Seconds = Annotated[float, Field(ge=0)]
GroupId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*$", max_length=96)]
"""Tokens of a KV key, so no dot may lead, trail or stand beside another."""
_PATH = r"^[a-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$"
StorePath = Annotated[str, Field(pattern=_PATH, max_length=400)]
"""A path below the root of an adapter store: relative, without ``.``, ``..`` or hidden names."""
Observed = Annotated[
    float | Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | str | bool | None, BeforeValidator(_observed)
]


class SamplingParams(Message):
    """How one task is sampled; ``top_k`` 0 means all tokens."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_new_tokens: Annotated[int, Field(ge=1, le=COMPLETION_TOKENS_MAX)]


class Told(Message):
    """What a simulated user may know of a task's row. The answer is no part of it."""

    prompt: Text
    system_prompt: Text | None = None
    columns: dict[Text, Text] = {}
    """The columns that the run names; a value that is no text is told as JSON."""


class Task(Message):
    """One prompt to sample. It names its row but never carries the answer."""

    run: Name
    group_id: GroupId
    split: Literal["train", "held_out"] = "train"
    row: Tally
    """Row of the run's task set; the verifier looks the answer up by ``(split, row)``."""
    prompt_token_ids: IntArray
    group_size: Annotated[int, Field(ge=1, le=GROUP_SIZE_MAX)]
    params: SamplingParams
    seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    """Rollout ``i`` is sampled with a seed derived from this one and ``i``."""
    clock: VectorClock
    """The issuer's head; a sampler whose policy is hopelessly older fetches first."""
    pinned: bool = False
    """Sample under exactly ``clock`` (evaluation), not under the newest policy."""
    deadline_s: Annotated[float, Field(gt=0)]
    """Seconds from the start of sampling after which finished rollouts are published as they are."""
    told: Annotated[Told | None, Field(exclude_if=lambda told: told is None)] = None
    """For the run's simulated user. None, not written at all: the run has none."""


class FinishReason(StrEnum):
    """Why a completion ended: an EOS token, or the limit without one (truncated)."""

    STOP = "stop"
    LENGTH = "length"


class Rollout(Message):
    """One completion with what the sampler knows of it. EOS, if reached, is its last token."""

    index: Annotated[int, Field(ge=0, lt=GROUP_SIZE_MAX)]
    token_ids: IntArray
    """All tokens after the prompt, shape [T]: what was sampled, and what was given between turns."""
    sampler_logprobs: FloatArray
    """Log-probability of each token under the distribution it was sampled from, shape [T]; else 0."""
    finish: FinishReason
    loss_mask: Annotated[ByteArray | None, Field(exclude_if=lambda mask: mask is None)] = None
    """1 where the policy sampled the token, 0 where what a tool or the user said stands in its frame, shape
    [T]. None, not written at all: every token was sampled."""

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """Which tokens the policy sampled, shape [T]; only those are trained on and audited."""
        if self.loss_mask is None:
            return np.ones(len(self.token_ids), np.bool_)
        chosen: NDArray[np.bool_] = self.loss_mask != 0
        return chosen


class RolloutGroup(Message):
    """The rollouts of one task, all sampled under the policy of one clock."""

    run: Name
    group_id: GroupId
    task: ByteArray
    """The learner's signed Task frame, as it was received."""
    sampler: Name
    engine: Text
    clock: VectorClock
    """Clock of the policy under which the group started; its age is counted from here."""
    generation_s: Seconds
    rollouts: Annotated[tuple[Rollout, ...], FailFast(), Field(min_length=1, max_length=GROUP_SIZE_MAX)]


class Verdict(Message):
    """A verifier's finding on one rollout; ``reward`` None means it could not be scored."""

    index: Annotated[int, Field(ge=0, lt=GROUP_SIZE_MAX)]
    reward: float | None
    scores: dict[Text, float | None] = {}
    """Each reward function's own value before weighting."""
    unscorable: Unscorable | None = None
    note: Annotated[Text, Field(max_length=200)] = ""
    """For people: ``timeout``, or the first line of what a reward function raised."""


class VerifiedGroup(Message):
    """A group whose structure is sound, with one verdict per rollout, in the rollouts' order."""

    run: Name
    group_id: GroupId
    group: ByteArray
    """The sampler's signed RolloutGroup frame, as it was received."""
    verifier: Name
    verdicts: Annotated[tuple[Verdict, ...], FailFast(), Field(max_length=GROUP_SIZE_MAX)]
    scoring_s: Seconds


class Head(Message):
    """A learner's newest committed update. Committed atomically with the groups it consumed."""

    run: Name
    learner: Name
    count: Tally
    """How many updates this learner has published: its component of the clock."""
    clock: VectorClock
    """Clock of the policy that the learner held when it published, this update included."""
    weight: Annotated[float, Field(ge=0, le=COUNT_MAX)]
    """Summed weights of this learner's updates; with one learner equal to ``count``."""
    path: StorePath | Literal[""]
    """Store path of the update; empty before the first."""
    policy_digest: Text
    """sha256 of policy(clock) as the author composed it."""
    nonce: Text
    """Random per commit: settles a commit whose outcome is unknown."""
    cursor: Tally = 0
    """Tasks this learner had issued when it committed."""
    floor: Tally = 0
    """Every task of this learner with a lower number is settled: trained, dropped or dead."""
    groups_trained: Tally = 0
    groups_dropped: dict[Text, Tally] = {}
    """Groups consumed without training, by reason, since the run began."""


class NodeState(Message):
    """Presence: what a node says of itself while it lives; the broker forgets it after its TTL."""

    run: Name
    node: Name
    roles: Annotated[tuple[Text, ...], FailFast(), Field(max_length=8)]
    public_key: Text
    host: Text
    started_at: float
    """Unix seconds."""
    clock: VectorClock
    """Newest policy held."""
    busy: Tally = 0
    """Groups in hand."""
    needs: Annotated[tuple[VectorClock, ...], FailFast(), Field(max_length=16)] = ()
    """Other policies that it may still ask the store for: evaluations in progress are pinned to them."""
    detail: dict[Text, Text] = {}


class DeadLetter(Message):
    """A message that left the ring, and why."""

    run: Name
    queue: Text
    reason: DeadReason
    node: Name
    detail: Annotated[Text, Field(max_length=500)] = ""
    group_id: Text | None = None
    payload: ByteArray = Field(default_factory=lambda: np.zeros(0, np.uint8))
    """The first bytes of the offending message."""


class Finding(Message):
    """One audited group that speaks against its sampler."""

    group_id: GroupId
    engine: Text
    clock: VectorClock
    """Of the policy that the group claims."""
    flags: Annotated[tuple[Text, ...], FailFast(), Field(max_length=16)] = ()
    """What was beyond its tolerance."""
    numbers: dict[Text, float] = {}
    """Statistics, and the evidence of each test after this group, in nats."""
    group: ByteArray
    """The sampler's signed RolloutGroup frame; empty if it was too large to keep."""


class Standing(Message):
    """What the verifiers hold of a sampler: told to it, obeyed by all, and the evidence for a person."""

    run: Name
    node: Name
    public_key: Text
    """The key that is judged."""
    judgement: Judgement
    judge: Name
    """The verifier that found it, or the operator that lifted it."""
    at: float
    """Unix seconds."""
    reason: Annotated[Text, Field(max_length=500)]
    """What is wrong and what to do, in one line."""
    audited: Tally = 0
    """Groups of this key that the judge had audited."""
    findings: Annotated[tuple[Finding, ...], FailFast(), Field(max_length=16)] = ()


class Event(Message):
    """Telemetry: something happened at a node. Field names are the field's own (``reward``, ``ratio``…)."""

    run: Name
    node: Name
    role: Text
    name: Text
    at: float
    """Unix seconds."""
    fields: dict[Text, Observed] = {}


class RunState(Message):
    """The run as a whole, kept in KV beside its RunSpec."""

    spec_json: Text
    spec_digest: Text
    creator: Name


MESSAGE_TYPES: dict[str, type[Message]] = {
    cls.__name__: cls
    for cls in (Task, RolloutGroup, VerifiedGroup, Head, NodeState, DeadLetter, Standing, Event, RunState)
}
