"""The indices and values of sparse calls. Pure.

A request to servers has each element once, in ascending order. A caller may give indices in any order, and some of them
several times.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# How the values of one index are combined with each other.
_FOLDS: dict[str, np.ufunc] = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
FOLDED = (*_FOLDS, "replace")  # the operations for which an index may occur several times


def ascends(indices: Array) -> bool:
    """Return True if each index is larger than the one before it."""
    return bool((indices[1:] > indices[:-1]).all())


def sorted_once(indices: Array) -> tuple[Array, Array, Array]:
    """Return (order, first, kind): the order that sorts the indices and keeps equal ones as they were; for each in
    that order whether it is the first of its kind, and the number of its kind.
    """
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    first = np.ones(ordered.size, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return order, first, np.cumsum(first) - 1


def fold(op: str, indices: Array, values: Array, scale: float) -> tuple[Array, Array]:
    """Return (indices, values) with each index once, in ascending order. `values` has one row for each index.

    The values are multiplied by the scale first. Then those of one index are combined in the order in which they were
    given; "replace" keeps the last one. Each step is rounded to the dtype.
    """
    order, first, kind = sorted_once(indices)
    with np.errstate(over="ignore", invalid="ignore"):
        given = values[order]
        if scale != 1.0:
            given = given * given.dtype.type(scale)
        if op == "replace":
            return indices[order][first], given[np.append(first[1:], True)]
        folded = given[first]
        _FOLDS[op].at(folded, kind[~first], given[~first])
    return indices[order][first], folded


def elements_of(rows: Array, width: int) -> Array:
    """Return the indices of the elements of rows of `width` elements each."""
    return rows if width == 1 else (rows[:, None] * width + np.arange(width)).reshape(-1)
