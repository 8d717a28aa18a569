r"""The shape of an answer: list, set, point, interval, union, text or scalar, read from its text.

``read`` splits a tidied text at its outer brackets and commas until only scalars are left. SymPy never sees
the brackets, so it cannot mistake a point for an interval or a set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from roles.verifier.rewards.math_text import depth, tidied, unit_split

MEMBERS_MAX = 64
"""Members of one list; unordered comparison tries each against each."""

NESTING_MAX = 6

_MEMBERSHIP = re.compile(r"^[A-Za-z](?:_\{?\w+\}?)?\s*\\in(?![a-z])\s*")
_CONJUNCTION = re.compile(
    r"\s*(?:,\s*)?(?:\\text\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*"
)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z][A-Za-z\-']*")
_BRACKET = re.compile(r"(?P<open>\\\{|\\langle|[({\[])|(?P<close>\\\}|\\rangle|[)}\]])|\\.")
_FUNCTIONS = frozenset({"sqrt", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "asin", "acos", "atan"})
_PROSE_WORD = 4
_SIDE_BY_SIDE = re.compile(r"(?<![_\d])\d+\s+\d")
"""Two numbers with a space between: the parser would add them as a mixed number."""
_ELLIPSIS = re.compile(r"\\l?dots|\.\.\.|…")
"""The parser would drop it."""


@dataclass(frozen=True, slots=True)
class Node:
    """One level of an answer.

    ``kind`` is ``scalar``, ``text``, ``prose``, ``list``, ``set``, ``union``, or the brackets of something
    ordered (``()``, ``[]``, ``(]``, ``[)``). ``word`` is the lower-case text where the answer is in words.
    """

    kind: str
    text: str
    members: tuple[Node, ...] = ()
    unit: str | None = None
    word: str | None = None


def read(text: str) -> Node | None:
    """The structure of an answer, or None for unbalanced brackets, an ellipsis, and more than we compare."""
    return _read(tidied(text), NESTING_MAX)


def _read(text: str, levels: int) -> Node | None:
    if not text or not levels:
        return None
    text = _MEMBERSHIP.sub("", text)
    if r"\begin" in text:
        return Node("scalar", text)
    for kind, parts in _split(text):
        if len(parts) > 1:
            return _of(kind, text, parts, levels)
    if r"\pm" in text or r"\mp" in text:
        signs = (("+", "-"), ("-", "+"))
        parts = [_plus_minus(text, upper, lower) for upper, lower in signs]
        return _of("list", text, parts, levels)
    word = _word(text)
    if word is not None and _TEXT.search(text):
        return Node("text", text, word=word)
    core, unit = unit_split(text)
    bracketed = _bracketed(core, levels)
    if bracketed is not None:
        return Node(bracketed.kind, bracketed.text, bracketed.members, unit or bracketed.unit, bracketed.word)
    return _scalar(core, unit, word)


def _split(text: str) -> Iterator[tuple[str, list[str]]]:
    yield "union", _parts(text, re.compile(r"\\cup(?![a-z])"))
    yield "list", _parts(_conjoined(text), re.compile("[,;]"))


def _conjoined(text: str) -> str:
    return _CONJUNCTION.sub(",", text) if _word(text) is None else text


def _of(kind: str, text: str, parts: list[str], levels: int) -> Node | None:
    members = [_read(part.strip(), levels - 1) for part in parts[: MEMBERS_MAX + 1]]
    if len(members) > MEMBERS_MAX or any(member is None for member in members):
        return None
    return Node(kind, text, tuple(member for member in members if member is not None))


def _bracketed(text: str, levels: int) -> Node | None:
    """The node of a text that is one pair of brackets from its first to its last character."""
    if re.fullmatch(r"\\emptyset|\\varnothing|\\\{\s*\\\}", text):
        return Node("set", text)
    pair = re.fullmatch(r"(\\\{|\\langle|[(\[{])(.*?)(\\\}|\\rangle|[)\]}])", text, re.DOTALL)
    if pair is None or not _closes_last(text):
        return None
    left, inner, right = pair[1], pair[2].strip(), pair[3]
    parts = _parts(inner, re.compile("[,;]"))
    if (left, right) == (r"\{", r"\}"):
        return _of("set", text, parts, levels)
    if (left, right) == ("{", "}") or ((left, right) == ("(", ")") and len(parts) == 1):
        return _read(inner, levels - 1)
    kind = "()" if left == r"\langle" else left + right
    return _of(kind, text, parts, levels) if kind in {"()", "[]", "(]", "[)"} else None


def _closes_last(text: str) -> bool:
    """Whether the first bracket is closed by the last character and not before."""
    level = 0
    for token in _BRACKET.finditer(text):
        level += 1 if token["open"] else -1 if token["close"] else 0
        if level == 0:
            return token.end() == len(text)
    return False


def _parts(text: str, separator: re.Pattern[str]) -> list[str]:
    """``text`` split at separators outside all brackets."""
    parts, start, level = [], 0, 0
    both = re.compile(f"(?P<separator>{separator.pattern})|{_BRACKET.pattern}")
    for token in both.finditer(text):
        if token["separator"] and level == 0:
            parts.append(text[start : token.start()])
            start = token.end()
        level += 1 if token["open"] else -1 if token["close"] else 0
    return [*parts, text[start:]]


def _plus_minus(text: str, upper: str, lower: str) -> str:
    return re.sub(r"\\mp(?![a-z])", lower, re.sub(r"\\pm(?![a-z])", upper, text)).strip()


def _word(text: str) -> str | None:
    r"""The lower-case words of an answer that is all words: ``\text{(B)}``, ``Friday``, ``B``."""
    bare = _TEXT.sub(lambda m: m[1], text)
    plain = re.sub(r"\s+", " ", bare.strip(" ().'\"")).lower()
    if _TEXT.search(text):
        return plain if re.fullmatch(r"[a-z][a-z0-9 \-']*", plain) else None
    return plain if _WORD.fullmatch(plain) else None


def _scalar(text: str, unit: str | None, word: str | None) -> Node | None:
    if depth(text) or _SIDE_BY_SIDE.search(text) or _ELLIPSIS.search(text):
        return None
    if word is not None and len(word) >= _PROSE_WORD and word not in _FUNCTIONS:
        return Node("text", text, word=word)
    bare = _TEXT.sub(" ", text)
    words = re.findall(r"(?<![A-Za-z])[A-Za-z]{2,}(?![A-Za-z])", re.sub(r"\\[A-Za-z]+", " ", bare))
    long = [w for w in words if len(w) >= _PROSE_WORD and w.lower() not in _FUNCTIONS]
    if long or re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}", bare):
        return Node("prose", text, word=re.sub(r"\s+", " ", text).strip(" .'\"").lower())
    return Node("scalar", text, unit=unit, word=word)
