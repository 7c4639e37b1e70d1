"""A delta whose call failed is sent to its end, and counts once."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

import smb
import smb.train
from smb.train import ledger as ledger_of
from smb.train import parameters as parameters_of
from smb.train.exchange import mover as mover_of
from smb.train.exchange.mover import ArrayMover
from smb.train.guards import Norm
from smb.train.ledger import Run
from smb.train.parameters import ArrayParameters
from smb.train.traits import FUSED


class Weights:
    """A buffer whose calls fail as planned: each failure says how many elements were applied before it."""

    def __init__(self, size: int) -> None:
        self.values = np.zeros(size, np.float32)
        self.fails: list[int | None] = []  # None: nothing is of unknown outcome, nothing was applied
        self.away = self.forgotten = False
        self.error: BaseException = smb.UnavailableError("the connection was lost")
        self.name = "weights"
        self._missing: list[range] | None = None

    def accumulate(self, array: Any, offset: int = 0, *, fetch: bool = False, out: Any = None) -> None:
        assert out is None or not np.shares_memory(array, out)  # a buffer refuses such a call
        if self.fails:
            applied = self.fails.pop(0)
            self._missing = None if applied is None else [range(offset + applied, offset + array.size)]
            self.values[offset:][: applied or 0] += array[: applied or 0]
            raise self.error
        self.values[offset : offset + array.size] += _rounded(self, array, offset)
        if fetch:
            out[:] = self.values[offset : offset + array.size]

    def settle(self, error: BaseException) -> list[range]:
        if self.away:
            raise smb.TimeoutError("no answer")
        if self.forgotten:
            raise smb.UnavailableError("it can't be known")
        if self._missing is None:
            raise smb.InvalidArgumentError("nothing is of unknown outcome")
        return self._missing

    wire = "exact"
    nbytes = 40

    def read(self, offset: int = 0, count: int | None = None, *, out: Any, wire: str) -> None:
        out[:] = self.values


class InRuns(ArrayParameters):
    """Parameters that go to a buffer by two calls."""

    runs = (Run(0, 0, 6), Run(6, 6, 4))


def _setup() -> tuple[Weights, Any, ArrayMover]:
    weights, values = Weights(10), np.zeros(10, np.float32)
    return weights, values, ArrayMover(weights, ArrayParameters(values, "test"), FUSED)  # type: ignore[arg-type]


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


def passed(contribution: Norm, *, whole: bool) -> None:
    """A check that refuses nothing."""


class Apart(ArrayParameters):
    """Values that are not one array for a call: what comes back is copied to them."""

    array = None  # type: ignore[assignment]


@pytest.fixture(params=[ArrayParameters, Apart])
def in_place(request: pytest.FixtureRequest) -> tuple[Weights, Any, ArrayMover]:
    """A mover after one exchange in place, which had the worker add 1 and another one 4."""
    weights, values = Weights(10), np.zeros(10, np.float32)
    deltas = ArrayMover(weights, request.param(values, "test"), FUSED)  # type: ignore[arg-type]
    values += 1
    weights.values += 4
    deltas.exchange(passed, fetch=True)
    assert (weights.values == 5).all()
    assert (values == 5).all()
    return weights, values, deltas


@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("applied", [None, 0, 4, 10])
def test_an_exchange_in_place_that_failed_counts_once(
    in_place: tuple[Weights, Any, ArrayMover], applied: int | None, fetch: bool
) -> None:
    """What the optimizer does before it is finished counts in the next exchange."""
    weights, values, deltas = in_place
    values += 3
    weights.fails = [applied]
    with pytest.raises(smb.UnavailableError):
        deltas.exchange(passed, fetch=fetch)
    values += 1
    assert deltas.finish()
    assert (weights.values == 8).all()
    weights.values += 16
    deltas.exchange(passed, fetch=True)
    assert (weights.values == 25).all()
    assert (values == 25).all()
    values += 1
    deltas.exchange(passed, fetch=True)
    assert (weights.values == 26).all()


def test_an_exchange_in_place_without_the_sums(in_place: tuple[Weights, Any, ArrayMover]) -> None:
    weights, values, deltas = in_place
    weights.values += 16
    for _ in range(2):
        values += 3
        deltas.exchange(passed, fetch=False)
    assert (values == 11).all()
    assert (weights.values == 27).all()


@pytest.mark.parametrize("error", [smb.UnavailableError("away"), KeyboardInterrupt()])
def test_changes_whose_check_failed_count_in_the_next_exchange(
    in_place: tuple[Weights, Any, ArrayMover], error: BaseException
) -> None:
    weights, values, deltas = in_place
    values += 3

    def fail(contribution: Norm, *, whole: bool) -> None:
        raise error

    with pytest.raises(type(error)):
        deltas.exchange(fail, fetch=True)
    values += 1
    assert not deltas.finish()
    for _ in range(2):
        deltas.exchange(passed, fetch=True)
        assert (weights.values == 9).all()
        assert (values == 9).all()


def test_refused_changes_in_place_are_dropped(in_place: tuple[Weights, Any, ArrayMover]) -> None:
    weights, values, deltas = in_place
    values += 3

    def refuse(contribution: Norm, *, whole: bool) -> None:
        raise smb.train.RefusedContributionError("too much")

    with pytest.raises(smb.train.RefusedContributionError):
        deltas.exchange(refuse, fetch=True)
    deltas.restart()
    assert (values == 5).all()
    values += 1
    deltas.exchange(passed, fetch=True)
    assert (weights.values == 6).all()


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("begin", [0, 4, 8])
def test_ctrl_c_while_changes_are_computed_in_place(
    in_place: tuple[Weights, Any, ArrayMover], monkeypatch: pytest.MonkeyPatch, begin: int, replaced: bool
) -> None:
    """Before or after a block of the base is replaced. That block's changes are lost, the others' count once, and no
    element gets anything else.
    """
    weights, values, deltas = in_place
    monkeypatch.setattr(parameters_of, "BLOCK_ELEMENTS", 4)
    monkeypatch.setattr(mover_of, "BLOCK_ELEMENTS", 4)
    values += 3

    def interrupted(self: Any, base: Any, out: Any = None) -> Any:
        for at in range(0, 10, 4):
            if at == begin and not replaced:
                raise KeyboardInterrupt
            block = slice(at, at + 4)
            np.subtract(values[block], base[block], out=out[block])
            if at == begin:
                raise KeyboardInterrupt
            yield at, out[block]

    with monkeypatch.context() as patch:
        patch.setattr(ArrayParameters, "deltas", interrupted)
        with pytest.raises(KeyboardInterrupt):
            deltas.exchange(passed, fetch=True)
    deltas.exchange(passed, fetch=True)
    lost = range(begin, min(begin + 4, 10))
    assert (weights.values[lost] == 5).all()
    assert (np.delete(weights.values, lost) == 8).all()
    assert (values == weights.values).all()


@pytest.mark.parametrize("fetch", [True, False])
def test_ctrl_c_as_an_exchange_in_place_has_ended(
    in_place: tuple[Weights, Any, ArrayMover], monkeypatch: pytest.MonkeyPatch, fetch: bool
) -> None:
    """The call has returned, and nothing is noted of that yet: `finish` says that it counts, and sends nothing."""
    weights, values, deltas = in_place
    values += 3
    add = deltas.ledger.add

    def interrupted(call: Any) -> None:
        add(call)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(deltas.ledger, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            deltas.exchange(passed, fetch=fetch)
    values += 1
    assert deltas.finish()
    assert not deltas.finish()
    assert (weights.values == 8).all()
    for _ in range(2):
        deltas.exchange(passed, fetch=True)
        assert (weights.values == 9).all()
        assert (values == 9).all()


class Interrupts(ArrayParameters):
    """Ctrl-C once changes are computed, and again as the values are copied, for a new base."""

    left: ClassVar[list[str]] = []

    def deltas(self, base: Any, out: Any = None) -> Any:
        for found in super().deltas(base, out):
            if self.left[:1] == ["deltas"]:
                self.left.pop(0)
                raise KeyboardInterrupt
            yield found

    def blocks(self) -> Any:
        if self.left[:1] == ["blocks"]:
            self.left.pop(0)
            raise KeyboardInterrupt
        yield from super().blocks()


@pytest.mark.parametrize("checked", [True, False])
def test_a_second_ctrl_c_as_an_exchange_in_place_is_left(monkeypatch: pytest.MonkeyPatch, checked: bool) -> None:
    """Changes are dropped, or sent once; values are never sent as changes."""
    weights, values = Weights(10), np.zeros(10, np.float32)
    weights.values += 100
    deltas = ArrayMover(weights, Interrupts(values, "test"), FUSED)  # type: ignore[arg-type]
    deltas.restart()
    values += 3
    monkeypatch.setattr(Interrupts, "left", [] if checked else ["deltas", "blocks"])

    def check(contribution: Norm, *, whole: bool) -> None:
        Interrupts.left.append("blocks")
        raise smb.UnavailableError("away")

    with pytest.raises(KeyboardInterrupt):
        deltas.exchange(check, fetch=True)
    assert not Interrupts.left
    assert not deltas.finish()
    values += 1
    deltas.exchange(passed, fetch=True)
    sent = 103 if checked else 100
    assert (weights.values == sent).all()
    assert (values == sent).all()
    values += 1
    deltas.exchange(passed, fetch=True)
    assert (weights.values == sent + 1).all()


def test_parameters_that_were_refused_lose_nothing(
    in_place: tuple[Weights, Any, ArrayMover], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after load_state_dict(assign=True), which the user can take back: all changes count then."""
    weights, values, deltas = in_place
    values += 3

    def refuse(*_: Any, **__: Any) -> Any:
        raise smb.InvalidArgumentError("a parameter was replaced")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(ArrayParameters, "deltas", refuse)
        patch.setattr(ArrayParameters, "blocks", refuse)
        with pytest.raises(smb.InvalidArgumentError, match="replaced"):
            deltas.exchange(passed, fetch=True)
    deltas.exchange(passed, fetch=True)
    assert (weights.values == 8).all()
    assert (values == 8).all()


