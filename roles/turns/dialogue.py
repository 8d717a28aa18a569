"""From turns to token ids and back, for one tokenizer and its chat template.

    prompt │ turn of the policy … EOS │ frame reply frame │ turn of the policy … EOS │ …
            sampled                    given               sampled

What was sampled is never encoded again: what tools reply, or a simulated user says, is encoded on its own,
and appended. The frame is what the template writes after an assistant's turn, around what is given, up to
where the assistant speaks again. What is given is encoded without special tokens, so it can neither end a
turn nor begin one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from protocol.arrays import IntArray
from protocol.runspec import RunSpec
from protocol.user_spec import UserSpec
from roles.turns.calls import ToolCall, calls_in
from roles.turns.cutting import NOTE_CHARS_MAX
from roles.turns.frames import Giver, Templating, frame_text

NORMALIZED_MAX = 3
"""Characters that a tokenizer's normalization (NFC) makes of one at most: no honest text is too long."""


class Tokenizer(Templating, Protocol):
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


@dataclass(frozen=True, slots=True)
class _Frame:
    """Token ids before, between and after what is given."""

    first: list[int]
    between: list[int]
    last: list[int]

    def inside(self, ids: list[int]) -> list[int] | None:
        """What the frame holds; None unless it stands around ``ids``."""
        end = len(ids) - len(self.last)
        if end < len(self.first) or ids[: len(self.first)] != self.first or ids[end:] != self.last:
            return None
        return ids[len(self.first) : end]


class Dialogue:
    """Reads and writes what stands between the policy's turns."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Iterable[int],
        turns_max: int,
        *,
        tools: bool = True,
        user: UserSpec | None = None,
    ) -> None:
        """Raises OperatorError if the chat template cannot hold what ``tools`` reply or the ``user`` says."""
        self._tokenizer = tokenizer
        self.turns_max = turns_max
        self.user = user
        eos = sorted(eos_ids)
        endings = [str(tokenizer.convert_ids_to_tokens(one)) for one in eos]
        self._tools = self._frame("tool", endings) if tools else None
        self._user = self._frame("user", endings) if user else None
        frames = [frame for frame in (self._tools, self._user) if frame]
        tokens = {token for frame in frames for token in [*frame.first, *frame.between, *frame.last]}
        of_frame = tokens & set(tokenizer.all_special_ids)
        self._control = np.array(sorted(of_frame.union(eos)), np.int32)
        """Ids that nothing given may hold: they begin and end turns."""

    @classmethod
    def of(cls, spec: RunSpec, tokenizer: Tokenizer, eos_ids: Iterable[int]) -> Dialogue | None:
        """The run's, or None if its rollouts are single turns. Raises OperatorError like the constructor."""
        if spec.tools is None and spec.user is None:
            return None
        turns_max = spec.tools.turns_max if spec.tools else 1 + (spec.user.messages_max if spec.user else 0)
        return cls(tokenizer, eos_ids, turns_max, tools=spec.tools is not None, user=spec.user)

    def reply_ids(self, replies: Sequence[str]) -> IntArray:
        """What follows a turn that ended with EOS, shape [R]: the replies to its calls, framed."""
        assert self._tools is not None, "a run with tools"
        ids = [*self._tools.first]
        for number, reply in enumerate(replies):
            ids += [*self._tools.between, *self._content(reply)] if number else self._content(reply)
        return np.array([*ids, *self._tools.last], np.int32)

    def replies_in(self, token_ids: IntArray, count: int) -> list[str] | None:
        """The ``count`` replies that stand between two turns; None unless the frame is the template's."""
        assert self._tools is not None, "a run with tools"
        inside = self._tools.inside(token_ids.tolist())
        contents = None if inside is None else _split(inside, self._tools.between, count)
        if contents is None or any(np.isin(content, self._control).any() for content in contents):
            return None
        return [self.text(content) for content in contents]

    def user_ids(self, said: str) -> IntArray:
        """What follows a turn that ended with EOS, shape [R]: what the user says, framed."""
        assert self._user is not None, "a run with a user"
        return np.array([*self._user.first, *self._content(said), *self._user.last], np.int32)

    def user_in(self, token_ids: IntArray) -> str | None:
        """What the user says between two turns; None unless the frame is the template's and its length the
        run's."""
        if self._user is None or self.user is None:
            return None
        content = self._user.inside(token_ids.tolist())
        if content is None or np.isin(content, self._control).any():
            return None
        said = self.text(content)
        limit = NORMALIZED_MAX * (self.user.reply_chars_max + NOTE_CHARS_MAX)
        return said if len(said) <= limit else None

    def calls_in(self, token_ids: IntArray) -> list[ToolCall]:
        """The calls of one turn of the policy; none in a run without tools."""
        return calls_in(self.text(token_ids.tolist())) if self._tools else []

    def text(self, token_ids: Sequence[int]) -> str:
        """What a turn or a reply says, without special tokens."""
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _content(self, reply: str) -> list[int]:
        return self._tokenizer.encode(reply, add_special_tokens=False, split_special_tokens=True)

    def _frame(self, giver: Giver, endings: Sequence[str]) -> _Frame:
        text = frame_text(self._tokenizer, giver, endings)
        return _Frame(
            *(
                self._tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=False)
                for piece in (text.first, text.between, text.last)
            )
        )


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
