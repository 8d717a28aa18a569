r"""From a completion to the text of its answer: the last box, tidied, with its unit split off.

Everything here works on text and knows no algebra.
"""

from __future__ import annotations

import re
import unicodedata

_BOX_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""What the ``\boxed{…}`` that closes last contains, inner boxes opened; None if none is closed."""
    opened: list[int | None] = []
    found: str | None = None
    for token in _BOX_TOKEN.finditer(text):
        if token["box"]:
            opened.append(token.end())
        elif token["open"]:
            opened.append(None)
        elif token["close"] and opened:
            start = opened.pop()
            if start is not None:
                found = text[start : token.start()]
    if found is None:
        return None
    return re.sub(r"\\(?:boxed|fbox)\s*(?=\{)", "", found)


_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
    "°": r"^\circ", "√": r"\sqrt ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "∈": r"\in ", "∅": r"\emptyset ", "\u00a0": "~", "\u202f": r"\,", "\u2009": r"\,",
}  # fmt: skip

_DECORATION = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|!|hspace\{[^{}]*\}|hphantom\{[^{}]*\})(?![a-zA-Z])"
)
_FONT = re.compile(
    r"\\(?:mathrm|mathbf|mathit|mathsf|mathnormal|boldsymbol|bm|textbf|textit|textrm|mbox|operatorname)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_NUMBER_IN_FONT = re.compile(r"\\text\s*\{\s*([-+\d.,/]+)\s*\}")
_DEGREES_OF = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc))\s*[({]?\s*(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?\s*[)}]?"
)
_SPACE = r"(?:(?<!\\)\\[,;: ]|~|\\quad|\\qquad|\{,\}|\s)"
_GROUPED = re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:{_SPACE}+\d{{3}})+(?!\d)")
_COMMA_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\\\d.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![A-Za-z\d.])")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")


def tidied(text: str) -> str:
    """``text`` without what does not change its meaning, and with one spelling for each thing."""
    text = unicodedata.normalize("NFC", text)
    for symbol, latex in _SYMBOLS.items():
        text = text.replace(symbol, latex)
    text = _unwrapped(text.strip())
    text = _DECORATION.sub("", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = _FONT.sub(_without_font, text)
    text = _NUMBER_IN_FONT.sub(r"\1", text)
    text = _DEGREES_OF.sub(r"\1(\\frac{\2\\pi}{180})", text)
    text = re.sub(r"\\lbrace(?![a-zA-Z])", r"\\{", text)
    text = re.sub(r"\\rbrace(?![a-zA-Z])", r"\\}", text)
    text = text.replace(r"\$", "").replace("\\cdots", "\\ldots")
    text = _GROUPED.sub(lambda m: re.sub(_SPACE, "", m[0]), text)
    text = _commas_opened(text)
    text = re.sub(rf"{_SPACE}+", " ", text)
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    text = _REPEATING.sub(_as_fraction, text)
    return text.strip().rstrip(".,;:").strip()


def _unwrapped(text: str) -> str:
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = text[len(left) : -len(right)]
        closed = text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right)
        if closed and left not in inner and not inner.endswith("\\"):
            return inner.strip()
    return text


def _without_font(match: re.Match[str]) -> str:
    r"""One letter or a command stands for itself in any font; a word is text, not a product of letters."""
    inner = match[1].strip()
    return rf"\text{{{inner}}}" if re.fullmatch(r"[A-Za-z][A-Za-z .\-']+", inner) else f" {inner}"


def _commas_opened(text: str) -> str:
    """``1,234`` to ``1234`` outside brackets; inside them a comma separates members."""

    def merge(match: re.Match[str]) -> str:
        return match[0] if depth(text[: match.start()]) else match[0].replace(",", "")

    return _COMMA_GROUPED.sub(merge, text)


def depth(text: str) -> int:
    """How many brackets ``text`` leaves open; half-open intervals count any closing bracket."""
    return len(re.findall(r"\\\{|[(\[]", text)) - len(re.findall(r"\\\}|[)\]]", text))


def _as_fraction(match: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` is (16 - 1) / 90."""
    whole, head, tail = match[1] or "0", match[2], match[3]
    numerator = int(whole + head + tail) - int(whole + head)
    return rf"\frac{{{numerator}}}{{{'9' * len(tail) + '0' * len(head)}}}"


_UNIT = re.compile(
    r"\s*(?P<unit>(?:\\text\s*\{[^{}]*[A-Za-z%][^{}]*\}(?:\s*\^\s*\{?\d\}?)?"
    r"|\\%|%|\^\s*\{?\s*\\circ\s*\}?(?:\s*[CF])?|\\degree|\\circ)+)$"
)
_WORDS_AFTER_NUMBER = re.compile(r"(?<=[\d}])\s+(?P<unit>[A-Za-z]{2,}(?:[ .][A-Za-z]+){0,3})$")
_BASE = re.compile(r"(?<=[0-9A-Z])_\{?(?P<unit>\d{1,2})\}?$")
_SAME_UNIT = {
    "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "mile": "mi", "meter": "m", "metre": "m",
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "kilometer": "km", "kilometre": "km",
    "hour": "h", "hr": "h", "minute": "min", "second": "s", "sec": "s", "gram": "g", "kilogram": "kg",
    "degree": "deg", "circ": "deg", "dollar": "usd", "cent": "¢", "squareunit": "unit2", "cubicunit": "unit3",
    "percent": "%", "pct": "%", "liter": "l", "litre": "l", "pound": "lb",
}  # fmt: skip


def unit_split(text: str) -> tuple[str, str | None]:
    r"""A tidied text without its trailing unit, and the unit in one spelling: ``5\text{ cm}`` is (5, cm)."""
    for pattern in (_UNIT, _WORDS_AFTER_NUMBER, _BASE):
        found = pattern.search(text)
        if found and text[: found.start()].strip():
            core = text[: found.start()].strip()
            if pattern is _BASE:
                return (core, f"base {found['unit']}") if re.fullmatch(r"-?[0-9A-Z]+", core) else (text, None)
            return core, _unit_name(found["unit"])
    return text, None


def _unit_name(unit: str) -> str:
    name = re.sub(r"\\text|[^A-Za-z0-9%]", "", unit).lower()
    singular = name[:-1] if name.endswith("s") and len(name) > 1 else name
    return _SAME_UNIT.get(singular, singular)
