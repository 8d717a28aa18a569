"""A server that does not do for a run is named at the start, with the flag to change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from node.system_clock import SystemClock
from protocol.errors import OperatorError
from protocol.runspec import LoraSpec
from roles.sampler.vllm_checks import Needs, check_server, is_greedy, rank_flag
from roles.sampler.vllm_client import VllmClient
from roles.sampler.vllm_command import Serving, server_command, server_environment, shares_of, split_command
from tests.engine_rigs import VOCAB
from tests.vllm_rigs import STUB_SHAPES, needs
from tests.vllm_stub import StubModel, StubServer

A_NEED = needs(STUB_SHAPES)
MODULE = ["python", "-m", "vllm.entrypoints.openai.api_server"]
SERVING = Serving(Path("a-model"), "float32", 32, "cpu", 2)

UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "a short context": (
        {"max_model_len": 64},
        r"max_model_len is 64, the run needs 96: start it with --max-model-len 96",
    ),
    "raw log-probabilities": (
        {"logprobs_mode": "raw_logprobs"},
        r"start it with --logprobs-mode processed_logprobs",
    ),
    "too small a rank": (
        {"max_lora_rank": 1},
        r"max_lora_rank is less than the run's rank 4: start it with --max-lora-rank 8",
    ),
    "one slot": ({"max_loras": 1}, r"max_loras is 1, .* start it with --max-loras 2 or more"),
    "no adapters": ({"enable_lora": False}, r"it serves no adapters: start it with --enable-lora"),
    "no adapters at run time": (
        {"runtime_updating": False},
        r"start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    ),
    "adapters that change nothing": ({"lora_is_served": False}, r"accepted but changes nothing"),
}


async def checked(model: StubModel, directory: Path) -> StubServer:
    async with StubServer(model) as stub:
        client = VllmClient(stub.url, SystemClock())
        try:
            await check_server(client, A_NEED, directory)
        finally:
            await client.close()
        return stub


async def test_a_server_that_does_is_admitted_and_keeps_nothing_of_the_check(tmp_path):
    stub = await checked(StubModel(), tmp_path / "probe-1")
    assert stub.loaded == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("model", "fault"), UNFIT.values(), ids=UNFIT.keys())
async def test_a_server_that_does_not_do_is_told_which_flag_to_change(tmp_path, model, fault):
    with pytest.raises(OperatorError, match=fault) as raised:
        await checked(StubModel(**model), tmp_path / "probe-1")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


async def test_a_server_that_does_not_see_the_adapters_is_told_where_they_must_lie(tmp_path):
    async with StubServer(StubModel()) as stub:
        stub.blind = True
        client = VllmClient(stub.url, SystemClock())
        with pytest.raises(
            OperatorError, match=r"does not see .*probe-1: --vllm-adapters must name a directory"
        ):
            await check_server(client, A_NEED, tmp_path / "probe-1")
        await client.close()


@pytest.mark.parametrize(
    ("rank", "flag"), [(1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (257, 320), (512, 512)]
)
def test_a_rank_is_rounded_up_to_what_the_flag_takes(rank, flag):
    assert rank_flag(rank) == flag


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_the_command_says_what_the_run_needs():
    need = Needs(640, LoraSpec(rank=20), STUB_SHAPES, VOCAB, "a-model")
    command = server_command(MODULE, SERVING, need, 8123)
    assert command[:3] == MODULE
    wanted = {
        "--model": "a-model",
        "--port": "8123",
        "--dtype": "float32",
        "--max-model-len": "640",
        "--max-num-seqs": "32",
        "--max-lora-rank": "32",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
    }
    assert {flag: value_of(command, flag) for flag in wanted} == wanted


def test_what_the_operator_says_stays():
    words = split_command("vllm serve --max-loras=8 --max-model-len 2048 --tensor-parallel-size 2")
    command = server_command([*words], SERVING, A_NEED, 8123)
    assert "--max-loras" not in command
    assert command.count("--max-model-len") == 1
    assert value_of(command, "--max-model-len") == "2048"


def test_the_command_vllm_serve_takes_the_model_by_position():
    assert server_command(["vllm", "serve"], SERVING, A_NEED, 1)[:3] == ["vllm", "serve", "a-model"]


@pytest.mark.parametrize(
    ("words", "device", "shares"),
    [
        (["vllm", "serve"], "cuda", ["cuda"]),
        (["vllm", "serve"], "cuda:0,cuda:1", ["cuda:0", "cuda:1"]),
        (["vllm", "serve", "--tensor-parallel-size", "2"], "cuda:0,cuda:1", ["cuda:0,cuda:1"]),
    ],
)
def test_each_device_has_a_server_unless_one_spans_them(words, device, shares):
    assert shares_of(words, device) == shares


@pytest.mark.parametrize(
    ("device", "before", "visible"),
    [("cuda", None, None), ("cuda:1", None, "1"), ("cuda:0,cuda:1", "4,6", "4,6"), ("cuda:1", "4,6", "6")],
)
def test_a_server_sees_its_devices_alone(device, before, visible):
    serving = Serving(Path("a-model"), "float32", 32, device, 2)
    environ = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    assert server_environment(environ, serving).get("CUDA_VISIBLE_DEVICES") == visible


def test_a_device_beyond_those_that_are_visible_is_a_persons_mistake():
    serving = Serving(Path("a-model"), "float32", 32, "cuda:2", 2)
    with pytest.raises(OperatorError, match="CUDA_VISIBLE_DEVICES"):
        server_environment({"CUDA_VISIBLE_DEVICES": "4,6"}, serving)


@pytest.mark.parametrize(("text", "fault"), [("", "is empty"), ("vllm 'serve", "No closing quotation")])
def test_a_command_that_is_none_is_a_persons_mistake(text, fault):
    with pytest.raises(OperatorError, match=fault):
        split_command(text)


@pytest.mark.parametrize("logprob", [0.0, -4e-7, -math.log(2), -math.log(3) + 2e-7, -math.log(8)])
def test_tokens_that_tie_for_the_best_are_as_certain_as_one(logprob: float):
    assert is_greedy(logprob)


@pytest.mark.parametrize("logprob", [-1e-4, -0.1, -0.5, -math.log(2) + 1e-4, -math.log(9), -40.0])
def test_the_best_token_of_raw_logits_is_not_certain(logprob: float):
    assert not is_greedy(logprob)
