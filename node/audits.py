"""What a person sees and decides of samplers that verifiers judged: their standings, and lifting them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import numpy as np

from node.run_bus import RunBus, find_run, no_run
from node.system_clock import SystemClock
from protocol.codec import decode
from protocol.errors import DecodeError, OperatorError, one_line
from protocol.identity import Identity
from protocol.messages import Finding, RolloutGroup, Standing, Task
from protocol.reasons import Judgement
from protocol.runspec import RunSpec
from roles.ring import Ring
from roles.standings import Standings

SHOWN_TOKENS = 12
"""Tokens of a completion that a person is shown."""


async def read_standings(bus: RunBus, run: str, identity: Identity) -> Standings:
    """Every judgement of a run. Raises OperatorError if there is no such run."""
    state = await find_run(bus)
    if state is None:
        raise no_run(run)
    spec = RunSpec.model_validate_json(state.spec_json)
    standings = Standings(Ring(bus, identity, spec, "operator", SystemClock()))
    await standings.read()
    return standings


def standing_of(standings: Standings, node: str) -> Standing:
    """The standing of a node, by its name or its public key. Raises OperatorError unless there is one."""
    found = [one for one in standings.all if node in (one.node, one.public_key)]
    if not found:
        judged = ", ".join(dict.fromkeys(one.node for one in standings.all)) or "nobody"
        raise OperatorError(f"no verifier judged {node}; judged: {judged}")
    if len(found) > 1:
        keys = ", ".join(one.public_key for one in found)
        raise OperatorError(f"{len(found)} keys called themselves {node}; name one of them: {keys}")
    return found[0]


async def lift(standings: Standings, node: str, operator: str) -> Standing:
    """Let a judged sampler work again; its evidence stays. Raises OperatorError."""
    standing = standing_of(standings, node)
    if standing.judgement is Judgement.LIFTED:
        raise OperatorError(f"{standing.node} is not quarantined: {standing.judge} has lifted that")
    lifted = standing.model_copy(
        update={"judgement": Judgement.LIFTED, "judge": operator, "at": SystemClock().wall()}
    )
    if not await standings.judge(lifted):
        raise OperatorError(f"a verifier judged {standing.node} anew meanwhile; look again")
    return lifted


def standing_lines(standing: Standing) -> list[str]:
    """A standing with its evidence, for a person."""
    at = dt.datetime.fromtimestamp(standing.at, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lines = [
        f"{standing.node} is {standing.judgement.value} by {standing.judge} since {at}",
        f"  key      {standing.public_key}",
        f"  because  {one_line(standing.reason, 500)}",
        f"  audited  {standing.audited} groups; the last {len(standing.findings)} that spoke against it:",
    ]
    for finding in standing.findings:
        lines += _finding_lines(finding)
    return lines + revoke_lines([standing])


def revoke_lines(standings: Sequence[Standing]) -> list[str]:
    """How the broker's owner keeps quarantined samplers from taking tasks; nothing if none is."""
    nodes = dict.fromkeys(one.node for one in standings if one.judgement is Judgement.QUARANTINED)
    if not nodes:
        return []
    commands = (f"  grpo-node revoke {node}" for node in nodes)
    return ["nothing it sends is used; if it was invited, this keeps it from taking tasks, too:", *commands]


def _finding_lines(finding: Finding) -> list[str]:
    def told(names: list[str]) -> str:
        return ", ".join(f"{name.removeprefix('evidence/')} {finding.numbers[name]:.4g}" for name in names)

    tests = [name for name in finding.numbers if name.startswith("evidence/")]
    others = [name for name in finding.numbers if name not in tests]
    flags = ", ".join(finding.flags) or "none"
    lines = [
        f"  group {finding.group_id} at {finding.clock.text}, engine {one_line(finding.engine, 60)}",
        f"    beyond tolerance: {flags}",
        f"    numbers: {told(others)}",
        f"    evidence in nats: {told(tests)}",
    ]
    return lines + _rollout_lines(finding)


def _rollout_lines(finding: Finding) -> list[str]:
    if not len(finding.group):
        return ["    the group itself was too large to keep"]
    try:
        signed = decode(finding.group.tobytes())
        group = signed.expect(RolloutGroup)
        task = decode(group.task.tobytes()).expect(Task)
    except DecodeError as exc:
        return [f"    the group cannot be read: {exc}"]
    lines = [f"    {len(group.rollouts)} rollouts of {task.split} row {task.row}, signed by {signed.signer}"]
    for rollout in group.rollouts:
        ids = " ".join(str(token) for token in rollout.token_ids[:SHOWN_TOKENS])
        mean = float(np.mean(rollout.sampler_logprobs))
        lines.append(
            f"      {rollout.index}: {len(rollout.token_ids)} tokens, {rollout.finish.value}, "
            f"mean log-probability {mean:.3f}: {ids}"
        )
    return lines
