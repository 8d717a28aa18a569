"""What an audit knows of a completion: numbers that the claimed policy gives for each of its tokens.

Legend: T tokens of one completion, A alternatives, E alternatives of how completions end. p is the
distribution to sample from under the claimed policy and the task's parameters; logarithms are natural.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

TEMPERATURES = (0.5, 0.75, 0.9, 1.1, 1.33, 2.0)
"""Other temperatures, as multiples of the task's."""
TOP_K = (1, 5, 20, 50, 100)
TOP_P = (0.5, 0.9, 0.95, 0.99)
EDITED = (0.02, 0.3)
"""Share of tokens that were put in place of sampled ones, without looking."""
FORCED_EOS = (0.01, 0.1)
"""Chance at each token that EOS is put there."""
SLIP = 0.01
"""How often who truncates, or forbids EOS, is taken to sample honestly: keeps one token from deciding."""

SAMPLING: tuple[str, ...] = (
    *(f"temperature x{factor:g}" for factor in TEMPERATURES),
    *(f"top-k {k}" for k in TOP_K),
    *(f"top-p {mass:g}" for mass in TOP_P),
    *(f"{share:.0%} of the tokens edited" for share in EDITED),
)
"""Alternatives to honest sampling, in the order of ``TokenFacts.sampling``."""

ENDINGS: tuple[str, ...] = (*(f"EOS forced at {share:.0%} of the tokens" for share in FORCED_EOS), "no EOS")
"""Alternatives to honest endings, in the order of ``TokenFacts.endings``."""


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """One completion under the claimed policy."""

    logprobs: Numbers
    """log p of each token, shape [T]."""
    entropy: Numbers
    """Of p at each position, shape [T]."""
    varentropy: Numbers
    """Variance of -log p under p, shape [T]."""
    above: Numbers
    """Mass of the tokens more probable than this one, shape [T]."""
    level: Numbers
    """Mass of the tokens exactly as probable, this one included, shape [T]."""
    below: Numbers
    """Mass of the tokens with smaller ids, shape [T]: where this one's part of [0, 1) begins."""
    sampling: Numbers
    """log q(token) / p(token) for each alternative q of ``SAMPLING``, shape [A, T]."""
    endings: Numbers
    """The same for ``ENDINGS``, shape [E, T]."""

    def __len__(self) -> int:
        """T."""
        return len(self.logprobs)

    def of(self, chosen: NDArray[np.bool_] | slice) -> TokenFacts:
        """The facts of some of its tokens."""
        return TokenFacts(*(getattr(self, name)[..., chosen] for name in TokenFacts.__slots__))


def standardized_surprise(facts: list[TokenFacts]) -> float:
    """Mean of (-log p - H) over all tokens, in its standard errors: near N(0, 1) for tokens sampled from p.

    Under p the terms are martingale differences with variances ``varentropy``, so the sum over tokens of
    any number of completions divided by the root of the summed variances is asymptotically normal. 0 if
    nothing was left to chance.
    """
    excess = sum(float(-(one.logprobs + one.entropy).sum()) for one in facts)
    variance = sum(float(one.varentropy.sum()) for one in facts)
    return excess / variance**0.5 if variance > 0 else 0.0
