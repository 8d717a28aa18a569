"""A mask decides what is trained on and audited: each way of lying with it is found as exactly that fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protocol.messages import FinishReason, Rollout, SamplingParams
from protocol.reasons import StructureFault
from roles.tasks.taskset import Row, TaskSet
from roles.turns.dialogue import Dialogue
from roles.verifier.checks import Rules, structure_fault
from tests.build import a_group, a_rollout, a_task
from tests.roles.turns.chat import END, QWEN, a_call, a_character_tokenizer, encoded

TOKENIZER = a_character_tokenizer(QWEN)
DIALOGUE = Dialogue(TOKENIZER, (END,), 3)
TASKS = TaskSet([Row("p", "a", "row 0")], [], [], "d")
RULES = Rules(frozenset({END}), len(TOKENIZER), TASKS, dialogue=DIALOGUE)
LIMIT = 500

CALLING = [*encoded(TOKENIZER, a_call(a=2, b=3)), END]
TWICE = [*encoded(TOKENIZER, a_call(a=2, b=3) + a_call(a=4, b=5)), END]
ANSWER = [*encoded(TOKENIZER, "it is 5"), END]
REPLY = DIALOGUE.reply_ids(["5"]).tolist()

Part = tuple[list[int], int]


def a_conversation(*parts: Part, **changes: Any) -> Rollout:
    """Ids with the mask that is claimed for them."""
    ids = [token for tokens, _ in parts for token in tokens]
    mask = [claimed for tokens, claimed in parts for _ in tokens]
    fields: dict[str, Any] = {
        "token_ids": ids,
        "sampler_logprobs": [-0.5 * claimed for claimed in mask],
        "loss_mask": mask,
        "finish": FinishReason.STOP,
    }
    return a_rollout(**(fields | changes))


def fault(rollout: Rollout, rules: Rules = RULES) -> StructureFault | None:
    task = a_task(group_size=1, params=SamplingParams(max_new_tokens=LIMIT))
    found = structure_fault(a_group(task, rollouts=(rollout,)), task, rules=rules)
    return found[0] if found else None


@pytest.mark.parametrize(
    "parts",
    [
        [(ANSWER, 1)],
        [(CALLING, 1)],
        [(CALLING, 1), (REPLY, 0), (ANSWER, 1)],
        [(CALLING, 1), (REPLY, 0), (CALLING, 1), (REPLY, 0), (ANSWER, 1)],
        [(TWICE, 1), (DIALOGUE.reply_ids(["5", "9"]).tolist(), 0), (ANSWER, 1)],
        [(CALLING, 1), (DIALOGUE.reply_ids([""]).tolist(), 0), (ANSWER, 1)],
    ],
)
def test_honest_conversations_are_sound(parts: list[Part]):
    assert fault(a_conversation(*parts)) is None


def test_a_conversation_may_be_cut_at_the_limit():
    begun = len(CALLING) + len(REPLY)
    rest = (encoded(TOKENIZER, "x") * LIMIT)[: LIMIT - begun]
    cut = a_conversation((CALLING, 1), (REPLY, 0), (rest, 1), finish=FinishReason.LENGTH)
    assert fault(cut) is None
    early = a_conversation((CALLING, 1), (REPLY, 0), (rest[:-1], 1), finish=FinishReason.LENGTH)
    assert fault(early) is StructureFault.LENGTH_WITHOUT_LIMIT


def test_a_rollout_of_one_turn_needs_no_mask():
    ids = {"token_ids": ANSWER, "sampler_logprobs": [-0.5] * len(ANSWER)}
    assert fault(a_rollout(**ids)) is None


# --- tokens of a tool called the policy's -------------------------------------------------------


def test_a_reply_called_the_policys_stands_behind_an_eos():
    assert fault(a_conversation((CALLING, 1), (REPLY, 1), (ANSWER, 1))) is StructureFault.EOS_INSIDE
    bare = {"token_ids": CALLING + REPLY + ANSWER, "sampler_logprobs": [-1.0] * len(CALLING + REPLY + ANSWER)}
    assert fault(a_rollout(**bare)) is StructureFault.EOS_INSIDE


@pytest.mark.parametrize("taken", [1, 5, len(REPLY) - 1])
def test_part_of_a_reply_called_the_policys_is_found(taken: int):
    first = a_conversation((CALLING, 1), (REPLY[:taken], 1), (REPLY[taken:], 0), (ANSWER, 1))
    assert fault(first) in {StructureFault.EOS_INSIDE, StructureFault.TURN_MALFORMED}
    last = a_conversation((CALLING, 1), (REPLY[:-taken], 0), (REPLY[-taken:], 1), (ANSWER, 1))
    assert fault(last) in {StructureFault.REPLY_MALFORMED, StructureFault.EOS_INSIDE}


def test_a_reply_that_nothing_called_for_is_found():
    assert fault(a_conversation((ANSWER, 1), (REPLY, 0), (ANSWER, 1))) is StructureFault.REPLY_MALFORMED


def test_more_or_fewer_replies_than_calls_are_found():
    two = DIALOGUE.reply_ids(["5", "9"]).tolist()
    assert fault(a_conversation((TWICE, 1), (REPLY, 0), (ANSWER, 1))) is StructureFault.REPLY_MALFORMED
    assert fault(a_conversation((TWICE, 1), (two, 0), (ANSWER, 1))) is None


# --- tokens of the policy called a tool's -------------------------------------------------------


@pytest.mark.parametrize("hidden", [1, 4, len(ANSWER) - 1])
def test_the_beginning_of_a_turn_cannot_be_hidden_in_a_reply(hidden: int):
    lie = a_conversation((CALLING, 1), (REPLY + ANSWER[:hidden], 0), (ANSWER[hidden:], 1))
    assert fault(lie) is StructureFault.REPLY_MALFORMED


@pytest.mark.parametrize("hidden", [1, 4, len(CALLING) - 1])
def test_the_end_of_a_turn_cannot_be_hidden_in_a_reply(hidden: int):
    lie = a_conversation((CALLING[:-hidden], 1), (CALLING[-hidden:] + REPLY, 0), (ANSWER, 1))
    assert fault(lie) is StructureFault.TURN_MALFORMED


def test_a_whole_turn_cannot_be_hidden_between_two_replies():
    lie = a_conversation((CALLING, 1), (REPLY + CALLING + REPLY, 0), (ANSWER, 1))
    assert fault(lie) is StructureFault.REPLY_MALFORMED


def test_neither_the_first_nor_the_last_tokens_can_be_hidden():
    conversation = (CALLING, 1), (REPLY, 0), (ANSWER, 1)
    assert fault(a_conversation((ANSWER[:2], 0), *conversation)) is StructureFault.TURN_MALFORMED
    assert fault(a_conversation(*conversation, (ANSWER, 0))) is StructureFault.TURN_MALFORMED
    assert fault(a_conversation((ANSWER, 0))) is StructureFault.TURN_MALFORMED
    middle = a_conversation((ANSWER[:2], 1), (ANSWER[2:4], 0), (ANSWER[4:], 1))
    assert fault(middle) is StructureFault.TURN_MALFORMED


# --- masks that are none ------------------------------------------------------------------------


def test_a_mask_in_a_run_without_tools_is_found():
    without = Rules(RULES.eos_ids, RULES.vocab_size, TASKS)
    assert fault(a_conversation((ANSWER, 1)), without) is StructureFault.MASK_UNEXPECTED


def test_a_mask_of_another_length_or_of_other_numbers_is_found():
    parts = (CALLING, 1), (REPLY, 0), (ANSWER, 1)
    whole = a_conversation(*parts).loss_mask
    assert whole is not None
    assert fault(a_conversation(*parts, loss_mask=whole[:-1])) is StructureFault.LENGTHS_DIFFER
    assert (
        fault(a_conversation(*parts, loss_mask=np.where(whole == 1, 2, 0))) is StructureFault.TURN_MALFORMED
    )


def test_a_logprob_of_a_token_that_was_not_sampled_is_found():
    parts = (CALLING, 1), (REPLY, 0), (ANSWER, 1)
    length = sum(len(tokens) for tokens, _ in parts)
    lie = a_conversation(*parts, sampler_logprobs=[-0.5] * length)
    assert fault(lie) is StructureFault.TURN_MALFORMED


def test_more_turns_than_the_run_allows_are_found():
    again = (CALLING, 1), (REPLY, 0)
    assert fault(a_conversation(*again, *again, (ANSWER, 1))) is None
    assert fault(a_conversation(*again, *again, *again, (ANSWER, 1))) is StructureFault.TURN_MALFORMED
