"""The janitor: deletes its own learner's entries, and nothing while it cannot see who lives."""

from __future__ import annotations

from pathlib import Path

from node.memory_store import StoreFault
from node.virtual_time import in_virtual_time
from protocol.messages import Head, NodeState
from roles.learner.committer import nothing_committed
from roles.learner.janitor import CLEAN_MAX_S, Janitor
from tests.build import a_clock, a_runspec
from tests.ground import Ground, running

SETTINGS = {"url": "memory:", "keep_updates": 2, "keep_states": 1, "keep_exports": 1, "grace_s": 100.0}


class Desk:
    """A janitor of learner-1 in a bucket with six updates of two learners."""

    def __init__(self, directory: Path, **changes: object) -> None:
        spec = a_runspec(store=SETTINGS | changes, staleness={"max_staleness": 0})
        self.ground = Ground(directory, spec)
        self.peers: list[NodeState] | None = []
        self.heads: list[Head] = [nothing_committed("test", "learner-1").model_copy(update={"floor": 1000})]
        self.refuses = False

    async def begin(self) -> Janitor:
        genesis = await self.ground.claim_genesis()
        for learner in ("learner-1", "learner-2"):
            for count in range(1, 7):
                await self.ground.commit_update(genesis, count, learner=learner)
        return Janitor(
            self.ground.ring(), self.ground.store(self._fault), lambda: self.peers, lambda: self.heads
        )

    def _fault(self, operation: str, _path: str) -> StoreFault | None:
        return StoreFault.UNAVAILABLE if self.refuses and operation == "delete" else None

    def left(self, learner: str = "learner-1") -> list[int]:
        paths = [path for path in self.ground.bucket.entries if f"/updates/{learner}/" in path]
        return sorted(int(path.rpartition("/")[2].partition("-")[0]) for path in paths)


def a_peer(**fields: object) -> NodeState:
    state = {
        "run": "test",
        "node": "p",
        "public_key": "k",
        "host": "h",
        "started_at": 0.0,
        "roles": ("sampler",),
    }
    return NodeState.model_validate(state | {"clock": a_clock(**{"learner-1": 6})} | fields)


@in_virtual_time
async def test_only_its_own_learners_old_updates_go_and_only_after_the_grace_period(tmp_path: Path):
    desk = Desk(tmp_path)
    async with running(await desk.begin()):
        await desk.ground.clock.sleep(99.0)
        assert desk.left() == [1, 2, 3, 4, 5, 6]
        await desk.ground.clock.sleep(CLEAN_MAX_S)
        assert (desk.left(), desk.left("learner-2")) == ([5, 6], [1, 2, 3, 4, 5, 6])


@in_virtual_time
async def test_nothing_goes_while_presence_cannot_be_read(tmp_path: Path):
    desk = Desk(tmp_path)
    desk.peers = None
    async with running(await desk.begin()):
        await desk.ground.clock.sleep(1000.0)
        assert desk.left() == [1, 2, 3, 4, 5, 6]
        desk.peers = []
        await desk.ground.clock.sleep(CLEAN_MAX_S)
        assert desk.left() == [5, 6]


@in_virtual_time
async def test_what_an_evaluation_of_a_live_peer_is_pinned_to_stays(tmp_path: Path):
    desk = Desk(tmp_path)
    desk.peers = [a_peer(needs=(a_clock(**{"learner-1": 2}),))]
    async with running(await desk.begin()):
        await desk.ground.clock.sleep(1000.0)
        assert desk.left() == [2, 5, 6]


@in_virtual_time
async def test_a_store_that_refuses_is_asked_again(tmp_path: Path):
    desk = Desk(tmp_path)
    desk.refuses = True
    async with running(await desk.begin()):
        await desk.ground.clock.sleep(1000.0)
        assert desk.left() == [1, 2, 3, 4, 5, 6]
        desk.refuses = False
        await desk.ground.clock.sleep(CLEAN_MAX_S)
        assert desk.left() == [5, 6]


@in_virtual_time
async def test_states_and_exports_have_limits_of_their_own(tmp_path: Path):
    desk = Desk(tmp_path)
    janitor = await desk.begin()
    deleted: list[str] = []

    async def delete(path: str) -> bool:
        deleted.append(path)
        return True

    janitor._delete = delete  # type: ignore[method-assign]
    async with running(janitor):
        for count in (10, 20, 30):
            janitor.kept("state", f"test/state/learner-1/{count}")
            janitor.kept("export", f"test/exports/{count}")
        await desk.ground.clock.sleep(200.0)
    assert [path for path in deleted if "/updates/" not in path] == [
        "test/state/learner-1/10",
        "test/state/learner-1/20",
        "test/exports/10",
        "test/exports/20",
    ]


@in_virtual_time
async def test_all_exports_stay_unless_the_run_says_otherwise(tmp_path: Path):
    desk = Desk(tmp_path, keep_exports=0)
    janitor = await desk.begin()
    janitor.kept("export", "test/exports/10")
    await desk.ground.clock.sleep(200.0)
    await janitor.clean()
    assert janitor._others["export"] != []