def test_a_read_that_failed_leaves_nothing_behind(
    in_place: tuple[Weights, Any, ArrayMover], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it arrived; the next exchange, which fetches nothing, does not take that for the values."""
    weights, values, deltas = in_place

    def fail(*_: Any, out: Any, **__: Any) -> None:
        out[:4] = 99
        raise smb.UnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "read", fail)
        with pytest.raises(smb.UnavailableError):
            deltas.read()
    values += 3
    deltas.exchange(passed, fetch=False)
    assert (values == 8).all()
    assert (weights.values == 8).all()


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


@pytest.mark.parametrize("applied", [0, 4, 10])
def test_an_interrupted_delta_counts_once(applied: int) -> None:
    """Ctrl-C in the middle of the call, and again as the rest is sent."""
    weights, values, deltas = _setup()
    values += 3
    deltas.take()
    weights.fails, weights.error = [applied, 0], KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        deltas.send(fetch=True)
    values += 1
    if applied < 10:
        with pytest.raises(KeyboardInterrupt):
            deltas.finish()
    weights.fails = []
    assert deltas.finish()
    assert (weights.values == 3).all()
    assert not deltas.finish()
    deltas.take()
    deltas.send(fetch=True)
    assert (weights.values == 4).all()


def test_an_interrupt_as_the_call_returned() -> None:
    """Such a one has no account: the delta is there, and is not sent again. What was not begun is sent."""
    weights, values = Weights(10), np.zeros(10, np.float32)
    parameters = InRuns(values, "test")
    deltas = ArrayMover(weights, parameters, FUSED)  # type: ignore[arg-type]
    values += 3
    deltas.take()

    def interrupted(array: Any, offset: int = 0, *, fetch: bool = False, out: Any = None) -> None:
        Weights.accumulate(weights, array, offset, fetch=fetch, out=out)
        raise KeyboardInterrupt

    weights.accumulate = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        deltas.send(fetch=False)
    del weights.accumulate
    assert deltas.finish()
    assert (weights.values == 3).all()
    assert not deltas.finish()


def test_an_interrupt_as_what_is_missing_is_asked_for() -> None:
    """It is asked for again, and sent."""
    weights, values, deltas = _setup()
    values += 3
    deltas.take()
    weights.fails = [4]
    with pytest.raises(smb.UnavailableError):
        deltas.send(fetch=False)
    settle, asked = weights.settle, 0

    def interrupted(error: BaseException) -> list[range]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise KeyboardInterrupt
        return settle(error)

    weights.settle = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        deltas.finish()
    assert deltas.finish()
    assert (weights.values == 3).all()


@pytest.mark.parametrize("wire", ["exact", "float16"])
@pytest.mark.parametrize("at", range(1, 4))
def test_an_interrupt_while_rounding_is_counted(monkeypatch: pytest.MonkeyPatch, wire: str, at: int) -> None:
    """Ctrl-C as a piece's rounding is computed, after all was sent: finish sends nothing twice, and loses nothing."""
    weights, values = Weights(10), np.zeros(10, np.float32)
    monkeypatch.setattr(Weights, "wire", wire)
    monkeypatch.setattr(ledger_of, "BLOCK_ELEMENTS", 4)  # three pieces
    monkeypatch.setattr(ledger_of, "as_sent", _rounded)
    deltas = ArrayMover(weights, ArrayParameters(values, "test"), FUSED)  # type: ignore[arg-type]
    for number in range(3):
        values += np.float32(1.0001)
        deltas.take()
        if number < 2:
            deltas.send(fetch=True)
    left = at

    def interrupted(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return _rounded(*arguments)

    monkeypatch.setattr(ledger_of, "as_sent", interrupted)
    with pytest.raises(KeyboardInterrupt):
        deltas.send(fetch=True)
    monkeypatch.setattr(ledger_of, "as_sent", _rounded)
    assert deltas.finish()
    assert not deltas.finish()
    due = 0 if deltas.ledger.due is None else deltas.ledger.due
    assert np.allclose(weights.values + due, 3 * 1.0001, rtol=0, atol=1e-6)


def test_an_interrupt_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C once a delta is made, and once it is to be sent: all of it is sent later, with nothing twice."""
    weights, values, deltas = _setup()
    values += 3
    deltas.take()
    values += 1
    deltas.take()  # the call that was interrupted is made again
    with monkeypatch.context() as patch:
        patch.setattr(deltas.ledger, "add", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            deltas.send(fetch=True)
    assert deltas.finish()
    assert (weights.values == 4).all()
    assert not deltas.finish()


def _interrupt(_: Any) -> None:
    raise KeyboardInterrupt


def _rounded(buffer: Any, values: Any, offset: int) -> Any:
    return values if buffer.wire == "exact" else values.astype(np.float16).astype(np.float32)
