"""Clients of a cluster whose processes come and go: what they do, and what they were answered."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import smb
from tests.support.checkers import BadHistoryError, check_between, delta
from tests.support.transports import SLOWNESS

if TYPE_CHECKING:
    from tests.support.returning import Cluster

NARROW = 1000  # elements of a lane on one server
CHURNED_MAX = 5  # buffers that a worker has made and not yet deleted
CALL_S = 60.0 * SLOWNESS  # longer than any fault lasts: no call on two copies fails
SINGLE_S = 4.0 * SLOWNESS  # of calls on one copy, whose memory may be lost
PAUSE_S = 0.01  # between a worker's calls


@dataclass
class Lane:
    """A buffer to which its delta is added, or of which multiples are written; what its clients were answered."""

    name: str
    replicas: int
    count: int
    id: int = 0
    servers: frozenset[str] = frozenset()  # of one copy: where it is
    acknowledged: int = 0
    attempted: int = 0
    begun: float = 0.0  # before it was created
    leaving: bool = False  # its deletion was asked for
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def begin(self) -> None:
        """One more is asked for."""
        with self.lock:
            self.attempted += 1

    def end(self, outcome: str) -> None:
        """It was applied, or not applied, or nobody knows."""
        with self.lock:
            if outcome == "applied":
                self.acknowledged += 1
            elif outcome == "not applied":
                self.attempted -= 1

    def bounds(self) -> tuple[int, int]:
        """How many must be there, and how many may."""
        with self.lock:
            return self.acknowledged, self.attempted


class Worker:
    """A thread with clients of its own that adds, writes, reads, creates, renames and deletes."""

    def __init__(self, cluster: Cluster, number: int, rng: random.Random) -> None:
        self._cluster, self._number, self._rng = cluster, number, rng
        self._client = smb.connect(cluster.address, name=f"worker-{number}", timeout=CALL_S)
        self._single = smb.connect(cluster.address, name=f"single-{number}", timeout=SINGLE_S)
        self._buffers: dict[int, smb.Buffer] = {}
        self._numbers = 0
        self.board = Lane(f"board-{number}", 2, NARROW)
        self.churned: dict[str, Lane] = {}
        # After a create, delete or rename of unknown outcome, with the names that it may have; "": none.
        self.unsure: list[tuple[Lane, set[str]]] = []
        self.calls = 0
        self.resting = threading.Event()
        self.go = threading.Event()
        self.ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._cluster.make(self._client, self.board)
        self.go.set()
        self._thread.start()

    def end(self) -> None:
        """Stop; calls on their way fail."""
        self.ended = True
        self.go.set()
        for client in (self._client, self._single):
            with contextlib.suppress(smb.Error):
                client.close()
        self._thread.join(CALL_S)

    def _run(self) -> None:
        ways = (self._add, self._write, self._read, self._add_to_one_copy, self._churn)
        try:
            while not self.ended:
                if not self.go.is_set():
                    self.resting.set()
                    self.go.wait()
                    self.resting.clear()
                    continue
                self._rng.choices(ways, (8, 2, 3, 2, 3))[0]()
                self.calls += 1
                time.sleep(PAUSE_S)
        except Exception as error:
            if not self.ended:
                self._cluster.find("error", f"worker {self._number}: {type(error).__name__}: {error}")
                raise
        finally:
            self.resting.set()

    def _buffer(self, client: smb.Client, lane: Lane) -> smb.Buffer:
        if lane.id not in self._buffers:
            self._buffers[lane.id] = client.open(lane.name)
        return self._buffers[lane.id]

    def _call(self, lane: Lane, call: Callable[[smb.Buffer], object], client: smb.Client) -> None:
        """A change. Of two copies none fails."""
        buffer = None
        try:
            buffer = self._buffer(client, lane)
            lane.begin()
            call(buffer)
            lane.end("applied")
        except smb.Error as error:
            if buffer is not None:
                lane.end(error.outcome)
            if self.ended:
                return
            if lane.replicas > 1 or not isinstance(error, (smb.UnavailableError, smb.TimeoutError)):
                self._cluster.find("failed", f"{lane.name}: {type(error).__name__}, {error.outcome}: {error}")

    def _add(self) -> None:
        lane = self._rng.choice(self._cluster.pairs)
        self._call(lane, lambda buffer: buffer.accumulate(delta(lane.count)), self._client)

    def _write(self) -> None:
        """Its own lane is set to the next multiple, so what is acknowledged is the last one that was."""
        lane = self.board
        number = lane.attempted + 1
        lane.attempted = number
        try:
            self._buffer(self._client, lane).write(delta(lane.count) * number)
            lane.acknowledged = number
        except smb.Error as error:
            if not self.ended:
                self._cluster.find("failed", f"{lane.name}: {type(error).__name__}, {error.outcome}: {error}")

    def _read(self) -> None:
        """What is read has all that was acknowledged before, also from a server that is not the primary any more."""
        lane = self._rng.choice(self._cluster.pairs)
        least, _ = lane.bounds()
        try:
            found = self._buffer(self._client, lane).read()
        except smb.Error as error:
            if not self.ended:
                self._cluster.find("failed", f"read of {lane.name}: {type(error).__name__}: {error}")
            return
        try:
            check_between(found, least, lane.attempted, lane.name)
        except BadHistoryError as error:
            self._cluster.find("stale", str(error))

    def _add_to_one_copy(self) -> None:
        lane = self._rng.choice(self._cluster.singles)
        if not self._cluster.is_lost(lane):
            self._call(lane, lambda buffer: buffer.accumulate(delta(lane.count)), self._single)

    def _churn(self) -> None:
        """Create, rename or delete. A failure that says "unknown" is looked at when all rests."""
        whole = [lane for lane in self.churned.values() if not self._cluster.is_lost(lane)]
        if len(self.churned) < CHURNED_MAX and (not whole or self._rng.random() < 0.5):
            self._create()
        elif whole:
            lane = self._rng.choice(whole)
            self._rng.choice((self._rename, self._delete, self._delete))(lane)

    def _create(self) -> None:
        self._numbers += 1
        lane = Lane(f"n-{self._number}-{self._numbers}", self._rng.choice((1, 2)), NARROW)
        try:
            self._cluster.make(self._client, lane)
        except smb.Error as error:
            if error.outcome == "unknown":
                self.unsure.append((lane, {lane.name, ""}))
            return
        self.churned[lane.name] = lane
        self._call(
            lane,
            lambda buffer: buffer.accumulate(delta(lane.count)),
            self._client if lane.replicas > 1 else self._single,
        )

    def _rename(self, lane: Lane) -> None:
        name = f"{lane.name}-r"
        try:
            self._client.rename(lane.name, name)
        except smb.NotFoundError as error:
            self._cluster.find("vanished", f"{lane.name} cannot be renamed: {error}")
        except smb.Error as error:
            if error.outcome == "unknown":
                self.unsure.append((self.churned.pop(lane.name), {lane.name, name}))
        else:
            self.churned[name] = self.churned.pop(lane.name)
            lane.name = name

    def _delete(self, lane: Lane) -> None:
        lane.leaving = True
        try:
            self._client.delete(lane.name)
        except smb.NotFoundError as error:
            self._cluster.find("vanished", f"{lane.name} cannot be deleted: {error}")
        except smb.Error as error:
            lane.leaving = error.outcome != "not applied"
            if lane.leaving:
                self.unsure.append((self.churned.pop(lane.name), {lane.name, ""}))
        else:
            self._cluster.deleted.add(lane.id)
            del self.churned[lane.name]
