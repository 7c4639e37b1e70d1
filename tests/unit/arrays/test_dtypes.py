"""smb.arrays.dtypes: element types by name, number and numpy dtype."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from smb.arrays.dtypes import DTYPES, dtype_of
from smb.errors import InvalidArgumentError
from smb.tensors import TensorTable


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("float32", "float32"),
        (np.float32, "float32"),
        (np.dtype("<i8"), "int64"),
        ("f8", "float64"),
        (float, "float64"),
        (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
        (torch.bool, "bool"),
        (bool, "bool"),
        (np.bool_, "bool"),
        (torch.uint16, "uint16"),
        (torch.complex64, "complex64"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (ml_dtypes.float8_e5m2, "float8_e5m2"),
        (ml_dtypes.bfloat16, "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("uint8", "uint8"),
    ],
)
def test_whatever_names_a_dtype(given: Any, name: str) -> None:
    """Names, numpy's and torch's dtypes and types all lead to the same element type."""
    assert dtype_of(given) is DTYPES[name]


@pytest.mark.parametrize(
    "given", ["complex128", np.longdouble, str, "float33", object(), torch.complex128, ">f4x", ">f4", np.dtype(">i8")]
)
def test_other_dtypes_are_refused(given: Any) -> None:
    """What has no element type, as the other byte order, is refused, and the message lists what there is."""
    with pytest.raises(InvalidArgumentError, match=r"supported are float16, .*uint8"):
        dtype_of(given)


@pytest.mark.parametrize("given", ["float", "int"])
def test_names_of_two_meanings_are_refused(given: str) -> None:
    """torch's float is float32, numpy's float64; the message names both."""
    with pytest.raises(InvalidArgumentError, match=f"pass {given}32 or {given}64"):
        dtype_of(given)
    with pytest.raises(InvalidArgumentError, match=f"'a': dtype '{given}' .*pass {given}32"):
        TensorTable.of({"a": (3, given)})
    assert dtype_of(f"{given}32").itemsize == 4
