r"""The math reward: a table of golds, answers and right verdicts, each kind both ways.

Rows marked (L) are those that math-verify 0.9 by itself gets wrong.
"""

from __future__ import annotations

import pytest

from protocol.reasons import Unscorable
from roles.verifier.rewards.math import MathReward
from roles.verifier.rewards.math_text import last_boxed
from roles.verifier.rewards.reward import Item, Score

RIGHT, WRONG = True, False

VERDICTS: list[tuple[str, str, bool]] = [
    # integers and decimals
    ("42", "42", RIGHT),
    ("42", "42.", RIGHT),  # (L) trailing full stop
    ("42", "42.0", RIGHT),
    ("42", "-42", WRONG),
    ("42", "43", WRONG),
    ("-7", "−7", RIGHT),
    ("0.5", r"\frac{1}{2}", RIGHT),
    (r"\frac{1}{3}", "0.333333", RIGHT),
    (r"\frac{1}{3}", "0.33", WRONG),
    ("3.14159", "3.14", WRONG),
    (".5", "0.5", RIGHT),
    (r"0.\overline{3}", r"\frac13", RIGHT),
    (r"\frac{1}{6}", r"0.1\overline{6}", RIGHT),
    ("1500", "1.5e3", RIGHT),
    ("1500", r"1.5 \times 10^3", RIGHT),
    ("1500", r"1.5 \times 10^4", WRONG),
    # fractions and roots
    (r"\frac{1}{2}", r"\dfrac{1}{2}", RIGHT),
    (r"\frac12", "1/2", RIGHT),
    (r"\frac{1}{2}", r"\frac{1}{3}", WRONG),
    (r"\frac{5}{2}", r"2\frac{1}{2}", RIGHT),
    (r"2\sqrt{2}", r"\sqrt{8}", RIGHT),
    (r"2\sqrt{2}", r"\sqrt{6}", WRONG),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", RIGHT),
    # tiny and huge numbers
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", WRONG),  # (L) absolute tolerance
    (r"\frac{1}{2^{99}}", r"2^{-99}", RIGHT),
    (r"10^{-20}x", r"10^{-21}x", WRONG),  # (L)
    ("0.000001", "0.0000014", WRONG),  # (L)
    ("10^{20}", "10^{20}+1", WRONG),
    # thousands
    ("802", r"1\,234\,567", WRONG),  # (L) read as a sum
    ("1234567", r"1\,234\,567", RIGHT),  # (L)
    ("1234567", "1,234,567", RIGHT),
    ("1234567", "1{,}234{,}567", RIGHT),
    ("5", "2 3", WRONG),  # (L) read as a mixed number
    ("(1,234)", "(1, 234)", RIGHT),
    # constants, letters, and what a common prefix hides
    (r"1 - \frac{1}{\mathrm{e}}", r"1 - \frac{1}{\mathrm{\pi}}", WRONG),  # (L) cut and compared as text
    (r"1 - \frac{1}{\mathrm{e}}", r"1 - e^{-1}", RIGHT),  # (L)
    (r"\frac{\pi}{2}", "π/2", RIGHT),
    (r"2\pi", r"2", WRONG),
    ("x^2+2x+1", "(x+1)^2", RIGHT),
    ("x^2+2x+1", "(x-1)^2", WRONG),
    ("2xy", "2yx", RIGHT),
    ("x+1", "y+1", WRONG),
    ("2+3i", "3i+2", RIGHT),
    ("2+3i", "2-3i", WRONG),
    ("-1", "i^2", RIGHT),
    (r"\sin^2 x + \cos^2 x", "1", RIGHT),
    # points, intervals, sets, lists
    ("(1,2)", "(1,2)", RIGHT),
    ("(1,2)", r"\{1,2\}", WRONG),  # (L)
    ("(1,2)", "(2,1)", WRONG),
    ("(1,2)", "[1,2]", WRONG),
    ("(1,2)", "1,2", WRONG),  # (L)
    ("[1,2)", r"\left[1, 2\right)", RIGHT),
    ("[1,2)", "[1,2]", WRONG),
    (r"\left(\frac12, 3\right)", "(0.5, 3)", RIGHT),
    (r"\{1,2\}", r"\{2,1\}", RIGHT),
    (r"\{1,2\}", "2, 1", RIGHT),
    (r"\{1,2\}", r"\{1,2,3\}", WRONG),
    (r"\{1,2,3\}", r"\{1,2\}", WRONG),
    ("1, -1", r"\pm 1", RIGHT),
    (r"1 \pm \sqrt{2}", r"1-\sqrt2 \text{ and } 1+\sqrt2", RIGHT),
    (r"1 \pm \sqrt{2}", r"1+\sqrt2", WRONG),
    ("2", "1, 2, 3, 4", WRONG),
    ("2", r"\{2\}", RIGHT),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty) \cup (-\infty,1)", RIGHT),
    (r"(-\infty,1)\cup(2,\infty)", r"(-\infty,1)\cup[2,\infty)", WRONG),
    (r"(-\infty, 5]", r"x \le 5", RIGHT),
    (r"(-\infty, 5]", r"x < 5", WRONG),
    (r"(1,2), (3,4)", "(3,4),(1,2)", RIGHT),
    (r"\emptyset", r"\{\}", RIGHT),
    (r"x \in [0,1]", "[0,1]", RIGHT),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", RIGHT),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", WRONG),
    # equations and inequalities
    ("5", "x = 5", RIGHT),
    ("x = 5", "5", RIGHT),
    ("x = 5", "y = 5", WRONG),
    ("5", "2 + 3 = 5", RIGHT),
    ("5", "3 = 5", WRONG),  # (L) only the last side was looked at
    ("5", "x = 3 = 5", WRONG),  # (L)
    ("y = 2x + 1", "2x - y + 1 = 0", RIGHT),
    ("y = 2x + 1", "y = 2x - 1", WRONG),
    ("x^2 = -1", "x^2 = -4", WRONG),  # (L) both without real solutions
    ("x < 2", "2 > x", RIGHT),
    ("x < 2", r"x \le 2", WRONG),
    # units, percent, money
    ("5", r"5\text{ cm}", RIGHT),
    (r"5\text{ cm}", "5", RIGHT),
    (r"5\text{ cm}", r"5\text{ m}", WRONG),  # (L) units dropped
    (r"5\text{ inches}", r"5 \text{ in.}", RIGHT),
    ("3", "3 apples", RIGHT),
    ("90", r"90^\circ", RIGHT),
    ("50", r"50\%", RIGHT),
    ("0.5", r"50\%", RIGHT),
    (r"50\%", r"\frac12", RIGHT),
    (r"50\%", "5", WRONG),
    ("5", r"\$5.00", RIGHT),
    ("12_5", "12", RIGHT),
    ("12_5", "12_7", WRONG),  # (L) the base was dropped
    # words
    (r"\text{Friday}", "friday", RIGHT),
    (r"\text{Friday}", r"\text{Monday}", WRONG),
    ("B", r"\text{(B)}", RIGHT),
    ("(B)", "C", WRONG),
    ("even", r"\text{even}", RIGHT),
    ("5", "the answer is 5", WRONG),
    ("5", "", WRONG),
    # decoration
    (r"$\frac{1}{2}$", r"\displaystyle\frac{1}{2}", RIGHT),
    (r"\boxed{7}", r"\textbf{7}", RIGHT),
    ("Half of 14.\n#### 7", "7", RIGHT),
    ("(x+1)(x-2)", r"\left(x+1\right)\left(x-2\right)", RIGHT),
]


async def score(gold: str | None, completion: str) -> Score:
    return await MathReward().score(Item(completion, gold))


@pytest.mark.parametrize(("gold", "answer", "right"), VERDICTS)
async def test_verdict(gold: str, answer: str, right: bool):
    assert (await score(gold, rf"So we get \boxed{{{answer}}}.")).value == float(right)


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
