"""Fills a version or a delta that a relay has begun, block by block from the parents of the plan.

Threads: two to eight for each parent move blocks, one publishes what has arrived, and the relay's own thread waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

import numpy as np

from smb.config.backoff import Backoff
from smb.engine import memory_of
from smb.errors import (
    DeadlineError,
    Error,
    NotFoundError,
)
from smb.relay import arrived
from smb.relay.arrived import Arrived
from smb.relay.fill import FeedRate, Fill
from smb.relay.plans import Plans
from smb.spi import versions_of

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.call.versions import Publication
    from smb.client import Client

TURN_S = 3.0  # ttl of a publisher's turn: how long the next relay waits after a kill
AGAIN_S = 0.5  # timeout of one wait for a change
_RETRY_FIRST_S, _RETRY_MAX_S = 0.25, 1.0
_LOOK_S = 1.0  # timeout of one wait, after which a stop is noticed
_LATE_LOOK_S = 0.1  # how often to look for blocks that are late from other parents
_RENEW_S = 1.0
# For each parent: one checks that its blocks are unchanged while another one reads. With few parents and small blocks
# there are more, since a saturated link delays requests by its queue. With many, that would overflow the queues.
_THREADS_MIN, _THREADS_MAX = 2, 8  # for one parent
_THREADS = 16  # for all parents
_UNDER_WAY_BYTES = 1 << 20

_log = logging.getLogger("smb")


def retries() -> Backoff:
    """Return the pauses between attempts."""
    return Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)


class VersionFinder(Protocol):
    """Finds a version in a parent."""

    def find(self, buffer: Buffer, version: int) -> int:
        """Return the slot in which the whole version lies, in the source or in another mirror; -1 if it is not
        there.
        """


class Filler:
    """Fills one mirror, one version at a time. `stop` ends the present fill."""

    def __init__(self, client: Client, name: str, source: str, plans: Plans) -> None:
        self.name = name
        self.source = source
        self.plans = plans
        self.first = crc32(name.encode())  # for Fill
        self.where: VersionFinder
        self.stopping = threading.Event()
        self.changed = threading.Condition()  # notified when `fill` changes
        self.fill: Fill | None = None
        self.publication: Publication | None = None
        self._client = client
        self._feeders: dict[str, list[_Feeder]] = {}
        self._rates: dict[str, FeedRate] = {}

    def stop(self) -> None:
        """Begin no other fill, and abandon the present one."""
        self.stopping.set()
        with self.changed:
            self.changed.notify_all()

    def forget(self) -> None:
        """Open all buffers again at the next fill: the present ones may be gone."""
        for feeder in (each for feeders in self._feeders.values() for each in feeders):
            feeder.stopping.set()
        self._feeders = {}

    def rates(self) -> dict[str, FeedRate]:
        """Return how fast bytes came from each parent, counting only the time with calls in progress."""
        return dict(self._rates)

    def arrived(self) -> float:
        """Return the fraction of the present fill that has arrived, 0 to 1."""
        fill = self.fill
        return fill.bits.bit_count() / max(1, fill.blocks.count) if fill is not None else 0.0

    def bring(
        self,
        fill: Fill,
        where: VersionFinder,
        publication: Publication,
        words: Buffer,
        renew: Callable[[], None],
    ) -> bool:
        """Write the whole version under a publisher's turn; return False if the fill was stopped.

        `where` finds the version in its parents. `words` is the buffer with what has arrived. `renew` is called from
        time to time. Raises the error of a fill that failed.
        """
        self.where, slot = where, publication.slot
        # Before the first byte is written: from here on no reader takes the overwritten slot for the former version.
        words.publish(Arrived(fill.version, slot, 0, fill.plan.number).to_words(), ttl=TURN_S)
        teller = threading.Thread(target=self._tell, args=(fill, words, slot), daemon=True)
        teller.start()
        try:
            self._begin(fill, publication)
            self._await(fill, renew)
        finally:
            with self.changed:
                self.fill = None
            fill.end()
            teller.join()  # this fill's last words must not be published after those of the next fill
        if fill.failure is not None:
            raise fill.failure
        if fill.done:
            self._measure(fill)
        return fill.done

    def _begin(self, fill: Fill, publication: Publication) -> None:
        parents = {self.source, *fill.parents} if fill.active else set()
        most = min(_UNDER_WAY_BYTES // fill.blocks.block_bytes, _THREADS // max(1, len(parents)))
        count = max(_THREADS_MIN, min(most, _THREADS_MAX))
        for parent in parents:
            feeders = self._feeders.setdefault(parent, [])
            while len(feeders) < count:
                feeders.append(_Feeder(self._client, self, parent))
        with self.changed:
            self.fill, self.publication = fill, publication
            self.changed.notify_all()

    def _await(self, fill: Fill, renew: Callable[[], None]) -> None:
        """Return when the fill is done, failed, or has to stop."""
        renewed = time.monotonic()
        while fill.active and not self.stopping.is_set():
            with fill.changed:
                if fill.active:
                    fill.changed.wait(AGAIN_S)
            now = time.monotonic()
            if now - renewed > _RENEW_S:
                renewed = now
                renew()

    def _tell(self, fill: Fill, words: Buffer, slot: int) -> None:
        """Publish what has arrived, until everything has."""
        shown = 0
        while True:
            with fill.changed:
                while fill.bits == shown and fill.active:
                    fill.changed.wait(AGAIN_S)
                bits, active = fill.bits, fill.active
            if bits != shown:
                try:
                    words.publish(Arrived(fill.version, slot, bits, fill.plan.number).to_words(), ttl=TURN_S)
                except Error as error:
                    fill.fail(error)
                shown = bits
            if not active and fill.bits == shown:
                return

    def _measure(self, fill: Fill) -> None:
        rates = fill.rates()
        if rates:  # a delta without changes moves nothing, so nothing new is known
            # Parents that gave nothing this time are dropped: their rate is not known any more.
            self._rates = {parent: _mean(self._rates.get(parent, rate), rate) for parent, rate in rates.items()}


def _mean(before: FeedRate, now: FeedRate) -> FeedRate:
    same = before.limited == now.limited
    return FeedRate((before.bytes_per_s + now.bytes_per_s) / 2, now.limited) if same else now


class _Feeder:
    """Moves blocks from one parent, the source or another mirror of it, on a thread of its own."""

    def __init__(self, client: Client, filler: Filler, parent: str) -> None:
        self._client = client
        self._filler = filler
        self._parent = parent
        self._buffer: Buffer | None = None
        self._words: Buffer | None = None
        self._memory: np.ndarray[Any, Any] = np.empty(0, np.uint8)
        self.stopping = threading.Event()
        threading.Thread(target=self._run, name=f"feed-{parent}", daemon=True).start()

    def _run(self) -> None:
        filler, backoff = self._filler, retries()
        while not (filler.stopping.is_set() or self.stopping.is_set()):
            with filler.changed:
                fill, publication = filler.fill, filler.publication
                if fill is None or publication is None or not fill.wants(self._parent):
                    filler.changed.wait(_LOOK_S)
                    continue
            try:
                if self._buffer is None:
                    self._buffer = self._client.open(self._parent)
                if self._parent == filler.source:
                    self._from_source(self._buffer, fill, publication)
                else:
                    self._from_mirror(self._buffer, fill, publication)
                backoff = retries()
            except Error as error:
                _log.info("mirror %s: cannot read from %s for now: %s", filler.name, self._parent, error)
                self._buffer = self._words = None
                fill.broke(self._parent)
                filler.stopping.wait(backoff.next_s())

    def _from_source(self, buffer: Buffer, fill: Fill, publication: Publication) -> None:
        where = self._filler.where
        slot = where.find(buffer, fill.version)
        while fill.wants(self._parent):
            blocks = fill.take(self._parent, fill.all_bits, fill.at_once)
            if not blocks:
                with fill.changed:
                    fill.changed.wait(_LATE_LOOK_S)
                continue
            if slot >= 0:
                self._read(buffer, slot, fill, blocks)
            if slot < 0 or where.find(buffer, fill.version) != slot:
                fill.fail(
                    NotFoundError(f"version {fill.version} of {buffer.name!r} was overwritten before it had arrived")
                )
                return
            self._put(fill, publication, blocks)

    def _from_mirror(self, buffer: Buffer, fill: Fill, publication: Publication) -> None:
        if self._words is None:
            self._words = self._client.open(self._parent + arrived.SUFFIX)
        where = self._filler.where
        seen = self._words.version
        has = arrived.look(self._words)
        while fill.wants(self._parent):
            slot, bits, comes = has.slot, has.bits, has.plan in (0, fill.plan.number)
            if has.version != fill.version:
                # A parent with a later version may still have this one.
                slot = where.find(buffer, fill.version) if has.version > fill.version else -1
                bits, comes = (fill.all_bits, True) if slot >= 0 else (0, False)
            blocks = fill.take(self._parent, bits, fill.at_once, comes=comes)
            if not blocks and bits == fill.all_bits:  # the parent has nothing new, but may help others
                with fill.changed:
                    fill.changed.wait(_LATE_LOOK_S)
                continue
            if not blocks:
                try:
                    seen = self._words.wait(seen + 1, timeout=AGAIN_S)
                except DeadlineError:
                    continue
                has = arrived.look(self._words)
                continue
            self._read(buffer, slot, fill, blocks)
            now = arrived.look(self._words)
            same = (now.version, now.slot) == (fill.version, slot)
            if same or where.find(buffer, fill.version) == slot:
                self._put(fill, publication, blocks)
            else:
                fill.give_back(blocks)
            has = now

    def _read(self, buffer: Buffer, slot: int, fill: Fill, blocks: Sequence[int]) -> None:
        """Read the blocks into this process's memory, one after the other."""
        size = fill.blocks.block_bytes
        if self._memory.nbytes < size * len(blocks):
            self._memory = np.empty(size * fill.at_once, np.uint8)
        itemsize = buffer.dtype.itemsize
        with fill.reading(self._parent, blocks):
            for at, block in enumerate(blocks):
                start, nbytes = fill.blocks.range(block)
                there = memory_of(self._memory[at * size :])
                versions_of(buffer).read_from(slot, start // itemsize, nbytes // itemsize, there)
                fill.moved(self._parent, blocks)

    def _put(self, fill: Fill, publication: Publication, blocks: Sequence[int]) -> None:
        for at, block in enumerate(blocks):
            start, nbytes = fill.blocks.range(block)
            there = memory_of(self._memory[at * fill.blocks.block_bytes :])
            try:
                fill.put(block, self._parent, partial(publication.write, start, nbytes, there))
            except Error as error:  # an error of the own mirror, not of the parent
                fill.fail(error)
                return
