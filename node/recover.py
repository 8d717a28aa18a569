"""Recover: what the broker held of a run, rebuilt from the bucket alone after the broker lost its disk.

    bucket ─▶ settings, genesis, committed updates ─▶ done keys ─▶ heads ─▶ cursors ─▶ genesis ─▶ settings

In this order, because living peers watch: no learner commits before its head and genesis are there, and
no new node joins before the settings are. Repeated after an interruption it goes on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from node.run_bus import RunBus, find_run
from node.runs import RunLost, check_same, create_run
from node.stores import open_store
from protocol.codec import decode, encode, readable
from protocol.errors import OperatorError, StoreCorrupt, StoreNotFound, WrongRevision
from protocol.identity import Identity
from protocol.limits import BATCH_WRITES_MAX
from protocol.manifest import Manifest
from protocol.messages import Head, RunState
from protocol.ports import AdapterStore, Bus
from protocol.runspec import RunSpec
from protocol.subjects import DONE, FINISHED_KEY, GENESIS_KEY, HEADS, SPEC_KEY, Bucket, cursor_key, done_key, head_key
from roles.learner.commit import done_write
from roles.learner.finish import finished_path
from roles.learner.outstanding import Cursor, task_of
from roles.learner.update_entry import GENESIS_DIGEST, HEAD_FILE
from roles.policy.chains import UNCERTAIN, Chains, committed_chains, outcomes

log = structlog.get_logger()

RUN_FILE = "run.json"

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


async def recover_run(bus: RunBus, store: AdapterStore, run: str, identity: Identity) -> Recovered:
    """Rebuild ``run``. Raises OperatorError if the broker has it already, or the bucket has not."""
    if await find_run(bus) is not None:
        raise OperatorError(
            f"this broker holds run {run!r}; nothing was changed: recover is for one that lost it"
        )
    spec = await read_spec(store, run)
    chains = committed_chains(await _manifests(store, f"{run}/updates"))
    frames = {learner: await _head(store, chain) for learner, chain in chains.updates.items() if chain}
    heads = {learner: decode(frame).expect(Head) for learner, frame in frames.items()}
    genesis = await _claimed_genesis(store, run, chains)
    await bus.create_run(spec)
    there = await _heads_there(bus, chains)
    await _restore_done(bus, chains)
    heads |= there
    for learner, head in heads.items():
        if learner in frames:
            await _put_new(bus, Bucket.POLICY, head_key(learner), frames[learner])
        await _put_new(bus, Bucket.RUN, cursor_key(learner), str(_cursor(chains, head)).encode())
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
    )


async def create_or_recover(bus: RunBus, spec: RunSpec, identity: Identity, cache: Path) -> None:
    """Create a pinned run, or bring it back if this broker lost it and the store has its updates.

    Raises OperatorError if the run that is there has other settings.
    """
    try:
        await create_run(bus, spec, identity, cache)
    except RunLost:
        store = open_store(spec.store, cache)
        check_same(spec, (await read_spec(store, spec.name)).digest)
        recovered = await recover_run(bus, store, spec.name, identity)
        log.warning("run_recovered", run=spec.name, **asdict(recovered))


async def read_spec(store: AdapterStore, run: str) -> RunSpec:
    """The settings that ``create`` stored. Raises OperatorError if there are none, or several."""
    paths = [path for path in await store.list(run) if path.startswith(f"{run}/run-")]
    if len(paths) != 1:
        what = f"several settings ({', '.join(paths)}); delete all but one" if paths else "no such run"
        raise OperatorError(f"run {run!r} cannot be recovered: the store holds {what}")
    return RunSpec.model_validate_json((await store.fetch(paths[0]) / RUN_FILE).read_bytes())


async def _manifests(store: AdapterStore, prefix: str) -> list[Manifest]:
    """All manifests below ``prefix``. Raises StoreError if one is listed that cannot be read: without it an
    author's older updates could not be told from uploads that were never committed."""

    async def read(path: str) -> Manifest | None:
        try:
            return await store.manifest(path)
        except StoreNotFound:
            if path not in await store.list(path.rpartition("/")[0]):
                return None  # deleted meanwhile: its author lives
            raise

    try:
        paths = await store.list(prefix)
        found: list[Manifest | None] = []
        for start in range(0, len(paths), READ_AT_ONCE):
            found += await asyncio.gather(*(read(path) for path in paths[start : start + READ_AT_ONCE]))
    except (StoreCorrupt, StoreNotFound) as exc:
        raise type(exc)(f"{exc}; try again, or delete that entry to recover without it") from exc
    return [manifest for manifest in found if manifest is not None]


async def _head(store: AdapterStore, chain: Sequence[Manifest]) -> bytes:
    """The frame of a learner's newest head, as its author signed it."""
    directory = await store.fetch(chain[-1].path)
    return (directory / HEAD_FILE).read_bytes()


async def _claimed_genesis(store: AdapterStore, run: str, chains: Chains) -> str:
    """What the genesis key held, or nothing if no genesis was stored.

    Of several (learners that began at once, with other libraries) it is the one that updates stand on.
    """
    found = await _manifests(store, f"{run}/genesis")
    used = {manifest.extra.get(GENESIS_DIGEST) for chain in chains.updates.values() for manifest in chain}
    claimed = [m for m in found if not used or m.policy_digest in used]
    if used and not claimed:
        raise OperatorError(f"run {run!r} cannot be recovered: the store lacks the genesis of its updates")
    return f"{claimed[0].path} {claimed[0].policy_digest}" if claimed else ""


async def _heads_there(bus: Bus, chains: Chains) -> dict[str, Head]:
    """Heads that an earlier attempt has put already. Their authors went on from there: what they have uploaded
    since is their own to commit, so it leaves ``chains``."""
    entries = (await bus.list(Bucket.POLICY, HEADS)).values()
    heads = {head.learner: head for head in readable((entry.value for entry in entries), Head)}
    for learner, head in heads.items():
        known = chains.updates.get(learner, ())
        chains.updates[learner] = [manifest for manifest in known if manifest.count <= head.count]
    return heads


async def _is_finished(store: AdapterStore, run: str) -> bool:
    """Whether a learner has marked the run as ended."""
    return finished_path(run) in await store.list(run)


async def _restore_done(bus: Bus, chains: Chains) -> None:
    """Write the ``done`` key of every group that an update lists, unless it is there."""
    there = await bus.list(Bucket.POLICY, DONE)
    writes = [
        done_write(group, outcome, manifest.author, manifest.count)
        for group, (outcome, manifest) in chains.consumed.items()
        if done_key(group) not in there
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
