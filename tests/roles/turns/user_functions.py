"""Simulated users as a person writes them, good and bad; imported by the process that runs them."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from tests.roles.turns import tool_functions

read = tool_functions.read
NOBODY = 0

Messages = list[dict[str, Any]]
Row = dict[str, str]


def repeats(messages: Messages, row: Row) -> str:
    """Say everything that is known, as JSON."""
    return json.dumps({"messages": messages, "row": row})


async def hurried(messages: Messages, row: Row) -> str | None:
    """Ask once more."""
    await asyncio.sleep(0)
    return f"hurry, {row['mood']}" if len(messages) < 3 else None


def asks_again(messages: Messages, row: Row) -> str | None:
    """Another sum, until there were two questions."""
    asked = sum(message["role"] == "user" for message in messages)
    return "1+2" if asked < 2 else None


def moody(messages: Messages, row: Row) -> object:
    """Do what the model asks for."""
    said = messages[-1]["content"]
    if said == "hang":
        while True:
            pass
    if said == "die":
        os._exit(3)
    if said == "read":
        return read(row["path"])
    answers = {"number": 5, "much": "x" * 10**6, "blank": "  ", "null": "none", "error": "error: mine"}
    return None if said == "end" else answers[said]


def lonely(messages: Messages) -> str:
    """Wants to know nothing of the row."""
    return "hello"
