"""Structure checks: is this group what its task asked for? Pure, and done before any reward is computed.

Each check returns the first fault it finds as ``(reason, detail)``, or None. A fault is a peer's, never ours:
the group leaves the ring with the reason, and nobody trains on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from protocol.messages import FinishReason, Rollout, RolloutGroup, Task, Told
from protocol.reasons import StructureFault
from roles.tasks.taskset import Row, TaskSet
from roles.turns.dialogue import Dialogue
from roles.verifier.turn_checks import Fault, ends_of_turns, mask_fault, turns_fault

LOGPROB_ROUNDING = 1e-5
"""How far above 0 a log-probability may lie: a logit minus its logsumexp in fp32 is off by a few ulps,
2e-6 each at a magnitude of 32. Anything larger is no log-probability."""

DEADLINE_SLACK = 0.9
"""A partial group is excused from this share of its deadline on: sampler and engine start their watches at
different moments. Without the check a sampler could drop the rollouts it does not like."""

PARTIAL_MIN = 2
"""Rollouts that a partial training group needs: one alone has no baseline."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a verifier knows of the run, independent of any group."""

    eos_ids: frozenset[int]
    """Every EOS id of the generation config, not only the tokenizer's."""
    vocab_size: int
    tasks: TaskSet
    prompt_of: Callable[[Row], Sequence[int]] | None = None
    """Token ids of a row's prompt as this node derives them; None leaves the prompt unchecked."""
    dialogue: Dialogue | None = None
    """How turns and what stands between them become tokens, in a run with tools or a user."""
    told_of: Callable[[Row], Told | None] | None = None
    """What a task tells the run's user of a row; None leaves it unchecked."""


def structure_fault(group: RolloutGroup, task: Task, *, rules: Rules) -> Fault | None:
    """The first thing wrong with the shape of ``group``, or None if it is sound."""
    if fault := _task_fault(group, task, rules) or _size_fault(group, task):
        return fault
    for rollout in group.rollouts:
        if fault := _rollout_fault(rollout, task, rules):
            return fault[0], f"rollout {rollout.index}: {fault[1]}"
    return None


def signer_fault(
    group: RolloutGroup, *, task_signer: str, group_signer: str, trust: Callable[[str], str | None]
) -> Fault | None:
    """Whether task and group were signed by the nodes they name; ``trust`` gives a node's known public key.

    A name whose key is not known passes: the frame's signature is valid, and presence may not have been seen
    yet. The issuer of a task is the first part of its group id.
    """
    known = trust(group.sampler)
    if known is not None and known != group_signer:
        return StructureFault.SAMPLER_MISMATCH, f"signed by {group_signer}, but {group.sampler} is {known}"
    issuer = group.group_id.partition(".")[0]
    known = trust(issuer)
    if known is not None and known != task_signer:
        return StructureFault.ISSUER_UNKNOWN, f"the task is signed by {task_signer}, but {issuer} is {known}"
    return None


def _task_fault(group: RolloutGroup, task: Task, rules: Rules) -> Fault | None:
    if (group.run, group.group_id) != (task.run, task.group_id):
        carried = f"{task.run}/{task.group_id}"
        return StructureFault.TASK_UNKNOWN, f"{group.run}/{group.group_id} carries the task of {carried}"
    row = rules.tasks.row(task.split, task.row)
    if row is None:
        return StructureFault.TASK_UNKNOWN, f"there is no row {task.row} in {task.split}"
    if rules.prompt_of and not np.array_equal(np.asarray(rules.prompt_of(row)), task.prompt_token_ids):
        return StructureFault.PROMPT_MISMATCH, f"not the prompt of row {task.row} in {task.split}"
    if rules.told_of and rules.told_of(row) != task.told:
        return StructureFault.PROMPT_MISMATCH, f"not what a user may know of row {task.row} in {task.split}"
    if task.pinned and group.clock != task.clock:
        return StructureFault.CLOCK_UNKNOWN, f"sampled under {group.clock}, pinned to {task.clock}"
    return None


