"""``grpo-node audit`` and ``calibrate``: what a person sees, on a real broker, and what they may decide."""

from __future__ import annotations

import asyncio
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from node.calibrate import MARGIN, calibration, tolerance_table, upper_bound
from node.cli.main import main
from node.nats_bus import NatsBus
from protocol.audit_spec import ToleranceSpec
from protocol.codec import decode_as, encode
from protocol.messages import Finding, Standing
from protocol.reasons import Judgement
from protocol.subjects import Bucket, standing_key
from tests.build import RUN, a_clock, a_group, a_runspec, an_identity
from tests.node.sites import Site

LIAR = an_identity("sampler-1")
KEY = standing_key(LIAR.public_key)


def a_standing() -> Standing:
    group = np.frombuffer(encode(a_group(), LIAR), np.uint8)
    numbers = {"median": 0.31, "surprise": 4.5, "evidence/logprobs": 9.9}
    finding = Finding(
        group_id="learner-1.7",
        engine="transformers",
        clock=a_clock(**{"learner-1": 3}),
        flags=("median",),
        numbers=numbers,
        group=group,
    )
    return Standing(
        run=RUN,
        node="sampler-1",
        public_key=LIAR.public_key,
        judgement=Judgement.QUARANTINED,
        judge="verifier-1",
        at=1_800_000_000.0,
        reason="it copies completions",
        audited=12,
        findings=(finding,),
    )


@pytest.fixture
async def bus(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NatsBus:
    """A run with one sampler in quarantine, and an operator's environment."""
    monkeypatch.setenv("GRPO_BROKER", site.broker.url)
    monkeypatch.setenv("GRPO_TOKEN", site.broker.token)
    monkeypatch.setenv("GRPO_HOME", str(tmp_path / "home"))
    from node.runs import create_run

    bus = await NatsBus.connect(site.broker.access, RUN, node="watcher")
    spec = a_runspec(store={"url": (tmp_path / "store").as_uri()})
    await create_run(bus, spec, an_identity("watcher"), tmp_path / "cache")
    await bus.put(Bucket.RUN, KEY, encode(a_standing(), an_identity("verifier-1")))
    return bus


async def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str, str]:
    """Exit code, standard output and standard error of one command."""
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(main, ["audit", *arguments, "--run", RUN])
    return ended.value.code, *capsys.readouterr()


async def test_the_evidence_is_shown(bus: NatsBus, capsys: pytest.CaptureFixture[str]):
    code, out, _ = await said(capsys, "show", "sampler-1")
    assert code == 0
    assert "sampler-1 is quarantined by verifier-1 since 2027-01-15 08:00:00 UTC" in out
    assert "group learner-1.7 at learner-1:3, engine transformers" in out
    assert "beyond tolerance: median" in out
    assert "numbers: median 0.31, surprise 4.5" in out
    assert f"2 rollouts of train row 0, signed by {LIAR.public_key}" in out
    assert "0: 3 tokens, stop, mean log-probability -0.292: 4 5 2" in out
    assert out.endswith("keeps it from taking tasks, too:\n  grpo-node revoke sampler-1\n")
    code, out, _ = await said(capsys, "show", LIAR.public_key, "--json")
    shown = json.loads(out)
    assert (code, shown["findings"][0]["clock"], shown["audited"]) == (0, "learner-1:3", 12)
    await bus.close()


async def test_a_quarantine_is_lifted_once_and_keeps_its_evidence(
    bus: NatsBus, capsys: pytest.CaptureFixture[str]
):
    _, out, _ = await said(capsys, "list")
    assert out.startswith("sampler-1            quarantined  by verifier-1:")
    assert out.endswith("\n  grpo-node revoke sampler-1\n")
    code, out, _ = await said(capsys, "lift", "sampler-1")
    assert (code, out) == (0, "sampler-1 may work again; start it anew if it has stopped\n")
    entry = await bus.get(Bucket.RUN, KEY)
    assert entry is not None
    standing = decode_as(entry.value, Standing)
    assert (standing.judgement, standing.judge, len(standing.findings)) == (Judgement.LIFTED, "operator", 1)
    assert "revoke" not in (await said(capsys, "list"))[1]
    code, _, err = await said(capsys, "lift", "sampler-1")
    assert (code, err) == (2, "grpo-node: sampler-1 is not quarantined: operator has lifted that\n")
    await bus.close()


async def test_a_node_that_nobody_judged_is_said_so(bus: NatsBus, capsys: pytest.CaptureFixture[str]):
    code, _, err = await said(capsys, "show", "sampler-9")
    assert (code, err) == (2, "grpo-node: no verifier judged sampler-9; judged: sampler-1\n")
    await bus.close()


# --- calibrate ----------------------------------------------------------------------------------


def numbers(size: float) -> dict[str, float]:
    return {"median": size, "p90": 2 * size, "largest": 9 * size, "bias": size / 2, "seed": size}


def test_half_of_the_groups_set_the_limits_and_the_others_check_them():
    rng = np.random.default_rng(0)
    found = [numbers(0.01 + 0.001 * float(rng.random())) for _ in range(200)]
    found[1] = numbers(0.05)  # a group that checks
    result = calibration("engine", found)
    assert (result.exceeded, result.checked) == (1, 100)
    assert result.tolerance.median == pytest.approx(MARGIN * 0.011, rel=0.1)
    assert 0.04 < result.tolerance.flag_rate < 0.05


@pytest.mark.parametrize(("hits", "trials", "bound"), [(0, 100, 0.0295), (1, 100, 0.0466), (5, 50, 0.199)])
def test_the_bound_on_a_rate_is_that_of_clopper_and_pearson(hits: int, trials: int, bound: float):
    assert upper_bound(hits, trials) == pytest.approx(bound, abs=1e-3)


def test_the_table_is_what_a_run_file_takes():
    result = calibration("transformers-5-cpu", [numbers(0.01)] * 40)
    table = tomllib.loads(tolerance_table(result))["audit"]["tolerances"]["transformers-5-cpu"]
    assert ToleranceSpec.model_validate(table) == result.tolerance
    spec = a_runspec(audit={"rate": 0.1, "tolerances": {"transformers-5-cpu": table}})
    assert spec.audit.tolerances["transformers-5-cpu"].flag_rate == pytest.approx(0.14)
