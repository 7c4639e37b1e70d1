"""The memory server's part of the room of mirrors: it has mirrors here filled by a separate process, because a daemon
imports no client (smb/relay). The daemon makes its `Relays`, which the registration gives tasks and asks for reports.

The process runs while a mirror is here. It gets its tasks on its standard input and reports on its standard output, one
JSON text per line. It ends when its input ends, and so also when this daemon is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from memserver.threads import begin
from smb.config.backoff import Backoff
from smb.daemon.launch import python_m
from smb.daemon.metric_names import NAMED_MAX, gauge
from smb.rpc import control_pb2 as pb
from smb.rpc.bounds import ITEMS_MAX
from smb.security.credentials import CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE, Credentials

_AGAIN_FIRST_S, _AGAIN_MAX_S = 1.0, 10.0  # pauses before it is started again
_LOOK_S = 0.25
_END_S = 2.0

_log = logging.getLogger("memserver")


class Relays:
    """The mirrors that the coordinator wants filled here, and the process that fills them. Call `close` at the end."""

    def __init__(self, coordinator: str, server: str, credentials: Credentials | None = None) -> None:
        """With credentials the process shows them too, but a memory server's relay may reach little."""
        self._command = python_m("smb.relay", coordinator, server)
        self._variables: dict[str, str] = {}
        if credentials is not None:
            self._variables = {  # paths, so that it follows changes of the files, as this daemon does
                CA_VARIABLE: str(credentials.ca_path),
                CERTIFICATE_VARIABLE: str(credentials.certificate_path),
                KEY_VARIABLE: str(credentials.key_path),
            }
        self._lock = threading.Lock()
        self._wanted = ""  # the last line sent; empty: no mirrors
        self._reports: list[pb.MirrorReport] = []
        self._changed = threading.Event()
        self.on_news: Callable[[], None] = lambda: None  # called when the reported mirrors change, or one waits
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, tasks: Iterable[pb.MirrorTask]) -> None:
        """Fill these mirrors, and no others. Does not wait."""
        wanted = [
            {
                "name": task.name,
                "source": task.source,
                "id": task.id,
                "plans": [
                    [plan.number, plan.first_version, plan.last_version, [[p.end, p.name] for p in plan.parents]]
                    for plan in task.plans
                ],
            }
            for task in tasks
        ]
        with self._lock:
            self._wanted = json.dumps(wanted) + "\n" if wanted else ""
            if self._thread is None and wanted:
                self._thread = begin(self._run, "relays")
        self._changed.set()

    def reports(self) -> list[pb.MirrorReport]:
        """Return the process's last reports; empty while it does not run."""
        with self._lock:
            return self._reports[:ITEMS_MAX]

    def close(self) -> None:
        """End the process. Blocks for a few seconds at most."""
        self._stop.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(3 * _END_S)

    def _run(self) -> None:
        backoff = Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S)
        while not self._stop.is_set():
            self._changed.wait()
            self._changed.clear()
            if self._wanted and not self._stop.is_set():
                self._changed.set()
                begun = time.monotonic()
                try:
                    self._serve()
                except (OSError, RuntimeError) as error:  # no process, descriptor or thread is available
                    _log.error("the relay cannot be started: %s; trying again", error)
                if time.monotonic() - begun > _AGAIN_MAX_S:  # it has run for a while
                    backoff = Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S)
                self._stop.wait(backoff.next_s())

    def _serve(self) -> None:
        """Run the process from its start to its end."""
        environment = os.environ | self._variables
        process = subprocess.Popen(  # noqa: S603 - our own module
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        _log.info("relay started, process %d", process.pid)
        reader = threading.Thread(target=self._read, args=(process,), name="relays-read", daemon=True)
        assert process.stdin is not None
        try:
            reader.start()
            while not self._stop.is_set() and process.poll() is None and self._wanted:
                if self._changed.wait(_LOOK_S):
                    self._changed.clear()
                    process.stdin.write(self._wanted)
                    process.stdin.flush()
        except OSError:  # the process has ended
            pass
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if reader.ident is not None:
                reader.join()
            with self._lock:
                self._reports = []
            if process.returncode and not self._stop.is_set():
                _log.error("the relay ended with status %d; starting it again", process.returncode)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                reported = json.loads(line)
                reports = [
                    pb.MirrorReport(
                        name=report["name"],
                        id=report["id"],
                        version=report["version"],
                        arrived_bytes=report["arrived_bytes"],
                        published=report["published"],
                        plan_number=report["plan_number"],
                        plan_last_version=report["plan_last_version"],
                        feeds=[
                            pb.Feed(name=name, bytes_per_s=rate, limited=limited)
                            for name, (rate, limited) in list(report["feeds"].items())[:ITEMS_MAX]
                        ],
                    )
                    for report in reported
                ]
                with self._lock:
                    before, self._reports = self._reports, reports
                waits = any(report["waits"] for report in reported)  # for a plan, which the next renewal brings
                if waits or {report.id for report in before} != {report.id for report in reports}:
                    self.on_news()


class RelayMetrics(Collector):
    """What the relay reports of the mirrors here: the first NAMED_MAX mirrors, and as many feeds of each."""

    def __init__(self, relays: Relays) -> None:
        self._relays = relays

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        version, lag = gauge("smb_server_mirror_version"), gauge("smb_server_mirror_lag_versions")
        feeds = gauge("smb_server_mirror_feed_bytes_per_second")
        for report in self._relays.reports()[:NAMED_MAX]:
            version.add_metric([report.name], report.version)
            lag.add_metric([report.name], max(0, report.published - report.version))
            for feed in report.feeds[:NAMED_MAX]:
                feeds.add_metric([report.name, feed.name], feed.bytes_per_s)
        yield from (version, lag, feeds)
