"""What does it cost to encode, sign, decode and verify a group of rollouts?"""

from __future__ import annotations

import json

import numpy as np

from bench.harness import Goal, report, say, timed_ms
from protocol.clock import GENESIS
from protocol.codec import decode, encode
from protocol.identity import Identity
from protocol.messages import FinishReason, Rollout, RolloutGroup

GROUP_SIZE, TOKENS, REPEATS = 8, 512, 200


def a_group() -> RolloutGroup:
    """A group of GROUP_SIZE rollouts with TOKENS tokens each, as a sampler would send it."""
    rng = np.random.default_rng(0)
    return RolloutGroup(
        run="bench",
        group_id="learner-1.0",
        task=np.zeros(1200, np.uint8),
        sampler="sampler-1",
        engine="bench",
        clock=GENESIS,
        generation_s=1.0,
        rollouts=tuple(
            Rollout(
                index=i,
                token_ids=rng.integers(0, 150_000, TOKENS, np.int32),
                sampler_logprobs=-rng.exponential(0.5, TOKENS).astype(np.float32),
                finish=FinishReason.LENGTH,
            )
            for i in range(GROUP_SIZE)
        ),
    )


def as_json(group: RolloutGroup) -> bytes:
    """The same content with the arrays as JSON lists, to compare with."""
    body = group.model_dump()
    rollouts = [
        r | {"token_ids": r["token_ids"].tolist(), "sampler_logprobs": r["sampler_logprobs"].tolist()}
        for r in body["rollouts"]
    ]
    return json.dumps(body | {"task": group.task.tolist(), "rollouts": rollouts}).encode()


def main() -> None:
    """Measure and report."""
    group, identity = a_group(), Identity.deterministic("bench")
    frame, text = encode(group, identity), as_json(group)
    say(f"{REPEATS} repeats of a group of {GROUP_SIZE} x {TOKENS} tokens")
    encode_ms = timed_ms(lambda: encode(group, identity), REPEATS)
    decode_ms = timed_ms(lambda: decode(frame), REPEATS)
    figures = {
        "frame_bytes": len(frame),
        "encode_ms": encode_ms,
        "decode_ms": decode_ms,
        "json_lists_bytes": len(text),
        "json_lists_dump_ms": timed_ms(lambda: as_json(group), REPEATS // 4),
        "json_lists_load_ms": timed_ms(lambda: json.loads(text), REPEATS // 4),
    }
    goals = [
        Goal("encode_ms", encode_ms, at_most=5.0),
        Goal("decode_ms", decode_ms, at_most=5.0),
        Goal("bytes_per_token", len(frame) / (GROUP_SIZE * TOKENS), at_most=9.0),
    ]
    report(figures, goals)


if __name__ == "__main__":
    main()
