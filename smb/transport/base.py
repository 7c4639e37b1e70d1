"""The contract of a transport."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from smb.engine import BufferHandle, Link, Segment, believes
from smb.errors import TransportError

NO_RDMA_HERE = "no RDMA here"  # begins the reason why this host has no way over verbs
_MS_MAX = 2**31
_AT_ONCE_MAX = 64  # threads that wait for servers far away

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


class Deadline:
    """A point in time, `seconds` after `started` (time.monotonic(); default: now). Each blocking step takes the time
    that is left."""

    def __init__(self, seconds: float, started: float | None = None) -> None:
        self._end = (time.monotonic() if started is None else started) + seconds

    def left(self) -> float:
        """Seconds left, 0 when it has passed."""
        return max(0.0, self._end - time.monotonic())

    def left_ms(self) -> int:
        """Milliseconds left, at least 1, as the engine takes them."""
        ms = int((self._end - time.monotonic()) * 1000)
        return ms if 0 < ms <= _MS_MAX else 1 if ms <= 0 else _MS_MAX


@dataclass(frozen=True, slots=True)
class SegmentLocation:
    """One segment of a buffer and where its server was last known to be. Sizes are bytes."""

    id: int
    server: str
    nbytes: int
    address: str
    unix_path: str
    instance_id: int
    control_address: str = ""
    tls: bool = False  # what is at the address speaks TLS
    epoch: int = 0  # of a segment whose servers have roles, with two copies or moved: of those; else 0
    backup: str = ""  # the server of its other copy; empty: there is none now
    buffer: tuple[str, int] = ("", 0)  # whose it is: name and id
    copying_to: str = ""  # the server to which that copy is being made anew; empty: none
    copied: float = 0.0  # of it, 0 to 1
    copy_left_s: float = 0.0  # and how long it may still take; 0: not known
    lost: bool = False  # its server came back without its memory, as the coordinator saw it
    kind: int = 0  # pb.Kind: of a lock by itself not BUFFER
    group: int = 0  # of the segments that it moves together with: the first one's id; 0: it moves alone


@dataclass(frozen=True, slots=True)
class SegmentPath:
    """How one segment is reached: over links, whose chunks take turns, or by a mapping. `why` is for the log line."""

    transport: str
    why: str
    links: tuple[Link, ...] = ()
    segment: Segment | None = None

    def apply(self, handle: BufferHandle, index: int, location: SegmentLocation, epoch: int) -> None:
        if self.segment is not None:
            handle.set_local(index, self.segment)
        elif self.links:
            handle.set_links(index, location.id, location.epoch or epoch, self.links)


class NoPathError(TransportError):
    """This transport does not lead to that segment; another one may."""


class NoAnswerError(NoPathError):
    """It does not lead there now, but may once the server is back."""


class Transport(Protocol):
    """Reaches segments by one kind of path. Methods may be called from any thread and block up to the deadline."""

    name: str

    def reach(self, location: SegmentLocation, epoch: int, deadline: Deadline) -> SegmentPath:
        """Return the path to a segment.

        Raises NoPathError if this transport does not lead there, NoAnswerError if the reason may be that the server is
        down. Raises UnavailableError if the transport leads there but the server does not answer, NotFoundError if the
        server answers but has no such segment.
        """

    def gated(self, location: SegmentLocation, deadline: Deadline) -> tuple[Link, ...]:
        """Return the links on which changes of the segment go through its server: for those under a lock's token.

        Raises as reach does.
        """

    def waits(self, location: SegmentLocation, deadline: Deadline) -> Link:
        """Return the link for what waits at the segment's server: locks, barriers, versions. Raises as reach does."""

    def close(self) -> None: ...


class Registered(Protocol):
    """Memory that a network card may read and write."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an array of zeros in it."""


class Rdma(Transport, Protocol):
    """The transport over RDMA, with what it alone has: arrays are registered before they are moved."""

    def memory(self) -> Registered:
        """Return the client's registered memory. Raises NoPathError if RDMA can't be used."""

    def note(self, array: Any) -> None:
        """An array is about to be moved."""


def is_here(socket_path: str) -> bool:
    """Whether a server's Unix socket is on this host, as far as this process may look, and one of those whom it
    believes made it. Who answers there is asked again when it is connected to.
    """
    return not why_not_here(socket_path)


def why_not_here(socket_path: str) -> str:
    """Return why it is not; "" if it is."""
    if not socket_path:
        return "no socket at any path on this host"
    try:
        owner = Path(socket_path).stat().st_uid
    except OSError:
        return f"no socket at {socket_path} on this host"
    if believes(owner):
        return ""
    return (
        f"the socket at {socket_path} was made by user {owner}, whom this process, of user {os.geteuid()}, does not "
        f"believe: nothing is sent there"
    )


def at_once(ask: Callable[[_Asked], _Answer], of: Sequence[_Asked]) -> list[_Answer]:
    """Return what `ask` gives for each, in order, all asked at the same time: round trips do not add up.

    Raises what the first one in order raises, once all have answered.
    """
    with ThreadPoolExecutor(min(len(of), _AT_ONCE_MAX), "smb-reach") as threads:
        try:
            answers = threads.map(ask, of)
        except RuntimeError:  # no more threads: in a handler at the process's end there are none
            answers = map(ask, of)
        return list(answers)
