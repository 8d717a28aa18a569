"""The attack suite on the tiny model: real engine, real updates, real recomputation."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from bench.audit import honest_tolerance
from bench.lies.attacks import attacks
from bench.lies.groups import Sent
from bench.lies.scenes import tiny_scene
from node.settings import read_environment
from protocol.audit_spec import AuditSpec
from protocol.reasons import StructureFault
from roles.tasks.taskset import Row, TaskSet
from roles.verifier.audit_stream import Chosen, Evidence, Stream, faults_of
from roles.verifier.checks import Rules, structure_fault
from tests.build import a_group

GROUPS = 16
HONEST = 60
ALL = AuditSpec(rate=1.0)

TOLD = (
    "base instead of the adapter",
    "adapter five updates old",
    "adapter one update old",
    "temperature 0.8",
    "temperature 1.25",
    "greedy",
    "top-k 3",
    "8-bit weights",
    "a smaller model",
    "tokens edited",
    "log-probabilities forged",
    "EOS forced early",
)
"""Attacks of which every group is refused as soon as it is audited."""

HIDDEN = (
    "base instead of the adapter, hidden",
    "adapter five updates old, hidden",
    "temperature 0.8, hidden",
    "temperature 1.25, hidden",
    "greedy, hidden",
    "a smaller model, hidden",
    "tokens edited, hidden",
    "EOS forced early, hidden",
    "copied rollouts",
    "another seed",
)
"""Attacks that forge fitting log-probabilities: found by the stream, and most of their groups are refused."""

BY_TOKENS = (
    "greedy, hidden",
    "tokens edited, hidden",
    "EOS forced early, hidden",
    "copied rollouts",
)
"""Hidden attacks that are found without the task's seed within these few groups of forty tokens."""


@dataclass
class Suite:
    """What every attack sent, as evidence with and without the seed."""

    seeded: dict[str, list[Evidence]]
    seedless: dict[str, list[Evidence]]
    truncated: Sent


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    async def make() -> Suite:
        place: Path = tmp_path_factory.mktemp("liars")
        scene, variants = await tiny_scene(read_environment().places.models, place)
        rng = np.random.default_rng(0)
        table = attacks(variants)
        tolerance = honest_tolerance(scene, await table["honest"](scene, HONEST), rng)
        seedless = tolerance.model_copy(update={"seed": None})
        sent = {name: await attack(scene, GROUPS) for name, attack in table.items()}
        truncated = sent.pop("completions truncated")[0]
        found = {name: [scene.evidence(one, tolerance, rng) for one in some] for name, some in sent.items()}
        without = {name: [scene.evidence(one, seedless, rng) for one in sent[name]] for name in BY_TOKENS}
        await scene.close()
        return Suite(found, without, truncated)

    return asyncio.run(make())


def found_after(evidence: list[Evidence], times: int = 3) -> int | None:
    """Audited groups until a sampler is found that sends these groups, over and over."""
    stream = Stream("key", Chosen(b"secret", ALL))
    for number, one in enumerate(evidence * times, 1):
        stream.add(one)
        if stream.guilty_of:
            return number
    return None


def test_honest_groups_pass_and_their_sampler_is_not_found(suite: Suite):
    assert [faults_of(one) for one in suite.seeded["honest"]] == [[]] * GROUPS
    assert found_after(suite.seeded["honest"], times=1) is None


@pytest.mark.parametrize("attack", TOLD)
def test_every_audited_group_is_refused_and_its_sampler_found(suite: Suite, attack: str):
    evidence = suite.seeded[attack]
    assert all(faults_of(one) for one in evidence)
    found = found_after(evidence)
    assert found is not None
    assert found <= 6


@pytest.mark.parametrize("attack", HIDDEN)
def test_forged_log_probabilities_hide_nothing(suite: Suite, attack: str):
    evidence = suite.seeded[attack]
    assert sum(bool(faults_of(one)) for one in evidence) > GROUPS / 2
    found = found_after(evidence)
    assert found is not None
    assert found <= 12


@pytest.mark.parametrize("attack", BY_TOKENS)
def test_some_are_found_by_their_tokens_alone(suite: Suite, attack: str):
    found = found_after(suite.seedless[attack])
    assert found is not None
    assert found <= GROUPS


def test_a_hidden_attack_shows_in_the_tokens_and_not_in_the_log_probabilities(suite: Suite):
    evidence = suite.seedless["EOS forced early, hidden"]
    assert {one.flags for one in evidence} == {()}
    assert any("do not end as the policy ends them" in fault for one in evidence for fault in faults_of(one))


def test_a_truncated_completion_is_a_fault_of_structure(suite: Suite):
    sent = suite.truncated
    group = a_group(sent.task, rollouts=sent.rollouts)
    rows = [Row("", "", "")]
    fault = structure_fault(group, sent.task, rules=Rules(frozenset({2}), 42, TaskSet(rows, rows, [], "d")))
    assert fault is not None
    assert fault[0] is StructureFault.LENGTH_WITHOUT_LIMIT
