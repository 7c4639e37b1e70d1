"""The log of a state with deltas=: the entry of each generation, and the deltas (docs/decisions/0042).

NAME.log is one buffer of bytes with one copy. It begins with slots of 64 bytes: the entry of generation g lies in slot
g modulo the number of slots. A ring follows, in which the deltas lie one after the other. Generation g exists once
version g of the buffer is published. Its entry is written before that, and stays until its slot is used again. The ring
begins at the next multiple of 4096 after the slots, and a delta does not cross the ring's end. The metadata has the
number of slots: {"smb.log": {"slots": 34}}.

The delta of entry e is in reach of entry g if it begins at most three quarters of the ring before the end of g's delta.
A delta that is in reach of entry g stays in the ring while g + 1 and g + 2 are written. So bytes read from the ring are
intact if they are in reach of an entry that was published when the read had ended.

A mirror of a log has the same positions, and takes one entry after the other, each once its delta is there. If some
entries in between are gone, it continues with an entry that only says that the whole state is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.errors import Error, InvalidArgumentError
from smb.relay.arrived import Blocks

if TYPE_CHECKING:
    from smb.buffer import Buffer

KEY = "smb.log"  # in the log's metadata: the number of slots
ENTRY_BYTES = 64
_WORDS = ENTRY_BYTES // 8
_FORMAT = 3  # 2 had other sums and no tables of parts; 1 described each generation with all deltas that it needs
_RING_STARTS = 4096  # alignment of the ring, so that blocks of deltas begin with chunks
_RING_MIN = 1 << 16
_DELTA_SHARE = 12  # the largest delta takes this part of the ring; larger changes are published whole
_SLACK = 3  # in largest deltas: two that are written ahead, and the gap at the end of the ring
_AHEAD = 2  # slots that are written ahead

Slots = np.ndarray[Any, np.dtype[np.int64]]  # (slots, words)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One generation. Its slot has eight int64 words: generation, 3 (the format), position, nbytes, total,
    whole_generation, whole_version, whole_total.

    `position` is where its delta begins in the ring, counted without wrapping around; `total` is the sum of its state.
    `whole_generation` is the last generation up to this one that is also there whole, as `whole_version` of the state's
    buffer.
    """

    generation: int
    position: int
    nbytes: int
    total: int
    whole_generation: int
    whole_version: int
    whole_total: int

    @property
    def is_whole(self) -> bool:
        """True if the generation was published whole and has no delta."""
        return self.whole_generation == self.generation

    @property
    def end(self) -> int:
        """The position at which the next delta may begin."""
        return self.position + self.nbytes

    def to_words(self) -> np.ndarray[Any, Any]:
        """Return the words of its slot."""
        words = np.zeros(_WORDS, np.int64)
        words[:4] = self.generation, _FORMAT, self.position, self.nbytes
        words[5:7] = self.whole_generation, self.whole_version
        words.view(np.uint64)[[4, 7]] = self.total, self.whole_total
        return words

    @classmethod
    def of(cls, words: np.ndarray[Any, Any], generation: int, ring_bytes: int) -> LogEntry | None:
        """Parse the words that `to_words` made; None if they are another generation's. Raises Error for invalid
        words.
        """
        if words[0] != generation:
            return None
        unsigned = words.view(np.uint64)
        entry = cls(
            generation, int(words[2]), int(words[3]), int(unsigned[4]), int(words[5]), int(words[6]), int(unsigned[7])
        )
        if words[1] != _FORMAT or not 1 <= entry.whole_generation <= generation:
            raise Error(
                f"the log's entry of generation {generation} is invalid: it was not written by a Publisher of this "
                f"release; delete the state with its log, and publish anew"
            )
        if entry.position < 0 or not 0 <= entry.nbytes <= ring_bytes:
            raise Error(f"the log's entry of generation {generation} is invalid: its delta cannot have these bytes")
        return entry


