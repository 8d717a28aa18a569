"""A reward of the user's own: ``module:function``, plain or ``async``.

    def shorter_is_better(completion: str, answer: str | None, **metadata: Any) -> float: ...

A function whose first parameter is called ``completions`` is called once for a whole group instead, with the
list of texts, and returns a list of as many numbers:

    def rarer_is_better(completions: list[str], answer: str | None, **metadata: Any) -> list[float]: ...

It is called with the completion's text and the answer as positional arguments and the row's metadata as
keywords (only those it names, if it takes no ``**``). It returns a finite number. Whatever else happens,
an exception or None or NaN, makes the rollout unscorable and never 0: a missing column would otherwise
look like a model that cannot solve anything. What it prints is discarded.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from protocol.errors import OperatorError
from protocol.reasons import Unscorable
from roles.verifier.rewards.reward import Item, Score

OF_A_GROUP = "completions"
"""Name of the first parameter of a function that scores a whole group."""


class UserFunction:
    """Calls a function that a run file names, once for each completion."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """``function(completion, answer, **metadata)``."""
        self._call = function

    async def score(self, item: Item) -> Score:
        """Its value as a float. Raises whatever the function raises."""
        value = self._call(item.completion, item.answer, **_accepted(self._call, item.metadata))
        return _scored(await value if inspect.isawaitable(value) else value)


class GroupFunction:
    """Calls a function that a run file names, once for all completions of a group."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """``function(completions, answer, **metadata)`` gives one number for each completion."""
        self._call = function

    async def score_group(self, items: Sequence[Item]) -> list[Score]:
        """Its values as floats. Raises whatever it raises, and ValueError when their number is wrong."""
        first, texts = items[0], [item.completion for item in items]
        values = self._call(texts, first.answer, **_accepted(self._call, first.metadata))
        values = list(await values if inspect.isawaitable(values) else values)
        if len(values) != len(items):
            raise ValueError(f"returned {len(values)} rewards for {len(items)} completions")
        return [_scored(value) for value in values]


def opened(name: str) -> UserFunction | GroupFunction:
    """Import it; raises OperatorError with one line when that fails or it is not a function."""
    function = _imported(name)
    first = next(iter(inspect.signature(function).parameters), "")
    return GroupFunction(function) if first == OF_A_GROUP else UserFunction(function)


def _scored(value: Any) -> Score:
    if value is None:
        return Score.none(Unscorable.REWARD_FAILED, "returned None")
    number = float(value)
    if not math.isfinite(number):
        return Score.none(Unscorable.REWARD_FAILED, f"returned {number}")
    return Score(number)


def _imported(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as exc:
        where = f"no module {exc.name!r}; start the node in its directory or install it"
        raise OperatorError(f"reward {name}: {where}") from exc
    except AttributeError as exc:
        raise OperatorError(f"reward {name}: module {module_name} has no {function_name}") from exc
    except (ImportError, SyntaxError, ValueError) as exc:
        raise OperatorError(f"reward {name}: cannot import it: {exc}") from exc
    if not callable(function):
        raise OperatorError(f"reward {name}: a {type(function).__name__} is no function")
    return function  # type: ignore[no-any-return]  # callable() narrows Any to nothing useful


def _accepted(function: Callable[..., Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    parameters = list(inspect.signature(function).parameters.values())
    taken = {p.name for p in parameters[:2]}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return {key: value for key, value in metadata.items() if key not in taken}
    names = {p.name for p in parameters[2:] if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
    return {key: value for key, value in metadata.items() if key in names}
