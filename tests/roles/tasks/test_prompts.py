"""Prompts: special tokens once, lengths checked before anything is sampled, nothing cut."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from protocol.errors import OperatorError
from protocol.runspec import TasksSpec
from roles.tasks.prompts import PromptBuilder
from roles.tasks.taskset import Row, Skipped

CHAT = "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
CHAT_AND_TURN = CHAT + "{% if add_generation_prompt %}assistant{% endif %}"
WORDS = ["<unk>", "<s>", "</s>", "hi", "there", "user", "system", "assistant", "0"]


def a_tokenizer(single: str = "<s> $A", chat_template: str | None = CHAT_AND_TURN) -> PreTrainedTokenizerFast:
    """One token a word; ``single`` is what the tokenizer puts around every text."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def a_builder(tokenizer: PreTrainedTokenizerFast | None = None, **spec: Any) -> PromptBuilder:
    fields = {"source": "a.jsonl", "template": "{prompt}"} | spec
    return PromptBuilder(tokenizer or a_tokenizer(), TasksSpec.model_validate(fields))


def test_a_template_that_writes_bos_gets_no_second_one():
    """Case A10."""
    tokenizer = a_tokenizer()
    assert tokenizer.encode("<s>hi there") == [1, 1, 3, 4]
    assert a_builder(tokenizer, template="<s>{prompt}").token_ids("hi there").tolist() == [1, 3, 4]


def test_a_template_without_bos_gets_the_tokenizers():
    assert a_builder().token_ids("hi there").tolist() == [1, 3, 4]


def test_a_tokenizer_that_adds_no_bos_is_left_alone():
    assert a_builder(a_tokenizer("$A")).token_ids("hi there").tolist() == [3, 4]


def test_no_eos_is_appended_even_if_the_tokenizer_would():
    assert a_builder(a_tokenizer("<s> $A </s>")).token_ids("hi").tolist() == [1, 3]


def test_the_chat_template_writes_all_special_tokens_and_opens_the_assistants_turn():
    builder = a_builder(template=None, system_prompt="there")
    assert [WORDS[i] for i in builder.token_ids("hi")] == [
        "<s>",
        "system",
        "there",
        "user",
        "hi",
        "assistant",
    ]


def test_a_chat_template_without_bos_gets_none():
    builder = a_builder(
        a_tokenizer(chat_template=CHAT_AND_TURN.removeprefix("{{ bos_token }}")), template=None
    )
    assert builder.token_ids("hi").tolist() == [5, 3, 7]


def test_braces_in_a_prompt_are_text():
    assert a_builder().render("{prompt} {0} {{}}") == "{prompt} {0} {{}}"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"template": "hi"}, "no {prompt}"),
        ({"template": "{prompt} {answer}"}, "tasks.template: 'answer' is no field"),
        ({"template": "{prompt} \\boxed{}"}, "tasks.template: '' is no field"),
        ({"template": "{prompt"}, "tasks.template: expected '}'"),
        ({"system_prompt": "there"}, "belongs to the chat template"),
    ],
)
def test_a_template_that_cannot_work_is_refused_at_once(spec, message):
    with pytest.raises(OperatorError) as refused:
        a_builder(**spec)
    assert message in str(refused.value)


def test_a_model_without_a_chat_template_needs_a_template():
    with pytest.raises(OperatorError, match=r"set tasks\.template"):
        a_builder(a_tokenizer(chat_template=None), template=None)


def test_a_chat_template_that_refuses_is_the_operators_mistake():
    refuses = "{{ raise_exception('no system role') }}"
    with pytest.raises(OperatorError, match="refuses the prompt: no system role"):
        a_builder(a_tokenizer(chat_template=refuses), template=None, system_prompt="there")


def rows_of_tokens(*lengths: int) -> list[Row]:
    return [Row(" ".join(["hi"] * n), "a", f"line {i}") for i, n in enumerate(lengths, 1)]


def test_prompts_that_do_not_fit_the_context_are_skipped_and_named():
    """Case A12."""
    builder = a_builder(a_tokenizer("$A"))
    selection = builder.select(rows_of_tokens(9, 8, 20), context_tokens=16, max_new_tokens=8)
    assert [(p.row, len(p.token_ids)) for p in selection.prompts] == [(1, 8)]
    reason = "prompt has {} tokens, the context has room for 8 besides max_new_tokens"
    assert selection.skipped == (
        Skipped("row 0 (line 1)", reason.format(9)),
        Skipped("row 2 (line 3)", reason.format(20)),
    )


def test_prompts_above_the_runs_own_limit_are_skipped():
    builder = a_builder(a_tokenizer("$A"), prompt_tokens_max=3)
    selection = builder.select(rows_of_tokens(3, 4), context_tokens=64, max_new_tokens=8)
    assert [p.row for p in selection.prompts] == [0]
    assert selection.skipped[0].reason == "prompt has 4 tokens, tasks.prompt_tokens_max is 3"


def test_a_prompt_without_tokens_is_skipped():
    selection = a_builder(a_tokenizer("$A")).select(
        [Row(" ", "a", "line 1"), *rows_of_tokens(1)], context_tokens=64, max_new_tokens=8
    )
    assert selection.skipped == (Skipped("row 0 (line 1)", "prompt has no tokens"),)


def test_no_prompt_that_fits_is_the_operators_mistake():
    with pytest.raises(OperatorError, match="no prompt fits"):
        a_builder().select(rows_of_tokens(20), context_tokens=16, max_new_tokens=8)
    with pytest.raises(OperatorError, match="context is 8 tokens: no prompt fits"):
        a_builder().select(rows_of_tokens(1), context_tokens=8, max_new_tokens=8)


def test_no_rows_give_no_prompts():
    assert a_builder().select([], context_tokens=16, max_new_tokens=8).prompts == ()
