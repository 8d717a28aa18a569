"""The command that starts a vLLM server for a run.

    what the operator gave (``vllm serve``, a module, a container) + model + the flags that the run needs

A flag that the operator gave stays as it is: the checks of ``vllm_checks.py`` judge the outcome.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import OperatorError
from roles.sampler.vllm_checks import Needs, rank_flag

MODULE = ("-m", "vllm.entrypoints.openai.api_server")
"""What starts every build of vLLM; the command ``vllm`` asks for a package of that very name."""

BASE_NAME = "grpo-base"
"""What the base model is served as."""

SLOTS = 4
"""Policies that decode together: the newest, two older ones whose rollouts finish, and an evaluation's."""

ADAPTERS_HELD = 8
"""Policies in the server's main memory."""

CPU_BLOCK = 32
"""Tokens that the prefix cache shares at once; vLLM's own 128 on a CPU shares nothing of a short prompt."""

TENSOR_PARALLEL = ("--tensor-parallel-size", "-tp")


@dataclass(frozen=True, slots=True)
class Serving:
    """What a server is to serve, and how."""

    model_dir: Path
    dtype: str
    rows_max: int
    device: str
    """``cpu``, ``cuda`` (as the environment says), ``cuda:1``, or several with commas: tensor parallel."""
    threads: int


def split_command(text: str | None) -> list[str]:
    """The words of ``--vllm-command``; without one, vLLM of this very environment. Raises OperatorError."""
    if text is None:
        return [sys.executable, *MODULE]
    try:
        words = shlex.split(text)
    except ValueError as exc:
        raise OperatorError(f"--vllm-command {text!r}: {exc}") from exc
    if not words:
        raise OperatorError("--vllm-command is empty: write what starts vLLM, such as 'vllm serve'")
    return words


def server_command(words: Sequence[str], serving: Serving, needs: Needs, port: int) -> list[str]:
    """The whole command of one server, which listens on ``port`` of this machine alone."""
    wanted: dict[str, str | None] = {
        "--served-model-name": BASE_NAME,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": serving.dtype,
        "--max-model-len": str(needs.context_tokens),
        "--max-num-seqs": str(serving.rows_max),
        "--enable-lora": None,
        "--max-loras": str(SLOTS),
        "--max-cpu-loras": str(ADAPTERS_HELD),
        "--max-lora-rank": str(rank_flag(needs.lora.rank)),
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
    }
    if serving.device == "cpu":
        wanted |= {"--block-size": str(CPU_BLOCK), "--enforce-eager": None}
    model = [str(serving.model_dir)] if words[-1] == "serve" else ["--model", str(serving.model_dir)]
    command = [*words, *([] if has_flag(words, "--model") else model)]
    for flag, value in wanted.items():
        if not has_flag(words, flag):
            command += [flag] if value is None else [flag, value]
    return command


def server_environment(environ: Mapping[str, str], serving: Serving) -> dict[str, str]:
    """The environment of one server: ``environ``, what it must have, and what helps where nothing is said.

    Raises OperatorError if CUDA_VISIBLE_DEVICES hides the device.
    """
    helps = {"VLLM_NO_USAGE_STATS": "1"}
    must = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    if serving.device == "cpu":
        # One core is vLLM's own reserve by default, of two.
        helps |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "4"}
        must["OMP_NUM_THREADS"] = str(serving.threads)
    if visible := _visible(environ.get("CUDA_VISIBLE_DEVICES"), serving.device):
        must["CUDA_VISIBLE_DEVICES"] = visible
    return helps | dict(environ) | must


def shares_of(words: Sequence[str], device: str) -> list[str]:
    """Devices of each server: all for one that is tensor parallel, else a server for each."""
    parallel = any(has_flag(words, flag) for flag in TENSOR_PARALLEL)
    return [device] if parallel else device.split(",")


def has_flag(words: Sequence[str], flag: str) -> bool:
    """Whether the operator's command sets a flag, as ``--flag value`` or ``--flag=value``."""
    return any(word == flag or word.startswith(f"{flag}=") for word in words)


def _visible(before: str | None, device: str) -> str | None:
    """What a server of ``device`` may see: ``cuda:1`` is the second of what this process sees."""
    numbers = [int(name.partition(":")[2]) for name in device.split(",") if name.startswith("cuda:")]
    if not numbers or before is None:
        return ",".join(map(str, numbers)) or None
    names = before.split(",")
    if max(numbers) >= len(names):
        raise OperatorError(f"--device {device}: CUDA_VISIBLE_DEVICES={before} has no device {max(numbers)}")
    return ",".join(names[number] for number in numbers)
