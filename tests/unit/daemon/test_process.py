"""smb.daemon.process: what both daemons share."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from smb import errors
from smb.config.parse import parse_address
from smb.daemon import arrivals, process
from smb.daemon.log import start_log
from smb.daemon.process import Pages, check_listen, write_ready_file
from tests.support.daemons import wait_for


@pytest.fixture
def root_log() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_ready_file_is_there_whole(tmp_path: Path) -> None:
    """It has the four keys, replaces what was there, and leaves no staged file; a place that is none is an error."""
    path = tmp_path / "ready"
    path.write_text("old")
    write_ready_file(path, address="h:1", metrics="h:2", name="n")
    assert json.loads(path.read_text()) == {"address": "h:1", "metrics": "h:2", "name": "n", "pid": os.getpid()}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(errors.UnavailableError, match="cannot write the ready file"):
        write_ready_file(tmp_path / "nowhere" / "ready", address="", metrics="", name="")


def test_pages_serve_metrics_and_health() -> None:
    """/metrics shows the registry, /healthz is 200 or 503 as told; a taken address is an error with its reason."""
    registry = CollectorRegistry()
    Gauge("smb_test", "A test.", registry=registry).set(7)
    health = {"ok": True}
    with closing(Pages("127.0.0.1:0", registry, lambda: health)) as pages:
        with urllib.request.urlopen(f"http://{pages.address}/metrics", timeout=5) as answer:
            assert b"smb_test 7.0" in answer.read()
        with urllib.request.urlopen(f"http://{pages.address}/healthz", timeout=5) as answer:
            assert json.load(answer) == {"ok": True}
        health["ok"] = False
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://{pages.address}/healthz", timeout=5)
        caught.value.close()
        assert caught.value.code == 503
        with pytest.raises(errors.UnavailableError, match="Address already in use"):
            Pages(pages.address, registry, lambda: health)
    again = Pages(pages.address, registry, lambda: health)
    again.close()
    again.close()


def test_pages_end_beside_a_forked_process() -> None:
    """A process that was forked meanwhile has the same descriptors, and lives on: PyTorch's data loaders, say."""
    pages = Pages("127.0.0.1:0", CollectorRegistry(), lambda: {"ok": True})
    stay, leave = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(leave)
        os.read(stay, 1)
        os._exit(0)
    try:
        closing_thread = threading.Thread(target=pages.close, daemon=True)
        closing_thread.start()
        closing_thread.join(30)
        assert not closing_thread.is_alive()
    finally:
        os.close(leave)
        os.waitpid(child, 0)
        os.close(stay)


def test_pages_wait_longer_while_no_descriptor_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time up to 0.2 s, so that the processor is free for whoever may close some. After an accepted connection the
    pauses are short again.
    """
    slept, full = list[float](), list[int]()
    accept = process.WSGIServer.get_request

    def get_request(server: Any) -> Any:
        if full:
            raise OSError(full.pop(), "too many open files")
        return accept(server)

    monkeypatch.setattr(process.WSGIServer, "get_request", get_request)
    monkeypatch.setattr(process, "time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic))
    with closing(Pages("127.0.0.1:0", CollectorRegistry(), lambda: {"ok": True})) as pages:
        for errors_first in (8, 1):
            slept.clear()
            full[:] = [errno.EMFILE, errno.ENFILE] * errors_first
            assert _answered(pages.address)
            assert len(slept) == 2 * errors_first
            assert 0.01 <= slept[0] <= 0.02
            assert max(slept) <= 0.2
            if errors_first > 1:
                assert min(slept[-4:]) >= 0.1


def test_an_address_is_checked_before_it_is_used() -> None:
    """A free port and 0 pass; a taken one, somebody else's address and nonsense do not."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(errors.UnavailableError, match=f"cannot listen on {address}: Address already in use"):
            check_listen(address)
    assert check_listen(address) == ("127.0.0.1", int(address.split(":")[1]))
    assert check_listen("127.0.0.1:0") == ("127.0.0.1", 0)
    with pytest.raises(errors.UnavailableError, match="cannot listen on"):
        check_listen("192.0.2.1:7070")
    with pytest.raises(errors.InvalidArgumentError):
        check_listen("7070")


