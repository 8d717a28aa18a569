"""Policies as vLLM's adapters: a PEFT directory each, under a name that is never used again.

The prefix cache goes by the adapter's name, and a name that was once bound to other bytes would give it
stale keys; several samplers may share a server. So the name carries the policy, the engine's nonce, and a
number that only grows. vLLM's own integer id follows from the name, and grows likewise.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from protocol.clock import GENESIS
from protocol.errors import EngineError
from protocol.runspec import LoraSpec
from roles.policy.compose import Factors
from roles.policy.peft_export import peft_directory
from roles.sampler.vllm_client import VllmClient
from roles.sampler.vllm_server import Life


@dataclass(eq=False, slots=True, weakref_slot=True)
class Placed:
    """A policy whose files lie where the servers see them."""

    name: str
    served: str
    """What vLLM calls it."""
    directory: Path
    users: int = 0
    """Requests that run or wait under it."""
    retired: bool = False
    """Nobody will start under it any more."""

    @property
    def over(self) -> bool:
        """Whether nobody needs it."""
        return self.retired and not self.users


KEPT = 2
"""Directories of retired policies that stay: a server may still read one for a request that it aborts."""


class AdapterFiles:
    """Writes policies below ``directory``, which the servers see under the same path."""

    def __init__(self, directory: Path, lora: LoraSpec, base_ref: str, nonce: str) -> None:
        """``nonce`` is a text that no other engine has, now or before."""
        self._directory = directory
        self._lora = lora
        self._base_ref = base_ref
        self._nonce = nonce
        self._numbers = itertools.count(1)
        self._retired: deque[Path] = deque()

    def fresh(self, name: str) -> Path:
        """A path, and by its last part a served name, that was never used before."""
        return self._directory / f"{name}-{self._nonce}-{next(self._numbers)}"

    def place(self, name: str, factors: Factors) -> Placed:
        """Write a policy. Slow: off the loop. Raises EngineError if the disk is full or not writable."""
        directory = self.fresh(name)
        try:
            directory.mkdir(parents=True)
            for file, content in peft_directory(factors, self._lora, self._base_ref, GENESIS).items():
                (directory / file).write_bytes(content)
        except OSError as exc:
            shutil.rmtree(directory, ignore_errors=True)
            raise EngineError(f"policy {name} cannot be written for vLLM: {exc}") from exc
        return Placed(name, directory.name, directory)

    def discard(self, policy: Placed) -> None:
        """Delete the files of a policy that is unloaded everywhere, a little later."""
        self._retired.append(policy.directory)
        while len(self._retired) > KEPT:
            shutil.rmtree(self._retired.popleft(), ignore_errors=True)

    def close(self) -> None:
        """Delete what this engine wrote."""
        for directory in self._directory.glob(f"*-{self._nonce}-*"):
            shutil.rmtree(directory, ignore_errors=True)


class Adapters:
    """What one server has loaded."""

    def __init__(self, client: VllmClient) -> None:
        self._client = client
        self._loaded: WeakKeyDictionary[Placed, Life | None] = WeakKeyDictionary()
        """None: a load was begun, and nobody knows what came of it."""
        self._lock = asyncio.Lock()

    async def ensure(self, policy: Placed, life: Life) -> None:
        """Load unless this life of the server has it. Raises EngineError."""
        async with self._lock:
            if self._loaded.get(policy) is not life:
                self._loaded[policy] = None
                await self._client.load_adapter(policy.served, str(policy.directory))
                self._loaded[policy] = life

    async def drop(self, policy: Placed) -> None:
        """Unload if it is loaded. Raises EngineError, after which nothing more can be done."""
        async with self._lock:
            if policy in self._loaded:
                del self._loaded[policy]
                await self._client.unload_adapter(policy.served)
