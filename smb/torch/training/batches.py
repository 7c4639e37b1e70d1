"""A data set divided over all processes that train a model: one process's batches, made from work units."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
import torch

import smb
import smb.train
from smb.config.log import TRAINING
from smb.errors import Error, InvalidArgumentError, NotFoundError
from smb.train.steps import there

_log = logging.getLogger("smb")
_news = logging.getLogger(TRAINING)


class BatchUnits:
    """The work units of one process, from which its batches are made. A further call of `begin` replaces them."""

    def __init__(self, client: smb.Client, name: str, at_end: Callable[[], object]) -> None:
        """`at_end` is called when this process has done its last batch, before it waits for the others' last ones."""
        self._client = client
        self._at_end = at_end
        self._worker: smb.train.Worker
        self._units: smb.train.WorkUnits | None = None
        self._name = name
        self._end: int | None = None  # the epoch before which the last call without epochs= ends

    def attach(self, worker: smb.train.Worker) -> None:
        """Take part as this worker from now on."""
        self._worker = worker

    def begin(
        self, rows: int, size: int, epochs: int | None, seed: int
    ) -> tuple[Iterator[tuple[int, torch.Tensor]], int]:
        """Return the batches, each with its epoch, and how many all processes together have left. The batches end after
        `epochs`, or, with None, after the epoch of the last call, if that is not done, else after the next one. Raises
        InvalidArgumentError as Shared.batches.
        """
        units, left = self._open(rows, size, epochs, seed)
        return shuffled_batches(lambda: self._take(units), self._name, rows, seed, epochs), left

    def _open(self, rows: int, size: int, epochs: int | None, seed: int) -> tuple[smb.train.WorkUnits | None, int]:
        worker = self._worker
        if worker.batch_size is not None:
            raise InvalidArgumentError(
                "batches(): this training's scheme chooses the size of each batch; use smb.train.WorkUnits instead"
            )
        if self._units is not None:
            self._units.close()
        self._units = smb.train.WorkUnits(
            self._client, f"{worker.name}/units", rows, size, seed, epochs=epochs, worker=worker
        )
        if epochs is None:
            if self._end is None:
                self._end = self._units.epoch() + 1
                if self._end > 1:
                    _news.info(
                        "training %r: batches() begins in epoch %d of all processes together, counted from 0. A loop "
                        "over range(N) makes N further epochs; batches(..., epochs=N) ends when all have done N",
                        self._name,
                        self._end - 1,
                    )
            elif self._units.end_after(self._end) == 0:
                self._end += 1
            epochs = self._end
        return self._units, self._units.end_after(epochs)

    def _take(self, units: smb.train.WorkUnits | None) -> smb.train.Unit | None:
        assert units is not None
        with there(self._worker.group):
            return units.take(self._at_end)

    @property
    def used(self) -> bool:
        """True if batches were asked for."""
        return self._units is not None

    def close(self) -> None:
        """Hand back the units in hand. A failure is logged."""
        if self._units is None:
            return
        try:
            self._units.close()
        except NotFoundError as error:
            _log.debug("%s", error)
        except Error as error:
            _log.warning("training %r: could not hand back the unit in hand: %s", self._name, error)


class Batches:
    """One process's batches: an iterator, or a batch_sampler. Iterating again after its end is a further call of
    batches() with the same arguments. Its length is the number of batches that all processes together had left when the
    iteration began, so a progress bar of one of several processes ends early.

    - `epoch`: of the batch in hand, counted from 0 over the life of the training. Before the first batch it is 0.
    """

    def __init__(self, begin: Callable[[], tuple[Iterator[tuple[int, torch.Tensor]], int]]) -> None:
        """`begin` returns an iterator of the batches, each with its epoch, and the number of batches that are left."""
        self.epoch = 0
        self._begin = begin
        self._batches, self._left = begin()
        self._ended = False

    def __iter__(self) -> Batches:
        if self._ended:
            self._batches, self._left = self._begin()
            self._ended = False
        return self

    def __next__(self) -> torch.Tensor:
        try:
            self.epoch, batch = next(self._batches)
        except StopIteration:
            self._ended = True
            raise
        return batch

    def __len__(self) -> int:
        return self._left


def shuffled_batches(
    take: Callable[[], smb.train.Unit | None], name: str, rows: int, seed: int, epochs: int | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each batch's epoch and its row numbers, until `take` returns None.

    Rows are shuffled by the seed and the epoch, alike in all processes.
    """
    order, shuffled, taken = torch.empty(0, dtype=torch.int64, device="cpu"), -1, 0
    while (unit := take()) is not None:
        if unit.epoch != shuffled:
            shuffled = unit.epoch
            order = torch.from_numpy(np.random.default_rng([seed, shuffled]).permutation(rows))
        taken += 1
        yield unit.epoch, order[unit.start : unit.start + unit.count]
    if not taken and epochs is not None:
        _log.warning(
            "training %r: all batches of all %d epochs are done; epochs= counts from the training's first run. Ask for "
            "more epochs, or begin anew with join(..., fresh=True) or under another name",
            name,
            epochs,
        )
