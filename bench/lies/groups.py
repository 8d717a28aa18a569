"""What a sampler sends, and what a liar does to it afterwards. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from protocol.messages import FinishReason, Rollout, Task
from roles.verifier.audit_facts import TokenFacts


@dataclass(frozen=True, slots=True)
class Sent:
    """A task and the rollouts that came back for it."""

    task: Task
    rollouts: tuple[Rollout, ...]

    def each(self, change: Callable[[Rollout], Rollout]) -> Sent:
        """The same with every rollout changed."""
        return replace(self, rollouts=tuple(change(rollout) for rollout in self.rollouts))


def with_logprobs_of(sent: Sent, facts: Sequence[TokenFacts]) -> Sent:
    """Log-probabilities forged so that they fit: those of the policy that is claimed."""
    forged = [np.minimum(one.logprobs, 0).astype(np.float32) for one in facts]
    rollouts = zip(sent.rollouts, forged, strict=True)
    return replace(sent, rollouts=tuple(changed(rollout, logprobs=values) for rollout, values in rollouts))


def edited(sent: Sent, rng: np.random.Generator, vocabulary: int, keep: frozenset[int]) -> Sent:
    """One token of each completion replaced by a random one; EOS (``keep``) stays where it is."""

    def change(rollout: Rollout) -> Rollout:
        ids = rollout.token_ids.copy()
        place = int(rng.integers(len(ids)))
        if int(ids[place]) not in keep:
            others = [token for token in rng.integers(0, vocabulary, 8).tolist() if token not in keep]
            ids[place] = others[0]
        return changed(rollout, ids=ids)

    return sent.each(change)


def forged(sent: Sent, rng: np.random.Generator) -> Sent:
    """Log-probabilities made up: as if every token had been drawn from a distribution of some entropy."""

    def change(rollout: Rollout) -> Rollout:
        made_up = -rng.exponential(0.5, len(rollout.token_ids)).astype(np.float32)
        return changed(rollout, logprobs=made_up)

    return sent.each(change)


def copied(sent: Sent) -> Sent:
    """The first rollout, as often as the task asks for rollouts."""
    first = sent.rollouts[0]
    return replace(sent, rollouts=tuple(first.model_copy(update={"index": r.index}) for r in sent.rollouts))


def stopped_early(sent: Sent, eos: int) -> Sent:
    """Cut in the middle, with EOS put at the end and the log-probability of a likely token."""

    def change(rollout: Rollout) -> Rollout:
        half = max(1, len(rollout.token_ids) // 2)
        ids = np.append(rollout.token_ids[:half], np.int32(eos))
        logprobs = np.append(rollout.sampler_logprobs[:half], np.float32(-0.1))
        return changed(rollout, ids=ids, logprobs=logprobs, finish=FinishReason.STOP)

    return sent.each(change)


def truncated(sent: Sent) -> Sent:
    """Cut in the middle, and called as long as it may be."""

    def change(rollout: Rollout) -> Rollout:
        half = max(1, len(rollout.token_ids) // 2)
        return changed(
            rollout,
            ids=rollout.token_ids[:half],
            logprobs=rollout.sampler_logprobs[:half],
            finish=FinishReason.LENGTH,
        )

    return sent.each(change)


def changed(
    rollout: Rollout,
    ids: np.ndarray | None = None,
    logprobs: np.ndarray | None = None,
    finish: FinishReason | None = None,
) -> Rollout:
    """The same rollout with other contents."""
    return Rollout(
        index=rollout.index,
        token_ids=rollout.token_ids if ids is None else ids,
        sampler_logprobs=rollout.sampler_logprobs if logprobs is None else logprobs,
        finish=finish or rollout.finish,
    )
