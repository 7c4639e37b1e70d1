"""The paths to a buffer's segments: found, kept, and looked for again when servers move."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Sequence

from smb.buffer_info import BufferInfo
from smb.call.arguments import Arguments
from smb.call.reaching import until_reached
from smb.call.recovery import Heard
from smb.call.session import Session
from smb.call.sync_requests import LOST, Home
from smb.call.turns import Turns
from smb.engine import BufferHandle, DirectTarget, EngineError, Link
from smb.errors import (
    DeadlineError,
    Error,
    NotFoundError,
    UnavailableError,
)
from smb.transport.base import Deadline, SegmentLocation, SegmentPath
from smb.transport.choose import describe

_ASK_S = 1.0  # the longest wait for a buffer's location: without an answer its servers may still be where they were
_LOST_ASK_S = 0.2  # added to a call's time, to hear whether memory that the call did not reach is lost

_log = logging.getLogger("smb")


class Paths:
    """One buffer's paths and its last known description. Thread-safe: calls in progress keep the handle they began
    with.
    """

    def __init__(self, session: Session, arguments: Arguments, target: DirectTarget, turns: Turns) -> None:
        """`arguments` has the buffer's last known description. Direct methods look for a handle in `target`, and may
        use it while no async calls are in `turns`.
        """
        self.session = session
        self.handle: BufferHandle | None = None  # None: paths have to be found first
        self.gated_handle: BufferHandle | None = None  # for fenced changes: links only, no mapping
        self.found: tuple[SegmentPath, ...] = ()
        self.lost = arguments.info.lost  # memory of some segment is lost, by the coordinator's last answer
        self._arguments = arguments
        self._target = target
        self._turns = turns
        self._lock = threading.Lock()  # held while paths are being found
        self._gated_links: tuple[tuple[Link, ...], ...] = ()  # for each segment
        self._homes: tuple[Home, ...] = ()
        self._ask_first = False  # ask the coordinator before the next search for paths: a server may have moved

    @property
    def info(self) -> BufferInfo:
        """The coordinator's last known description of the buffer."""
        return self._arguments.info

    @property
    def movable(self) -> bool:
        """True if the segments may move, so that they are reached through their servers alone."""
        return self._arguments.info.movable

    def ensure(self, deadline: Deadline) -> BufferHandle:
        """Return a handle to all segments, by the best paths. Waits for servers that come back, up to the deadline."""
        if (handle := self.handle) is not None:
            return handle
        with self._lock:
            if self.handle is None:
                self.handle = self._reached(gated=False, deadline=deadline)
                arguments, info = self._arguments, self.info
                if info.versions == 1 and not arguments.default_wire and arguments.note is None and not self.lost:
                    self.handle.arm(
                        self._target, self.session.switch, self._turns.quiet, info.shape, arguments.itemsize,
                        info.dtype.char, self.session.timeout_ms,
                    )  # fmt: skip
            return self.handle

    def gated(self, deadline: Deadline) -> BufferHandle:
        """Return a handle that reaches all segments through their servers."""
        if self.handle is not None and (handle := self.gated_handle) is not None:
            return handle
        self.ensure(deadline)
        with self._lock:
            if self.gated_handle is None:
                self.gated_handle = self._reached(gated=True, deadline=deadline)
            return self.gated_handle

    def forget(self, handle: BufferHandle | None) -> None:
        """Look for new paths at the next call, unless another thread has replaced this handle already."""
        with self._lock:
            if handle is not None and handle in (self.handle, self.gated_handle):
                self._target.disarm()
                self.handle = self.gated_handle = None
                self._homes = self._gated_links = ()
                self._ask_first = True

    def look_again(self) -> None:
        """Look for new paths at the next call."""
        self.forget(self.handle)

    def refresh(self, deadline: Deadline) -> bool:
        """Ask the coordinator for the buffer's present location and name. False if it does not answer.

        Raises NotFoundError if the buffer was deleted.
        """
        name, buffer_id = self.info.name, self.info.id
        patience_s = min(_ASK_S, deadline.left())
        try:
            # Look the buffer up by id: it may have been renamed.
            info = BufferInfo.of(self.session.coordinator.open_buffer(name, 0.0, patience_s, buffer_id))
        except (UnavailableError, DeadlineError):
            return False  # the coordinator is away; the servers may still be where they were
        except NotFoundError as error:
            raise NotFoundError(f"buffer {name!r} was deleted") from error
        if info.id != buffer_id:
            raise NotFoundError(f"buffer {name!r} was deleted and created again, or replaced; open it again")
        self._arguments.info, self.lost = info, info.lost
        return True

    def reopen(self, deadline: Deadline) -> bool:
        """Request newer tokens, which the next call presents. False if the coordinator does not answer."""
        if not self.refresh(deadline):
            return False
        self.look_again()
        return True

    def is_lost(self) -> bool:
        """Return True if memory of this buffer is lost. Asks the coordinator; without an answer its last one counts."""
        with contextlib.suppress(NotFoundError):  # the buffer was deleted: the next call raises that
            self.refresh(Deadline(_LOST_ASK_S))
        return self.lost

    def alive(self) -> bool:
        """True if all links can still get a new connection."""
        return all(link.alive() for path in self.found for link in path.links)

    def read_only(self, segment: int) -> bool:
        """Return True if the coordinator gave this session no right to write to the segment with that index."""
        return self.session.coordinator.tokens.read_only(self.info.layout.segments[segment].id)

    def are_lost(self, offset: int, nbytes: int) -> bool:
        """Return True if memory of these bytes is lost, by the coordinator's last answer."""
        layout = self.info.layout
        first = offset // layout.stripe_bytes
        stripes = (offset + nbytes - 1) // layout.stripe_bytes - first + 1
        count = len(layout.segments)
        return any(layout.segments[(first + i) % count].lost for i in range(min(stripes, count)))

    def lies_apart(self, source: Paths) -> bool:
        """Return True if a source lies on other servers than this buffer, by the descriptions known here."""
        if not self.movable and not source.movable:
            return False
        here, there = self.info.layout.segments, source.info.layout.segments
        server_of = self.session.server_of
        return any(server_of(a) != server_of(b) for a, b in zip(here, there, strict=True))

    def show(self, others: Sequence[Paths], deadline: Deadline) -> None:
        """Present the tokens of the other buffers' segments on this buffer's links.

        Segments with two copies have links of their own, so a server may not know those tokens yet. A server that
        rejects one refuses the call.
        """
        tokens = self.session.coordinator.tokens
        for index, links in enumerate(self._gated_links):
            for link in links:
                for other in others:
                    with contextlib.suppress(EngineError):
                        tokens.show(link, other.info.layout.segments[index].id, deadline.left_ms())

    def homes(self) -> tuple[Home, ...]:
        """Return the segments to ask about locks and versions: the home first, then the others."""
        homes = self._homes
        if not homes:
            layout = self.info.layout
            homes = self._homes = tuple(
                Home(
                    self.session,
                    f"of buffer {self.info.name!r}",
                    segment,
                    segment.epoch or layout.epoch,
                    functools.partial(self._relocated, index),
                    name=self.info.name,
                )
                for index, segment in enumerate(layout.segments)
            )
        return homes

    def _relocated(self, index: int) -> SegmentLocation:
        if not self.refresh(Deadline(_ASK_S)):
            raise UnavailableError("the coordinator does not answer")
        return self.info.layout.segments[index]

    # ---- finding paths; the caller holds the lock

    def look(self, deadline: Deadline) -> Heard:
        """Ask the coordinator where the segments are now. `moved` in the answer: some have another server or role."""
        before = self._servers()
        answered = self.refresh(deadline)
        return Heard(answered, self._servers() != before, self.lost)

    def _servers(self) -> list[tuple[str, int]]:
        return [(segment.server, segment.epoch) for segment in self.info.layout.segments]

    def _explain(self, error: Error, lost: bool) -> None:
        """Raise a more precise error for a segment that was not reached, if there is one."""
        if isinstance(error, UnavailableError) and LOST not in str(error):
            name = f"buffer {self.info.name!r}"
            raise UnavailableError(
                f"{name}: {error}; {LOST}" if lost else f"{name} can't be reached: {error}"
            ) from error

    def _reached(self, *, gated: bool, deadline: Deadline) -> BufferHandle:
        """Return a handle to all segments, waiting for servers that come back."""
        attach, ask_first, self._ask_first = self._attach_gated if gated else self._attach, self._ask_first, True
        handle = until_reached(attach, self, deadline, self.session.check_open, self._explain, ask_first=ask_first)
        self._ask_first = ask_first
        return handle

    def _attach(self, deadline: Deadline) -> BufferHandle:
        layout = self.info.layout
        try:
            paths = self.session.reach(layout.segments, layout.epoch, deadline)
        except NotFoundError as error:
            self.refresh(deadline)  # raises NotFoundError if the coordinator does not know the buffer either
            raise UnavailableError(f"buffer {self.info.name!r}: {error}; {LOST}") from error
        for segment, path in zip(layout.segments, paths, strict=True):
            if segment.lost and path.links and not any(link.connected() for link in path.links):
                away = (
                    f"memory server {segment.server} at {segment.address} is away, and did not have the segment before"
                )
                raise UnavailableError(f"buffer {self.info.name!r}: {away}; {LOST}")
        handle = self._new_handle()
        for index, (segment, path) in enumerate(zip(layout.segments, paths, strict=True)):
            path.apply(handle, index, segment, layout.epoch)
        self.found = paths
        self._arguments.note = self.session.verbs.note if any(path.transport == "verbs" for path in paths) else None
        _log.info('buffer "%s": %s', self.info.name, describe(list(zip(layout.segments, paths, strict=True))))
        return handle

    def _attach_gated(self, deadline: Deadline) -> BufferHandle:
        """Find a path through its server to every segment."""
        handle = self._new_handle()
        reached = [self.session.reach_gated(segment, deadline) for segment in self.info.layout.segments]
        for index, (segment, links) in enumerate(zip(self.info.layout.segments, reached, strict=True)):
            handle.set_links(index, segment.id, segment.epoch or self.info.layout.epoch, links)
        self._gated_links = tuple(reached)
        return handle

    def _new_handle(self) -> BufferHandle:
        layout = self.info.layout
        return BufferHandle(
            self.session.engine,
            layout.nbytes,
            layout.stripe_bytes,
            layout.chunk_bytes,
            len(layout.segments),
            self._arguments.dtype.number,
        )


def handles_of(
    ours: Paths, others: Sequence[Paths], deadline: Deadline, *, gated: bool
) -> tuple[BufferHandle, Sequence[BufferHandle]]:
    """Return the handles of a call's buffers, all by the same kind of path; with `gated`, through the servers."""
    if not others:
        return (ours.gated(deadline) if gated else ours.ensure(deadline)), []
    moves = any(each.movable for each in (ours, *others))
    if gated or moves or not _reached_alike(ours, others, deadline):
        handles = ours.gated(deadline), [other.gated(deadline) for other in others]
        if moves:
            ours.show(others, deadline)
        return handles
    return ours.ensure(deadline), [other.ensure(deadline) for other in others]


def _reached_alike(ours: Paths, others: Sequence[Paths], deadline: Deadline) -> bool:
    """Return True if on each server the segments of all buffers are reached by the same kind of path.

    A server may refuse the mapping of one segment before the coordinator says that this segment moves.
    """
    kinds = set()
    for each in (ours, *others):
        each.ensure(deadline)
        kinds.add(tuple(path.segment is not None for path in each.found))
    return len(kinds) == 1
