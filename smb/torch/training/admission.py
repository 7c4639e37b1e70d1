"""A model's way into a training: it must be like the group's model, or it makes the group. A failed join leaves
nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

import smb
import smb.train
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, NotFoundError
from smb.tensors import TensorTable
from smb.torch.training.mixed_statistics import STATE, MixedStatistics
from smb.torch.training.model_parameters import ModelParameters, TensorEntry
from smb.torch.training.model_tensors import Statistics, mark_of
from smb.train.attempts import until_joined
from smb.train.group import copies_of, view
from smb.train.group_making import clear
from smb.train.join_locks import keeping
from smb.train.worker import take_part

TIED = "smb.torch.tied"  # in a buffer's metadata: maps a tied tensor's further names to its name in the table
FROZEN = "smb.torch.frozen"  # in a buffer's metadata: the digests of the maker's frozen parameters
_JOIN_TTL_S = 30.0

_log = logging.getLogger("smb")


class ModelAdmission:
    """The join of one model, from the comparison with the group to the first values. One join for each object."""

    def __init__(
        self,
        client: smb.Client,
        name: str,
        trained: Any,
        mixed: MixedStatistics,
        frozen: dict[tuple[str, ...], torch.Tensor],
        check: Callable[[smb.train.Scheme | None], None],
    ) -> None:
        """`frozen` are the parameters that do not train. `check` raises InvalidArgumentError for a scheme that can't be
        used with this join.
        """
        self._client = client
        self._name = name
        self._trained = trained
        self._mixed = mixed
        self._frozen = frozen
        self._mark: dict[str, str] | None = None  # digests of the frozen parameters; None if there are none
        self._check = check
        self._worker: smb.train.Worker | None = None  # the new member, while the join may still fail

    def run(
        self,
        scheme: str | smb.train.Scheme | None,
        settings: dict[str, Any],
        options: dict[str, Any],
        attach: Callable[[smb.train.Worker], None],
    ) -> smb.train.Worker:
        """Become a member and return its worker. The model is not changed before everything that can fail is done.
        `attach` is called with the worker once the model has the shared values.
        """

        def attempt() -> smb.train.Worker:
            copies = copies_of(self._client, self._name, options.get("replicas")) or 1
            # The lock is held from before joining until the statistics exist, so that one process makes both buffers.
            with keeping(self._client, f"{self._name}/{STATE}", copies, ttl=_JOIN_TTL_S):
                return self._run_locked(scheme, settings, dict(options), attach)

        worker = until_joined(self._client, attempt)
        self._mixed.joined()
        return worker

    def _run_locked(
        self,
        scheme: str | smb.train.Scheme | None,
        settings: dict[str, Any],
        options: dict[str, Any],
        attach: Callable[[smb.train.Worker], None],
    ) -> smb.train.Worker:
        client, name, trained, mixed = self._client, self._name, self._trained, self._mixed
        self._mark = mark_of(self._frozen) if self._frozen else None
        group, fresh = None, options.pop("fresh")
        if fresh:
            chosen = _scheme(scheme, settings, None)
            self._check(chosen)  # before anything is deleted
            clear(client, name, trained, chosen, options["lease"], options.get("replicas"))
        with contextlib.suppress(NotFoundError):
            group = view(client, name)
            self._compare(group.weights)
        chosen = _scheme(scheme, settings, group.scheme if group else None)
        self._check(chosen or (group.scheme if group else None))
        metadata = _metadata(trained) | ({FROZEN: self._mark} if self._mark else {})
        guards, lease = options.pop("guards"), options.pop("lease")
        worker = self._worker = take_part(client, name, trained, chosen, guards, lease, metadata=metadata, **options)
        try:
            self._compare(worker.weights)  # another process may have made the group in the meantime
            if fresh and not worker.made:
                raise AlreadyExistsError(
                    f"join of training {name!r} with fresh=True: another process has just made it; leave fresh= out to "
                    f"train with it, or take another name"
                )
            statistics = mixed.own
            mixed.join(client, worker, _metadata(statistics), lambda state: _compare(state, statistics.table))
            worker.membership.begin()
            if mixed.buffer is not None:
                statistics.spread()
            attach(worker)
            worker.membership.announce()
            _warn_of_idle(name, trained.entries)
        except BaseException:
            if self.withdraw() and mixed.buffer is not None:
                with contextlib.suppress(Error):  # the reason of the failed join matters more
                    client.delete(mixed.buffer, missing_ok=True)
            raise
        return worker

    def withdraw(self) -> bool:
        """Leave after a failed join, if this process has become a member. Returns True if the group is gone.

        A caller without the lock of the join does not delete the statistics' buffer, which may belong to another
        training by now. The next maker of a group deletes it.
        """
        worker, self._worker = self._worker, None
        return worker is not None and worker.membership.withdraw()

    def _compare(self, weights: smb.Buffer) -> None:
        """Raise InvalidArgumentError if the group has another model."""
        _compare(weights, self._trained.table)
        _compare_frozen(weights, self._mark)


def _metadata(vector: ModelParameters | Statistics) -> dict[str, Any]:
    tied = {other: entry.names[0] for entry in vector.entries for other in entry.names[1:]}
    return vector.table.to_metadata() | ({TIED: tied} if tied else {})


def table_of(buffer: smb.Buffer) -> TensorTable:
    """Return the table of a group's tensors. Raises InvalidArgumentError if smb.torch.join did not make the group."""
    if not buffer.table:
        raise InvalidArgumentError(
            f"training {buffer.name!r} has no names for its tensors, so it was not made by smb.torch.join; read it "
            f"with smb.train.shared"
        )
    return buffer.table


