"""Whole rollouts with a real engine and a real user, with tools and without: exact to the last id."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from node.system_clock import SystemClock
from protocol.messages import Rollout, Task, Told
from protocol.tools_spec import ToolsSpec
from protocol.user_spec import UserSpec
from roles.learner.policy import Sample
from roles.learner.torch_policy import TorchPolicy
from roles.policy.compose import Factors
from roles.sampler.engine import SampleRequest
from roles.sampler.turns import Conversations
from roles.tasks.taskset import Row, TaskSet
from roles.turns.dialogue import Dialogue
from roles.turns.messages import messages_of
from roles.turns.spans import spans_of
from roles.turns.tools import ToolProcess
from roles.turns.users import UserProcess
from roles.verifier.checks import Rules, structure_fault
from tests.build import a_group, a_runspec, a_task
from tests.engine_rigs import some_factors
from tests.roles.turns.calculator import a_tokenizer, asked, save_calculator
from tests.roles.turns.chat import END, encoded, rendered
from tests.roles.turns.test_conversations import PARAMS, PROMPT, ROLLOUTS, an_engine

pytestmark = pytest.mark.slow  # trains the model that it samples from

TOKENIZER = a_tokenizer()
TOOLS = ToolsSpec(functions=("tests.roles.turns.chat:add",), turns_max=5)
USER = UserSpec(function="tests.roles.turns.user_functions:asks_again")
TOLD = Told(prompt=asked(2, 3))

Sampled = tuple[Dialogue, Task, tuple[Rollout, ...], Factors]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_calculator(tmp_path_factory.mktemp("calculator"))


async def sample(model_dir: Path, tools: ToolsSpec | None) -> Sampled:
    """A group of rollouts whose user asks for another sum, and the policy they were sampled under."""
    run = a_runspec(tasks={"source": "builtin:sort-digits"}, user=USER, tools=tools)
    dialogue = Dialogue.of(run, TOKENIZER, (END,))
    assert dialogue
    user = await UserProcess.open(USER)
    calculator = await ToolProcess.open(tools) if tools else None
    try:
        async with an_engine(model_dir) as engine:
            factors = some_factors(engine.shapes, size=0.01)
            await engine.load_policy("p", factors, newest=True)
            request = SampleRequest(PROMPT, ROLLOUTS, PARAMS, 7, "p", 600.0)
            conversations = Conversations(calculator, dialogue, user)
            group = await conversations.sample(engine, request, SystemClock(), lambda: True, TOLD)
    finally:
        await user.close()
        if calculator:
            await calculator.close()
    task = a_task(prompt_token_ids=PROMPT, group_size=ROLLOUTS, params=PARAMS, told=TOLD)
    return dialogue, task, group.rollouts, factors


@pytest.fixture(scope="module", params=[None, TOOLS], ids=["alone", "with tools"])
def sampled(model_dir: Path, request: pytest.FixtureRequest) -> Sampled:
    return asyncio.run(sample(model_dir, request.param))


def roles_of(sampled: Sampled) -> list[list[str]]:
    dialogue, _, rollouts, _ = sampled
    return [[message["role"] for message in messages_of(rollout, dialogue)] for rollout in rollouts]


def test_the_user_speaks_once_and_the_model_goes_on(sampled):
    found = roles_of(sampled)
    assert len(found) == ROLLOUTS
    assert max(roles.count("user") for roles in found) == 1, "what it says after that is None"
    assert ("user", "assistant") in {pair for roles in found for pair in pairwise(roles)}
    assert any("tool" in roles for roles in found) == (sampled[0]._tools is not None)


def test_structure_checks_find_nothing_wrong(sampled):
    dialogue, task, rollouts, _ = sampled
    tasks = TaskSet([Row(asked(2, 3), "5", "0")], [], [], "d")
    rules = Rules(frozenset({END}), len(TOKENIZER), tasks, dialogue=dialogue, told_of=lambda _row: TOLD)
    assert structure_fault(a_group(task, rollouts=rollouts), task, rules=rules) is None


def test_ids_are_those_of_the_whole_conversation_and_only_turns_are_unmasked(sampled):
    dialogue, _, rollouts, _ = sampled
    whole = [rollout for rollout in rollouts if rollout.token_ids[-1] == END]
    assert any(rollout.loss_mask is not None for rollout in whole)
    for rollout in whole:
        messages = [{"role": "user", "content": asked(2, 3)}]
        for span, said in zip(spans_of(rollout.sampled), messages_of(rollout, dialogue), strict=True):
            text = dialogue.text(rollout.token_ids[span.tokens].tolist())
            assert span.sampled == (said["role"] == "assistant")
            messages.append({"role": said["role"], "content": text if span.sampled else said["content"]})
        ids = [*PROMPT.tolist(), *rollout.token_ids.tolist(), *encoded(TOKENIZER, "\n")]
        assert ids == rendered(TOKENIZER, messages, more=False)


def test_on_fresh_data_the_importance_ratio_of_every_turn_is_one(sampled, model_dir):
    """Ids, mask, log-probabilities and the learner's forward pass agree, or this is far from 0."""
    _, task, rollouts, factors = sampled
    policy = TorchPolicy.open(model_dir, a_runspec(lora={"rank": 4, "alpha": 8}))
    policy.load(factors)
    samples = [
        Sample(
            prompt_token_ids=task.prompt_token_ids,
            token_ids=rollout.token_ids,
            sampler_logprobs=rollout.sampler_logprobs,
            advantage=1.0 if rollout.index % 2 else -1.0,
            truncated=False,
            temperature=PARAMS.temperature,
            on_policy=True,
            loss_mask=rollout.loss_mask,
        )
        for rollout in rollouts
    ]
    metrics = policy.step(samples, 0).metrics
    assert metrics["ratio_max_dev_on_policy"] < 1e-3
    assert metrics["batch/trained_tokens_per_step"] == np.sum([r.sampled.sum() for r in rollouts])