def test_a_log_entry_is_one_line(root_log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """A name with a line feed in it cannot forge an entry; an unknown level is refused."""
    start_log("info")
    root_log.handlers[0].setStream(sys.stderr)  # type: ignore[attr-defined]
    logging.getLogger("coordinator").info("hello %s", "one\n2026 ERROR forged\x1b[2J")
    logging.getLogger("coordinator").debug("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(r"INFO coordinator: hello one\n2026 ERROR forged\x1b[2J")
    with pytest.raises(errors.InvalidArgumentError, match="the log level must be"):
        start_log("loud")


def _answered(address: str, path: str = "/livez") -> bool:
    with socket.create_connection(parse_address(address), 10) as asking:
        try:
            asking.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            return asking.recv(1000).startswith(b"HTTP/1.0 200")
        except ConnectionError:
            return False


def _serving() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_slow_strangers_take_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says nothing, or only a part of a request, keeps nobody out, and is closed if there are too many, the oldest
    first, or after a time. A request that arrives byte by byte is answered.
    """
    with Pages("127.0.0.1:0", CollectorRegistry(), lambda: {"ok": True}) as pages, ExitStack() as silent:
        held = []
        for number in range(arrivals.ARRIVING_MAX):
            held.append(silent.enter_context(socket.create_connection(parse_address(pages.address), 10)))
            held[-1].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n"[:number])
        for path in ("/livez", "/readyz", "/healthz", "/metrics"):
            assert _answered(pages.address, path)
        wait_for(lambda: not _serving(), "the end of the threads that have answered")
        wait_for(lambda: _is_closed(held[0]), "the end of the oldest")
        assert not _is_closed(held[-1])
        slow = silent.enter_context(socket.create_connection(parse_address(pages.address), 10))
        for byte in b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n":
            slow.sendall(bytes([byte]))
        assert slow.recv(1000).startswith(b"HTTP/1.0 200")
        too_much = silent.enter_context(socket.create_connection(parse_address(pages.address), 10))
        too_much.sendall(b"GET / HTTP/1.1\r\nX: " + bytes([120]) * arrivals.REQUEST_BYTES_MAX)
        wait_for(lambda: _is_closed(too_much), "the end of an endless request")
        for each in held:
            each.close()
        monkeypatch.setattr(arrivals, "REQUEST_S_MAX", 0.0)
        late = silent.enter_context(socket.create_connection(parse_address(pages.address), 10))
        wait_for(lambda: _is_closed(late), "the end of one that is late")


def test_health_is_shown_while_others_hold_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads no answer takes a thread, up to a number: then other pages are closed at once, and the health pages
    still answer. One who leaves makes room; one that has had its time makes room, too.
    """
    long = process.Answer("200 OK", "text/plain", bytes(64 << 20))
    with (
        Pages("127.0.0.1:0", CollectorRegistry(), lambda: {"ok": True}, lambda *_: long) as pages,
        ExitStack() as silent,
    ):

        def hold() -> socket.socket:
            held = silent.enter_context(socket.create_connection(parse_address(pages.address), 10))
            held.sendall(b"GET /long HTTP/1.0\r\n\r\n")
            return held

        held = [hold() for _ in range(process.PAGE_REQUESTS_MAX)]
        wait_for(lambda: len(_serving()) == process.PAGE_REQUESTS_MAX, "all of them")
        assert not _answered(pages.address, "/metrics")
        for path in ("/livez", "/readyz", "/healthz"):
            for _ in range(process.HEALTH_REQUESTS_MAX):
                assert _answered(pages.address, path)
        wait_for(lambda: len(_serving()) == process.PAGE_REQUESTS_MAX, "the end of these answers")
        held.pop().close()
        wait_for(lambda: _answered(pages.address, "/metrics"), "room")
        wait_for(lambda: len(_serving()) < process.PAGE_REQUESTS_MAX, "the end of that answer")
        held.append(hold())
        wait_for(lambda: not _answered(pages.address, "/metrics"), "all being taken")
        monkeypatch.setattr(process, "PAGE_CLIENT_TIMEOUT_S", 0.01)
        wait_for(lambda: _answered(pages.address, "/metrics"), "the room of the oldest")
