"""bfloat16 by bits: the upper half of a float32, and the rounding to it (numpy has no such type)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_bits(tensor: NDArray[Any]) -> NDArray[np.uint16]:
    """The bits of each number rounded to the nearest bfloat16, ties to even; NaN stays NaN.

    What is beyond the largest bfloat16 becomes infinite, as in float32 arithmetic.
    """
    bits = np.ascontiguousarray(tensor, "<f4").view("<u4")
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    upper: NDArray[np.uint16] = ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype("<u2")
    nan = np.isnan(tensor)
    if nan.any():  # the sum may have carried its bits to those of a number; the top fraction bit makes it NaN
        upper[nan] = (bits[nan] >> np.uint32(16)).astype("<u2") | np.uint16(0x40)
    return upper


def from_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The same numbers as float32: every bfloat16 is one."""
    return (bits.astype("<u4") << np.uint32(16)).view("<f4")


def rounded(tensor: NDArray[Any]) -> NDArray[np.float32]:
    """The nearest bfloat16 of each number, as float32."""
    return from_bits(to_bits(tensor))
