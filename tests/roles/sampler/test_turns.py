"""Rollouts with turns at the sampler: one policy for all turns, one deadline, exact ids, masks and seeds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from node.virtual_time import in_virtual_time
from protocol.errors import EngineError
from protocol.messages import FinishReason, Rollout, RolloutGroup
from roles.sampler.engine import Sampled, SampleRequest
from roles.sampler.turns import Conversations
from roles.streams import turn_seed
from roles.turns.calls import ToolCall
from roles.turns.dialogue import Dialogue
from tests.roles.sampler.scene import ListingEngine, Scene, a_run
from tests.roles.turns.chat import END, a_call, a_character_tokenizer, encoded

TOKENIZER = a_character_tokenizer()
CALLING = [*encoded(TOKENIZER, a_call(a=2, b=3)), END]
ANSWER = [*encoded(TOKENIZER, "5"), END]
TURN_S = float(len(CALLING))
"""Seconds of a turn that calls, at one second a token."""
LIMIT = 400


class SpeakingEngine(ListingEngine):
    """Says what it is told to: ``turns[index]`` for rollout ``index`` of a group, one turn a request."""

    turns: dict[int, list[list[int]]]
    requests: list[SampleRequest]

    async def sample(self, request: SampleRequest) -> Sampled:
        if not hasattr(self, "requests"):
            self.requests = []
        self.requests.append(request)
        return await super().sample(request)

    def _rollout(self, logprobs: Any, request: SampleRequest, index: int) -> Rollout:
        made_up = super()._rollout(logprobs, request, index)
        spoken = request.prompt_token_ids.tolist().count(END) // 2  # a turn and a reply end with one each
        ids = self.turns[index][spoken][: request.params.max_new_tokens]
        return made_up.model_copy(
            update={
                "token_ids": np.array(ids, np.int32),
                "sampler_logprobs": np.full(len(ids), -0.5 - spoken, np.float32),
                "finish": FinishReason.STOP if ids[-1] == END else FinishReason.LENGTH,
            }
        )


class Sums:
    """Answers calls in its own time, and remembers them."""

    def __init__(self, ground_clock: Any = None, seconds: float = 0.0) -> None:
        self.clock, self.seconds = ground_clock, seconds
        self.calls: list[ToolCall] = []

    async def reply(self, call: ToolCall) -> str:
        self.calls.append(call)
        if self.clock is not None:
            await self.clock.sleep(self.seconds)
        return str(sum(call.arguments.values()))


async def a_scene(
    directory: Path, turns: dict[int, list[list[int]]], tools: Sums, *, turns_max: int = 4, **run: Any
) -> Scene:
    scene = await Scene.at(
        directory,
        a_run(**run),
        engine_type=SpeakingEngine,
        conversations=Conversations(tools, Dialogue(TOKENIZER, (END,), turns_max)),
        vocab_size=len(TOKENIZER),
        context_tokens=2000,
    )
    assert isinstance(scene.engine, SpeakingEngine)
    scene.engine.turns = turns
    return scene


async def sampled(scene: Scene, seconds: float, **task: Any) -> RolloutGroup | None:
    await scene.task(tokens=LIMIT, **({"deadline_s": 1000.0} | task))
    await scene.pass_time(seconds)
    return scene.groups().get("learner-1.0")


def requests(scene: Scene) -> list[SampleRequest]:
    assert isinstance(scene.engine, SpeakingEngine)
    return scene.engine.requests


@in_virtual_time
async def test_ids_masks_and_logprobs_are_those_of_the_turns_and_the_reply_between_them(tmp_path: Path):
    tools = Sums()
    scene = await a_scene(tmp_path, {0: [CALLING, ANSWER], 1: [ANSWER]}, tools)
    group = await sampled(scene, 100.0)
    assert group
    called, plain = group.rollouts
    reply = Dialogue(TOKENIZER, (END,), 4).reply_ids(["5"]).tolist()
    assert tools.calls == [ToolCall("add", {"a": 2, "b": 3})]
    assert called.token_ids.tolist() == [*CALLING, *reply, *ANSWER]
    assert called.loss_mask is not None
    assert called.loss_mask.tolist() == [1] * len(CALLING) + [0] * len(reply) + [1] * len(ANSWER)
    expected = [-0.5] * len(CALLING) + [0.0] * len(reply) + [-1.5] * len(ANSWER)
    assert called.sampler_logprobs.tolist() == expected
    assert (plain.token_ids.tolist(), plain.loss_mask) == (ANSWER, None)
    assert [rollout.finish for rollout in group.rollouts] == [FinishReason.STOP] * 2
    await scene.drain()


@in_virtual_time
async def test_a_later_turn_is_asked_for_with_everything_so_far_and_a_seed_of_its_own(tmp_path: Path):
    scene = await a_scene(tmp_path, {0: [CALLING, CALLING, ANSWER], 1: [ANSWER]}, Sums())
    assert await sampled(scene, 300.0)
    first, second, third = requests(scene)
    assert first.policy == second.policy == third.policy is not None
    for request, before, turn in ((second, first, 1), (third, second, 2)):
        grown = len(request.prompt_token_ids) - len(before.prompt_token_ids)
        assert (
            request.prompt_token_ids[: len(before.prompt_token_ids)].tolist()
            == before.prompt_token_ids.tolist()
        )
        assert request.params.max_new_tokens == before.params.max_new_tokens - grown
        assert request.seed == turn_seed(first.seed, 0, turn)
    assert len({first.seed, second.seed, third.seed}) == 3
    await scene.drain()


@in_virtual_time
async def test_the_run_says_how_many_turns_a_rollout_may_have(tmp_path: Path):
    scene = await a_scene(tmp_path, {0: [CALLING] * 9, 1: [ANSWER]}, Sums(), turns_max=2)
    group = await sampled(scene, 300.0)
    assert group
    assert Counter(group.rollouts[0].token_ids.tolist())[END] == 2 + 1, "two turns and one reply"
    assert group.rollouts[0].finish is FinishReason.STOP
    await scene.drain()


@in_virtual_time
async def test_a_reply_without_room_for_a_token_after_it_ends_the_rollout_before_it(tmp_path: Path):
    scene = await a_scene(tmp_path, {0: [CALLING, ANSWER], 1: [ANSWER]}, Sums())
    reply = len(Dialogue(TOKENIZER, (END,), 4).reply_ids(["5"]))
    await scene.task(0, tokens=len(CALLING) + reply, deadline_s=1000.0)
    await scene.task(1, tokens=len(CALLING) + reply + 1, deadline_s=1000.0)
    await scene.pass_time(300.0)
    whole, cut = scene.groups()["learner-1.0"].rollouts[0], scene.groups()["learner-1.1"].rollouts[0]
    assert (whole.token_ids.tolist(), whole.finish, whole.loss_mask) == (CALLING, FinishReason.STOP, None)
    assert len(cut.token_ids) == len(CALLING) + reply + 1
    assert cut.finish is FinishReason.LENGTH
    await scene.drain()


@in_virtual_time
async def test_all_turns_are_of_the_policy_that_the_group_began_with(tmp_path: Path):
    scene = await a_scene(tmp_path, {0: [CALLING, CALLING, ANSWER], 1: [ANSWER]}, Sums())
    await scene.task(tokens=LIMIT, deadline_s=1000.0)
    await scene.pass_time(TURN_S / 2)
    await scene.commit(1)
    await scene.pass_time(3.0)
    assert scene.sampler.clock.text == "learner-1:1"
    assert len(scene.engine.resident) == 2, "the group still needs the older one"
    await scene.pass_time(300.0)
    assert scene.groups()["learner-1.0"].clock.text == "genesis"
    assert len({request.policy for request in requests(scene)}) == 1
    assert len(scene.engine.resident) == 1
    await scene.drain()


@in_virtual_time
async def test_a_group_that_becomes_too_old_between_two_turns_goes_back(tmp_path: Path):
    scene = await a_scene(
        tmp_path, {0: [CALLING, ANSWER], 1: [ANSWER]}, Sums(), staleness={"max_staleness": 1}
    )
    await scene.task(tokens=LIMIT, deadline_s=1000.0)
    await scene.pass_time(TURN_S / 2)
    for count in (1, 2):
        await scene.commit(count)
    await scene.pass_time(300.0)
    assert scene.groups()["learner-1.0"].clock.text == "learner-1:2", "sampled again under the newest"
    assert len({request.policy for request in requests(scene)}) == 2
    await scene.drain()


@in_virtual_time
async def test_rollouts_that_are_not_whole_at_the_deadline_are_left_out(tmp_path: Path):
    turns = {0: [CALLING] * 9, 1: [ANSWER], 2: [ANSWER]}
    scene = await a_scene(tmp_path, turns, Sums(), turns_max=9)
    deadline_s = 1.5 * TURN_S
    group = await sampled(scene, 300.0, deadline_s=deadline_s, group_size=3)
    assert group
    assert [rollout.index for rollout in group.rollouts] == [1, 2]
    assert group.generation_s >= deadline_s
    await scene.drain()


class Broken(Sums):
    """Nothing can be called."""

    async def reply(self, call: ToolCall) -> str:
        await super().reply(call)
        if len(self.calls) == 1:
            raise EngineError("the tools' process died")
        return "5"


@in_virtual_time
async def test_a_task_whose_tools_died_goes_back_to_the_queue(tmp_path: Path):
    tools = Broken()
    scene = await a_scene(tmp_path, {0: [CALLING, ANSWER], 1: [ANSWER]}, tools)
    assert await sampled(scene, 300.0), "it was sampled again"
    assert len(tools.calls) == 2
    await scene.drain()
