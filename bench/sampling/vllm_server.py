"""Arm: a vLLM server on the CPU in an environment of its own, with the adapter loaded at run time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict
from safetensors.torch import save_file

from bench.sampling.plain import plain_model
from bench.sampling.work import ALPHA, WARM_UP_TOKENS, Stopwatch, Work, work_of_this_process

START_S = 300.0


def adapter_directory(work: Work, directory: Path) -> Path:
    """The adapter as PEFT saves it."""
    state = get_peft_model_state_dict(plain_model(work), adapter_name="default")
    tensors = {
        name if name.startswith("base_model.") else f"base_model.model.{name}": tensor.contiguous()
        for name, tensor in state.items()
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {
        "peft_type": "LORA",
        "r": work.rank,
        "lora_alpha": ALPHA,
        "target_modules": modules,
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    return directory


def start(work: Work, port: int) -> subprocess.Popen[bytes]:
    """The server; its module rather than its command, which the CPU build lacks."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{work.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment.pop("PYTHONPATH", None)
    options = {
        "--model": work.model,
        "--served-model-name": "base",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": "512",
        "--max-num-seqs": str(max(8, work.groups * work.rows)),
        "--block-size": "32",
        "--max-lora-rank": str(work.rank),
        "--max-loras": "2",
    }
    flags = ["--enforce-eager", "--enable-lora"]
    words = [word for option in options.items() for word in option]
    command = [work.python, "-m", "vllm.entrypoints.openai.api_server", *words, *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def post(url: str, body: dict[str, Any]) -> bytes:
    """One request's answer."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=3600) as answer:  # noqa: S310 our own server
        found: bytes = answer.read()
        return found


def main() -> None:
    """Start, load, sample, report, stop."""
    work = work_of_this_process()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start(work, port)
    try:
        with tempfile.TemporaryDirectory() as directory:
            url = f"http://127.0.0.1:{port}"
            adapter = adapter_directory(work, Path(directory))
            wait_for(url, server)
            post(f"{url}/v1/load_lora_adapter", {"lora_name": "policy-1", "lora_path": str(adapter)})
            sample_all(work, url, server.pid)
    finally:
        server.terminate()
        server.wait(60)


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Until the server is healthy."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise SystemExit("the vLLM server did not start")


def sample_all(work: Work, url: str, server: int) -> None:
    """All groups at once, a request each."""

    def sample(prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
        body = {
            "model": "policy-1",
            "prompt": prompt,
            "n": work.rows,
            "max_tokens": new_tokens,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": work.eos_ids(),
        }
        answer = json.loads(post(f"{url}/v1/completions", body))
        return [len(choice["token_ids"]) for choice in answer["choices"]], time.perf_counter()

    prompts = [prompt.tolist() for prompt in work.prompts()]
    sample(work.prompts(seed=9)[0].tolist(), WARM_UP_TOKENS)
    watch = Stopwatch(work, server)
    with ThreadPoolExecutor(len(prompts)) as pool:
        done = list(pool.map(lambda prompt: sample(prompt, work.new_tokens), prompts))
    watch.report([length for lengths, _ in done for length in lengths], [end for _, end in done])


if __name__ == "__main__":
    main()
