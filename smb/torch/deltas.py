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
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.engine import DELTA_PART_MAX, delta_apply, delta_encode, memory_of, state_sum
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, NotFoundError, UnavailableError
from smb.pins import PIN_S_MAX
from smb.published import DELTAS, GENERATIONS, MIRROR
from smb.relay import arrived
from smb.relay.generations import ENTRY_WORDS, HEAD_WORDS, Entry, Head
from smb.spi import versions_of
from smb.torch.state_bytes import StateBytes

if TYPE_CHECKING:
    import torch

    from smb.buffer import Buffer
    from smb.client import Client
    from smb.relay.nearest import Nearest

DELTAS_MAX = 1024
_log = logging.getLogger("smb")
_SLACK = 3  # of the largest delta's size: two that are written ahead, and what the end of the ring leaves empty
_DELTA_SHARE = 12  # of the ring that one delta may take: what is larger is published whole
_RING_MIN = 1 << 16
_SLICE = 1 << 20  # elements that one thread compares at a time
_HEAD_VERSIONS = 4
_TURN_S = 10.0  # of a publisher that is killed; a slow one renews it
_TRIES = 100  # of a reader against publications
_TRIES_NEAR = 3  # the same at a mirror, before it takes another


def create(client: Client, made: list[Buffer], name: str, *form: Any, **options: Any) -> Buffer:
    """Client.create of what may be there; what it had to make is added to `made`."""
    try:
        buffer = client.create(name, *form, **options)
    except AlreadyExistsError:
        return client.create(name, *form, exist_ok=True, **options)
    made.append(buffer)
    return buffer


def _make_heads(client: Client, made: list[Buffer], name: str, words: int, placement: Mapping[str, Any]) -> Buffer:
    """Make the heads beside the states, if their servers were named; open them wherever they are."""
    servers = placement.get("servers")
    named = servers if not isinstance(servers, int) else None  # a number of servers is for what is striped
    replicas = placement.get("replicas")
    return _create_beside(client, made, name, words, "int64", {"servers": named, "replicas": replicas}, _HEAD_VERSIONS)


def _create_beside(
    client: Client,
    made: list[Buffer],
    name: str,
    size: int,
    dtype: str,
    placement: Mapping[str, Any],
    versions: int = 1,
) -> Buffer:
    """Make what lies beside a state, or open it as it was made: an earlier release gave it one copy."""
    try:
        buffer = client.create(name, size, dtype, versions=versions, **placement)
    except AlreadyExistsError:
        copies = client.open(name).info.replicas
        if copies < (placement.get("replicas") or 1):
            _log.warning("%s has one copy, as it was made by an earlier release; delete the state to have two", name)
        return client.create(name, size, dtype, versions=versions, replicas=copies, exist_ok=True)
    made.append(buffer)
    return buffer


