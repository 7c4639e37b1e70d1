"""The client's links to servers, and the threads that give them a new connection when theirs broke.

A link is a lane of the session to a server (csrc/client/link.h): the calls on it stay in progress while it has no
connection. One thread waits until some link has calls but no connection. For each such link a thread looks for the
server, at its last address and where the coordinator says. It ends when the server answers or nobody waits for the link
any more.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from smb.config.backoff import Backoff
from smb.config.conditions import event
from smb.config.host_address import addresses_of
from smb.config.parse import parse_address
from smb.daemon.metric_names import OUTAGE_EDGES
from smb.engine import LANES_FURTHER_MAX, EngineClient, EngineError, Lane, Link, Status
from smb.errors import Error, NotFoundError, PermissionDeniedError, TransportError, UnavailableError
from smb.rpc.client_tokens import Tokens
from smb.security.credentials import server_name
from smb.transport.base import Deadline, SegmentPlace, at_once, is_here
from smb.transport.tls import ClientTls

_PAUSE_FIRST_S = 0.01
_PAUSE_MAX_S = 0.25
_ATTEMPT_MS = 1000
_WATCH_MS = 2000  # and as often it is asked where the primaries of segments of two copies are
_JOIN_S = 10.0
_LANE_MAX = 65_534  # 65 535 is the one between servers
_SENT_AWAY_S = 0.1
_MOVING_S = 1.0  # so long a segment's server may deny us what another one has by now, or is about to have
# The kernel has some 3 MB on its way over one connection at most (net.ipv4.tcp_rmem, tcp_wmem). One connection for each
# 10 ms of round trip, with 2 MiB on its way (csrc/client/send.c), is 1.6 Gbit/s.
_ROUND_TRIP_EACH_S = 0.01
_FURTHER_MAX = 8 * LANES_FURTHER_MAX  # of a client: so many servers fill its link anyway, and descriptors are few
_UNIX = frozenset({Lane.UNIX_DATA, Lane.UNIX_WAITS})

_UNTRUSTED = "memory server %s at %s is not whom it should be, or does not take us: %s"

_log = logging.getLogger("smb")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a server is now, as the coordinator knows it."""

    address: str
    unix_path: str
    instance_id: int
    control_address: str = ""
    tls: bool = False


class Dialer(Protocol):
    """Makes connections of a lane that are neither TCP nor Unix."""

    def dial(self, server: str, where: Whereabouts, lane: int, timeout_ms: int) -> tuple[Link, int]:
        """Return a link and the server's instance. Raises EngineError, NoPathError."""

    def redial(self, link: Link, server: str, where: Whereabouts, accept_instance: int, timeout_ms: int) -> int | None:
        """Give the link a new connection and return the server's instance; None: it should have one over TCP.

        Raises EngineError, UnavailableError: not now.
        """


@dataclass(frozen=True, slots=True)
class Outages:
    """Connections that broke while they were needed: how many, and how long those that ended took, as counts between
    metric_names.OUTAGE_EDGES and their sum in seconds."""

    begun: int
    counts: tuple[int, ...]
    sum_s: float


@dataclass(slots=True)
class _Entry:
    server: str
    lane: int
    where: Whereabouts
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while it connects for the first time
    link: Link | None = None
    further: int = 0  # connections for data beside this one
    beside: Link | None = None  # the first, of one of those
    unused: bool = False  # it has never had a connection, and nobody makes one


@dataclass(slots=True)
class _Copies:
    """The link to a segment that has two copies: to whichever server has the primary."""

    place: SegmentPlace
    lane: int
    may_be_local: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    link: weakref.ref[Link] | None = None  # the buffers that use it keep it
    resumed_at: float = 0.0

    def unix_path(self) -> str:
        path = self.place.unix_path
        return path if self.may_be_local and is_here(path) else ""


