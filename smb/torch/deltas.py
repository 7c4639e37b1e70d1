"""Generations as deltas: what changed since the last one, bit for bit, beside whole states now and then.

Three buffers. NAME holds anchors: whole states, by its versions. NAME.deltas is a ring of bytes into which the trainer
writes one delta after the other. Version g of NAME.generations says what generation g is: the sum of its state, which
anchor lies before it, and where the deltas from there on are. Its publication is what makes a generation exist.

The reader's guarantee. The deltas that version g names stay in the ring while g + 1 and g + 2 are made (_SLACK): they
are whole if, after they were read, g + 2 was not published. The anchor that it names is read by its version. The sum of
the state decides in the end: a state that is not what was published is never shown, but read anew.

A generation whose delta would be large, the first of a trainer's process, and one after a failure, are anchors by
themselves: published whole, before version g names them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.engine import DELTA_PART_MAX, delta_apply, delta_encode, memory_of, state_sum
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, NotFoundError, UnavailableError
from smb.published import DELTAS, GENERATIONS
from smb.torch.state_bytes import StateBytes

if TYPE_CHECKING:
    import torch

    from smb.buffer import Buffer
    from smb.client import Client
    from smb.relay.nearest import Nearest

DELTAS_MAX = 1024
_log = logging.getLogger("smb")
_FORMAT = 1
_SLACK = 3  # of the largest delta's size: two that are written ahead, and what the end of the ring leaves empty
_DELTA_SHARE = 12  # of the ring that one delta may take: what is larger is published whole
_RING_MIN = 1 << 16
_SLICE = 1 << 20  # elements that one thread compares at a time
_HEAD_VERSIONS = 4
_HEAD_WORDS = 8
_TRIES = 100  # of a reader against publications


@dataclass(frozen=True)
class _Entry:
    """One delta: of which generation, where in the ring (counted on without end), bytes."""

    generation: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class _Head:
    """The description of a generation."""

    generation: int = 0
    total: int = 0  # the sum of its state
    anchor: int = 0  # version of the anchors' buffer
    anchor_generation: int = 0
    anchor_total: int = 0
    end: int = 0  # of the last delta in the ring
    entries: tuple[_Entry, ...] = ()

    def to_words(self, size: int) -> np.ndarray[Any, Any]:
        words = np.zeros(size, np.int64)
        unsigned = words.view(np.uint64)
        words[0], words[1], words[6], words[7] = _FORMAT, self.generation, self.end, len(self.entries)
        words[3], words[4] = self.anchor, self.anchor_generation
        unsigned[2], unsigned[5] = self.total, self.anchor_total
        for index, entry in enumerate(self.entries):
            at = _HEAD_WORDS + 3 * index
            words[at : at + 3] = entry.generation, entry.start, entry.nbytes
        return words

    @classmethod
    def of(cls, asked: str, words: np.ndarray[Any, Any]) -> _Head:
        unsigned = words.view(np.uint64)
        count = int(words[7])
        if words[0] != _FORMAT or not 0 <= count <= (len(words) - _HEAD_WORDS) // 3:
            raise Error(f"{asked}: what describes its generations makes no sense; it was not written by a Publisher")
        found = (map(int, words[_HEAD_WORDS + 3 * i :][:3]) for i in range(count))
        return cls(
            int(words[1]), int(unsigned[2]), int(words[3]), int(words[4]), int(unsigned[5]), int(words[6]),
            tuple(_Entry(*entry) for entry in found),
        )  # fmt: skip

    def since(self, generation: int) -> tuple[_Entry, ...] | None:
        """The deltas from a generation to this one; None if some are not there any more."""
        chain = tuple(entry for entry in self.entries if entry.generation > generation)
        whole = [entry.generation for entry in chain] == list(range(generation + 1, self.generation + 1))
        return chain if whole else None


def create(client: Client, made: list[str], name: str, *form: Any, **options: Any) -> Buffer:
    """Client.create of what may be there; what it had to make is named in `made`."""
    try:
        buffer = client.create(name, *form, **options)
    except AlreadyExistsError:
        return client.create(name, *form, exist_ok=True, **options)
    made.append(name)
    return buffer


def _make_heads(client: Client, made: list[str], name: str, words: int, servers: Any) -> Buffer:
    """Make the heads beside the states, if their servers were named; open them wherever they are."""
    named = servers if not isinstance(servers, int) else None  # a number of servers is for what is striped
    try:
        heads = client.create(name, words, "int64", versions=_HEAD_VERSIONS, servers=named)
    except AlreadyExistsError:
        return client.create(name, words, "int64", versions=_HEAD_VERSIONS, exist_ok=True)
    made.append(name)
    return heads


class Ring:
    """The buffers beside the anchors, and the head."""

    def __init__(
        self,
        client: Client,
        anchors: Buffer,
        deltas: int,
        *,
        made: list[str] | None = None,
        timeout: float = 0.0,
        placement: Mapping[str, Any] | None = None,
    ) -> None:
        """`made`: they are made where they are not there, and named in it; else they are opened."""
        self.anchors = anchors
        words = _HEAD_WORDS + 3 * 2 * deltas
        head, ring = anchors.name + GENERATIONS, anchors.name + DELTAS
        if made is not None:
            size = max(_RING_MIN, anchors.nbytes * 3 // 2)
            self.heads = _make_heads(client, made, head, words, (placement or {}).get("servers"))
            self.bytes = create(client, made, ring, size, "uint8", **(placement or {}))
        else:
            self.heads, self.bytes = client.open(head, timeout=timeout), client.open(ring, timeout=timeout)
        if self.heads.size != words or self.heads.versions < 2 or self.bytes.dtype != np.uint8:
            raise InvalidArgumentError(f"{head!r} and {ring!r} are not what a Publisher with deltas={deltas} makes")
        self.size = self.bytes.size
        self.delta_max = self.size // _DELTA_SHARE

    def head(self, asked: str, wanted: int | None = None) -> _Head:
        """The latest, or the one that is wanted; generation 0 before the first. Raises NotFoundError if that is not
        there."""
        words = np.empty(self.heads.size, np.int64)
        version = self.heads._versions.read(0, self.heads.size, memory_of(words), 0, wanted)
        if version == 0:
            return _Head()
        head = _Head.of(asked, words)
        if any(entry.start < 0 or not 0 <= entry.nbytes <= self.size for entry in head.entries):
            raise Error(f"{asked}: what describes generation {version} names bytes that its deltas can't have")
        if head.generation != version:
            raise Error(f"{asked}: what describes generation {version} is of {head.generation}")
        return head


class DeltaWriter:
    """A trainer's side. One thread at a time."""

    def __init__(
        self,
        client: Client,
        anchors: Buffer,
        state: StateBytes,
        deltas: int,
        placement: Mapping[str, Any],
        made: list[str],
    ) -> None:
        self._ring = Ring(client, anchors, deltas, made=made, placement=placement)
        self._state = state
        self._deltas = deltas
        self._head: _Head | None = None  # of what `state` was published as; None: publish it whole
        self._delta: bytes | None = None
        self._total = 0
        self.sent_bytes = 0

    @property
    def generation(self) -> int:
        """The one published last."""
        return self._ring.heads.version

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a state. Afterwards `state` is that."""
        given = list(self._state.pieces(tensors))  # the owners, too: their memory is read below
        self._delta, head = None, self._head
        self._head = None  # until it is published
        width, base = self._state.width, self._state.bytes.ctypes.data
        slices = [
            (at + offset, address + offset, min(_SLICE * width, nbytes - offset))
            for at, address, nbytes, _ in given
            for offset in range(0, nbytes, min(_SLICE, DELTA_PART_MAX) * width)
        ]

        def compare(piece: tuple[int, int, int]) -> tuple[bytes, int] | None:
            at, address, nbytes = piece
            room = np.empty(nbytes // 2 + 512, np.uint8)
            found = delta_encode(width, base + at, address, nbytes // width, at // width, room)
            return None if found is None else (room[: found[0]].tobytes(), found[2])

        if len(slices) < 2:
            parts = [compare(piece) for piece in slices]
        else:
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1, len(slices))) as threads:
                parts = list(threads.map(compare, slices))
        known = [part for part in parts if part is not None]
        if head is None or len(known) < len(parts):
            return
        delta = b"".join(part for part, _ in known)
        if len(delta) <= self._ring.delta_max:
            self._delta, self._head = delta, head
            self._total = (head.total + sum(added for _, added in known)) % 2**64

    def publish(self, asked: str, timeout: float) -> int:
        """Publish what was taken last; return its generation."""
        head, delta = self._head, self._delta
        self._head = self._delta = None
        self.sent_bytes = 0
        if head is not None and delta is not None and self._ring.heads.version == head.generation:
            made = self._with_delta(head, delta)
            if made is not None:
                return self._finish(asked, made, timeout)
        latest = self._ring.head(asked)
        total = state_sum(self._state.bytes)
        version = self._publish_anchor(timeout)
        generation = latest.generation + 1
        return self._finish(asked, _Head(generation, total, version, generation, total, latest.end), timeout)

    def _with_delta(self, head: _Head, delta: bytes) -> _Head | None:
        """Write the delta; None if readers could not come from the anchor to it."""
        ring, start = self._ring, head.end
        if start % ring.size + len(delta) > ring.size:
            start += ring.size - start % ring.size
        end = start + len(delta)
        entries = (*head.entries, _Entry(head.generation + 1, start, len(delta)))[-2 * self._deltas :]
        oldest = end + _SLACK * ring.delta_max - ring.size
        entries = tuple(entry for entry in entries if entry.start >= oldest)
        made = replace(head, generation=head.generation + 1, total=self._total, end=end, entries=entries)
        if made.since(made.anchor_generation) is None:
            return None
        if delta:
            ring.bytes.write(np.frombuffer(delta, np.uint8), start % ring.size)
            self.sent_bytes += len(delta)
        return made

    def _finish(self, asked: str, made: _Head, timeout: float) -> int:
        published = self._ring.heads.publish(made.to_words(self._ring.heads.size), timeout=timeout)
        self.sent_bytes += self._ring.heads.nbytes
        if published != made.generation:
            raise Error(
                f"{asked}: generation {made.generation} was published by another process at the same time; "
                f"one trainer at a time publishes with deltas="
            )
        if made.generation - made.anchor_generation >= self._deltas or self._is_far(made):
            # Named by the next generation: until then readers begin with the one before.
            try:
                version = self._publish_anchor(timeout)
                made = replace(made, anchor=version, anchor_generation=made.generation, anchor_total=made.total)
            except Error as error:  # the generation is there; the next one tries again
                _log.warning("%s: generation %d has no anchor yet: %s", asked, made.generation, error)
        self._head = made
        return made.generation

    def _is_far(self, made: _Head) -> bool:
        """Whether the deltas since the anchor have half of the room that there is for them."""
        room = self._ring.size - _SLACK * self._ring.delta_max
        return sum(e.nbytes for e in made.entries if e.generation > made.anchor_generation) > room // 2

    def _publish_anchor(self, timeout: float) -> int:
        self.sent_bytes += self._state.nbytes
        return self._ring.anchors.publish(self._state.elements, timeout=timeout)


class DeltaReader:
    """A follower's side: brings a state from the generation that it is to the latest. One thread at a time."""

    def __init__(
        self, client: Client, anchors: Buffer, nearest: Nearest, state: StateBytes, deltas: int, timeout: float
    ) -> None:
        """Anchors are read from the nearest of the buffer and its mirrors; heads and deltas, which are small, from
        where they are written."""
        self._ring = Ring(client, anchors, deltas, timeout=timeout)
        self._nearest = nearest
        self._state = state
        self.generation = 0  # that `state` is
        self._total = 0
        self.received_bytes = 0

    @property
    def latest(self) -> int:
        """The one published last."""
        return self._ring.heads.version

    def wait(self, generation: int, timeout: float | None) -> int:
        """As Buffer.wait."""
        return self._ring.heads.wait(generation, timeout=timeout)

    def read(self, asked: str, wanted: int | None = None) -> int:
        """Make the state the latest generation, or the one that is wanted, and return that; 0 before the first. Raises
        UnavailableError if publications overtake every attempt, NotFoundError if the one that is wanted is not there.
        """
        self.received_bytes = 0
        for _ in range(_TRIES):
            head = self._ring.head(asked, wanted)
            if head.generation == 0 or head.generation == self.generation:
                return head.generation
            if wanted is not None and self._ring.heads.version >= wanted + 2:
                raise NotFoundError(f"{asked}: generation {wanted} is over: with deltas= the last two can be read")
            chain = head.since(self.generation) if self.generation else None
            if chain is None or sum(entry.nbytes for entry in chain) >= self._state.nbytes:
                self.generation = 0
                chain = head.since(head.anchor_generation)
                if chain is None or not self._read_anchor(head):
                    continue
            if self._apply(head, chain):
                return self.generation
        raise UnavailableError(f"{asked}: {_TRIES} times a publication overtook it, or what was read was not what was "
                               f"published; the state is as it was, or empty: read again")  # fmt: skip

    def _read_anchor(self, head: _Head) -> bool:
        try:
            self._nearest.read(self._state.read, 0, head.anchor)
        except NotFoundError:  # overwritten: a later head names another
            return False
        self.received_bytes += self._state.nbytes
        self._total = state_sum(self._state.bytes)
        if self._total != head.anchor_total:
            return False
        self.generation = head.anchor_generation
        return True

    def _apply(self, head: _Head, chain: tuple[_Entry, ...]) -> bool:
        """Bring the state to the head's generation. False: it is none, or as it was."""
        deltas: list[np.ndarray[Any, Any]] = []
        for entry in chain:
            delta = np.empty(entry.nbytes, np.uint8)
            if entry.nbytes:
                self._ring.bytes.read(entry.start % self._ring.size, entry.nbytes, out=delta)
            self.received_bytes += entry.nbytes
            deltas.append(delta)
        if self._ring.heads.version >= head.generation + 2:
            return False  # they may be overwritten; the state is as it was
        self.generation = 0  # until all is applied and the sum is right
        total: int | None = self._total
        for delta in deltas:
            if delta.size and total is not None:
                total = delta_apply(self._state.width, self._state.bytes, delta, total)
        if total != head.total:
            return False
        self.generation, self._total = head.generation, total
        return True
