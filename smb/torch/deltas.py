"""Generations as deltas: the changes since the last generation, bit for bit, with whole states in between.

There are two buffers. NAME holds whole states, by its versions. NAME.log has an entry for each generation, and the
deltas (smb/relay/publication_log.py). A generation exists once its entry is published.

A reader takes the entries after the generation that it has, and the deltas that they name. If these deltas are gone, or
larger than a state, the reader begins with the last whole state. At the end it compares the state's sum: a state with
another sum than the published one is never shown, but read anew.

A generation is published whole, before its entry, if its delta would be large, if it is the first one of a trainer's
process, or after a failure.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.engine import DELTA_PART_MAX, delta_apply, delta_encode, memory_of, state_sum
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, NotFoundError, UnavailableError
from smb.pins import PIN_S_MAX
from smb.published import LOG
from smb.relay.publication_log import LogEntry, PublicationLog, chain
from smb.spi import versions_of
from smb.torch.state_bytes import StateBytes

if TYPE_CHECKING:
    import torch

    from smb.buffer import Buffer
    from smb.call.versions import Publication
    from smb.client import Client
    from smb.relay.reader_source import Nearest

DELTAS_MAX = 1024
_log = logging.getLogger("smb")
_SLICE = 1 << 20  # elements that a thread compares at a time
_TURN_S = 10.0  # the turn of a publisher that is killed lasts this long; a slow publisher renews its turn
_TRIES = 100  # attempts of a reader while publications overtake it
_TRIES_NEAR = 3  # attempts at a mirror before the reader takes another one


def create(client: Client, made: list[Buffer], name: str, *form: Any, **options: Any) -> Buffer:
    """As Client.create, if the buffer may exist already. A buffer that this call had to make is added to `made`."""
    try:
        buffer = client.create(name, *form, **options)
    except AlreadyExistsError:
        return client.create(name, *form, exist_ok=True, **options)
    made.append(buffer)
    return buffer


def _log_of(buffer: Buffer, deltas: int, state: Buffer) -> PublicationLog:
    """Return the log in a buffer. Raises InvalidArgumentError if no Publisher of that state made the buffer."""
    if buffer.size != PublicationLog.form(deltas, state.nbytes)[0]:
        raise InvalidArgumentError(
            f"{buffer.name!r} was not made by a Publisher of {state.name!r} with deltas={deltas}; delete it, or "
            f"publish under another name"
        )
    return PublicationLog(buffer)


class DeltaWriter:
    """A trainer's side. One thread at a time."""

    def __init__(
        self,
        client: Client,
        wholes: Buffer,
        state: StateBytes,
        deltas: int,
        placement: Mapping[str, Any],
        made: list[Buffer],
    ) -> None:
        """`wholes` is the state's buffer. A log is made if it does not exist, and added to `made`."""
        size, metadata = PublicationLog.form(deltas, wholes.nbytes)
        buffer = create(client, made, wholes.name + LOG, size, "uint8", metadata=metadata, **placement)
        self._log = _log_of(buffer, deltas, wholes)
        self._wholes = wholes
        self._state = state
        self._deltas = deltas
        self._last: LogEntry | None = None  # the entry under which `state` was published; None: publish it whole
        self._begin = 0  # where the deltas since the last whole state begin in the ring
        self._delta: bytes | None = None
        self._total = 0
        self.sent_bytes = 0

    @property
    def generation(self) -> int:
        """The generation that was published last."""
        return self._log.buffer.version

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy a state into `state`."""
        self._take([tensors])

    def take_pairs(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As take, one tensor after the other. If the pairs fail, the next state is published whole."""

        def parts() -> Iterator[Mapping[str, torch.Tensor]]:
            for name, tensor in pairs:
                yield {name: tensor}
                del tensor  # before the next one is made

        self._take(parts())

    def _take(self, parts: Iterable[Mapping[str, torch.Tensor]]) -> None:
        self._delta, last = None, self._last
        self._last = None  # until the state is published
        width, base = self._state.width, self._state.bytes.ctypes.data

        def compare(compared: tuple[int, int, int]) -> tuple[bytes, int] | None:
            at, address, nbytes = compared
            room = np.empty(nbytes // 2 + 512, np.uint8)
            found = delta_encode(width, base + at, address, nbytes // width, at // width, room)
            return None if found is None else (room[: found[0]].tobytes(), found[2])

        delta: list[bytes] | None = None if last is None else []  # None: the state is published whole
        nbytes, total = 0, last.total if last is not None else 0
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            for part in parts:
                given = list(self._state.memories(part))  # with the owners, which keep the memory that is read here
                slices = [
                    (at + offset, address + offset, min(_SLICE * width, size - offset))
                    for at, address, size, _ in given
                    for offset in range(0, size, min(_SLICE, DELTA_PART_MAX) * width)
                ]
                for encoded in map(compare, slices) if len(slices) < 2 else threads.map(compare, slices):
                    if encoded is None or delta is None or nbytes + len(encoded[0]) > self._log.delta_max:
                        delta = None
                        continue
                    delta.append(encoded[0])
                    nbytes, total = nbytes + len(encoded[0]), total + encoded[1]
                del part, given  # before the next tensor is made
        if delta is not None:
            self._delta, self._last, self._total = b"".join(delta), last, total % 2**64

    def publish(self, asked: str, timeout: float) -> int:
        """Publish the state that was taken last. Return its generation."""
        last, delta = self._last, self._delta
        self._last = self._delta = None
        self.sent_bytes = 0
        # In the publisher's turn, which refuses late writes of a former trainer: its entry and its delta would lie
        # where ours do.
        turn = versions_of(self._log.buffer).begin(timeout, _TURN_S, max(PIN_S_MAX, timeout - 1.0))
        with turn.kept():
            try:
                made = None
                if last is not None and delta is not None and turn.version == last.generation + 1:
                    made = self._with_delta(turn, last, delta)
                made = made or self._whole(asked, turn.version, timeout)
                self._send(turn, self._log.slot(made.generation), made.to_words())
            except BaseException:
                turn.give_up()
                raise
            turn.commit()
        return self._finish(asked, made, timeout)

    def _send(self, turn: Publication, start: int, content: np.ndarray[Any, Any]) -> None:
        turn.write(start, content.nbytes, memory_of(content))
        self.sent_bytes += content.nbytes

    def _whole(self, asked: str, generation: int, timeout: float) -> LogEntry:
        """Publish the whole state, with which readers may begin."""
        before = self._log.entries(self._log.buffer, generation - 1, generation - 2) if generation > 1 else ()
        if generation > 1 and not before:
            raise Error(
                f"{asked}: the log's last entry was not written by a Publisher; delete the state with its log, and "
                f"publish anew"
            )
        end = before[-1].end if before else 0
        total = state_sum(self._state.bytes)
        version = self._publish_whole(timeout)
        self._begin = end
        return LogEntry(generation, end, 0, total, generation, version, total)

    def _with_delta(self, turn: Publication, last: LogEntry, delta: bytes) -> LogEntry | None:
        """Write the delta. Returns None if readers could not get to it from the last whole state."""
        log = self._log
        position = log.next_position(last.end, len(delta))
        made = replace(last, generation=turn.version, position=position, nbytes=len(delta), total=self._total)
        if made.generation - made.whole_generation > log.kept or made.end - self._begin > log.room:
            return None
        if delta:
            self._send(turn, log.position(made), np.frombuffer(delta, np.uint8))
        return made

    def _finish(self, asked: str, made: LogEntry, timeout: float) -> int:
        far = made.end - self._begin > self._log.room // 2
        if made.generation - made.whole_generation >= self._deltas or far:
            # The next generation names this whole state; until then readers begin with the one before.
            try:
                version = self._publish_whole(timeout)
                made = replace(made, whole_generation=made.generation, whole_version=version, whole_total=made.total)
                self._begin = made.end
            except Error as error:  # the generation exists; the next one tries again
                _log.warning("%s: generation %d is not there as a whole state yet: %s", asked, made.generation, error)
        self._last = made
        return made.generation

    def publish_pairs(self, asked: str, pairs: Iterable[tuple[str, torch.Tensor]], timeout: float) -> int:
        """Publish a state that comes one tensor after the other. Return its generation."""
        self.take_pairs(pairs)
        return self.publish(asked, timeout)

    def _publish_whole(self, timeout: float) -> int:
        self.sent_bytes += self._state.nbytes
        return self._wholes.publish(self._state.elements, timeout=timeout)


class DeltaReader:
    """A follower's side: brings a state from its generation to the latest one. One thread at a time."""

    def __init__(
        self, client: Client, wholes: Buffer, nearest: Nearest, state: StateBytes, deltas: int, timeout: float
    ) -> None:
        """`nearest` chooses among the state's buffer and its mirrors. The log is read from the nearest one, too."""
        self._log = _log_of(client.open(wholes.name + LOG, timeout=timeout), deltas, wholes)
        self._wholes = nearest
        self._name = wholes.name
        self._logs = nearest.beside(self._log.buffer)
        self._state = state
        self.generation = 0  # the generation of `state`
        self._returned = 0  # by the last read; mirrors that are behind this generation are not read
        self._total = 0
        self.received_bytes = 0

    @property
    def latest(self) -> int:
        """The generation that was published last."""
        return self._log.buffer.version

    @property
    def mirror_name(self) -> str:
        """The state's mirror on the server from which generations come now; "" if they come from the source. For any
        thread.
        """
        name = self._logs.mirror_name
        return self._name + name.removeprefix(self._log.buffer.name) if name else ""

    def wait(self, generation: int, timeout: float | None) -> int:
        """As Buffer.wait, but until the nearest mirror has the generation, too."""
        return self._logs.wait(generation, timeout)

    def read(self, asked: str, wanted: int | None = None) -> int:
        """Bring the state to the latest generation of the nearest source, or to `wanted`, and return its number; 0
        before the first generation. Raises UnavailableError if publications overtake every attempt, NotFoundError if
        `wanted` is not there.
        """
        self.received_bytes = 0
        self._returned = self._logs.read(partial(self._read_from, asked), self._returned, wanted)
        return self._returned

    def _read_from(self, asked: str, source: Buffer, wanted: int | None) -> int:
        """As read, from the log or a mirror of it."""
        for _ in range(_TRIES if source is self._log.buffer else _TRIES_NEAR):
            latest = source.version
            if latest < (wanted or 0):
                raise NotFoundError(
                    f"{asked}: generation {wanted} is not published yet; the latest is {latest}; wait(generation=) "
                    f"waits for it"
                )
            to = latest if wanted is None else wanted
            if to in (0, self.generation):
                return to
            since = self.generation if self.generation < to else 0
            entries = self._log.entries(source, latest, since)
            deltas = chain(entries, since, to) if since else None
            if deltas is None or sum(entry.nbytes for entry in deltas) >= self._state.nbytes:
                if since:
                    entries = self._log.entries(source, latest)
                if not entries:
                    continue  # later entries have overwritten them
                deltas = self._begin(entries, to)
                if deltas is None and to < latest:
                    raise NotFoundError(
                        f"{asked}: generation {wanted} can't be read any more, because the whole state before it was "
                        f"overwritten"
                    )
            if deltas is not None and self._apply(source, latest, entries, deltas, to):
                return self.generation
        raise UnavailableError(
            f"{asked}: each attempt was overtaken by a publication, or read other bytes than were published; the state "
            f"is unchanged or empty; read again"
        )

    def _begin(self, entries: tuple[LogEntry, ...], to: int) -> tuple[LogEntry, ...] | None:
        """Read the last whole state before a generation. Return the deltas from there on, or None if one of them is
        gone.
        """
        wanted = next((entry for entry in entries if entry.generation == to), None)
        deltas = chain(entries, wanted.whole_generation, to) if wanted is not None else None
        if wanted is None or deltas is None:
            return None
        self.generation = 0
        try:
            self._wholes.read(self._state.read, 0, wanted.whole_version)
        except NotFoundError:  # overwritten; a later entry names another one
            return None
        self.received_bytes += self._state.nbytes
        self._total = state_sum(self._state.bytes)
        if self._total != wanted.whole_total:
            return None
        self.generation = wanted.whole_generation
        return deltas

    def _apply(
        self, source: Buffer, latest: int, entries: tuple[LogEntry, ...], deltas: tuple[LogEntry, ...], to: int
    ) -> bool:
        """Bring the state to that generation. Returns False if the state is unchanged, or was spoiled."""
        read = [np.empty(entry.nbytes, np.uint8) for entry in deltas]
        for entry, delta in zip(deltas, read, strict=True):
            if delta.size:
                source.read(self._log.position(entry), delta.size, out=delta)
                self.received_bytes += delta.size
        if deltas and not self._log.holds(source, deltas[0], latest):
            return False  # the deltas may have been overwritten; the state is unchanged
        wanted = next(entry.total for entry in entries if entry.generation == to)
        self.generation = 0  # until all deltas are applied and the sum is right
        total: int | None = self._total
        for delta in read:
            if delta.size and total is not None:
                total = delta_apply(self._state.width, self._state.bytes, delta, total)
        if total != wanted:
            return False
        self.generation, self._total = to, total
        return True
