r"""The ``math`` reward: 1.0 when the final boxed answer means the same as the gold answer, else 0.0.

Parsing and algebra are math-verify's (latex2sympy and SymPy); around them stand guards of our own, since the
library by itself gives wrong verdicts on tiny numbers, thin spaces, lost structure and prose. The rules:

1. **Where the answer is.** In the ``\boxed{…}`` that closes last, braces balanced; an outer box contains its
   inner ones. No box, an unclosed one or an empty one scores 0: text outside a box is never searched.
2. **The gold** is the row's answer: plain, between ``$``, in a box, or after ``####``. A gold that is empty
   or cannot be read as mathematics makes the row unscorable, whatever the completion says.
3. **Structure** is compared by us, before any algebra (``math_structure.py``). Sets and bare lists are
   unordered and equal each other; a list of one is its member. Points and intervals are ordered, keep their
   brackets, and equal neither sets nor bare lists: ``(1,2)`` is not ``\{1,2\}`` and not ``[1,2]``.
4. **Numbers.** Exact against exact: equal to a relative 1e-12, at any magnitude. With a decimal on a side:
   equal when rounded to six places *and* within a relative 1e-4. ``1{,}234``, ``1,234`` and ``1\,234`` are
   1234, in groups of three; other numbers side by side are not an answer. ``1.5e3`` is scientific,
   ``0.\overline{3}`` is a third.
5. **Equations.** ``x = 5`` answers the gold ``5``, and the reverse; every number in ``2 + 3 = 5`` must equal
   the gold, so ``3 = 5`` does not. Equations equal equations when math-verify says so; two without any
   solution must be multiples of each other.
6. **Units** that only one side states are ignored; stated by both, they must agree. ``50\%`` equals ``50``
   and ``0.5``. Degrees, currency signs and number bases (``12_5``) count as units.
7. **Words.** ``\text{Friday}``, a single word or a letter (``(B)``) equal by their letters, case aside. Prose
   is not an answer. Variables keep their case; ``i`` is the imaginary unit, ``e`` Euler's number.
8. White space, ``\left``/``\right``, fonts, trailing full stops and other decoration do not count.

It neither limits its time nor its memory: it runs in a worker process that is killed (``pool.py``), because
only that stops ``9^{9^{9^9}}``. The library's own timeouts need signals of the main thread and are off.
"""

from __future__ import annotations

from functools import lru_cache

from protocol.reasons import Unscorable
from roles.verifier.rewards.math_compare import readable, same
from roles.verifier.rewards.math_structure import Node, read
from roles.verifier.rewards.math_text import last_boxed, tidied
from roles.verifier.rewards.math_warm_up import warm_up
from roles.verifier.rewards.reward import Item, Score

ANSWER_CHARS_MAX = 2000
"""Longer boxes and golds are not answers; parsing time grows faster than length."""


class MathReward:
    """Compares the last boxed answer with the gold; a group's gold is parsed once."""

    def prepare(self) -> None:
        """Let the parser see what it will meet; seconds, once for all workers."""
        warm_up()

    async def score(self, item: Item) -> Score:
        """1.0 or 0.0; NO_ANSWER without a gold, GOLD_UNPARSEABLE when it is not mathematics."""
        text = gold_text(item.answer or "")
        if not text:
            return Score.none(Unscorable.NO_ANSWER)
        gold = _gold(text)
        if gold is None:
            return Score.none(Unscorable.GOLD_UNPARSEABLE, "the row's answer is not mathematics")
        answer = last_boxed(item.completion)
        if answer is None or not answer.strip():
            return Score(0.0, note="no boxed answer" if answer is None else "empty box")
        if len(answer) > ANSWER_CHARS_MAX:
            return Score(0.0, note="boxed answer too long")
        if tidied(answer) == tidied(text):
            return Score(1.0)
        found = read(answer)
        if found is None:
            return Score(0.0, note="boxed answer not understood")
        return Score(float(same(gold, found)))


def gold_text(answer: str) -> str:
    """The part of a row's answer that is compared: its last box, or what follows ``####``, or all of it."""
    boxed = last_boxed(answer)
    return (answer.rpartition("####")[2] if boxed is None else boxed).strip()


@lru_cache(maxsize=1024)
def _gold(text: str) -> Node | None:
    node = read(text) if len(text) <= ANSWER_CHARS_MAX else None
    return node if node is not None and readable(node) else None
