"""A swarm on one machine: what it does about peers whose broker has lost the run."""

from __future__ import annotations

from pathlib import Path

from node.nats_bus import NatsBus
from node.swarm import Peer, Swarm
from tests.contract.brokers import eventually
from tests.node.sites import SPEC, Site


async def test_a_peer_that_starts_between_a_lost_disk_and_recover_waits_instead_of_giving_up(
    site: Site, tmp_path: Path
):
    bus = await NatsBus.connect(site.broker.access, SPEC.name, node="watcher")
    swarm = Swarm(SPEC, site.broker, bus, tmp_path / "home", tmp_path)
    log = tmp_path / "logs" / "verifier-1.log"

    async def waits() -> bool:
        return "waiting_for_run" in log.read_text()

    await swarm.start(Peer("verifier-1", ("verifier",)))
    try:
        await eventually(waits, within_s=60.0)
        assert swarm.alive == ["verifier-1"]
    finally:
        await swarm.stop(20.0)
        await bus.close()
    assert swarm._children["verifier-1"].process.returncode == 0
