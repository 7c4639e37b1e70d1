"""A buffer's published versions: the latest one, reads that are all of one version, and publication."""

from __future__ import annotations

import contextlib
import logging
import operator
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from smb.call.dispatcher import Dispatcher
from smb.call.outcomes import Failed
from smb.call.sync_requests import PUBLISHER_LOCK, WAIT_FOR_READERS, Home, Obstacle, raise_fences, wait_ms
from smb.engine import LATEST, AskOpcode, Opcode, Reply, Request, address_of, memory_at
from smb.errors import (
    NOT_APPLIED,
    UNKNOWN,
    DeadlineError,
    Error,
    InvalidArgumentError,
    LockLostError,
    NotFoundError,
)
from smb.transport.base import Deadline

# A read without a pin fails if publishers overwrite its version before it ends. After so many failures the reader pins
# the version, which holds publishers back.
_LOOKS = 2
_LOOK_S = 0.5  # a read that takes longer than this pins its version, and renews the pin after each further such time
_SILENT_S = 2.0  # a publisher that waits longer than this logs for whom
_BLOCK_BYTES = 1 << 20  # size of a read's first block; the next blocks are larger if reading is fast, smaller if slow
_BLOCK_MIN = 1 << 14  # smallest size of a later block, in elements
_VERSION_BITS = 56  # a publisher's turn is one word: the version in these low bits, the slot in the bits above
_VERSION_MASK = 2**_VERSION_BITS - 1

_log = logging.getLogger("smb")


