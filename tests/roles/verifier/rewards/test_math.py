"""The math reward: ``math_verdicts.tsv`` holds golds, answers and right verdicts, each kind both ways."""

from __future__ import annotations

import pytest

from bench.math_verdicts import Row, read_table
from protocol.reasons import Unscorable
from roles.verifier.rewards.math import MathReward
from roles.verifier.rewards.math_text import last_boxed
from roles.verifier.rewards.reward import Item, Score

VERDICTS = read_table()
"""What is right is our decision (docs/rewards.md); ``python -m bench.math_verdicts`` tells how far the
library alone agrees."""


async def score(gold: str | None, completion: str) -> Score:
    return await MathReward().score(Item(completion, gold))


@pytest.mark.parametrize("row", VERDICTS, ids=lambda row: f"{row.kind}: {row.answer} for {row.gold}")
async def test_verdict(row: Row):
    assert (await score(row.gold, row.completion)).value == float(row.right)


def test_the_table_has_each_kind_both_ways():
    kinds = {row.kind for row in VERDICTS}
    assert {(row.kind, row.right) for row in VERDICTS} == {
        (kind, right) for kind in kinds for right in (True, False)
    }
    assert len(VERDICTS) >= 150


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"first \boxed{2}, so \boxed{3}", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{}", ""),
        (r"\boxed{2} and then \boxed{3", "2"),
        (r"\boxed{\boxed{4}}", "{4}"),
        (r"{ \boxed {5} } }", "5"),
        (r"\fbox{6}", "6"),
        ("7", None),
    ],
)
def test_the_last_balanced_box_wins(completion: str, answer: str | None):
    assert last_boxed(completion) == answer


async def test_an_unclosed_box_scores_zero():
    assert (await score(r"\frac12", r"\boxed{\frac{1}{2}")).value == 0.0


async def test_an_answer_outside_a_box_scores_zero():
    assert await score("5", "The answer is 5.") == Score(0.0, note="no boxed answer")


@pytest.mark.parametrize("completion", [r"\boxed{5}", "", r"\boxed{}", r"\boxed{see above}"])
@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        ("", Unscorable.NO_ANSWER),
        (None, Unscorable.NO_ANSWER),
        ("  ", Unscorable.NO_ANSWER),
        (r"\boxed{}", Unscorable.NO_ANSWER),
        ("see above", Unscorable.GOLD_UNPARSEABLE),
        (r"\frac{1}{0}", Unscorable.GOLD_UNPARSEABLE),
        (r"\frac{1}{", Unscorable.GOLD_UNPARSEABLE),
        ("Answers vary, e.g. 5", Unscorable.GOLD_UNPARSEABLE),
        ("5" * 3000, Unscorable.GOLD_UNPARSEABLE),
    ],
)
async def test_a_gold_that_is_no_mathematics_is_never_scored(
    gold: str | None, reason: Unscorable, completion: str
):
    found = await score(gold, completion)
    assert (found.value, found.unscorable) == (None, reason)


async def test_ten_thousand_open_boxes_are_searched_in_one_pass():
    assert (await score("5", r"\boxed{" * 10_000 + "}" * 9_999)).value == 0.0
