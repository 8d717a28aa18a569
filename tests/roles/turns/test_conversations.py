"""Whole rollouts with a real engine and real tools: exact from the first token to the learner's loss."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from node.system_clock import SystemClock
from protocol.audit_spec import ToleranceSpec
from protocol.messages import Rollout, SamplingParams, Task
from protocol.runspec import LoraSpec, RunSpec
from protocol.tools_spec import ToolsSpec
from roles.learner.policy import Sample
from roles.learner.torch_policy import TorchPolicy
from roles.policy.compose import Factors
from roles.sampler.engine import SampleRequest
from roles.sampler.transformers_engine import TransformersEngine
from roles.sampler.turns import Conversations
from roles.tasks.taskset import Row, TaskSet
from roles.turns.dialogue import Dialogue
from roles.turns.messages import messages_of
from roles.turns.spans import spans_of
from roles.turns.tools import ToolProcess
from roles.verifier.audit_copies import Copies
from roles.verifier.audit_evidence import evidence_of
from roles.verifier.audit_facts import TokenFacts
from roles.verifier.checks import Rules, structure_fault
from roles.verifier.torch_recompute import Recomputer
from tests.build import a_group, a_runspec, a_task
from tests.engine_rigs import some_factors
from tests.roles.turns.calculator import a_tokenizer, asked, save_calculator
from tests.roles.turns.chat import END, encoded, rendered

pytestmark = pytest.mark.slow  # trains the model that it samples from

LORA = LoraSpec(rank=4, alpha=8)
PARAMS = SamplingParams(max_new_tokens=150, temperature=0.9)
TOOLS = ToolsSpec(functions=("tests.roles.turns.chat:add",), turns_max=3)
ROLLOUTS = 8
TOKENIZER = a_tokenizer()
DIALOGUE = Dialogue(TOKENIZER, (END,), TOOLS.turns_max)
PROMPT = np.array(rendered(TOKENIZER, [{"role": "user", "content": asked(2, 3)}], more=True), np.int32)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_calculator(tmp_path_factory.mktemp("calculator"))


@contextlib.asynccontextmanager
async def an_engine(model_dir: Path) -> AsyncIterator[TransformersEngine]:
    engine = await asyncio.to_thread(
        lambda: TransformersEngine.open(
            model_dir,
            LORA,
            (END,),
            device="cpu",
            dtype="float32",
            rows_max=32,
            groups_per_batch=None,
            threads=1,
        )
    )
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def sampled(model_dir: Path) -> tuple[Task, tuple[Rollout, ...], Factors]:
    """A group of rollouts by the engine and the calculator, and the policy they were sampled under."""

    async def sample() -> tuple[Task, tuple[Rollout, ...], Factors]:
        tools = await ToolProcess.open(TOOLS)
        try:
            async with an_engine(model_dir) as engine:
                factors = some_factors(engine.shapes, size=0.01)
                await engine.load_policy("p", factors, newest=True)
                request = SampleRequest(PROMPT, ROLLOUTS, PARAMS, 7, "p", 600.0)
                group = await Conversations(tools, DIALOGUE).sample(
                    engine, request, SystemClock(), lambda: True
                )
        finally:
            await tools.close()
        task = a_task(prompt_token_ids=PROMPT, group_size=ROLLOUTS, params=PARAMS)
        return task, group.rollouts, factors

    return asyncio.run(sample())


def test_the_model_calls_its_tool_and_goes_on(sampled):
    _, rollouts, _ = sampled
    assert len(rollouts) == ROLLOUTS
    turns = [len([span for span in spans_of(rollout.sampled) if span.sampled]) for rollout in rollouts]
    assert max(turns) >= 2, "else the other tests here say nothing"
    called = [messages_of(rollout, DIALOGUE) for rollout in rollouts if rollout.loss_mask is not None]
    names = {said[0]["tool_calls"][0]["function"]["name"] for said in called}
    assert "add" in names, "some calls are well formed"
    for first, reply, second, *_ in called:
        assert reply["tool_call_id"] == first["tool_calls"][0]["id"] == "call_0"
        assert [message["role"] for message in (first, reply, second)] == ["assistant", "tool", "assistant"]


def test_structure_checks_find_nothing_wrong(sampled):
    task, rollouts, _ = sampled
    rules = Rules(
        frozenset({END}), len(TOKENIZER), TaskSet([Row("p", "a", "0")], [], [], "d"), dialogue=DIALOGUE
    )
    assert structure_fault(a_group(task, rollouts=rollouts), task, rules=rules) is None


def test_ids_are_those_of_the_whole_conversation_by_the_chat_template(sampled):
    _, rollouts, _ = sampled
    for rollout in rollouts:
        messages = [{"role": "user", "content": asked(2, 3)}]
        for span in spans_of(rollout.sampled):
            ids = rollout.token_ids[span.tokens]
            if span.sampled:
                text = DIALOGUE.text(ids.tolist())
                messages.append({"role": "assistant", "content": text})
            else:
                messages.append({"role": "tool", "content": (DIALOGUE.replies_in(ids, 1) or ["?"])[0]})
        whole = rendered(TOKENIZER, messages, more=False)
        if rollout.token_ids[-1] != END:
            continue
        trailing = encoded(TOKENIZER, "\n")
        assert [*PROMPT.tolist(), *rollout.token_ids.tolist(), *trailing] == whole


def test_on_fresh_data_the_importance_ratio_of_every_turn_is_one(sampled, model_dir):
    """Ids, mask, log-probabilities and the learner's forward pass agree, or this is far from 0."""
    task, rollouts, factors = sampled
    spec: RunSpec = a_runspec(lora={"rank": 4, "alpha": 8})
    policy = TorchPolicy.open(model_dir, spec)
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
    assert metrics["batch/trained_tokens_per_step"] == sum(rollout.sampled.sum() for rollout in rollouts)


@pytest.fixture(scope="module")
def facts(sampled, model_dir) -> list[TokenFacts]:
    task, rollouts, factors = sampled
    spec = a_runspec(lora={"rank": 4, "alpha": 8})
    recomputer = Recomputer.open(model_dir, spec.model, LORA, (END,))
    ids = [rollout.token_ids for rollout in rollouts]
    return recomputer.facts("p", factors, task.prompt_token_ids, ids, task.params)


SEEDED = ToleranceSpec(seed=1e-3)


def audited(task: Task, rollouts: list[Rollout], facts: list[TokenFacts]) -> tuple[str, ...]:
    own = [one.of(rollout.sampled) for one, rollout in zip(facts, rollouts, strict=True)]
    return evidence_of(task, rollouts, own, SEEDED, Copies(), np.random.default_rng(0)).flags


def test_an_audit_flags_no_turn_of_an_honest_sampler(sampled, facts):
    task, rollouts, _ = sampled
    assert audited(task, list(rollouts), facts) == ()


def test_an_audit_sees_a_turn_that_was_drawn_otherwise(sampled, facts):
    task, rollouts, _ = sampled
    moved = [rollout.model_copy(update={"index": (rollout.index + 1) % ROLLOUTS}) for rollout in rollouts]
    assert audited(task, moved, facts) == ("seed",)


def test_an_audit_does_not_take_a_reply_for_the_policys(sampled, facts):
    """What the mask leaves out would be flagged: nobody sampled it."""
    task, rollouts, _ = sampled
    place = next(i for i, rollout in enumerate(rollouts) if rollout.loss_mask is not None)
    bare = rollouts[place].model_copy(update={"loss_mask": None})
    assert "largest" in audited(task, [bare], [facts[place]])
