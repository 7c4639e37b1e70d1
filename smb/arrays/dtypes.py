"""The element types: their names (numpy's), their numbers in the engine, their numpy dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from smb.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type. `number` travels in frames (see csrc/smb.h); `itemsize` is in bytes."""

    name: str
    number: int
    numpy: np.dtype[Any]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.numpy.itemsize


DTYPES: dict[str, Dtype] = {
    name: Dtype(name, number, np.dtype(numpy))
    for name, number, numpy in (
        ("float16", 1, np.float16),
        ("float32", 2, np.float32),
        ("float64", 3, np.float64),
        ("bfloat16", 4, ml_dtypes.bfloat16),
        ("int32", 5, np.int32),
        ("int64", 6, np.int64),
        ("uint8", 7, np.uint8),
    )
}
# How float32 travels between client and server; the numbers are in frames.
WIRES: dict[str, int] = {"exact": 0, "bfloat16": 1, "float16": 2, "int8": 3}
SPARSE_WIRE = 4
_AMBIGUOUS = ("float", "int")
OPS: dict[str, int] = {"sum": 1, "min": 2, "max": 3, "prod": 4, "replace": 5, "elastic": 6}


def name_of(dtype: object) -> str:
    """Return numpy's name of an element type: of a name, a numpy dtype or type, or a torch dtype; of others their text.

    Raises InvalidArgumentError for the names "float" and "int": numpy means 64 bits by them, torch 32.
    """
    text = str(dtype).removeprefix("torch.")
    if text in _AMBIGUOUS:
        raise InvalidArgumentError(f"dtype {text!r} is 32 bits in torch and 64 in numpy; say {text}32 or {text}64")
    if text in DTYPES:
        return text
    try:
        known = np.dtype(dtype)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return text
    return str(known.name if known.isnative else known.str)


def dtype_of(dtype: object) -> Dtype:
    """Return the element type of a name, a numpy dtype or type, or a torch dtype. Raises InvalidArgumentError."""
    name = name_of(dtype)
    if name not in DTYPES:
        raise InvalidArgumentError(f"there is no dtype {str(dtype)!r} here; there are {', '.join(DTYPES)}")
    return DTYPES[name]
