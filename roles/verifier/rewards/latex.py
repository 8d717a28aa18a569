"""LaTeX to SymPy: the one place that calls the parser, and translates its failures to None."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

_NORMALIZATION = NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none")
_CONVERSION = ConversionConfig(lowercase_symbols=False)


@lru_cache(maxsize=256)
def parsed(text: str) -> Any | None:
    """The SymPy expression, relation, set or matrix of a LaTeX text; None if it has none.

    ``i`` is the imaginary unit unless an index of a sum; infinities of the complex plane and NaN are None.
    """
    if not text.strip():
        return None
    try:
        value = latex2sympy(
            text, is_real=True, normalization_config=_NORMALIZATION, conversion_config=_CONVERSION
        )
        if re.search(r"(?<![a-zA-Z\\])i(?![a-zA-Z])", text) and hasattr(value, "free_symbols"):
            value = value.subs({s: sympy.I for s in value.free_symbols if s.name == "i"})
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 the parser raises bare Exception on text that it cannot read
        return None
    return None if value is None or value in (sympy.zoo, sympy.nan) else value
