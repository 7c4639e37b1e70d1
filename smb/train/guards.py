"""Guards keep a faulty worker from spoiling the shared model: every contribution is checked before it is sent.

The guards are the group's: every member has the same ones. A contribution that is refused is counted, nothing of it is
sent, and the worker's values become the shared model again.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from smb.errors import Error, InvalidArgumentError
from smb.train.scheme import Json, Values, is_number, is_whole

_MEDIAN_OF = 31  # the last so many accepted norms
_MEDIAN_FROM = 8  # fewer say nothing of what is usual
_BLOCK = 1 << 16


class RefusedContributionError(Error):
    """A contribution was not finite, too large or too stale, and was not sent.

    The values are the shared model's again. Go on from there (with a smaller step, or other data), or stop.
    """


@dataclass(frozen=True)
class Guards:
    """Limits of a contribution; None means no limit. NaN and infinity are always refused.

    - `norm_max`: of its Euclidean norm.
    - `norm_factor`: of its norm, as a multiple of the median of this worker's last 31 accepted ones (from the 8th on).
    - `staleness_max`: of its staleness, in the scheme's own unit.
    """

    norm_max: float | None = None
    norm_factor: float | None = 100.0
    staleness_max: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            limit = getattr(self, field.name)
            if limit is not None and not (is_number(limit) and limit >= 0):
                raise InvalidArgumentError(f"guards: {field.name}={limit!r} is no limit; give a number from 0 on")
        if self.staleness_max is not None and not is_whole(self.staleness_max, 0):
            raise InvalidArgumentError(f"guards: staleness_max={self.staleness_max!r} is no whole number")

    def settings(self) -> dict[str, Json]:
        """Return them as JSON."""
        return dataclasses.asdict(self)


class WorkerGuards:
    """The guards at work for one worker."""

    def __init__(self, guards: Guards) -> None:
        self._guards = guards
        self._norms: deque[float] = deque(maxlen=_MEDIAN_OF)

    def check(self, contribution: Norm, staleness: int, *, whole: bool = True) -> float:
        """Return the norm of a contribution; of its parts so far, without `whole`. Raises RefusedContributionError."""
        guards, size = self._guards, math.sqrt(contribution.square)
        if contribution.bad:
            raise RefusedContributionError(
                f"contribution refused: {contribution.bad} of its {contribution.count} values are NaN or infinite; the "
                f"values are the shared model's again; look at the loss and the step size"
            )
        if guards.norm_max is not None and size > guards.norm_max:
            raise RefusedContributionError(
                f"contribution refused: its norm {size:.4g} exceeds norm_max={guards.norm_max:g}"
            )
        if guards.norm_factor is not None and len(self._norms) >= _MEDIAN_FROM:
            usual = statistics.median(self._norms)
            if size > guards.norm_factor * usual > 0:
                raise RefusedContributionError(
                    f"contribution refused: its norm {size:.4g} is more than norm_factor={guards.norm_factor:g} times "
                    f"the usual one of this worker, {usual:.4g}"
                )
        if guards.staleness_max is not None and staleness > guards.staleness_max:
            raise RefusedContributionError(
                f"contribution refused: its staleness {staleness} exceeds staleness_max={guards.staleness_max}"
            )
        if whole:
            self._norms.append(size)
        return size


class Check(Protocol):
    """A look at a contribution before it is sent; raises RefusedContributionError."""

    def __call__(self, contribution: Norm, *, whole: bool) -> None:
        """Look at its parts so far; `whole`: these are all."""


@dataclass
class Norm:
    """The figures that guards check, gathered block by block: the sum of the squares, and the number of values that are
    not finite."""

    count: int = 0
    square: float = 0.0  # of the finite ones
    bad: int = 0

    def join(self, other: Norm) -> None:
        """Take what was gathered elsewhere."""
        self.count += other.count
        self.square += other.square
        self.bad += other.bad

    def add(self, values: Values) -> None:
        """Take one more block of the contribution, float32 (n,)."""
        self.count += values.size
        with np.errstate(over="ignore", invalid="ignore"):
            square: Any = np.dot(values, values)
        if math.isfinite(square):
            self.square += float(square)
            return
        # A value is not finite; or float32 has overflown, as it does from 1.8e19 on.
        for at in range(0, values.size, _BLOCK):
            block = values[at : at + _BLOCK].astype(np.float64)
            finite = np.isfinite(block)
            self.bad += int(np.count_nonzero(~finite))
            block[~finite] = 0.0
            self.square += float(np.dot(block, block))
