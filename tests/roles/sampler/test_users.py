"""Rollouts with a simulated user at the sampler: who is asked when, told what, and what ends a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from node.virtual_time import in_virtual_time
from protocol.errors import EngineError
from protocol.messages import FinishReason, RolloutGroup, Told
from protocol.user_spec import UserSpec
from roles.sampler.turns import Conversations
from roles.turns.dialogue import Dialogue
from tests.roles.sampler.scene import Scene, a_run
from tests.roles.sampler.test_turns import ANSWER, CALLING, LIMIT, TOKENIZER, SpeakingEngine, Sums
from tests.roles.turns.chat import END, a_call, encoded

TOLD = Told(prompt="2+3", columns={"mood": "sad"})
OTHER = [*encoded(TOKENIZER, "six"), END]


class Doubtful:
    """Says its lines and then nothing, and remembers what it was told."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        self.heard: list[tuple[Told, Sequence[Mapping[str, Any]]]] = []

    async def answer(self, told: Told, messages: Sequence[Mapping[str, Any]]) -> str | None:
        self.heard.append((told, messages))
        spoken = sum(message["role"] == "user" for message in messages)
        return self.lines[spoken] if spoken < len(self.lines) else None


async def a_scene(
    directory: Path,
    turns: dict[int, list[list[int]]],
    user: Doubtful,
    tools: Sums | None = None,
    **user_spec: Any,
) -> Scene:
    spec = UserSpec(function="m:f", **user_spec)
    dialogue = Dialogue(TOKENIZER, (END,), 6, tools=tools is not None, user=spec)
    scene = await Scene.at(
        directory,
        a_run(),
        engine_type=SpeakingEngine,
        conversations=Conversations(tools, dialogue, user),
        vocab_size=len(TOKENIZER),
        context_tokens=2000,
    )
    assert isinstance(scene.engine, SpeakingEngine)
    scene.engine.turns = turns
    return scene


async def sampled(scene: Scene, tokens: int = LIMIT) -> RolloutGroup:
    await scene.task(tokens=tokens, deadline_s=1000.0, told=TOLD)
    await scene.pass_time(300.0)
    return scene.groups()["learner-1.0"]


def user_ids(text: str) -> list[int]:
    ids = Dialogue(TOKENIZER, (END,), 6, tools=False, user=UserSpec(function="m:f")).user_ids(text)
    return [int(token) for token in ids]


@in_virtual_time
async def test_a_turn_without_a_call_is_answered_by_the_user_and_masked(tmp_path: Path):
    user = Doubtful("sure?")
    scene = await a_scene(tmp_path, {0: [ANSWER, OTHER], 1: [OTHER]}, user)
    first, second = (await sampled(scene)).rollouts
    message = user_ids("sure?")
    assert first.token_ids.tolist() == [*ANSWER, *message, *OTHER]
    assert second.token_ids.tolist() == [*OTHER, *message, *OTHER]
    assert first.loss_mask is not None
    assert first.loss_mask.tolist() == [1] * len(ANSWER) + [0] * len(message) + [1] * len(OTHER)
    assert first.sampler_logprobs.tolist() == [-0.5] * len(ANSWER) + [0.0] * len(message) + [-1.5] * len(
        OTHER
    )
    assert first.finish is FinishReason.STOP
    await scene.drain()


@in_virtual_time
async def test_the_user_is_told_the_row_and_all_messages(tmp_path: Path):
    user = Doubtful("sure?")
    scene = await a_scene(tmp_path, {0: [ANSWER, OTHER], 1: [ANSWER, OTHER]}, user)
    await sampled(scene)
    said = [{"role": "assistant", "content": "5"}]
    whole = [*said, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "six"}]
    assert [heard for heard in user.heard if len(heard[1]) == 1] == [(TOLD, tuple(said))] * 2
    assert [heard for heard in user.heard if len(heard[1]) > 1] == [(TOLD, tuple(whole))] * 2
    await scene.drain()


@in_virtual_time
async def test_nothing_to_say_ends_the_rollout(tmp_path: Path):
    scene = await a_scene(tmp_path, {0: [ANSWER], 1: [OTHER]}, Doubtful())
    first, second = (await sampled(scene)).rollouts
    assert (first.token_ids.tolist(), first.loss_mask) == (ANSWER, None)
    assert (second.token_ids.tolist(), second.loss_mask) == (OTHER, None)
    await scene.drain()


