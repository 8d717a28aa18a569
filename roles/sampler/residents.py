"""Resident policies and the checks that every engine makes before anything runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

from protocol.errors import EngineError
from roles.policy.compose import Factors, factors_digest, fault
from roles.sampler.engine import SampleRequest

log = structlog.get_logger()

P = TypeVar("P")


class Residents(Generic[P]):
    """Policies by name, and which is newest. A name is bound to one set of bytes for ever.

    ``shapes`` has the tensors every policy must have (only names and shapes are read); ``place`` turns
    checked factors into what the engine keeps. Safe to use from several threads.
    """

    def __init__(self, shapes: Factors, place: Callable[[str, Factors], P]) -> None:
        self._shapes = shapes
        self._place = place
        self._digests: dict[str, str] = {}
        self._policies: dict[str, P] = {}
        self._newest: str | None = None
        self._lock = threading.Lock()

    def load(self, name: str, factors: Factors, *, newest: bool) -> None:
        """Check everything, then place. Raises EngineError and changes nothing if there is a fault."""
        if why := fault(factors, self._shapes):
            raise EngineError(f"policy {name} was refused: {why}")
        digest = factors_digest(factors)
        with self._lock:
            if self._digests.setdefault(name, digest) != digest:
                raise EngineError(f"policy {name} was refused: the name belongs to other weights")
            resident = self._policies.get(name)
        # Placing may copy to a device: outside the lock, which callers on an event loop take as well.
        placed = self._place(name, factors) if resident is None else resident
        with self._lock:
            self._policies.setdefault(name, placed)
            if newest:
                self._newest = name
        log.info("policy_loaded", policy=name, newest=newest, resident=len(self._policies))

    def promote(self, name: str) -> None:
        """Make a policy the newest that is resident already. Raises EngineError if it is not."""
        with self._lock:
            if name not in self._policies:
                raise EngineError(f"policy {name} is not loaded")
            self._newest = name

    def all(self) -> tuple[P, ...]:
        """Every resident policy."""
        with self._lock:
            return tuple(self._policies.values())

    def unload(self, name: str) -> None:
        """Forget a policy; no error when absent. Whoever still holds it may finish with it."""
        with self._lock:
            self._policies.pop(name, None)
            if self._newest == name:
                self._newest = None

    def get(self, name: str | None) -> P:
        """The policy ``name``, or the newest for None. Raises EngineError if there is none."""
        with self._lock:
            wanted = self._newest if name is None else name
            if wanted is None:
                raise EngineError("no policy is loaded")
            if wanted not in self._policies:
                raise EngineError(f"policy {wanted} is not loaded")
            return self._policies[wanted]


def check_request(request: SampleRequest, *, vocab_size: int, context_tokens: int) -> None:
    """Raise EngineError unless the request can be sampled whole: nothing is ever cut to fit."""
    prompt = request.prompt_token_ids
    if len(prompt) == 0:
        raise EngineError("the prompt is empty")
    if request.count < 1:
        raise EngineError(f"cannot sample {request.count} completions")
    room = context_tokens - request.params.max_new_tokens
    if len(prompt) > room:
        raise EngineError(
            f"a prompt of {len(prompt)} tokens and {request.params.max_new_tokens} new ones do not fit "
            f"the context of {context_tokens}"
        )
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        raise EngineError(f"the prompt has a token id outside the vocabulary of {vocab_size}")
