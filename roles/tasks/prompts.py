"""From a row's prompt to token ids, once: what is built here travels to samplers and back as it is.

Names in shapes: P tokens of one prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Protocol

import jinja2
import numpy as np

from protocol.arrays import IntArray
from protocol.errors import OperatorError, one_line
from protocol.messages import Told
from protocol.runspec import TasksSpec
from protocol.tools_spec import ToolsSpec
from protocol.user_spec import UserSpec
from roles.tasks.taskset import Row, Skipped
from roles.tasks.told import told_of, untold


class Tokenizer(Protocol):
    """What prompts need of a tokenizer; a transformers tokenizer has it."""

    @property
    def bos_token_id(self) -> Any:
        """The id of the beginning-of-sequence token, or None."""
        ...

    @property
    def chat_template(self) -> Any:
        """The chat template, or None."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``, with or without what the tokenizer puts around every text."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tools: list[Any] | None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> Any:
        """The text of a conversation (``tokenize`` False)."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row that fits. ``row`` is its index in its split."""

    row: int
    token_ids: IntArray
    """Shape [P]."""
    told: Told | None = None
    """What a simulated user may know of the row."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The prompts of a split that fit, in row order, and the rows that do not."""

    prompts: tuple[Prompt, ...]
    skipped: tuple[Skipped, ...]


class PromptBuilder:
    """Renders prompts as the run's TasksSpec says.

    Without ``tasks.template``, the chat template makes a user message of the prompt, after the system
    prompt if there is one, and opens the assistant's turn; it also says which ``tools`` there are. Raises
    OperatorError at once if that cannot work with this tokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: TasksSpec,
        tools: ToolsSpec | None = None,
        user: UserSpec | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self._user = user
        self._tools = json.loads(tools.schemas) if tools and tools.schemas else None
        if tools and spec.template is not None:
            raise OperatorError("the chat template tells the model of tools: leave tasks.template out")
        if spec.template is not None and spec.system_prompt is not None:
            raise OperatorError(
                "tasks.system_prompt belongs to the chat template: put it into tasks.template"
            )
        if spec.template is None and tokenizer.chat_template is None:
            raise OperatorError("the model's tokenizer has no chat template: set tasks.template")
        if spec.template is not None:
            _check_template(spec.template)
        self._adds_bos = _adds_bos(tokenizer)
        self.render("0")

    def render(self, prompt: str, system_prompt: str | None = None) -> str:
        """The whole text that the model continues."""
        if self._spec.template is None:
            return self._render_chat(prompt, system_prompt or self._spec.system_prompt)
        if system_prompt is not None:
            raise OperatorError("tasks with system prompts of their own need the chat template")
        return self._spec.template.format(prompt=prompt)

    def token_ids(self, prompt: str, system_prompt: str | None = None) -> IntArray:
        """Shape [P], with one BOS if the model wants one. ``system_prompt`` is the row's own.

        A chat template writes all special tokens itself. With ``tasks.template`` the tokenizer's own BOS
        is added unless the text already begins with it. No EOS is ever appended.
        """
        ids = self._tokenizer.encode(self.render(prompt, system_prompt), add_special_tokens=False)
        bos = self._tokenizer.bos_token_id
        if self._spec.template is not None and self._adds_bos and ids[:1] != [bos]:
            ids = [bos, *ids]
        return np.asarray(ids, np.int32)

    def told(self, row: Row) -> Told | None:
        """What a task of this row tells the run's user; None if it has none."""
        return told_of(row, self._spec, self._user) if self._user else None

    def select(self, rows: Sequence[Row], *, context_tokens: int, max_new_tokens: int) -> Selection:
        """Build every prompt of a split and keep those that fit; nothing is cut.

        A prompt fits if it has at most ``tasks.prompt_tokens_max`` tokens and leaves room for
        ``max_new_tokens`` in the model's context. Raises OperatorError if none fits.
        """
        room = context_tokens - max_new_tokens
        if room < 1:
            raise OperatorError(
                f"sampling.max_new_tokens is {max_new_tokens} but the model's context is "
                f"{context_tokens} tokens: no prompt fits"
            )
        prompts: list[Prompt] = []
        skipped: list[Skipped] = []
        for index, row in enumerate(rows):
            token_ids = self.token_ids(row.prompt, row.system_prompt)
            told = self.told(row)
            reason = self._unfit(len(token_ids), room)
            if reason is None and told and self._user:
                reason = untold(told, self._user)
            if reason is None:
                prompts.append(Prompt(index, token_ids, told))
            else:
                skipped.append(Skipped(f"row {index} ({row.origin})", reason))
        if rows and not prompts:
            raise OperatorError(f"no prompt fits; the first one: {skipped[0].origin}: {skipped[0].reason}")
        return Selection(tuple(prompts), tuple(skipped))

    def _unfit(self, tokens: int, room: int) -> str | None:
        if tokens == 0:
            return "prompt has no tokens"
        if tokens > self._spec.prompt_tokens_max:
            return f"prompt has {tokens} tokens, tasks.prompt_tokens_max is {self._spec.prompt_tokens_max}"
        if tokens > room:
            return f"prompt has {tokens} tokens, the context has room for {room} besides max_new_tokens"
        return None

    def _render_chat(self, prompt: str, system_prompt: str | None) -> str:
        messages = [{"role": "user", "content": prompt}]
        if system_prompt is not None:
            messages.insert(0, {"role": "system", "content": system_prompt})
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=self._tools, tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as exc:
            raise OperatorError(f"the model's chat template refuses the prompt: {exc}") from exc
        return str(text)


def _check_template(template: str) -> None:
    """Nothing but ``{prompt}``: a stranger's format could ask for a width of gigabytes."""
    advice = "write {prompt}, and {{ }} for braces of your own"
    try:
        fields = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as exc:
        raise OperatorError(f"tasks.template: {exc}; {advice}") from exc
    if not fields:
        raise OperatorError("tasks.template has no {prompt}")
    for name, form, conversion in fields:
        if name != "prompt" or form or conversion:
            raise OperatorError(f"tasks.template: {one_line(repr(name))} is no field; {advice}")


def _adds_bos(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer puts BOS before every text, found out by trying."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer.encode("0", add_special_tokens=True)[:1] == [bos]
