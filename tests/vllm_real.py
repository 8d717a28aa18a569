"""vLLM itself for tests: its CPU build from ``.venv-vllm``, started by the product's own command."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from node.children import last_words
from node.vllm_process import free_port
from roles.policy.adapter_shapes import adapter_shapes
from roles.policy.compose import Factors
from roles.sampler.vllm_checks import Needs
from roles.sampler.vllm_command import MODULE, Serving, server_command, server_environment
from tests.engine_rigs import LORA, VOCAB
from tests.tidy import ROOT

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
WORDS = [str(PYTHON), *MODULE]
START_S = 600.0
STOP_S = 20.0
CONTEXT = 96


@dataclass(frozen=True)
class RealServer:
    """A server that runs."""

    url: str
    shapes: Factors
    model_dir: Path


@contextmanager
def real_server(model_dir: Path, log: Path) -> Iterator[RealServer]:
    """vLLM on a small model, until the end of the block."""
    shapes = adapter_shapes(model_dir, LORA)
    needs = Needs(CONTEXT, LORA, shapes, VOCAB, str(model_dir))
    serving = Serving(model_dir, "float32", 64, "cpu", 2)
    environ = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    port = free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            server_command(WORDS, serving, needs, port),
            env=server_environment(environ, serving),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        _healthy(f"http://127.0.0.1:{port}", process, log)
        yield RealServer(f"http://127.0.0.1:{port}", shapes, model_dir)
    finally:
        _end(process)


def with_a_tokenizer(model_dir: Path) -> Path:
    """Give a model the files without which vLLM does not start."""
    vocabulary = {f"t{number}": number for number in range(VOCAB)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="t3"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2").save_pretrained(model_dir)
    return model_dir


def _end(process: subprocess.Popen[bytes]) -> None:
    """In order if it comes to that; a server that is told so while it starts does not end by itself."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(int(START_S)):
        try:
            if httpx2.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx2.HTTPError:
            pass
        try:
            process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"vLLM ended while it started: {last_words(log)}")
    raise AssertionError(f"vLLM did not start: {last_words(log)}")
