"""A sampler's engine from its settings: vLLM servers that the node starts, loses, and starts again."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from node.engines import open_vllm
from node.models import LocalModel, resolve_model
from node.settings import NodeSettings, VllmSettings
from protocol.errors import EngineError, OperatorError
from protocol.runspec import ModelSpec, RunSpec
from roles.sampler.vllm_engine import VllmEngine
from tests.build import a_runspec
from tests.engine_rigs import a_request, some_factors
from tests.tidy import ROOT
from tests.vllm_rigs import until_changed

STUB = f"{sys.executable} -m tests.vllm_stub"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LocalModel:
    return resolve_model(ModelSpec(ref="builtin:tiny"), tmp_path_factory.mktemp("models"))


def settings(**vllm: Any) -> NodeSettings:
    return NodeSettings(
        run="a-run",
        roles=("sampler",),
        broker="nats://127.0.0.1:4222",
        device="cpu",
        threads=1,
        rows_max=16,
        engine="vllm",
        vllm=VllmSettings(**vllm),
    )


def a_run(**changes: Any) -> RunSpec:
    return a_runspec(**({"model": {"ref": "builtin:tiny"}} | changes))


@pytest.fixture
async def engine(model, tmp_path, monkeypatch) -> AsyncIterator[VllmEngine]:
    """An engine that started a server, and serves v1."""
    monkeypatch.chdir(ROOT)
    engine = await open_vllm(a_run(), settings(command=STUB), model, (2,), tmp_path)
    await engine.load_policy("v1", some_factors(engine.shapes, 1), newest=True)
    yield engine
    await engine.close()


async def test_a_server_that_is_killed_is_started_again_with_its_policies(engine):
    before = await engine.sample(a_request())
    (replica,) = engine.replicas.all
    first = replica.server.process
    os.kill(first.pid, signal.SIGKILL)
    await first.ended()
    await until_changed(replica.server, lives=False)
    assert (await engine.sample(a_request())).rollouts == before.rollouts
    assert replica.server.process.pid != first.pid


async def test_a_closed_engine_ends_its_server_and_leaves_no_adapter(engine, tmp_path):
    (replica,) = engine.replicas.all
    process = replica.server.process
    await engine.close()
    await process.ended()
    assert list((tmp_path / "vllm").iterdir()) == []
    with pytest.raises(EngineError, match="closed"):
        await engine.sample(a_request())


async def test_several_devices_have_a_server_each_and_groups_go_to_the_one_with_room(
    model, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = replace(settings(command=STUB), device="cuda:0,cuda:1")
    engine = await open_vllm(a_run(), two, model, (2,), tmp_path)
    try:
        assert engine.groups_max == 32
        await engine.load_policy("v1", some_factors(engine.shapes, 1), newest=True)
        places = [await engine.replicas.take(8) for _ in range(4)]
        assert [places.count(replica) for replica in engine.replicas.all] == [2, 2]
        for place in places:
            engine.replicas.give(place, 8)
        assert len((await engine.sample(a_request())).rollouts) == 4
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("no-such-program serve", "vLLM cannot be started by 'no-such-program'"),
        (f"{STUB} --max-lora-rank 1000", "invalid choice: 1000"),
        (f"{STUB} --max-model-len 8", "start it with --max-model-len"),
    ],
)
async def test_a_server_that_cannot_serve_is_told_in_one_line_and_ended(
    model, tmp_path, monkeypatch, command, fault
):
    monkeypatch.chdir(ROOT)
    with pytest.raises(OperatorError, match=fault) as raised:
        await open_vllm(a_run(), settings(command=command), model, (2,), tmp_path)
    assert "\n" not in str(raised.value)


async def test_a_quantized_run_is_refused(model, tmp_path):
    spec = a_run(model={"ref": "builtin:tiny", "bits": 4})
    with pytest.raises(OperatorError, match=r"model.bits = 4: .* --engine transformers"):
        await open_vllm(spec, settings(command=STUB), model, (2,), tmp_path)


def test_options_of_vllm_that_contradict_each_other_are_refused():
    with pytest.raises(OperatorError, match="use one"):
        VllmSettings(command="vllm serve", urls=("http://127.0.0.1:8000",))
    with pytest.raises(OperatorError, match="write http://host:8000"):
        VllmSettings(urls=("127.0.0.1:8000",))
    with pytest.raises(OperatorError, match="go with --engine vllm"):
        NodeSettings(
            run="a-run",
            roles=("sampler",),
            broker="x",
            engine="transformers",
            vllm=VllmSettings("vllm serve"),
        )
