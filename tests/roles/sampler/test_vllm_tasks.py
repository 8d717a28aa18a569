"""A sampler on vLLM: what a dying server had in hand goes back to the queue and is done by its successor."""

from __future__ import annotations

import asyncio

import numpy as np

from protocol.codec import decode_as, encode
from protocol.messages import RolloutGroup, SamplingParams
from protocol.subjects import Queue
from roles.learner.fake_policy import SHAPES
from roles.sampler.sampler import Sampler
from tests.build import a_task, an_identity
from tests.ground import Ground
from tests.roles.sampler.scene import a_run
from tests.vllm_rigs import IMPATIENT, VllmRig
from tests.vllm_stub import StubModel, StubServer


async def test_tasks_of_a_dead_server_go_back_to_the_queue_and_are_done_by_its_successor(tmp_path):
    ground = Ground(tmp_path, a_run())
    await ground.claim_genesis()
    shapes = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    async with StubServer(StubModel()) as stub:
        rig = await VllmRig.open(stub.url, shapes, tmp_path / "adapters", patience=IMPATIENT)
        ring = ground.ring("sampler-1", ground.bus("sampler-1"), "sampler")
        stop = asyncio.Event()
        sampler = Sampler(ring, ground.store(), rig.engine, ground.offload)
        work = asyncio.create_task(sampler.run(stop))
        stub.faults.stalls = True
        for number in range(2):
            task = a_task(
                group_id=f"learner-1.{number}",
                prompt_token_ids=np.array([1, 5, 6], np.int32),
                params=SamplingParams(max_new_tokens=6),
            )
            await ground.bus().publish(Queue.TASK, encode(task, an_identity()), f"task:{number}")
        await stub.until_running(2 * task.group_size)
        await stub.stop()
        stub.faults.stalls = False
        await stub.start_again()
        onward = await ground.bus().consume(Queue.ROLLOUT, 2)
        groups = [decode_as((await onward.next()).data, RolloutGroup) for _ in range(2)]
        assert {group.group_id for group in groups} == {"learner-1.0", "learner-1.1"}
        assert all(len(group.rollouts) == task.group_size for group in groups)
        assert ground.dead == []
        stop.set()
        await work
        await rig.engine.close()
