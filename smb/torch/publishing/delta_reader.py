"""Reads generations that are published as deltas (delta_writer.py).

A reader takes the entries after the generation that it has, and the deltas that they name. If these deltas are gone, or
larger than a state, the reader begins with the last whole state. At the end it compares the state's sum: a state with
another sum than the published one is never shown, but read anew. A reader of parts takes the parts of a delta that
concern it (delta_parts.py), and compares their checksums.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.engine import delta_apply, state_sum
from smb.errors import NotFoundError, UnavailableError
from smb.published import LOG
from smb.relay.publication_log import LogEntry, chain, log_of
from smb.torch.publishing.delta_parts import Choice

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.client import Client
    from smb.relay.reader_source import Nearest
    from smb.torch.publishing.state_bytes import PartBytes, StateBytes

_TRIES = 100  # attempts of a reader while publications overtake it
_TRIES_NEAR = 3  # attempts at a mirror before the reader takes another one


class DeltaReader:
    """A follower's side: brings a state from its generation to the latest one. One thread at a time."""

    def __init__(
        self,
        client: Client,
        wholes: Buffer,
        nearest: Nearest,
        memory: StateBytes | PartBytes,
        deltas: int,
        timeout: float,
    ) -> None:
        """`nearest` chooses among the state's buffer and its mirrors. The log is read from the nearest one, too."""
        self._log = log_of(client.open(wholes.name + LOG, timeout=timeout), deltas, wholes)
        self._wholes = nearest
        self._name = wholes.name
        self._logs = nearest.beside(self._log.buffer)
        self._memory = memory
        self.generation = 0  # the generation of `memory`
        self._returned = 0  # by the last read; mirrors that are behind this generation are not read
        self._total = 0
        self.received_bytes = 0

    @property
    def latest(self) -> int:
        """The generation that was published last."""
        return self._log.buffer.version

    def generations(self, versions: Collection[int]) -> tuple[int, ...]:
        """Return the generations that can be read now, if the state's buffer has these versions."""
        entries = self._log.entries(self._log.buffer, self.latest)
        return tuple(
            entry.generation
            for entry in entries
            if entry.whole_version in versions and chain(entries, entry.whole_generation, entry.generation) is not None
        )

    @property
    def mirror_name(self) -> str:
        """The state's mirror on the server from which generations come now; "" if they come from the source. For any
        thread.
        """
        name = self._logs.mirror_name
        return self._name + name.removeprefix(self._log.buffer.name) if name else ""

    @property
    def transports(self) -> tuple[str, ...]:
        """As Buffer.transports, of the log from which generations come."""
        return self._logs.transports

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
            chosen = None if deltas is None else self._chosen(source, deltas)
            if chosen is None or sum(each.nbytes for each in chosen) >= self._memory.nbytes:
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
                chosen = None if deltas is None else self._chosen(source, deltas)
            if chosen is not None and deltas is not None and self._apply(source, latest, entries, deltas, chosen, to):
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
            self._wholes.read(self._memory.read, 0, wanted.whole_version)
        except NotFoundError:  # overwritten; a later entry names another one
            return None
        self.received_bytes += self._memory.nbytes
        if self._memory.is_whole:
            self._total = state_sum(self._memory.width, self._memory.bytes, self._memory.runs)
            if self._total != wanted.whole_total:
                return None
        self.generation = wanted.whole_generation
        return deltas

    def _chosen(self, source: Buffer, deltas: Sequence[LogEntry]) -> list[Choice] | None:
        """Return what to read of each delta; None if one has no valid table."""
        chosen = []
        for entry in deltas:
            read = partial(self._read_range, source, entry)
            chosen.append(Choice(read, entry.nbytes, None if self._memory.is_whole else self._memory.runs))
        return chosen if all(choice.is_valid for choice in chosen) else None

    def _read_range(self, source: Buffer, entry: LogEntry, start: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Read bytes of a delta."""
        self.received_bytes += nbytes
        return source.read(self._log.position(entry) + start, nbytes, out=np.empty(nbytes, np.uint8))

    def _apply(
        self,
        source: Buffer,
        latest: int,
        entries: tuple[LogEntry, ...],
        deltas: tuple[LogEntry, ...],
        chosen: Sequence[Choice],
        to: int,
    ) -> bool:
        """Bring the memory to that generation. Returns False if it is unchanged, or was spoiled."""
        read = [choice.parts() for choice in chosen]
        if deltas and not self._log.holds(source, deltas[0], latest):
            return False  # the deltas may have been overwritten; the memory is unchanged
        wanted = next(entry.total for entry in entries if entry.generation == to)
        self.generation = 0  # until all deltas are applied and the sum is right
        total: int | None = self._total
        memory = self._memory
        for delta in read:
            if delta is None or total is None:
                return False
            if len(delta):
                total = delta_apply(memory.width, memory.bytes, memory.runs, memory.count, delta, total)
        if total is None or (memory.is_whole and total != wanted):
            return False
        self.generation, self._total = to, total
        return True
