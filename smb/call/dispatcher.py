"""How a buffer's calls get to its servers: ways that are found, kept, and looked for again when servers move."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from smb import engine
from smb.buffer_info import BufferInfo
from smb.call.arguments import Arguments
from smb.call.outcomes import LOST, Failed, error_of, outcome_of
from smb.call.session import Fence, Session
from smb.call.sync_requests import Home
from smb.engine import NOWHERE, BufferHandle, EngineError, Opcode, Outcome, Status, memory_at, take_interrupt
from smb.errors import (
    APPLIED,
    NOT_APPLIED,
    UNKNOWN,
    CallOutcome,
    Error,
    InvalidArgumentError,
    NotFoundError,
    TimeoutError,  # noqa: A004 - the contract's name
    TransportError,
    UnavailableError,
)
from smb.transport.base import Deadline, SegmentPlace, Way
from smb.transport.choose import describe

Array = np.ndarray[Any, np.dtype[Any]]

_RETRY_FIRST_S = 0.02
_RETRY_MAX_S = 0.5
_REFUSED_WAIT_MS = 1000  # for the answers to the other parts of a call of which one was refused

_log = logging.getLogger("smb")


class Route(Arguments):
    """Does calls on the engine by the best way to each segment; again, by other ways, where that is no risk."""

    def __init__(self, client: Session, info: BufferInfo) -> None:
        super().__init__(info)
        self._client = client
        self._plain = info.versions == 1
        self._lock = threading.Lock()  # while ways are looked for; calls in progress keep the handle they began with
        self._handle: BufferHandle | None = None
        self._gated_handle: BufferHandle | None = None  # for fenced changes: links only
        self._homes: tuple[Home, ...] = ()
        self._ways: tuple[Way, ...] = ()
        self._turns = client.turns_of(info.id)
        self._ask_first = False  # the coordinator, before ways are looked for again: a server may have moved

    def _call(
        self,
        opcode: Opcode,
        offset: int,
        count: int,
        source: Any = NOWHERE,
        sink: Any = NOWHERE,
        *,
        op: int = 0,
        scale: float = 1.0,
        argument: int = 0,
        expected: int = 0,
        others: tuple[Route, ...] = (),
        hyper: Mapping[str, float] | None = None,
        fence: Fence | None = None,
        token: int = 0,
        wire: int = 0,
        indices: Array | None = None,
        ended: Outcome | None = None,
        started: float | None = None,
    ) -> int:
        """Do one call on the engine, or go on with one that has `ended`. Broken connections are its links' to
        mend (transport/reconnect.py)."""
        client, handle = self._client, self._handle
        start, nbytes = offset * self._itemsize, count * self._itemsize
        touched = False  # by an attempt before this one
        if ended is not None:
            self._raise_interrupt(opcode, range(offset, offset + count), ended)
        try:
            if self._info.versions > 1 and opcode is not Opcode.READ and not token:
                raise InvalidArgumentError(
                    f"{self._asked(opcode.name.lower())}: with versions=2 it changes by publish() alone"
                )
            if fence is not None:
                if fence.buffer is not self:
                    raise InvalidArgumentError(
                        f"{self._asked(opcode.name.lower())}: fence= takes a lock made by its own lock()"
                    )
                token = fence.token
            if count == 0:  # nothing to ask of anybody
                client.check_open()
                return 0
            deadline = Deadline(client.timeout, started)
            if (
                ended is None
                and self._plain
                and not (self._turns.quiet.open and all(other._turns.quiet.open for other in others))
            ):
                self._wait_turn(opcode, offset, count, deadline, others)
            pause = _RETRY_FIRST_S
            opened_again = False
            while True:
                if ended is None:
                    client.check_open()
                    if token or wire or others:
                        gated = bool(token) or opcode is Opcode.APPLY
                        handle = self._gated(deadline) if gated else self._handle or self._ensure(deadline)
                        theirs = [
                            other._gated(deadline) if gated else other._handle or other._ensure(deadline)
                            for other in others
                        ]
                        done = handle.transfer_gated(
                            opcode,
                            start,
                            nbytes,
                            deadline.left_ms(),
                            source=source,
                            sink=sink,
                            op=op,
                            scale=scale,
                            argument=argument,
                            others=theirs,
                            hyper=hyper,
                            token=token,
                            wire=wire,
                            indices=NOWHERE if indices is None else engine.memory_of(indices),
                            entries=0 if indices is None else indices.size,
                        )
                    else:
                        handle = self._handle or self._ensure(deadline)
                        done = handle.transfer(
                            opcode, start, nbytes, deadline.left_ms(), source, sink, op, scale, argument, expected
                        )
                    self._raise_interrupt(opcode, range(offset, offset + count), done, touched=touched)
                    if isinstance(done, int):
                        return done
                    ended = done
                if ended.status is Status.LOCK_LOST and fence is not None:
                    fence.lose(token)
                if ended.status is Status.NOT_FOUND:
                    self._forget(handle)  # a mapping would keep the memory of a deleted buffer from being used again
                    self._refresh(deadline)  # raises where the buffer is gone for the coordinator too
                    for other in others:
                        other._forget(other._handle)
                        other._refresh(deadline)
                if ended.status is Status.DENIED and not opened_again and self._may_repeat(opcode, ended):
                    opened_again = True
                    touched |= opcode in (Opcode.WRITE, Opcode.FILL) and ended.sent
                    if all(buffer._open_again(deadline) for buffer in (self, *others)):
                        ended = None
                        continue
                moved = ended.status in (Status.STALE_EPOCH, Status.NAMESPACE)
                elsewhere = moved or not _all_alive(self._ways)
                if elsewhere:  # the next attempt, or the next call, finds new ways
                    self._forget(handle)
                    for other in others:
                        other._forget(other._handle)
                if not elsewhere or ended.sent or deadline.left() == 0.0:
                    raise self._error(opcode, ended, range(offset, offset + count), touched=touched)
                ended = None
                time.sleep(min(pause, deadline.left()))
                pause = min(2 * pause, _RETRY_MAX_S)
        except Error as error:
            if error._account is None:
                if touched:
                    error.outcome = UNKNOWN
                elif opcode is not Opcode.READ and ended is not None and ended.sent:
                    error.outcome = self._outcome_of(ended, nbytes, _REFUSED_WAIT_MS)
                doubt = None if ended is None else ended.doubt
                error._account = Failed(self, range(offset, offset + count), doubt)
            raise

    def _go_on(
        self, started: float, opcode: int, offset: int, count: int, source: int, sink: int, op: int, scale: float,
        argument: int, expected: int, status: int, segment: int, bytes_applied: int, sent: int, doubt: int,
    ) -> int:  # fmt: skip
        """Go on with a `direct` method's call that failed: in the words of csrc/smb.h, addresses as integers."""
        ended = engine.outcome_of(status, segment, bytes_applied, sent, doubt)
        result = self._call(
            Opcode(opcode), offset, count, memory_at(source), memory_at(sink), op=op, scale=scale, argument=argument,
            expected=expected, ended=ended, started=started,
        )  # fmt: skip
        return signed(result)

    def _raise_interrupt(self, opcode: Opcode, elements: range, done: Outcome | int, *, touched: bool = False) -> None:
        """Raise what a signal's handler raised while the engine did this call, KeyboardInterrupt mostly, with the
        outcome of the call. `touched`: an earlier attempt of the call may have changed some of it.
        """
        interrupt: Any = take_interrupt()
        if interrupt is None:
            return
        ended = done if isinstance(done, Outcome) and done.status is not Status.OK else None
        if opcode is Opcode.READ:
            interrupt.outcome = NOT_APPLIED
        elif ended is None:
            interrupt.outcome = APPLIED
        elif not ended.sent:
            interrupt.outcome = UNKNOWN if touched else NOT_APPLIED
        else:
            interrupt.outcome = self._outcome_of(ended, len(elements) * self._itemsize, 0)
        interrupt._account = Failed(self, elements, None if ended is None else ended.doubt)
        raise interrupt

    def _wait_turn(
        self, opcode: Opcode, offset: int, count: int, deadline: Deadline, others: tuple[Route, ...] = ()
    ) -> None:
        """Wait for the client's async calls made before this one on the same elements. Raises TimeoutError."""
        client, asked = self._client, self._asked(opcode.name.lower())
        changes = opcode is not Opcode.READ
        client.calls.wait(self._turns, offset, offset + count, asked, deadline.left(), changes=changes)
        for other in others:
            client.calls.wait(other._turns, 0, other._size, asked, deadline.left(), changes=opcode is Opcode.APPLY)

    def _forget(self, handle: BufferHandle | None) -> None:
        """Look for new ways at the next call, unless another thread has done so already."""
        with self._lock:
            if handle is not None and handle in (self._handle, self._gated_handle):
                self._disarm()
                self._handle = self._gated_handle = None
                self._homes = ()
                self._ask_first = True

    def _gated(self, deadline: Deadline) -> BufferHandle:
        """Return a handle all of whose segments are reached through their servers."""
        self._ensure(deadline)
        with self._lock:
            if self._gated_handle is None:
                self._gated_handle = self._until_reached(self._attach_gated, deadline)
            return self._gated_handle

    def _ensure(self, deadline: Deadline) -> BufferHandle:
        """Return a handle all of whose segments are reachable."""
        with self._lock:
            if self._handle is None:
                self._handle = self._until_reached(self._attach, deadline)
                if self._plain and not self._wire and self._note is None:
                    self._handle.arm(
                        self, self._client.switch, self._turns.quiet, self._size, self._itemsize, self._info.dtype.char,
                        self._client.timeout_ms,
                    )  # fmt: skip
            return self._handle

    def _until_reached(self, attach: Callable[[Deadline], BufferHandle], deadline: Deadline) -> BufferHandle:
        """Return what `attach` does, waiting for servers that come back, and asking where they are now."""
        pause = _RETRY_FIRST_S
        while True:
            self._client.check_open()
            asked = self._ask_first
            if asked:
                self._refresh(deadline)
            try:
                return attach(deadline)
            except TransportError:
                self._ask_first = True
                if asked:
                    raise
            except UnavailableError as error:
                self._ask_first = True
                if deadline.left() <= pause:
                    raise UnavailableError(f"buffer {self._info.name!r} can't be reached: {error}") from error
                time.sleep(pause)
                pause = min(2 * pause, _RETRY_MAX_S)

    def _attach(self, deadline: Deadline) -> BufferHandle:
        """Find the best way to every segment."""
        layout = self._info.layout
        try:
            ways = self._client.reach(layout.segments, layout.epoch, deadline)
        except NotFoundError as error:
            self._refresh(deadline)  # raises where the buffer is gone for the coordinator too
            raise UnavailableError(f"buffer {self._info.name!r}: {error}; {LOST}") from error
        handle = self._new_handle()
        for index, (place, way) in enumerate(zip(layout.segments, ways, strict=True)):
            way.apply(handle, index, place, layout.epoch)
        self._ways = ways
        self._note = self._client.verbs.note if any(way.transport == "verbs" for way in ways) else None
        _log.info('buffer "%s": %s', self._info.name, describe(list(zip(layout.segments, ways, strict=True))))
        return handle

    def _attach_gated(self, deadline: Deadline) -> BufferHandle:
        """Find a way through its server to every segment."""
        handle = self._new_handle()
        for index, place in enumerate(self._info.layout.segments):
            link = self._client.reach_gated(place, deadline)
            handle.set_link(index, place.id, self._info.layout.epoch, link)
        return handle

    def _new_handle(self) -> BufferHandle:
        layout = self._info.layout
        return BufferHandle(
            self._client.engine,
            layout.nbytes,
            layout.stripe_bytes,
            layout.chunk_bytes,
            len(layout.segments),
            self._dtype.number,
        )

    def _sync_homes(self) -> tuple[Home, ...]:
        """What to ask about locks and versions: the home first, then the other segments."""
        homes = self._homes
        if not homes:
            layout = self._info.layout
            homes = self._homes = tuple(
                Home(
                    self._client,
                    f"of buffer {self._info.name!r}",
                    place,
                    layout.epoch,
                    functools.partial(self._relocated, index),
                )
                for index, place in enumerate(layout.segments)
            )
        return homes

    def _relocated(self, index: int) -> SegmentPlace:
        self._refresh(Deadline(1.0))
        return self._info.layout.segments[index]

    def _may_repeat(self, opcode: Opcode, refused: Outcome) -> bool:
        """Whether a call of which a server refused a part is done once more with a newer token: where that does no part
        of it twice. Readers have no token for anything else.
        """
        if opcode is Opcode.READ:
            return True
        place = self._info.layout.segments[refused.segment]
        if self._client.coordinator.tokens.read_only(place.id):
            return False
        return opcode in (Opcode.WRITE, Opcode.FILL) or self._nothing_applied(refused, 0)

    def _nothing_applied(self, refused: Outcome, wait_ms: int) -> bool:
        """Whether it is known, or told within that time, that no part of a refused call was applied, or will be."""
        return not refused.sent or self._outcome_of(refused, 0, wait_ms) == NOT_APPLIED

    def _outcome_of(self, failed: Outcome, nbytes: int, wait_ms: int) -> CallOutcome:
        """Return what is known by now, or told within that time, of a change of so many bytes that was sent."""
        if failed.doubt is None:
            return UNKNOWN
        try:
            parts = self._client.engine.settle(failed.doubt, wait_ms)
        except EngineError:
            return UNKNOWN
        return outcome_of(parts, failed.bytes_applied, nbytes)

    def _open_again(self, deadline: Deadline) -> bool:
        """Get newer tokens, which the next call shows; False where the coordinator does not answer."""
        if not self._refresh(deadline):
            return False
        self._forget(self._handle)
        return True

    def _refresh(self, deadline: Deadline) -> bool:
        """Ask where the buffer is now, and what it is called; False where the coordinator does not answer."""
        try:
            # By its id: it may have been renamed since.
            info = BufferInfo.of(
                self._client.coordinator.open_buffer(self._info.name, 0.0, min(1.0, deadline.left()), self._info.id)
            )
        except (UnavailableError, TimeoutError):
            return False  # it is away: the servers may still be where they were
        except NotFoundError as error:
            raise NotFoundError(f"buffer {self._info.name!r} was deleted") from error
        if info.id != self._info.id:
            raise NotFoundError(f"buffer {self._info.name!r} was deleted and made anew, or replaced; open it again")
        self._info = info
        return True

    def _error(self, opcode: Opcode, outcome: Outcome, elements: range, *, touched: bool = False) -> Error:
        place = self._info.layout.segments[outcome.segment]
        where = f"memory server {place.server} at {place.address}"
        # Each part is refused by itself, and the others' answers are on their way.
        patience_ms = _REFUSED_WAIT_MS if outcome.status in (Status.DENIED, Status.OUT_OF_MEMORY) else 0
        known = (
            NOT_APPLIED if opcode is Opcode.READ or not outcome.sent else
            self._outcome_of(outcome, len(elements) * self._itemsize, patience_ms)
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
        reader = opcode is not Opcode.READ and self._client.coordinator.tokens.read_only(place.id)
        asked = self._asked(opcode.name.lower())
        why, timeout = self._client.why_untrusted(place.server), self._client.timeout
        error = error_of(opcode, outcome, asked, where, applied, reader=reader, timeout=timeout, why=why)
        error.outcome = known
        error._account = Failed(self, elements, None if touched else outcome.doubt)
        return error


def _all_alive(ways: tuple[Way, ...]) -> bool:
    return all(way.link is None or way.link.alive() for way in ways)


def signed(value: int) -> int:
    """Return a word of the engine as the int64 that it is."""
    return value - 2**64 if value >= 2**63 else value
