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

NO_RDMA_HERE = "no RDMA here"  # begins the reason why this host cannot use RDMA
_MS_MAX = 2**31
_AT_ONCE_MAX = 64  # threads that wait for remote servers

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


class Deadline:
    """A point in time, `seconds` after `started` (time.monotonic(); default: now). Each blocking step may take the time
    that is left.
    """

    def __init__(self, seconds: float, started: float | None = None) -> None:
        self.end = (time.monotonic() if started is None else started) + seconds

    def left(self) -> float:
        """Seconds left; 0 after the deadline."""
        return max(0.0, self.end - time.monotonic())

    def left_ms(self) -> int:
        """Milliseconds left for a call of the engine, at least 1."""
        ms = int((self.end - time.monotonic()) * 1000)
        return ms if 0 < ms <= _MS_MAX else 1 if ms <= 0 else _MS_MAX


@dataclass(frozen=True, slots=True)
class SegmentLocation:
    """One segment of a buffer and its server's last known location. Sizes are in bytes."""

    id: int
    server: str
    nbytes: int
    address: str
    unix_path: str
    instance_id: int
    control_address: str = ""
    tls: bool = False  # the address expects TLS
    epoch: int = 0  # the epoch of the servers' roles, if the segment has two copies or has moved; else 0
    backup: str = ""  # the server of the other copy; empty if there is none now
    buffer: tuple[str, int] = ("", 0)  # name and id of the buffer that owns the segment
    copying_to: str = ""  # the server to which a new copy is being made; empty if there is none
    copied: float = 0.0  # fraction of the segment copied so far, 0 to 1
    copy_left_s: float = 0.0  # estimated rest of the copying; 0 if unknown
    lost: bool = False  # the server came back without the segment's memory, as far as the coordinator knows
    kind: int = 0  # pb.Kind; not BUFFER for a standalone lock or barrier
    group: int = 0  # id of the first segment of the bundle that it moves with; 0 if it moves alone


@dataclass(frozen=True, slots=True)
class SegmentPath:
    """How a segment is reached: by links, whose chunks take turns, or by a mapping. `why` is for the log."""

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
    """This transport does not lead to the segment; another one may."""


class NoAnswerError(NoPathError):
    """This transport does not lead to the segment now, but may do so once the server is back."""


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
        """Return the links on which changes of the segment go through its server, e.g. changes under a lock's token.

        Raises as reach does.
        """

    def waits(self, location: SegmentLocation, deadline: Deadline) -> Link:
        """Return the link for requests that wait at the segment's server: locks, barriers, versions. Raises as reach
        does.
        """

    def close(self) -> None: ...


class Registered(Protocol):
    """Memory that a network card may read and write."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an array of zeros in registered memory."""


class Rdma(Transport, Protocol):
    """The transport over RDMA, which also registers arrays before they are transferred."""

    def memory(self) -> Registered:
        """Return the client's registered memory. Raises NoPathError if RDMA cannot be used."""

    def note(self, array: Any) -> None:
        """Note that an array is about to be transferred."""


def is_here(socket_path: str) -> bool:
    """Return True if a server's Unix socket is on this host, and was made by a user whom this process trusts.

    The socket's peer is checked again when a connection is made.
    """
    return not why_not_here(socket_path)


def why_not_here(socket_path: str) -> str:
    """Return why a server's socket is not here; "" if it is."""
    if not socket_path:
        return "no socket at any path on this host"
    try:
        owner = Path(socket_path).stat().st_uid
    except OSError:
        return f"no socket at {socket_path} on this host"
    if believes(owner):
        return ""
    return (
        f"the socket at {socket_path} was made by user {owner}, whom this process (user {os.geteuid()}) does not "
        f"trust; nothing was sent there"
    )


def at_once(ask: Callable[[_Asked], _Answer], of: Sequence[_Asked]) -> list[_Answer]:
    """Return `ask` of each element of `of`, in order. All are asked at the same time, so that round trips do not add
    up.

    Waits for all answers, then raises the error of the first element that failed.
    """
    with ThreadPoolExecutor(min(len(of), _AT_ONCE_MAX), "smb-reach") as threads:
        try:
            answers = threads.map(ask, of)
        except RuntimeError:  # no more threads can be started, e.g. at the process's exit
            answers = map(ask, of)
        return list(answers)
