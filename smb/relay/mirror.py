"""A mirror's relay: follows the published buffer, and fills the mirror from wherever the plan says.

Threads: one per mirror waits for versions and has the publisher's turn; two for each parent move pieces; one
says what has arrived. A version shows in the mirror with its publication there, under the source's number.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.call.sync_requests import wait_ms
from smb.engine import AskOpcode, memory_of
from smb.errors import (
    Error,
    NotFoundError,
    PermissionDeniedError,
    TimeoutError,  # noqa: A004 - the contract's name
)
from smb.relay import arrived
from smb.relay.arrived import Arrived, Pieces
from smb.relay.fill import Fill

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.call.versions import Publication
    from smb.client import Client

_LOOK_S = 1.0  # how long one wait for a version takes, so that a stop is noticed
_TURN_S = 3.0  # of the pin and of a publisher's turn: how long the next relay waits after a kill
_RENEW_S = 1.0
_AGAIN_S = 0.5
_THREADS = 2  # for each parent: while one looks whether what came is what it was, the other reads

_log = logging.getLogger("smb")


class MirrorRelay:
    """Keeps one mirror filled. `stop` it."""

    def __init__(self, client: Client, server: str, name: str, source: str) -> None:
        self.name = name
        self.source = source
        self.version = 0  # that is there, whole
        self.published = 0  # of the source, as last heard
        self.parents: Sequence[tuple[float, str]] = ((1.0, source),)
        self.stopping = threading.Event()
        self.changed = threading.Condition()  # of `fill`
        self.fill: Fill | None = None
        self.publication: Publication | None = None
        self.mirror: Buffer
        self.words: Buffer
        self._client = client
        self._server = server
        self._feeders: dict[str, list[_Feeder]] = {}
        self._rates: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name=f"relay-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begin no other version, and leave the one that is under way."""
        self.stopping.set()
        with self.changed:
            self.changed.notify_all()

    def rates(self) -> dict[str, float]:
        """Return in bytes per second what came from each parent while it came."""
        return dict(self._rates)

    def arrived_bytes(self) -> int:
        """Return how much there is of the version that is under way."""
        fill = self.fill
        return min(fill.bits.bit_count() * fill.pieces.piece_bytes, fill.pieces.nbytes) if fill is not None else 0

    def _run(self) -> None:
        told = ""
        while not self.stopping.is_set():
            try:
                self._follow()
            except (NotFoundError, PermissionDeniedError) as error:  # deleted, ours no more: we shall hear what is next
                _log.debug("%s", error)
                self.stopping.wait(_AGAIN_S)
            except Error as error:
                if str(error) != told:
                    told = str(error)
                    _log.warning("mirror %s: %s; trying again", self.name, error)
                self.stopping.wait(_AGAIN_S)
            finally:
                for feeder in (each for feeders in self._feeders.values() for each in feeders):
                    feeder.stopping.set()
                self._feeders = {}  # what they have open may be gone

    def _follow(self) -> None:
        source = self._client.open(self.source)
        self._client.open(self.name)
        self.words = arrived.make(self._client, self.name, self._server)
        try:
            self.mirror = self._client.open(self.name)
        except NotFoundError:  # deleted at this moment, and its words were not there to be deleted with it
            self._client.delete(self.words.name, missing_ok=True)
            raise
        self.version = self.mirror.version
        while not self.stopping.is_set():
            try:
                latest = source.wait(self.version + 1, timeout=_LOOK_S)
            except TimeoutError:
                continue
            self.published = latest
            self._take(source, latest)

    def _take(self, source: Buffer, version: int) -> None:
        """Fill that version and publish it."""
        with source.pin(version, ttl=_TURN_S) as pin:
            publication = self.mirror._versions.begin(_TURN_S, _TURN_S, 30.0)
            fill = Fill(Pieces.of(source), version, source.name, self.parents)
            teller = threading.Thread(target=self._tell, args=(fill, publication.copy), daemon=True)
            committed = False
            try:
                # Before the first byte: from here on nobody takes what is in this copy for another version.
                self.words.publish(Arrived(version, publication.copy, 0).to_words(), ttl=_TURN_S)
                self._begin(fill, publication)
                teller.start()
                self._await(source, fill, publication, pin)
                if fill.failure is not None:
                    raise fill.failure
                if fill.done:
                    publication.commit(version)
                    committed = True
                    self.version = version
                    self._measure(fill)
            finally:
                with self.changed:
                    self.fill = None
                fill.end()
                if teller.ident is not None:
                    teller.join()  # its last words must not come after those of the next version
                if not committed:
                    publication.give_up()

    def _begin(self, fill: Fill, publication: Publication) -> None:
        for parent in {self.source, *fill.parents}:
            if parent not in self._feeders:
                self._feeders[parent] = [_Feeder(self._client, self, parent) for _ in range(_THREADS)]
        with self.changed:
            self.fill, self.publication = fill, publication
            self.changed.notify_all()

    def _await(self, source: Buffer, fill: Fill, publication: Publication, pin: Any) -> None:
        """Return when it is done, failed, or to be stopped."""
        renewed = time.monotonic()
        home = source._dispatcher.homes()[0]
        while fill.active and not self.stopping.is_set():
            with fill.changed:
                if fill.active:
                    fill.changed.wait(_AGAIN_S)
            now = time.monotonic()
            if now - renewed > _RENEW_S:
                renewed = now
                publication.renew()
                try:
                    home.ask(f"pin of {source.name!r}", AskOpcode.PIN, 0, (wait_ms(_TURN_S), pin._name))
                    self.published = source.version
                except Error as error:  # overtaken, or not reached: each read looks whether it is still there
                    _log.debug("mirror %s: %s", self.name, error)

    def _tell(self, fill: Fill, copy: int) -> None:
        """Say what has arrived, until all has."""
        told = 0
        while True:
            with fill.changed:
                while fill.bits == told and fill.active:
                    fill.changed.wait(_AGAIN_S)
                bits, active = fill.bits, fill.active
            if bits != told:
                try:
                    self.words.publish(Arrived(fill.version, copy, bits).to_words(), ttl=_TURN_S)
                except Error as error:
                    fill.fail(error)
                told = bits
            if not active and fill.bits == told:
                return

    def _measure(self, fill: Fill) -> None:
        for parent, rate in fill.rates().items():
            self._rates[parent] = (self._rates.get(parent, rate) + rate) / 2
        self._rates = {parent: self._rates[parent] for parent in fill.rates()}  # of others nothing is known now


