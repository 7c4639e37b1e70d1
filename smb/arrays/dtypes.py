"""The element types: their names (numpy's), their numbers in the engine, their numpy dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from smb.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type. `number` travels in frames (see csrc/smb/types.h); `itemsize` is in bytes."""

    name: str
    number: int
    itemsize: int

    @property
    def numpy(self) -> np.dtype[Any]:
        """Numpy's element type of this name; bfloat16 is that of ml_dtypes."""
        return _numpy_dtype(self.name)


@cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    # Imported here: daemons need only the names of types, and loading numpy takes a third of their start.
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name, name))


DTYPES: dict[str, Dtype] = {
    name: Dtype(name, number, itemsize)
    for name, number, itemsize in (
        ("float16", 1, 2),
        ("float32", 2, 4),
        ("float64", 3, 8),
        ("bfloat16", 4, 2),
        ("int32", 5, 4),
        ("int64", 6, 8),
        ("uint8", 7, 1),
    )
}
# Encodings of float32 between client and server, by the numbers that frames have.
WIRES: dict[str, int] = {"exact": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 5}
SPARSE_WIRE = 4
_AMBIGUOUS = ("float", "int")
OPS: dict[str, int] = {"sum": 1, "min": 2, "max": 3, "prod": 4, "replace": 5, "elastic": 6}


def name_of(dtype: object) -> str:
    """Return numpy's name of an element type, given as a name, a numpy dtype or type, or a torch dtype; of other
    objects their text.

    Raises InvalidArgumentError for the names "float" and "int": they mean 64 bits in numpy, 32 in torch.
    """
    text = str(dtype).removeprefix("torch.")
    if text in _AMBIGUOUS:
        raise InvalidArgumentError(f"dtype {text!r} means 32 bits in torch but 64 in numpy; pass {text}32 or {text}64")
    if text in DTYPES:
        return text
    import numpy as np

    try:
        known = np.dtype(dtype)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return text
    return str(known.name if known.isnative else known.str)


def dtype_of(dtype: object) -> Dtype:
    """Return the element type of a name, a numpy dtype or type, or a torch dtype. Raises InvalidArgumentError."""
    name = name_of(dtype)
    if name not in DTYPES:
        raise InvalidArgumentError(f"unsupported dtype {str(dtype)!r}; supported are {', '.join(DTYPES)}")
    return DTYPES[name]
