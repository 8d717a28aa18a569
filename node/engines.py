"""Engines of a sampler: which one, and what each is made of."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path

from node.devices import only_device
from node.models import LocalModel
from node.settings import NodeSettings, VllmSettings, process_environment
from node.system_clock import SystemClock
from node.vllm_process import VllmProcess, free_port
from protocol.errors import OperatorError
from protocol.runspec import RunSpec
from roles.sampler.engine import Engine
from roles.sampler.vllm_adapters import AdapterFiles, Adapters
from roles.sampler.vllm_checks import Needs, check_server
from roles.sampler.vllm_client import VllmClient
from roles.sampler.vllm_command import (
    Serving,
    server_command,
    server_environment,
    shares_of,
    split_command,
)
from roles.sampler.vllm_engine import Served, VllmEngine
from roles.sampler.vllm_replicas import Replica, Replicas
from roles.sampler.vllm_server import Launch, VllmServer


async def open_engine(
    spec: RunSpec, settings: NodeSettings, model: LocalModel, eos_ids: Sequence[int], home: Path
) -> Engine:
    """The sampler's engine by ``settings.engine``. ``home`` is the node's own directory.

    Raises OperatorError if it cannot serve this run here.
    """
    if settings.engine == "vllm":
        return await open_vllm(spec, settings, model, eos_ids, home)
    from roles.sampler.transformers_engine import TransformersEngine

    return await asyncio.to_thread(
        lambda: TransformersEngine.open(
            model.directory,
            spec.lora,
            eos_ids,
            device=only_device(settings.device, "sampler"),
            dtype=spec.model.dtype,
            bits=spec.model.bits,
            rows_max=settings.rows_max,
            # A synchronous run must not depend on which tasks happen to decode together.
            groups_per_batch=1 if spec.staleness.max_staleness == 0 else None,
            threads=settings.threads or 1,
        )
    )


async def open_vllm(
    spec: RunSpec, settings: NodeSettings, model: LocalModel, eos_ids: Sequence[int], home: Path
) -> VllmEngine:
    """Start vLLM servers, or attach to them, and check that each does for the run. Raises OperatorError."""
    if spec.model.bits is not None:
        raise OperatorError(
            f"model.bits = {spec.model.bits}: vLLM quantizes otherwise than the learner, and the importance "
            "ratio would be far from 1; leave out model.bits, or use --engine transformers"
        )
    needs = await asyncio.to_thread(_needs, spec, model)
    clock, nonce = SystemClock(), secrets.token_hex(4)
    shared = settings.vllm.adapters or home / "vllm"
    files = AdapterFiles(shared.absolute(), spec.lora, spec.model.ref, nonce)
    replicas = [
        _replica(url, launch, needs, files)
        for url, launch in _servers(settings, needs, model, spec.model.dtype, home)
    ]
    try:
        async with asyncio.TaskGroup() as group:
            for replica in replicas:
                group.create_task(replica.server.open())
    except BaseException as exc:
        await _close(replicas)
        if isinstance(exc, BaseExceptionGroup):
            raise _first(exc) from exc  # a second server's fault is told on the next try
        raise
    version = await replicas[0].client.version()
    served = Served(
        name=f"vllm-{version}-{spec.model.dtype}",
        shapes=needs.shapes,
        eos_ids=frozenset(eos_ids),
        vocab_size=model.vocab_size,
        context_tokens=needs.context_tokens,
    )
    return VllmEngine(served, Replicas(replicas, settings.rows_max), files, clock)


def _needs(spec: RunSpec, model: LocalModel) -> Needs:
    from roles.policy.adapter_shapes import adapter_shapes

    longest = spec.tasks.prompt_tokens_max + spec.sampling.max_new_tokens
    return Needs(
        context_tokens=min(model.context_tokens, longest),
        lora=spec.lora,
        shapes=adapter_shapes(model.directory, spec.lora),
        vocab_size=model.vocab_size,
        base_ref=spec.model.ref,
    )


def _servers(
    settings: NodeSettings, needs: Needs, model: LocalModel, dtype: str, home: Path
) -> list[tuple[str, Launch | None]]:
    """Address of each server and how it is started."""
    options: VllmSettings = settings.vllm
    if options.urls:
        return [(url, None) for url in options.urls]
    words = split_command(options.command)
    servers: list[tuple[str, Launch | None]] = []
    for number, device in enumerate(shares_of(words, settings.device), 1):
        serving = Serving(model.directory, dtype, settings.rows_max, device, settings.threads or 1)
        port = free_port()
        command = server_command(words, serving, needs, port)
        environ = server_environment(process_environment(), serving)
        launch = _launcher(f"vllm-{number}", command, environ, home / f"vllm-{number}.log")
        servers.append((f"http://127.0.0.1:{port}", launch))
    return servers


def _launcher(name: str, command: list[str], environ: dict[str, str], log: Path) -> Launch:
    async def launch() -> VllmProcess:
        return await VllmProcess.start(name, command, environ, log)

    return launch


def _replica(url: str, launch: Launch | None, needs: Needs, files: AdapterFiles) -> Replica:
    clock = SystemClock()
    client = VllmClient(url, clock)

    async def admit() -> None:
        await check_server(client, needs, files.fresh("probe"))

    return Replica(client, VllmServer(client, clock, admit, launch), Adapters(client))


async def _close(replicas: Sequence[Replica]) -> None:
    for replica in replicas:
        await replica.server.close()
        await replica.client.close()


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    fault = several.exceptions[0]
    return _first(fault) if isinstance(fault, BaseExceptionGroup) else fault
