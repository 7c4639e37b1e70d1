"""Chooses from where a reader takes versions of a published buffer: the nearest of the buffer and its mirrors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Set
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING
from zlib import crc32

from smb.buffer_info import BufferInfo
from smb.config import cancellation
from smb.errors import (
    DeadlineError,
    Error,
    NotFoundError,
)
from smb.spi import session_of
from smb.transport.base import is_here

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.buffer_info import Mirror
    from smb.client import Client

_LEASE_S = 6.0  # smb/coordinator/state.py: SERVER_LEASE_S. A mirror that delivers nothing for this long is left
_LOOK_S = 10.0  # how often to look for a nearer mirror
_TURN_S = 1.0
_ASK_S = 1.0  # limit of a question to the coordinator: a reader does not wait for one that is away

_log = logging.getLogger("smb")


def nearest(mirrors: Iterable[Mirror], source_servers: Set[str], local: Set[str], zone: Set[str], who: str) -> str:
    """Return the name of the mirror to read from, empty for the source itself. Pure.

    A mirror on this host comes first, then one in the same zone, then the one with the highest measured rate. Readers
    that see no difference are spread over the mirrors.
    """
    alive = [mirror for mirror in mirrors if mirror.alive]
    sends = {mirror.name: sum(other.feeds.get(mirror.name, 0.0) for other in alive) for mirror in alive}

    def rank(mirror: Mirror) -> tuple[bool, bool, float, int]:
        # Rates are measured values: half the rate is slower, but a tenth less is noise.
        rate = sends[mirror.name]
        return mirror.server not in local, mirror.server not in zone, -(int(rate).bit_length()), _spread(who, mirror)

    best = min(alive, key=rank, default=None)
    if best is None or local & source_servers:
        return ""
    if best.server not in local and best.server not in zone and zone & source_servers:
        return ""
    return best.name


def _spread(who: str, mirror: Mirror) -> int:
    return crc32(f"{who} {mirror.name}".encode())


def near_servers(client: Client, near: str | None) -> tuple[frozenset[str], frozenset[str]]:
    """Return the memory servers on this host, and those in the same zone.

    The zone is `near`, else that of the servers on this host. `near` may also name a server. A server is on this host
    if its Unix socket is.
    """
    listed = session_of(client).coordinator.list_servers(min(client.timeout, _ASK_S))
    servers = [server for server in listed if server.alive or server.unheard]
    local = frozenset(server.name for server in servers if server.name == near or is_here(server.unix_path))
    zones = {server.zone for server in servers if server.name in local} if near is None else {near}
    return local, frozenset(server.name for server in servers if server.zone and server.zone in zones)


class Nearest:
    """One reader's choice, made again when the present one fails. For one thread at a time."""

    def __init__(self, client: Client, source: Buffer, near: str | None) -> None:
        self._client = client
        self._source = source
        self._near = near
        self._left: dict[str, float] = {}  # mirrors that delivered nothing, with the time when they were left
        self._mirror: Buffer | None = None
        self._looked = 0.0
        self._waited = 0  # the latest version that `wait` returned: a later read gives no older one, from any mirror

    def beside(self, other: Buffer) -> Nearest:
        """Return the same reader's choice for another buffer."""
        return Nearest(self._client, other, self._near)

    @property
    def mirror_name(self) -> str:
        """The mirror that was chosen last; "" if that was the source itself. For any thread."""
        mirror = self._mirror
        return mirror.name if mirror is not None else ""

    @property
    def transports(self) -> tuple[str, ...]:
        """As Buffer.transports, of the buffer that was chosen last."""
        return (self._mirror or self._source).transports

    def buffer(self) -> Buffer:
        """Return the buffer to read from now."""
        if time.monotonic() - self._looked > _LOOK_S or not self._looked:
            self._choose()
        return self._mirror or self._source

    def _choose(self) -> None:
        now = time.monotonic()
        try:
            mirrors = self._asked().mirrors
            if not mirrors:
                self._mirror = None
                return
            kept = [m for m in mirrors if now - self._left.get(m.name, -_LOOK_S) >= _LOOK_S]
            local, zone = near_servers(self._client, self._near)
            parts = {segment.server for segment in self._source.layout.segments}
            name = nearest(kept, parts, local, zone, self._client.name)
            chosen = next((m.id for m in kept if m.name == name), 0)
            if not name:
                self._mirror = None
            elif self._mirror is None or self._mirror.info.id != chosen:
                opened = self._client.open(name)
                # The name may be another mirror's by now, e.g. if the source was made anew.
                self._mirror = opened if opened.info.id == chosen else None
        except Error as error:  # the coordinator is away: keep the present choice
            _log.debug("%s", error)
        finally:
            self._looked = time.monotonic()

    def leave(self, why: object) -> None:
        """Choose another one, since this mirror delivers nothing."""
        if self._mirror is not None:
            _log.info("%s: no longer read from %s: %s", self._source.name, self._mirror.name, why)
            self._left[self._mirror.name] = time.monotonic()
            self._mirror = None
            self._choose()

    def wait(self, generation: int, timeout: float | None) -> int:
        """Wait until `generation` or a later one can be read; return the latest one."""
        found = self._await_anywhere(generation, timeout)
        self._waited = max(self._waited, found)
        return found

    def _await_anywhere(self, generation: int, timeout: float | None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        published = self._source.wait(generation, timeout=timeout)
        while (mirror := self.buffer()) is not self._source:
            left = None if end is None else max(0.0, end - time.monotonic())
            found = self._await(mirror, generation, left)
            if found:
                return found
            if left == 0.0:
                raise DeadlineError(
                    f"buffer {mirror.name!r}: generation {generation} of {self._source.name!r} has not arrived in this "
                    "mirror"
                )
        return published

    def _await(self, mirror: Buffer, generation: int, timeout: float | None) -> int:
        """Return the mirror's latest version, 0 if the mirror was left or the time is over.

        A thread does the waiting: a server that is gone blocks its caller for the client's timeout.
        """
        end = None if timeout is None else time.monotonic() + timeout
        moved, before = time.monotonic(), (-1, -1)
        while True:
            left = _LEASE_S if end is None else min(_LEASE_S, max(0.0, end - time.monotonic()))
            asked = self._client.submit(partial(mirror.wait, generation, timeout=left))
            while not wait([asked], _TURN_S).done:
                cancellation.check()
                now = self._progress(mirror)
                if now != before:
                    moved, before = time.monotonic(), now
                elif time.monotonic() - moved > _LEASE_S:
                    self.leave(f"nothing arrives there for {_LEASE_S:g} s")
                    return 0
            try:
                return asked.result()
            except DeadlineError:
                if end is not None and time.monotonic() >= end:
                    return 0
            except Error as error:
                self.leave(error)
                return 0

    def _asked(self) -> BufferInfo:
        """Return the coordinator's present description of the source. Does not wait long for a coordinator that is
        away.
        """
        source = self._source.info
        coordinator, patience = session_of(self._client).coordinator, min(self._client.timeout, _ASK_S)
        answer = coordinator.open_buffer(source.name, 0.0, patience, source.id)
        if answer.id != source.id:  # the name is another buffer's by now, and so are its mirrors
            raise NotFoundError(f"buffer {source.name!r} was deleted and created again; open it again")
        return BufferInfo.of(answer)

    def _progress(self, mirror: Buffer) -> tuple[int, int]:
        """Return values that change while a mirror is being filled."""
        try:
            info = self._asked()
        except NotFoundError:
            raise
        except Error:
            return -1, -1
        return next(((m.version, m.arrived_bytes) for m in info.mirrors if m.name == mirror.name and m.alive), (-1, -1))

    def least(self, generation: int) -> int:
        """Return the version that a mirror must have for a reader that has already had `generation`."""
        return max(generation, self._waited, 1)

    def read(self, read: Callable[[Buffer, int | None], int], generation: int, wanted: int | None = None) -> int:
        """Read the latest version, at least `generation`, or the version `wanted`; return its number.

        `read` reads from a buffer, with a version as that of Versions.read.
        """
        least = self.least(generation) if wanted is None else wanted
        while (buffer := self.buffer()) is not self._source:
            try:
                if buffer.version == 0 and self._source.version > 0:  # the mirror is being filled for the first time
                    self._await(buffer, 1, _LEASE_S)
                elif (
                    wanted is not None
                    and buffer.version < wanted <= self._source.version
                    and not self._await(buffer, wanted, None)
                ):
                    continue  # the mirror was left, since nothing arrives there
                if buffer.version >= least:
                    return read(buffer, wanted)
                break
            except Error as error:
                if wanted is not None and isinstance(error, NotFoundError):  # a mirror may skip versions
                    break
                self.leave(error)
        return read(self._source, wanted)
