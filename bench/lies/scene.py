"""A model with seven versions of an adapter, engines to sample from it, and a verifier's recomputation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.lies.groups import Sent
from protocol.audit_spec import ToleranceSpec
from protocol.messages import Task
from protocol.runspec import RunSpec
from roles.learner.policy import Sample
from roles.learner.torch_policy import TorchPolicy
from roles.policy.compose import Factors
from roles.sampler.engine import SampleRequest
from roles.sampler.transformers_engine import TransformersEngine
from roles.verifier.audit_copies import Copies
from roles.verifier.audit_evidence import evidence_of
from roles.verifier.audit_facts import TokenFacts
from roles.verifier.audit_stream import Evidence
from roles.verifier.torch_recompute import Recomputer

UPDATES = 6
"""Updates of the claimed policy: the newest of the versions."""
CLAIMED = UPDATES

Reward = Callable[[Sequence[int], Sequence[int]], float]
"""From the tokens of a prompt and a completion."""


@dataclass
class Scene:
    """Where honest and lying samplers work."""

    spec: RunSpec
    directory: Path
    eos_ids: tuple[int, ...]
    prompts: Sequence[Sequence[int]]
    versions: list[Factors]
    """Genesis, and the adapter after each update."""
    recompute: Recomputer
    tasks_made: int = 0
    engines: dict[tuple[Path, str], TransformersEngine] = field(default_factory=dict)

    @classmethod
    async def open(
        cls,
        spec: RunSpec,
        directory: Path,
        eos_ids: tuple[int, ...],
        prompts: Sequence[Sequence[int]],
        reward: Reward,
        groups_per_update: int = 8,
    ) -> Scene:
        """Load everything and train ``UPDATES`` real updates on the scene's own samples."""
        recompute = Recomputer.open(directory, spec.model, spec.lora, eos_ids)
        scene = cls(spec, directory, eos_ids, prompts, [], recompute)
        policy = TorchPolicy.open(directory, spec)
        scene.versions.append(policy.factors())
        for update in range(UPDATES):
            sent = await scene.sample(groups_per_update, version=update)
            policy.step([sample for one in sent for sample in _samples(one, reward)], update)
            scene.versions.append(policy.factors())
        return scene

    def engine(self, directory: Path | None = None, dtype: str = "float32") -> TransformersEngine:
        """An engine on a model's directory, kept."""
        key = (directory or self.directory, dtype)
        if key not in self.engines:
            self.engines[key] = TransformersEngine.open(
                key[0],
                self.spec.lora,
                self.eos_ids,
                device="cpu",
                dtype=dtype,
                rows_max=64,
                groups_per_batch=None,
                threads=1,
            )
        return self.engines[key]

    def task(self) -> Task:
        """The next task."""
        from node.calibrate import calibration_task

        number = self.tasks_made
        self.tasks_made += 1
        return calibration_task(self.spec, self.prompts[number % len(self.prompts)], number)

    async def sample(
        self,
        groups: int,
        *,
        version: int = CLAIMED,
        directory: Path | None = None,
        dtype: str = "float32",
        seed_shift: int = 0,
        **params: float,
    ) -> list[Sent]:
        """Sample fresh tasks, with another adapter, model, seed or other parameters than they ask for."""
        engine = self.engine(directory, dtype)
        name = f"v{version}"
        # A smaller model has no place for what belongs to the layers that it lacks.
        fitting = {key: value for key, value in self.versions[version].items() if key in engine.shapes}
        await engine.load_policy(name, fitting, newest=False)
        tasks = [self.task() for _ in range(groups)]
        requests = [
            SampleRequest(
                task.prompt_token_ids,
                task.group_size,
                task.params.model_copy(update=params),
                task.seed + seed_shift,
                name,
                task.deadline_s,
            )
            for task in tasks
        ]
        sampled = await asyncio.gather(*(engine.sample(request) for request in requests))
        return [Sent(task, one.rollouts) for task, one in zip(tasks, sampled, strict=True)]

    def facts(self, sent: Sent, version: int = CLAIMED) -> list[TokenFacts]:
        """What the verifier recomputes."""
        completions = [rollout.token_ids for rollout in sent.rollouts]
        return self.recompute.facts(
            f"v{version}",
            self.versions[version],
            sent.task.prompt_token_ids,
            completions,
            sent.task.params,
        )

    def evidence(self, sent: Sent, tolerance: ToleranceSpec, rng: np.random.Generator) -> Evidence:
        """What the audit of one group says; copies are looked for within it."""
        return evidence_of(sent.task, sent.rollouts, self.facts(sent), tolerance, Copies(), rng)

    async def close(self) -> None:
        """Stop the engines."""
        for engine in self.engines.values():
            await engine.close()


def _samples(sent: Sent, reward: Reward) -> list[Sample]:
    prompt = sent.task.prompt_token_ids
    rewards = np.array([reward(prompt.tolist(), r.token_ids.tolist()) for r in sent.rollouts])
    return [
        Sample(prompt, r.token_ids, r.sampler_logprobs, float(a), truncated=False, temperature=1.0)
        for r, a in zip(sent.rollouts, rewards - rewards.mean(), strict=True)
    ]
