"""Tokenizers with chat templates that know tools, and the tools of the tests' conversations."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTROL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
PAD, START, END = range(3)
CALL, CALLED = 3, 4
"""``<tool_call>`` and ``</tool_call>``: tokens of their own that are no special ones, as in Qwen's."""

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Tools have a role of their own."""

QWEN = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What tools say stands in a user's message, several replies in one."""

ALPHABET = [*CONTROL, "<tool_call>", "</tool_call>", *string.printable, "é", "…"]


def a_character_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a character, so a text has one spelling in tokens wherever it is cut."""
    vocabulary = {character: i for i, character in enumerate(dict.fromkeys(ALPHABET))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return _dressed(characters, template)


def a_merging_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: text that is encoded again need not give the ids that it came from."""
    merging = Tokenizer(models.BPE())
    merging.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    merging.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[*CONTROL, "<tool_call>", "</tool_call>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [
        '{"name": "add", "arguments": {"a": 2, "b": 3}}',
        "the sum of two numbers is assistant user tool",
    ]
    merging.train_from_iterator(corpus * 20, trainer)
    return _dressed(merging, template)


def _dressed(tokenizer: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    dressed = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=CONTROL[PAD],
        eos_token=CONTROL[END],
        additional_special_tokens=[CONTROL[START]],
    )
    dressed.add_tokens(["<tool_call>", "</tool_call>"])
    dressed.chat_template = template
    return dressed


def a_call(name: str = "add", **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def rendered(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, str]], *, more: bool
) -> list[int]:
    """The whole conversation by the template, encoded as one text; ``more``: the assistant speaks next."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=more)
    assert isinstance(text, str)
    return encoded(tokenizer, text)


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b
