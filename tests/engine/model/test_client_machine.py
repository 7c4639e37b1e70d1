"""A client against a model of it: random calls over both transports, with servers killed and restarted in between."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import smb
from tests.fault.long import LIMIT_S, times

pytestmark = pytest.mark.timeout(LIMIT_S)

SIZE = 20_000  # 160 KB: both servers, chunks whole and in part
KILLS_MAX = 2
_names = itertools.count()

ranges = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).map(lambda r: (r[0], min(r[1], SIZE - r[0])))
values = st.integers(-(2**40), 2**40)


class Client(RuleBasedStateMachine):
    """What every call should have done, in numpy. Any call may meet a server that was just killed and started again."""

    cluster: smb.LocalCluster

    @initialize(transport=st.sampled_from(["tcp", "shm", "auto"]))
    def open(self, transport: str) -> None:
        """A buffer, another one like it, and one with versions."""
        self.client = smb.connect(self.cluster.address, transport=transport, timeout=30)
        number = next(_names)
        self.names = [f"{kind}-{number}" for kind in ("w", "like", "versions")]
        self.buffer = self.client.create(self.names[0], SIZE, "int64", stripe="64KiB")
        self.other = self.client.create(self.names[1], like=self.buffer)
        self.published = self.client.create(self.names[2], SIZE, "int64", versions=2, stripe="64KiB")
        self.model = np.zeros(SIZE, np.int64)
        self.other_model = np.zeros(SIZE, np.int64)
        self.version, self.latest = 0, 0
        self.lock: smb.Lock | None = None
        self.token = 0
        self.kills = 0

    def teardown(self) -> None:
        """Give all of it back."""
        if hasattr(self, "client"):
            for name in self.names:
                self.client.delete(name, missing_ok=True)
            self.client.close()

    def _ramp(self, value: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.arange(count, dtype=np.int64) % 251 + value

    @rule(where=ranges, value=values)
    def write(self, where: tuple[int, int], value: int) -> None:
        at, count = where
        self.buffer.write(self._ramp(value, count), at)
        self.model[at : at + count] = self._ramp(value, count)

    @rule(where=ranges, value=values, scale=st.integers(-3, 3), fetch=st.booleans())
    def accumulate(self, where: tuple[int, int], value: int, scale: int, fetch: bool) -> None:
        at, count = where
        got = self.buffer.accumulate(self._ramp(value, count), at, scale=scale, fetch=fetch, fence=self.lock)
        self.model[at : at + count] += scale * self._ramp(value, count)
        if fetch:
            np.testing.assert_array_equal(got, self.model[at : at + count])

    @rule(value=values)
    def fill_the_other(self, value: int) -> None:
        self.other.fill(value)
        self.other_model[:] = value

    @rule()
    def accumulate_from(self) -> None:
        self.buffer.accumulate_from(self.other)
        self.model += self.other_model

    @rule(index=st.integers(0, SIZE - 1), value=values)
    def fetch_add(self, index: int, value: int) -> None:
        assert self.buffer.fetch_add(index, value) == self.model[index]
        self.model[index] += value

    @rule(index=st.integers(0, SIZE - 1), new=values, right=st.booleans())
    def compare_swap(self, index: int, new: int, right: bool) -> None:
        expected = int(self.model[index]) + (not right)
        assert self.buffer.compare_swap(index, expected, new) == self.model[index]
        if right:
            self.model[index] = new

    @precondition(lambda self: self.lock is None)
    @rule()
    def take_the_lock(self) -> None:
        self.lock = self.buffer.lock(ttl=60, timeout=30).acquire()
        assert self.lock.token > self.token
        self.token = self.lock.token

    @precondition(lambda self: self.lock is not None)
    @rule()
    def give_the_lock_back(self) -> None:
        assert self.lock is not None
        self.lock.release()
        self.lock = None

    @rule(value=values)
    def publish(self, value: int) -> None:
        self.version += 1
        assert self.published.publish(np.full(SIZE, value)) == self.version
        self.latest = value
        assert self.published.wait(self.version, timeout=10) == self.version

    @precondition(lambda self: self.kills < KILLS_MAX)
    @rule(index=st.integers(0, 1))
    def kill_a_server(self, index: int) -> None:
        self.kills += 1
        self.cluster.servers[index].kill()
        self.cluster.servers[index].start()

    @invariant()
    def what_is_read_is_the_model(self) -> None:
        if hasattr(self, "latest"):
            np.testing.assert_array_equal(self.buffer.read(), self.model)
            assert self.published.version == self.version
            if self.version:  # nothing can be read before
                assert (self.published.read() == self.latest).all()


def test_client_machine() -> None:
    """All calls, in random orders, agree with the model."""
    with smb.LocalCluster(servers=2, capacity="64MiB") as cluster:
        Client.cluster = cluster
        Client.TestCase.settings = settings(
            max_examples=times(8, 200),
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        )
        test = Client.TestCase()
        test.runTest()
