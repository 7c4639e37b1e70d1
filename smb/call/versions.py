"""A buffer's published versions: which is the latest, a read that is all of one version, and publication."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from smb.call.dispatcher import Dispatcher
from smb.call.outcomes import Failed
from smb.call.sync_requests import PUBLISHER_LOCK, Home, raise_fences, wait_ms
from smb.engine import AskOpcode, Opcode, Request, address_of, memory_at
from smb.errors import (
    NOT_APPLIED,
    Error,
    LockLostError,
    TimeoutError,  # noqa: A004 - the contract's name
)
from smb.transport.base import Deadline

_LOOKS = 2  # at a version, before a reader that loses against the publisher pins it
_LOOK_S = 0.5  # after so much time a read looks whether its version is still there, and pins it
_PIECE_BYTES = 1 << 20  # of such a read, to begin with: what is fast is read in larger ones
_PIECE_MIN = 1 << 14  # elements


class Versions:
    """The versions of one buffer. Of a buffer with two copies, version v lies in copy v % 2, and only publication
    changes it; a buffer with one copy just counts them.
    """

    def __init__(self, calls: Dispatcher) -> None:
        self._calls = calls
        self._arguments = calls.arguments

    def latest(self) -> tuple[int, int]:
        """(version published, version being written), from the home's own memory where it is mapped."""
        self._calls.session.check_open()
        self._calls.ensure(Deadline(self._calls.session.timeout))
        segment = self._calls.paths[0].segment
        if segment is not None:
            return segment.version()
        reply = self._calls.homes()[0].ask(self._arguments.asked("version"), AskOpcode.AWAIT_VERSION, 0, (0, 0))
        return reply.a, reply.b

    def read(self, offset: int, count: int, sink: Any, wire: int) -> int:
        """Read from the copy of the latest version, and return which version that was.

        No byte of it changed if, after the read, publication of version + 2 has not begun.

        In pieces, with a look in between where that takes a while: a read that takes longer than publications come is
        pinned, and its pin renewed as long as its bytes flow. All of it within the client's timeout.
        """
        started = looked = time.monotonic()
        deadline = Deadline(self._calls.session.timeout, started)
        if not self._calls.turns.quiet.open:
            itemsize = self._arguments.itemsize
            self._calls.wait_turn(Request(Opcode.READ, offset * itemsize, count * itemsize), deadline)
        home, asked = self._calls.homes()[0], self._arguments.asked("read")
        version, done, lost = self.latest()[0], 0, 0
        pin: int | None = None
        piece = _PIECE_BYTES // self._arguments.itemsize
        try:
            while True:
                length = self._piece(self._copy_base(version) + offset + done, count - done, piece)
                began = time.monotonic()
                there = memory_at(address_of(sink) + done * self._arguments.itemsize)
                self._read(self._copy_base(version) + offset + done, length, there, wire, started)
                done += length
                now = time.monotonic()
                piece = max(_PIECE_MIN, piece // 2 if now - began > _LOOK_S else min(4 * piece, self._arguments.size))
                if done == count and max(self.latest()) < version + 2:
                    break
                if done < count and now - looked < _LOOK_S:
                    continue
                looked = now
                if pin is not None and self._renewed(home, asked, pin):
                    if done < count:
                        continue
                    home.ask(asked, AskOpcode.UNPIN, 0, (pin,))  # a restarted server had forgotten it
                    pin = None
                if done == count:
                    lost += 1
                if deadline.left() == 0.0:
                    raise TimeoutError(
                        f"{asked}: not within {self._calls.session.timeout:g} s: publishers went on in the middle of "
                        f"it; give the client a longer timeout, or the publisher a larger readers="
                    )
                if done == count and lost < _LOOKS:
                    version, done, pin = self.latest()[0], 0, None
                    continue
                # Publishers are faster than we read: hold them back, for as long as they bear it.
                reply = home.ask(asked, AskOpcode.PIN)
                pin = reply.b
                if reply.a != version or done == count:
                    version, done = reply.a, 0
        except BaseException:
            if pin is not None:
                home.tell(AskOpcode.UNPIN, (pin,))  # where that fails, its time ends it
            raise
        if pin is not None:
            with contextlib.suppress(Error):  # all was read; so too
                home.ask(asked, AskOpcode.UNPIN, 0, (pin,))
        return version

    def _piece(self, start: int, left: int, most: int) -> int:
        """How many elements to read at once: up to the end of a chunk, so that roundings are those of one read."""
        if left <= most:
            return left
        chunk = self._calls.info.layout.chunk_bytes // self._arguments.itemsize
        return min(left, max((start + most) // chunk * chunk, (start // chunk + 1) * chunk) - start)

    def _renewed(self, home: Home, asked: str, pin: int) -> bool:
        try:
            home.ask(asked, AskOpcode.PIN, 0, (0, pin))
        except LockLostError:
            return False  # a publisher would not wait any longer
        return True

    def read_copy(self, version: int, offset: int, count: int, sink: Any, wire: int) -> bool:
        """Read from that version's copy. False where a publisher has begun to overwrite it."""
        self._read(self._copy_base(version) + offset, count, sink, wire)
        return max(self.latest()) < version + 2

    def publish(self, source: Any, timeout: float, ttl: float, readers: float) -> int:
        """Replace all elements and return the new version; see Buffer.publish."""
        asked, homes = self._arguments.asked("publish"), self._calls.homes()
        try:
            turn = homes[0].ask(
                asked,
                AskOpcode.LOCK,
                PUBLISHER_LOCK,
                (round(1000 * ttl), wait_ms(timeout), 0, wait_ms(readers)),
                wait=timeout,
            )
        except TimeoutError as error:
            raise TimeoutError(
                f"{asked}: another publisher, or a reader's pin, for {timeout:g} s; nothing done"
            ) from error
        token, version = turn.a, turn.b
        try:
            raise_fences(homes[1:], PUBLISHER_LOCK, token, asked)
            start = self._copy_base(version) * self._arguments.itemsize
            self._calls.call(Request(Opcode.WRITE, start, self._calls.info.nbytes, source, token=token))
        except BaseException as error:
            failure: Any = error
            if not self._calls.one_copy:  # only a copy that nobody reads was changed
                failure.outcome, failure._account = NOT_APPLIED, Failed(self._calls, range(self._arguments.size))
            with contextlib.suppress(Error):  # the turn ends with its ttl, too, and the first error says more
                homes[0].ask(asked, AskOpcode.UNLOCK, PUBLISHER_LOCK, (token,))
            raise
        return homes[0].ask(asked, AskOpcode.PUBLISH, 0, (token, version)).a

    def _copy_base(self, version: int) -> int:
        """First element of the copy in which a version lies."""
        return version % 2 * self._calls.info.copy_stride_bytes // self._arguments.dtype.itemsize

    def _read(self, offset: int, count: int, sink: Any, wire: int, started: float | None = None) -> None:
        """Read elements of the memory; of a buffer with two copies, of either."""
        itemsize = self._arguments.itemsize
        request = Request(Opcode.READ, offset * itemsize, count * itemsize, sink=sink, wire=wire)
        self._calls.call(request, started=started)
