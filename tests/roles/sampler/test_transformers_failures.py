"""How the transformers engine fails: a batch, a request, its thread, or an operator's settings."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from protocol.errors import EngineError, OperatorError
from protocol.messages import SamplingParams
from protocol.runspec import LoraSpec
from roles.sampler.transformers_engine import TransformersEngine
from tests.engine_rigs import EOS_IDS, LORA, VOCAB, TransformersRig, a_request, a_small_model, some_factors


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return a_small_model(tmp_path_factory.mktemp("model"))


async def test_a_failure_of_the_device_fails_its_batch_and_no_other(model_dir, monkeypatch):
    rig = TransformersRig(model_dir)
    await rig.engine.load_policy("v1", some_factors(rig.shapes), newest=True)
    with monkeypatch.context() as patch:
        patch.setattr(rig.model, "prefill", raiser(torch.OutOfMemoryError("no memory left")))
        with pytest.raises(EngineError, match="no memory left"):
            await rig.engine.sample(a_request())
    assert len((await rig.engine.sample(a_request())).rollouts) == 4
    await rig.engine.close()


async def test_logits_that_are_not_finite_fail_the_request(model_dir, monkeypatch):
    rig = TransformersRig(model_dir)
    await rig.engine.load_policy("v1", some_factors(rig.shapes), newest=True)
    decode = rig.model.decode
    monkeypatch.setattr(rig.model, "decode", lambda *a: decode(*a) * torch.nan)
    with pytest.raises(EngineError, match="not finite"):
        await rig.engine.sample(a_request(params=SamplingParams(max_new_tokens=40)))
    await rig.engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_thread_is_reported_to_all_who_wait_and_all_who_come(model_dir, monkeypatch):
    rig = TransformersRig(model_dir, groups_per_batch=1)
    await rig.engine.load_policy("v1", some_factors(rig.shapes), newest=True)
    monkeypatch.setattr(rig.model, "prefill", raiser(ZeroDivisionError("a bug")))
    results = await asyncio.gather(
        *(rig.engine.sample(a_request()) for _ in range(3)), return_exceptions=True
    )
    for result in results:
        assert isinstance(result, EngineError)
        assert "thread died" in str(result)
    with pytest.raises(EngineError, match="a bug"):
        await rig.engine.sample(a_request())
    await rig.engine.close()


def raiser(error: Exception):
    def fail(*_):
        raise error

    return fail


def open_engine(model_dir, **changes) -> TransformersEngine:
    arguments: dict[str, Any] = {
        "lora": LORA,
        "eos_ids": EOS_IDS,
        "rows_max": 8,
        "groups_per_batch": 2,
    } | changes
    return TransformersEngine.open(model_dir, device="cpu", dtype="float32", threads=1, **arguments)


def test_an_engine_names_itself_its_device_and_its_precision(model_dir):
    engine = open_engine(model_dir)
    assert engine.name.startswith("transformers-5.")
    assert engine.name.endswith("-cpu-float32")
    assert engine.groups_max == 2
    asyncio.run(engine.close())


@pytest.mark.parametrize(
    "changes", [{"eos_ids": ()}, {"eos_ids": (VOCAB,)}, {"lora": LoraSpec(target_modules=("no_such_proj",))}]
)
def test_settings_that_do_not_fit_the_model_are_the_operators_mistake(model_dir, changes):
    with pytest.raises(OperatorError):
        open_engine(model_dir, **changes)


def test_a_directory_without_a_model_is_the_operators_mistake(tmp_path):
    with pytest.raises(OperatorError, match="not a causal language model"):
        open_engine(tmp_path)
