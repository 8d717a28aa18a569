"""Array fields: one-dimensional little-endian arrays that travel beside a message's JSON.

``IntArray`` is int32, ``FloatArray`` float32 and ``ByteArray`` uint8. Within a message they are
read-only. Floats here may be NaN or infinite: whoever judges a group says so with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator, SerializationInfo, ValidationInfo

from protocol.limits import ARRAY_NUMBERS_MAX, FRAME_BYTES_MAX


class Arrays:
    """The arrays of one frame; in its JSON the k-th stands as ``{"$": k}``, once and in order.

    Once, so that a small frame cannot name one large array a thousand times; in order, so that a
    message has one spelling. Given to pydantic as context, which keeps references apart from
    dictionaries of the same shape in a message's own fields.
    """

    __slots__ = ("items", "taken")

    def __init__(self, items: Iterable[NDArray[Any]] = ()) -> None:
        """Start with the arrays of a received frame, or empty to collect those of a new one."""
        self.items = list(items)
        self.taken = 0

    def put(self, array: NDArray[Any]) -> dict[str, int]:
        """Append an array; returns its reference."""
        self.items.append(array)
        return {"$": len(self.items) - 1}

    def take(self, reference: object, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The next array; raises ValueError unless ``reference`` names it and it is of ``dtype``."""
        if not isinstance(reference, dict) or reference.keys() != {"$"} or type(reference["$"]) is not int:
            raise ValueError("expected a reference to an array")
        if reference["$"] != self.taken or self.taken >= len(self.items):
            raise ValueError(f"expected array {self.taken} of {len(self.items)}, got a reference to another")
        array = self.items[self.taken]
        if array.dtype != dtype:
            raise ValueError(f"expected an array of {dtype.str}, got {array.dtype.str}")
        self.taken += 1
        return array


def _numbers(value: object, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A copy of ``value`` as ``dtype``; raises ValueError on what it cannot hold."""
    array = np.asarray(value)
    integers = dtype.kind in "iu"
    if array.size and array.dtype.kind not in ("iu" if integers else "iuf"):
        raise ValueError(f"expected {'integers' if integers else 'numbers'}, got {array.dtype}")
    if integers and array.size and array.dtype != dtype:
        info = np.iinfo(dtype)
        if int(array.min()) < info.min or int(array.max()) > info.max:
            raise ValueError(f"a number does not fit {dtype.str}")
    with np.errstate(over="ignore"):
        return np.array(array, dtype=dtype, order="C")


def _array_of(dtype_text: str, length_max: int) -> Any:
    """A field type that accepts a 1-D array (or a list of numbers) and keeps it as ``dtype_text``."""
    dtype = np.dtype(dtype_text)

    def check(value: object, info: ValidationInfo) -> NDArray[Any]:
        if info.mode == "json":
            if not isinstance(info.context, Arrays):
                raise ValueError("arrays travel in frames, not in plain JSON")
            array = info.context.take(value, dtype)
        elif isinstance(value, np.ndarray) and value.dtype == dtype and not value.flags.writeable:
            array = np.ascontiguousarray(value)
        else:
            array = _numbers(value, dtype)
        if array.ndim != 1:
            raise ValueError(f"expected a 1-D array, got {array.ndim} dimensions")
        if len(array) > length_max:
            raise ValueError(f"{len(array)} numbers; the limit is {length_max}")
        array.flags.writeable = False
        return array

    def dump(array: NDArray[Any], info: SerializationInfo) -> Any:
        if isinstance(info.context, Arrays):
            return info.context.put(array)
        return array.tolist() if info.mode == "json" else array

    return Annotated[NDArray[Any], PlainValidator(check), PlainSerializer(dump)]


IntArray = _array_of("<i4", ARRAY_NUMBERS_MAX)
FloatArray = _array_of("<f4", ARRAY_NUMBERS_MAX)
ByteArray = _array_of("|u1", FRAME_BYTES_MAX)
