"""The element types: their names (numpy's), their numbers in the engine, their numpy dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from smb.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Dtype:
    """One element type. `number` travels in frames (see csrc/smb/types.h); `itemsize` is in bytes. `storage`: there is
    no arithmetic on it.
    """

    name: str
    number: int
    itemsize: int
    storage: bool = False

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """Numpy's element type of this name; bfloat16 and float8 are those of ml_dtypes."""
        # Imported here: daemons need only the names of types, and loading numpy takes a third of their start.
        import ml_dtypes
        import numpy as np

        return np.dtype(getattr(ml_dtypes, self.name, self.name))


DTYPES: dict[str, Dtype] = {
    each.name: each
    for each in (
        Dtype("float16", 1, 2),
        Dtype("float32", 2, 4),
        Dtype("float64", 3, 8),
        Dtype("bfloat16", 4, 2),
        Dtype("int32", 5, 4),
        Dtype("int64", 6, 8),
        Dtype("uint8", 7, 1),
        Dtype("int8", 8, 1, storage=True),
        Dtype("int16", 9, 2, storage=True),
        Dtype("uint16", 10, 2, storage=True),
        Dtype("uint32", 11, 4, storage=True),
        Dtype("uint64", 12, 8, storage=True),
        Dtype("complex64", 13, 8, storage=True),
        Dtype("bool", 14, 1, storage=True),
        Dtype("float8_e4m3fn", 15, 1, storage=True),
        Dtype("float8_e5m2", 16, 1, storage=True),
    )
}
ATOMIC = ("int32", "int64", "uint32", "uint64", "float32", "float64")  # those of fetch_add and compare_swap
# Encodings of float32 between client and server, by the numbers that frames have.
WIRES: dict[str, int] = {"exact": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 5}
SPARSE_WIRE = 4
_AMBIGUOUS = ("float", "int")
BITS: dict[str, int] = {"band": 7, "bor": 8, "bxor": 9}  # operations on the bits of whole numbers and bool
OPS: dict[str, int] = {"sum": 1, "min": 2, "max": 3, "prod": 4, "replace": 5, "elastic": 6, **BITS}


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