class PublicationLog:
    """The layout of a log, from its buffer, and the entries of the log or of a mirror."""

    def __init__(self, buffer: Buffer) -> None:
        """Raises InvalidArgumentError if the buffer is not a log."""
        about = buffer.metadata.get(KEY)
        slots = about.get("slots") if isinstance(about, Mapping) else None
        self.buffer = buffer
        if type(slots) is not int or slots <= _AHEAD or buffer.versions != 1 or buffer.dtype != np.uint8:
            raise InvalidArgumentError(f"{buffer.name!r} is not the log of a published state")
        self.slots = slots
        self.start = _ring_start(slots)
        self.size = buffer.size - self.start
        if self.size < _RING_MIN:
            raise InvalidArgumentError(f"{buffer.name!r} is too small for a log of a published state")
        self.delta_max = self.size // _DELTA_SHARE

    @staticmethod
    def form(deltas: int, state_bytes: int) -> tuple[int, dict[str, Any]]:
        """Return the bytes and the metadata of a log for a state that is published whole after every `deltas`
        deltas.
        """
        slots = 2 * deltas + _AHEAD
        return _ring_start(slots) + _ring_bytes(state_bytes), {KEY: {"slots": slots}}

    @staticmethod
    def may_be(nbytes: int, state_bytes: int) -> bool:
        """Return True if the log of some state of that size takes this many bytes."""
        start = nbytes - _ring_bytes(state_bytes)
        return start > 0 and start % _RING_STARTS == 0

    @property
    def room(self) -> int:
        """Bytes of deltas that are always in reach."""
        return self.size - _SLACK * self.delta_max

    @property
    def kept(self) -> int:
        """The largest number of last entries that can be in reach."""
        return self.slots - _AHEAD

    def slot(self, generation: int) -> int:
        """Return the first byte of that generation's entry."""
        return generation % self.slots * ENTRY_BYTES

    def position(self, entry: LogEntry) -> int:
        """Return the first byte of its delta."""
        return self.start + entry.position % self.size

    def next_position(self, end: int, nbytes: int) -> int:
        """Return the position of a delta that follows `end` and does not cross the ring's end."""
        left = self.size - end % self.size
        return end if nbytes <= left else end + left

    def blocks(self, entry: LogEntry) -> Blocks:
        """Return the blocks of its delta for relays, the same for all of them."""
        cut = Blocks.cut(entry.nbytes, self.buffer.layout.chunk_bytes)
        return Blocks(entry.nbytes, cut, self.position(entry), entry.generation)

    def read_slots(self, of: Buffer, first: int, last: int) -> Slots:
        """Read the entries of these generations from the log or a mirror of it; other slots are 0."""
        found = np.zeros((self.slots, _WORDS), np.int64)
        flat = found.reshape(-1).view(np.uint8)
        if last - first + 1 >= self.slots:
            of.read(0, flat.size, out=flat)
            return found
        begin, end = self.slot(first), self.slot(last) + ENTRY_BYTES
        for low, high in [(begin, end)] if begin < end else [(begin, flat.size), (0, end)]:
            of.read(low, high - low, out=flat[low:high])
        return found

    def entries(self, of: Buffer, last: int, since: int = 0) -> tuple[LogEntry, ...]:
        """Read the entries after `since` up to `last` from the log or a mirror of it, and return those that `known`
        returns.
        """
        first = max(since, last - self.kept) + 1
        return self.known(self.read_slots(of, first, last), first, last)

    def known(self, slots: Slots, first: int, last: int) -> tuple[LogEntry, ...]:
        """Return the entries from `first` to `last` that follow each other up to `last` and are in reach of it.

        Returns none if later entries have overwritten that. Raises Error for an invalid entry.
        """
        found: list[LogEntry] = []
        for generation in range(last, max(first, last - self.kept + 1, 1) - 1, -1):
            entry = LogEntry.of(slots[generation % self.slots], generation, self.size)
            if entry is None or (found and not self._reaches(found[0], entry)):
                break
            found.append(entry)
        return tuple(reversed(found))

    def _reaches(self, last: LogEntry, entry: LogEntry) -> bool:
        return entry.position >= last.end - self.room

    def holds(self, of: Buffer, entry: LogEntry, known: int = 0) -> bool:
        """Return True if the log, or a mirror of it, has had the delta of an entry until now.

        `known` is a generation that was there before, and that the entry was in reach of.
        """
        latest = of.version
        if known and latest < known + _AHEAD:
            return True
        return self.entries(of, latest, entry.generation - 1)[:1] == (entry,)


def next_of(entries: Sequence[LogEntry], after: int) -> LogEntry | None:
    """Return the entry that a mirror at generation `after` takes next. Pure.

    That is the following entry. If it is gone, or leads no further, it is an entry of the last whole state. None if
    that is gone, too.
    """
    last = entries[-1]
    if after:
        wholes = [entry for entry in entries if entry.is_whole and entry.generation > after]
        if wholes:
            return wholes[-1]
        if entries[0].generation <= after + 1:
            return next(entry for entry in entries if entry.generation == after + 1)
    if last.is_whole:
        return last
    first = next((entry for entry in entries if entry.generation == last.whole_generation + 1), None)
    if first is None:
        return None
    whole, total = last.whole_generation, last.whole_total
    return LogEntry(whole, first.position, 0, total, whole, last.whole_version, total)


def chain(entries: Sequence[LogEntry], since: int, to: int) -> tuple[LogEntry, ...] | None:
    """Return the deltas from one generation to another; None if some are missing."""
    found = tuple(entry for entry in entries if since < entry.generation <= to)
    unbroken = [entry.generation for entry in found] == list(range(since + 1, to + 1))
    return found if unbroken and not any(entry.is_whole for entry in found) else None


def _ring_bytes(state_bytes: int) -> int:
    return max(_RING_MIN, state_bytes * 3 // 2)


def _ring_start(slots: int) -> int:
    return -(-slots * ENTRY_BYTES // _RING_STARTS) * _RING_STARTS


def log_of(buffer: Buffer, deltas: int, state: Buffer) -> PublicationLog:
    """Return the log in a buffer. Raises InvalidArgumentError if no Publisher of that state made the buffer."""
    if buffer.size != PublicationLog.form(deltas, state.nbytes)[0]:
        raise InvalidArgumentError(
            f"{buffer.name!r} was not made by a Publisher of {state.name!r} with deltas={deltas}; delete it, or "
            f"publish under another name"
        )
    return PublicationLog(buffer)
