"""Whoever holds the same clock holds the same bytes: in any order of events, and in any process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import hypothesis
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from node.entry_cache import EntryCache
from node.file_store import FileStore
from protocol.clock import VectorClock
from protocol.learner_spec import LearnerSpec
from protocol.manifest import EntryKind, Manifest
from protocol.messages import Head
from roles.learner.register import Published, Register
from roles.learner.update_entry import HEAD_FILE, update_entry
from roles.policy.compose import UPDATE_FILE, WEIGHTS_FILE, Factors, compose, factors_digest
from roles.policy.peft_export import factors_bytes
from tests.build import RUN, an_identity

NAMES = ("a", "b", "c", "d")
SHAPES = {"x.lora_A.weight": (2, 3), "x.lora_B.weight": (3, 2)}
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
ROOT = Path(__file__).parents[3]


def noise(seed: int, scale: float = 1.0) -> Factors:
    """Numbers of very different sizes, so that the order of a sum matters."""
    generator = np.random.default_rng(seed)
    return {
        name: (scale * generator.normal(size=s) * 10.0 ** generator.integers(-3, 3, s)).astype(np.float32)
        for name, s in SHAPES.items()
    }


GENESIS = noise(7)


class InOrderOfArrival(Register):
    """Sums as updates come in. Two that merge in different orders end with different bytes."""

    def _compose(self, own: Factors) -> Factors:
        total = {name: tensor.copy() for name, tensor in self._genesis.items()}
        for update in [own, *(peer.update for peer in self._peers.values())]:
            for name, tensor in total.items():
                tensor += update[name]
        return total


@dataclass(frozen=True)
class Event:
    """Something that happens to one learner."""

    who: str
    seed: int
    publishes: bool
    """Or else hears of a peer's update."""
    weight: float
    of: str
    """The peer."""
    which: float
    """Which of the peer's updates so far: an old one may be announced again, new ones may be missed."""


events = st.lists(
    st.builds(
        Event,
        who=st.sampled_from(NAMES),
        seed=st.integers(0, 1 << 20),
        publishes=st.booleans(),
        weight=st.sampled_from([1.0, 0.5, 1 / 3, 0.1]),
        of=st.sampled_from(NAMES),
        which=st.floats(0, 1),
    ),
    max_size=40,
)


