"""Recover: what the broker held of a run, rebuilt from the bucket alone after the broker lost its disk.

    bucket ─▶ settings, genesis, committed updates ─▶ done keys ─▶ heads ─▶ cursors ─▶ genesis ─▶ settings

In this order, because living peers watch: no learner commits before its head and genesis are there, and
no new node joins before the settings are. Repeated after an interruption it goes on.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from node.run_bus import RunBus, find_run
from node.runs import RunLost, check_same, create_run
from node.stores import open_store
from protocol.codec import decode, encode
from protocol.errors import DecodeError, OperatorError, StoreCorrupt, StoreNotFound, WrongRevision
from protocol.identity import Identity
from protocol.limits import BATCH_WRITES_MAX
from protocol.manifest import Manifest
from protocol.messages import Head, RunState
from protocol.ports import AdapterStore, Bus
from protocol.runspec import RunSpec
from protocol.subjects import (
    DONE,
    FINISHED_KEY,
    GENESIS_KEY,
    RECOVER_KEY,
    SPEC_KEY,
    Bucket,
    cursor_key,
    done_key,
    head_key,
)
from roles.learner.done import done_write, outcome_of
from roles.learner.finish import finished_path
from roles.learner.outstanding import Cursor, task_of
from roles.learner.update_entry import GENESIS_DIGEST, head_frame
from roles.policy.chains import UNCERTAIN, Chains, chains_up_to, committed_chains, outcomes
from roles.policy.update_paths import counts_by_path, named_update

log = structlog.get_logger()

RUN_FILE = "run.json"

WITHOUT_IT = "try again, or delete that entry to recover without it"

READ_AT_ONCE = 16
"""Manifests that are read side by side."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was restored."""

    learners: dict[str, int]
    """Count of each learner's head."""
    version: float
    groups_trained: int
    groups_recognised: int
    """Groups that will be recognised as consumed if somebody still holds them."""
    uncertain: list[str]
    """Uploads that contradict each other: none was taken; a living author commits its own again."""
    audited: bool
    """Whether samplers had standings. They lay at the broker alone; verifiers that live say them again."""


async def recover_run(bus: RunBus, store: AdapterStore, run: str, identity: Identity) -> Recovered:
    """Rebuild ``run``. Raises OperatorError if the broker has it already, or the bucket has not."""
    if await find_run(bus) is not None:
        raise OperatorError(
            f"this broker holds run {run!r}; nothing was changed: recover is for one that lost it"
        )
    spec = await read_spec(store, run)
    manifests = await _uploads(store, run)
    await bus.create_run(spec)
    chains = await _decided(bus, manifests)
    found = {learner: await _head(store, chain[-1]) for learner, chain in chains.updates.items() if chain}
    heads = {learner: head for learner, (head, _) in found.items()}
    genesis = await _claimed_genesis(store, run, chains)
    await _restore_done(bus, chains)
    for learner, (_, frame) in found.items():
        await _put_new(bus, Bucket.POLICY, head_key(learner), frame)
        await _put_new(bus, Bucket.RUN, cursor_key(learner), str(_cursor(chains, heads[learner])).encode())
    if genesis:
        await _put_new(bus, Bucket.RUN, GENESIS_KEY, genesis.encode())
    if await _is_finished(store, run):
        await _put_new(bus, Bucket.RUN, FINISHED_KEY, b"1")
    state = RunState(spec_json=spec.model_dump_json(), spec_digest=spec.digest, creator=identity.node)
    await _put_new(bus, Bucket.RUN, SPEC_KEY, encode(state, identity))
    return Recovered(
        learners={learner: head.count for learner, head in heads.items()},
        version=math.fsum(head.weight for head in heads.values()),
        groups_trained=sum(head.groups_trained for head in heads.values()),
        groups_recognised=len(chains.consumed),
        uncertain=[manifest.path for manifest in chains.uncertain],
        audited=spec.audit.rate > 0,
    )


async def create_or_recover(bus: RunBus, spec: RunSpec, identity: Identity, cache: Path) -> None:
    """Create a pinned run, or bring it back if this broker lost it and the store has its updates.

    Raises OperatorError if the run that is there has other settings.
    """
    try:
        await create_run(bus, spec, identity, cache)
    except RunLost:
        store = open_store(spec.store, cache, bus)
        check_same(spec, (await read_spec(store, spec.name)).digest)
        recovered = await recover_run(bus, store, spec.name, identity)
        log.warning("run_recovered", run=spec.name, **asdict(recovered))


async def read_spec(store: AdapterStore, run: str) -> RunSpec:
    """The settings that ``create`` stored. Raises OperatorError if there are none, or several."""
    paths = [path for path in await store.list(run) if _is_digest(path, f"{run}/run-")]
    if len(paths) != 1:
        what = f"several settings ({', '.join(paths)}); delete all but one" if paths else "no such run"
        raise OperatorError(f"run {run!r} cannot be recovered: the store holds {what}")
    return RunSpec.model_validate_json((await store.fetch(paths[0]) / RUN_FILE).read_bytes())


