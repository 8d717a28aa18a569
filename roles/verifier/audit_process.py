"""Evidence that accumulates: sequential tests that may be looked at after every group.

A test multiplies likelihood ratios q/p of what was seen, where p is honest work and q one way of not being
honest. While the work is honest such a product has a mean of at most 1 whenever one looks, so the chance
that it *ever* reaches 1/a is at most a (Ville's inequality; Wald's sequential test; Ramdas et al. 2023,
"Game-theoretic statistics and safe anytime-valid inference", arXiv 2210.01948).

Who lies from the thousandth group on must not live on the credit of honest ones, so each test is a mixture:
with weight 1/(n(n+1)) it begins at the n-th group. The weights sum to 1, hence the same bound holds, and a
late liar costs the test 2 ln n more evidence than an early one.

Whether to look closer may be decided on less: the sum of the products begun at each group, with no weights
(Shiryaev 1963, Roberts 1966), has a mean of n after n honest groups. So a level A is reached after A of
them on average, or more, and a late liar reaches it as soon as an early one.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


class SequentialTest:
    """One test against several alternatives, of equal weight."""

    def __init__(self, alternatives: int) -> None:
        self._begun = np.full(alternatives, -np.inf)
        """log of the summed products that have begun, for each alternative."""
        self._recent = np.full(alternatives, -np.inf)
        """log of the sum of products, for each alternative."""
        self._size = alternatives
        self.count = 0
        """Groups seen."""
        self.log_evidence = 0.0
        """Natural logarithm of the mixture. What has not begun stands still at its weight."""

    def add(self, log_ratios: Numbers) -> None:
        """Take in one group: its log likelihood ratio for each alternative, shape [alternatives]."""
        self.count += 1
        start = -math.log(self.count * (self.count + 1))
        self._begun = np.logaddexp(self._begun, start) + log_ratios
        begun = np.logaddexp.reduce(self._begun) - math.log(self._size)
        self.log_evidence = float(np.logaddexp(begun, -math.log(self.count + 1)))
        self._recent = np.logaddexp(self._recent, 0.0) + log_ratios

    def alarmed(self, level: float) -> bool:
        """Whether the sum of products, over the alternatives' mean, is at ``level``; it begins anew then."""
        alarmed = log_mean(self._recent) >= math.log(level)
        if alarmed:
            self._recent.fill(-np.inf)
        return alarmed

    @property
    def best(self) -> int:
        """The alternative that the evidence speaks for most."""
        return int(self._begun.argmax())


def log_mean(log_ratios: Numbers) -> float:
    """The evidence of one group alone against all alternatives: ln of the mean ratio."""
    return float(np.logaddexp.reduce(log_ratios) - math.log(len(log_ratios)))


FLAG_RATES = (0.05, 0.2, 0.5, 0.9)
"""Alternatives to the rate at which honest groups are flagged."""


def flag_ratios(rate: float, *, flagged: bool) -> Numbers:
    """Log likelihood ratios of a flag, or none, if honest groups are flagged at most at ``rate``.

    An alternative below ``rate`` is replaced by ``rate`` itself, which is no evidence.
    """
    others = np.maximum(np.array(FLAG_RATES), rate)
    ratios: Numbers = others / rate if flagged else (1 - others) / (1 - rate)
    return np.log(ratios)


RANK_BINS = 20
MEMORY = 0.9
"""What a group's ranks still count for one group later: a sampler that changes is followed."""


class Ranks:
    """Bets that a sampler's ranks are not uniform, on what they were so far.

    The rank of a token is its place in the claimed distribution, ties broken by chance: uniform on [0, 1)
    for honest work (the probability integral transform). The bet is a histogram learned on the way
    (Krichevsky & Trofimov 1981), so it needs no idea of the lie.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(RANK_BINS)

    def log_ratio(self, ranks: Numbers) -> float:
        """Log of the learned density against the uniform one, over one group's ranks, which are learned."""
        bins = np.minimum((ranks * RANK_BINS).astype(int), RANK_BINS - 1)
        before = self._counts
        after = before + np.bincount(bins, minlength=RANK_BINS)
        total = len(ranks) * math.log(RANK_BINS) - _log_steps(before.sum(), after.sum(), RANK_BINS / 2)
        total += sum(_log_steps(float(a), float(b), 0.5) for a, b in zip(before, after, strict=True))
        self._counts = after * MEMORY
        return total


def _log_steps(low: float, high: float, offset: float) -> float:
    """Log of (low + offset)(low + 1 + offset)…(high - 1 + offset)."""
    return math.lgamma(high + offset) - math.lgamma(low + offset)
