"""Is the run there? A node asks, and one that was told to wait asks again."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from node.memory_broker import MemoryBroker
from node.run_bus import find_run, no_run, wait_for_run
from node.virtual_time import VirtualClock, in_virtual_time
from protocol.codec import encode
from protocol.messages import RunState
from protocol.subjects import SPEC_KEY, Bucket
from tests.build import RUN, a_runspec, an_identity
from tests.ground import FaultyBus


@in_virtual_time
async def test_a_node_that_waits_gets_its_run_whenever_it_comes_and_warns_once():
    """Neither a broker that is away nor a run that is only half restored is an answer."""
    clock, spec = VirtualClock(), a_runspec()
    bus = FaultyBus(MemoryBroker(clock), RUN, node="sampler-1")
    state = RunState(spec_json=spec.model_dump_json(), spec_digest=spec.digest, creator="operator")
    with capture_logs() as logs:
        waiting = asyncio.ensure_future(wait_for_run(bus, RUN, clock))
        await clock.sleep(600.0)
        bus.away = True
        await clock.sleep(600.0)
        bus.away = False
        await bus.create_run(spec)
        await clock.sleep(600.0)
        assert not waiting.done()
        assert await find_run(bus) is None
        await bus.put(Bucket.RUN, SPEC_KEY, encode(state, an_identity("operator")))
        assert await waiting == state
    assert [log["event"] for log in logs] == ["waiting_for_run"]


def test_a_missing_run_may_never_have_been_or_may_be_lost():
    text = str(no_run("sorting"))
    assert text.startswith("no run 'sorting' at this broker; create it with: grpo-node create RUN.toml")
    assert "restore it with: grpo-node recover RUN.toml" in text
