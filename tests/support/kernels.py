"""Helpers for tests of kernels: instruction sets, operations, and their meaning in numpy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from smb._engine import ffi, lib
from smb.engine import check_isa, isa_names

Array = np.ndarray[Any, np.dtype[Any]]
OPS = {
    lib.SMB_SUM: "sum",
    lib.SMB_MIN: "min",
    lib.SMB_MAX: "max",
    lib.SMB_PROD: "prod",
    lib.SMB_REPLACE: "replace",
    lib.SMB_ELASTIC: "elastic",
}
check_isa()  # else SMB_ISA=avx9 would test another one
ISAS = isa_names()

every_isa = pytest.mark.parametrize("isa", range(len(ISAS)), ids=ISAS)
# The same examples in every run: a failure elsewhere is a failure here. The blob repeats one of another profile.
deterministic = settings(
    derandomize=True,
    max_examples=60 if os.environ.get("SMB_LONG") else 20,
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def best_isa_afterwards() -> Iterator[None]:
    """For every test of a module that imports it."""
    best = lib.smb_isa_current()
    yield
    lib.smb_isa_select(best)


def pointer(array: Array) -> Any:
    """Where an array's elements are, for the engine."""
    return ffi.cast("void *", array.ctypes.data)


def reference(op: int, b: Array, a: Array, scale: float) -> Array:
    """Compute what csrc/smb/types.h promises, with numpy, each step rounded to the arrays' dtype."""
    s = np.array([scale]).astype(b.dtype)
    match OPS[op]:
        case "sum":
            return b + s * a
        case "min":
            return np.minimum(b, s * a)
        case "max":
            return np.maximum(b, s * a)
        case "prod":
            return b * (s * a)
        case "replace":
            return s * a
        case _:
            return b + s * (a - b)
