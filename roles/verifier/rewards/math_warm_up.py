r"""Mathematics that a template reads before it forks workers: the parser learns its grammar as it goes.

ANTLR's parsers cache each decision that they meet; the first ``\int`` costs a quarter of a second and the
second a few milliseconds. What the template has met, all its workers know.
"""

from __future__ import annotations

from roles.verifier.rewards.math_compare import readable, same
from roles.verifier.rewards.math_structure import read

_PAIRS = (
    ("12", "12.0"), (r"\frac{1}{3}", "0.333333"), ("1/4", r"\frac{x}{4}"), (r"3\sqrt{2}", r"\sqrt{18}"),
    (r"\sqrt[3]{5}", r"5^{\frac{1}{3}}"), (r"-\frac{7}{2}", "-3.5"), ("2^{10}", "1024"),
    ("x^2+3x+2", "(x+1)(x+2)"), (r"\frac{x+1}{x-1}", r"1 + \frac{2}{x-1}"), ("x = 5", "5"),
    ("y = 2x + 1", "2x - y + 1 = 0"), ("x < 2", "2 > x"), (r"x \le 3", r"x \ge 3"),
    (r"1 < x \leq 4", "(1,4]"), (r"(-\infty, 5]", r"x \le 5"), (r"x \ne 1", "1"),
    ("(1,2)", r"(1, \frac{4}{2})"), (r"\{1,2,3\}", "3, 2, 1"), (r"[0,1) \cup (2,3)", r"(2,3)\cup[0,1)"),
    (r"1 \pm \sqrt{2}", r"1-\sqrt2, 1+\sqrt2"), (r"\frac{\pi}{2}", r"0.5\pi"),
    (r"2\pi r^2", r"2 \cdot \pi \cdot r^{2}"), ("e^{2x}", "(e^x)^2"), (r"\ln 2", r"\log_e(2)"),
    (r"\log_{2} 8", "3"), (r"\log 100", "2"), (r"\sin^2 x + \cos^2 x", "1"),
    (r"\tan\left(\frac{\pi}{4}\right)", "1"), (r"\arctan x", r"\tan^{-1} x"),
    (r"\sec \theta", r"\frac{1}{\cos \theta}"), ("2+3i", "3i+2"), (r"e^{i\pi}", "-1"),
    (r"\overline{z}", "z"), ("|x-1|", r"\left|1-x\right|"), (r"\binom{5}{2}", "10"), ("5!", "120"),
    (r"\lfloor 2.5 \rfloor", "2"), (r"\lceil x \rceil", "x"), (r"\int_0^1 x^2 dx", r"\frac{1}{3}"),
    (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}"), (r"\lim_{x \to 0} \frac{\sin x}{x}", "1"),
    (r"\frac{d}{dx} x^2", "2x"), (r"\prod_{k=1}^{3} k", "6"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    ("a_1 + a_{2}", "a_2 + a_1"), (r"1.5 \times 10^{3}", "1500"), (r"50\%", "0.5"), (r"90^\circ", "90"),
    ("f(x) = x + 1", "x + 1"), (r"\alpha\beta + \gamma", r"\gamma + \beta\alpha"),
    (r"x \equiv 1 \pmod{3}", "1"), (r"\infty", r"-\infty"), (r"\text{Friday}", "Monday"),
    (r"\emptyset", "0"), (r"\gcd(4,6)", "2"), (r"\sqrt{x^2+1} - x", r"\frac{1}{\sqrt{x^2+1}+x}"),
    (r"2\frac{1}{2}", "2.5"), (r"x \in \mathbb{R}", r"\mathbb{R}"), ("3:4", r"\frac{3}{4}"),
    (r"\frac{a}{b} + c", r"\frac{a + bc}{b}"),
)  # fmt: skip


def warm_up() -> None:
    """Read and compare all pairs, and forget the verdicts."""
    for gold, answer in _PAIRS:
        wanted, found = read(gold), read(answer)
        if wanted is not None and found is not None and readable(wanted):
            same(wanted, found)