def _is_digest(path: str, prefix: str) -> bool:
    """Whether ``path`` is ``prefix`` and 16 hex digits; what a person put beside such entries is not ours."""
    return path.startswith(prefix) and re.fullmatch("[0-9a-f]{16}", path.removeprefix(prefix)) is not None


async def _uploads(store: AdapterStore, run: str) -> list[Manifest]:
    """All updates in the bucket, committed or not; what has another name is left alone. Raises StoreError."""
    listed = await store.list(f"{run}/updates")
    named = counts_by_path(listed)
    if strange := [path for path in listed if path not in named]:
        log.warning("entries_not_ours", count=len(strange), first=strange[0])
    found = await _manifests(store, list(named))
    return [m for m in found if named_update(m.path) == (m.author, m.count)]


async def _manifests(store: AdapterStore, paths: Sequence[str]) -> list[Manifest]:
    """The manifests of listed ``paths``. Raises StoreError if one cannot be read: without it an author's
    older updates could not be told from uploads that were never committed."""

    async def read(path: str) -> Manifest | None:
        try:
            return await store.manifest(path)
        except StoreNotFound:
            if path not in await store.list(path.rpartition("/")[0]):
                return None  # deleted meanwhile: its author lives
            raise

    try:
        found: list[Manifest | None] = []
        for start in range(0, len(paths), READ_AT_ONCE):
            found += await asyncio.gather(*(read(path) for path in paths[start : start + READ_AT_ONCE]))
    except (StoreCorrupt, StoreNotFound) as exc:
        raise type(exc)(f"{exc}; {WITHOUT_IT}") from exc
    return [manifest for manifest in found if manifest is not None]


async def _decided(bus: Bus, manifests: Sequence[Manifest]) -> Chains:
    """Which updates were committed, as the first attempt found it: authors that live have gone on since, and
    what they uploaded meanwhile is their own to commit."""
    found = committed_chains(manifests)
    decision = {"tips": found.tips, "uncertain": [manifest.path for manifest in found.uncertain]}
    await _put_new(bus, Bucket.RUN, RECOVER_KEY, json.dumps(decision).encode())
    entry = await bus.get(Bucket.RUN, RECOVER_KEY)
    return chains_up_to(manifests, **json.loads(entry.value)) if entry is not None else found


async def _head(store: AdapterStore, newest: Manifest) -> tuple[Head, bytes]:
    """The head of an update, and its frame as its author signed it. Raises StoreError."""
    try:
        frame = await head_frame(store, newest.path)
        return decode(frame).expect(Head), frame
    except (StoreCorrupt, DecodeError) as exc:
        raise StoreCorrupt(f"{newest.path} brings back no head: {exc}; {WITHOUT_IT}") from exc


async def _claimed_genesis(store: AdapterStore, run: str, chains: Chains) -> str:
    """What the genesis key held, or nothing if no genesis was stored.

    Of several (learners that began at once, with other libraries) it is the one that updates stand on.
    """
    listed = [path for path in await store.list(f"{run}/genesis") if _is_digest(path, f"{run}/genesis/")]
    found = [m for m in await _manifests(store, listed) if m.path == f"{run}/genesis/{m.policy_digest[:16]}"]
    used = {manifest.extra.get(GENESIS_DIGEST) for chain in chains.updates.values() for manifest in chain}
    claimed = [m for m in found if not used or m.policy_digest in used]
    if used and not claimed:
        raise OperatorError(f"run {run!r} cannot be recovered: the store lacks the genesis of its updates")
    return f"{claimed[0].path} {claimed[0].policy_digest}" if claimed else ""


async def _is_finished(store: AdapterStore, run: str) -> bool:
    """Whether a learner has marked the run as ended."""
    return finished_path(run) in await store.list(run)


async def _restore_done(bus: Bus, chains: Chains) -> None:
    """Write the ``done`` key of every group that an update lists, unless it is there."""
    there = await bus.list(Bucket.POLICY, DONE)
    writes = [
        done_write(group, outcome, manifest.author, manifest.count)
        for group, (outcome, manifest) in chains.consumed.items()
        if (known := there.get(done_key(group))) is None or outcome_of(known.value) == UNCERTAIN
    ]
    for start in range(0, len(writes), BATCH_WRITES_MAX):
        await bus.commit(Bucket.POLICY, writes[start : start + BATCH_WRITES_MAX])
    for manifest in chains.uncertain:
        for group in outcomes(manifest):
            mark = done_write(group, UNCERTAIN, manifest.author, manifest.count)
            await _put_new(bus, Bucket.POLICY, mark.key, mark.value, mark.ttl_s)


def _cursor(chains: Chains, head: Head) -> Cursor:
    """Where a learner's tasks go on: at the oldest that may be lost, and how many beyond it are not."""
    tasks = filter(None, map(task_of, chains.consumed))
    beyond = sum(learner == head.learner and number >= head.floor for learner, number in tasks)
    return Cursor(head.floor, beyond)


async def _put_new(bus: Bus, bucket: Bucket, key: str, value: bytes, ttl_s: int | None = None) -> None:
    """Write a key that an interrupted attempt, or the peer it belongs to, may have written already."""
    with suppress(WrongRevision):
        await bus.put(bucket, key, value, expected=0, ttl_s=ttl_s)