class Ring:
    """The buffers beside the anchors, and the head."""

    def __init__(
        self,
        client: Client,
        anchors: Buffer,
        deltas: int,
        *,
        made: list[Buffer] | None = None,
        timeout: float = 0.0,
        placement: Mapping[str, Any] | None = None,
    ) -> None:
        """`made`: they are made where they are not there, and added to it; else they are opened."""
        self.anchors = anchors
        words = HEAD_WORDS + ENTRY_WORDS * 2 * deltas
        head, ring = anchors.name + GENERATIONS, anchors.name + DELTAS
        if made is not None:
            size = max(_RING_MIN, anchors.nbytes * 3 // 2)
            self.heads = _make_heads(client, made, head, words, placement or {})
            self.bytes = _create_beside(client, made, ring, size, "uint8", placement or {})
        else:
            self.heads, self.bytes = client.open(head, timeout=timeout), client.open(ring, timeout=timeout)
        if self.heads.size != words or self.heads.versions < 2 or self.bytes.dtype != np.uint8:
            raise InvalidArgumentError(f"{head!r} and {ring!r} are not what a Publisher with deltas={deltas} makes")
        self.size = self.bytes.size
        self.delta_max = self.size // _DELTA_SHARE


class DeltaWriter:
    """A trainer's side. One thread at a time."""

    def __init__(
        self,
        client: Client,
        anchors: Buffer,
        state: StateBytes,
        deltas: int,
        placement: Mapping[str, Any],
        made: list[Buffer],
    ) -> None:
        self._ring = Ring(client, anchors, deltas, made=made, placement=placement)
        self._state = state
        self._deltas = deltas
        self._head: Head | None = None  # of what `state` was published as; None: publish it whole
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
        heads = self._ring.heads
        # In the turn of a publisher of the heads: another trainer's generation, put there after we have looked, would
        # be described by our words, and its delta be where ours is.
        turn = versions_of(heads).begin(timeout, _TURN_S, max(PIN_S_MAX, timeout - 1.0))
        with turn.kept():
            try:
                made = None
                if head is not None and delta is not None and heads.version == head.generation:
                    made = self._with_delta(head, delta)
                made = made or self._whole(asked, timeout)
                words = made.to_words(heads.size)
                turn.write(0, heads.nbytes, memory_of(words))
            except BaseException:
                turn.give_up()
                raise
            turn.commit()
        self.sent_bytes += heads.nbytes
        return self._finish(asked, made, timeout)

    def _whole(self, asked: str, timeout: float) -> Head:
        """Publish all of the state, as an anchor for readers to begin with."""
        latest = Head.read(asked, self._ring.heads, self._ring.size)
        total = state_sum(self._state.bytes)
        version = self._publish_anchor(timeout)
        generation = latest.generation + 1
        return Head(generation, total, version, generation, total, latest.end)

    def _with_delta(self, head: Head, delta: bytes) -> Head | None:
        """Write the delta; None if readers could not come from the anchor to it."""
        ring, start = self._ring, head.end
        if start % ring.size + len(delta) > ring.size:
            start += ring.size - start % ring.size
        end = start + len(delta)
        entries = (*head.entries, Entry(head.generation + 1, start, len(delta)))[-2 * self._deltas :]
        oldest = end + _SLACK * ring.delta_max - ring.size
        entries = tuple(entry for entry in entries if entry.start >= oldest)
        made = replace(head, generation=head.generation + 1, total=self._total, end=end, entries=entries)
        if made.since(made.anchor_generation) is None:
            return None
        if delta:
            ring.bytes.write(np.frombuffer(delta, np.uint8), start % ring.size)
            self.sent_bytes += len(delta)
        return made

    def _finish(self, asked: str, made: Head, timeout: float) -> int:
        if made.generation - made.anchor_generation >= self._deltas or self._is_far(made):
            # Named by the next generation: until then readers begin with the one before.
            try:
                version = self._publish_anchor(timeout)
                made = replace(made, anchor=version, anchor_generation=made.generation, anchor_total=made.total)
            except Error as error:  # the generation is there; the next one tries again
                _log.warning("%s: generation %d has no anchor yet: %s", asked, made.generation, error)
        self._head = made
        return made.generation

    def _is_far(self, made: Head) -> bool:
        """Whether the deltas since the anchor have half of the room that there is for them."""
        room = self._ring.size - _SLACK * self._ring.delta_max
        return sum(e.nbytes for e in made.entries if e.generation > made.anchor_generation) > room // 2

    def _publish_anchor(self, timeout: float) -> int:
        self.sent_bytes += self._state.nbytes
        return self._ring.anchors.publish(self._state.elements, timeout=timeout)


class _NearRing:
    """A mirror of the ring, and what has arrived there."""

    def __init__(self, client: Client, ring: str, heads: Buffer) -> None:
        """`heads`: the mirror beside it. Raises NotFoundError if there is no such ring."""
        (place,) = heads.layout.segments
        self.heads = heads
        self.bytes = client.open(f"{ring}{MIRROR}{place.server}")
        self._words = client.open(self.bytes.name + arrived.SUFFIX)

    def entries(self, wanted: list[Entry], source: Buffer) -> list[Entry]:
        """Return which of these are there now. `source`: of what it is a mirror."""
        has = arrived.look(self._words) if wanted else None
        return [entry for entry in wanted if has is not None and entry.is_in(source, has)]


class DeltaReader:
    """A follower's side: brings a state from the generation that it is to the latest. One thread at a time."""

    def __init__(
        self, client: Client, anchors: Buffer, nearest: Nearest, state: StateBytes, deltas: int, timeout: float
    ) -> None:
        """`nearest`: of the anchors and their mirrors. Deltas and heads are read from the nearest, too."""
        self._client = client
        self._ring = Ring(client, anchors, deltas, timeout=timeout)
        self._anchors = nearest
        self._anchors_name = anchors.name
        self._heads = nearest.beside(self._ring.heads)
        self._near: _NearRing | None = None
        self._state = state
        self.generation = 0  # that `state` is
        self._returned = 0  # by the last read: mirrors that have not come so far are not read
        self._total = 0
        self.received_bytes = 0

    @property
    def latest(self) -> int:
        """The one published last."""
        return self._ring.heads.version

    @property
    def mirror_name(self) -> str:
        """The state's mirror on the server from which generations come now; "" if from the source. For any thread."""
        name = self._heads.mirror_name
        return self._anchors_name + name.removeprefix(self._ring.heads.name) if name else ""

    def wait(self, generation: int, timeout: float | None) -> int:
        """As Buffer.wait: until the nearest mirror has it, too."""
        return self._heads.wait(generation, timeout)

    def read(self, asked: str, wanted: int | None = None) -> int:
        """Make the state the latest generation of the nearest, or the one that is wanted, and return that; 0 before the
        first. Raises UnavailableError if publications overtake every attempt, NotFoundError if the one that is wanted
        is not there.
        """
        self.received_bytes = 0
        self._returned = self._heads.read(partial(self._read_from, asked), self._returned, wanted)
        return self._returned

    def _read_from(self, asked: str, heads: Buffer, wanted: int | None) -> int:
        """As read, from what describes generations or a mirror of it."""
        mirrored = heads is not self._ring.heads
        for _ in range(_TRIES_NEAR if mirrored else _TRIES):
            head = Head.read(asked, heads, self._ring.size, wanted)
            if head.generation == 0 or head.generation == self.generation:
                return head.generation
            if wanted is not None and not mirrored and heads.version >= wanted + 2:
                raise NotFoundError(f"{asked}: generation {wanted} is over: with deltas= the last two can be read")
            chain = head.since(self.generation) if self.generation else None
            if chain is None or sum(entry.nbytes for entry in chain) >= self._state.nbytes:
                self.generation = 0
                chain = head.since(head.anchor_generation)
                if chain is None or not self._read_anchor(head):
                    continue
            if self._apply(head, chain, self._ring_near(heads) if mirrored else None):
                return self.generation
        raise UnavailableError(f"{asked}: again and again a publication overtook it, or what was read was not what was "
                               f"published; the state is as it was, or empty: read again")  # fmt: skip

    def _ring_near(self, heads: Buffer) -> _NearRing | None:
        """Return the ring beside a mirror; None if it has none, or that is being made."""
        if self._near is None or self._near.heads is not heads:
            self._near = None
            with suppress(NotFoundError):
                self._near = _NearRing(self._client, self._ring.bytes.name, heads)
        return self._near

    def _read_anchor(self, head: Head) -> bool:
        try:
            self._anchors.read(self._state.read, 0, head.anchor)
        except NotFoundError:  # overwritten: a later head names another
            return False
        self.received_bytes += self._state.nbytes
        self._total = state_sum(self._state.bytes)
        if self._total != head.anchor_total:
            return False
        self.generation = head.anchor_generation
        return True

    def _apply(self, head: Head, chain: tuple[Entry, ...], near: _NearRing | None) -> bool:
        """Bring the state to the head's generation. False: it is none, or as it was."""
        deltas = self._read_deltas(head, chain, near)
        if deltas is None:
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

    def _read_deltas(
        self, head: Head, chain: tuple[Entry, ...], near: _NearRing | None
    ) -> list[np.ndarray[Any, Any]] | None:
        """Read them from the mirror near here, and from the source what is not there; None if some may be overwritten
        there, too."""
        deltas = {entry: np.empty(entry.nbytes, np.uint8) for entry in chain}
        missing = [entry for entry in chain if entry.nbytes]
        if near is not None and missing:
            try:
                there = near.entries(missing, self._ring.bytes)
                self._read_entries(near.bytes, there, deltas)
                there = near.entries(there, self._ring.bytes)  # those that still are were so all the time
                missing = [entry for entry in missing if entry not in there]
            except NotFoundError:  # stopped, and perhaps made anew
                self._near = None
        self._read_entries(self._ring.bytes, missing, deltas)
        if missing and self._ring.heads.version >= head.generation + 2:
            return None
        return list(deltas.values())

    def _read_entries(self, ring: Buffer, entries: list[Entry], deltas: dict[Entry, np.ndarray[Any, Any]]) -> None:
        for entry in entries:
            ring.read(entry.start % self._ring.size, entry.nbytes, out=deltas[entry])
            self.received_bytes += entry.nbytes
