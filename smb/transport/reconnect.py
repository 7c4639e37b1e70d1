"""The client's links to servers, and the threads that reconnect broken ones.

A link is a lane of the session to a server (csrc/client/link.h). Calls on a link without a connection stay in progress.
One table has all links: the links to each server for data and for waiting requests, and the links of segments that have
two copies, which lead to whichever server has the primary. One thread waits for links that have calls but no
connection. For each of them it starts a thread, which looks for the server at its last address and where the
coordinator says. That thread ends when the server answers or when no call waits for the link any more.
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

_WATCH_MS = 2000  # also how often the coordinator is asked for the primaries of segments with two copies
_JOIN_S = 10.0
_LANE_MAX = 65_534  # lane 65 535 is used between servers
_MOVING_S = 1.0  # for this long a segment's server may deny what another server already allows, or is about to allow
# The kernel keeps at most some 3 MB in flight on one connection (net.ipv4.tcp_rmem, tcp_wmem). One connection for each
# 10 ms of round trip, with 2 MiB in flight each (csrc/client/send.c), carries 1.6 Gbit/s.
_ROUND_TRIP_EACH_S = 0.01
# for all servers of a client: so many servers fill the network anyway, and file descriptors are limited
_FURTHER_MAX = 8 * LANES_FURTHER_MAX

_UNTRUSTED = "the peer at memory server %s's address %s was not accepted, or did not accept this client: %s"

_log = logging.getLogger("smb")


@dataclass(frozen=True, slots=True)
class Outages:
    """Connections that broke while they were needed: their number, the durations of those that ended, as counts between
    metric_names.OUTAGE_EDGES, and the sum of the durations in seconds.
    """

    begun: int
    counts: tuple[int, ...]
    sum_s: float


_Found = TypeVar("_Found", bound=LinkEntry)


class Links:
    """All resumable links of a client: one for each server and lane, and one for each segment with two copies. A server
    with a long round trip has several lanes for data.
    """

    def __init__(
        self,
        client: EngineClient,
        locate: Callable[[str], ServerAddress | None],
        tokens: ClientTokens,
        tls: ClientTls,
        locate_copies: Callable[[SegmentLocation], SegmentLocation | None] = lambda location: location,
    ) -> None:
        """`locate` asks the coordinator for a server by name: None without an answer, NotFoundError if no segment is
        left on that server. `locate_copies` asks where the primary of a segment is now: NotFoundError if the segment
        was deleted, or its memory is lost.
        """
        self.tokens = tokens
        self._client = client
        self._means = Means(client, Connector(client, tls), tokens, locate, locate_copies)
        self._lock = threading.Lock()
        # Keys are (server, lane), and (segment id, whether the link is for waiting requests).
        self._table: dict[tuple[str | int, int], LinkEntry] = {}
        self._last_lane = int(Lane.OF_SEGMENTS) - 1
        # `smb-links`, which starts with the first link, and each `smb-resume`
        self._threads: set[threading.Thread] = set()
        self._closing = event()
        self._untrusted: dict[str, str] = {}  # by server: the last reason why its peer was not trusted
        self._outages = Outages(0, (0,) * (len(OUTAGE_EDGES) + 1), 0.0)

    def outages(self) -> Outages:
        """Return the outages so far."""
        return self._outages

    def why_untrusted(self, server: str) -> str:
        """Return why the peer at the server's address is not trusted to be that server, empty if it is trusted."""
        return self._untrusted.get(server, "")

    def dial(self, lane: Lane, dialer: Dialer) -> None:
        """Let `dialer` make the connections of that lane."""
        self._means.dialers[lane] = dialer

    def _entry(self, key: tuple[str | int, int], kind: type[_Found], make: Callable[[], _Found]) -> _Found:
        """Return an entry of the table, made if it is missing, and make sure that its link is looked after."""
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
        """Return the link of this lane to the segment's server, connected if it is new.

        The link may be used for that segment. Raises EngineError if nobody answers or this client is refused,
        UnavailableError if another server answers, or another run of the server.
        """
        entry = self._entry(
            (location.server, lane),
            ServerEntry,
            lambda: ServerEntry(self._means, location.server, lane, whereabouts(location)),
        )
        with entry.lock:  # one thread connects, the others wait for its link
            link = entry.link()
            if link is None or not link.alive():
                link = entry.connect(location, deadline)
                with self._lock:
                    entry.held = link
                    if lane == Lane.TCP_DATA:
                        others = sum(each.further for each in self._of(ServerEntry)) - entry.further
                        wanted = connections_for(link.round_trip_s()) - 1
                        # Never fewer than before: requests may be in flight over them.
                        entry.further = max(entry.further, min(_FURTHER_MAX - others, wanted))
        self.tokens.show(link, location.id, deadline.left_ms())
        return link

    def reach_data(self, location: SegmentLocation, deadline: Deadline) -> tuple[Link, ...]:
        """Return the links for data to the segment's server; there are more of them the longer its round trip is.

        All but the first get a connection when a call first needs one. Raises as `reach` does.
        """
        first = self.reach(location, Lane.TCP_DATA, deadline)
        further = self._beside(location, first)
        unshown = [link for link in further if not self.tokens.shows(link, location.id)]
        if unshown:
            at_once(lambda link: self.tokens.show(link, location.id, deadline.left_ms()), unshown)
        return (first, *further)

    def _beside(self, location: SegmentLocation, first: Link) -> list[Link]:
        """Return the further links to a server. Those without a connection will present the segment's token once they
        have one.
        """
        links: list[Link] = []
        with self._lock:
            begun = self._table.get((location.server, Lane.TCP_DATA))
            # Otherwise the client was closed, or the first link has failed; a call will notice that.
            if not isinstance(begun, ServerEntry) or begun.held is not first:
                return links
            for lane in range(Lane.TCP_FURTHER, Lane.TCP_FURTHER + begun.further):
                entry = self._table.get((location.server, lane))
                link = entry.link() if entry is not None else None
                if not isinstance(entry, ServerEntry) or not (link and link.alive()) or entry.beside is not first:
                    if link is not None and link.alive():
                        # the first link was closed, so requests in flight on this one are given up
                        link.fail(Status.LINK_LOST)
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
        """Return the link to a segment that has two copies, connected if it is new, and whether its server was on this
        host.

        Its calls go to whichever server has the primary. `waits` selects the link for waiting requests. Raises as
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
        """Return the server of a segment; for a segment with two copies, the one where its link found the primary
        last.
        """
        entry = self._table.get((location.id, False))
        return location.server if entry is None else entry.server

    def _free_lane(self) -> int:
        """Return a lane that no other segment uses; a server accepts one connection for each lane.

        Removes links that are no longer used. The caller holds the lock.
        """
        for key, entry in [*self._table.items()]:
            if isinstance(entry, SegmentEntry) and entry.abandoned():
                del self._table[key]
        taken = {each.lane for each in self._of(SegmentEntry)}
        if len(taken) > _LANE_MAX - Lane.OF_SEGMENTS:
            raise UnavailableError(
                f"this client uses {len(taken)} segments with two copies, which is the most that a client can use; "
                "close some buffers"
            )
        while True:
            self._last_lane += 1
            if self._last_lane > _LANE_MAX:
                self._last_lane = int(Lane.OF_SEGMENTS)
            if self._last_lane not in taken:
                return self._last_lane

    def look_after_copies(self) -> None:
        """Move links to servers that have become the primary. A host that stops answering breaks no connection by
        itself.
        """
        with self._lock:
            entries = self._of(SegmentEntry)
        for entry in entries:
            if entry.link() is None:
                continue  # no longer used
            try:
                # this takes a while, so no reference to a link is held
                found = self._means.locate_copies(entry.location)
            except Error:
                continue
            if found is None:
                # the coordinator does not answer: each other question would take as long, and this thread also repairs
                # links
                return
            if found.epoch > entry.location.epoch:
                self._begin_move(entry)

    def _begin_move(self, entry: SegmentEntry) -> None:
        link = entry.link()
        if link is not None and link.connected():
            with self._lock, contextlib.suppress(RuntimeError):  # no thread can be started: the next round tries again
                if not self._closing.is_set():
                    self._start(_move, (entry, link), "smb-resume")

    def close(self) -> None:
        """Close all links after the engine's client was closed. No new connection is made from here on."""
        self._closing.set()
        with self._lock:
            self._table.clear()
            self._means.dialers.clear()  # dialers refer to these links: breaking the cycle frees them early

    def join(self) -> None:
        """Wait until no thread here is at work. Call this after `close`, and after everything that the threads wait for
        was closed.

        After 10 s, a thread that still resolves a name is left behind; a connection that it makes is closed.
        """
        deadline = Deadline(_JOIN_S)
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(deadline.left())

    def _start(self, target: Callable[..., None], given: tuple[object, ...], name: str) -> None:
        """Start a thread that `join` waits for. The caller holds the lock."""
        thread = threading.Thread(target=target, args=given, name=name, daemon=True)
        thread.start()
        self._threads.add(thread)

    def begin_resume(self, link_id: int) -> None:
        """Start a thread that gives that link a new connection."""
        try:
            with self._lock:
                self._threads = {thread for thread in self._threads if thread.is_alive()}
                if not self._closing.is_set():
                    self._start(self.resume, (link_id,), "smb-resume")
        except RuntimeError as error:  # no more threads can be started: other links wait until this one is done
            _log.warning("cannot start a thread to reconnect a link (%s): other links wait for this one", error)
            self.resume(link_id)

    def resume(self, link_id: int) -> None:
        """Give that link a new connection. Blocks until it has one, or no call waits for the link any more."""
        with self._lock:
            found = self._find(link_id)
            if found is None:
                return  # the link was closed in the meantime
            entry, link = found
            first_time, entry.unused = entry.unused, False
        try:
            made = self._resume(entry, link, first_time)
            with self._lock:
                entry.unused = first_time and not made
        finally:
            link.let_go()

    def _find(self, link_id: int) -> tuple[LinkEntry, Link] | None:
        """Return a link and its entry. References to other links are dropped. The caller holds the lock."""
        for entry in self._table.values():
            link = entry.link()
            if link is not None and link.id == link_id:
                return entry, link
        return None

    def _resume(self, entry: LinkEntry, link: Link, first_time: bool) -> bool:
        """Return True if the link has a connection now."""
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
            except NotFoundError as error:  # everything behind this link was deleted, lost or moved
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
        """Record a failed attempt; return whether another attempt makes sense."""
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
    """Connect a link that has a connection to the present primary instead. After a failure the next round tries
    again.
    """
    try:
        entry.attempt(link, again=False)
    except Error as error:
        _log.debug("memory server %s: %s", entry.server, error)


def connections_for(round_trip_s: float) -> int:
    """Return how many connections carry the data to a server."""
    return min(1 + int(round_trip_s / _ROUND_TRIP_EACH_S), 1 + LANES_FURTHER_MAX)


def refused(location: SegmentLocation, error: EngineError) -> Error:
    """Return the exception for a server whose TCP address does not accept this client."""
    text = f"memory server {location.server} at {location.address} can't be reached: {error}"
    if error.status is Status.UNTRUSTED:
        text = _UNTRUSTED % (location.server, location.address, error)
    if error.status is Status.DENIED:  # a retry with the same token would be denied as well
        return PermissionDeniedError(
            f"memory server {location.server} at {location.address} denies this session access: {error}"
        )
    if error.status in (Status.VERSION, Status.PROTOCOL):
        return TransportError(text)
    if error.status is Status.SESSION_ENDED:
        text += "; call client.reconnect(), or smb.connect again"
    return UnavailableError(text)


def _watch(client: EngineClient, links: weakref.ref[Links]) -> None:
    """Wait for links without a connection, until the client is closed or garbage-collected."""
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
