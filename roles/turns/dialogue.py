"""From turns to token ids and back, for one tokenizer and its chat template.

    prompt │ turn of the policy … EOS │ frame reply frame │ turn of the policy … EOS │ …
            sampled                    given               sampled

What was sampled is never encoded again: a reply is encoded on its own, and appended. The frame is what the
template writes after an assistant's turn, around what tools say, up to where the assistant speaks again. A
reply is encoded without special tokens, so no tool can end a turn or begin one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jinja2
import numpy as np

from protocol.arrays import IntArray
from protocol.errors import OperatorError, one_line
from roles.turns.calls import ToolCall, calls_in

_SPOKEN = "SPOKEN0451"
_REPLY = "REPLY0451"
_AWKWARD = 'two "lines"\n<&> {x} \\n \u00e9'
"""What a template must pass on as it is."""


class Tokenizer(Protocol):
    """What conversations need of a tokenizer; a transformers tokenizer has it."""

    @property
    def all_special_ids(self) -> Any:
        """Ids of special tokens."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool) -> list[int]:
        """Token ids of ``text``."""
        ...

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> Any:
        """The text of ``token_ids``."""
        ...

    def convert_ids_to_tokens(self, ids: int) -> Any:
        """The token's own text."""
        ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """The text of a conversation (``tokenize`` False)."""
        ...


class Dialogue:
    """Reads and writes what stands between the policy's turns."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Iterable[int], turns_max: int) -> None:
        """Raises OperatorError if the chat template cannot hold what tools reply."""
        self._tokenizer = tokenizer
        self.turns_max = turns_max
        eos = sorted(eos_ids)
        self._pieces = self._encoded(self._frame([str(tokenizer.convert_ids_to_tokens(one)) for one in eos]))
        of_frame = {token for piece in self._pieces for token in piece} & set(tokenizer.all_special_ids)
        self._control = np.array(sorted(of_frame.union(eos)), np.int32)
        """Ids that no reply may hold: they begin and end turns."""

    def reply_ids(self, replies: Sequence[str]) -> IntArray:
        """What follows a turn that ended with EOS, shape [R]: the replies to its calls, framed."""
        first, between, last = self._pieces
        ids = [*first]
        for number, reply in enumerate(replies):
            ids += [*between, *self._content(reply)] if number else self._content(reply)
        return np.array([*ids, *last], np.int32)

    def replies_in(self, token_ids: IntArray, count: int) -> list[str] | None:
        """The ``count`` replies that stand between two turns; None unless the frame is the template's."""
        first, between, last = self._pieces
        ids = token_ids.tolist()
        if len(ids) < len(first) + len(last) or ids[: len(first)] != first:
            return None
        if last and ids[-len(last) :] != last:
            return None
        contents = _split(ids[len(first) : len(ids) - len(last)], between, count)
        if contents is None or any(np.isin(content, self._control).any() for content in contents):
            return None
        return [self.text(content) for content in contents]

    def calls_in(self, token_ids: IntArray) -> list[ToolCall]:
        """The calls of one turn of the policy."""
        return calls_in(self.text(token_ids.tolist()))

    def text(self, token_ids: Sequence[int]) -> str:
        """What a turn or a reply says, without special tokens."""
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _content(self, reply: str) -> list[int]:
        return self._tokenizer.encode(reply, add_special_tokens=False, split_special_tokens=True)

    def _encoded(self, frame: Sequence[str]) -> list[list[int]]:
        return [
            self._tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=False)
            for piece in frame
        ]

    def _frame(self, endings: Sequence[str]) -> tuple[str, str, str]:
        """The template's text before, between and after replies."""
        ending, one = _cut(self._rendered([_REPLY]), endings)
        _, two = _cut(self._rendered([_REPLY, _REPLY]), endings)
        first, last = _parts(one, 2)
        _, between, _ = _parts(two, 3)
        expected = f"{first}{_AWKWARD}{between}{_AWKWARD}{between}{_AWKWARD}{last}"
        if _cut(self._rendered([_AWKWARD] * 3), [ending])[1] != expected:
            raise OperatorError("the chat template changes what tools reply, so their tokens are not exact")
        return first, between, last

    def _rendered(self, replies: Sequence[str]) -> str:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _SPOKEN}]
        messages += [{"role": "tool", "content": reply} for reply in replies]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError) as exc:
            raise OperatorError(f"the chat template refuses tools' replies: {one_line(str(exc))}") from exc
        return str(text)


def _cut(rendered: str, endings: Sequence[str]) -> tuple[str, str]:
    """The EOS that ends an assistant's turn in a rendered conversation, and what follows it."""
    _, spoken, rest = rendered.partition(_SPOKEN)
    for ending in endings:
        if spoken and rest.startswith(ending):
            return ending, rest.removeprefix(ending)
    raise OperatorError("the chat template does not end an assistant's turn with an EOS token of the model")


def _parts(rest: str, count: int) -> list[str]:
    parts = rest.split(_REPLY)
    if len(parts) != count:
        raise OperatorError("the chat template does not write each tool's reply once")
    return parts


def _split(ids: list[int], between: list[int], count: int) -> list[list[int]] | None:
    """``ids`` cut at ``between`` into ``count`` parts, each as early as possible; None if there are fewer."""
    parts = []
    for _ in range(count - 1):
        at = next((i for i in range(len(ids)) if between and ids[i : i + len(between)] == between), None)
        if at is None:
            return None
        parts.append(ids[:at])
        ids = ids[at + len(between) :]
    return [*parts, ids] if count else None