class _Feeder:
    """Moves pieces from one parent, a buffer or another mirror of it, in a thread of its own."""

    def __init__(self, client: Client, relay: MirrorRelay, parent: str) -> None:
        self._client = client
        self._relay = relay
        self._parent = parent
        self._buffer: Buffer | None = None
        self._words: Buffer | None = None
        self._memory: np.ndarray[Any, Any] = np.empty(0, np.uint8)
        self.stopping = threading.Event()
        threading.Thread(target=self._run, name=f"feed-{parent}", daemon=True).start()

    def _run(self) -> None:
        relay = self._relay
        while not (relay.stopping.is_set() or self.stopping.is_set()):
            with relay.changed:
                fill, publication = relay.fill, relay.publication
                if fill is None or publication is None or not fill.wants(self._parent):
                    relay.changed.wait(_LOOK_S)
                    continue
            try:
                if self._buffer is None:
                    self._buffer = self._client.open(self._parent)
                if self._parent == relay.source:
                    self._from_source(self._buffer, fill, publication)
                else:
                    self._from_mirror(self._buffer, fill, publication)
            except Error as error:
                _log.info("mirror %s: nothing from %s for now: %s", relay.name, self._parent, error)
                self._buffer = self._words = None
                fill.broke(self._parent)
                relay.stopping.wait(_AGAIN_S)

    def _from_source(self, buffer: Buffer, fill: Fill, publication: Publication) -> None:
        copy = buffer._versions.find(fill.version)[1]
        while fill.wants(self._parent):
            pieces = fill.take(self._parent, lambda _: True, fill.at_once)
            if not pieces:
                with fill.changed:
                    fill.changed.wait(_AGAIN_S)
                continue
            if copy >= 0:
                self._read(buffer, copy, fill, pieces)
            if copy < 0 or buffer._versions.find(fill.version)[1] != copy:
                fill.fail(NotFoundError(f"version {fill.version} of {buffer.name!r} was overwritten on its way"))
                return
            self._put(fill, publication, pieces)

    def _from_mirror(self, buffer: Buffer, fill: Fill, publication: Publication) -> None:
        if self._words is None:
            self._words = self._client.open(self._parent + arrived.SUFFIX)
        seen = self._words.version
        has = arrived.look(self._words)
        while fill.wants(self._parent):
            pieces = fill.take(self._parent, has.has, fill.at_once) if has.version == fill.version else []
            if not pieces and has.version > fill.version:  # it has gone on, and may still have this one
                copy = buffer._versions.find(fill.version)[1]
                if copy >= 0:
                    has = Arrived(has.version, copy, 0)
                    pieces = fill.take(self._parent, lambda _: True, fill.at_once)
            if not pieces:
                try:
                    seen = self._words.wait(seen + 1, timeout=_AGAIN_S)
                except TimeoutError:
                    continue
                has = arrived.look(self._words)
                continue
            self._read(buffer, has.copy, fill, pieces)
            now = arrived.look(self._words)
            same = (now.version, now.copy) == (fill.version, has.copy)
            if same or buffer._versions.find(fill.version)[1] == has.copy:
                self._put(fill, publication, pieces)
            else:
                fill.give_back(pieces)
            has = now

    def _read(self, buffer: Buffer, copy: int, fill: Fill, pieces: Sequence[int]) -> None:
        """Read them into our memory, one behind the other."""
        size = fill.pieces.piece_bytes
        if self._memory.nbytes < size * len(pieces):
            self._memory = np.empty(size * fill.at_once, np.uint8)
        itemsize = buffer.dtype.itemsize
        with fill.reading(self._parent):
            for place, piece in enumerate(pieces):
                start, nbytes = fill.pieces.range(piece)
                there = memory_of(self._memory[place * size :])
                buffer._versions.read_from(copy, start // itemsize, nbytes // itemsize, there)

    def _put(self, fill: Fill, publication: Publication, pieces: Sequence[int]) -> None:
        for place, piece in enumerate(pieces):
            start, nbytes = fill.pieces.range(piece)
            there = memory_of(self._memory[place * fill.pieces.piece_bytes :])
            try:
                fill.put(piece, self._parent, partial(publication.write, start, nbytes, there))
            except Error as error:  # of our own mirror, not of the parent
                fill.fail(error)
                return
