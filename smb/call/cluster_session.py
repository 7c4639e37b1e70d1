"""One process's part in a cluster: its session and the session's renewal, its engine, its links, its coordinator."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import cast

from smb.buffer_info import BufferInfo
from smb.call.async_order import AsyncCalls
from smb.call.lock_renewals import Renewals
from smb.call.published_states import PublishedStates
from smb.call.sync_requests import SESSION_ENDED
from smb.call.turns import Turns
from smb.config import tracing
from smb.config.at_exit import AtExit, at_exit
from smb.config.conditions import event
from smb.config.limits import RENEWALS_PER_LEASE
from smb.engine import AsyncOperations, EngineClient, EngineError, Link, Switch
from smb.errors import (
    DeadlineError,
    Error,
    NotFoundError,
    TransportError,
    UnavailableError,
)
from smb.rpc import control_pb2 as pb
from smb.rpc.coordinator_client import KICKED, Coordinator, SessionEndedError
from smb.security.credentials import Credentials
from smb.transport.base import Deadline, SegmentLocation, SegmentPath
from smb.transport.choose import MakesRdma, choose, choose_gated, choose_waits, for_each, make_transports
from smb.transport.connector import ServerAddress
from smb.transport.reconnect import Links, Outages, refused
from smb.transport.tcp import Tcp
from smb.transport.tls import ClientTls

_REPORT_S = 2.0  # as often as memory servers report
_OFTEN_S = 10.0  # with very many clients, whose renewals are rarer, reports come with the renewals alone
_REPORTS_MAX = 16  # training reports in one renewal
_CLOSE_S = 1.0
_LOCATE_S = 1.0
_WHY_S = 1.0
_CLOSED = "the client is closed; call smb.connect again"
REPLACED = (
    "the session in which this was opened or taken has ended, and client.reconnect() has begun another one; open or "
    "take it anew"
)

_log = logging.getLogger("smb")


class ClusterSession:
    """The smb.call.session.Session of a Client. Thread-safe. Its methods raise in a child of fork."""

    def __init__(
        self,
        address: str,
        transport: str,
        timeout: float,
        checksum: bool | None,
        credentials: Credentials | None,
        make_rdma: MakesRdma,
        name: str | None = None,
    ) -> None:
        tracing.start()
        self.timeout = timeout
        self.timeout_ms = max(1, round(timeout * 1000))  # the same in the engine's unit
        process = f"{socket.gethostname()}:{os.getpid()}"
        self.name = f"{name} ({process})" if name else process
        self._pid = os.getpid()
        self.transport = transport  # the user's choice
        self._closed = False
        self.switch = Switch()  # the switch of its buffers' direct calls; closing it stops them
        self.switch.open = not tracing.on()  # a call that Python does not see gets no span
        self._lock = threading.Lock()
        self._turns: weakref.WeakValueDictionary[int, Turns] = weakref.WeakValueDictionary()  # by buffer id
        self.coordinator = Coordinator(address, credentials)
        try:
            session_id, lease, shared = self.coordinator.open_session(self.name, timeout)
        except BaseException:
            self.coordinator.close()
            raise
        self._session_id = session_id
        checksums = shared.checksum if checksum is None else checksum
        self.engine = EngineClient(session_id, checksums=checksums, proofs=credentials is not None)
        self.calls = AsyncCalls(AsyncOperations(self.engine))
        # Python's exit does not close the engine: other threads' calls go on until the process ends
        weakref.finalize(self, self.engine.close).atexit = False
        ours = weakref.ref(self)
        self._links = Links(
            self.engine,
            functools.partial(_locate, ours),
            self.coordinator.tokens,
            ClientTls(credentials),
            functools.partial(_locate_copies, ours),
        )
        self.verbs = make_rdma(self.engine, self._links, session_id, credentials)
        self._transports = make_transports(transport, self.engine, self._links, self.verbs)
        self.renewals = Renewals()
        self.session_ended = False
        self._why_ended = SESSION_ENDED
        self._why_closed = _CLOSED
        self.reports: dict[object, Callable[[], pb.TrainingReport]] = {}  # a report of each training, for dashboards
        self.published = PublishedStates()
        self._stop = event()  # of the renewal: the session was closed or garbage-collected
        self._renewal = threading.Thread(
            target=_renew,
            args=(weakref.ref(self), self._stop, self.coordinator, session_id, self.name, lease),
            name="smb-session",
            daemon=True,
        )
        # A session that nobody can use any more ends at once.
        weakref.finalize(self, _stop_own, self._stop, self._pid).atexit = False
        self._renewal.start()
        _sessions.add(self)
        _renewals.add(self._renewal)

    def hurry(self, seconds: float) -> None:
        """Limit the timeout of each later call to `seconds`. Raises as check_open() does."""
        self.check_open()
        self.timeout = min(self.timeout, seconds)
        self.timeout_ms = max(1, round(self.timeout * 1000))

    def has_ended(self) -> bool:
        """Whether the session has ended without close(), as the coordinator says. Raises Error if it does not say."""
        if not self.session_ended and not self._closed:
            try:
                self.coordinator.renew_session(self._session_id, self.name, self.timeout)
            except SessionEndedError as error:
                self.ended_by(error)
        return self.session_ended

    def check_open(self) -> None:
        """Raise UnavailableError if the client was closed or its session has ended, Error in a child of fork."""
        if self._closed or self.session_ended or self._pid != _current_pid:
            self.check_ours()
            raise UnavailableError(self.why_ended())

    def check_ours(self) -> None:
        """Raise UnavailableError if the client was closed, Error in a child of fork."""
        if self._pid != _current_pid:
            raise Error("this client was made before fork, in the parent process; call smb.connect in the child")
        if self._closed:
            raise UnavailableError(self._why_closed)

    def reach(self, locations: Sequence[SegmentLocation], epoch: int, deadline: Deadline) -> tuple[SegmentPath, ...]:
        """Return the path to each segment."""
        return for_each(
            locations,
            lambda location: (
                self._reach_copies(location, deadline)
                if location.epoch
                else choose(self._transports, location, epoch, deadline)
            ),
            lambda path: path.transport == Tcp.name,
        )

    def _reach_copies(self, location: SegmentLocation, deadline: Deadline) -> SegmentPath:
        """Return the path to a segment that has roles or may move: through the server that has the primary."""
        link, local = self._link_to_copies(location, deadline, waits=False)
        how = "two copies" if location.backup else "through its server"
        name, why = ("unix", f"same host, {how}") if local else (Tcp.name, f"{location.address}, {how}")
        return SegmentPath(name, why, (link,))

    def _link_to_copies(self, location: SegmentLocation, deadline: Deadline, *, waits: bool) -> tuple[Link, bool]:
        if self.transport not in ("auto", Tcp.name):
            raise TransportError(
                f"{location.buffer[0]!r} has two copies, or has moved: it can be reached over TCP or its servers' Unix "
                f"sockets, but not over {self.transport}; use transport='auto'"
            )
        try:
            return self._links.reach_copies(location, deadline, may_be_local=self.transport == "auto", waits=waits)
        except EngineError as error:
            raise refused(location, error) from error

    def reach_gated(self, location: SegmentLocation, deadline: Deadline) -> tuple[Link, ...]:
        """Return the links on which changes of a segment go through its server."""
        if location.epoch:
            return self._link_to_copies(location, deadline, waits=False)[:1]
        return choose_gated(self._transports, location, deadline)

    def reach_waits(self, location: SegmentLocation, deadline: Deadline) -> Link:
        """Return the link for requests that wait at a segment's server."""
        if location.epoch:
            return self._link_to_copies(location, deadline, waits=True)[0]
        return choose_waits(self._transports, location, deadline)

    def server_of(self, location: SegmentLocation) -> str:
        """Return the server that a segment's calls go to."""
        return self._links.server_of(location)

    def turns_of(self, buffer_id: int, itemsize: int) -> Turns:
        """Return the order of the async calls on a buffer, shared by all Buffer objects of it."""
        with self._lock:
            turns = self._turns.get(buffer_id)
            if turns is None:
                turns = self._turns[buffer_id] = Turns(buffer_id, itemsize)
            return turns

    def outages(self) -> Outages:
        """Return which connections are broken, and for how long."""
        return self._links.outages()

    def why_untrusted(self, server: str) -> str:
        return self._links.why_untrusted(server)

    def why_ended(self) -> str:
        """Return why the session has ended, and what to do, as a sentence of an error. Blocks for at most a second."""
        if not self.session_ended:  # a memory server said so, which does not know why
            try:
                self.coordinator.renew_session(self._session_id, self.name, min(self.timeout, _WHY_S))
            except SessionEndedError as error:
                self.ended_by(error)
            except Error as error:
                _log.debug("the coordinator does not say why the session has ended: %s", error)
        return self._why_ended

    def ended_by(self, error: SessionEndedError) -> None:
        """Note the coordinator's answer that the session has ended."""
        self._why_ended = str(error) if str(error).startswith(KICKED) else SESSION_ENDED
        self.session_ended = True

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, why: str = _CLOSED) -> bool:
        """Leave the cluster; see Client.close. False if the client was closed already, or in a child of fork. Later
        calls fail with `why`.
        """
        if self._pid != _current_pid:
            return False  # a child of fork has no part in its parent's session; locks may be copied in a locked state
        with self._lock:
            if self._closed:
                return False
            self._why_closed, self._closed = why, True
            self.switch.open = False
        self._stop.set()
        self.renewals.close()
        self.calls.stop()
        self.engine.close()
        self.calls.close()
        self._links.close()
        for transport in {*self._transports, self.verbs}:
            transport.close()
        # the thread may be waiting for a coordinator that hangs; closing the channel ends that wait
        self._renewal.join(_CLOSE_S)
        try:
            self.coordinator.close_session(
                self._session_id, min(self.timeout, _CLOSE_S), [*_collected(self.reports).values()]
            )
        except Error as error:
            _log.debug("the session ends with its lease: %s", error)
        self.coordinator.close()
        # the closed channel and links end whatever these threads wait for: connections, queue pairs, the coordinator
        self._links.join()
        return True


