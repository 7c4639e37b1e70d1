"""Work units: rows of a data set for workers that come and go, each unit done once in every epoch.

The buffer NAME has one word for each unit: epoch << 32 | incarnation. (e, 0): the epochs before e are done, e is to be
done; (e, i): incarnation i works on epoch e. Each change is one compare_swap, so a unit is in one worker's hands at a
time. A worker that dies in between leaves only its word, by which the unit is found. NAME/members is a table of
members, each with a lock (members.py).

Tickets from a counter lead every worker to another unit; they are hints, nothing depends on them. At the end of each
epoch a worker looks for units that were left behind: units of dead workers, and units of lost tickets.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from smb.client import Client
from smb.errors import AlreadyExistsError, DeadlineError, Error, InvalidArgumentError, NotFoundError
from smb.train import member_table as t
from smb.train import members
from smb.train.group import wake
from smb.train.group_deletion import deleting
from smb.train.join_locks import keeping
from smb.train.long_waits import LongWait
from smb.train.members import Member, MembershipLostError

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.train.worker import Worker

METADATA = "smb.train.work_units"
_UNITS_MAX = 1 << 24  # 128 MiB of words
_LOOK_MAX = 1 << 20  # words that `epochs_of` reads at most: 8 MiB
_HALF = 32
_LOW = (1 << _HALF) - 1

_log = logging.getLogger("smb")


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows `start` to `start` + `count` - 1 of epoch number `epoch`, counted from 0."""

    epoch: int
    start: int
    count: int


