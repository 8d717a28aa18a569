"""Are completions copies of others, beyond what the policy itself repeats?

Compared with honest sampling is a sampler that, with some chance, copies one of the completions of the
same prompt seen before. Its ratio is 1 - h + h n / (k p): n of k earlier completions are equal to this one,
which honest sampling gives with probability p. A policy that is sure of itself repeats itself honestly, and
p is then near 1, so that its repetitions say nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from protocol.messages import Rollout, Task
from roles.verifier.audit_facts import Numbers, TokenFacts

COPIED = (0.05, 0.5)
"""Shares of copies that honest work is compared with."""
PROMPTS_MAX = 4096
COMPLETIONS_MAX = 64
"""What is remembered: prompts, and the last completions of each."""
LOG_RATIO_MAX = 50.0

Draw = tuple[int, int]
"""Seed of a task and index of a rollout."""


class Copies:
    """Completions by prompt, of all samplers that this verifier audited."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, deque[tuple[Draw, bytes]]] = OrderedDict()

    def log_ratios(self, task: Task, rollouts: Sequence[Rollout], facts: Sequence[TokenFacts]) -> Numbers:
        """Log likelihood ratios of one group for each of ``COPIED``; its completions are remembered.

        The same rollout of a task with the same seed may honestly be the same, whoever samples it again.
        """
        prompt = task.prompt_token_ids.tobytes()
        seen = self._seen.setdefault(prompt, deque(maxlen=COMPLETIONS_MAX))
        self._seen.move_to_end(prompt)
        while len(self._seen) > PROMPTS_MAX:
            self._seen.popitem(last=False)
        total = np.zeros(len(COPIED))
        for rollout, one in zip(rollouts, facts, strict=True):
            draw, tokens = (task.seed, rollout.index), rollout.token_ids.tobytes()
            others = [earlier for drawn, earlier in seen if drawn != draw]
            if others:
                total += [_log_ratio(share, others.count(tokens) / len(others), one) for share in COPIED]
            seen.append((draw, tokens))
        return total


def _log_ratio(share: float, equal: float, facts: TokenFacts) -> float:
    if not equal:
        return math.log1p(-share)
    copied = math.log(share * equal) - float(facts.logprobs.sum())
    return min(float(np.logaddexp(math.log1p(-share), copied)), LOG_RATIO_MAX)
