"""``[user]`` in a run file: what it must not be is told in one line."""

from __future__ import annotations

import pytest

from tests.protocol.test_runspec import fault_of, with_setting


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        (
            "function = 'm:f'\ncolumns = ['answer']",
            "the file: user.columns names 'answer', the answers: ",
        ),
        ("function = 'm:f'\ncolumns = ['prompt']", "user.columns: the prompt is told anyway: leave it out"),
        ("function = 'm:f'\ncolumns = ['a', 'a']", "user.columns: each column may be listed once"),
        ("function = 'f'", "user.function: String should match pattern"),
        ("function = 'm:f'\nmessages_max = 0", "user.messages_max: "),
        ("function = 'm:f'\nturns_max = 3", "user.turns_max: no such setting; check the spelling"),
        ("messages_max = 3", "user.function: Field required"),
    ],
)
def test_a_user_that_cannot_be_is_told_in_one_line(setting: str, why: str):
    assert fault_of(with_setting("user", setting)).startswith(f"run.toml: {why}")


def test_a_user_needs_the_chat_template():
    text = with_setting("tasks", "template = '{prompt}'") + "\n[user]\nfunction = 'm:f'"
    why = "the chat template frames what the user says: leave tasks.template out"
    assert fault_of(text) == f"run.toml: the file: {why}"
