"""A delta whose call failed is sent to its end, and counts once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import smb
from smb.train.exchange.background_send import Deltas
from smb.train.guards import Norm
from smb.train.parameters import ArrayParameters


class Weights:
    """A buffer whose calls fail as planned: each failure says how many elements were applied before it."""

    def __init__(self, size: int) -> None:
        self.values = np.zeros(size, np.float32)
        self.fails: list[int | None] = []  # None: nothing is of unknown outcome, nothing was applied
        self.away = self.forgotten = False
        self.name = "weights"
        self._missing: list[range] | None = None

    def accumulate(self, array: np.ndarray, offset: int = 0, *, fetch: bool = False) -> Any:  # type: ignore[type-arg]
        if self.fails:
            applied = self.fails.pop(0)
            self._missing = None if applied is None else [range(offset + applied, offset + array.size)]
            self.values[offset:][: applied or 0] += array[: applied or 0]
            raise smb.UnavailableError("the connection was lost")
        self.values[offset : offset + array.size] += array
        return self.values.copy() if fetch else None

    def settle(self, error: smb.Error) -> list[range]:
        if self.away:
            raise smb.TimeoutError("no answer")
        if self.forgotten:
            raise smb.UnavailableError("it can't be known")
        if self._missing is None:
            raise smb.InvalidArgumentError("nothing is of unknown outcome")
        return self._missing

    wire = "exact"
    nbytes = 40

    def read(self, *, out: Any, wire: str) -> None:
        out[:] = self.values


def _setup() -> tuple[Weights, Any, Deltas]:
    weights, values = Weights(10), np.zeros(10, np.float32)
    return weights, values, Deltas(weights, ArrayParameters(values, "test"), values.nbytes)  # type: ignore[arg-type]


@pytest.mark.parametrize("applied", [None, 0, 4, 10])
def test_a_failed_delta_counts_once(applied: int | None) -> None:
    weights, values, deltas = _setup()
    values += 3
    deltas.take()
    weights.fails = [applied]
    with pytest.raises(smb.UnavailableError):
        deltas.send(fetch=True)
    values += 1  # the optimizer goes on: that is the next delta
    assert deltas.finish()
    assert (weights.values == 3).all()
    assert not deltas.finish()
    norm = Norm()
    norm.add(np.ones(10, np.float32))
    assert deltas.take() == norm
    deltas.send(fetch=True)
    assert (weights.values == 4).all()
    assert (values == 4).all()


def test_what_nobody_remembers_counts_at_most_once() -> None:
    """Once a server has forgotten the session nothing tells what it applied: the worker goes on."""
    weights, values, deltas = _setup()
    values += 3
    deltas.take()
    weights.fails, weights.forgotten = [4], True
    with pytest.raises(smb.UnavailableError):
        deltas.send(fetch=True)
    assert deltas.finish()
    assert (weights.values[:4] == 3).all()
    assert (weights.values[4:] == 0).all()
    assert not deltas.finish()


def test_failures_in_a_row() -> None:
    weights, values, deltas = _setup()
    values += 3
    deltas.take()
    weights.fails = [4, 7, None, 0]
    with pytest.raises(smb.UnavailableError):
        deltas.send(fetch=False)
    for _ in range(3):
        with pytest.raises(smb.UnavailableError):
            deltas.finish()
    weights.away = True
    with pytest.raises(smb.TimeoutError):  # it can't be known yet: nothing is sent
        deltas.finish()
    weights.away = False
    assert deltas.finish()
    assert (weights.values == 3).all()
