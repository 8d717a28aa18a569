"""How often is a verdict on mathematics right, by math-verify alone and with our guards around it?

Over ``tests/roles/verifier/rewards/math_verdicts.tsv``: golds, answers and right verdicts of our own, each
kind both ways. Alone, the library reads gold and completion with its defaults.
"""

from __future__ import annotations

import asyncio
import csv
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness import Figure, Goal, report, say
from roles.verifier.rewards.math import MathReward
from roles.verifier.rewards.reward import Item

TABLE = Path(__file__).parents[1] / "tests/roles/verifier/rewards/math_verdicts.tsv"


@dataclass(frozen=True, slots=True)
class Row:
    """A gold, what a model answered, and whether that is right. ``kind`` names what is hard about it."""

    kind: str
    gold: str
    answer: str
    right: bool

    @property
    def completion(self) -> str:
        """The answer in a box, unless boxes are what the row is about."""
        return self.answer if self.kind == "boxes" else rf"So we get \boxed{{{self.answer}}}."


def read_table(path: Path = TABLE) -> list[Row]:
    """All rows."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [Row(row["kind"], row["gold"], row["answer"], row["verdict"] == "right") for row in rows]


def by_library(row: Row) -> bool:
    """math-verify's own verdict."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${row.gold}$"), parse(row.completion)))


def by_us(row: Row) -> bool:
    """The math reward's verdict."""
    score = asyncio.run(MathReward().score(Item(row.completion, row.gold)))
    assert score.value is not None, f"no verdict on {row.gold}"
    return score.value == 1.0


def measure() -> None:
    """Compare and report; name what is wrong."""
    logging.disable(logging.WARNING)  # the library tells of each expression that it cannot read
    rows = read_table()
    alone, guarded = _wrong(rows, by_library), _wrong(rows, by_us)
    for row in guarded:
        say(f"wrong with guards: {row.kind}: gold {row.gold!r}, answer {row.answer!r}")
    kinds = Counter(row.kind for row in rows)
    wrong = Counter(row.kind for row in alone)
    figures: dict[str, Figure] = {
        "rows": len(rows),
        "agreement_before_guards": 1 - len(alone) / len(rows),
        "agreement_after_guards": 1 - len(guarded) / len(rows),
        "false_positives_before_guards": sum(not row.right for row in alone),
        "false_negatives_before_guards": sum(row.right for row in alone),
        **{
            f"wrong_before_guards/{kind}": f"{wrong[kind]} of {count}"
            for kind, count in sorted(kinds.items())
        },
    }
    report(figures, [Goal("agreement_after_guards", 1 - len(guarded) / len(rows), at_least=1.0)])


def _wrong(rows: Sequence[Row], verdict: Callable[[Row], bool]) -> list[Row]:
    return [row for row in rows if verdict(row) is not row.right]


if __name__ == "__main__":
    measure()
