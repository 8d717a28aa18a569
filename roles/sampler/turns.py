"""Samples whole conversations: turns of an engine, and between them what tools reply or a user says.

    prompt ─▶ engine: first turns of the group ─┬▶ cut off, or nobody answers: the rollout is whole
                    ▲                           ├▶ calls ─▶ tools ─▶ framed replies ─────┐
                    │                           └▶ no call ─▶ user ─▶ framed message ─┤
                    └───── engine: one more turn after everything so far ◀────────────┘

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
from protocol.messages import FinishReason, Rollout, Told
from protocol.ports import Clock
from roles.sampler.engine import Engine, Sampled, SampleRequest
from roles.streams import turn_seed
from roles.turns.dialogue import Dialogue
from roles.turns.messages import messages_of
from roles.turns.tools import Tools
from roles.turns.users import User

More = Callable[[Rollout, IntArray, int], Awaitable[Rollout | None]]


@dataclass(frozen=True, slots=True)
class Conversations:
    """What a sampler needs to go on after a turn."""

    tools: Tools | None
    dialogue: Dialogue
    user: User | None = None

    async def sample(
        self,
        engine: Engine,
        request: SampleRequest,
        clock: Clock,
        wanted: Callable[[], bool],
        told: Told | None = None,
    ) -> Sampled:
        """Rollouts that are whole before the deadline, in order of index.

        ``request`` names its policy, which must stay resident; ``told`` is what a user may know. Raises
        EngineError like the engine, when nobody ``wanted`` rollouts of this policy any more between two
        turns, and when a user is told nothing.
        """
        assert request.policy is not None, "all turns of a group are of one policy"
        if self.user and told is None:
            raise EngineError("the task does not tell what the run's user may know")
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
            asyncio.ensure_future(self._finish(rollout, request.params.max_new_tokens, more, told))
            for rollout in first.rollouts
        ]
        try:
            whole = await asyncio.gather(*conversations)
        finally:
            for conversation in conversations:
                conversation.cancel()
        rollouts = tuple(rollout for rollout in whole if rollout is not None)
        return Sampled(first.policy, rollouts, clock.monotonic() - began)

    async def _finish(
        self, rollout: Rollout, tokens_max: int, more: More, told: Told | None
    ) -> Rollout | None:
        """Go on from a first turn until nobody answers one, or there is no room or turn left."""
        last = rollout
        for turn in range(1, self.dialogue.turns_max):
            if last.finish is FinishReason.LENGTH:
                break
            reply = await self._given(rollout, last, told)
            if reply is None:
                break
            ids = np.concatenate([rollout.token_ids, reply])
            if len(ids) >= tokens_max:
                break
            found = await more(rollout, ids, turn)
            if found is None:
                return None
            rollout, last = joined(rollout, reply, found), found
        return rollout

    async def _given(self, rollout: Rollout, last: Rollout, told: Told | None) -> IntArray | None:
        """What is given after the ``last`` turn of a rollout, framed; None if that is nothing."""
        if self.tools and (calls := self.dialogue.calls_in(last.token_ids)):
            replies = await asyncio.gather(*map(self.tools.reply, calls))
            return self.dialogue.reply_ids(replies)
        if self.user is None or self.dialogue.user is None or told is None:
            return None
        messages = messages_of(rollout, self.dialogue)
        if sum(message["role"] == "user" for message in messages) >= self.dialogue.user.messages_max:
            return None
        said = await self.user.answer(told, messages)
        return None if said is None else self.dialogue.user_ids(said)


def joined(rollout: Rollout, reply: IntArray, turn: Rollout) -> Rollout:
    """``rollout``, the ``reply`` to its last turn, and the turn after that (pure)."""
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
