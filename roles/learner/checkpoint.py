"""Where a learner begins: genesis claimed once, its own last head, and the state that goes with it.

The head is the truth: factors come from its update, exactly. The optimizer's state is saved beside
it; when the newest complete state is older than the head, the learner says so and goes on.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from protocol.clock import GENESIS
from protocol.codec import decode
from protocol.errors import (
    BusError,
    FencedError,
    StoreConflict,
    StoreCorrupt,
    StoreError,
    StoreNotFound,
)
from protocol.manifest import EntryKind, Manifest
from protocol.messages import Head
from protocol.ports import AdapterStore, Offload
from protocol.runspec import RunSpec
from protocol.subjects import DONE, GENESIS_KEY, Bucket, done_key, head_key
from roles.learner.commit import Resumed
from roles.learner.done import done_value, outcome_of
from roles.learner.policy import Policy, State
from roles.learner.update_entry import NONCE
from roles.policy.compose import Factors, factors_digest
from roles.policy.peft_export import peft_directory
from roles.policy.update_paths import counts_by_path
from roles.ring import RETRY_FIRST_S, RETRY_MAX_S, Ring

STATE_FILE = "optimizer.safetensors"
STATE_INFO_FILE = "state.json"


async def claim_genesis(ring: Ring, store: AdapterStore, policy: Policy, offload: Offload) -> None:
    """Create genesis and claim it with create-if-absent; whoever comes second uses the first one's.

    Where updates lie in the store and nobody has claimed genesis, the broker lost its disk: what they stand
    on is for ``recover`` to say.
    """
    if await _is_claimed(ring, store):
        return
    spec = ring.spec

    def create() -> tuple[Manifest, dict[str, bytes], str]:
        factors = policy.genesis(spec.seed)
        digest = factors_digest(factors)
        files = peft_directory(factors, spec.lora, spec.model.ref, GENESIS)
        manifest = Manifest(
            path=f"{spec.name}/genesis/{digest[:16]}",
            kind=EntryKind.GENESIS,
            run=spec.name,
            author=ring.identity.node,
            policy_digest=digest,
            files=Manifest.describe(files),
        )
        return manifest.signed(ring.identity), files, digest

    manifest, files, digest = await offload(create)
    try:
        await ring.persist(lambda: store.publish(manifest, files))
    except StoreConflict:
        # A peer with the same seed made the same genesis; whoever reads it checks its digest.
        ring.log.info("genesis_already_stored", path=manifest.path)
    claim = f"{manifest.path} {digest}".encode()
    # Looked at again before every try: the broker may have lost its disk since.
    while not await _is_claimed(ring, store):
        try:
            await ring.bus.put(Bucket.RUN, GENESIS_KEY, claim, expected=0)
        except BusError as exc:
            ring.log.warning("request_retried", error=str(exc) or type(exc).__name__)
            await ring.pause(RETRY_FIRST_S)
        else:
            await ring.tell("genesis_claimed", digest=digest[:16])
            return
    ring.log.info("genesis_found")


async def _is_claimed(ring: Ring, store: AdapterStore) -> bool:
    """Whether genesis is claimed; waits while nobody but ``recover`` may claim it."""
    while await ring.persist(lambda: ring.bus.get(Bucket.RUN, GENESIS_KEY)) is None:
        if not counts_by_path(await ring.persist(lambda: store.list(f"{ring.spec.name}/updates"))):
            return False
        ring.log.warning("waiting_for_recover", run=ring.spec.name)
        await ring.pause(RETRY_MAX_S)
    return True


async def find_head(ring: Ring, store: AdapterStore) -> Resumed:
    """This learner's own last head, and what it consumed since its newest upload.

    Raises FencedError if it was signed with another key: peers would use nothing that this one publishes.
    """
    learner = ring.identity.node
    entry = await ring.persist(lambda: ring.bus.get(Bucket.POLICY, head_key(learner)))
    if entry is None:
        return Resumed()
    signed = decode(entry.value)
    if signed.signer != ring.identity.public_key:
        raise FencedError(
            f"learner {learner!r} of this run has another key; start this one under another --name, "
            f"or with the GRPO_HOME that holds its identity"
        )
    head, uploaded_nonce, listed = signed.expect(Head), "", set[str]()
    if head.path:
        manifest = await ring.insist(lambda: store.manifest(head.path))
        uploaded_nonce, listed = manifest.extra.get(NONCE, ""), {*manifest.groups, *manifest.dropped}
    unlisted = {} if head.nonce == uploaded_nonce else await _consumed_since(ring, head, listed)
    return Resumed(head, entry.revision, uploaded_nonce, unlisted)


async def _consumed_since(ring: Ring, head: Head, listed: Collection[str]) -> dict[str, str]:
    """Groups that the author of ``head`` consumed after its newest update, which lists ``listed``."""
    found = {}
    for key, entry in (await ring.persist(lambda: ring.bus.list(Bucket.POLICY, DONE))).items():
        group, outcome = key.removeprefix(done_key("")), outcome_of(entry.value)
        if group not in listed and entry.value == done_value(outcome, head.learner, head.count):
            found[group] = outcome
    return found


async def save_state(
    ring: Ring, store: AdapterStore, offload: Offload, head: Head, state: Callable[[], State]
) -> bool:
    """Keep the optimizer's state of ``head``; a store that refuses costs a warning, not the run.

    ``state`` is called off the loop. Returns whether it is kept.
    """
    spec = ring.spec

    def describe() -> tuple[Manifest, dict[str, bytes]]:
        files = {
            STATE_FILE: save({name: np.ascontiguousarray(array) for name, array in state().items()}),
            STATE_INFO_FILE: json.dumps({"count": head.count, "clock": dict(head.clock.counts)}).encode(),
        }
        manifest = Manifest(
            path=state_path(spec, head.learner, head.count),
            kind=EntryKind.STATE,
            run=spec.name,
            author=head.learner,
            clock=head.clock,
            count=head.count,
            weight=head.weight,
            policy_digest=head.policy_digest,
            files=Manifest.describe(files),
        )
        return manifest.signed(ring.identity), files

    manifest, files = await offload(describe)
    try:
        await store.publish(manifest, files)
    except StoreError as exc:
        await ring.tell("state_unsaved", count=head.count, reason=str(exc))
        return False
    return True


async def load_state(ring: Ring, store: AdapterStore, offload: Offload, head: Head) -> State | None:
    """The newest complete state not newer than ``head``, skipping damaged ones with a warning.

    Waits while the store is only unavailable: going on without the optimizer's state would be worse.
    """
    prefix = f"{ring.spec.name}/state/{head.learner}"
    listed = await ring.persist(lambda: store.list(prefix))
    for count in reversed(saved_counts(listed, ring.spec, head.learner)):
        if count > head.count:
            continue
        fetch = functools.partial(store.fetch, state_path(ring.spec, head.learner, count))
        try:
            directory = await ring.persist(fetch)
            state = await offload(functools.partial(_read_state, directory / STATE_FILE))
        except (StoreCorrupt, StoreNotFound) as exc:
            ring.log.warning("state_skipped", count=count, reason=str(exc))
            continue
        if count < head.count:
            ring.log.warning("state_is_older_than_head", state=count, head=head.count)
        return state
    ring.log.warning("state_missing", head=head.count)
    return None


def _read_state(path: Path) -> State:
    """Raises StoreCorrupt if there is no readable state."""
    try:
        return dict(load_file(path))
    except (SafetensorError, FileNotFoundError) as exc:
        raise StoreCorrupt(f"{path.name} cannot be read: {exc}") from exc


async def export(ring: Ring, store: AdapterStore, offload: Offload, head: Head, factors: Factors) -> str:
    """Publish policy(head.clock) as a plain PEFT directory; returns its path in the store.

    A peer may have exported the same policy: the same clock is the same bytes. Any other refusal costs an
    event, not the run.
    """
    spec = ring.spec

    def describe() -> tuple[Manifest, dict[str, bytes]]:
        files = peft_directory(factors, spec.lora, spec.model.ref, head.clock)
        manifest = Manifest(
            path=f"{spec.name}/exports/{head.clock.digest}",
            kind=EntryKind.EXPORT,
            run=spec.name,
            author=ring.identity.node,
            clock=head.clock,
            policy_digest=head.policy_digest,
            files=Manifest.describe(files),
        )
        return manifest.signed(ring.identity), files

    manifest, files = await offload(describe)
    try:
        await ring.persist(lambda: store.publish(manifest, files), patient=True)
    except StoreConflict as exc:
        there = await ring.persist(lambda: store.manifest(manifest.path))
        if there.policy_digest != head.policy_digest:
            await ring.tell("export_refused", path=manifest.path, reason=str(exc))
            return manifest.path
    await ring.tell("adapter_exported", path=manifest.path, clock=head.clock.text)
    return manifest.path


def saved_counts(paths: Iterable[str], spec: RunSpec, learner: str) -> list[int]:
    """Updates of ``learner`` at which a state was saved, in order; other ``paths`` are passed over."""
    prefix = state_path(spec, learner, 0)[:-1]
    names = (path.removeprefix(prefix) for path in paths if path.startswith(prefix))
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


def state_path(spec: RunSpec, learner: str, count: int) -> str:
    """Store path of a learner's saved state."""
    return f"{spec.name}/state/{learner}/{count}"
