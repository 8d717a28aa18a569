r"""The ``exact`` reward: 1.0 when the completion is the answer, as a whole text, and 0.0 otherwise.

Normalisation, of both sides: Unicode NFC (one spelling of ``é``), line ends to ``\n``, white space stripped
at both ends. Nothing else: case, inner spaces and punctuation count. A row with an empty answer is
unscorable, because a completion of white space would earn the reward.
"""

from __future__ import annotations

import unicodedata

from protocol.reasons import Unscorable
from roles.verifier.rewards.reward import Item, Score


def normalised(text: str) -> str:
    """``text`` as it is compared."""
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n")).strip()


class ExactReward:
    """Whole-text equality; costs microseconds and runs in the node's own process."""

    async def score(self, item: Item) -> Score:
        """1.0 or 0.0; NO_ANSWER when the row has none."""
        answer = normalised(item.answer or "")
        if not answer:
            return Score.none(Unscorable.NO_ANSWER)
        return Score(float(normalised(item.completion) == answer))