def _scheme(
    asked: str | smb.train.Scheme | None, settings: dict[str, Any], groups: smb.train.Scheme | None
) -> smb.train.Scheme | None:
    """Return the scheme that the joiner asks for; settings that it leaves out are the group's."""
    if not isinstance(asked, str):
        return asked
    if groups is not None and asked == groups.NAME:
        settings = groups.settings() | settings
    return smb.train.scheme_of(asked, settings)


def _compare(buffer: smb.Buffer, ours: TensorTable) -> None:
    theirs = table_of(buffer)
    differences = []
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        here, there = (_shape(table, key) for table in (ours, theirs))
        if here != there:
            differences.append(f"{key} is {here} here, and {there} in the group")
    if differences := differences or ours.differences(theirs):
        raise InvalidArgumentError(
            f"join of training {buffer.name!r}: it has another model: {'; '.join(differences[:3])}"
            + (f", and {len(differences) - 3} more" if len(differences) > 3 else "")
            + f". Nothing was changed. Take another name, or fresh=True: it deletes {buffer.name!r} if nobody trains it"
        )


def _warn_of_idle(name: str, entries: Sequence[TensorEntry]) -> None:
    """Warn if the optimizer has parameters that do not train."""
    idle = sum(entry.count for entry in entries if not entry.tensor.requires_grad)
    if idle:
        _log.warning(
            "training %r shares %d values, and %d of them require no gradients: they are shared because the optimizer "
            "has them. Give the optimizer only parameters that train, and the others cost nothing",
            name,
            sum(entry.count for entry in entries),
            idle,
        )


def _compare_frozen(buffer: smb.Buffer, mark: dict[str, str] | None) -> None:
    """Raise InvalidArgumentError if the frozen parameters have other values than those of the group's maker. Their
    dtypes may differ; then values are not compared.
    """
    theirs = buffer.metadata.get(FROZEN)
    if mark and theirs and mark["types"] == theirs["types"] and mark["values"] != theirs["values"]:
        raise InvalidArgumentError(
            f"join of training {buffer.name!r}: the model's frozen parameters have other values than in the process "
            f"that made the group, and what is trained fits only one of the two. Load the same frozen values before "
            f"joining"
        )


def _shape(table: TensorTable, name: str) -> str:
    return f"float32{list(table[name].shape)}" if name in table else "missing (or a frozen parameter)"
