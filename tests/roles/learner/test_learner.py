"""The learner's loop: what a commit moves, and what it must not."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from node.virtual_time import in_virtual_time
from protocol.reasons import DropReason
from roles.learner.buffer import Dropped
from roles.learner.committer import FinishedStep, nothing_committed
from roles.learner.fake_policy import FakePolicy
from roles.learner.learner import Learner
from roles.learner.lease import Lease
from roles.learner.policy import at_hand
from roles.learner.register import Register
from roles.learner.stepper import SafePoint
from roles.tasks.prompts import Prompt
from tests.build import a_clock
from tests.ground import Ground, Handed, an_update

PROMPTS = [Prompt(0, np.array([1, 2], np.int32))]


def a_learner(ground: Ground) -> Learner:
    offload = ground.offload
    ring, store = ground.ring(), ground.store()
    return Learner(ring, store, FakePolicy(), offload=offload, aside=offload, train=PROMPTS, held_out=[])


@in_virtual_time
async def test_a_commit_of_drops_alone_does_not_move_the_point_to_return_to(tmp_path: Path):
    """Drops may be submitted while a step waits; returning to where they were submitted would undo it."""
    learner = a_learner(Ground(tmp_path))
    register = Register("learner-1", FakePolicy().genesis(0))
    register.resume(an_update(register.base, 1), 3, 3.0)
    head = nothing_committed("test", "learner-1")
    learner._on_commit(FinishedStep((), (), None, SafePoint(register, at_hand({})), 5, 0), head, ())
    assert learner.clock == a_clock(**{"learner-1": 3})
    drop = Dropped("learner-1.0", DropReason.STALE, Lease(Handed()))
    learner._on_commit(FinishedStep((), (drop,), None, None, 5, 0), head, ())
    assert learner.clock == a_clock(**{"learner-1": 3})
    assert learner._safe.register.count == 3
