"""The books of a worker's vector: what was done, what of it is on its way, what counts. Each element counts once.

    base      what the parameters were filled with last, and what was noted since: the difference is to be noted
    due       what was noted and does not count yet, with what rounding has left of earlier contributions
    rest      that alone, where the next contribution is noted before it is known whether this one counts; else in due
    landing   what was read, or came back, and is not taken over yet
    left      runs of `due` that are to be added; failed: those whose call failed, and whose outcome was not asked for
    written   blocks of `due` that count once `count` is called: less what rounding leaves of them

Invariant, for each element: all that was done = what arrived + due (or rest) + (parameters - base).

It is for one thread at a time, and makes no calls but those that it is given. Ctrl-C comes between calls: each step
changes the books in one go, or can be repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from smb.feedback import as_sent

if TYPE_CHECKING:
    from smb.buffer import Buffer

Values: TypeAlias = NDArray[np.float32]

BLOCK_ELEMENTS = 1 << 22  # 16 MiB: a call's fixed costs do not count, and two of them are little beside a model
NOTHING: Values = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Run:
    """`count` elements that follow each other in a process's vector from `here` on, and in the group's from `there`."""

    here: int
    there: int
    count: int

    @property
    def indices(self) -> slice:
        """Where it is in the process's vector."""
        return slice(self.here, self.here + self.count)

    def cut(self) -> Iterator[Run]:
        """Yield its blocks. They end where chunks of the group's buffers do: each is rounded as in a call of all."""
        here, there, end = self.here, self.there, self.there + self.count
        while there < end:
            count = min(end, (there // BLOCK_ELEMENTS + 1) * BLOCK_ELEMENTS) - there
            yield Run(here, there, count)
            here, there = here + count, there + count


class Ledger:
    """See above. Arrays are float32 (n,); one that a way of exchanging does not need is not there.

    Without `due` a contribution is made anew from the base until it counts: what does not count is what was done since.
    """

    def __init__(self, base: Values = NOTHING, due: Values | None = None, rest: Values | None = None) -> None:
        self.base = base
        self.due = due
        self.rest = rest
        self.landing: Values | None = None
        self.left: deque[Run] = deque()
        self.failed: deque[tuple[Run, BaseException]] = deque()
        self.written: deque[tuple[Buffer, Run]] = deque()

    # ---- what was done

    def note(self, begin: int, done: Values) -> Values:
        """Move what was done to the elements from `begin` on to what is due; return what is to be sent of them."""
        if self.due is None:
            return done
        base, due = self.base[begin : begin + done.size], self.due[begin : begin + done.size]
        base += done  # whatever fails from here on, it is counted there
        due += done
        return due

    def noted(self, run: Run, before: Values | None) -> Values:
        """Note what was done to a run where `due` has it already, in place of `before`, which was due (None: 0)."""
        assert self.due is not None
        due, base = self.due[run.indices], self.base[run.indices]
        base += due
        if before is not None:
            due += before
        return due

    def draw(self, begin: int, done: Values, out: Values) -> Values:
        """Put what is to be sent of the elements from `begin` on into `out`, without moving anything: see `keep`."""
        if self.due is None:
            out[:] = done
        else:
            np.add(done, self.due[begin : begin + done.size], out=out)
        return out

    def keep(self, drawn: Values, buffer: Buffer, there: int) -> None:
        """After `draw` of all elements, which were written: keep what rounding has left. Again it changes nothing."""
        if self.due is not None:
            np.subtract(drawn, as_sent(buffer, drawn, there), out=self.due)

    # ---- what is on its way

    @property
    def under_way(self) -> bool:
        """Whether something was to be added that is not known to count, or is not counted yet."""
        return bool(self.left or self.failed or self.written)

    def begin(self, runs: Iterable[Run], buffer: Buffer | None = None) -> None:
        """Have these runs to be added; with a buffer `count` counts them."""
        left, failed = deque(runs), deque[tuple[Run, BaseException]]()
        written = deque[tuple["Buffer", Run]]()
        if buffer is not None:
            written.extend((buffer, block) for run in left for block in run.cut())
        self.left, self.failed, self.written = left, failed, written

    def add(self, add: Callable[[Run], None]) -> None:
        """Add what is left. A run whose call raises is `failed`; the error is raised, and the others stay."""
        while self.left:
            run = self.left[0]
            try:
                add(run)
            except BaseException as error:
                self.failed.append((run, error))
                self.left.popleft()
                raise
            self.left.popleft()

    def ask(self, missed: Callable[[Run, BaseException], list[Run]]) -> None:
        """Find out what the failed calls have missed: that is left. `missed` may raise; call it again then."""
        while self.failed:
            left, failed = deque([*missed(*self.failed[0]), *self.left]), deque([*self.failed][1:])
            self.left, self.failed = left, failed

    def count(self) -> None:
        """All that was written counts: what rounding leaves of it is due. May be called again where it was broken off.

        The blocks go one by one: Ctrl-C in between takes nothing off twice.
        """
        while self.written:
            buffer, run = self.written[-1]
            if self.due is not None:
                due = self.due[run.indices]
                np.subtract(
                    due, as_sent(buffer, due, run.there), out=due if self.rest is None else self.rest[run.indices]
                )
            self.written.pop()

    def forget(self) -> None:
        self.left.clear()
        self.failed.clear()
        self.written.clear()
        for array in (self.due, self.rest):
            if array is not None:
                array[:] = 0

    # ---- what came

    def take_over(self) -> None:
        """Make what landed the base."""
        assert self.landing is not None
        self.base, self.landing = self.landing, None
