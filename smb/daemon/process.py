"""Code that both daemons share: the log, the ready file, messages to systemd, the check of a listening address, and the
pages for metrics and health.

Threads: the pages are served by threads of their own. The functions that pages call (`health`, collectors of the
registry) must be safe in these threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import resource
import secrets
import select
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app

from smb.config.backoff import Backoff
from smb.config.host_address import bindable
from smb.config.parse import OWNER_VARIABLE, format_address, parse_address
from smb.config.untrusted import parse_json, read_text
from smb.daemon.arrivals import Arrivals
from smb.errors import Error, UnavailableError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

PAGE_CLIENT_TIMEOUT_S = 10.0  # a scraper that stops in the middle of a request holds a thread this long
PAGE_REQUESTS_MAX = 32  # at once, from scrapers, browsers and unknown clients; each takes a thread
HEALTH_REQUESTS_MAX = 32  # more, for the health pages
_PR_SET_DUMPABLE = 4
_PAGE_PAUSE_FIRST_S, _PAGE_PAUSE_MAX_S = 0.02, 0.2  # after no descriptor was available for a connection

# A connection to a gRPC port that has not shown a good certificate by then is closed, as at the data port
# (HELLO_DEADLINE_MS). gRPC's own default is two minutes, in which one stranger would take all descriptors.
GRPC_HANDSHAKE_MS = 5000
GRPC_CONNECTIONS_MAX = 1 << 17  # twice the sessions of a cluster
# A connection ends at this age (gRPC varies it by a tenth), whatever its peer does, once its calls have ended. A client
# makes another one for its next call, if its certificate still counts.
GRPC_CONNECTION_AGE_MS = 3_600_000
# In progress over one connection; more wait at their client. All calls stand in one queue, so thousands of one client,
# though refused, would hold up the renewals of others.
GRPC_CALLS_PER_CONNECTION_MAX = 512
# Calls of a port that gRPC holds until the daemon takes them, in the order of their arrival; more are refused. Each
# takes 32 KiB, so all 256 MiB, and some seconds to take. With gRPC's own bound, some of 1000 were refused: these were
# asked again at once, so a burst went on as a storm, and a client whose call was refused did not know its outcome.
GRPC_CALLS_PENDING_MAX = 8192
# With so_reuseport, two daemons would share one port and each get half of the calls.
# The largest request that smb/rpc/bounds.py accepts has 1.3 MiB: a registration with all its segments.
_GRPC_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 2 << 20),
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.server_handshake_timeout_ms", GRPC_HANDSHAKE_MS),
    # Between these two gRPC refuses some calls, beyond the second one all: so none until it has to.
    ("grpc.server.max_pending_requests", GRPC_CALLS_PENDING_MAX),
    ("grpc.server.max_pending_requests_hard_limit", GRPC_CALLS_PENDING_MAX),
    # So much of a request arrives before it is taken; the rest of a larger one takes a round trip more. By itself, gRPC
    # estimates how much to let in, and holds requests of a megabyte whole.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 14),
)

_READY_BYTES_MAX = 4096  # of a ready file, which has four names and values
_READY_PARTS_MAX = 16
_HEALTH_PATHS = ([b"/livez"], [b"/readyz"], [b"/healthz"])
_PATHS = b"There is /metrics, /healthz, /livez and /readyz.\n"
_log = logging.getLogger("daemon")
disable_created_metrics()  # type: ignore[no-untyped-call]  # the time of each counter's start would double the page


def raise_descriptors() -> None:
    """Let this process have as many descriptors as it may. Each connection takes one, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def grpc_server_options(
    connections_max: int = GRPC_CONNECTIONS_MAX,
    calls_per_connection_max: int = GRPC_CALLS_PER_CONNECTION_MAX,
    ports: int = 1,
) -> tuple[tuple[str, int], ...]:
    """Return the options of the gRPC server at one of a daemon's `ports`. The connections to all of them together take
    at most three quarters of the descriptors that this process may have, so that there are always some for its files
    and its own calls; more are refused.
    """
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = connections_max if descriptors == resource.RLIM_INFINITY else descriptors * 3 // 4 // ports
    return (
        *_GRPC_SERVER_OPTIONS,
        ("grpc.max_connection_age_ms", GRPC_CONNECTION_AGE_MS),
        ("grpc.max_concurrent_streams", calls_per_connection_max),
        ("grpc.max_allowed_incoming_connections", min(most, connections_max)),
    )


