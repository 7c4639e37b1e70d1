"""A mirror's relay: follows the published buffer, and fills the mirror from wherever the plan says.

A thread for each mirror waits for versions and has the publisher's turn. A version shows in the mirror with its
publication there, under the source's number. Of a state with deltas= the mirror of what describes generations does so
for the ring of deltas, too: a generation shows there once the deltas that it names are in the ring's mirror.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from smb.engine import memory_of
from smb.errors import (
    Error,
    NotFoundError,
    PermissionDeniedError,
    TimeoutError,  # noqa: A004 - the contract's name
)
from smb.relay import arrived
from smb.relay.arrived import Arrived, Pieces
from smb.relay.fill import Fill
from smb.relay.filler import TURN_S, Filler, retries
from smb.relay.ring import RingRelay
from smb.spi import versions_of

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.call.versions import Publication
    from smb.client import Client

_LOOK_S = 1.0  # how long one wait for a version takes, so that a stop is noticed
_READERS_S = 30.0  # for how long readers that pin a mirror's versions may delay the next

_log = logging.getLogger("smb")


class _Versions:
    """Whereabouts of versions."""

    def copy_of(self, has: Arrived) -> int:
        return has.copy

    def find(self, buffer: Buffer, version: int, has: Arrived | None) -> int:  # noqa: ARG002 - as Whereabouts
        return versions_of(buffer).find(version)[1]


class MirrorRelay:
    """Keeps one mirror filled. `stop` it."""

    def __init__(self, client: Client, server: str, name: str, source: str, ring: RingRelay | None = None) -> None:
        """`ring`: of the mirror of what describes generations, the ring's beside it."""
        self.name = name
        self.version = 0  # that is there, whole
        self.published = 0  # of the source, as last heard
        self.ring = ring
        self._filler = Filler(client, name, source, _Versions())
        self._client = client
        self._server = server
        self._backoff = retries()  # since a version arrived
        self._mirror: Buffer
        self._words: Buffer
        self._thread = threading.Thread(target=self._run, name=f"relay-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begin no other version, and leave the one that is under way."""
        self._filler.stop()

    def plan(self, parents: Sequence[tuple[float, str]]) -> None:
        """Take the next version from these."""
        self._filler.parents = parents

    def rates(self) -> dict[str, float]:
        """Return in bytes per second what came from each parent while it came."""
        return self._filler.rates()

    def arrived_bytes(self) -> int:
        """Return how much there is of the version that is under way. With a ring's deltas its share of all bytes, in
        bytes of it."""
        ring = self.ring
        wanted_bytes = ring.wanted_bytes if ring is not None else 0  # the relay's thread sets it to 0
        if ring is not None and wanted_bytes:
            return int(self._mirror.nbytes * min(1.0, ring.arrived_bytes() / wanted_bytes))
        return self._filler.arrived_bytes()

    def _run(self) -> None:
        told, stopping = "", self._filler.stopping
        while not stopping.is_set():
            try:
                self._follow()
            except (NotFoundError, PermissionDeniedError) as error:  # deleted, ours no more: we shall hear what is next
                _log.debug("%s", error)
                stopping.wait(self._backoff.next_s())
            except Error as error:
                if str(error) != told:
                    told = str(error)
                    _log.warning("mirror %s: %s; trying again", self.name, error)
                stopping.wait(self._backoff.next_s())
            finally:
                self._filler.forget()

    def _follow(self) -> None:
        source = self._client.open(self._filler.source)
        self._mirror, self._words = arrived.open_mirror(self._client, self.name, self._server)
        self.version = self._mirror.version
        while not self._filler.stopping.is_set():
            try:
                latest = source.wait(self.version + 1, timeout=_LOOK_S)
            except TimeoutError:
                continue
            self.published = latest
            try:
                self._take(source, latest)
                self._backoff = retries()
            except NotFoundError as error:
                # If it was only overtaken, what is open is good still: to open it anew takes the coordinator.
                if versions_of(source).find(latest)[1] >= 0:
                    raise
                _log.debug("mirror %s: %s", self.name, error)
                self._filler.stopping.wait(self._backoff.next_s())

    def _take(self, source: Buffer, version: int) -> None:
        """Fill that version and publish it."""
        publication = versions_of(self._mirror).begin(TURN_S, TURN_S, _READERS_S)
        committed = False
        try:
            if self._fill(source, version, publication) and self._bring_deltas(source, version, publication):
                publication.commit(version)
                committed = True
                self.version = version
        finally:
            if not committed:
                publication.give_up()

    def _fill(self, source: Buffer, version: int, publication: Publication) -> bool:
        fill = Fill(Pieces.of(source), version, source.name, self._filler.parents)
        if self.ring is not None:  # small: nobody has to keep it for us
            return self._filler.bring(fill, publication, self._words, publication.copy, publication.renew)
        with source.pin(version, ttl=TURN_S) as pin:

            def renew() -> None:
                publication.renew()
                try:
                    pin.renew()
                    self.published = source.version
                except Error as error:  # overtaken, or not reached: each read looks whether it is still there
                    _log.debug("mirror %s: %s", self.name, error)

            return self._filler.bring(fill, publication, self._words, publication.copy, renew)

    def _bring_deltas(self, source: Buffer, version: int, publication: Publication) -> bool:
        """Have what this generation names brought to the ring beside it."""
        ring = self.ring
        if ring is None:
            return True
        words = np.empty(self._mirror.size, np.int64)
        versions_of(self._mirror).read_from(publication.copy, 0, words.size, memory_of(words))
        with publication.kept():
            return ring.bring(source, version, words)
