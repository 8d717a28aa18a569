"""Everybody dies once, the broker twice, and the store turns read-only: the run ends all the same.

Two learners, three samplers and two verifiers, as real processes on a real broker. What dies is started
again, as any supervisor would; nothing else is ever done for them but ``grpo-node recover``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from node.broker import start_broker
from node.settings import ENV_TOKEN, Environment, child_environment
from node.status import read_status
from node.stores import open_store
from node.swarm import Swarm, open_swarm, peers_for
from node.system_clock import SystemClock
from protocol.codec import decode
from protocol.messages import DeadLetter
from protocol.runspec import RunSpec
from protocol.subjects import TRAINING, Bucket, Names, cursor_key, done_key
from roles.learner.outstanding import Cursor
from roles.policy.chains import Chains, committed_chains, outcomes
from roles.policy.compose import UPDATE_FILE, WEIGHTS_FILE, compose, factors_digest
from roles.policy.peft_export import read_factors
from tests.e2e.test_ring import manifests

log = structlog.get_logger()

SEED = 3
UPDATES = 200
STEPS_BETWEEN = 3
"""Versions that the run must gain after each blow."""


class Wreck:
    """One swarm, and everything that can be done to it."""

    def __init__(self, swarm: Swarm, environment: Environment, directory: Path) -> None:
        self.swarm = swarm
        self.environment = environment
        self.directory = directory
        self.random = random.Random(SEED)
        self.ack_wait_s = swarm.spec.sampling.ack_wait_s

    def blows(self) -> list[Callable[[], Awaitable[None]]]:
        """In an order that the seed decides; the disk is lost last but one: much is lost with it."""
        learner, sampler = self.random.randint(1, 2), self.random.randint(1, 3)
        some = [
            lambda: self.kill(f"learner-{learner}"),
            lambda: self.kill(f"sampler-{sampler}"),
            lambda: self.kill(f"verifier-{self.random.randint(1, 2)}"),
            lambda: self.freeze(f"learner-{3 - learner}"),
            lambda: self.freeze(f"sampler-{sampler % 3 + 1}"),
            self.restart_broker,
            self.deny_writing,
        ]
        self.random.shuffle(some)
        return [*some[:-1], self.lose_disk, some[-1]]

    async def kill(self, name: str) -> None:
        self.swarm.kill(name, for_good=False)

    async def freeze(self, name: str) -> None:
        """Stopped for longer than the broker waits: its work goes to others, and it does not know."""
        self.swarm.signal(name, signal.SIGSTOP)
        await SystemClock().sleep(2 * self.ack_wait_s)  # no event: it is the silence that counts
        self.swarm.signal(name, signal.SIGCONT)

    async def restart_broker(self) -> None:
        self._kill_broker()
        self._start_broker()

    async def deny_writing(self) -> None:
        async with read_only(self.directory / "store"):
            await SystemClock().sleep(self.ack_wait_s)

    async def lose_disk(self) -> None:
        """The broker's disk is gone; all that is done about it is one command."""
        self._kill_broker()
        shutil.rmtree(self.directory / "broker" / "jetstream")
        self._start_broker()
        spec, broker = self.swarm.spec, self.swarm.broker
        command = [sys.executable, "-m", "node", "recover", "--run", spec.name, "--store", spec.store.url]
        command += ["--broker", broker.url, "--json"]
        environ = child_environment({ENV_TOKEN: broker.token, "GRPO_HOME": str(self.directory / "home")})
        ended = await asyncio.to_thread(subprocess.run, command, env=environ, capture_output=True, check=True)
        log.info("recovered", **json.loads(ended.stdout))

    def _kill_broker(self) -> None:
        process = self.swarm.broker.process
        assert process is not None
        process.kill()
        process.wait()

    def _start_broker(self) -> None:
        url = self.swarm.broker.url
        self.swarm.broker = start_broker(self.directory / "broker", binary=self.environment.nats_server)
        assert self.swarm.broker.url == url


