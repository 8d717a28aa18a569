"""A rollout with turns as messages of the chat API: what rewards and simulated users read of it (pure)."""

from __future__ import annotations

import json
from typing import Any

from protocol.messages import Rollout
from roles.turns.calls import ToolCall, without_calls
from roles.turns.dialogue import Dialogue
from roles.turns.spans import spans_of


def messages_of(rollout: Rollout, dialogue: Dialogue) -> tuple[dict[str, Any], ...]:
    """All turns and replies of a rollout of sound structure.

    Example: ``assistant`` with ``tool_calls``, ``tool``, ``assistant``, ``user``, ``assistant``. What a turn
    calls is not repeated in its ``content``.
    """
    messages: list[dict[str, Any]] = []
    calls: list[ToolCall] = []
    made = 0
    for span in spans_of(rollout.sampled):
        ids = rollout.token_ids[span.tokens]
        if span.sampled:
            calls = dialogue.calls_in(ids)
            made += len(calls)
            messages.append(_turn(dialogue.text(ids.tolist()), calls, made - len(calls)))
        elif not calls:
            messages.append({"role": "user", "content": dialogue.user_in(ids) or ""})
        else:
            replies = dialogue.replies_in(ids, len(calls)) or []
            for number, reply in enumerate(replies, made - len(calls)):
                messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": reply})
    return tuple(messages)


def _turn(text: str, calls: list[ToolCall], first: int) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": without_calls(text) if calls else text}
    if calls:
        turn["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(calls, first)
        ]
    return turn
