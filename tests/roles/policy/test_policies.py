"""Policies: the only way from a clock to weights, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.memory_store import StoreFault
from node.virtual_time import in_virtual_time
from protocol.codec import encode
from protocol.errors import StoreCorrupt, StoreError, StoreNotFound
from protocol.manifest import EntryKind
from protocol.subjects import Bucket, head_key
from roles.policy.chains import PREVIOUS
from roles.policy.compose import UPDATE_FILE, Factors, compose, factors_digest
from roles.policy.norm_bound import step_norm
from roles.policy.peft_export import factors_bytes
from roles.policy.policies import Policies
from tests.build import a_clock, an_identity
from tests.ground import Ground, an_update


async def begin(directory: Path) -> tuple[Ground, Factors, Policies]:
    ground = Ground(directory)
    genesis = await ground.claim_genesis()
    return ground, genesis, await policies_of(ground)


async def policies_of(ground: Ground, node: str = "sampler-1") -> Policies:
    policies = Policies(ground.ring(node), ground.store(), ground.offload)
    await policies.start()
    return policies


def with_one_changed(factors: Factors, change: Any) -> bytes:
    name = next(iter(factors))
    return factors_bytes({**factors, name: change(factors[name])})


@in_virtual_time
async def test_the_empty_clock_is_genesis(tmp_path: Path):
    _, genesis, policies = await begin(tmp_path)
    policy = await policies.at(a_clock())
    assert (policy.version, policy.digest) == (0.0, factors_digest(genesis))


@in_virtual_time
async def test_a_clock_is_genesis_plus_one_update_of_each_learner(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)
    await ground.commit_update(genesis, 2, weight=1.0)
    await ground.commit_update(genesis, 1, learner="learner-2", weight=0.5, peers={"learner-1": 2})
    policy = await policies.at(await policies.read_heads())
    both = {"learner-1": an_update(genesis, 2), "learner-2": an_update(genesis, 1)}
    assert policy.digest == factors_digest(compose(genesis, both))
    assert (policy.clock.text, policy.version) == ("learner-1:2,learner-2:1", 1.5)


@in_virtual_time
async def test_names_belong_to_bytes(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)
    await ground.commit_update(genesis, 1)
    policy = await policies.at(await policies.read_heads())
    _, clock, digest = policy.name.split("-")
    assert policy.clock.digest.startswith(clock)
    assert policy.digest.startswith(digest)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda genesis: with_one_changed(genesis, lambda t: t[:1]), "has shape"),
        (lambda genesis: with_one_changed(genesis, lambda t: t * np.nan), "is not finite"),
        (lambda genesis: factors_bytes(dict(list(genesis.items())[:1])), "tensors are missing"),
        (lambda genesis: b"noise", "not a safetensors file"),
    ],
)
@in_virtual_time
async def test_an_update_that_is_no_update_of_this_run_is_refused_before_it_is_used(
    tmp_path: Path, damage: Any, reason: str
):
    ground, genesis, policies = await begin(tmp_path)
    await ground.commit_update(genesis, 1, data=damage(genesis))
    await policies.read_heads()
    with pytest.raises(StoreCorrupt, match=reason):
        await policies.update("learner-1", 1)


@in_virtual_time
async def test_an_update_without_its_file_is_refused(tmp_path: Path):
    ground, _, policies = await begin(tmp_path)
    await ground.publish("test/updates/learner-1/1-x", EntryKind.UPDATE, {"other.txt": b""}, count=1)
    with pytest.raises(StoreCorrupt, match=r"update\.safetensors is missing"):
        await policies.update("learner-1", 1)


@pytest.mark.parametrize("lie", [{"author": "learner-2"}, {"count": 2}, {"kind": EntryKind.EXPORT}])
@in_virtual_time
async def test_an_entry_that_is_something_else_is_refused(tmp_path: Path, lie: dict[str, Any]):
    ground, genesis, policies = await begin(tmp_path)
    fields: dict[str, Any] = {"kind": EntryKind.UPDATE, "count": 1} | lie
    files = {UPDATE_FILE: factors_bytes(an_update(genesis, 1))}
    await ground.publish("test/updates/learner-1/1-x", fields.pop("kind"), files, **fields)
    with pytest.raises(StoreCorrupt, match="is not update 1 of learner-1"):
        await policies.update("learner-1", 1)


@in_virtual_time
async def test_a_policy_with_another_digest_than_its_authors_is_refused(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)
    files = {UPDATE_FILE: factors_bytes(an_update(genesis, 1))}
    clock = a_clock(**{"learner-1": 1})
    fields = {"count": 1, "clock": clock, "weight": 1.0, "policy_digest": "another"}
    norm = step_norm(an_update(genesis, 1), None, 1.0)
    await ground.publish("test/updates/learner-1/1-x", EntryKind.UPDATE, files, **fields, step_norm=norm)
    with pytest.raises(StoreCorrupt, match="another digest than its author's"):
        await policies.at(clock)


@in_virtual_time
async def test_genesis_must_be_the_one_that_was_claimed(tmp_path: Path):
    ground, _, policies = await begin(tmp_path)
    entry = ground.run.buckets[Bucket.RUN].get("genesis")
    assert entry is not None
    await ground.bus().put(Bucket.RUN, "genesis", entry.value[:-1] + b"?")
    with pytest.raises(StoreCorrupt, match="not the one the run claimed"):
        await policies.start()


@pytest.mark.parametrize("fault", [StoreFault.MISSING, StoreFault.CORRUPT, StoreFault.UNAVAILABLE])
@in_virtual_time
async def test_a_genesis_that_cannot_be_had_for_the_moment_is_asked_for_again(
    tmp_path: Path, fault: StoreFault
):
    ground = Ground(tmp_path)
    await ground.claim_genesis()
    troubles: list[StoreFault | None] = [fault, fault, None, fault, None]
    store = ground.store(lambda _op, _path: troubles.pop(0) if troubles else None)
    policies = Policies(ground.ring(), store, ground.offload)
    await policies.start()
    assert policies.genesis_author == "learner-1"


@in_virtual_time
async def test_a_genesis_that_stays_away_is_an_error(tmp_path: Path):
    ground = Ground(tmp_path)
    await ground.claim_genesis()
    ground.bucket.entries.clear()
    with pytest.raises(StoreNotFound):
        await Policies(ground.ring(), ground.store(), ground.offload).start()


@in_virtual_time
async def test_versions_need_no_weights_only_manifests(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)
    await ground.commit_update(genesis, 1, weight=0.5)
    await ground.commit_update(genesis, 2, weight=0.75)
    assert await policies.version(a_clock(**{"learner-1": 1})) == 0.5
    with pytest.raises(StoreNotFound, match="update 9 of learner-1"):
        await policies.version(a_clock(**{"learner-1": 9}))


@in_virtual_time
async def test_versions_do_not_depend_on_rounding_by_order(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)
    for number in range(1, 11):
        await ground.commit_update(genesis, 1, learner=f"learner-{number}", weight=0.1)
    assert await policies.version(await policies.read_heads()) == 1.0


@in_virtual_time
async def test_an_upload_that_was_never_committed_is_not_mistaken_for_the_update(tmp_path: Path):
    """A learner that crashed between upload and commit leaves an orphan under the same count."""
    ground, genesis, _ = await begin(tmp_path)
    orphan = {UPDATE_FILE: factors_bytes(an_update(genesis, 7))}
    clock = a_clock(**{"learner-1": 2})
    digest = factors_digest(compose(genesis, {"learner-1": an_update(genesis, 7)}))
    await ground.publish(
        "test/updates/learner-1/2-aaaa", EntryKind.UPDATE, orphan, count=2, clock=clock, policy_digest=digest
    )
    for count in (1, 2, 3, 4):
        await ground.commit_update(genesis, count)
    late = await policies_of(ground, "sampler-2")
    await late.read_heads()
    assert (await late.at(clock)).digest == factors_digest(
        compose(genesis, {"learner-1": an_update(genesis, 2)})
    )


@in_virtual_time
async def test_a_head_that_names_another_path_makes_forget_what_was_taken_for_its_update(tmp_path: Path):
    """Whoever asks between a crashed learner's upload and its next one finds only the orphan."""
    ground, genesis, policies = await begin(tmp_path)
    orphan = an_update(genesis, 7)
    fields = {"count": 1, "weight": 0.5, "step_norm": step_norm(orphan, None, 0.5)}
    files = {UPDATE_FILE: factors_bytes(orphan)}
    await ground.publish("test/updates/learner-1/1-aaaa", EntryKind.UPDATE, files, **fields)
    clock = a_clock(**{"learner-1": 1})
    assert await policies.version(clock) == 0.5
    assert factors_digest((await policies.update("learner-1", 1)).factors) == factors_digest(orphan)
    head = await ground.commit_update(genesis, 1)
    await policies.read_heads()
    assert (await policies.update("learner-1", 1)).manifest.path == head.path
    assert (await policies.at(clock)).version == 1.0
    assert (await policies._index.step("learner-1", 1)).norm == step_norm(an_update(genesis, 1), None, 1.0)


