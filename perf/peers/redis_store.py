"""Redis: SET and GET of one string; INCRBY; accumulate is a lock, GET, add, SET, since the server adds no floats.

One redis-server of Debian's, no persistence, over TCP (a value ends at 512 MB). The client is redis-py.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import time

import numpy as np

from perf import remote
from perf.clients import Array
from perf.contender import Case, Sample
from perf.peers import processes


class Client:
    def __init__(self, port: int, _case: Case, _client: int) -> None:
        import redis

        self._redis = redis.Redis(remote.server_address(), port)
        self._lock = self._redis.lock("lock", sleep=0.0002)

    def write(self, source: Array) -> None:
        self._redis.set("array", memoryview(source).cast("B"))

    def read(self, _into: Array) -> Array:
        return np.frombuffer(self._redis.get("array"), np.float32)

    def accumulate(self, contribution: Array) -> None:
        with self._lock:
            self.write(self.read(contribution) + contribution)

    def fetch_add(self, value: int) -> int:
        return int(self._redis.incrby("counter", value)) - value

    def close(self) -> None:
        self._redis.close()


class Redis(processes.Peer):
    name = "Redis"

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._port = 0
        self._pid = 0

    def missing(self) -> str | None:
        if shutil.which("redis-server") is None:
            return "no program redis-server (perf/peers/README.md)"
        return processes.missing_modules("redis")

    def takes(self, case: Case) -> bool:
        return case.over_tcp

    def __enter__(self) -> Redis:
        import redis

        self._port = processes.free_port()
        with remote.on_server() as address:
            started = self._stack.enter_context(
                processes.program(
                    *("redis-server", "--bind", address, "--port", str(self._port), "--protected-mode", "no"),
                    *("--save", "", "--appendonly", "no", "--daemonize", "no", "--logfile", "/dev/null"),
                )
            )
        self._pid = started.pid
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(redis.ConnectionError), redis.Redis(remote.server_address(), self._port) as client:
                client.ping()
                return self
            if started.poll() is not None or time.monotonic() > deadline:
                self._stack.close()
                raise RuntimeError(f"redis-server did not start on port {self._port} of {address}")
            time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, case: Case) -> Sample:
        return processes.measure(case, functools.partial(Client, self._port), self._pid)


CONTENDERS = [Redis()]
