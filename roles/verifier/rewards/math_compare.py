"""Whether two answers mean the same: structure by us, algebra by math-verify, magnitude by us again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from math_verify import verify
from sympy.core.relational import Equality, Relational

from roles.verifier.rewards.latex import parsed
from roles.verifier.rewards.math_structure import Node

EXACT_RTOL = 1e-12
DECIMAL_RTOL = 1e-4
REFUTED_RTOL = 1e-3
DECIMAL_PLACES = 6
"""math-verify rounds a decimal to this many places; alone that equates all small numbers."""

NOISE = 1e-90
"""Numbers below are what is left of a cancellation, as in sin(pi)."""

DIGITS = 30
"""Decimal digits to which numbers are evaluated before they are compared."""

_UNORDERED = frozenset({"list", "set"})
_POINTS = (1.3707, 2.2913, 0.6131)
"""Where symbolic expressions are evaluated to check an algebraic verdict: nowhere special."""

_NUMERIC_FAULTS = (
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    NotImplementedError,
    RecursionError,
)


def readable(gold: Node) -> bool:
    """Whether every scalar in ``gold`` is mathematics."""
    if gold.kind == "scalar":
        return parsed(gold.text) is not None
    if gold.kind == "prose":
        return False
    return all(readable(member) for member in gold.members)


def same(gold: Node, answer: Node) -> bool:
    """Whether ``answer`` means ``gold``; not symmetric, equations follow the gold's form."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.word and answer.word:
        return gold.word == answer.word or (
            gold.kind == answer.kind == "scalar" and _same_scalar(gold, answer)
        )
    if len(_UNORDERED & {gold.kind}) != len(_UNORDERED & {answer.kind}):
        gold, answer = _single(gold), _single(answer)
    if gold.kind == answer.kind == "scalar":
        return _same_scalar(gold, answer)
    if {gold.kind, answer.kind} <= _UNORDERED or gold.kind == answer.kind == "union":
        return _each_has_equal(gold.members, answer.members) and _each_has_equal(answer.members, gold.members)
    if gold.kind == answer.kind and len(gold.members) == len(answer.members) > 0:
        return all(same(g, a) for g, a in zip(gold.members, answer.members, strict=True))
    return _same_set_and_relation(gold, answer)


def _single(node: Node) -> Node:
    return node.members[0] if node.kind in _UNORDERED and len(node.members) == 1 else node


def _each_has_equal(these: Sequence[Node], those: Sequence[Node]) -> bool:
    return all(any(same(this, that) for that in those) for this in these)


def _same_set_and_relation(gold: Node, answer: Node) -> bool:
    """``1 < x < 2`` against the interval; other mixtures of kinds differ."""
    if {gold.kind, answer.kind} & {"text", "prose", "list", "set"} or "scalar" not in {
        gold.kind,
        answer.kind,
    }:
        return False
    return _verified(parsed(gold.text), parsed(answer.text), mixed=True)


def _same_scalar(gold: Node, answer: Node) -> bool:
    wanted, found = parsed(gold.text), parsed(answer.text)
    if _agree(wanted, found):
        return True
    if gold.unit == answer.unit or "%" not in {gold.unit, answer.unit}:
        return False
    hundredth = sympy.Rational(1, 100)
    if gold.unit == "%" and answer.unit is None:
        return isinstance(wanted, sympy.Expr) and _agree(wanted * hundredth, found)
    return answer.unit == "%" and isinstance(found, sympy.Expr) and _agree(wanted, found * hundredth)


def _agree(gold: Any, answer: Any) -> bool:
    if gold is None or answer is None:
        return False
    sides = _sides(answer)
    if sides and not isinstance(gold, Relational | And):
        numbers = [side for side in sides if not side.free_symbols]
        return all(_agree(gold, side) for side in numbers or sides[-1:])
    return not _refuted(gold, answer) and _verified(gold, answer) and _confirmed(gold, answer)


def _sides(value: Any) -> list[Any]:
    """The sides of an equation or chain of equations; empty for anything else."""
    links = list(value._unsorted_args) if isinstance(value, And) else [value]  # noqa: SLF001 its only order
    if not links or not all(isinstance(link, Equality) for link in links):
        return []
    return [links[0].lhs, *(link.rhs for link in links)]


def _verified(gold: Any, answer: Any, *, mixed: bool = False) -> bool:
    if gold is None or answer is None:
        return False
    return bool(
        verify(
            gold,
            answer,
            float_rounding=DECIMAL_PLACES,
            strict=True,
            allow_set_relation_comp=mixed,
            timeout_seconds=None,
        )
    )


def _refuted(gold: Any, answer: Any) -> bool:
    """Whether two expressions differ plainly at a point; spares most wrong answers the costly algebra."""
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return False
    if gold.free_symbols != answer.free_symbols:
        return False
    values = _value(gold, _POINTS[0]), _value(answer, _POINTS[0])
    return None not in values and not _close(*values, REFUTED_RTOL)


def _confirmed(gold: Any, answer: Any) -> bool:
    """A second look at a positive verdict, which the library gives on absolute differences."""
    if isinstance(gold, Equality) and isinstance(answer, Equality):
        return _equations_confirmed(gold, answer)
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return True
    rtol = DECIMAL_RTOL if gold.has(sympy.Float) or answer.has(sympy.Float) else EXACT_RTOL
    pairs = [(_value(gold, point), _value(answer, point)) for point in _POINTS]
    known = [(g, a) for g, a in pairs if g is not None and a is not None]
    return all(_close(g, a, rtol) for g, a in known)


def _equations_confirmed(gold: Equality, answer: Equality) -> bool:
    """Two unsolvable equations have equal (empty) solutions; they must then be multiples of each other."""
    if gold == answer:
        return True
    residues = [(_value(gold.lhs - gold.rhs, p), _value(answer.lhs - answer.rhs, p)) for p in _POINTS]
    ratios = [g / a for g, a in residues if g is not None and a]
    if len(ratios) == len(_POINTS) and all(_close(ratios[0], ratio, EXACT_RTOL) for ratio in ratios):
        return True
    try:
        return bool(sympy.solve(gold, gold.free_symbols))
    except _NUMERIC_FAULTS:
        return False


def _value(expression: Any, point: float) -> Any | None:
    """The number at a point where each symbol has a value that follows from its name; None if it has none."""
    try:
        at = {
            s: sympy.Rational(point) + sympy.Rational(sum(map(ord, s.name)), 211)
            for s in expression.free_symbols
        }
        number = expression.subs(at).doit().evalf(DIGITS)
    except _NUMERIC_FAULTS:
        return None
    return number if number.is_number and number.is_finite else None


def _close(one: Any, other: Any, rtol: float) -> bool:
    scale = max(abs(one), abs(other))
    return bool(scale < NOISE or abs(one - other) <= rtol * scale)
