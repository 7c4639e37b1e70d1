"""Clients that create, delete, rename and open buffers of a few names, and write down what they were answered."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np

import smb
from tests.support.name_history import EXISTS, MISSING, NEVER, OK, UNKNOWN, Call, now

NAMES = ("a", "b", "c")  # before "sum"
TIMEOUT_S = 60.0


class NameCallers:
    """Clients of a cluster, until they are told to end: three for names, and one that adds to "sum" all the while."""

    def __init__(self, address: str, pause_s: float) -> None:
        """`pause_s`: between a client's calls about names. A history of thousands is not searched."""
        self._address = address
        self._pause_s = pause_s
        self._end = threading.Event()
        self._threads: list[threading.Thread] = []
        self._marks = iter(range(1, 1 << 30))
        self._lock = threading.Lock()
        self._turns = [threading.Lock() for _ in range(3)]
        self._calls: list[Call] = []
        self.additions = 0
        self.errors: list[str] = []

    def start(self, rng: random.Random) -> None:
        """Begin."""
        works: list[Callable[[], None]] = [self._add]
        works += [functools.partial(self._name, turn, rng.random()) for turn in self._turns]
        for work in works:
            self._threads.append(threading.Thread(target=self._guarded, args=(work,)))
            self._threads[-1].start()

    def end(self) -> None:
        """Let each end its call."""
        self._end.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)
            assert not thread.is_alive(), "a client hangs"

    def count(self) -> int:
        """Return the number of calls about names since they were last asked for."""
        return len(self._calls)

    @contextlib.contextmanager
    def held(self) -> Iterator[list[Call]]:
        """No call about names is under way in the block. Give those so far, and forget them."""
        with contextlib.ExitStack() as turns:
            for turn in self._turns:
                turns.enter_context(turn)
            calls, self._calls = self._calls, []
            yield calls

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the test's own thread judges
            self.errors.append(repr(error))

    def _add(self) -> None:
        with smb.connect(self._address, timeout=TIMEOUT_S) as client:
            buffer, ones = client.open("sum"), np.ones(1000, "int64")
            while not self._end.wait(0.001):
                buffer.accumulate(ones)
                self.additions += 1

    def _name(self, turn: threading.Lock, number: float) -> None:
        rng = random.Random(number)
        with smb.connect(self._address, timeout=TIMEOUT_S) as client:
            while not self._end.wait(self._pause_s):
                with turn:
                    call = self._call(client, rng)
                    self._calls.append(call)

    def _call(self, client: smb.Client, rng: random.Random) -> Call:
        kind = rng.choice(("create", "create", "create", "delete", "rename", "replace", "read", "read"))
        name, new_name = rng.sample(NAMES, 2)
        with self._lock:
            mark = next(self._marks)
        begin, answer, end = now(), OK, 0.0
        try:
            match kind:
                case "create":
                    client.create(name, 1, metadata={"mark": mark})
                case "delete":
                    client.delete(name)
                case "rename":
                    client.rename(name, new_name)
                case "replace":
                    client.rename(name, new_name, replace=True)
                case "read":
                    found = client.open(name).metadata["mark"]
                    assert isinstance(found, int)
                    mark = found
        except smb.NotFoundError as error:
            # A creation that was asked for again: it was made, and another client had deleted it.
            answer = OK if error.outcome == "applied" else MISSING
        except smb.AlreadyExistsError as error:
            # A name whose buffer is being made is taken, and nobody can open it yet: that says nothing of an order.
            if kind in ("rename", "replace") or "is being created" in str(error):
                return Call("read", "nothing", MISSING, begin, now())
            answer = EXISTS
        except smb.UnavailableError as error:
            if kind == "read":
                raise
            if error.outcome != "unknown":
                return Call("read", "nothing", MISSING, begin, now())
            answer, end = UNKNOWN, NEVER
        return Call(kind, name, answer, begin, end or now(), mark, new_name)