@pytest.mark.parametrize("name", ["notes", "1-Copy", "01-aaaa", "old/1-aaaa", "1.bak"])
@in_virtual_time
async def test_what_lies_among_updates_under_another_name_is_none(tmp_path: Path, name: str):
    ground, genesis, policies = await begin(tmp_path)
    files = {UPDATE_FILE: factors_bytes(an_update(genesis, 7))}
    await ground.publish(f"test/updates/learner-1/{name}", EntryKind.UPDATE, files, count=1)
    with pytest.raises(StoreNotFound, match="update 1 of learner-1 is not in the store"):
        await policies.update("learner-1", 1)


@in_virtual_time
async def test_which_of_two_uploads_counts_is_unknown_while_neither_was_committed(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)
    for suffix in ("aaaa", "bbbb"):
        files = {UPDATE_FILE: factors_bytes(an_update(genesis, 1))}
        await ground.publish(f"test/updates/learner-1/1-{suffix}", EntryKind.UPDATE, files, count=1)
    with pytest.raises(StoreNotFound, match="not known to be committed"):
        await policies.update("learner-1", 1)


@in_virtual_time
async def test_a_chain_that_does_not_reach_back_is_an_error_not_a_guess(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)
    for suffix in ("aaaa", "bbbb"):
        files = {UPDATE_FILE: factors_bytes(an_update(genesis, 1))}
        await ground.publish(f"test/updates/learner-1/1-{suffix}", EntryKind.UPDATE, files, count=1)
    head = await ground.commit_update(genesis, 2)
    assert PREVIOUS not in (await ground.store().manifest(head.path)).extra
    await policies.read_heads()
    with pytest.raises(StoreError, match="does not tell which update came before it"):
        await policies.version(a_clock(**{"learner-1": 1}))


@in_virtual_time
async def test_heads_only_move_forward(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)
    old = await ground.commit_update(genesis, 1)
    await ground.commit_update(genesis, 2)
    assert (await policies.read_heads()).text == "learner-1:2"
    policies.note_head(old)
    assert policies.newest.text == "learner-1:2"


@in_virtual_time
async def test_heads_that_cannot_be_read_or_lie_under_another_name_are_passed_over(tmp_path: Path):
    ground, genesis, policies = await begin(tmp_path)
    head = await ground.commit_update(genesis, 1)
    bus = ground.bus()
    await bus.put(Bucket.POLICY, head_key("noise"), b"noise")
    forged = head.model_copy(update={"count": 99})
    await bus.put(Bucket.POLICY, head_key("mallory"), encode(forged, an_identity("mallory")))
    foreign = head.model_copy(update={"run": "another", "learner": "learner-9"})
    await bus.put(Bucket.POLICY, head_key("learner-9"), encode(foreign, an_identity("learner-9")))
    assert (await policies.read_heads()).text == "learner-1:1"