# Sessions that are open, and the threads that renew them or end what was garbage-collected.
_sessions: weakref.WeakSet[ClusterSession] = weakref.WeakSet()
_renewals: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@at_exit(AtExit.SESSIONS)
def _close_all() -> None:
    for session in list(_sessions):
        session.close()
    for renewal in list(_renewals):
        renewal.join(_CLOSE_S)


def _stop_own(stop: threading.Event, pid: int) -> None:
    """Let the renewal of a session stop; in a child of fork do nothing: the event's lock may be copied as taken."""
    if pid == _current_pid:
        stop.set()


def _end(coordinator: Coordinator, session_id: int) -> None:
    """End a session that was garbage-collected."""
    try:
        coordinator.close_session(session_id, _CLOSE_S, [])
    except Error as error:
        _log.debug("the session ends with its lease: %s", error)
    coordinator.close()


# Kept because os.getpid() is a system call, and every small operation needs the value.
_current_pid = os.getpid()


def _collected(reports: dict[object, Callable[[], pb.TrainingReport]]) -> dict[object, pb.TrainingReport]:
    """Return the report of each training, at most _REPORTS_MAX; those of trainings that were left come first.

    The last report of a training that was left stays in `reports` until it was sent.
    """
    # A copy is made in one piece: a garbage collection, in this thread, too, may add or take away a report.
    said = [(key, report()) for key, report in reports.copy().items()]
    said.sort(key=lambda each: not each[1].left)
    return dict(said[:_REPORTS_MAX])