class WorkUnits:
    """Hands out rows 0 to total - 1 in units of `unit` rows over all workers that use that name. Iterate over it.

    ```python
    with smb.train.WorkUnits(client, "run/units", total=1000, unit=100, epochs=1) as units:
        for rows in units:
            train(data[rows.start : rows.start + rows.count])
    ```

    A unit is done when the next one is asked for. A unit in progress at close(), or when the block is left, is handed
    out again at once. That of a worker that died is handed out again `lease` seconds later, by the end of the epoch. If
    a worker was stopped for longer than that, a unit may be done twice; this is logged. Each epoch's order is drawn
    from `seed`. The iteration ends when all workers together have done all `epochs` (None: never); it waits for the
    last units of others.

    In a scheme with rounds pass `worker`: it steps aside while it waits, so that the others need not wait for it. All
    processes that use the name must pass the same total, unit, seed and lease; otherwise InvalidArgumentError is
    raised. A later run may ask for more epochs.

    Four small calls for each unit. Delete the buffers NAME, NAME/members and NAME/tick when all is done (delete_units);
    under the name of a group, as "run/units", smb.train.delete does it.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        total: int,
        unit: int,
        seed: int = 0,
        *,
        epochs: int | None = None,
        lease: float = 10.0,
        worker: Worker | None = None,
    ) -> None:
        asked = f"work units {name!r}"
        if total < 1 or unit < 1 or not 0 <= seed < 2**63 or (epochs is not None and epochs < 0):
            raise InvalidArgumentError(
                f"{asked}: total and unit must be from 1 on, seed from 0 to below 2**63, epochs None or from 0 on, not "
                f"total={total!r}, unit={unit!r}, seed={seed!r}, epochs={epochs!r}"
            )
        self._units = -(-total // unit)
        if self._units > _UNITS_MAX:
            raise InvalidArgumentError(
                f"{asked}: there may be at most {_UNITS_MAX} units, not {self._units}; make each unit larger"
            )
        settings = {"total": total, "unit": unit, "seed": seed, "lease": lease}
        replicas = worker.weights.info.replicas if worker is not None else 1
        self._client, self._name = client, name
        self._total, self._unit, self._seed, self._lease = total, unit, seed, lease
        self._end = _LOW if epochs is None else epochs
        # Under both locks: otherwise a process that deletes these units or the worker's training at this moment could
        # delete a part of the buffers made here, or leave it to the next training of that name.
        under = contextlib.nullcontext() if worker is None else worker.group.setting_up()
        with under, keeping(client, f"{name}/setup", replicas):
            try:
                self._words = client.create(
                    name,
                    1 + self._units,
                    "int64",
                    servers=1,
                    replicas=replicas,
                    exist_ok=True,
                    metadata={METADATA: settings},
                )
            except AlreadyExistsError as error:
                raise InvalidArgumentError(
                    f"{asked}: {error}: it has another number of units, or is another kind of buffer"
                ) from error
            found = self._words.metadata.get(METADATA)
            if isinstance(found, dict):
                found = {key: value for key, value in found.items() if key != "epochs"}  # version 0.1 stored it
            if found != settings:
                raise InvalidArgumentError(
                    f"{asked}: they exist with the settings {found}, not {settings}; pass the same, or take "
                    f"another name"
                )
            self._table = t.Table(_members(client, f"{name}/members", worker, replicas))
            self._tick = client.create(f"{name}/tick", 1, "int64", servers=1, replicas=replicas, exist_ok=True)
        self._seen = self._tick.version
        self._member: Member | None = self._admit()
        self._held: tuple[int, int] | None = None  # unit, word
        self._worker = worker
        self._ticket: tuple[int, int] | None = None  # drawn and not used yet
        self._swept = 0  # number of epochs whose left-over units this worker has looked for
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def __iter__(self) -> Iterator[Unit]:
        """Hand out units until all epochs are done."""
        while (unit := self.take()) is not None:
            yield unit

    def epoch(self) -> int:
        """Return the epoch of the next unit that any worker gets. One small read.

        ```python
        with smb.train.WorkUnits(client, "run/units", total=1000, unit=100) as units:
            units.epoch()  # 0
        ```
        """
        return int(self._words.read(0, 1)[0]) // self._units

    def end_after(self, epochs: int) -> int:
        """End the iteration after so many epochs, counted from the first one of the name, as `epochs` does. Return how
        many units all workers together have left until then. One read of 8 bytes for each unit.
        """
        self._end = epochs
        done = self._words.read(1) >> _HALF
        return int(np.maximum(0, epochs - done).sum())

    def take(self, at_end: Callable[[], object] | None = None) -> Unit | None:
        """Return the next unit, and mark the previous one as done. Returns None when all units are done, after waiting
        for the last units of other workers.

        After the last unit of this worker, `worker` contributes its unsent steps and `at_end` is called before the unit
        counts as done. So a process that sees that all units are done also sees a model that contains all of them.

        ```python
        with smb.train.WorkUnits(client, "run/units", total=1000, unit=100, epochs=1) as units:
            unit = units.take()
            unit.epoch, unit.count  # (0, 100)
        ```
        """
        member = self._here()
        # The previous unit stays in hand until the next one is, or the rest is contributed. Otherwise others might see
        # that all units are done while this worker has only drawn a ticket.
        former = self._held
        while True:
            epoch, hint = self._ticket = self._ticket or self._draw()
            if epoch >= self._end:
                if self._worker is not None:
                    self._worker.steps.come_back()
                    self._worker.contribute_rest()
                if at_end is not None:
                    at_end()
                return self._end_with_rest(member)
            if epoch > self._swept:
                left = self._sweep(member, epoch, former)
                if left is not None:
                    return self._handed_out(former, left)
                self._swept = epoch
            self._ticket = None
            if former is not None and hint == former[0]:  # the same unit again
                if former[1] >> _HALF >= epoch:  # the ticket is the one of the unit in hand
                    continue
                found = self._go_on(member, former)
                if found is not None:
                    return found
                former = None
            found = self._claim(member, hint, epoch)
            if found is not None:
                return self._handed_out(former, found)

    def close(self) -> None:
        """Hand back the unit in progress, and leave. A second call does nothing.

        If a server is away it raises UnavailableError or TimeoutError; the unit is then handed out again like that of a
        worker that died.

        ```python
        units = smb.train.WorkUnits(client, "run/units", total=1000, unit=100, epochs=1)
        unit = units.take()
        units.close()  # the unit is handed out again
        ```
        """
        member, self._member = self._member, None
        if member is None:
            return
        with contextlib.ExitStack() as last:  # otherwise the member would stay and keep its unit from the others
            last.callback(wake, self._tick, self._lease)
            last.callback(member.leave)
            self._hand_back()

    def __enter__(self) -> WorkUnits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Error as failure:
            if error is None:
                raise
            _log.warning(
                "work units %r: could not hand back the unit in hand while another error was raised: %s",
                self._name,
                failure,
            )

    # ---- inside

    def _admit(self) -> Member:
        return members.admit(self._client, self._name, self._table, self._lease, lambda _: 0)

    def _here(self) -> Member:
        if self._member is None:
            raise InvalidArgumentError(f"work units {self._name!r} are closed; make a new WorkUnits object")
        try:
            self._member.check()
        except MembershipLostError:
            _log.warning("work units %r: the lease was lost; the unit in hand may be done twice", self._name)
            self._finish()
            self._member.leave()
            self._member = self._admit()
        return self._member

    def _finish(self) -> None:
        if self._held is None:
            return
        index, word = self._held
        done = ((word >> _HALF) + 1) << _HALF
        if self._words.compare_swap(1 + index, word, done) not in (word, done):
            _log.warning("work units %r: unit %d was handed out again, so it may be done twice", self._name, index)
        self._held = None

    def _go_on(self, member: Member, former: tuple[int, int]) -> Unit | None:
        """In one step mark the unit in hand as done and take it for its next epoch. Returns None if the unit was handed
        out again.

        If the unit were free in between, another worker could take it and see that all units are done before this
        worker's rest is contributed.
        """
        index, word = former
        new = ((word >> _HALF) + 1) << _HALF | member.incarnation
        # Or an earlier call whose answer was lost did this.
        if self._words.compare_swap(1 + index, word, new) in (word, new):
            return self._taken(index, new)
        _log.warning("work units %r: unit %d was handed out again, so it may be done twice", self._name, index)
        self._held = None
        return None

    def _hand_back(self) -> None:
        """Free the unit in hand. If that fails, this worker finds the unit itself later, as one
        of its own left behind.
        """
        held, self._held = self._held, None
        if held is not None:
            index, word = held
            self._words.compare_swap(1 + index, word, word & ~_LOW)

    def _handed_out(self, former: tuple[int, int] | None, unit: Unit) -> Unit:
        """Mark the former unit as done. If that fails, the former unit is still in hand, and the new one is found later
        as left behind.
        """
        new, self._held = self._held, former
        self._finish()
        self._held = new
        return unit

    def _draw(self) -> tuple[int, int]:
        """Return (epoch, unit) of the next ticket."""
        epoch, ticket = divmod(self._words.fetch_add(0, 1), self._units)
        if self._order[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._units)
            self._order = (epoch, order)
        return epoch, int(self._order[1][ticket])

    def _claim(self, member: Member, index: int, epoch: int, found: int | None = None) -> Unit | None:
        """Take a unit that no worker has, for this epoch or an earlier one that is not done."""
        word = epoch << _HALF if found is None else found
        while True:
            new = word & ~_LOW | member.incarnation
            before = self._words.compare_swap(1 + index, word, new)
            if before == word:
                return self._taken(index, new)
            if before & _LOW or before >> _HALF > epoch:
                return None
            word = before

    def _taken(self, index: int, word: int) -> Unit:
        self._held = (index, word)
        start = index * self._unit
        return Unit(word >> _HALF, start, min(self._unit, self._total - start))

    def _sweep(self, member: Member, epoch: int, held: tuple[int, int] | None = None) -> Unit | None:
        """Take a unit that was left behind in the epochs before this one, except the unit `held`."""
        words = self._words.read(1)
        if held is not None:
            words[held[0]] = epoch << _HALF
        behind = np.flatnonzero(words >> _HALF < epoch)
        if not behind.size:
            return None
        owners = np.unique(words[behind] & _LOW)
        # This worker has no other unit in hand, so a word with its incarnation is from a claim that seemed to fail.
        gone = {member.incarnation} | self._gone({int(owner) for owner in owners} - {0, member.incarnation})
        for index in behind:
            word = int(words[index])
            owner = word & _LOW
            if not owner or owner in gone:
                unit = self._claim(member, int(index), epoch - 1, word)
                if unit is not None:
                    return unit
        return None

    def _gone(self, owners: set[int]) -> set[int]:
        """Return the incarnations of `owners` that are dead."""
        rows = self._table.read()
        slots = {int(rows[1 + slot, t.INCARNATION]): slot for slot in members.live(rows)}
        suspects = [slots[owner] for owner in owners if owner in slots]
        # The death of a training's worker is logged by the training, so it is logged here at DEBUG only.
        level = logging.WARNING if self._worker is None else logging.DEBUG
        dead = members.reap(self._client, self._name, self._table, self._lease, suspects, level)
        return {owner for owner in owners if owner not in slots or slots[owner] in dead}

    def _end_with_rest(self, member: Member) -> Unit | None:
        """End after this worker's rest was contributed: from here on others may see that all units are done.

        If rests count, this worker steps aside first. Then every present worker has a unit in hand, and the last rest
        has no other worker to wait for: its round is closed before its unit is done.
        """
        worker, finished = self._worker, False
        if worker is None or not worker.exchange.rests_count:
            self._finish()
            return self._last(member)
        try:
            with worker.aside():
                self._finish()
                finished = True
                wake(self._tick, self._lease)
                return self._wait_for_last(member)
        except BaseException:  # as in _last
            if finished:
                self._hand_back()
            raise

    def _last(self, member: Member) -> Unit | None:
        """After all units are handed out, wait until they are done or a worker with one dies."""
        wake(self._tick, self._lease)
        left = self._sweep(member, self._end)
        if left is not None or self._all_done():
            return left
        try:
            with self._worker.aside() if self._worker is not None else contextlib.nullcontext():
                return self._wait_for_last(member)
        # The caller did not get the unit that was found, so the next call must not mark it as done.
        except BaseException:
            self._hand_back()
            raise

    def _all_done(self) -> bool:
        return bool((self._words.read(1) >> _HALF >= self._end).all())

    def _wait_for_last(self, member: Member) -> Unit | None:
        long = LongWait(f"work units {self._name!r}", self._table, self._lease)
        while True:
            left = self._sweep(member, self._end)
            if left is not None or self._all_done():
                return left
            try:
                self._seen = self._tick.wait(self._seen + 1, timeout=max(0.05, self._lease / 4))
            except DeadlineError:
                member = self._here()
                words, rows = self._words.read(1), self._table.read()
                owners = words[words >> _HALF < self._end] & _LOW
                slots = [slot for slot in members.live(rows) if rows[1 + slot, t.INCARNATION] in owners]
                long.tell(rows, slots, self._end, "with units that are not done")


def _members(client: Client, name: str, worker: Worker | None, replicas: int) -> Buffer:
    """Return the buffer of the table, made if there is none: with as many slots as the training's, or most of all. The
    caller holds the lock under which it is made.
    """
    slots = t.SLOTS_MAX if worker is None else worker.group.table.slots
    with contextlib.suppress(NotFoundError):
        found = client.open(name)  # made with or without a worker, or by an earlier release
        if found.dtype == np.int64 and len(found.shape) == 2 and found.shape[0] > 1 and found.shape[1] == t.FIELDS:
            return found
    shape = (1 + slots, t.FIELDS)
    return client.create(name, shape, "int64", servers=1, stripe=t.STRIPE, replicas=replicas, exist_ok=True)


def epochs_of(client: Client, name: str) -> tuple[int | None, bool]:
    """Return how many epochs of the work units of that name are done (None if there are none), and whether all are
    done: no worker has a unit in hand, and a worker that asked for a further one got none. One read of 8 bytes per
    unit; for more than 2^20 units it returns (None, False). Changes nothing.
    """
    try:
        buffer = client.open(name)
        if buffer.dtype != np.int64 or not 2 <= buffer.size <= _LOOK_MAX:  # any process may make a buffer of that name
            return None, False
        words = buffer.read()
    except Error as error:  # its server may be away
        _log.debug("work units %r: %s", name, error)
        return None, False
    epochs = int(words[1:].min() >> _HALF)
    at_end = bool((words[1:] == epochs << _HALF).all())
    return epochs, at_end and epochs > 0 and int(words[0]) > epochs * (words.size - 1)


def delete_units(client: Client, name: str) -> None:
    """Delete the buffers of work units. Waits for a process that is creating them at this moment.

    Raises NotFoundError; TimeoutError and LockLostError as smb.train.delete.

    ```python
    smb.train.WorkUnits(client, "rows", total=1000, unit=100, epochs=1).close()
    smb.train.delete_units(client, "rows")
    ```
    """
    if not any(info.name == name for info in client.list()):
        raise NotFoundError(f"there are no work units {name!r}")
    with deleting(client, f"delete of work units {name!r}", name) as check:
        for suffix in ("", "/members", "/tick"):
            check()
            client.delete(name + suffix, missing_ok=True)
