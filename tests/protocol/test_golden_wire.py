"""The wire is frozen: each kind of message as the bytes of protocol version 1.

``tests/golden/wire/<Kind>.bin`` is a frame, ``<Kind>.json`` the same for a reader. When a new protocol
version is meant, write them anew with ``python -m tests.protocol.test_golden_wire --write``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.clock import VectorClock
from protocol.codec import decode, encode
from protocol.identity import Identity
from protocol.limits import PROTOCOL_VERSION
from protocol.message import Message
from protocol.messages import (
    MESSAGE_TYPES,
    DeadLetter,
    Event,
    Finding,
    FinishReason,
    Head,
    NodeState,
    Rollout,
    RolloutGroup,
    RunState,
    SamplingParams,
    Standing,
    Task,
    Verdict,
    VerifiedGroup,
)
from protocol.reasons import DeadReason, Judgement, Unscorable
from tests.protocol.forge import parts

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "wire"
AUTHOR = Identity.deterministic("golden")
CLOCK = VectorClock.of({"learner-2": 3, "learner-1": 12})
CHANGED = (
    "the encoding of {kind} is no longer that of protocol version {version}: peers of the released version "
    "would not understand it. If that is meant, raise PROTOCOL_VERSION in protocol/limits.py, tell of it in "
    "docs/PROTOCOL.md, and run `python -m tests.protocol.test_golden_wire --write`"
)


def _nested(message: Message) -> Any:
    return np.frombuffer(encode(message, AUTHOR), np.uint8)


def golden_messages() -> list[Message]:
    """One message of each kind with every field set."""
    task = Task(
        run="golden",
        group_id="learner-1.41",
        split="held_out",
        row=7,
        prompt_token_ids=[1, 5, 49151, 0],
        group_size=2,
        params=SamplingParams(temperature=0.75, top_p=0.5, top_k=40, min_p=0.25, max_new_tokens=16),
        seed=(1 << 63) - 1,
        clock=CLOCK,
        pinned=True,
        deadline_s=90.5,
        told=None,  # not written, so that tasks of runs without a user stay as they were
    )
    rollouts = (
        Rollout(index=0, token_ids=[4, 5, 2], sampler_logprobs=[-0.5, -1e-7, -0.0], finish=FinishReason.STOP),
        Rollout(index=1, token_ids=[9], sampler_logprobs=[-3.25], finish=FinishReason.LENGTH),
    )
    group = RolloutGroup(
        run="golden",
        group_id="learner-1.41",
        task=_nested(task),
        sampler="sampler-1",
        engine="transformers 5 é",
        clock=CLOCK,
        generation_s=1.5,
        rollouts=rollouts,
    )
    verdicts = (
        Verdict(index=0, reward=-0.125, scores={"exact": 1.0, "$": None}),
        Verdict(index=1, reward=None, unscorable=Unscorable.REWARD_FAILED, note='timeout "5 s"'),
    )
    return [task, group, _verified(group, verdicts), *_states()]


def _verified(group: RolloutGroup, verdicts: tuple[Verdict, ...]) -> VerifiedGroup:
    return VerifiedGroup(
        run="golden",
        group_id=group.group_id,
        group=_nested(group),
        verifier="verifier-1",
        verdicts=verdicts,
        scoring_s=0.0078125,
    )


def _standing() -> Standing:
    finding = Finding(
        group_id="learner-1.41",
        engine="transformers",
        clock=CLOCK,
        flags=("median",),
        numbers={"median": 0.25},
        group=np.arange(3, dtype=np.uint8),
    )
    return Standing(
        run="golden",
        node="sampler-1",
        public_key=AUTHOR.public_key,
        judgement=Judgement.QUARANTINED,
        judge="verifier-1",
        at=1764547200.25,
        reason="it copies completions",
        audited=7,
        findings=(finding,),
    )


def _states() -> list[Message]:
    head = Head(
        run="golden",
        learner="learner-1",
        count=12,
        clock=CLOCK,
        weight=6.5,
        path="golden/updates/learner-1/12-0123456789abcdef",
        policy_digest="ab" * 32,
        nonce="c0ffee",
        cursor=42,
        floor=40,
        groups_trained=180,
        groups_dropped={"stale": 3},
    )
    node = NodeState(
        run="golden",
        node="node-1",
        roles=("sampler", "verifier"),
        public_key=AUTHOR.public_key,
        host="here",
        started_at=1764547200.25,
        clock=CLOCK,
        busy=2,
        needs=(CLOCK,),
        detail={"engine": "transformers"},
    )
    dead = DeadLetter(
        run="golden",
        queue="rollout",
        reason=DeadReason.BAD_STRUCTURE,
        node="verifier-1",
        detail="lengths_differ",
        group_id="learner-1.41",
        payload=np.arange(4, dtype=np.uint8),
    )
    fields: dict[str, Any] = {"step": 3, "ratio": 1.0, "whole": True, "note": "é", "gone": None, "$": 0}
    event = Event(run="golden", node="node-1", role="learner", name="step_done", at=1.5, fields=fields)
    return [
        head,
        node,
        dead,
        _standing(),
        event,
        RunState(spec_json='{"name":"golden"}', spec_digest="0f" * 8, creator="a"),
    ]


GOLDEN = {type(message).__name__: message for message in golden_messages()}


def description(frame: bytes) -> str:
    """A frame for a reader."""
    envelope, body, data = parts(frame)
    arrays, at = [], 0
    for dtype, length in envelope["arrays"]:
        array = np.frombuffer(data, dtype, length, at)
        at += array.nbytes
        arrays.append(data[at - array.nbytes : at].hex() if dtype == "|u1" else array.tolist())
    described = {
        "protocol_version": PROTOCOL_VERSION,
        "bytes": len(frame),
        "sha256": hashlib.sha256(frame).hexdigest(),
        "envelope": envelope,
        "body": body,
        "arrays": arrays,
        "signature": frame[-64:].hex(),
    }
    return json.dumps(described, indent=1, ensure_ascii=False) + "\n"


def test_every_kind_of_message_has_a_golden_frame():
    assert set(GOLDEN) == set(MESSAGE_TYPES)
    files = {f"{kind}.{end}" for kind in MESSAGE_TYPES for end in ("bin", "json")}
    assert {file.name for file in FOLDER.iterdir()} == files


@pytest.mark.parametrize("kind", MESSAGE_TYPES)
def test_golden_frames_are_read_as_they_were_meant(kind: str):
    signed = decode((FOLDER / f"{kind}.bin").read_bytes())
    assert signed.message == GOLDEN[kind], CHANGED.format(kind=kind, version=PROTOCOL_VERSION)
    assert signed.signer == AUTHOR.public_key


@pytest.mark.parametrize("kind", MESSAGE_TYPES)
def test_messages_are_written_as_golden_frames(kind: str):
    frame = encode(GOLDEN[kind], AUTHOR)
    golden = (FOLDER / f"{kind}.bin").read_bytes()
    assert frame == golden, CHANGED.format(kind=kind, version=PROTOCOL_VERSION)


@pytest.mark.parametrize("kind", MESSAGE_TYPES)
def test_the_description_for_readers_is_that_of_the_frame(kind: str):
    text = (FOLDER / f"{kind}.json").read_text("utf-8")
    assert text == description((FOLDER / f"{kind}.bin").read_bytes())


def test_golden_messages_leave_no_field_at_its_default():
    for kind, message in GOLDEN.items():
        unset = set(type(message).model_fields) - message.model_fields_set
        assert not unset, f"{kind} does not freeze {sorted(unset)}"


def write() -> None:
    """Write the golden files anew."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for kind, message in GOLDEN.items():
        frame = encode(message, AUTHOR)
        (FOLDER / f"{kind}.bin").write_bytes(frame)
        (FOLDER / f"{kind}.json").write_text(description(frame), "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.protocol.test_golden_wire --write")
    write()
