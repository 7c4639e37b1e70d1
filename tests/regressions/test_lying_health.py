"""The coordinator's /healthz was a constant: a loop that hung and a store that failed were well."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from smb.coordinator import health, process
from smb.coordinator.dashboard import diagnosis as problems
from smb.coordinator.dashboard.history import RECENT_S, EventWatch
from smb.coordinator.events import Instant
from smb.coordinator.state import State
from smb.coordinator.store import SqliteStore
from smb.rpc import control_pb2 as pb
from tests.support.daemons import wait_for
from tests.support.memory_server import coordinator_stub


class Running:
    """A coordinator on a loop of our own, in a thread."""

    def __init__(self, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._ready = directory / "ready"
        self._stop = asyncio.Event()
        self._options = process.CoordinatorOptions("127.0.0.1:0", str(directory / "state"), "127.0.0.1:0", self._ready)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_for(self._ready.exists, "coordinator")
        told = json.loads(self._ready.read_text())
        self.address, self.pages = str(told["address"]), str(told["metrics"])

    def _run(self) -> None:
        async def serve() -> None:
            async with AsyncExitStack() as leaving:
                await process._start(self._options, leaving)
                await self._stop.wait()

        self.loop.run_until_complete(serve())
        self.loop.close()

    def page(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(f"http://{self.pages}{path}", timeout=10) as answer:
                return int(answer.status), json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{self.pages}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")))

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(health, "TICK_LATE_S", 2.0)
    made = Running(tmp_path)
    try:
        yield made
    finally:
        made.stop()


def test_ten_seconds_without_a_tick_are_a_hang() -> None:
    """Neither a second less, which a busy machine takes, nor more, until a tick comes."""
    clock = [100.0]
    seen = health.Health("here:1", lambda: clock[0])
    seen.stand_by("there:1")
    for age_s, alive in ((0.0, True), (9.9, True), (10.1, False), (3600.0, False)):
        clock[0] = 100.0 + age_s
        told = seen.show()
        assert (told["alive"], told["ok"], told["tick_age_s"]) == (alive, alive, age_s)
    seen.ticked()
    assert seen.show()["ok"]


def test_a_loop_that_hangs_is_not_alive(running: Running) -> None:
    """While the loop stands still /livez turns to 503, and so do the others, with the age of its last tick; once it
    goes on they are well again."""
    pages = ("/livez", "/readyz", "/healthz")
    wait_for(lambda: {running.page(path)[0] for path in pages} == {200}, "a start")  # a busy machine stands still, too
    go_on = threading.Event()
    running.loop.call_soon_threadsafe(go_on.wait, 60)
    try:
        wait_for(lambda: running.page("/livez")[0] == 503, "a loop that hangs seen")
        status, told = running.page("/healthz")
        assert (status, told["ok"], told["alive"]) == (503, False, False)
        assert told["tick_age_s"] >= 2.0
        assert running.metric("smb_coordinator_tick_age_seconds") >= 2.0
        assert running.page("/readyz")[0] == 503
    finally:
        go_on.set()
    wait_for(lambda: running.page("/livez")[0] == running.page("/readyz")[0] == 200, "its recovery")


def test_a_store_that_fails_is_alive_but_not_ready(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart would not help: /livez stays 200. The page and the metrics tell; once it can be written all is well."""

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with coordinator_stub(running.address) as stub:
        with monkeypatch.context() as broken:
            broken.setattr(SqliteStore, "_write", fail)
            with pytest.raises(grpc.RpcError, match="disk I/O error; nothing was changed") as refused:
                stub.OpenSession(pb.OpenSessionRequest(client_name="one"), timeout=10)
            assert refused.value.code() is grpc.StatusCode.INTERNAL
            assert running.page("/livez")[0] == 200
            status, told = running.page("/readyz")
            assert (status, told["store"]) == (503, "failing")
            assert "sqlite" not in json.dumps(told)  # it is open to all
            assert running.metric("smb_coordinator_store_failing") == 1
            assert running.metric('smb_coordinator_rpcs_total{code="INTERNAL",method="OpenSession"}') == 1
            assert running.metric('smb_coordinator_rpcs_total{code="INTERNAL",method="CreateBuffer"}') == 0
            titles = [problem["title"] for problem in running.page("/api/state")[1]["problems"]]
            assert "The coordinator cannot store anything" in titles
        wait_for(lambda: running.page("/readyz")[0] == 200, "its recovery")
        assert running.metric("smb_coordinator_store_failing") == 0
        stub.OpenSession(pb.OpenSessionRequest(client_name="one"), timeout=10)


def test_the_page_tells_of_failed_calls_and_of_little_room() -> None:
    """Calls that failed inside the coordinator are told for a minute; a disk that is nearly full as long as it is."""
    watch, now = EventWatch(Instant(0.0, 0.0)), Instant(100.0, 100.0)
    watch.failed("CreateBuffer", now)
    watch.failed("CreateBuffer", now)
    watch.failed("DeleteBuffer", now)
    (failed,) = problems.problems(State(), watch.seen(now), now)
    assert (failed.severity, failed.title) == ("warning", "3 calls failed inside the coordinator")
    assert "CreateBuffer, DeleteBuffer" in failed.detail
    later = Instant(101.0 + RECENT_S, 101.0 + RECENT_S)
    assert problems.problems(State(), watch.seen(later), later) == []
    watch.look_at_store = lambda: ("", problems.STATE_LOW_BYTES - 1)
    (low,) = problems.problems(State(), watch.seen(later), later)
    assert (low.severity, low.title) == ("warning", "The coordinator's disk is nearly full")
    watch.look_at_store = lambda: ("cannot write it", 0)
    (failing,) = problems.problems(State(), watch.seen(later), later)
    assert (failing.severity, failing.title) == ("critical", "The coordinator cannot store anything")
