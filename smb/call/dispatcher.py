"""How a buffer's calls get to its servers: paths that are found, kept, and looked for again when servers move."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from smb import engine
from smb.arrays.dtypes import OPS
from smb.buffer_info import BufferInfo
from smb.call.arguments import Arguments
from smb.call.outcomes import Failed, error_of, outcome_of, ranges_of
from smb.call.session import Fence, Session
from smb.call.sync_requests import LOST, LOST_WAIT_MS, Home
from smb.config.backoff import Backoff
from smb.engine import (
    NOWHERE,
    Attempt,
    BufferHandle,
    EngineError,
    Link,
    Opcode,
    Outcome,
    PartState,
    Place,
    Request,
    Status,
    Window,
    take_interrupt,
)
from smb.errors import (
    APPLIED,
    NOT_APPLIED,
    UNKNOWN,
    CallOutcome,
    Error,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    TimeoutError,  # noqa: A004 - the contract's name
    TransportError,
    UnavailableError,
)
from smb.transport.base import Deadline, SegmentPath, SegmentPlace
from smb.transport.choose import describe

_RETRY_FIRST_S = 0.02
_RETRY_MAX_S = 0.5
_REFUSED_WAIT_MS = 1000  # for the answers to the other parts of a call of which one was refused
_LOST_ASK_S = 0.2  # beyond a call's time: to hear whether what it did not reach is lost
_UNREACHED = frozenset({Status.DISCONNECTED, Status.LINK_LOST, Status.TIMEOUT})
_WITHOUT_IT = frozenset({Status.NOT_FOUND, Status.STALE_EPOCH})  # a server does not have the segment, or no role for it
_BROUGHT_BYTES = 32 << 20  # of a source that lies on other servers, held at a time

_log = logging.getLogger("smb")


def _retry(deadline: Deadline) -> Backoff:
    return Backoff(_RETRY_FIRST_S, _RETRY_MAX_S, deadline.left)


class _Here(threading.local):
    """Of each thread: the change that its last call made, all of it."""

    finished: Request | None = None


here = _Here()


class Dispatcher:
    """Does one buffer's calls on the engine, by the best path to each segment; again by other paths, where that is no
    risk."""

    def __init__(self, session: Session, info: BufferInfo) -> None:
        self.session = session
        self.arguments = Arguments(info)
        # Weak, as a circle would keep a forgotten buffer's mappings and links until a collection.
        self.place = Place(functools.partial(_go_on, weakref.ref(self)))
        self.turns = session.turns_of(info.id, self.arguments.itemsize)
        self.paths: tuple[SegmentPath, ...] = ()
        self.one_copy = info.versions == 1
        self._lock = threading.Lock()  # while paths are looked for; calls in progress keep the handle they began with
        self._handle: BufferHandle | None = None
        self._gated_handle: BufferHandle | None = None  # for fenced changes: links only
        self._gated_links: tuple[tuple[Link, ...], ...] = ()  # of its segments
        self._homes: tuple[Home, ...] = ()
        self._lost = info.lost  # memory of some segment, as the coordinator said
        self._ask_first = False  # the coordinator, before paths are looked for again: a server may have moved

    @property
    def info(self) -> BufferInfo:
        """The coordinator's last description of the buffer."""
        return self.arguments.info

    def call(
        self,
        request: Request,
        *,
        fence: Fence | None = None,
        others: tuple[Dispatcher, ...] = (),
        started: float | None = None,
        ended: Outcome | None = None,
        deadline: Deadline | None = None,
        in_turn: bool = False,
    ) -> int:
        """Do one call on the engine, or go on with one that has `ended`. Broken connections are its links' to
        mend (transport/reconnect.py). `deadline`: of a call that this one is a part of; `in_turn`: which has waited for
        earlier async calls. Returns the engine's number, unsigned."""
        opcode = request.opcode
        handle = self._handle
        touched = False  # by an attempt before this one
        attempt: Attempt | None = None  # the last one
        made = request  # as our caller knows it
        if ended is not None:
            self._raise_interrupt(request, ended)
        try:
            if not self.one_copy and opcode is not Opcode.READ and not request.token:
                raise InvalidArgumentError(
                    f"{self._asked(request)}: with versions={self.info.versions} it changes by publish() alone"
                )
            if fence is not None:
                self._check_fence(request, fence)
                if ended is None and not request.token:  # else it was made with the token that the lock had then
                    request = request._replace(token=fence.token)
            if request.nbytes == 0:  # nothing to ask of anybody
                self.session.check_open()
                return 0
            deadline = deadline or Deadline(self.session.timeout, started)
            if (
                ended is None
                and not in_turn
                and self.one_copy
                and not (self.turns.quiet.open and all(other.turns.quiet.open for other in others))
            ):
                self.wait_turn(request, deadline, others)
            backoff: Backoff | None = None  # made when it is needed: most calls need none
            opened_again = False
            while True:
                if ended is None:
                    self.session.check_open()
                    handle, theirs = self._handles(request, others, deadline)
                    sources = others if request.sources else others[:1]
                    if sources and request.source == NOWHERE and any(map(self._lies_apart, sources)):
                        number = self._bring(request, others, [self._elements(request)], fence, deadline)
                        here.finished = made
                        return number
                    attempt = Attempt()
                    done = handle.transfer(request, self._patience_ms(request, deadline), theirs, attempt)
                    self._raise_interrupt(request, done, touched=touched)
                    if isinstance(done, int):
                        if opcode is not Opcode.READ:  # nothing is to be settled of that, and its array is not ours
                            here.finished = made
                        return done
                    ended = done
                if ended.status is Status.LOCK_LOST and fence is not None:
                    fence.lose(request.token)
                brought = bool(others) and not request.sources and request.source != NOWHERE
                # Then the others are its state, which moves together with it: nothing of that can be brought.
                apart = brought and ended.status is Status.APART
                moved = apart or ended.status in (Status.STALE_EPOCH, Status.NAMESPACE)
                if apart or ended.status is Status.NOT_FOUND:
                    for each in (self, *others):
                        # A mapping would keep the memory of a deleted buffer from being used again.
                        each._forget(handle if each is self else each._handle)
                        told = each._refresh(deadline)  # raises if the buffer is gone for the coordinator too
                        # Those that were found may be of before a move, and the description is of after it.
                        moved |= not told or (each.info.movable and not each.info.lost)
                if others and not brought and self._was_apart(ended.status, others):
                    left = self._left_of(request, others, ended, deadline)
                    self._bring(request, others, left, fence, deadline)
                    here.finished = made
                    return 0
                # Of what moves, a token may be of before a change of roles again and again.
                moves = any(each.info.movable for each in others) and not self._is_read_only(ended)
                if ended.status is Status.DENIED and (not opened_again or (moves and deadline.left() > 0.0)):
                    if opened_again:
                        backoff = backoff or _retry(deadline)
                        time.sleep(backoff.next_s())
                    opened_again = True
                    if self._may_repeat(opcode, ended):
                        touched |= opcode in (Opcode.WRITE, Opcode.FILL) and ended.sent
                        if all(buffer._open_again(deadline) for buffer in (self, *others)):
                            ended = None
                            continue
                    elif not self._is_read_only(ended) and self._refresh(deadline):
                        moved = self.info.movable  # a server does not say of what it has no more
                # Not even a server that was not reached is waited for, if it is known to have lost this memory.
                lost = self._has_lost(ended, others)
                elsewhere = moved or lost or not _all_alive(self.paths)
                if elsewhere:  # the next attempt, or the next call, finds new paths
                    self._forget(handle)
                    for other in others:
                        other._forget(other._handle)
                if moved and ended.sent and deadline.left() > 0.0:
                    whole = [self._elements(request)]
                    parts = whole if opcode is Opcode.READ else self._left_of(request, others, ended, deadline)
                    if parts != whole:
                        number = self._again(request, others, parts, fence, deadline)
                        here.finished = made
                        return number
                    ended = replace(ended, sent=False)
                if not elsewhere or lost or ended.sent or deadline.left() == 0.0:
                    raise self._error(request, others, ended, touched=touched)
                ended = None
                backoff = backoff or _retry(deadline)
                time.sleep(backoff.next_s())
        except Error as error:
            if error.smb_account is None:
                if touched:
                    error.outcome = UNKNOWN
                elif opcode is not Opcode.READ and ended is not None and ended.sent:
                    error.outcome = self._outcome_of(ended, request.nbytes, _REFUSED_WAIT_MS)
                unknown = None if ended is None else ended.unknown
                error.smb_account = Failed(self, self._elements(request), unknown)
            raise
        except BaseException as error:
            how = ended if attempt is None else attempt.ended
            how = 0 if here.finished is made or here.finished is request else how
            self._account_interrupt(error, request, how, touched=touched)
            raise

    def later(
        self,
        request: Request,
        call: Callable[[], Any],
        *,
        result: Any,
        keeps: object,
        fence: Fence | None = None,
        window: Window | None = None,
        priority: int = 0,
    ) -> Future[Any]:
        """Return the future of an async read, write or addition, with `result` for its result: the engine does it. If
        it can't do it by itself (no paths were found yet, several versions), a thread of the client's does `call`.
        """
        self.session.check_open()
        calls, elements = self.session.calls, self._elements(request)
        handle = self._handle if fence is None else self._gated_handle
        if fence is not None and handle is not None:
            self._check_fence(request, fence)
            request = request._replace(token=fence.token)

        def go_on(ended: Outcome | None) -> Any:
            self.call(request, fence=fence, ended=ended)
            return result

        future = None
        if handle is not None and self.one_copy and request.nbytes > 0 and not self._lost:
            timeout_ms = self.session.timeout_ms
            future = calls.transfer(
                request, handle, self.turns, go_on, timeout_ms, result=result, keeps=keeps, window=window,
                priority=priority,
            )  # fmt: skip
        if future is None:
            changes = request.opcode is not Opcode.READ
            future = calls.submit(
                call, self.turns, elements.start, elements.stop, changes=changes, window=window, priority=priority
            )
        return future

    def _check_fence(self, request: Request, fence: Fence) -> None:
        if getattr(fence, "owner", None) is not self:
            raise InvalidArgumentError(f"{self._asked(request)}: fence= takes a lock made by its own lock()")

    def _handles(
        self, request: Request, others: tuple[Dispatcher, ...], deadline: Deadline
    ) -> tuple[BufferHandle, list[BufferHandle]]:
        """Return the handles of this buffer and of the others: through the servers where the request takes that."""
        moves = others and any(each.info.movable for each in (self, *others))
        if request.token or request.opcode is Opcode.APPLY or moves or not self._reached_alike(others, deadline):
            handles = self._gated(deadline), [other._gated(deadline) for other in others]
            if moves:
                self._show(others, deadline)
            return handles
        return self.ensure(deadline), [other.ensure(deadline) for other in others]

    def _reached_alike(self, others: tuple[Dispatcher, ...], deadline: Deadline) -> bool:
        """Whether on each server the segments of all buffers are reached by one kind of path. A server may send clients
        away from the mapping of one segment before the coordinator says that this segment moves.
        """
        if not others:
            return True
        kinds = set()
        for each in (self, *others):
            each.ensure(deadline)
            kinds.add(tuple(path.segment is not None for path in each.paths))
        return len(kinds) == 1

    def _show(self, others: tuple[Dispatcher, ...], deadline: Deadline) -> None:
        """Show the tokens of the others' segments on this buffer's links: segments with two copies have links of their
        own. A server that does not take one denies the call.
        """
        tokens = self.session.coordinator.tokens
        for index, links in enumerate(self._gated_links):
            for link in links:
                for other in others:
                    with contextlib.suppress(EngineError):
                        tokens.show(link, other.info.layout.segments[index].id, deadline.left_ms())

    def _lies_apart(self, source: Dispatcher) -> bool:
        """Whether a source lies on other servers than this buffer, as far as is known here."""
        if not self.info.movable and not source.info.movable:
            return False
        here, there = self.info.layout.segments, source.info.layout.segments
        server_of = self.session.server_of
        return any(server_of(a) != server_of(b) for a, b in zip(here, there, strict=True))

    def _was_apart(self, status: Status, others: tuple[Dispatcher, ...]) -> bool:
        """Whether a call failed as a server did not have the others, or not to read: they have just moved."""
        moves = any(each.info.movable for each in (self, *others))
        return status is Status.APART or (moves and status in (Status.NOT_FOUND, Status.DENIED))

    def _left_of(
        self, request: Request, others: tuple[Dispatcher, ...], ended: Outcome, deadline: Deadline
    ) -> list[range]:
        """Return what a call that failed did not apply. Raises its error where that is not known."""
        unknown = ended.unknown
        try:
            parts = self.session.engine.resolve(unknown, deadline.left_ms()) if unknown is not None else []
        except EngineError as error:
            raise self._error(request, others, ended) from error
        known = (
            ended.bytes_applied + sum(nbytes for _, nbytes, _ in parts) >= request.nbytes or request.indices is not None
        )
        # A part that was applied, and whose answer was lost, has brought no result.
        result = request.opcode in (Opcode.FETCH_ADD, Opcode.COMPARE_SWAP) or engine.address_of(request.sink)
        bad = (PartState.UNKNOWN, PartState.APPLIED) if result else (PartState.UNKNOWN,)
        if not parts or not known or any(state in bad for _, _, state in parts):
            raise self._error(request, others, ended)
        missing = [(at, nbytes) for at, nbytes, state in parts if state is PartState.NOT_APPLIED]
        return ranges_of(missing, self.arguments.itemsize)

    def _again(
        self,
        request: Request,
        others: tuple[Dispatcher, ...],
        left: list[range],
        fence: Fence | None,
        deadline: Deadline,
    ) -> int:
        """Do what is left of a change: its servers sent it away, as they are reached in another way by now, or others
        have the segments. The rest of it was applied.
        """
        done = 0
        change: Request | None = None
        try:
            while left:
                if (change := _part_of(request, left[0], self.arguments.itemsize)) is not None:
                    done = self.call(change, fence=fence, others=others, deadline=deadline, in_turn=True)
                del left[0]
            here.finished = request
        except BaseException as error:
            what = "of which a part was sent to other servers"
            self._account_for(error, request, left, change, what)
            raise
        return done

    def _bring(
        self,
        request: Request,
        others: tuple[Dispatcher, ...],
        parts: list[range],
        fence: Fence | None,
        deadline: Deadline,
    ) -> int:
        """Do what is left of a call, `parts`, whose source does not lie on this buffer's servers: read it, and send it
        along; of several sources their sum. Each chunk's is read at one instant and used at a later one, as servers do
        it. The rest of the call was applied.
        """
        itemsize = self.arguments.itemsize
        chunk = self.info.layout.chunk_bytes
        most = max(1, _BROUGHT_BYTES // chunk) * chunk // itemsize
        left = [piece for part in parts for piece in _cut(part, most)]
        begun: Request | None = None
        try:
            while left:
                piece, begun = left[0], None
                offset, nbytes = piece.start * itemsize, len(piece) * itemsize
                read = Request(Opcode.READ, offset, nbytes)
                change = request._replace(offset=offset, nbytes=nbytes, token=0, sources=())
                if request.sources:
                    memory = self._sum_of(request, others, read, deadline)
                    change = change._replace(opcode=Opcode.WRITE, op=0)
                else:
                    memory = self._read_for(others[0], read, deadline)
                if request.opcode is Opcode.ACCUMULATE_FROM and not request.sources:
                    change = change._replace(opcode=Opcode.ACCUMULATE)
                rest = () if request.sources else others[1:]
                begun = change._replace(source=memory)
                self.call(begun, fence=fence, others=rest, deadline=deadline)
                del left[0]
            here.finished = request
        except BaseException as error:
            what = "whose source lies on other servers and is brought"
            self._account_for(error, request, left, begun, what)
            raise
        return 0

    def _read_for(self, source: Dispatcher, read: Request, deadline: Deadline) -> Any:
        """Return memory with what a read of a source brings."""
        values = np.empty(read.nbytes, np.uint8)
        memory = engine.memory_of(values)
        source.call(read._replace(sink=memory), deadline=deadline)
        return memory

    def _sum_of(self, request: Request, others: tuple[Dispatcher, ...], read: Request, deadline: Deadline) -> Any:
        """Return memory with the sum of several sources, computed as servers do it."""
        number, count = self.arguments.dtype.number, read.nbytes // self.arguments.itemsize
        total = engine.memory_of(np.empty(read.nbytes, np.uint8))
        for index, (source, (scale, wire)) in enumerate(zip(others, request.sources, strict=True)):
            values = self._read_for(source, read._replace(wire=wire), deadline)
            engine.apply_op(number, OPS["sum" if index else "replace"], total, values, count, scale)
        return total

    def _account_for(
        self, error: BaseException, request: Request, left: list[range], change: Request | None, what: str
    ) -> None:
        """Say of a call that failed at left[0] what it means for all of it. All but `left` was applied. `change`: the
        last one that was begun, of left[0] unless a handler raised after it; `what`: of the call, for people.
        """
        failed: Any = error
        touched = sum(map(len, left)) < len(self._elements(request))
        begun = bool(left) and change is not None and self._is_of(change, left[0])
        if not left:  # a handler raised after the last one
            failed.outcome, failed.smb_account = APPLIED, Failed(self, self._elements(request))
            return
        if begun and getattr(error, "smb_account", None) is None:  # outside of that call
            failed.outcome = APPLIED if here.finished is change else NOT_APPLIED
        found: CallOutcome = getattr(error, "outcome", UNKNOWN) if begun else NOT_APPLIED
        account = getattr(error, "smb_account", None) if begun else None
        unknown = account.unknown if account is not None else None
        inner = list(account.missing) if account is not None else []  # of a part that was cut again
        if inner:
            missing = [*inner, *left[1:]]
        elif found == UNKNOWN and unknown is None:
            missing = []  # it can't be known
        else:
            missing = left if found == NOT_APPLIED and unknown is None else left[1:]
        failed.smb_account = Failed(self, self._elements(request), unknown, missing=tuple(missing))
        # The outcome of one piece is that of the call if all other pieces had the same, or there are no others.
        same = (not touched and (len(left) == 1 or found == NOT_APPLIED)) or (found == APPLIED and len(left) == 1)
        failed.outcome = found if same else UNKNOWN
        if isinstance(error, Error):
            rest = "" if failed.outcome == found else "; of the whole call buffer.settle(error) tells"
            error.args = (f"{self._asked(request)}, {what}: {error}{rest}",)

    def _is_of(self, change: Request, part: range) -> bool:
        """Whether a change is that of a part: sparse ones begin and end inside of it."""
        elements = self._elements(change)
        return part.start <= elements.start and elements.stop <= part.stop

    def _asked(self, request: Request) -> str:
        return self.arguments.asked(request.opcode.name.lower())

    def _elements(self, request: Request) -> range:
        itemsize = self.arguments.itemsize
        return range(request.offset // itemsize, (request.offset + request.nbytes) // itemsize)

    def _raise_interrupt(self, request: Request, done: Outcome | int, *, touched: bool = False) -> None:
        """Raise what a signal's handler raised while the engine did this call, KeyboardInterrupt mostly, with the
        outcome of the call. `touched`: an earlier attempt of the call may have changed some of it.
        """
        interrupt: Any = take_interrupt()
        if interrupt is None:
            return
        self._account_interrupt(interrupt, request, done, touched=touched)
        raise interrupt

    def _account_interrupt(
        self, error: BaseException, request: Request, done: Outcome | int | None, *, touched: bool
    ) -> None:
        """Say in what a signal's handler raised what became of the call that it ended. `done`: how the engine's part
        of the call ended; None: it did not begin.
        """
        failed: Any = error
        if getattr(error, "smb_account", None) is not None:
            return
        take_interrupt()  # another handler's: it would end the next call
        ended = done if isinstance(done, Outcome) and done.status is not Status.OK else None
        if request.opcode is Opcode.READ:
            failed.outcome = NOT_APPLIED
        elif done is not None and ended is None:
            failed.outcome = APPLIED
        elif ended is None or not ended.sent:
            failed.outcome = UNKNOWN if touched else NOT_APPLIED
        else:
            failed.outcome = self._outcome_of(ended, request.nbytes, 0)
        failed.smb_account = Failed(self, self._elements(request), None if ended is None else ended.unknown)

    def account_outside(self, error: BaseException, before: Request | None, asked: range | None) -> None:
        """The same of what was raised before `call` began, or after it had returned. `before`: what this thread had
        finished before; `asked`: the elements of the call, None if they are not known.
        """
        failed: Any = error
        if getattr(error, "smb_account", None) is not None:
            return
        finished = here.finished
        if finished is not None and finished is not before:
            failed.outcome, failed.smb_account = APPLIED, Failed(self, self._elements(finished))
        elif asked is not None:
            failed.outcome, failed.smb_account = NOT_APPLIED, Failed(self, asked)

    def account_later(self, error: BaseException, future: Future[Any] | None, asked: range | None) -> None:
        """The same of what was raised while an async call was made. `future`: None if the engine has no such call."""
        failed: Any = error
        if getattr(error, "smb_account", None) is not None or asked is None:
            return
        failed.outcome = NOT_APPLIED if future is None else UNKNOWN
        failed.smb_account = Failed(self, asked, future=future)

    def wait_turn(self, request: Request, deadline: Deadline, others: tuple[Dispatcher, ...] = ()) -> None:
        """Wait for the client's async calls made before this one on the same elements. Raises TimeoutError."""
        calls, asked, elements = self.session.calls, self._asked(request), self._elements(request)
        changes = request.opcode is not Opcode.READ
        try:
            calls.wait(self.turns, elements.start, elements.stop, asked, deadline.left(), changes=changes)
        except Error as error:
            error.smb_account = Failed(self, elements, None)
            raise
        changes = request.opcode is Opcode.APPLY
        for other in others:
            calls.wait(other.turns, 0, other.arguments.size, asked, deadline.left(), changes=changes)

    def _forget(self, handle: BufferHandle | None) -> None:
        """Look for new paths at the next call, unless another thread has done so already."""
        with self._lock:
            if handle is not None and handle in (self._handle, self._gated_handle):
                self.place.disarm()
                self._handle = self._gated_handle = None
                self._homes = self._gated_links = ()
                self._ask_first = True

    def look_again(self) -> None:
        """Look for new paths at the next call."""
        self._forget(self._handle)

    def _gated(self, deadline: Deadline) -> BufferHandle:
        """Return a handle all of whose segments are reached through their servers."""
        self.ensure(deadline)
        with self._lock:
            if self._gated_handle is None:
                self._gated_handle = self._until_reached(self._attach_gated, deadline)
            return self._gated_handle

    def ensure(self, deadline: Deadline) -> BufferHandle:
        """Return a handle all of whose segments are reachable."""
        if (handle := self._handle) is not None:
            return handle
        with self._lock:
            if self._handle is None:
                self._handle = self._until_reached(self._attach, deadline)
                arguments = self.arguments
                if self.one_copy and not arguments.default_wire and arguments.note is None and not self._lost:
                    self._handle.arm(
                        self.place, self.session.switch, self.turns.quiet, self.info.shape, arguments.itemsize,
                        self.info.dtype.char, self.session.timeout_ms,
                    )  # fmt: skip
            return self._handle

    def _until_reached(self, attach: Callable[[Deadline], BufferHandle], deadline: Deadline) -> BufferHandle:
        """Return what `attach` does, waiting for servers that come back, and asking where they are now."""
        backoff = _retry(deadline)
        while True:
            self.session.check_open()
            asked = self._ask_first
            told = asked and self._refresh(deadline)
            try:
                return attach(deadline)
            except (TransportError, PermissionDeniedError) as error:
                self._ask_first = True
                if asked and not self._has_moved(deadline):
                    # A right is for the roles of copies, of which a server hears a moment later than we.
                    early = told and self.info.movable and isinstance(error, PermissionDeniedError)
                    if not early or backoff.over():
                        raise
                    time.sleep(backoff.next_s())
            except UnavailableError as error:
                self._ask_first = True
                lost = LOST in str(error)
                if told and self.info.lost:  # the coordinator says so: it does not come back
                    if lost:
                        raise
                    raise UnavailableError(f"buffer {self.info.name!r}: {error}; {LOST}") from error
                if backoff.over():
                    if lost:
                        raise
                    raise UnavailableError(f"buffer {self.info.name!r} can't be reached: {error}") from error
                time.sleep(backoff.next_s())

    def _has_moved(self, deadline: Deadline) -> bool:
        """Whether the coordinator says by now that a segment is elsewhere: its server denies whom it has no more."""
        before = [(place.server, place.epoch) for place in self.info.layout.segments]
        self._refresh(deadline)
        return before != [(place.server, place.epoch) for place in self.info.layout.segments]

    def _attach(self, deadline: Deadline) -> BufferHandle:
        """Find the best path to every segment."""
        layout = self.info.layout
        try:
            paths = self.session.reach(layout.segments, layout.epoch, deadline)
        except NotFoundError as error:
            self._refresh(deadline)  # raises if the buffer is gone for the coordinator too
            raise UnavailableError(f"buffer {self.info.name!r}: {error}; {LOST}") from error
        for place, path in zip(layout.segments, paths, strict=True):
            if place.lost and path.links and not any(link.connected() for link in path.links):
                away = f"memory server {place.server} at {place.address} is away, and had no such segment"
                raise UnavailableError(f"buffer {self.info.name!r}: {away}; {LOST}")
        handle = self._new_handle()
        for index, (place, path) in enumerate(zip(layout.segments, paths, strict=True)):
            path.apply(handle, index, place, layout.epoch)
        self.paths = paths
        self.arguments.note = self.session.verbs.note if any(path.transport == "verbs" for path in paths) else None
        _log.info('buffer "%s": %s', self.info.name, describe(list(zip(layout.segments, paths, strict=True))))
        return handle

    def _attach_gated(self, deadline: Deadline) -> BufferHandle:
        """Find a path through its server to every segment."""
        handle = self._new_handle()
        reached = [self.session.reach_gated(place, deadline) for place in self.info.layout.segments]
        for index, (place, links) in enumerate(zip(self.info.layout.segments, reached, strict=True)):
            handle.set_links(index, place.id, place.epoch or self.info.layout.epoch, links)
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
            self.arguments.dtype.number,
        )

    def homes(self) -> tuple[Home, ...]:
        """The segments to ask about locks and versions: the home first, then the others."""
        homes = self._homes
        if not homes:
            layout = self.info.layout
            homes = self._homes = tuple(
                Home(
                    self.session,
                    f"of buffer {self.info.name!r}",
                    place,
                    place.epoch or layout.epoch,
                    functools.partial(self._relocated, index),
                )
                for index, place in enumerate(layout.segments)
            )
        return homes

    def _relocated(self, index: int) -> SegmentPlace:
        if not self._refresh(Deadline(1.0)):
            raise UnavailableError("the coordinator does not answer")
        return self.info.layout.segments[index]

    def _may_repeat(self, opcode: Opcode, refused: Outcome) -> bool:
        """Whether a call of which a server refused a part is done once more with a newer token: where that does no part
        of it twice. Readers have no token for anything else.
        """
        if opcode is Opcode.READ:
            return True
        if self._is_read_only(refused):
            return False
        return opcode in (Opcode.WRITE, Opcode.FILL) or self._nothing_applied(refused, 0)

    def _patience_ms(self, request: Request, deadline: Deadline) -> int:
        """Return how long a call may wait for servers: for one that has lost the memory in question but a moment."""
        if not self._lost:
            return deadline.left_ms()
        layout = self.info.layout
        first = request.offset // layout.stripe_bytes
        stripes = (request.offset + request.nbytes - 1) // layout.stripe_bytes - first + 1
        count = len(layout.segments)
        lost = any(layout.segments[(first + i) % count].lost for i in range(min(stripes, count)))
        return min(deadline.left_ms(), LOST_WAIT_MS) if lost else deadline.left_ms()

    def _has_lost(self, ended: Outcome, others: tuple[Dispatcher, ...]) -> bool:
        """Whether a call that ended so did so because memory of these buffers is lost, as the coordinator says."""
        asks = ended.status in _UNREACHED or (ended.status in _WITHOUT_IT and ended.sent)
        if not asks and ended.status not in _WITHOUT_IT:
            return False
        asked = [each.is_lost() for each in (self, *others) if asks or each._lost]
        return any(asked)

    def is_lost(self) -> bool:
        """Whether memory of this buffer is lost. Asks the coordinator; without its answer it is what it said before."""
        with contextlib.suppress(NotFoundError):  # deleted: the next call says so
            self._refresh(Deadline(_LOST_ASK_S))
        return self.info.lost

    def _is_read_only(self, refused: Outcome) -> bool:
        return self.session.coordinator.tokens.read_only(self.info.layout.segments[refused.segment].id)

    def _nothing_applied(self, refused: Outcome, wait_ms: int) -> bool:
        """Whether no part of a refused call was applied, or will be: known now, or learnt within that time."""
        return not refused.sent or self._outcome_of(refused, 0, wait_ms) == NOT_APPLIED

    def _outcome_of(self, failed: Outcome, nbytes: int, wait_ms: int) -> CallOutcome:
        """Return the outcome of a change of so many bytes that was sent: known now, or learnt within that time."""
        if failed.unknown is None:
            return UNKNOWN
        try:
            parts = self.session.engine.resolve(failed.unknown, wait_ms)
        except EngineError:
            return UNKNOWN
        return outcome_of(parts, failed.bytes_applied, nbytes)

    def _open_again(self, deadline: Deadline) -> bool:
        """Get newer tokens, which the next call shows; False if the coordinator does not answer."""
        if not self._refresh(deadline):
            return False
        self._forget(self._handle)
        return True

    def _refresh(self, deadline: Deadline) -> bool:
        """Ask where the buffer is now, and what it is called; False if the coordinator does not answer."""
        try:
            # By its id: it may have been renamed since.
            info = BufferInfo.of(
                self.session.coordinator.open_buffer(self.info.name, 0.0, min(1.0, deadline.left()), self.info.id)
            )
        except (UnavailableError, TimeoutError):
            return False  # it is away: the servers may still be where they were
        except NotFoundError as error:
            raise NotFoundError(f"buffer {self.info.name!r} was deleted") from error
        if info.id != self.info.id:
            raise NotFoundError(f"buffer {self.info.name!r} was deleted and made anew, or replaced; open it again")
        self.arguments.info, self._lost = info, info.lost
        return True

    def _error(
        self, request: Request, others: tuple[Dispatcher, ...], outcome: Outcome, *, touched: bool = False
    ) -> Error:
        opcode = request.opcode
        place = self.info.layout.segments[outcome.segment]
        where = f"memory server {place.server} at {place.address}"
        # Each part is refused by itself, and the others' answers are on their way.
        patience_ms = _REFUSED_WAIT_MS if outcome.status in (Status.DENIED, Status.OUT_OF_MEMORY) else 0
        known = (
            NOT_APPLIED if opcode is Opcode.READ or not outcome.sent else
            self._outcome_of(outcome, request.nbytes, patience_ms)
        )  # fmt: skip
        if touched and known == NOT_APPLIED:  # by this attempt
            known = UNKNOWN
        applied = (
            "reading can be repeated" if outcome.sent and opcode is Opcode.READ else
            "nothing was applied" if known == NOT_APPLIED else
            "all of it was applied" if known == APPLIED else
            f"outcome unknown: {outcome.bytes_applied} bytes are confirmed, the rest may or may not have been applied; "
            f"buffer.settle(error) finds out"
        )  # fmt: skip
        reader = opcode is not Opcode.READ and self.session.coordinator.tokens.read_only(place.id)
        asked = self._asked(request)
        why, timeout = self.session.why_untrusted(place.server), self.session.timeout
        infos = [each.info for each in (self, *others)]
        lost = any(info.lost for info in infos)
        moved = any(info.movable for info in infos) and not lost
        if lost and outcome.status in (*_UNREACHED, *_WITHOUT_IT):
            outcome = replace(outcome, status=Status.NOT_FOUND)
        error = error_of(opcode, outcome, asked, where, applied, reader=reader, timeout=timeout, why=why, moved=moved)
        error.outcome = known
        error.smb_account = Failed(self, self._elements(request), None if touched else outcome.unknown)
        return error


def _go_on(calls: weakref.ref[Dispatcher], started: float, request_address: int, outcome_address: int) -> int:
    """Go on with a direct method's call that failed; addresses of the engine's structs. The caller has the buffer."""
    request, ended = engine.direct_call(request_address, outcome_address)
    dispatcher = calls()
    assert dispatcher is not None
    return signed(dispatcher.call(request, started=started, ended=ended))


def _part_of(request: Request, part: range, itemsize: int) -> Request | None:
    """Return the change of some of its elements alone; None: of those it changes none."""
    begin, end = part.start, part.stop
    skip = begin * itemsize - request.offset  # bytes of the source and the sink
    indices = request.indices
    if indices is not None:
        first, last = (int(at) for at in np.searchsorted(indices, (part.start, part.stop)))
        if first == last:
            return None
        begin, end, indices = int(indices[first]), int(indices[last - 1]) + 1, indices[first:last]
        skip = first * itemsize
    source, sink = (
        engine.memory_at(address + skip) if (address := engine.address_of(memory)) else NOWHERE
        for memory in (request.source, request.sink)
    )
    return request._replace(
        offset=begin * itemsize, nbytes=(end - begin) * itemsize, source=source, sink=sink, indices=indices
    )


def _cut(part: range, most: int) -> Iterator[range]:
    """Yield the part in pieces that end at multiples of `most` elements: at ends of chunks, which stay whole."""
    start = part.start
    while start < part.stop:
        stop = min(part.stop, (start // most + 1) * most)
        yield range(start, stop)
        start = stop


def _all_alive(paths: tuple[SegmentPath, ...]) -> bool:
    return all(link.alive() for path in paths for link in path.links)


def signed(value: int) -> int:
    """Return a word of the engine as the int64 that it is."""
    return value - 2**64 if value >= 2**63 else value
