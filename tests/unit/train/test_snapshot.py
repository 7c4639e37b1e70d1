"""What is written into an inbox counts once, whoever fails between the writing and the next values. No cluster."""

from __future__ import annotations

import random
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import smb
from smb.feedback import as_sent
from smb.overlap.parts import Cut, Part, PartFlow, PartsMover
from smb.train import parameters as parameters_of
from smb.train.exchange.mover import ArrayMover
from smb.train.ledger import Run
from smb.train.parameters import ArrayParameters
from smb.train.traits import ROUNDS
from tests.unit.overlap.test_parts import SIZE, Numbers


class Memory:
    """A buffer in this process, whose writes fail at times."""

    def __init__(self, wire: str, random_: random.Random) -> None:
        self.values = np.zeros(SIZE, np.float32)
        self.wire, self.size = wire, SIZE
        self.layout = SimpleNamespace(chunk_bytes=4 * SIZE)
        self.failing = 0.0
        self._random = random_

    def write(self, array: Any, offset: int = 0) -> None:
        if self._random.random() < self.failing:
            raise smb.UnavailableError("away, says the test")
        self.values[offset : offset + array.size] = as_sent(self, array, offset)  # type: ignore[arg-type]

    def write_async(self, array: Any, offset: int) -> Future[None]:
        future = Future[None]()
        try:
            self.write(array, offset)
        except smb.Error as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        return future

    def read(self, offset: int, count: int, *, out: Any, wire: str) -> None:
        assert wire == "exact"
        out[:] = self.values[offset : offset + count]


class Queue:
    """A client's queue whose calls are done at once."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def write(self, memory: Memory, array: Any, offset: int, *, priority: int) -> Future[None]:
        assert priority == 0
        return memory.write_async(array, offset)

    def read(self, memory: Memory, offset: int, count: int, *, out: Any, wire: str, priority: int) -> Future[None]:
        assert priority == 0
        future = Future[None]()
        if self._memory._random.random() < self._memory.failing:
            future.set_exception(smb.UnavailableError("away, says the test"))
        else:
            memory.read(offset, count, out=out, wire=wire)
            future.set_result(None)
        return future


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("wire", ["exact", "float16", "int8"])
def test_what_was_written_counts_once(monkeypatch: pytest.MonkeyPatch, wire: str, blocks: int) -> None:
    """Writes fail, and callers after them, before the contribution counts: the next one has all of it. The shared
    values are the sum of all that was done, but for what rounding has left of the last one.
    """
    for seed in range(10):
        print("seed", seed)
        monkeypatch.setattr(parameters_of, "BLOCK_ELEMENTS", SIZE // blocks)
        random_ = random.Random(seed)
        numbers = np.random.default_rng(seed)
        shared, inbox, values = Memory("exact", random_), Memory(wire, random_), np.zeros(SIZE, np.float32)
        parameters, done = ArrayParameters(values, "test"), np.zeros(SIZE, np.float32)
        mover = ArrayMover(inbox, parameters, ROUNDS)  # type: ignore[arg-type]
        mover.fetch(shared)  # type: ignore[arg-type]
        mover.adopt()
        for number in range(20):
            mine = numbers.standard_normal(SIZE).astype(np.float32)
            values += mine
            done += mine
            inbox.failing = 0.2 if number < 19 else 0.0
            try:
                mover.write(inbox)  # type: ignore[arg-type]
                if random_.random() < 2 * inbox.failing:
                    raise smb.UnavailableError("the look at the lease failed, says the test")
            except smb.UnavailableError:
                continue
            shared.values += inbox.values
            for _ in range(random_.randint(1, 2)):  # the second time because the first one was interrupted
                mover.fetch(shared)  # type: ignore[arg-type]
                mover.adopt()
        left = 0 if mover.ledger.due is None else mover.ledger.due
        assert np.allclose(shared.values + left, done, rtol=0, atol=2e-5)
        assert wire == "exact" or np.abs(left).max() > 0


@pytest.mark.parametrize("wire", ["exact", "float16", "int8"])
def test_parts_that_were_written_count_once(wire: str) -> None:
    """As above for parts that are written while the worker computes. Where the values could not be read after a
    contribution had counted, only the local steps between are lost, which its scheme says.
    """
    for seed in range(10):
        print("seed", seed)
        random_ = random.Random(seed)
        numbers = np.random.default_rng(seed)
        shared, inbox, parameters = Memory("exact", random_), Memory(wire, random_), Numbers()
        runs = [Run(0, 0, 15), Run(15, 15, 25)]
        parts = tuple(Part((run,), 0) for run in runs)
        flow, done = PartFlow(parameters, Cut(parts, parts)), np.zeros(SIZE, np.float32)
        flow._queue = Queue(inbox)  # type: ignore[assignment]
        mover, owing = PartsMover(flow, inbox, 0, lambda: None), False  # type: ignore[arg-type]
        for number in range(20):
            mine = numbers.standard_normal(SIZE).astype(np.float32)
            parameters.values += mine
            done += 0 if owing else mine
            inbox.failing = 0.2 if number < 19 else 0.0
            flow.begin()
            flow.make_rest()
            try:
                if not owing:
                    mover.write(inbox)  # type: ignore[arg-type]
                    if random_.random() < 2 * inbox.failing:
                        raise smb.UnavailableError("the look at the lease failed, says the test")
                    shared.values += inbox.values
                    owing = True
                if random_.random() < inbox.failing:
                    raise smb.UnavailableError("the round could not be settled, says the test")
                mover.fetch(shared)  # type: ignore[arg-type]
                owing = False
            except smb.UnavailableError:
                pass
            flow.over()
            for part in range(len(parts)):
                if flow.wait(part):
                    flow.adopt(part)
        left = 0 if flow.ledger.rest is None else flow.ledger.rest
        assert not owing
        assert np.allclose(shared.values + left, done, rtol=0, atol=2e-5)