def _locate(session: weakref.ref[ClusterSession], server: str) -> ServerAddress | None:
    """Ask the coordinator for a memory server's present addresses. Raises NotFoundError if no segment is there any
    more.
    """
    ours = session()
    if ours is None:
        return None
    try:
        servers = ours.coordinator.list_servers(_LOCATE_S)
    except Error as error:
        _log.debug("the coordinator does not say where %s is: %s", server, error)
        return None
    for found in servers:
        if found.name == server and found.segment_count:
            return ServerAddress(
                found.data_address, found.unix_path, found.instance_id, found.control_address, found.data_tls
            )
    raise NotFoundError(f"memory server {server} has no segment any more")


def _locate_copies(session: weakref.ref[ClusterSession], location: SegmentLocation) -> SegmentLocation | None:
    """Ask the coordinator which server has the primary of a segment now, and at which addresses.

    Raises NotFoundError if the buffer or the lock was deleted, or the segment's memory is lost.
    """
    ours = session()
    name, buffer_id = location.buffer
    if ours is None:
        return None
    try:
        info = BufferInfo.of(
            ours.coordinator.open_buffer(name, 0.0, _LOCATE_S, buffer_id, cast("pb.Kind", location.kind))
        )
    except (UnavailableError, DeadlineError) as error:
        _log.debug("the coordinator does not say where buffer %s is: %s", name, error)
        return None
    for segment in info.layout.segments:
        if segment.id == location.id and segment.lost:
            raise NotFoundError(f"memory server {segment.server} came back without the memory of {name!r}")
        if segment.id == location.id:
            return segment
    raise NotFoundError(f"{pb.Kind.Name(cast('pb.Kind', location.kind)).lower()} {name!r} was deleted")


def _after_fork() -> None:
    global _current_pid
    _current_pid = os.getpid()


os.register_at_fork(after_in_child=_after_fork)


def _renew(
    session: weakref.ref[ClusterSession],
    stop: threading.Event,
    coordinator: Coordinator,
    session_id: int,
    client_name: str,
    lease: float,
) -> None:
    """Renew the session until it is closed or garbage-collected. A failed renewal is only logged, and tried again.

    A client in a training, or with a published state, renews more often: each renewal carries its progress.
    """
    renewed_at = looked_at = time.monotonic()
    while True:
        every_s = lease / RENEWALS_PER_LEASE
        report_s = _REPORT_S if every_s <= _OFTEN_S else every_s
        due_s = max(0.0, min(looked_at + report_s, renewed_at + every_s) - time.monotonic())
        stopped = stop.wait(min(due_s, coordinator.tokens.next_s()))
        looked_at = time.monotonic()
        ours = session()
        if ours is None:
            _end(coordinator, session_id)
            return
        if stopped:
            return
        coordinator.tokens.renew()
        reports, states = _collected(ours.reports), ours.published.reports(_REPORTS_MAX)
        del ours
        if time.monotonic() < renewed_at + (min(report_s, every_s) if reports or states else every_s):
            continue
        renewed_at = time.monotonic()
        try:
            lease = coordinator.renew_session(session_id, client_name, every_s, list(reports.values()), states)
            ours = session()
            for key, report in reports.items():
                if report.left and ours is not None:
                    ours.reports.pop(key, None)
            del ours
        except SessionEndedError as error:
            _log.error("%s", error)
            ours = session()
            if ours is not None:
                ours.ended_by(error)
                ours.switch.open = False
                ours.engine.close()
            return
        except Error as error:
            _log.debug("the session was not renewed: %s", error)
            renewed_at -= max(0.0, every_s - _OFTEN_S)  # try again soon: much of a long lease may have passed
