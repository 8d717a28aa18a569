"""The process that runs a simulated user: the tools' host, with one function that is called otherwise.

    python -m roles.turns.user_host        (its standard input is a socket to the sampler)

A reply is ``SAID`` and what the user says, ``NOTHING`` if that ends the rollout, or ``error: …``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from protocol.errors import OperatorError
from roles.turns.functions import imported
from roles.turns.tool_host import main

USER = "user"
SAID = "said:"
NOTHING = "none"


class UserFunction:
    """What the user says, of the messages so far and the row."""

    name = USER
    schema: Mapping[str, Any] = {}
    """The model is told nothing of it."""

    def __init__(self, name: str) -> None:
        """Raises OperatorError if there is no such function, or none of two arguments."""
        self._call: Callable[..., Any] = imported(name, "user")
        try:
            inspect.signature(self._call).bind([], {})
        except TypeError as exc:
            raise OperatorError(f"user {name}: it is called with messages and row: {exc}") from exc

    def reply(self, arguments: Mapping[str, Any]) -> str:
        """The host's reply. Raises what the function raises, and TypeError if it says no text."""
        said = self._call(arguments["messages"], arguments["row"])
        if inspect.isawaitable(said):
            said = asyncio.run(_awaited(said))
        if said is None:
            return NOTHING
        if not isinstance(said, str):
            raise TypeError(f"a {type(said).__name__} is neither text nor None")
        return SAID + said


def import_user(names: Sequence[str]) -> list[UserFunction]:
    """The one function that is named."""
    return [UserFunction(name) for name in names]


async def _awaited(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    main(import_user)
