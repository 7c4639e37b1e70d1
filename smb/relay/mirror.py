"""The relay of one mirror: waits for publications, and brings them into the mirror from the parents of the plan.

Each mirror has a thread that waits for the next number and has the publisher's turn. A version becomes visible in the
mirror when it is published there, under the source's number. A mirror of a buffer with versions gets the latest
version. A mirror of the log of a state with deltas gets one entry after the other, each once its delta has arrived.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from smb.engine import memory_of
from smb.errors import (
    DeadlineError,
    Error,
    NotFoundError,
    PermissionDeniedError,
)
from smb.relay import arrived
from smb.relay.arrived import Blocks
from smb.relay.fill import FeedRate, Fill
from smb.relay.filler import TURN_S, Filler, retries
from smb.relay.plans import Plans
from smb.relay.publication_log import LogEntry, PublicationLog, next_of
from smb.spi import versions_of

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.call.versions import Publication
    from smb.client import Client

_LOOK_S = 1.0  # timeout of one wait for the next version, after which a stop is noticed
_READERS_S = 30.0  # how long readers that pin a mirror's versions may delay the next version

_log = logging.getLogger("smb")


class Relay:
    """Keeps one mirror filled until `stop`."""

    def __init__(
        self, client: Client, server: str, name: str, source: str, ask: Callable[[], None] = lambda: None
    ) -> None:
        """Start. `ask` is called when a plan is wanted."""
        self.name = name
        self.version = 0  # the last version that has arrived completely
        self._filler = Filler(client, name, source, Plans(source, ask))
        self._tail: _VersionTail | _LogTail | None = None
        self._nbytes = 0
        self._client = client
        self._server = server
        self._backoff = retries()  # reset when a version arrives
        self._thread = threading.Thread(target=self._run, name=f"relay-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begin no other version, and abandon the present one."""
        self._filler.stop()

    @property
    def plans(self) -> Plans:
        """Which parents to take which versions from."""
        return self._filler.plans

    @property
    def published(self) -> int:
        """The source's latest version, as last heard."""
        return self._tail.published if self._tail is not None else 0

    def rates(self) -> dict[str, FeedRate]:
        """Return how fast bytes came from each parent, counting only the time with calls in progress."""
        return self._filler.rates()

    def arrived_bytes(self) -> int:
        """Return how much of the present version has arrived, as the same fraction of the mirror's bytes."""
        return int(self._nbytes * self._filler.arrived())

    def _run(self) -> None:
        logged, stopping = "", self._filler.stopping
        while not stopping.is_set():
            try:
                self._follow()
            # the mirror was deleted or taken away; a new task will follow
            except (NotFoundError, PermissionDeniedError) as error:
                _log.debug("%s", error)
                stopping.wait(self._backoff.next_s())
            except Error as error:
                if str(error) != logged:
                    logged = str(error)
                    _log.warning("mirror %s: %s; trying again", self.name, error)
                stopping.wait(self._backoff.next_s())
            finally:
                self._filler.forget()

    def _follow(self) -> None:
        source = self._client.open(self._filler.source)
        mirror, words = arrived.open_mirror(self._client, self.name, self._server)
        kind = _LogTail if source.versions == 1 else _VersionTail
        self._tail = tail = kind(source, words, self._filler)
        self._nbytes = mirror.nbytes
        self.version = mirror.version
        while not self._filler.stopping.is_set():
            try:
                latest = source.wait(self.version + 1, timeout=_LOOK_S)
            except DeadlineError:
                continue
            tail.published = latest
            self._filler.plans.wait(latest, self._filler.stopping)
            try:
                self._take(mirror, tail, latest)
                self._backoff = retries()
            except NotFoundError as error:
                # If the version was merely overwritten, the open buffers are still good; opening them again takes the
                # coordinator.
                if not tail.is_overtaken(latest):
                    raise
                _log.debug("mirror %s: %s", self.name, error)
                self._filler.stopping.wait(self._backoff.next_s())

    def _take(self, mirror: Buffer, tail: _VersionTail | _LogTail, latest: int) -> None:
        """Bring the next version, and publish it under the source's number."""
        publication = versions_of(mirror).begin(TURN_S, TURN_S, _READERS_S)
        committed = False
        try:
            number = tail.bring(self.version, latest, publication)
            if number:
                publication.commit(number)
                committed = True
                self.version = number
        finally:
            if not committed:
                publication.give_up()


class _VersionTail:
    """The next version of a buffer with versions: the latest one."""

    def __init__(self, source: Buffer, words: Buffer, filler: Filler) -> None:
        """`words` is the buffer with what has arrived in the mirror."""
        self.published = 0
        self._source = source
        self._words = words
        self._filler = filler

    def is_overtaken(self, version: int) -> bool:
        return versions_of(self._source).find(version)[1] < 0

    def bring(self, _: int, version: int, publication: Publication) -> int:
        """Bring the version into the mirror and return its number; 0 if that was stopped."""
        source = self._source
        plan = self._filler.plans.of(version)
        fill = Fill(Blocks.of(source), version, source.name, plan, self._filler.first)
        with source.pin(version, ttl=TURN_S) as pin:

            def renew() -> None:
                publication.renew()
                try:
                    pin.renew()
                    self.published = source.version
                # overwritten, or the source is not reached: each read checks whether the version is still there
                except Error as error:
                    _log.debug("mirror of %s: %s", source.name, error)

            return version if self._filler.bring(fill, self, publication, self._words, renew) else 0

    def find(self, buffer: Buffer, version: int) -> int:
        return versions_of(buffer).find(version)[1]


class _LogTail:
    """The next version of a log: the entry after the last one, with its delta. A mirror has it at the same position as
    the source.
    """

    def __init__(self, source: Buffer, words: Buffer, filler: Filler) -> None:
        """`words` is the buffer with what has arrived in the mirror."""
        self.published = 0
        self._log = PublicationLog(source)
        self._words = words
        self._filler = filler
        self._latest = 0  # the source's latest generation when the present entry was found
        self._entry: LogEntry

    def is_overtaken(self, generation: int) -> bool:
        return self._log.buffer.version > generation

    def bring(self, after: int, latest: int, publication: Publication) -> int:
        """Bring the entry after generation `after` into the mirror and return its number; 0 if that was stopped.

        Raises NotFoundError if the source has overwritten it.
        """
        log, source = self._log, self._log.buffer
        entries = log.entries(source, latest)
        entry = next_of(entries, after) if entries else None
        if entry is None:
            raise NotFoundError(f"generation {latest} of {source.name!r} was overwritten before it had arrived")
        if entry.nbytes:
            self._latest, self._entry = latest, entry
            plan = self._filler.plans.of(entry.generation)
            fill = Fill(log.blocks(entry), entry.generation, source.name, plan, self._filler.first)
            if not self._filler.bring(fill, self, publication, self._words, publication.renew):
                return 0
        words = entry.to_words()
        publication.write(log.slot(entry.generation), words.nbytes, memory_of(words))
        return entry.generation

    def find(self, buffer: Buffer, version: int) -> int:
        """See VersionFinder. A log has one slot."""
        entry, known = self._entry, self._latest if buffer.name == self._log.buffer.name else 0
        return 0 if entry.generation == version and self._log.holds(buffer, entry, known) else -1