@in_virtual_time
async def test_the_run_says_how_often_the_user_speaks(tmp_path: Path):
    user = Doubtful(*"abcdef")
    scene = await a_scene(tmp_path, {0: [ANSWER] * 6, 1: [ANSWER] * 6}, user, messages_max=2)
    first, _ = (await sampled(scene)).rollouts
    assert first.token_ids.tolist() == [*ANSWER, *user_ids("a"), *ANSWER, *user_ids("b"), *ANSWER]
    assert len(user.heard) == 2 * 2
    await scene.drain()


@in_virtual_time
async def test_a_turn_that_calls_is_the_tools_and_one_that_does_not_the_users(tmp_path: Path):
    user, tools = Doubtful("sure?"), Sums()
    scene = await a_scene(tmp_path, {0: [CALLING, OTHER, CALLING, OTHER], 1: [ANSWER]}, user, tools)
    first, second = (await sampled(scene)).rollouts
    reply = Dialogue(TOKENIZER, (END,), 6).reply_ids(["5"]).tolist()
    message = user_ids("sure?")
    assert first.token_ids.tolist() == [*CALLING, *reply, *OTHER, *message, *CALLING, *reply, *OTHER]
    assert second.token_ids.tolist() == [*ANSWER, *message, *OTHER]
    assert len(tools.calls) == 2
    roles = [[message["role"] for message in messages] for _, messages in user.heard if len(messages) == 3]
    assert ["assistant", "tool", "assistant"] in roles
    await scene.drain()


@in_virtual_time
async def test_without_tools_what_looks_like_a_call_is_text_for_the_user(tmp_path: Path):
    user = Doubtful("what?")
    scene = await a_scene(tmp_path, {0: [CALLING, ANSWER], 1: [ANSWER, OTHER]}, user)
    first, _ = (await sampled(scene)).rollouts
    assert first.token_ids.tolist() == [*CALLING, *user_ids("what?"), *ANSWER]
    contents = [messages[0]["content"] for _, messages in user.heard]
    assert a_call(a=2, b=3) in contents
    await scene.drain()


@in_virtual_time
async def test_a_turn_that_was_cut_is_not_answered(tmp_path: Path):
    user = Doubtful("sure?")
    scene = await a_scene(tmp_path, {0: [OTHER], 1: [OTHER]}, user)
    first, _ = (await sampled(scene, tokens=2)).rollouts
    assert (first.finish, user.heard) == (FinishReason.LENGTH, [])
    await scene.drain()


@in_virtual_time
async def test_a_message_without_room_for_a_token_after_it_ends_the_rollout_before_it(tmp_path: Path):
    scene = await a_scene(tmp_path, {0: [ANSWER, OTHER], 1: [ANSWER, OTHER]}, Doubtful("sure?"))
    first, _ = (await sampled(scene, tokens=len(ANSWER) + len(user_ids("sure?")))).rollouts
    assert (first.token_ids.tolist(), first.loss_mask) == (ANSWER, None)
    await scene.drain()


class Dying(Doubtful):
    """Cannot be asked at first."""

    async def answer(self, told: Told, messages: Sequence[Mapping[str, Any]]) -> str | None:
        said = await super().answer(told, messages)
        if len(self.heard) == 1:
            raise EngineError("the user's process died")
        return said


@in_virtual_time
async def test_a_task_whose_user_died_goes_back_to_the_queue(tmp_path: Path):
    user = Dying("sure?")
    scene = await a_scene(tmp_path, {0: [ANSWER, OTHER], 1: [ANSWER, OTHER]}, user)
    assert len((await sampled(scene)).rollouts) == 2, "it was sampled again"
    await scene.drain()


@in_virtual_time
async def test_a_task_that_tells_the_user_nothing_is_not_sampled(tmp_path: Path):
    user = Doubtful("sure?")
    scene = await a_scene(tmp_path, {0: [ANSWER], 1: [ANSWER]}, user)
    await scene.task(tokens=LIMIT, deadline_s=1000.0)
    await scene.pass_time(300.0)
    assert scene.groups() == {}
    assert user.heard == []
    await scene.drain()
