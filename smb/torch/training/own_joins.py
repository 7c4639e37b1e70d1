"""The joins of this process: which of them its threads still step, and what a new join must not meet.

One thread can't step two workers of a training whose members wait for each other, and a model is in one training at a
time. What a notebook's cell has joined, and whose optimizer is gone, leaves when the cell is run again.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterable

import torch

import smb
from smb.config.log import TRAINING
from smb.errors import InvalidArgumentError, NotFoundError
from smb.spi import session_of
from smb.torch.training.batches import BatchUnits
from smb.torch.training.model_parameters import TensorEntry

_news = logging.getLogger(TRAINING)


class OwnJoin:
    """One join of this process, until it has left. Its owner keeps it, and calls `end` when it leaves."""

    def __init__(
        self,
        name: str,
        client: smb.Client,
        weights_id: int | None,
        trained: Iterable[TensorEntry],
        optimizer: torch.optim.Optimizer,
        units: BatchUnits,
        leave: Callable[[], None],
        *,
        waits: bool,
    ) -> None:
        """`weights_id` is the id of the training's buffer; None for a rank of a mesh, since ranks come and go together.
        `leave` is a method that leaves at once. `waits`: the worker waits for the others' contributions.
        """
        self.in_a_block = False  # of `with`, which closes it
        self._name = name
        self._client = client
        self._weights_id = weights_id
        self._parameters = frozenset(id(entry.tensor) for entry in trained)
        self._optimizer = weakref.ref(optimizer)
        self._units = weakref.ref(units)  # they know the worker, which leaves when its owner has gone
        self._leave = weakref.WeakMethod(leave)  # the owner goes when nothing else refers to it
        self._waits = waits
        self._thread = threading.get_ident()  # the one that made the last step, or joined
        self._has_stepped = False
        _joins.add(self)

    def end(self) -> None:
        """Note that the model has left."""
        _joins.discard(self)

    def stepped(self) -> None:
        """Note that this thread has stepped the optimizer. At the first step, leave and raise InvalidArgumentError if
        the thread has joined the training before and does not step that worker.
        """
        self._thread = threading.get_ident()
        if self._has_stepped:
            return
        for each in _left_over(
            each
            for each in list(_joins)
            if each is not self and each._holds_up_this_thread() and each._takes_part_in(self._name, self._client)
        ):
            if each._waits:
                self._leave_now()  # the error's traceback may keep the owner, which must not be in a next join's way
                raise InvalidArgumentError(
                    f"optimizer.step(): {_waits_for_itself(self._name)}. The second join is undone: this model has "
                    f"left the training"
                )
        self._has_stepped = True

    def _takes_part_in(self, name: str, client: smb.Client) -> bool:
        """Return True if this is a member of the training that `client` has under this name. One small call, if the
        name is the same.
        """
        if self._name != name or self._weights_id is None or session_of(self._client).closed:
            return False
        with contextlib.suppress(NotFoundError):  # that training was deleted
            return bool(client.open(name).info.id == self._weights_id)
        return False

    def _holds_up_this_thread(self) -> bool:
        """Return True if this thread would wait for a step of this join, or for its batch in hand, in vain."""
        units = self._units()
        return self._thread == threading.get_ident() and (self._waits or (units is not None and units.used))

    def _leave_now(self) -> None:
        if (leave := self._leave()) is not None:
            leave()


_joins: weakref.WeakSet[OwnJoin] = weakref.WeakSet()


def check_alone(model: torch.nn.Module, name: str, client: smb.Client) -> None:
    """Leave what this process has joined before and can't train any more, as in a notebook's cell that is run again.

    Raises InvalidArgumentError if the model is joined already, since a second join would move its parameters away from
    the first, or if this thread would wait for itself: for another worker of the same training, in a scheme whose
    workers wait for each other.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    for each in _left_over(
        each
        for each in list(_joins)
        if each._parameters & parameters or (each._holds_up_this_thread() and each._takes_part_in(name, client))
    ):
        if each._parameters & parameters:
            raise InvalidArgumentError(
                f"smb.torch.join: this model is already joined to {each._name!r}; close() the result of that join "
                f"first. If the result is lost, make the optimizer anew: the former join ends with its optimizer. "
                f"If something keeps that, as a notebook keeps what a cell shows, close() its client"
            )
        if each._waits and each._has_stepped:
            raise InvalidArgumentError(f"smb.torch.join: {_waits_for_itself(name)}")


def _left_over(found: Iterable[OwnJoin]) -> list[OwnJoin]:
    """Leave those of these trainings whose optimizer is gone, and return the others."""
    still = list(found)
    if any(each._optimizer() is not None for each in still):
        gc.collect()  # an optimizer and its learning-rate schedule refer to each other
    for each in still:
        if each._leave() is None:  # the traceback of a refusal has kept this alone: the owner is gone, and has left
            each.end()
        elif each._optimizer() is None and not each.in_a_block:
            each._leave_now()
            _news.info(
                "left training %r, which this process had joined before with an optimizer that is gone; local steps "
                "since the last exchange of then are lost",
                each._name,
            )
    return [each for each in still if each in _joins]


def _waits_for_itself(name: str) -> str:
    return (
        f"this thread has joined {name!r} before, and each of its two workers would wait for the other. Call close() "
        f"of the first join's result, or, if that result is lost, run this again, or close its client. "
        f"In a notebook use join in a with block; to train two in one process, join each in the thread that steps it"
    )
