"""The books of a worker's vector: which changes were made, which are on their way, which count. Each element counts
once.

    base      the values with which the parameters were filled last, plus the changes noted since; parameters - base is
              not noted yet
    due       changes that were noted and do not count yet, with what rounding left of earlier contributions
    rest      only what rounding left, if the next contribution is noted before it is known whether this one counts;
              otherwise `due` has it
    landing   values that were read, or came back from an addition, and are not taken over yet
    left      runs of `due` that are still to be added
    failed    runs whose call failed with an unknown outcome
    written   blocks of `due` that count once `count` is called, less what rounding leaves of them

Invariant, for each element: all changes = what arrived + due (or rest) + (parameters - base).

A ledger is used by one thread at a time, and makes no calls except through functions that it is given. Ctrl-C may come
between calls: each step changes the books in one go, or can be repeated.
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

BLOCK_ELEMENTS = 1 << 22  # 16 MiB: a call's fixed costs do not matter, and two blocks are small beside a model
NOTHING: Values = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive elements: from `here` on in a process's vector, from `there` on in the group's."""

    here: int
    there: int
    count: int

    @property
    def indices(self) -> slice:
        """The run's place in the process's vector."""
        return slice(self.here, self.here + self.count)

    def cut(self) -> Iterator[Run]:
        """Yield the run's blocks. They end where chunks of the group's buffers end, so each block is rounded as in a
        call of the whole run.
        """
        here, there, end = self.here, self.there, self.there + self.count
        while there < end:
            count = min(end, (there // BLOCK_ELEMENTS + 1) * BLOCK_ELEMENTS) - there
            yield Run(here, there, count)
            here, there = here + count, there + count


class Ledger:
    """See the module's docstring. Arrays are float32 (n,); arrays that a way of exchanging does not need are empty or
    None.

    Without `due` a contribution is computed from the base again until it counts, so changes that do not count yet are
    still in parameters - base.
    """

    def __init__(self, base: Values = NOTHING, due: Values | None = None, rest: Values | None = None) -> None:
        self.base = base
        self.due = due
        self.rest = rest
        self.landing: Values | None = None
        self.left: deque[Run] = deque()
        self.failed: deque[tuple[Run, BaseException]] = deque()
        self.written: deque[tuple[Buffer, Run]] = deque()

    # ---- changes

    def note(self, begin: int, done: Values) -> Values:
        """Move changes of the elements from `begin` on to `due`. Return what is to be sent for these elements."""
        if self.due is None:
            return done
        base, due = self.base[begin : begin + done.size], self.due[begin : begin + done.size]
        base += done  # whatever fails from here on, the change is noted
        due += done
        return due

    def noted(self, run: Run, before: Values | None) -> Values:
        """Note the changes of a run that `due` has already, in place of `before`, the amount that was due (None: 0)."""
        assert self.due is not None
        due, base = self.due[run.indices], self.base[run.indices]
        base += due
        if before is not None:
            due += before
        return due

    def draw(self, begin: int, done: Values, out: Values) -> Values:
        """Put what is to be sent for the elements from `begin` on into `out`. Moves nothing: see `keep`."""
        if self.due is None:
            out[:] = done
        else:
            np.add(done, self.due[begin : begin + done.size], out=out)
        return out

    def keep(self, drawn: Values, buffer: Buffer, there: int) -> None:
        """After `draw` of all elements, and their write, keep what rounding left. May be repeated without effect."""
        if self.due is not None:
            np.subtract(drawn, as_sent(buffer, drawn, there), out=self.due)

    # ---- sending

    @property
    def under_way(self) -> bool:
        """True if something was to be added that may not have arrived or is not counted yet."""
        return bool(self.left or self.failed or self.written)

    def begin(self, runs: Iterable[Run], buffer: Buffer | None = None) -> None:
        """Register runs to be added. With a buffer, `count` counts them."""
        left, failed = deque(runs), deque[tuple[Run, BaseException]]()
        written = deque[tuple["Buffer", Run]]()
        if buffer is not None:
            written.extend((buffer, block) for run in left for block in run.cut())
        self.left, self.failed, self.written = left, failed, written

    def add(self, add: Callable[[Run], None]) -> None:
        """Add the runs that are left. A run whose call raises moves to `failed`; the error is raised, and the others
        stay.
        """
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
        """Find out which parts of the failed runs did not arrive; they are left again. `missed`
        may raise; then repeat.
        """
        while self.failed:
            left, failed = deque([*missed(*self.failed[0]), *self.left]), deque([*self.failed][1:])
            self.left, self.failed = left, failed

    def count(self) -> None:
        """Count all that was written: what rounding leaves of it becomes due. May be repeated if it was interrupted.

        Blocks are counted one by one, so after Ctrl-C no block is subtracted twice.
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

    # ---- arrived values

    def take_over(self) -> None:
        """Make the values that arrived the base."""
        assert self.landing is not None
        self.base, self.landing = self.landing, None
