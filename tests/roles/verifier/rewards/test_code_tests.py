"""Which texts are tests, and which part of a completion is the program."""

from __future__ import annotations

import pytest

from roles.verifier.rewards.code import last_block
from roles.verifier.rewards.code_tests import NotTests, read_tests


@pytest.mark.parametrize(
    "tests",
    [
        "assert f(1) == f(2)",
        "assert all(f(x) for x in [1, 2])",
        "check(f)",
        "see above",
        "assert isinstance(f(1), int)",
        "[1",
        '{"inputs": []}',
        '[{"input": 1}]',
        '{"fn_name": "f(", "inputs": [], "outputs": []}',
        "assert f(1) == 1\n" * 201,
    ],
)
def test_tests_that_cannot_be_judged_from_outside_are_refused(tests: str):
    with pytest.raises(NotTests):
        read_tests(tests)


@pytest.mark.parametrize(
    ("completion", "block"),
    [
        ("```python\na\n```\n\n```py\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("a = 1", None),
    ],
)
def test_the_last_closed_block_is_the_program(completion: str, block: str | None):
    assert last_block(completion) == block