class Links:
    """All resumable links of a client: one for each server and lane, and one for each segment that has two copies. A
    server that is far away has several lanes for data."""

    def __init__(
        self,
        client: EngineClient,
        locate: Callable[[str], Whereabouts | None],
        tokens: Tokens,
        tls: ClientTls,
        locate_copies: Callable[[SegmentPlace], SegmentPlace | None] = lambda place: place,
    ) -> None:
        """`locate` asks the coordinator for a server by name: None if it does not answer; NotFoundError if there is
        nothing to look for on that server.
        `locate_copies` asks where the primary of a segment is now; NotFoundError if it is gone, or its memory lost.
        """
        self._locate_copies = locate_copies
        self._copies: dict[tuple[int, bool], _Copies] = {}  # by segment, and whether for what waits
        self._last_lane = int(Lane.OF_SEGMENTS) - 1
        self.tokens = tokens
        self._tls = tls
        self._client = client
        self._locate = locate
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._dialers: dict[int, Dialer] = {}
        self._threads: set[threading.Thread] = set()  # `smb-links`, once something is reached, and each `smb-resume`
        self._closing = event()
        self._answered: dict[str, str] = {}  # by a server's address, which may be a name: the numeric one that answers
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
        self._dialers[lane] = dialer

    def reach(self, place: SegmentPlace, lane: Lane, deadline: Deadline) -> Link:
        """Return the link of this lane to the segment's server, connecting it if there is none.

        It may be used for that segment. Raises EngineError if nobody answers or we are refused, UnavailableError
        if it is another server, or another run of it.
        """
        where = Whereabouts(place.address, place.unix_path, place.instance_id, place.control_address, place.tls)
        with self._lock:
            entry = self._entries.setdefault((place.server, lane), _Entry(place.server, lane, where))
            if not self._threads:
                self._start(_watch, (self._client, weakref.ref(self)), "smb-links")
        with entry.lock:  # one connects, the others wait for its link
            if entry.link is None or not entry.link.alive():
                link = self._connect(entry, where, deadline)
                with self._lock:
                    entry.link, entry.where = link, where
                    if lane == Lane.TCP_DATA:
                        others = sum(each.further for each in self._entries.values()) - entry.further
                        wanted = connections_for(link.round_trip_s()) - 1
                        # Never fewer than before: something may be on its way over them.
                        entry.further = max(entry.further, min(_FURTHER_MAX - others, wanted))
            link = entry.link
        self.tokens.show(link, place.id, deadline.left_ms())
        return link

    def reach_data(self, place: SegmentPlace, deadline: Deadline) -> tuple[Link, ...]:
        """Return the links for data to the segment's server: more of them the longer its round trip. All but the first
        get a connection when a call first needs them. Raises as `reach` does.
        """
        first = self.reach(place, Lane.TCP_DATA, deadline)
        further = self._beside(place, first)
        unshown = [link for link in further if not self.tokens.shows(link, place.id)]
        if unshown:
            at_once(lambda link: self.tokens.show(link, place.id, deadline.left_ms()), unshown)
        return (first, *further)

    def _beside(self, place: SegmentPlace, first: Link) -> list[Link]:
        """Return the links beside the first one to a server. Those without a connection yet will show the token of the
        segment.
        """
        links: list[Link] = []
        with self._lock:
            begun = self._entries.get((place.server, Lane.TCP_DATA))
            if begun is None or begun.link is not first:  # all is closed, or the first has failed: a call notices
                return links
            for lane in range(Lane.TCP_FURTHER, Lane.TCP_FURTHER + begun.further):
                entry = self._entries.get((place.server, lane))
                link = entry.link if entry is not None else None
                if entry is None or link is None or not link.alive() or entry.beside is not first:
                    if link is not None and link.alive():
                        link.fail(Status.LINK_LOST)  # the first was closed, and what was under way there is given up
                    link = first.beside(lane, follows=link is not None)
                    entry = _Entry(place.server, lane, begun.where, link=link, beside=first, unused=True)
                    self._entries[place.server, lane] = entry
                if entry.unused:
                    self.tokens.keep(link, place.id)
                links.append(link)
        return links

    def reach_copies(
        self, place: SegmentPlace, deadline: Deadline, *, may_be_local: bool, waits: bool = False
    ) -> tuple[Link, bool]:
        """Return the link to a segment that has two copies, connecting it if there is none, and whether its server was
        on this host. Its calls go to whichever server has the primary. `waits`: the one for what waits there. Raises as
        `reach` does.
        """
        with self._lock:
            entry = self._copies.get((place.id, waits))
            if entry is None:
                self._forget_copies()
                entry = self._copies[place.id, waits] = _Copies(place, self._free_lane(), may_be_local)
            if not self._threads:
                self._start(_watch, (self._client, weakref.ref(self)), "smb-links")
        with entry.lock:
            link = entry.link() if entry.link is not None else None
            if link is None or not link.alive():
                entry.place = place
                link = self._connect_copies(entry, deadline)
                link.set_epoch(place.epoch)
                entry.link = weakref.ref(link)
            self._show_copies(entry, link, Deadline(min(deadline.left(), _MOVING_S)))
        return link, bool(entry.unix_path())

    def _show_copies(self, entry: _Copies, link: Link, deadline: Deadline) -> None:
        """Show the token of a segment to the server of its primary; another one, that had it, denies it. Raises
        EngineError.
        """
        backoff = Backoff(_PAUSE_FIRST_S, _PAUSE_MAX_S, deadline.left)
        while True:
            try:
                self.tokens.show(link, entry.place.id, deadline.left_ms())
            except EngineError as error:
                if error.status is not Status.DENIED or deadline.left() == 0.0 or self._closing.wait(backoff.next_s()):
                    raise
                with contextlib.suppress(Error):
                    found = self._locate_copies(entry.place)
                    if found is not None and found.server != entry.place.server:
                        self._go_to(entry, link, found)
            else:
                return

    def server_of(self, place: SegmentPlace) -> str:
        """Return the server of a segment: of one that has two copies, where its link found the primary last."""
        entry = self._copies.get((place.id, False))
        return place.server if entry is None else entry.place.server

    def _forget_copies(self) -> None:
        """Those that nobody uses any more. With the lock."""
        gone = [key for key, each in self._copies.items() if each.link is not None and each.link() is None]
        for key in gone:
            del self._copies[key]

    def _free_lane(self) -> int:
        """Return a lane that no other segment has; one lane has one connection to a server. With the lock."""
        taken = {each.lane for each in self._copies.values()}
        if len(taken) > _LANE_MAX - Lane.OF_SEGMENTS:
            raise UnavailableError(f"this client uses {len(taken)} segments of two copies: no client uses more")
        while True:
            self._last_lane += 1
            if self._last_lane > _LANE_MAX:
                self._last_lane = int(Lane.OF_SEGMENTS)
            if self._last_lane not in taken:
                return self._last_lane

    def _connect_copies(self, entry: _Copies, deadline: Deadline) -> Link:
        place, path = entry.place, entry.unix_path()
        try:
            if path:
                link, instance_id = self._client.connect_unix(path, entry.lane, deadline.left_ms())
            else:
                where = Whereabouts(place.address, "", place.instance_id, tls=place.tls)
                link, instance_id = self._connect_tcp(place.server, where, entry.lane, deadline)
        except EngineError as error:
            if not path or error.status is not Status.UNTRUSTED:
                raise
            entry.may_be_local = False  # another user listens there
            return self._connect_copies(entry, deadline)
        if instance_id != place.instance_id:
            raise UnavailableError(
                f"at {path or place.address} answers another run than the memory server {place.server} known"
            )
        return link

    def look_after_copies(self) -> None:
        """A host that is silent breaks no connection: where another server has the primary by now, links go there."""
        with self._lock:
            entries = list(self._copies.values())
        for entry in entries:
            if entry.link is None or entry.link() is None:
                continue  # nobody uses it any more
            try:
                found = self._locate_copies(entry.place)  # takes a while: meanwhile no link is kept from its end
            except Error:
                continue
            if found is None:
                return  # nobody says: each of the others would take as long, and this thread mends what breaks
            if found.epoch > entry.place.epoch:
                self._begin_move(entry)

    def _begin_move(self, entry: _Copies) -> None:
        link = entry.link() if entry.link is not None else None
        if link is not None and link.connected():
            with self._lock, contextlib.suppress(RuntimeError):  # without a thread to be had: at the next look
                if not self._closing.is_set():
                    self._start(self._move_copies, (entry, link), "smb-resume")

    def _move_copies(self, entry: _Copies, link: Link) -> None:
        """Give a link that has a connection another one, to the primary of now. If that fails it is tried again."""
        try:
            self._attempt_copies(entry, link)
        except Error as error:
            _log.debug("memory server %s: %s", entry.place.server, error)

    def _attempt_copies(self, entry: _Copies, link: Link) -> None:
        self._go_to(entry, link, self._locate_copies(entry.place) or entry.place)

    def _go_to(self, entry: _Copies, link: Link, found: SegmentPlace) -> None:
        link.set_epoch(found.epoch)
        self.tokens.keep(link, found.id)
        path = found.unix_path if entry.may_be_local and is_here(found.unix_path) else ""
        try:
            if path:
                link.resume_unix(path, found.instance_id, _ATTEMPT_MS)
            else:
                self._resume_tcp(link, found.server, found.address, found.tls, found.instance_id)
        except EngineError as error:
            if path and error.status is Status.UNTRUSTED:
                entry.may_be_local = False  # another user listens there: the next attempt is over TCP
            raise
        entry.place = found

    def _resume_copies(self, entry: _Copies, link: Link) -> None:
        """Find who has the primary, and go on there; blocks until that is done, or nobody wants it any more."""
        begun = time.monotonic()
        with self._lock:
            self._outages = replace(self._outages, begun=self._outages.begun + 1)
        # A server that does not know its role yet lets us in, and then sends us away.
        sent_away = begun - entry.resumed_at <= _SENT_AWAY_S
        backoff = Backoff(_SENT_AWAY_S / 2 if sent_away else _PAUSE_FIRST_S, _PAUSE_MAX_S)
        if sent_away and self._closing.wait(backoff.next_s()):
            return
        while not self._closing.is_set() and link.alive() and link.wanted():
            try:
                self._attempt_copies(entry, link)
            except NotFoundError:
                link.fail(Status.NOT_FOUND)
                return
            except Error as error:
                if isinstance(error, EngineError) and error.status is Status.SESSION_ENDED:
                    _log.warning("memory server %s: %s", entry.place.server, error)
                    return
                _log.debug("memory server %s: %s", entry.place.server, error)
            else:
                entry.resumed_at = time.monotonic()
                self._note_outage(entry.resumed_at - begun)
                return
            if self._closing.wait(backoff.next_s()):
                return

    def close(self) -> None:
        """Close all of them, once the engine's client is closed: no new connection is looked for from here on."""
        self._closing.set()
        with self._lock:
            self._entries.clear()
            self._copies.clear()
            self._dialers.clear()  # they have these links themselves, and who is in a circle goes late

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

    def _connect(self, entry: _Entry, where: Whereabouts, deadline: Deadline) -> Link:
        if entry.lane in _UNIX:
            link, instance_id = self._client.connect_unix(where.unix_path, entry.lane, deadline.left_ms())
        elif dialer := self._dialers.get(entry.lane):
            link, instance_id = dialer.dial(entry.server, where, entry.lane, deadline.left_ms())
        else:
            link, instance_id = self._connect_tcp(entry.server, where, entry.lane, deadline)
        if instance_id != where.instance_id:
            # It was restarted, or another one has its address: the coordinator will know.
            at = where.unix_path if entry.lane in _UNIX else where.address
            raise UnavailableError(f"at {at} answers another run than the memory server {entry.server} known")
        return link

    def resume(self, link_id: int) -> None:
        """Give that link a new connection; blocks until it has one, or nobody wants it any more."""
        with self._lock:
            entry = next((e for e in self._entries.values() if e.link is not None and e.link.id == link_id), None)
            first_time = entry is not None and entry.unused
            if entry is not None:
                entry.unused = False
            copies = self._copies_of(link_id)
        if copies is not None:
            try:
                self._resume_copies(*copies)
            finally:
                copies[1].let_go()
            return
        link = entry.link if entry is not None else None
        if entry is None or link is None:
            return  # it was closed meanwhile
        try:
            made = self._resume(entry, link, first_time)
            with self._lock:
                entry.unused = first_time and not made
        finally:
            link.let_go()

    def _copies_of(self, link_id: int) -> tuple[_Copies, Link] | None:
        """Return what has that link. With the lock. No other link is kept from its end."""
        for each in self._copies.values():
            link = each.link() if each.link is not None else None
            if link is not None and link.id == link_id:
                return each, link
        return None

    def _resume(self, entry: _Entry, link: Link, first_time: bool) -> bool:
        """Return whether it has a connection now."""
        if first_time:
            _log.debug("one more connection to memory server %s", entry.server)
        else:
            _log.info("the connection to memory server %s broke; connecting again", entry.server)
            with self._lock:
                self._outages = replace(self._outages, begun=self._outages.begun + 1)
        begun = time.monotonic()
        backoff, known = Backoff(_PAUSE_FIRST_S, _PAUSE_MAX_S), 0
        while not self._closing.is_set() and link.alive() and link.wanted():
            try:
                instance_id = self._attempt(entry, link, known)
            except Error as error:
                if isinstance(error, EngineError) and error.status is Status.SESSION_ENDED:
                    _log.warning("memory server %s: %s", entry.server, error)
                    return False
                if isinstance(error, EngineError) and error.status is Status.UNTRUSTED:
                    if entry.server not in self._untrusted:
                        _log.warning(_UNTRUSTED, entry.server, entry.where.address, error)
                    self._untrusted[entry.server] = str(error)
                _log.debug("memory server %s: %s", entry.server, error)
            else:
                self._untrusted.pop(entry.server, None)
                if not first_time:
                    _log.info("connected to memory server %s again (run %016x)", entry.server, instance_id)
                    self._note_outage(time.monotonic() - begun)
                return True
            if self._closing.wait(backoff.next_s()):
                return False
            try:
                found = self._locate(entry.server)
            except NotFoundError as error:  # all that it had was deleted, or has moved
                _log.debug("%s", error)
                link.fail(Status.NOT_FOUND)
                return False
            if found is not None:
                entry.where, known = found, found.instance_id
        return False

    def _note_outage(self, seconds: float) -> None:
        place = bisect.bisect_left(OUTAGE_EDGES, seconds)
        with self._lock:
            before = self._outages
            counts = tuple(count + (i == place) for i, count in enumerate(before.counts))
            self._outages = Outages(before.begun, counts, before.sum_s + seconds)

    def _attempt(self, entry: _Entry, link: Link, accept_instance: int) -> int:
        if entry.lane in _UNIX:
            return link.resume_unix(entry.where.unix_path, accept_instance, _ATTEMPT_MS)
        if dialer := self._dialers.get(entry.lane):
            instance_id = dialer.redial(link, entry.server, entry.where, accept_instance, _ATTEMPT_MS)
            if instance_id is not None:
                return instance_id
        return self._resume_tcp(link, entry.server, entry.where.address, entry.where.tls, accept_instance)

    def _connect_tcp(self, server: str, where: Whereabouts, lane: int, deadline: Deadline) -> tuple[Link, int]:
        """Connect to the server at the address of its name that answers. A name's other addresses may be of nobody, or
        of another one: if none answers as the run that is wanted, the first answer is returned, or its failure raised.
        """
        found = self._addresses(server, where.address)
        other: tuple[Link, int] | None = None
        failure: EngineError | None = None
        for number, (host, port) in enumerate(found, 1):
            # An address that is silent has a share of the time alone.
            left_ms = deadline.left_ms() if number == len(found) else min(deadline.left_ms(), _ATTEMPT_MS)
            try:
                if where.tls:
                    tls, expected = self._tls.now(server), server_name(server)
                    answer = self._client.connect_tls(host, port, tls, expected, lane, left_ms)
                else:
                    answer = self._client.connect_tcp(host, port, lane, left_ms)
            except EngineError as error:
                _log.debug("memory server %s at %s: %s", server, host, error)
                failure = failure or error
                continue
            if answer[1] == where.instance_id:
                self._answered[where.address] = host
                return answer
            other = other or answer
        if other is not None:
            return other
        assert failure is not None
        raise failure

    def _resume_tcp(self, link: Link, server: str, address: str, secured: bool, accept_instance: int) -> int:
        failure: EngineError | None = None
        for host, port in self._addresses(server, address):
            try:
                if secured:
                    tls, expected = self._tls.now(server), server_name(server)
                    instance_id = link.resume_tls(host, port, tls, expected, accept_instance, _ATTEMPT_MS)
                else:
                    instance_id = link.resume_tcp(host, port, accept_instance, _ATTEMPT_MS)
            except EngineError as error:
                if error.status is Status.SESSION_ENDED:  # by the server itself
                    raise
                failure = failure or error
            else:
                self._answered[address] = host
                return instance_id
        assert failure is not None
        raise failure

    def _addresses(self, server: str, address: str) -> list[tuple[str, int]]:
        """Return a server's numeric addresses, the one at which it answered last first. Raises UnavailableError."""
        host, port = parse_address(address)
        try:
            found = [str(where[0]) for _, where in addresses_of(host, port)]
        except OSError as error:
            raise UnavailableError(f"memory server {server}: no address for {host!r}: {error.strerror}") from error
        before = self._answered.get(address)
        return [(each, port) for each in sorted(found, key=lambda each: each != before)]


def connections_for(round_trip_s: float) -> int:
    """Return how many connections carry the data to a server."""
    return min(1 + int(round_trip_s / _ROUND_TRIP_EACH_S), 1 + LANES_FURTHER_MAX)


def refused(place: SegmentPlace, error: EngineError) -> Error:
    """Return what to raise where a server's TCP address does not let us in."""
    text = f"memory server {place.server} at {place.address} can't be reached: {error}"
    if error.status is Status.UNTRUSTED:
        text = _UNTRUSTED % (place.server, place.address, error)
    if error.status is Status.DENIED:  # nobody gets in with the same token later
        return PermissionDeniedError(
            f"memory server {place.server} at {place.address} does not let this session in: {error}"
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
