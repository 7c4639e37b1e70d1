"""How many round trips of a round wait for each other: counted, not timed. Calls that go at one time are one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

import smb
import smb.train
from smb.lock import Lock
from smb.train import DiLoCo, LocalSGD
from smb.train.exchange import round_closing, rounds
from smb.train.parameters import ArrayParameters
from tests.support.daemons import wait_for
from tests.support.training import Crew, waiting

CALLS = [
    *((smb.Buffer, name) for name in ("read", "write", "accumulate", "accumulate_from", "apply", "compare_swap")),
    *((smb.Buffer, name) for name in ("fetch_add", "publish", "fill")),
    (Lock, "acquire"),
    (Lock, "release"),
]


class Counter:
    """Round trips by thread."""

    def __init__(self) -> None:
        self.trips: dict[int, int] = {}
        self._inside = threading.local()

    def add(self, count: int = 1) -> None:
        me = threading.get_ident()
        self.trips[me] = self.trips.get(me, 0) + count

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that counts, unless it is a part of another one."""

        @functools.wraps(call)
        def wrapper(*args: Any, **options: Any) -> Any:
            if getattr(self._inside, "call", False):
                return call(*args, **options)
            self._inside.call = True
            try:
                return call(*args, **options)
            finally:
                self._inside.call = False
                self.add()

        return wrapper

    def at_once(self, calls: Sequence[Callable[[], Any]], *, remote: bool) -> list[Any]:
        """In turn, counted as the longest of them."""
        assert remote
        me, results, longest = threading.get_ident(), [], 0
        before = self.trips.get(me, 0)
        for call in calls:
            self.trips[me] = before
            results.append(call())
            longest = max(longest, self.trips[me] - before)
        self.trips[me] = before + longest
        return results

    def begin(self, call: Callable[[], Any]) -> Future[Any]:
        """In the background: not counted."""
        me = threading.get_ident()
        before, done = self.trips.get(me, 0), Future[Any]()
        done.set_result(call())
        self.trips[me] = before
        return done


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    for kind, name in CALLS:
        monkeypatch.setattr(kind, name, counter.counted(getattr(kind, name)))
    for module in (rounds, round_closing):
        monkeypatch.setattr(module, "at_once", counter.at_once)
    monkeypatch.setattr(round_closing, "begin", counter.begin)
    return counter


@pytest.mark.parametrize(
    ("scheme", "member", "closer"), [(DiLoCo(every=1), 4, 9), (LocalSGD(every=1), 4, 9)], ids=["diloco", "localsgd"]
)
def test_round_trips(
    connect: Callable[..., smb.Client], counter: Counter, scheme: smb.train.Scheme, member: int, closer: int
) -> None:
    """Of three members over TCP: who is first writes, marks and looks, waits, looks and reads. Who is last does not
    wait and look: it closes the round in six (lock, claim, sums, built, copied, committed), with one more for each
    four further contributions."""
    crew = Crew(lambda: connect("tcp"), 3, scheme)
    trips: dict[int, int] = {}

    def step(number: int) -> None:
        before = counter.trips.get(threading.get_ident(), 0)
        crew.step(number)
        trips[number] = counter.trips[threading.get_ident()] - before

    for _ in range(2):  # the second round: inboxes have been opened
        with waiting(lambda: step(0)):
            wait_for(lambda: 0 in crew.marked(), "the first one")
            with waiting(lambda: step(1)):
                wait_for(lambda: crew.marked() == {0, 1}, "the second one")
                step(2)
    assert trips == {0: member, 1: member, 2: closer}
    crew.close()


@pytest.mark.parametrize("scheme", [LocalSGD(every=1), DiLoCo(every=2, fragments=2, delay=0, mix=0.5)], ids=str)
def test_parameters_are_the_callers_threads(
    connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch, scheme: smb.train.Scheme
) -> None:
    """Over a network, where calls go at one time: whatever touches the values is done by the thread that steps."""
    touched: set[str] = set()

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any) -> Any:
            touched.add(threading.current_thread().name)
            return call(*args)

        return wrapper

    for name in ("fill", "deltas", "blocks"):
        monkeypatch.setattr(ArrayParameters, name, noting(getattr(ArrayParameters, name)))
    crew = Crew(lambda: connect("tcp"), 2, scheme)
    for _ in range(3):
        with waiting(lambda: crew.step(0)):
            crew.step(1)
    crew.close()
    assert touched
    assert not [name for name in touched if name.startswith("smb-")]
