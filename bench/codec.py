"""What does a frame cost beside plain JSON, in bytes and in time to write and to read?

The plain JSON is what pydantic makes of the same content with its arrays as lists: not signed, not
checked against any signature, so the comparison favours it.
"""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel

from bench.harness import Figure, Goal, report, say, timed_ms
from protocol.clock import GENESIS
from protocol.codec import decode, encode
from protocol.identity import Identity, verify
from protocol.messages import FinishReason, Rollout, RolloutGroup, SamplingParams, Task

SIZES = ((1, 16), (8, 512), (8, 4096))
"""Rollouts and tokens of each."""
PROMPT_TOKENS = 128
VOCABULARY = 49152
REPEATS = 200
ENCODE_MS_MAX, DECODE_MS_MAX, BYTES_A_TOKEN_MAX = 0.4, 0.5, 9.0
"""Goals for 8 x 512 tokens."""


class PlainRollout(BaseModel):
    """A Rollout with lists."""

    index: int
    token_ids: list[int]
    sampler_logprobs: list[float]
    finish: FinishReason


class PlainGroup(BaseModel):
    """A RolloutGroup with lists."""

    run: str
    group_id: str
    task: list[int]
    sampler: str
    engine: str
    clock: dict[str, int]
    generation_s: float
    rollouts: list[PlainRollout]


def a_group(rollouts: int, tokens: int, learner: Identity) -> RolloutGroup:
    """A group as a sampler sends it, with the learner's task inside."""
    rng = np.random.default_rng(0)
    task = Task(
        run="bench",
        group_id="learner-1.0",
        row=0,
        prompt_token_ids=rng.integers(0, VOCABULARY, PROMPT_TOKENS, np.int32),
        group_size=rollouts,
        params=SamplingParams(max_new_tokens=tokens),
        seed=0,
        clock=GENESIS,
        deadline_s=60.0,
    )
    return RolloutGroup(
        run="bench",
        group_id=task.group_id,
        task=np.frombuffer(encode(task, learner), np.uint8),
        sampler="sampler-1",
        engine="bench",
        clock=GENESIS,
        generation_s=1.0,
        rollouts=tuple(
            Rollout(
                index=i,
                token_ids=rng.integers(0, VOCABULARY, tokens, np.int32),
                sampler_logprobs=-rng.exponential(0.5, tokens).astype(np.float32),
                finish=FinishReason.LENGTH,
            )
            for i in range(rollouts)
        ),
    )


def measured(rollouts: int, tokens: int, learner: Identity, sampler: Identity) -> dict[str, Figure]:
    """Bytes and milliseconds for one size."""
    group = a_group(rollouts, tokens, learner)
    frame = encode(group, sampler)
    plain = PlainGroup.model_validate_json(group.model_dump_json())
    text = plain.model_dump_json()
    signed, signature = frame[:-64], frame[-64:]
    return {
        "frame_bytes": len(frame),
        "json_bytes": len(text),
        "encode_ms": timed_ms(lambda: encode(group, sampler), REPEATS),
        "decode_ms": timed_ms(lambda: decode(frame), REPEATS),
        "sign_ms": timed_ms(lambda: sampler.sign(signed), REPEATS),
        "verify_ms": timed_ms(lambda: verify(sampler.public_key, signed, signature), REPEATS),
        "json_encode_ms": timed_ms(plain.model_dump_json, REPEATS // 4),
        "json_decode_ms": timed_ms(lambda: PlainGroup.model_validate_json(text), REPEATS // 4),
    }


def main() -> None:
    """Measure and report."""
    learner, sampler = Identity.deterministic("learner-1"), Identity.deterministic("sampler-1")
    figures: dict[str, Figure] = {}
    for rollouts, tokens in SIZES:
        say(f"{rollouts} x {tokens} tokens")
        for name, value in measured(rollouts, tokens, learner, sampler).items():
            figures[f"{rollouts}x{tokens}/{name}"] = value
    encode_ms, decode_ms = float(figures["8x512/encode_ms"] or 0), float(figures["8x512/decode_ms"] or 0)
    bytes_a_token = float(figures["8x512/frame_bytes"] or 0) / (8 * 512)
    goals = [
        Goal("8x512/encode_ms", encode_ms, at_most=ENCODE_MS_MAX),
        Goal("8x512/decode_ms", decode_ms, at_most=DECODE_MS_MAX),
        Goal("8x512/bytes_a_token", bytes_a_token, at_most=BYTES_A_TOKEN_MAX),
    ]
    report(figures, goals)


if __name__ == "__main__":
    main()