class Publication:
    """A version that is being written during a publisher's turn. Nobody sees it before `commit`.

    The turn ends after `ttl` seconds unless it is renewed.
    """

    def __init__(self, calls: Dispatcher, token: int, version: int, slot: int, ttl: float) -> None:
        self._calls = calls
        self._asked = calls.arguments.asked("publish")
        self._token = token
        self.version = version
        self._ttl_ms = round(1000 * ttl)
        self.slot = slot

    @property
    def turn(self) -> tuple[int, int, int, float]:
        """Return the words that another client passes to Versions.take_part, to write a part of this version."""
        return self._token, self.version, self.slot, self._ttl_ms / 1000

    @contextlib.contextmanager
    def kept(self, is_late: Callable[[], bool] | None = None) -> Iterator[None]:
        """Renew the turn from another thread while the block runs. If `is_late` returns True, give the turn up.

        If the turn is lost, writes and the commit are refused.
        """
        over = threading.Event()

        def keep() -> None:
            while not over.wait(self._ttl_ms / 3000):
                try:
                    if is_late is not None and is_late():
                        self.give_up()
                        return
                    self.renew()
                except LockLostError:
                    return
                except Error as error:  # the home server could not be reached for now
                    _log.debug("%s", error)

        thread = threading.Thread(target=keep, name="smb-publication", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def write(self, start: int, nbytes: int, source: Any) -> None:
        """Write bytes of the version through the servers, which refuse them once another publisher has the turn."""
        base = self.slot * self._calls.arguments.info.copy_stride_bytes
        self._calls.call(Request(Opcode.WRITE, base + start, nbytes, source, token=self._token))

    def renew(self) -> None:
        """Keep the turn for another ttl. Raises LockLostError."""
        self._calls.paths.homes()[0].ask(self._asked, AskOpcode.RENEW, PUBLISHER_LOCK, (self._token, self._ttl_ms))

    def commit(self, number: int = 0) -> int:
        """Publish the version and return its number. Without `number` this is the next number. A mirror passes the
        number of its source's version, which may be higher.
        """
        return (
            self._calls.paths.homes()[0].ask(self._asked, AskOpcode.PUBLISH, 0, (self._token, self.version, number)).a
        )

    def give_up(self) -> None:
        """Let the next publisher have its turn."""
        with contextlib.suppress(Error):  # the turn ends with its ttl in any case
            self._calls.paths.homes()[0].ask(self._asked, AskOpcode.UNLOCK, PUBLISHER_LOCK, (self._token,))


class Versions:
    """The versions of one buffer.

    A buffer with several slots is changed by publication only, and its home knows which version lies in which slot. A
    buffer with one slot just counts its versions.
    """

    def __init__(self, calls: Dispatcher) -> None:
        self._calls = calls
        self._arguments = calls.arguments

    def find(self, version: int = LATEST) -> tuple[int, int]:
        """Return (latest version, slot of `version`, or -1 if it is not there).

        Reads the home server's memory directly if this process has mapped it, and asks the server otherwise.
        """
        self._calls.session.check_open()
        deadline = Deadline(self._calls.session.timeout)
        while True:
            self._calls.paths.ensure(deadline)
            segment = self._calls.paths.found[0].segment
            latest, slot = (0, -1) if segment is None else segment.find_version(version)
            if segment is None or segment.shared():
                break
            self._calls.paths.look_again()  # the home may have moved and have a later version
        if segment is None:
            words = (0, 0, min(version + 1, LATEST))
            reply = self._calls.paths.homes()[0].ask(
                self._arguments.asked("version"), AskOpcode.AWAIT_VERSION, 0, words
            )
            latest, slot = reply.a, reply.b - 1
        there = slot < self._arguments.info.versions and (version == LATEST or version <= latest)
        return latest, slot if there else -1

    def check_kept(self, call: str) -> None:
        """Raise InvalidArgumentError if the buffer keeps one version only."""
        if self._arguments.info.versions == 1:
            raise InvalidArgumentError(
                f"{self._arguments.asked(call)}: the buffer keeps one version; create it with versions=2"
            )

    def check_number(self, call: str, version: int) -> None:
        """Raise InvalidArgumentError if that is no number of a version."""
        self.check_kept(call)
        if not 0 <= operator.index(version) < 2**56:
            raise InvalidArgumentError(
                f"{self._arguments.asked(call)}: version must be between 0 and 2**56 - 1, not {version}"
            )

    def none_yet(self, call: str) -> NotFoundError:
        """Return the error of a call that needs a version, before the first one."""
        return NotFoundError(
            f"{self._arguments.asked(call)}: nothing is published yet; wait(1) waits for the first version, "
            f"and so does read(timeout=)"
        )

    def await_published(self, version: int | None, timeout: float) -> None:
        """Wait at most `timeout` seconds until there is a version, or the given one. Never raises: the read says what
        is missing.
        """
        with contextlib.suppress(DeadlineError):
            self.wait(max(1, version or 1), timeout)

    def wait(self, version: int, timeout: float | None) -> int:
        """Wait until that version or a later one is published, and return the latest. Raises DeadlineError."""
        asked = self._arguments.asked(f"wait for version {version}")
        if not 0 <= operator.index(version) < 2**63 or (timeout is not None and timeout < 0):
            raise InvalidArgumentError(f"{asked}: version and timeout={timeout!r} must not be negative")
        home = self._calls.paths.homes()[0]
        late = f"not published within {timeout or 0:g} s; nothing was done"
        return home.ask(asked, AskOpcode.AWAIT_VERSION, 0, (version, wait_ms(timeout)), wait=timeout, late=late).a

    def held(self) -> tuple[int, ...]:
        """Return the versions that can be read now, in order. Blocks for one question to the home for each."""
        latest, _ = self.find()
        oldest = max(1, latest - self._arguments.info.versions + 1)
        return tuple(version for version in range(oldest, latest + 1) if self.find(version)[1] >= 0)

    def read(self, offset: int, count: int, sink: Any, wire: int, wanted: int | None = None) -> int:
        """Read elements; see read_ranges."""
        return self.read_ranges([(offset, count, sink)], wire, wanted)

    def read_ranges(self, ranges: Sequence[tuple[int, int, Any]], wire: int, wanted: int | None = None) -> int:
        """Read ranges, (first element, count, sink) each, of the latest version or of the version `wanted`.

        Returns the version to which all elements belong. If nothing has been published yet, reads nothing and returns
        0. Raises NotFoundError if the version `wanted` is not there, and DeadlineError after the client's timeout.

        The elements belong to one version if that version is still in its slot when the read ends. A long read is done
        in blocks. If it takes long, or publishers overwrite its version again and again, the version is pinned, and the
        pin is renewed while bytes arrive.
        """
        started = looked = time.monotonic()
        deadline = Deadline(self._calls.session.timeout, started)
        itemsize = self._arguments.itemsize
        ends = list(accumulate(count for _, count, _ in ranges))
        count = ends[-1] if ends else 0  # elements of all ranges
        if not self._calls.turns.quiet.open and count:
            first = min(offset for offset, length, _ in ranges if length)
            last = max(offset + length for offset, length, _ in ranges if length)
            self._calls.wait_turn(Request(Opcode.READ, first * itemsize, (last - first) * itemsize), deadline)
        home, asked = self._calls.paths.homes()[0], self._arguments.asked("read")
        version, slot = self._find_readable(wanted, deadline)
        if version == 0:
            return 0
        done, lost = 0, 0
        pin: int | None = None
        block = _BLOCK_BYTES // itemsize
        try:
            while True:
                began = time.monotonic()
                if done < count:
                    index = bisect_right(ends, done)
                    offset, size, sink = ranges[index]
                    inside = done - (ends[index] - size)
                    base = self._slot_base(slot) + offset + inside
                    length = self._block(base, size - inside, block)
                    self._read(base, length, memory_at(address_of(sink) + inside * itemsize), wire, deadline.end)
                    done += length
                now = time.monotonic()
                block = max(_BLOCK_MIN, block // 2 if now - began > _LOOK_S else min(4 * block, self._arguments.size))
                if done == count and self.find(version)[1] == slot:
                    break
                if done < count and now - looked < _LOOK_S:
                    continue
                looked = now
                if pin is not None and self._renewed(home, asked, pin):
                    if done < count:
                        continue
                    home.ask(asked, AskOpcode.UNPIN, 0, (pin,))  # a restarted server had forgotten the pin
                    pin = None
                if done == count:
                    lost += 1
                if deadline.left() == 0.0:
                    raise DeadlineError(
                        f"{asked}: not done within {self._calls.session.timeout:g} s, because publishers overwrote "
                        f"each version before it was read; pass a longer timeout= to smb.connect, or let publishers "
                        f"wait longer for readers: {WAIT_FOR_READERS}"
                    )
                if done == count and lost < _LOOKS:
                    version, slot = self._find_readable(wanted, deadline)
                    done, pin = 0, None
                    continue
                # Publishers are faster than this reader: hold them back, for as long as they are willing to wait.
                try:
                    reply = home.ask(asked, AskOpcode.PIN, 0, (0, 0, 0 if wanted is None else wanted + 1))
                except LockLostError:
                    raise self._not_there(version) from None
                pin = reply.b
                if reply.a != version or done == count:
                    done = 0
                version, slot = reply.a, self.find(reply.a)[1]
                if slot < 0:  # a publisher that did not wait has overwritten the version already
                    version, slot = self._find_readable(wanted, deadline)
                    done = 0
        except BaseException:
            if pin is not None:
                home.tell(AskOpcode.UNPIN, (pin,))  # if this fails, the pin ends with its time
            raise
        if pin is not None:
            with contextlib.suppress(Error):  # everything was read, so a failure here does not matter
                home.ask(asked, AskOpcode.UNPIN, 0, (pin,))
        return version

    def _block(self, start: int, left: int, most: int) -> int:
        """Return how many elements to read at once, about `most`. Blocks end at ends of chunks, so that elements are
        rounded as in a single read.
        """
        if left <= most:
            return left
        chunk = self._arguments.info.layout.chunk_bytes // self._arguments.itemsize
        return min(left, max((start + most) // chunk * chunk, (start // chunk + 1) * chunk) - start)

    def _renewed(self, home: Home, asked: str, pin: int) -> bool:
        try:
            home.ask(asked, AskOpcode.PIN, 0, (0, pin))
        except LockLostError:
            return False  # a publisher did not wait any longer
        return True

    def read_slot(self, version: int, offset: int, count: int, sink: Any, wire: int) -> bool:
        """Read from that version's slot. Return False if a publisher has begun to overwrite the version."""
        slot = self.find(version)[1]
        if slot < 0:
            return False
        self._read(self._slot_base(slot) + offset, count, sink, wire)
        return self.find(version)[1] == slot

    def _find_readable(self, wanted: int | None, deadline: Deadline) -> tuple[int, int]:
        """Return a version and its slot: the version `wanted`, else the latest. Raises NotFoundError."""
        while True:
            version, slot = self.find(LATEST if wanted is None else wanted)
            if slot >= 0:
                return version if wanted is None else wanted, slot
            if wanted is not None:
                raise self._not_there(wanted)
            if deadline.left() == 0.0:  # a whole publication passed between two looks at mapped memory
                raise DeadlineError(
                    f"{self._arguments.asked('read')}: publishers overwrote each version before this read had found "
                    f"its slot; publish less often, or create the buffer with a larger versions="
                )

    def _not_there(self, version: int) -> NotFoundError:
        latest, slots = self.find()[0], self._arguments.info.versions
        why = "is not published yet" if version > latest else "was overwritten"
        return NotFoundError(
            f"{self._arguments.asked('read')}: version {version} {why}: the latest is {latest}; a buffer with "
            f"versions={slots} keeps {slots} versions, or {slots - 1} while a publisher writes the next one"
        )

    def begin(self, timeout: float, ttl: float, readers: float) -> Publication:
        """Take the publisher's turn. The arguments are those of Buffer.publish, in seconds."""
        asked, homes = self._arguments.asked("publish"), self._calls.paths.homes()
        turn = self._turn(asked, homes[0], timeout, ttl, readers)
        begun = Publication(self._calls, turn.a, turn.b & _VERSION_MASK, turn.b >> _VERSION_BITS, ttl)
        try:
            raise_fences(homes[1:], PUBLISHER_LOCK, turn.a, asked)
        except BaseException as error:
            begun.give_up()
            self._nothing_done(error)
            raise
        return begun

    def _turn(self, asked: str, home: Home, timeout: float, ttl: float, readers: float) -> Reply:
        """Wait for the publisher's turn. After _SILENT_S a warning says who is in the way."""
        began = time.monotonic()
        which = PUBLISHER_LOCK | self._arguments.info.versions << 8
        patience = min(timeout, _SILENT_S)
        while True:
            passed_s = time.monotonic() - began
            left = max(0.0, patience - passed_s)
            words = (round(1000 * ttl), wait_ms(left), round(1000 * passed_s), wait_ms(readers))
            reply = home.ask_lock(asked, which, words, left)
            if isinstance(reply, Reply):
                return reply
            who = self._in_the_way(reply)
            if patience >= timeout:
                raise DeadlineError(f"{asked}: {who} was in the way for {timeout:g} s; nothing was done")
            most = min(timeout, readers if reply.version else timeout) - patience
            _log.warning("%s: waits for %s; for at most %.0f s more", asked, who, most)
            patience = timeout

    def _in_the_way(self, obstacle: Obstacle) -> str:
        if not obstacle.client:
            return "another publisher or a reader's pin"
        if not obstacle.version:
            return f"the publisher {obstacle.client}"
        return (
            f"the reader {obstacle.client}, which holds version {obstacle.version} (versions="
            f"{self._arguments.info.versions})"
        )

    def take_part(self, turn: tuple[int, int, int, float]) -> Publication:
        """Return another client's publication, given by its `turn`, to write a part of it."""
        return Publication(self._calls, *turn)

    def publish(self, source: Any, timeout: float, ttl: float, readers: float) -> int:
        """Replace all elements and return the new version's number; see Buffer.publish."""
        try:
            begun = self.begin(timeout, ttl, readers)
        except Error:
            raise
        except BaseException as error:  # raised by a signal handler; if this client has the turn, it ends with its ttl
            self._nothing_done(error)
            raise
        try:
            begun.write(0, self._arguments.info.nbytes, source)
        except BaseException as error:
            if not self._calls.unversioned:  # the write has changed only a slot that nobody reads
                self._nothing_done(error)
            begun.give_up()
            raise
        try:
            return begun.commit()
        except Error:
            raise
        except BaseException as error:
            failure: Any = error
            failure.outcome, failure.smb_account = UNKNOWN, Failed(self._calls, range(self._arguments.size))
            raise

    def _nothing_done(self, error: BaseException) -> None:
        failure: Any = error
        failure.outcome, failure.smb_account = NOT_APPLIED, Failed(self._calls, range(self._arguments.size))

    def read_from(self, slot: int, offset: int, count: int, sink: Any) -> None:
        """Read elements of a slot exactly, whichever version the slot holds."""
        self._read(self._slot_base(slot) + offset, count, sink, 0)

    def _slot_base(self, slot: int) -> int:
        """Return the first element of a slot."""
        return slot * self._arguments.info.copy_stride_bytes // self._arguments.dtype.itemsize

    def _read(self, offset: int, count: int, sink: Any, wire: int, until: float | None = None) -> None:
        itemsize = self._arguments.itemsize
        request = Request(Opcode.READ, offset * itemsize, count * itemsize, sink=sink, wire=wire)
        self._calls.call(request, until=until)