def keep_secrets() -> None:
    """Keep keys from leaking: from here on this process writes no core dump, also not to a program that collects them,
    and other processes of its user cannot read its memory.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        _log.warning("core dumps may contain keys: prctl: %s", os.strerror(ctypes.get_errno()))


def end_with_owner() -> None:
    """If SMB_OWNER_PID names a process (a LocalCluster's), send ourselves SIGTERM when that process has ended.

    Call it with SIGTERM blocked or handled, because the thread that watches inherits that.
    """
    owner = os.environ.get(OWNER_VARIABLE, "")
    if not owner.isdigit():
        return
    try:
        watched = os.pidfd_open(int(owner))
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGTERM)
        return
    except OSError as error:
        _log.warning("cannot watch for the end of process %s: %s", owner, error.strerror)
        return

    def watch() -> None:
        select.select([watched], [], [])  # a process's descriptor becomes readable when it ends
        _log.info("process %s, which started us, has ended", owner)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="owner", daemon=True).start()


def clear_ready_file(path: Path | None) -> None:
    """Remove the ready file of an earlier run that was killed, since it would lead others to an old address. The file
    of a run that still serves stays. Called before anything that may fail. Raises UnavailableError if it cannot be
    removed.
    """
    try:
        if path is not None and not _is_of_a_run(path):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UnavailableError(
            f"cannot remove the ready file of an earlier run, {path}: {error.strerror}; remove it, or choose another"
        ) from None


def _is_of_a_run(path: Path) -> bool:
    """Whether the process that wrote the file still runs. Another process may have its pid by now, but was started
    later.

    A file of a user other than this one or root counts as left over.
    """
    try:
        if path.lstat().st_uid not in (0, os.geteuid()):
            return False
        pid = int(parse_json(read_text(path, _READY_BYTES_MAX), _READY_PARTS_MAX)["pid"])
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])  # since the machine's boot
        written = path.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError):
        return False
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s <= written


def write_ready_file(path: Path, *, address: str, metrics: str, name: str) -> None:
    """Write the ready file, which says that the daemon serves: a JSON object with address, metrics, name and pid. The
    file appears complete or not at all.

    Raises UnavailableError if it cannot be written.
    """
    text = json.dumps({"address": address, "metrics": metrics, "name": name, "pid": os.getpid()})
    staged = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")  # a name at which nobody can have put a link
    try:
        # Whatever the umask is: others must not be able to write another address into it.
        with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "w") as file:
            file.write(text + "\n")
        staged.replace(path)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise UnavailableError(f"cannot write the ready file {path}: {error.strerror}") from None


def notify(*fields: str) -> None:
    """Tell the service's supervisor, if there is one (systemd's Type=notify): READY=1, STOPPING=1, WATCHDOG=1,
    STATUS=text. Never fails, because a supervisor notices missing messages itself.
    """
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where:
        return
    address = "\0" + where[1:] if where.startswith("@") else where  # @ marks an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto("\n".join(fields).encode(), address)
    except OSError as error:
        _log.warning("cannot tell the supervisor at %s: %s", where, error.strerror)


def watchdog_interval_s() -> float | None:
    """Return how often the supervisor must hear WATCHDOG=1 (a third of its timeout); None if it does not ask."""
    patience_us = os.environ.get("WATCHDOG_USEC", "")
    if not patience_us.isdigit() or os.environ.get("WATCHDOG_PID") not in (None, str(os.getpid())):
        return None
    return int(patience_us) / 1e6 / 3


def check_listen(address: str) -> tuple[str, int]:
    """Return (host, port) of an address on which the daemon can listen now; port 0 stays 0.

    gRPC's own message about a failure to listen is a page of text without the reason. Raises UnavailableError with the
    reason, and InvalidArgumentError for an invalid address.
    """
    host, port = parse_address(address)
    try:
        bindable(host, port)
    except OSError as error:
        raise _cannot_listen(address, error) from None
    return host, port


def _cannot_listen(address: str, error: OSError) -> Error:
    return UnavailableError(f"cannot listen on {address}: {error.strerror or error}; choose another address or port 0")


@dataclass(frozen=True, slots=True)
class Answer:
    """One page's reply. `tag` is its ETag: a client that has the same gets 304 and no body."""

    status: str
    kind: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    tag: str = ""


# Answers GET path?query for pages beside those that all daemons have; None if no such page exists.
Route = Callable[[str, str], Answer | None]
# Checks a request for a page: None admits it. All refusals are made here.
Admission = Callable[["WSGIEnvironment"], Answer | None]


def _no_page(_path: str, _query: str) -> Answer | None:
    return None


def _everybody(_request: WSGIEnvironment) -> Answer | None:
    return None


