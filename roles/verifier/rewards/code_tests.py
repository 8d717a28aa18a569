"""What a row says a program must do: calls with the value wanted, or whole runs with the output wanted.

Forms (docs/rewards.md): assert statements, JSON with ``inputs`` and ``outputs``, a JSON list of either. An
assertion becomes an expression, which the program's process evaluates, and a literal, which it never sees.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

TESTS_MAX = 200


class NotTests(ValueError):
    """The row's text cannot be read as tests that we can judge."""


@dataclass(frozen=True, slots=True)
class Call:
    """``expression`` must evaluate to ``wanted``, in the sense of ``how``."""

    expression: str
    wanted: Any
    how: Literal["equal", "differ", "close", "truth", "json"] = "equal"
    """``json``: tuples count as lists; ``truth``: only whether it is true; ``close``: numbers within
    ``rtol`` or ``atol``."""
    rtol: float = 0.0
    atol: float = 0.0

    def passes(self, value: Any) -> bool:
        """Whether a plain value is what is wanted."""
        match self.how:
            case "truth":
                return bool(value) is self.wanted
            case "json":
                return bool(_as_json(value) == self.wanted)
            case "close":
                close = _is_number(value) and math.isclose(
                    value, self.wanted, rel_tol=self.rtol, abs_tol=self.atol
                )
                return bool(close)
            case "differ":
                return bool(value != self.wanted)
        return bool(value == self.wanted)


@dataclass(frozen=True, slots=True)
class Program:
    """A whole run: what it reads and what it must print."""

    stdin: str
    stdout: str

    def passes(self, printed: str) -> bool:
        """Whether both outputs are the same lines, trailing white space aside."""
        return _lines(printed) == _lines(self.stdout)


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of a row; ``prelude`` are imports that its assertions need."""

    calls: tuple[Call, ...] = ()
    programs: tuple[Program, ...] = ()
    prelude: str = ""

    def __len__(self) -> int:
        """How many there are."""
        return len(self.calls) + len(self.programs)


def read_tests(given: Any) -> Tests:
    """Tests from a row's answer or its ``tests`` column. Raises NotTests."""
    if isinstance(given, str) and given.lstrip()[:1] in {"[", "{"}:
        try:
            given = json.loads(given)
        except ValueError as exc:
            raise NotTests(f"not JSON: {exc}") from exc
    if isinstance(given, str):
        tests = _from_assertions(given)
    elif isinstance(given, Mapping):
        tests = _from_inputs(given)
    elif isinstance(given, Sequence) and all(isinstance(one, str) for one in given):
        tests = _from_assertions("\n".join(given))
    elif isinstance(given, Sequence):
        tests = _from_cases(given)
    else:
        raise NotTests(f"a {type(given).__name__} is no tests")
    if len(tests) > TESTS_MAX:
        raise NotTests(f"{len(tests)} tests; at most {TESTS_MAX}")
    return tests


def _from_inputs(given: Mapping[str, Any]) -> Tests:
    inputs, outputs, name = given.get("inputs"), given.get("outputs"), given.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise NotTests("inputs and outputs must be lists of the same length")
    if name is None:
        return Tests(
            programs=tuple(Program(_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True))
        )
    if not isinstance(name, str) or not name.isidentifier():
        raise NotTests(f"fn_name {name!r} is no name")
    if not all(isinstance(arguments, list) for arguments in inputs):
        raise NotTests("with fn_name each input is a list of arguments")
    calls = (Call(f"{name}(*{i!r})", o, "json") for i, o in zip(inputs, outputs, strict=True))
    return Tests(calls=tuple(calls))


def _from_cases(cases: Sequence[Any]) -> Tests:
    try:
        return Tests(programs=tuple(Program(_text(one["input"]), _text(one["output"])) for one in cases))
    except (TypeError, KeyError) as exc:
        raise NotTests("each test is an assertion, or an object with input and output") from exc


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _from_assertions(text: str) -> Tests:
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise NotTests(f"not Python: {exc}") from exc
    imports = [ast.unparse(one) for one in statements if isinstance(one, ast.Import | ast.ImportFrom)]
    return Tests(calls=tuple(_calls(statements)), prelude="\n".join(imports))


def _calls(statements: Sequence[ast.stmt]) -> Iterator[Call]:
    for statement in statements:
        if isinstance(statement, ast.Assert):
            yield _call(statement.test)
        elif not isinstance(statement, ast.Import | ast.ImportFrom):
            raise NotTests(f"line {statement.lineno} is no assertion")


def _call(test: ast.expr) -> Call:
    match test:
        case ast.Compare(left, [ast.Eq() | ast.Is() | ast.NotEq() | ast.IsNot() as sign], [right]):
            how: Literal["equal", "differ"] = "equal" if isinstance(sign, ast.Eq | ast.Is) else "differ"
            for tested, wanted in ((left, right), (right, left)):
                if _is_literal(wanted):
                    return Call(ast.unparse(tested), ast.literal_eval(wanted), how)
        case ast.Compare(
            ast.Call(ast.Name("abs"), [ast.BinOp(left, ast.Sub(), right)]), [ast.Lt() | ast.LtE()], [bound]
        ) if _is_literal(right) and _is_literal(bound):
            return Call(
                ast.unparse(left), ast.literal_eval(right), "close", atol=float(ast.literal_eval(bound))
            )
        case ast.Call(
            ast.Name("isclose") | ast.Attribute(ast.Name("math"), "isclose"), [left, right], words
        ) if _is_literal(right) and all(_is_literal(word.value) for word in words):
            given = {word.arg: float(ast.literal_eval(word.value)) for word in words}
            rtol, atol = given.get("rel_tol", 1e-9), given.get("abs_tol", 0.0)
            return Call(ast.unparse(left), ast.literal_eval(right), "close", rtol, atol)
        case ast.UnaryOp(ast.Not(), ast.Call() as inner) if not _is_comparison(inner):
            return Call(ast.unparse(inner), wanted=False, how="truth")
        case ast.Call() if not _is_comparison(test):
            return Call(ast.unparse(test), wanted=True, how="truth")
    raise NotTests(f"cannot judge `{ast.unparse(test)[:80]}` outside the program: compare with a literal")


_COMPARISONS = frozenset(
    {"isclose", "allclose", "array_equal", "all", "any", "isinstance", "bool", "callable"}
)


def _is_comparison(call: ast.Call) -> bool:
    """Whether what is called is somebody's comparison, which the program could have replaced."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in _COMPARISONS


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return {str(key): _as_json(one) for key, one in value.items()} if isinstance(value, dict) else value