@asynccontextmanager
async def read_only(directory: Path) -> AsyncIterator[None]:
    """Nobody can write below ``directory``, root neither."""
    lock, unlock = (["chattr", "-R", "+i"], ["chattr", "-R", "-i"])
    if os.geteuid() != 0:
        lock, unlock = (["chmod", "-R", "a-w"], ["chmod", "-R", "u+w"])
    locked = await asyncio.to_thread(subprocess.run, [*lock, str(directory)], check=False)
    if locked.returncode:
        log.warning("read_only_not_tested", reason="root may write everywhere on this file system")
    try:
        yield
    finally:
        await asyncio.to_thread(subprocess.run, [*unlock, str(directory)], check=not locked.returncode)


async def test_a_run_in_which_everything_fails_once_reaches_its_reward(environment, small_run, tmp_path):
    spec = small_run(learner={"updates": UPDATES})
    peers = peers_for(2, 3, 2, environment, threads=1)
    async with open_swarm(spec, environment, tmp_path, peers) as swarm:
        wreck = Wreck(swarm, environment, tmp_path)
        ended = asyncio.ensure_future(swarm.finished())
        for blow in wreck.blows():
            await reached(swarm, ended, swarm.progress.version + STEPS_BETWEEN)
            await blow()
        await ended
        rewards, stalest = swarm.progress.rewards, swarm.progress.staleness_max
        await swarm.stop(20.0)
        chains = await check_books(swarm, tmp_path / "cache")
    await check_bytes(chains, spec, tmp_path / "cache")
    assert stalest <= spec.staleness.max_staleness
    assert sum(rewards[-8:]) / 8 > sum(rewards[:3]) / 3 + 0.3, rewards


async def reached(swarm: Swarm, ended: asyncio.Future[None], version: float) -> None:
    """Wait for a version, or for whatever ended the swarm."""
    progress = asyncio.ensure_future(swarm.until(lambda progress: progress.version >= version))
    await asyncio.wait({progress, ended}, return_when=asyncio.FIRST_COMPLETED)
    if not progress.done():
        progress.cancel()
        await ended
        raise AssertionError("the run was over before everything had failed; give it more updates")


async def check_books(swarm: Swarm, cache: Path) -> Chains:
    """Every issued group is trained, dropped, dead or in a queue, and none was trained twice."""
    bus, spec = swarm.bus, swarm.spec
    log.info("books", **await read_status(bus, spec.name))
    done = {key.removeprefix(done_key("")) for key in await bus.list(Bucket.POLICY, "done")}
    letters = [decode(frame).message for frame in await bus.dead_letters()]
    dead = {letter.group_id for letter in letters if isinstance(letter, DeadLetter)}
    cursors = await bus.list(Bucket.RUN, "cursor")
    issued = {
        f"{key.removeprefix(cursor_key(''))}.{number}"
        for key, entry in cursors.items()
        for number in range(Cursor.parse(entry.value).next)
    }
    assert issued - done - dead - await in_flight(swarm) == set(), "groups vanished"
    assert done <= issued
    chains = committed_chains(await manifests(spec, cache))
    consumed = Counter(group for chain in chains.updates.values() for m in chain for group in outcomes(m))
    assert [group for group, times in consumed.items() if times > 1] == [], "a group was consumed twice"
    for learner, chain in chains.updates.items():
        assert [m.count for m in chain] == list(range(1, len(chain) + 1)), f"{learner} skipped or repeated"
    return chains


async def in_flight(swarm: Swarm) -> set[str]:
    """Groups whose message is in a queue, whoever has it."""
    names = Names(swarm.spec.name)
    found = set()
    for queue in TRAINING:
        async for _, msg in swarm.bus._link.walk(names.stream(queue), names.subject(queue, "*")):
            found.add(str(getattr(decode(msg.data).message, "group_id", "")))
    return found


async def check_bytes(chains: Chains, spec: RunSpec, cache: Path) -> None:
    """Composed again, by somebody who was not there, every policy has the digest that its author signed."""
    store = open_store(spec.store, cache)
    (genesis_path,) = await store.list(f"{spec.name}/genesis")
    genesis = read_factors(await store.fetch(genesis_path) / WEIGHTS_FILE)
    updates = {
        (learner, manifest.count): read_factors(await store.fetch(manifest.path) / UPDATE_FILE)
        for learner, chain in chains.updates.items()
        for manifest in chain
    }
    for chain in chains.updates.values():
        for manifest in chain:
            parts = {learner: updates[learner, count] for learner, count in manifest.clock}
            assert factors_digest(compose(genesis, parts)) == manifest.policy_digest, manifest.path
