"""Samples whole conversations: turns of an engine, and between them what tools reply.

    prompt ─▶ engine: first turns of the group ─┬▶ no call, or cut off: the rollout is whole
                    ▲                           └▶ calls ─▶ tools ─▶ framed reply ─┐
                    └───── engine: one more turn after everything so far ◀─────────┘

The engine is asked for each later turn under the policy of the first, with the tokens that it saw and sampled
before as its prompt, so ids and log-probabilities are exactly those that were sampled. Any engine will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np

from protocol.arrays import IntArray
from protocol.errors import EngineError
from protocol.messages import FinishReason, Rollout
from protocol.ports import Clock
from roles.sampler.engine import Engine, Sampled, SampleRequest
from roles.streams import turn_seed
from roles.turns.dialogue import Dialogue
from roles.turns.tools import Tools

More = Callable[[Rollout, IntArray, int], Awaitable[Rollout | None]]


@dataclass(frozen=True, slots=True)
class Conversations:
    """What a sampler needs to go on after a turn."""

    tools: Tools
    dialogue: Dialogue

    async def sample(
        self, engine: Engine, request: SampleRequest, clock: Clock, wanted: Callable[[], bool]
    ) -> Sampled:
        """Rollouts that are whole before the deadline, in order of index.

        ``request`` names its policy, which must stay resident. Raises EngineError like the engine, and when
        nobody ``wanted`` rollouts of this policy any more between two turns.
        """
        assert request.policy is not None, "all turns of a group are of one policy"
        began = clock.monotonic()
        first = await engine.sample(request)

        async def more(rollout: Rollout, ids: IntArray, turn: int) -> Rollout | None:
            """The next turn after ``ids``, which is everything since the prompt; None past the deadline."""
            if not wanted():
                raise EngineError(f"policy {request.policy} has become too old for anybody")
            left_s = request.deadline_s - (clock.monotonic() - began)
            if left_s <= 0:
                return None
            asked = replace(
                request,
                prompt_token_ids=np.concatenate([request.prompt_token_ids, ids]),
                count=1,
                params=request.params.model_copy(
                    update={"max_new_tokens": request.params.max_new_tokens - len(ids)}
                ),
                seed=turn_seed(request.seed, rollout.index, turn),
                deadline_s=left_s,
            )
            sampled = await engine.sample(asked)
            return sampled.rollouts[0] if sampled.rollouts else None

        conversations = [
            asyncio.ensure_future(self._finish(rollout, request.params.max_new_tokens, more))
            for rollout in first.rollouts
        ]
        try:
            whole = await asyncio.gather(*conversations)
        finally:
            for conversation in conversations:
                conversation.cancel()
        rollouts = tuple(rollout for rollout in whole if rollout is not None)
        return Sampled(first.policy, rollouts, clock.monotonic() - began)

    async def _finish(self, rollout: Rollout, tokens_max: int, more: More) -> Rollout | None:
        """Go on from a first turn until one calls nothing, or there is no room or turn left."""
        last = rollout
        for turn in range(1, self.dialogue.turns_max):
            if last.finish is FinishReason.LENGTH:
                break
            calls = self.dialogue.calls_in(last.token_ids)
            if not calls:
                break
            replies = await asyncio.gather(*(self.tools.reply(call) for call in calls))
            reply = self.dialogue.reply_ids(replies)
            ids = np.concatenate([rollout.token_ids, reply])
            if len(ids) >= tokens_max:
                break
            found = await more(rollout, ids, turn)
            if found is None:
                return None
            rollout, last = joined(rollout, reply, found), found
        return rollout


def joined(rollout: Rollout, reply: IntArray, turn: Rollout) -> Rollout:
    """``rollout``, what tools replied to its last turn, and the turn after that (pure)."""
    before, given = rollout.sampled.astype(np.uint8), len(reply)
    return Rollout(
        index=rollout.index,
        token_ids=np.concatenate([rollout.token_ids, reply, turn.token_ids]),
        sampler_logprobs=np.concatenate(
            [rollout.sampler_logprobs, np.zeros(given, np.float32), turn.sampler_logprobs]
        ),
        finish=turn.finish,
        loss_mask=np.concatenate([before, np.zeros(given, np.uint8), turn.sampled.astype(np.uint8)]),
    )
