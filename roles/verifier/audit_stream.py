"""What a verifier remembers of one sampler: which groups to audit, and the evidence so far. Pure.

    group ─▶ wanted? ─▶ (recompute) ─▶ Evidence ─▶ tests ─▶ guilty of …, or nothing

Five tests share the bound on false findings evenly. Behind a fault or an alarm, and while a test is
suspicious, every group is audited: which groups are looked at depends on the past only, so the bound holds
all the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from protocol.audit_spec import AuditSpec
from protocol.messages import Finding
from roles.verifier.audit_copies import COPIED
from roles.verifier.audit_facts import ENDINGS, SAMPLING, Numbers
from roles.verifier.audit_process import FLAG_RATES, Ranks, SequentialTest, flag_ratios, log_mean

SUSPICION = math.log(4)
"""Evidence from which on every group is audited; an honest sampler ever gets there once in four times."""

ALARM = 100
"""Recent evidence of a test, at which it asks for a closer look; honest work makes each of the tests ask once
in so many audited groups, or less often."""

ALERT = 10
"""Groups audited one after the other behind a group with a fault, or an alarm."""

GROUP_LEVEL = 1e-4
"""Bound on the share of honest audited groups that are refused for their tokens, by each of the tests."""

FINDINGS_KEPT = 8

LOGPROBS, SAMPLED, RANKS, ENDED, COPIES = "logprobs", "sampling", "ranks", "endings", "copies"
TESTS = (LOGPROBS, SAMPLED, RANKS, ENDED, COPIES)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the audit of one group found."""

    flags: tuple[str, ...]
    """Statistics of its log-probabilities beyond their tolerance."""
    flag_rate: float
    """Bound on the share of honest groups with a flag."""
    sampling: Numbers
    """Log likelihood ratios summed over its tokens, one for each alternative of ``SAMPLING``."""
    endings: Numbers
    """The same for ``ENDINGS``."""
    copies: Numbers
    """The same for ``COPIED``."""
    ranks: Numbers
    """Place of each token in the claimed distribution, ties broken by chance: shape [tokens]."""
    numbers: dict[str, float]
    """For people."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which groups to audit: the first ones, then one of each block, at a place that ``secret`` tells."""

    secret: bytes
    spec: AuditSpec

    def wants(self, public_key: str, number: int) -> bool:
        """Whether to audit group ``number`` (from 0) of a sampler."""
        if number < self.spec.first:
            return True
        if self.spec.rate <= 0:
            return False
        size = max(1, math.floor(1 / self.spec.rate + 1e-9))
        block, place = divmod(number - self.spec.first, size)
        drawn = hmac.digest(self.secret, f"{public_key} {block}".encode(), hashlib.sha256)
        return place == int.from_bytes(drawn[:8]) % size


class Stream:
    """One sampler's groups as one verifier sees them."""

    def __init__(self, public_key: str, chosen: Chosen) -> None:
        self._public_key = public_key
        self._chosen = chosen
        self._level = math.log(len(TESTS) / chosen.spec.false_quarantines)
        self.seen = 0
        self.audited = 0
        self._alert = 0
        self.in_turn = asyncio.Lock()
        """Held while a group of this sampler is looked at."""
        self.begin()

    def begin(self) -> None:
        """Forget all evidence: the sampler was told, or a person lifted its quarantine."""
        self.seen = 0
        self.findings: deque[Finding] = deque(maxlen=FINDINGS_KEPT)
        self._ranks = Ranks()
        self._tests = {
            LOGPROBS: SequentialTest(len(FLAG_RATES)),
            SAMPLED: SequentialTest(len(SAMPLING)),
            RANKS: SequentialTest(1),
            ENDED: SequentialTest(len(ENDINGS)),
            COPIES: SequentialTest(len(COPIED)),
        }

    def wants(self) -> bool:
        """Whether to audit the group that arrives now; counts it."""
        number, self.seen = self.seen, self.seen + 1
        alert, self._alert = self._alert, max(0, self._alert - 1)
        return alert > 0 or self.suspicious or self._chosen.wants(self._public_key, number)

    @property
    def suspicious(self) -> bool:
        """Whether there is any reason to look at every group."""
        return any(test.log_evidence >= SUSPICION for test in self._tests.values())

    def add(self, evidence: Evidence) -> tuple[str, ...]:
        """Take in an audited group; returns what is wrong with this group alone, in words."""
        self.audited += 1
        ranks = np.array([self._ranks.log_ratio(evidence.ranks)])
        parts = {
            LOGPROBS: flag_ratios(evidence.flag_rate, flagged=bool(evidence.flags)),
            SAMPLED: evidence.sampling,
            RANKS: ranks,
            ENDED: evidence.endings,
            COPIES: evidence.copies,
        }
        for name, ratios in parts.items():
            self._tests[name].add(ratios)
        faults = tuple(faults_of(evidence))
        alarms = [test.alarmed(ALARM) for test in self._tests.values()]
        if faults or any(alarms):
            self._alert = ALERT
        return faults

    @property
    def guilty_of(self) -> str | None:
        """The test whose evidence is beyond doubt, in words for a person, or None."""
        for name, test in self._tests.items():
            if test.log_evidence >= self._level:
                return _WORDS[name].format(like=_alternative(name, test.best))
        return None

    @property
    def evidence(self) -> dict[str, float]:
        """Natural logarithm of the evidence of each test, and where it is beyond doubt."""
        return {f"evidence/{name}": test.log_evidence for name, test in self._tests.items()} | {
            "evidence/enough": self._level
        }


def faults_of(evidence: Evidence) -> list[str]:
    """What is wrong with one group, whoever sent it."""
    faults = []
    if evidence.flags:
        told = ", ".join(f"{name} {evidence.numbers[name]:.3g}" for name in evidence.flags)
        faults.append(f"log-probabilities differ from recomputed ones: {told}")
    level = math.log(1 / GROUP_LEVEL)
    for name, ratios in ((SAMPLED, evidence.sampling), (ENDED, evidence.endings), (COPIES, evidence.copies)):
        if log_mean(ratios) >= level:
            faults.append(_WORDS[name].format(like=_alternative(name, int(ratios.argmax()))))
    return faults


_WORDS = {
    LOGPROBS: "its log-probabilities are not those of the policy it claims",
    SAMPLED: "its tokens were not sampled from the policy it claims; most like: {like}",
    RANKS: "its tokens were not sampled from the policy it claims: their ranks are not uniform",
    ENDED: "its completions do not end as the policy ends them; most like: {like}",
    COPIES: "it copies completions; most like: {like} of them",
}


def _alternative(test: str, index: int) -> str:
    names = {SAMPLED: SAMPLING, ENDED: ENDINGS, COPIES: tuple(f"{share:.0%}" for share in COPIED)}
    return names[test][index] if test in names else ""
