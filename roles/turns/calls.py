r"""What the model calls, and how it says so: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

The form of Hermes and Qwen, and of most chat templates that know tools. A turn may hold several calls; each
gets a reply, also one that cannot be understood, so that replies and calls always match in number.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

CALLS_MAX = 16
"""Calls of one turn that are looked at; later ones get no reply."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; with ``fault``, why it cannot be made."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None


def calls_in(text: str) -> list[ToolCall]:
    """The calls of one turn, in order (pure)."""
    return [_call(found) for found in _CALL.findall(text)[:CALLS_MAX]]


def without_calls(text: str) -> str:
    """What a turn says besides its calls."""
    return _CALL.sub("", text).strip() if _CALL.search(text) else text


def _call(text: str) -> ToolCall:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return ToolCall("", fault="this is no JSON")
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return ToolCall("", fault='a call is {"name": …, "arguments": {…}}')
    arguments = said.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(said["name"], fault="arguments are an object")
    return ToolCall(said["name"], arguments)
