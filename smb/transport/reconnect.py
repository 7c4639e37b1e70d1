"""The client's links to servers, and the threads that give them a new connection when theirs broke.

A link is a lane of the session to a server (csrc/client/link.h): the calls on it stay in progress while it has no
connection. One table has them all: a server's links for data and for what waits, and the links of segments that have
two copies, which lead to whichever server has the primary. One thread waits until some link has calls but no
connection. For each such link a thread looks for the server, at its last address and where the coordinator says. It
ends when the server answers or nobody waits for the link any more.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from smb.config.backoff import Backoff
from smb.config.conditions import event
from smb.daemon.metric_names import OUTAGE_EDGES
from smb.engine import LANES_FURTHER_MAX, EngineClient, EngineError, Lane, Link, Status
from smb.errors import Error, NotFoundError, PermissionDeniedError, TransportError, UnavailableError
from smb.rpc.client_tokens import ClientTokens
from smb.transport.base import Deadline, SegmentLocation, at_once
from smb.transport.connector import Connector, ServerAddress
from smb.transport.link_entries import (
    PAUSE_FIRST_S,
    PAUSE_MAX_S,
    SENT_AWAY_S,
    Dialer,
    LinkEntry,
    Means,
    SegmentEntry,
    ServerEntry,
    whereabouts,
)
from smb.transport.tls import ClientTls

_WATCH_MS = 2000  # and as often it is asked where the primaries of segments of two copies are
_JOIN_S = 10.0
_LANE_MAX = 65_534  # 65 535 is the one between servers
_MOVING_S = 1.0  # so long a segment's server may deny us what another one has by now, or is about to have
# The kernel has some 3 MB on its way over one connection at most (net.ipv4.tcp_rmem, tcp_wmem). One connection for each
# 10 ms of round trip, with 2 MiB on its way (csrc/client/send.c), is 1.6 Gbit/s.
_ROUND_TRIP_EACH_S = 0.01
_FURTHER_MAX = 8 * LANES_FURTHER_MAX  # of a client: so many servers fill its link anyway, and descriptors are few

_UNTRUSTED = "memory server %s at %s is not whom it should be, or does not take us: %s"

_log = logging.getLogger("smb")


@dataclass(frozen=True, slots=True)
class Outages:
    """Connections that broke while they were needed: how many, and how long those that ended took, as counts between
    metric_names.OUTAGE_EDGES and their sum in seconds."""

    begun: int
    counts: tuple[int, ...]
    sum_s: float


_Found = TypeVar("_Found", bound=LinkEntry)


class Links:
    """All resumable links of a client: one for each server and lane, and one for each segment that has two copies. A
    server that is far away has several lanes for data."""

    def __init__(
        self,
        client: EngineClient,
        locate: Callable[[str], ServerAddress | None],
        tokens: ClientTokens,
        tls: ClientTls,
        locate_copies: Callable[[SegmentLocation], SegmentLocation | None] = lambda location: location,
    ) -> None:
        """`locate` asks the coordinator for a server by name: None if it does not answer; NotFoundError if there is
        nothing to look for on that server.
        `locate_copies` asks where the primary of a segment is now; NotFoundError if it is gone, or its memory lost.
        """
        self.tokens = tokens
        self._client = client
        self._means = Means(client, Connector(client, tls), tokens, locate, locate_copies)
        self._lock = threading.Lock()
        # By server and lane; by segment, and whether for what waits.
        self._table: dict[tuple[str | int, int], LinkEntry] = {}
        self._last_lane = int(Lane.OF_SEGMENTS) - 1
        self._threads: set[threading.Thread] = set()  # `smb-links`, once something is reached, and each `smb-resume`
        self._closing = event()
        self._untrusted: dict[str, str] = {}  # by server: who answered there instead, the last time
        self._outages = Outages(0, (0,) * (len(OUTAGE_EDGES) + 1), 0.0)

    def outages(self) -> Outages:
        """Return what broke, and for how long."""
        return self._outages

    def why_untrusted(self, server: str) -> str:
        """Return why the peer at the server's address is not trusted to be that server, empty if it is trusted."""
        return self._untrusted.get(server, "")

    def dial(self, lane: Lane, dialer: Dialer) -> None:
        """Have links of that lane connected by `dialer`."""
        self._means.dialers[lane] = dialer

    def _entry(self, key: tuple[str | int, int], kind: type[_Found], make: Callable[[], _Found]) -> _Found:
        """Return an entry of the table, made if there is none, and have somebody look after its link."""
        with self._lock:
            entry = self._table.get(key)
            if entry is None:
                entry = self._table[key] = make()
            if not self._threads:
                self._start(_watch, (self._client, weakref.ref(self)), "smb-links")
            assert isinstance(entry, kind)
            return entry

    def _of(self, kind: type[_Found]) -> list[_Found]:
        """Return all entries of a kind. The caller holds the lock."""
        return [entry for entry in self._table.values() if isinstance(entry, kind)]

    def reach(self, location: SegmentLocation, lane: Lane, deadline: Deadline) -> Link:
        """Return the link of this lane to the segment's server, connecting it if there is none.

        It may be used for that segment. Raises EngineError if nobody answers or we are refused, UnavailableError
        if it is another server, or another run of it.
        """
        entry = self._entry(
            (location.server, lane),
            ServerEntry,
            lambda: ServerEntry(self._means, location.server, lane, whereabouts(location)),
        )
        with entry.lock:  # one connects, the others wait for its link
            link = entry.link()
            if link is None or not link.alive():
                link = entry.connect(location, deadline)
                with self._lock:
                    entry.held = link
                    if lane == Lane.TCP_DATA:
                        others = sum(each.further for each in self._of(ServerEntry)) - entry.further
                        wanted = connections_for(link.round_trip_s()) - 1
                        # Never fewer than before: something may be on its way over them.
                        entry.further = max(entry.further, min(_FURTHER_MAX - others, wanted))
        self.tokens.show(link, location.id, deadline.left_ms())
        return link

    def reach_data(self, location: SegmentLocation, deadline: Deadline) -> tuple[Link, ...]:
        """Return the links for data to the segment's server: more of them the longer its round trip. All but the first
        get a connection when a call first needs them. Raises as `reach` does.
        """
        first = self.reach(location, Lane.TCP_DATA, deadline)
        further = self._beside(location, first)
        unshown = [link for link in further if not self.tokens.shows(link, location.id)]
        if unshown:
            at_once(lambda link: self.tokens.show(link, location.id, deadline.left_ms()), unshown)
        return (first, *further)

    def _beside(self, location: SegmentLocation, first: Link) -> list[Link]:
        """Return the links beside the first one to a server. Those without a connection yet will show the token of the
        segment.
        """
        links: list[Link] = []
        with self._lock:
            begun = self._table.get((location.server, Lane.TCP_DATA))
            # Else all is closed, or the first has failed: a call notices.
            if not isinstance(begun, ServerEntry) or begun.held is not first:
                return links
            for lane in range(Lane.TCP_FURTHER, Lane.TCP_FURTHER + begun.further):
                entry = self._table.get((location.server, lane))
                link = entry.link() if entry is not None else None
                if not isinstance(entry, ServerEntry) or not (link and link.alive()) or entry.beside is not first:
                    if link is not None and link.alive():
                        link.fail(Status.LINK_LOST)  # the first was closed, and what was under way there is given up
                    link = first.beside(lane, follows=link is not None)
                    entry = ServerEntry(self._means, location.server, lane, begun.where)
                    entry.held, entry.beside, entry.unused = link, first, True
                    self._table[location.server, lane] = entry
                if entry.unused:
                    self.tokens.keep(link, location.id)
                links.append(link)
        return links

    def reach_copies(
        self, location: SegmentLocation, deadline: Deadline, *, may_be_local: bool, waits: bool = False
    ) -> tuple[Link, bool]:
        """Return the link to a segment that has two copies, connecting it if there is none, and whether its server was
        on this host. Its calls go to whichever server has the primary. `waits`: the one for what waits there. Raises as
        `reach` does.
        """
        entry = self._entry(
            (location.id, waits),
            SegmentEntry,
            lambda: SegmentEntry(self._means, location, self._free_lane(), may_be_local),
        )
        with entry.lock:
            link = entry.link()
            if link is None or not link.alive():
                link = entry.connect(location, deadline)
            entry.show(link, Deadline(min(deadline.left(), _MOVING_S)), self._closing)
        return link, bool(entry.unix_path(entry.location))

    def server_of(self, location: SegmentLocation) -> str:
        """Return the server of a segment: of one that has two copies, where its link found the primary last."""
        entry = self._table.get((location.id, False))
        return location.server if entry is None else entry.server

    def _free_lane(self) -> int:
        """Return a lane that no other segment has; one lane has one connection to a server. Links that nobody uses any
        more go. The caller holds the lock.
        """
        for key, entry in [*self._table.items()]:
            if isinstance(entry, SegmentEntry) and entry.abandoned():
                del self._table[key]
        taken = {each.lane for each in self._of(SegmentEntry)}
        if len(taken) > _LANE_MAX - Lane.OF_SEGMENTS:
            raise UnavailableError(f"this client uses {len(taken)} segments of two copies: no client uses more")
        while True:
            self._last_lane += 1
            if self._last_lane > _LANE_MAX:
                self._last_lane = int(Lane.OF_SEGMENTS)
            if self._last_lane not in taken:
                return self._last_lane

    def look_after_copies(self) -> None:
        """A host that is silent breaks no connection: where another server has the primary by now, links go there."""
        with self._lock:
            entries = self._of(SegmentEntry)
        for entry in entries:
            if entry.link() is None:
                continue  # nobody uses it any more
            try:
                found = self._means.locate_copies(entry.location)  # takes a while: no link is kept from ending
            except Error:
                continue
            if found is None:
                return  # nobody says: each of the others would take as long, and this thread mends what breaks
            if found.epoch > entry.location.epoch:
                self._begin_move(entry)

    def _begin_move(self, entry: SegmentEntry) -> None:
        link = entry.link()
        if link is not None and link.connected():
            with self._lock, contextlib.suppress(RuntimeError):  # without a thread to be had: at the next look
                if not self._closing.is_set():
                    self._start(_move, (entry, link), "smb-resume")

    def close(self) -> None:
        """Close all of them, once the engine's client is closed: no new connection is looked for from here on."""
        self._closing.set()
        with self._lock:
            self._table.clear()
            self._means.dialers.clear()  # they have these links themselves, and who is in a circle goes late

    def join(self) -> None:
        """Wait until no thread here is at work any more, after `close`, and after all that they wait for was closed.
        One that still looks a name up after 10 s is left to itself: what it finds is closed.
        """
        deadline = Deadline(_JOIN_S)
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(deadline.left())

    def _start(self, target: Callable[..., None], given: tuple[object, ...], name: str) -> None:
        """Start a thread that `join` waits for. With the lock."""
        thread = threading.Thread(target=target, args=given, name=name, daemon=True)
        thread.start()
        self._threads.add(thread)

    def begin_resume(self, link_id: int) -> None:
        """Have a thread give that link a new connection."""
        try:
            with self._lock:
                self._threads = {thread for thread in self._threads if thread.is_alive()}
                if not self._closing.is_set():
                    self._start(self.resume, (link_id,), "smb-resume")
        except RuntimeError as error:  # this process may have no more threads: other links wait for this one
            _log.warning("a connection is made again without a thread of its own: %s", error)
            self.resume(link_id)

    def resume(self, link_id: int) -> None:
        """Give that link a new connection; blocks until it has one, or nobody wants it any more."""
        with self._lock:
            found = self._find(link_id)
            if found is None:
                return  # it was closed meanwhile
            entry, link = found
            first_time, entry.unused = entry.unused, False
        try:
            made = self._resume(entry, link, first_time)
            with self._lock:
                entry.unused = first_time and not made
        finally:
            link.let_go()

    def _find(self, link_id: int) -> tuple[LinkEntry, Link] | None:
        """Return a link and its entry. No other link is kept from its end. The caller holds the lock."""
        for entry in self._table.values():
            link = entry.link()
            if link is not None and link.id == link_id:
                return entry, link
        return None

    def _resume(self, entry: LinkEntry, link: Link, first_time: bool) -> bool:
        """Return whether it has a connection now."""
        begun = time.monotonic()
        if first_time:
            _log.debug("one more connection to memory server %s", entry.server)
        else:
            _log.log(entry.level, "the connection to memory server %s broke; connecting again", entry.server)
            with self._lock:
                self._outages = replace(self._outages, begun=self._outages.begun + 1)
        sent_away, again = entry.sent_away(), False
        backoff = Backoff(SENT_AWAY_S / 2 if sent_away else PAUSE_FIRST_S, PAUSE_MAX_S)
        if sent_away and self._closing.wait(backoff.next_s()):
            return False
        while not self._closing.is_set() and link.alive() and link.wanted():
            try:
                instance_id = entry.attempt(link, again=again)
            except NotFoundError as error:  # all that it led to was deleted, is lost, or has moved
                _log.debug("memory server %s: %s", entry.server, error)
                link.fail(Status.NOT_FOUND)
                return False
            except Error as error:
                if not self._goes_on(entry, error):
                    return False
            else:
                self._untrusted.pop(entry.server, None)
                if not first_time:
                    _log.log(entry.level, "connected to memory server %s again (run %016x)", entry.server, instance_id)
                    self._note_outage(time.monotonic() - begun)
                return True
            again = True
            if self._closing.wait(backoff.next_s()):
                return False
        return False

    def _goes_on(self, entry: LinkEntry, error: Error) -> bool:
        """Take note of an attempt that failed; return whether there is sense in another one."""
        status = error.status if isinstance(error, EngineError) else None
        if status is Status.SESSION_ENDED:
            _log.warning("memory server %s: %s", entry.server, error)
            return False
        if status is Status.UNTRUSTED:
            if entry.server not in self._untrusted:
                _log.warning(_UNTRUSTED, entry.server, entry.address, error)
            self._untrusted[entry.server] = str(error)
        _log.debug("memory server %s: %s", entry.server, error)
        return True

    def _note_outage(self, seconds: float) -> None:
        bucket = bisect.bisect_left(OUTAGE_EDGES, seconds)
        with self._lock:
            before = self._outages
            counts = tuple(count + (i == bucket) for i, count in enumerate(before.counts))
            self._outages = Outages(before.begun, counts, before.sum_s + seconds)