@dataclass
class Swarm:
    """Learners that train, publish and hear of each other, and all that anybody ever held."""

    kind: type[Register]
    dtype: Literal["float32", "bfloat16"]
    updates: dict[str, list[Published]] = field(default_factory=lambda: {name: [] for name in NAMES})
    digests: dict[VectorClock, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = LearnerSpec(update_dtype=self.dtype)
        self.registers = {name: self.kind(name, GENESIS, spec) for name in NAMES}
        self.factors = {name: register.base for name, register in self.registers.items()}

    def happens(self, event: Event) -> None:
        register, trained = self.registers[event.who], noise(event.seed, 0.01)
        self.factors[event.who] = {k: t + trained[k] for k, t in self.factors[event.who].items()}
        if event.publishes:
            published = register.publish(self.factors[event.who], event.weight)
            self.factors[event.who] = published.policy
            self.updates[event.who].append(published)
            self.digests.setdefault(published.clock, set()).add(published.digest)
        elif event.of != event.who and self.updates[event.of]:
            known = self.updates[event.of]
            self.hears(event.who, event.of, known[int(event.which * (len(known) - 1))])
        self.digests.setdefault(register.clock, set()).add(factors_digest(register.base))

    def hears(self, who: str, of: str, update: Published) -> None:
        register, count = self.registers[who], update.clock[of]
        if count >= register.clock[of]:  # the same one again does no harm
            factors = self.factors[who]
            self.factors[who] = register.merge(of, update.update, count, update.own_weight, factors)

    def hear_everything(self, seed: int) -> None:
        """Everybody hears of everybody's newest update, in an order of its own."""
        order = random.Random(seed)
        for who in NAMES:
            for of in order.sample(NAMES, len(NAMES)):
                if of != who and self.updates[of]:
                    self.hears(who, of, self.updates[of][-1])
            register = self.registers[who]
            self.digests.setdefault(register.clock, set()).add(factors_digest(register.base))

    def a_reader_composes_everything(self, seed: int) -> None:
        """Somebody without a register reads one file of each learner in every clock."""
        order = random.Random(seed)
        for clock, digests in self.digests.items():
            found = [(who, self.updates[who][count - 1].update) for who, count in clock]
            digests.add(factors_digest(compose(GENESIS, dict(order.sample(found, len(found))))))


def swarm_after(history: list[Event], kind: type[Register], dtype: Literal["float32", "bfloat16"]) -> Swarm:
    swarm = Swarm(kind, dtype)
    for event in history:
        swarm.happens(event)
    swarm.hear_everything(len(history))
    return swarm


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=100, deadline=None)
@given(history=events)
def test_whoever_holds_the_same_clock_holds_the_same_bytes(dtype, history: list[Event]):
    swarm = swarm_after(history, Register, dtype)
    swarm.a_reader_composes_everything(len(history))
    assert {clock.text: found for clock, found in swarm.digests.items() if len(found) > 1} == {}
    assert len({register.clock for register in swarm.registers.values()}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_in_order_of_arrival_would_be_found_out(dtype):
    def differ(history: list[Event]) -> bool:
        return any(len(found) > 1 for found in swarm_after(history, InOrderOfArrival, dtype).digests.values())

    quickly = settings(max_examples=500, deadline=None, phases=[Phase.generate], derandomize=True)
    assert hypothesis.find(events, differ, settings=quickly)


# --- across processes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class OnDisk:
    """Genesis and four learners' updates and heads, as files and in a store."""

    store: Path
    claim: str
    genesis: Path
    updates: dict[str, Path]
    heads: dict[str, Path]
    digest: str
    """Of the policy that holds them all, as the last learner composed it."""


async def on_disk(directory: Path, dtype: Literal["float32", "bfloat16"]) -> OnDisk:
    """Every learner merges those before it and publishes."""
    store = FileStore(directory, EntryCache(directory / "cache"), 10.0)
    files = {WEIGHTS_FILE: factors_bytes(GENESIS)}
    path = f"{RUN}/genesis/x"
    genesis = Manifest(path=path, kind=EntryKind.GENESIS, run=RUN, author="a", files=Manifest.describe(files))
    await store.publish(genesis.signed(an_identity("a")), files)
    entries: dict[str, Manifest] = {}
    before: dict[str, Published] = {}
    for seed, name in enumerate(NAMES):
        register = Register(name, GENESIS, LearnerSpec(update_dtype=dtype))
        for peer, update in before.items():
            register.merge(peer, update.update, 1, update.own_weight, register.base, update.step)
        progress = noise(seed, 0.01)
        factors = {key: tensor + progress[key] for key, tensor in register.base.items()}
        published = before[name] = register.publish(factors, 1 / 3)
        head = Head(
            run=RUN, learner=name, count=1, clock=published.clock, weight=1 / 3, path="",
            policy_digest=published.digest, nonce=name,
        )  # fmt: skip
        identity = an_identity(name)
        entries[name], content, _ = update_entry(
            published, head, identity, trained=(), dropped={}, previous="", genesis="x"
        )
        await store.publish(entries[name], content)
    return OnDisk(
        directory,
        f"{path} {factors_digest(GENESIS)}",
        directory / path / WEIGHTS_FILE,
        {name: directory / entry.path / UPDATE_FILE for name, entry in entries.items()},
        {name: directory / entry.path / HEAD_FILE for name, entry in entries.items()},
        before[NAMES[-1]].digest,
    )


def a_process(number: int, *arguments: str) -> subprocess.Popen[str]:
    """A peer with a hash seed and a number of threads of its own."""
    command = [sys.executable, "-m", "tests.roles.learner.composing_peer", *arguments]
    own = {"PYTHONHASHSEED": str(number * 1000 + 1), "OMP_NUM_THREADS": str(1 + number % 3)}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdout=subprocess.PIPE, text=True)


def pairs(files: dict[str, Path], order: Any) -> list[str]:
    return [f"{name}={files[name]}" for name in order]


@pytest.mark.parametrize("dtype", DTYPES)
async def test_processes_that_read_the_same_updates_in_any_order_compose_the_same_bytes(
    tmp_path: Path, dtype
):
    there = await on_disk(tmp_path, dtype)
    shuffle = random.Random(0)
    orders = [shuffle.sample(NAMES, len(NAMES)) for _ in range(3)]
    peers = [
        a_process(n, "files", dtype, str(there.genesis), *pairs(there.updates, order))
        for n, order in enumerate(orders)
    ]
    cache = str(tmp_path / "their-cache")
    follower = ["store", dtype, str(there.store), cache, there.claim, *pairs(there.heads, reversed(NAMES))]
    peers.append(a_process(len(peers), *follower))
    printed = [peer.communicate(timeout=60)[0].strip() for peer in peers]
    assert printed == [there.digest] * len(peers)