class Pages:
    """Serves GET /metrics (Prometheus), GET /healthz, /readyz and /livez (JSON; 503 if `health` says so) and the pages
    of `route`, on threads of its own.
    """

    def __init__(
        self,
        address: str,
        registry: CollectorRegistry,
        health: Callable[[], Mapping[str, Any]],
        route: Route = _no_page,
        admit: Admission = _everybody,
    ) -> None:
        """Listen and serve at once; port 0 picks a free one. `health` returns the JSON of /healthz; its "ok" decides
        between 200 and 503 there and at /readyz, and its "alive", if it has one, at /livez. `admit` is asked first.

        Raises UnavailableError if the daemon cannot listen on the address.
        """
        host, port = parse_address(address)
        try:
            family, numeric = bindable(host, port)
            self._server = _PageServer(family, numeric, port)
        except OSError as error:
            raise _cannot_listen(address, error) from None
        self._server.set_app(_application(make_wsgi_app(registry), health, route, admit))
        # `close` writes to this eventfd, and the thread ends. With a pipe, `close` would close the write end instead. A
        # process forked from this one would still have that end open, so the thread would not notice.
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="pages", daemon=True)
        self._thread.start()
        self.address = format_address(host, self._server.server_port)

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving. Blocks until the listening thread has ended. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._end, 1)
        self._thread.join()
        os.close(self._end)
        self._server.server_close()

    def _serve(self) -> None:
        server = self._server
        with select.epoll() as poll, contextlib.closing(Arrivals(poll, server.arrived)) as arrivals:
            poll.register(server, select.EPOLLIN)
            poll.register(self._end, select.EPOLLIN)
            while True:
                for fd, events in poll.poll(arrivals.end_late()):
                    if fd == self._end:
                        return
                    if fd != server.fileno():
                        arrivals.look(fd, events)
                        continue
                    with contextlib.suppress(OSError):  # the peer went away at once, or no descriptor is free
                        arrivals.add(*server.get_request())


class _PageRequest(WSGIRequestHandler):
    timeout = PAGE_CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Log nothing: scrapes come every few seconds."""


class _PageServer(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # connections that were not accepted yet

    def __init__(self, family: socket.AddressFamily, host: str, port: int) -> None:
        self.address_family = family
        self._lock = threading.Lock()
        self._begun: dict[socket.socket, float] = {}  # requests in progress, the oldest first
        self._backoff = Backoff(_PAGE_PAUSE_FIRST_S, _PAGE_PAUSE_MAX_S)
        super().__init__((host, port), _PageRequest)
        self.socket.setblocking(False)  # a peer may go away before it is accepted

    def get_request(self) -> Any:
        """Accept a connection. Without a free descriptor it waits a moment, because the socket stays readable."""
        try:
            accepted = super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(self._backoff.next_s())
            raise
        self._backoff = Backoff(_PAGE_PAUSE_FIRST_S, _PAGE_PAUSE_MAX_S)
        return accepted

    def arrived(self, request: socket.socket, peer: tuple[str, int], begins: bytes) -> None:
        """Answer a request that has arrived, in a thread of its own. If PAGE_REQUESTS_MAX are in progress, the new one
        is closed, and so is the oldest if it has had its time. Requests for the health pages have HEALTH_REQUESTS_MAX
        more places: their answers fit into the socket, so nobody can hold such a place.
        """
        health = begins.split(b" ", 2)[1:2] in _HEALTH_PATHS
        now = time.monotonic()
        with self._lock:
            full = len(self._begun) >= PAGE_REQUESTS_MAX + health * HEALTH_REQUESTS_MAX
            if not full:
                self._begun[request] = now
            else:
                oldest, begun = next(iter(self._begun.items()))
                if now - begun > PAGE_CLIENT_TIMEOUT_S:
                    with contextlib.suppress(OSError):  # it has just closed by itself
                        oldest.shutdown(socket.SHUT_RDWR)
        if full:
            self.shutdown_request(request)
            return
        try:
            self.process_request(request, peer)
        except RuntimeError as error:  # no thread can be started
            _log.warning("a page was not served: %s", error)
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection: the last call for each request."""
        with self._lock:
            self._begun.pop(request, None)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        """Bind without the base class's look-up of this host's name, which waits for a DNS server that may be
        absent."""
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log at debug level only: a scraper that goes away in the middle is normal."""
        _log.debug("page request of %s failed", client_address, exc_info=True)


def _application(
    metrics: WSGIApplication, health: Callable[[], Mapping[str, Any]], route: Route, admit: Admission
) -> WSGIApplication:
    def page(path: str, query: str) -> Answer:
        if path in ("/healthz", "/readyz", "/livez"):
            shown = health()
            good = shown.get("alive", shown["ok"]) if path == "/livez" else shown["ok"]
            status = "200 OK" if good else "503 Service Unavailable"
            return Answer(status, "application/json", json.dumps(shown).encode() + b"\n")
        return route(path, query) or Answer("404 Not Found", "text/plain", _PATHS)

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        refusal = admit(environ)
        if refusal is not None:
            return _send(start_response, environ, refusal)
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            refusal = Answer("405 Method Not Allowed", "text/plain", b"Read only.\n", (("Allow", "GET, HEAD"),))
            return _send(start_response, environ, refusal)
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            return metrics(environ, start_response)
        return _send(start_response, environ, page(path, environ.get("QUERY_STRING", "")))

    return application


def _send(start_response: StartResponse, environ: WSGIEnvironment, answer: Answer) -> Iterable[bytes]:
    if answer.tag and answer.tag in environ.get("HTTP_IF_NONE_MATCH", ""):
        start_response("304 Not Modified", list(answer.headers))
        return []
    described = [("Content-Type", f"{answer.kind}; charset=utf-8"), ("Content-Length", str(len(answer.body)))]
    start_response(answer.status, [*described, *answer.headers])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [answer.body]
