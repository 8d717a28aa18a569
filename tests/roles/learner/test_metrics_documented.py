"""docs/METRICS.md names every metric of a step, and a step emits every metric that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from node.system_clock import SystemClock
from protocol.runspec import LossSpec
from roles.learner.batch import make_batch
from roles.learner.policy import StepResult
from roles.learner.register import Register
from roles.learner.step_report import step_fields
from roles.learner.stepper import Stepper
from roles.learner.torch_flops import Amount, Work, speed_metrics
from tests.ground import a_candidate
from tests.roles.learner.tiny_llama import some_samples

ROOT = Path(__file__).parents[3]

RARE = {
    "step/skipped_empty_total",
    "step/skipped_nonfinite_total",
    "step/skipped_out_of_proportion_total",
    "ratio_max_dev_on_policy",
    "version",
    "rollout/inflight",
    "sample/rollout_queue_size",
}
"""What an ordinary step outside a learner does not emit; it stands in the sources by name."""


def documented() -> set[str]:
    """Names in the tables of ``step_trained``; ``/min_length`` after a name replaces its last part."""
    page = (ROOT / "docs" / "METRICS.md").read_text("utf-8")
    section = page.split("## `step_trained`")[1].split("\n## ")[0]
    names: set[str] = set()
    for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
        stem = ""
        for name in re.findall(r"`([^`]+)`", row):
            if name.startswith("/"):
                names.add(stem + name)
            else:
                names.add(name)
                stem = name.rpartition("/")[0]
    return names


@pytest.fixture
def emitted(open_policy):
    policy = open_policy({"kl_beta": 0.1, "correction": "mask"})
    candidate = a_candidate(rewards=(1.0, 0.0))
    batch = make_batch([candidate], LossSpec(), candidate.group.clock, 0.0)
    stepper = Stepper(policy, Register("learner-1", policy.factors()), SystemClock())
    outcome = stepper.step(type(batch)(tuple(some_samples()), batch.metrics, 0.0), 1.0)
    speed = speed_metrics(Work(1, 1, 1, 1), 1e12, Amount(1, 1, 1), 1.0)
    result = StepResult(outcome.result.updated, outcome.result.metrics | speed)
    known = type(outcome)(result, outcome.due, None, None, 1.0, 0.1)
    return set(step_fields(batch, known, 1.0, 1.0))


def generic(name: str) -> str:
    return "rewards/<name>" if name.startswith("rewards/") else name


def test_every_metric_of_a_step_is_documented(emitted):
    assert {generic(name) for name in emitted} - documented() == set()


def test_every_documented_metric_is_emitted(emitted):
    stepwise = {generic(name) for name in emitted} | {"rewards/<name>"}
    assert documented() - stepwise == RARE


def test_what_an_ordinary_step_does_not_emit_stands_in_the_sources():
    words: set[object] = set()
    for source in (ROOT / "roles" / "learner").glob("*.py"):
        tree = ast.parse(source.read_text("utf-8"))
        words |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert RARE - words == set()
