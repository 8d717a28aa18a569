"""What a user said cannot be forged into another shape, and a task tells no more than a user may know."""

from __future__ import annotations

import pytest

from protocol.messages import Rollout, SamplingParams, Told
from protocol.reasons import StructureFault
from protocol.user_spec import UserSpec
from roles.tasks.taskset import Row, TaskSet
from roles.turns.dialogue import Dialogue
from roles.verifier.checks import Rules, structure_fault
from tests.build import a_group, a_rollout, a_task
from tests.roles.turns.chat import CHATML, END, QWEN, a_call, a_character_tokenizer, encoded
from tests.roles.verifier.test_turn_checks import a_conversation

TOKENIZER = a_character_tokenizer(CHATML)
USER = UserSpec(function="m:f", messages_max=2, reply_chars_max=50)
TASKS = TaskSet([Row("p", "gold", "row 0")], [], [], "d")
ALONE = Dialogue(TOKENIZER, (END,), 3, tools=False, user=USER)
BOTH = Dialogue(TOKENIZER, (END,), 6, user=USER)
LIMIT = 1500

CALLING = [*encoded(TOKENIZER, a_call(a=2, b=3)), END]
ANSWER = [*encoded(TOKENIZER, "it is 5"), END]
MESSAGE = ALONE.user_ids("sure?").tolist()
REPLY = BOTH.reply_ids(["5"]).tolist()
HONEST = (ANSWER, 1), (MESSAGE, 0), (ANSWER, 1)
KINDS = pytest.mark.parametrize("dialogue", [ALONE, BOTH], ids=["alone", "with tools"])


def rules(dialogue: Dialogue | None, told: Told | None = None) -> Rules:
    return Rules(frozenset({END}), len(TOKENIZER), TASKS, dialogue=dialogue, told_of=lambda _row: told)


def fault(rollout: Rollout, dialogue: Dialogue | None) -> StructureFault | None:
    task = a_task(group_size=1, params=SamplingParams(max_new_tokens=LIMIT))
    found = structure_fault(a_group(task, rollouts=(rollout,)), task, rules=rules(dialogue))
    return found[0] if found else None


@KINDS
def test_honest_conversations_are_sound(dialogue: Dialogue):
    assert fault(a_conversation(*HONEST), dialogue) is None
    assert fault(a_conversation((ANSWER, 1), (MESSAGE, 0), *HONEST), dialogue) is None
    assert fault(a_conversation((ANSWER, 1)), dialogue) is None


def test_tools_and_the_user_take_turns():
    both = a_conversation(
        (CALLING, 1), (REPLY, 0), (ANSWER, 1), (MESSAGE, 0), (CALLING, 1), (REPLY, 0), (ANSWER, 1)
    )
    assert fault(both, BOTH) is None


@KINDS
def test_a_message_called_the_policys_stands_behind_an_eos(dialogue: Dialogue):
    assert (
        fault(a_conversation((ANSWER, 1), (MESSAGE, 1), (ANSWER, 1)), dialogue) is StructureFault.EOS_INSIDE
    )


@KINDS
@pytest.mark.parametrize(
    "forged",
    [
        MESSAGE[1:],
        MESSAGE[:-1],
        encoded(TOKENIZER, "sure?"),
        REPLY,
        MESSAGE + ANSWER[:3],
        MESSAGE + ANSWER + MESSAGE,
        ALONE.user_ids("x" * 500).tolist(),
    ],
    ids=["no beginning", "no end", "no frame", "a tool's", "a turn begun", "a whole turn", "too long"],
)
def test_what_is_not_framed_as_the_users_is_found(dialogue: Dialogue, forged: list[int]):
    lie = a_conversation((ANSWER, 1), (forged, 0), (ANSWER, 1))
    assert fault(lie, dialogue) is StructureFault.REPLY_MALFORMED


@KINDS
@pytest.mark.parametrize("hidden", [1, 4])
def test_the_end_of_a_turn_cannot_be_hidden_in_a_message(dialogue: Dialogue, hidden: int):
    lie = a_conversation((ANSWER[:-hidden], 1), (ANSWER[-hidden:] + MESSAGE, 0), (ANSWER, 1))
    assert fault(lie, dialogue) is StructureFault.TURN_MALFORMED


def test_the_user_does_not_answer_for_a_tool():
    lie = a_conversation((CALLING, 1), (MESSAGE, 0), (ANSWER, 1))
    assert fault(lie, BOTH) is StructureFault.REPLY_MALFORMED
    assert fault(lie, ALONE) is None, "without tools it was no call"


def test_a_message_in_a_run_without_a_user_is_found():
    tools_alone = Dialogue(TOKENIZER, (END,), 6)
    assert fault(a_conversation(*HONEST), tools_alone) is StructureFault.REPLY_MALFORMED
    assert fault(a_conversation(*HONEST), None) is StructureFault.MASK_UNEXPECTED


def test_where_a_tool_speaks_as_the_user_the_turn_before_tells_them_apart():
    tokenizer = a_character_tokenizer(QWEN)
    both = Dialogue(tokenizer, (END,), 6, user=USER)
    reply = both.reply_ids(["5"]).tolist()
    assert fault(a_conversation((CALLING, 1), (reply, 0), (ANSWER, 1)), both) is None
    quoted = both.user_ids("<tool_response>\n5\n</tool_response>").tolist()
    assert fault(a_conversation((ANSWER, 1), (quoted, 0), (ANSWER, 1)), both) is None
    plain = both.user_ids("5").tolist()
    assert (
        fault(a_conversation((CALLING, 1), (plain, 0), (ANSWER, 1)), both) is StructureFault.REPLY_MALFORMED
    )


def test_more_messages_or_turns_than_the_run_allows_are_found():
    again = (ANSWER, 1), (MESSAGE, 0)
    called = (CALLING, 1), (REPLY, 0)
    assert fault(a_conversation(*again, *again, *called, (ANSWER, 1)), BOTH) is None
    for dialogue in (ALONE, BOTH):
        too_many = a_conversation(*again, *again, *again, (ANSWER, 1))
        assert fault(too_many, dialogue) is StructureFault.TURN_MALFORMED
    turns = a_conversation(*again, *again, *called, *called, *called, *called, (ANSWER, 1))
    assert fault(turns, BOTH) is StructureFault.TURN_MALFORMED


@pytest.mark.parametrize(
    ("due", "carried"),
    [
        (None, Told(prompt="p")),
        (Told(prompt="p"), None),
        (Told(prompt="p"), Told(prompt="p", columns={"answer": "gold"})),
        (Told(prompt="p", columns={"goal": "a"}), Told(prompt="p", columns={"goal": "b"})),
    ],
)
def test_a_task_that_tells_other_things_than_the_run_does_is_refused(due: Told | None, carried: Told | None):
    def found(told: Told | None) -> StructureFault | None:
        task = a_task(group_size=1, told=told)
        checked = structure_fault(a_group(task, rollouts=(a_rollout(),)), task, rules=rules(None, due))
        return checked[0] if checked else None

    assert found(carried) is StructureFault.PROMPT_MISMATCH
    assert found(due) is None