def _size_fault(group: RolloutGroup, task: Task) -> Fault | None:
    indexes = [rollout.index for rollout in group.rollouts]
    if repeated := {index for index in indexes if indexes.count(index) > 1}:
        return StructureFault.INDEX_REPEATED, f"indexes {sorted(repeated)} come more than once"
    if len(indexes) > task.group_size:
        return StructureFault.GROUP_TOO_LARGE, f"{len(indexes)} rollouts for {task.group_size}"
    if max(indexes) >= task.group_size:
        return StructureFault.INDEX_OUT_OF_RANGE, f"index {max(indexes)} of {task.group_size}"
    if len(indexes) == task.group_size:
        return None
    if len(indexes) < PARTIAL_MIN and task.split == "train":
        return StructureFault.GROUP_TOO_SMALL, f"{len(indexes)} of {task.group_size} rollouts"
    if group.generation_s < DEADLINE_SLACK * task.deadline_s:
        spent = f"{group.generation_s:g} of {task.deadline_s:g} s"
        return StructureFault.GROUP_TOO_SMALL, f"{len(indexes)} of {task.group_size} rollouts after {spent}"
    return None


def _rollout_fault(rollout: Rollout, task: Task, rules: Rules) -> Fault | None:
    ids, logprobs = rollout.token_ids, rollout.sampler_logprobs
    if len(ids) == 0:
        return StructureFault.EMPTY_COMPLETION, "no tokens"
    if len(ids) > task.params.max_new_tokens:
        return StructureFault.COMPLETION_TOO_LONG, f"{len(ids)} tokens of {task.params.max_new_tokens}"
    if len(ids) != len(logprobs):
        return StructureFault.LENGTHS_DIFFER, f"{len(ids)} tokens, {len(logprobs)} log-probabilities"
    if fault := mask_fault(rollout, rules.dialogue):
        return fault
    if int(ids.min()) < 0 or int(ids.max()) >= rules.vocab_size:
        span = f"ids from {ids.min()} to {ids.max()}"
        return StructureFault.TOKEN_OUT_OF_VOCABULARY, f"{span}; the vocabulary has {rules.vocab_size}"
    if not np.isfinite(logprobs).all():
        return StructureFault.LOGPROB_NOT_FINITE, f"at position {int(np.argmin(np.isfinite(logprobs)))}"
    if float(logprobs.max()) > LOGPROB_ROUNDING:
        return StructureFault.LOGPROB_POSITIVE, f"{float(logprobs.max()):g} at {int(logprobs.argmax())}"
    if fault := _ending_fault(rollout, task, rules):
        return fault
    return turns_fault(rollout, rules.dialogue, rules.eos_ids) if rules.dialogue else None


def _ending_fault(rollout: Rollout, task: Task, rules: Rules) -> Fault | None:
    is_eos = np.isin(rollout.token_ids, list(rules.eos_ids)) & rollout.sampled
    inside = is_eos[:-1].copy()
    inside[ends_of_turns(rollout)] = False
    if inside.any():
        return StructureFault.EOS_INSIDE, f"EOS at position {int(inside.argmax())} of {len(is_eos)}"
    if rollout.finish is FinishReason.STOP and not is_eos[-1]:
        return StructureFault.STOP_WITHOUT_EOS, f"stopped at token {int(rollout.token_ids[-1])}"
    if rollout.finish is FinishReason.LENGTH and is_eos[-1]:
        return StructureFault.LENGTH_WITHOUT_LIMIT, "called truncated, but its last token is EOS"
    if rollout.finish is FinishReason.LENGTH and len(is_eos) != task.params.max_new_tokens:
        limit = task.params.max_new_tokens
        return StructureFault.LENGTH_WITHOUT_LIMIT, f"called truncated at {len(is_eos)} of {limit} tokens"
    return None
