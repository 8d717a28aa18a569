r"""The ``reasoning-gym:<dataset>[,…]`` reward: the score that a dataset's own scorer gives (0 to 1).

It sees what stands in the last ``<answer>…</answer>``, or the whole completion where there is none. Some
scorers hand that text to ``eval`` or to SymPy, which evaluates it too. Therefore: it runs in a locked worker
that is replaced after each completion, and for those scorers a text that is more than literals and arithmetic
scores 0 unseen, since whatever runs beside a scorer can also change what it says.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from protocol.errors import OperatorError
from protocol.reasons import Unscorable
from roles.tasks.reasoning_gym import ANY_ANSWER, INSTALL
from roles.verifier.rewards.reward import Item, Score

ANSWER_CHARS_MAX = 20_000

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")
_CALL = re.compile(r"([A-Za-z_]\w*)\s*\(")
_ATTRIBUTE = re.compile(r"(?:[A-Za-z_)\]}'\"]|\b\d+\s)\s*\.\s*[A-Za-z_]|\d\.\s*[A-Za-z_]{2,}")
_KEYWORD = re.compile(r"\b(?:lambda|import|for|while|yield|await|async|global|with|if|else)\b|:=|__|#|@")
_FUNCTIONS = frozenset({
    "sqrt", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh",
    "cosh", "tanh", "abs", "Abs", "Rational", "Integer", "Integral",
})  # fmt: skip


class ReasoningGymReward:
    """Calls the scorer of the dataset that a row comes from."""

    def __init__(self, names: str) -> None:
        """``names`` are datasets, separated by commas. Raises OperatorError for one that does not exist."""
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as exc:
            raise OperatorError(f"reward reasoning-gym:{names} needs a library: {INSTALL}") from exc
        self._scorers: dict[str, Callable[..., float]] = {}
        self._evaluating: set[str] = set()
        for name in names.split(","):
            if name not in DATASETS:
                raise OperatorError(f"reward reasoning-gym:{names}: there is no dataset {name!r}")
            dataset = reasoning_gym.create_dataset(name, size=1, seed=0)
            self._scorers[name] = dataset.score_answer
            if _EVALUATES.search(inspect.getsource(type(dataset).score_answer)):
                self._evaluating.add(name)

    async def score(self, item: Item) -> Score:
        """The scorer's number; NO_ANSWER for a row of no dataset of ours. Raises what the scorer raises."""
        name = item.metadata.get("source_dataset")
        if name is None and len(self._scorers) == 1:
            (name,) = self._scorers
        if name not in self._scorers:
            return Score.none(
                Unscorable.NO_ANSWER, f"the row is of {name}, not of the datasets of this reward"
            )
        answer = tagged(item.completion)
        if len(answer) > ANSWER_CHARS_MAX:
            return Score(0.0, note="answer too long")
        if name in self._evaluating and not is_inert(answer):
            return Score(0.0, note="the answer is code, and the scorer would run it")
        entry: dict[str, Any] = {
            "question": item.prompt,
            "answer": None if item.answer == ANY_ANSWER else item.answer,
            "metadata": dict(item.metadata),
        }
        return Score(float(self._scorers[name](answer, entry)))


def tagged(completion: str) -> str:
    """The text of the last ``<answer>`` tag, or the whole completion."""
    found = _TAG.findall(completion)
    return (found[-1] if found else completion).strip()


def is_inert(text: str) -> bool:
    """Whether evaluating ``text`` can do no more than arithmetic: no attributes, no strange calls."""
    if _KEYWORD.search(text) or _ATTRIBUTE.search(text):
        return False
    return all(name in _FUNCTIONS or len(name) == 1 for name in _CALL.findall(text))
