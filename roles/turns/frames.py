"""What a chat template writes around that which is given between two of the model's turns, found by trying.

…SPOKEN EOS │ first  REPLY  between  REPLY  last │ the assistant speaks again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jinja2

from protocol.errors import OperatorError, one_line

Giver = Literal["tool", "user"]
"""The role that speaks between two turns."""

_SPOKEN = "SPOKEN0451"
_REPLY = "REPLY0451"
_AWKWARD = 'two "lines"\n<&> {x} \\n \u00e9'
"""What a template must pass on as it is."""

_WHAT: dict[Giver, str] = {"tool": "what tools reply", "user": "what the user says"}


class Templating(Protocol):
    """What frames need of a tokenizer; a transformers tokenizer has it."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """The text of a conversation (``tokenize`` False)."""
        ...


@dataclass(frozen=True, slots=True)
class FrameText:
    """The template's text before, between and after what is given."""

    first: str
    between: str
    last: str


def frame_text(tokenizer: Templating, giver: Giver, endings: Sequence[str]) -> FrameText:
    """The frame of what ``giver`` says after an assistant's turn that ends with one of ``endings``.

    Several tools may reply to one turn; a user says one thing, so nothing stands between. Raises
    OperatorError if the chat template cannot hold what is given exactly.
    """
    ending, one = _cut(_rendered(tokenizer, giver, [_REPLY]), endings)
    first, last = _parts(one, 2, giver)
    between = ""
    if giver == "tool":
        _, two = _cut(_rendered(tokenizer, giver, [_REPLY, _REPLY]), endings)
        _, between, _ = _parts(two, 3, giver)
    awkward = [_AWKWARD] * (3 if giver == "tool" else 1)
    if _cut(_rendered(tokenizer, giver, awkward), [ending])[1] != first + between.join(awkward) + last:
        raise OperatorError(f"the chat template changes {_WHAT[giver]}, so its tokens are not exact")
    return FrameText(first, between, last)


def _rendered(tokenizer: Templating, giver: Giver, given: Sequence[str]) -> str:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _SPOKEN}]
    messages += [{"role": giver, "content": one} for one in given]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, ValueError) as exc:
        raise OperatorError(f"the chat template refuses {_WHAT[giver]}: {one_line(str(exc))}") from exc
    return str(text)


def _cut(rendered: str, endings: Sequence[str]) -> tuple[str, str]:
    """The EOS that ends an assistant's turn in a rendered conversation, and what follows it."""
    _, spoken, rest = rendered.partition(_SPOKEN)
    for ending in endings:
        if spoken and rest.startswith(ending):
            return ending, rest.removeprefix(ending)
    raise OperatorError("the chat template does not end an assistant's turn with an EOS token of the model")


def _parts(rest: str, count: int, giver: Giver) -> list[str]:
    parts = rest.split(_REPLY)
    if len(parts) != count:
        raise OperatorError(f"the chat template does not write {_WHAT[giver]} once")
    return parts