def _move(entry: SegmentEntry, link: Link) -> None:
    """Give a link that has a connection another one, to the primary of now. If that fails it is tried again."""
    try:
        entry.attempt(link, again=False)
    except Error as error:
        _log.debug("memory server %s: %s", entry.server, error)


def connections_for(round_trip_s: float) -> int:
    """Return how many connections carry the data to a server."""
    return min(1 + int(round_trip_s / _ROUND_TRIP_EACH_S), 1 + LANES_FURTHER_MAX)


def refused(location: SegmentLocation, error: EngineError) -> Error:
    """Return what to raise where a server's TCP address does not let us in."""
    text = f"memory server {location.server} at {location.address} can't be reached: {error}"
    if error.status is Status.UNTRUSTED:
        text = _UNTRUSTED % (location.server, location.address, error)
    if error.status is Status.DENIED:  # nobody gets in with the same token later
        return PermissionDeniedError(
            f"memory server {location.server} at {location.address} does not let this session in: {error}"
        )
    if error.status in (Status.VERSION, Status.PROTOCOL):
        return TransportError(text)
    return UnavailableError(text)


def _watch(client: EngineClient, links: weakref.ref[Links]) -> None:
    """Wait for links without a connection, until the client is closed or forgotten."""
    while True:
        try:
            link_id = client.wait_down(_WATCH_MS)
        except EngineError:
            return
        owner = links()
        if owner is None:
            return
        if link_id is not None:
            owner.begin_resume(link_id)
        else:
            owner.look_after_copies()
        del owner
