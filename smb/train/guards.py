"""Guards keep a faulty worker from spoiling the shared model: every contribution is checked before it is sent.

All members of a group have the same guards. A refused contribution is counted and no part of it is sent, and the
worker's values become the shared model again.
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

_MEDIAN_OF = 31  # number of accepted norms, the latest ones, of which the median is taken
_MEDIAN_FROM = 8  # fewer norms do not show what is usual
_BLOCK = 1 << 16


class RefusedContributionError(Error):
    """A contribution was not finite, too large or too stale, and was not sent.

    The values are the shared model's again. Go on from there (with a smaller step, or other data), or stop.
    """


@dataclass(frozen=True)
class Guards:
    """Limits of a contribution; None means no limit. NaN and infinity are always refused.

    - `norm_max`: limit of its Euclidean norm.
    - `norm_factor`: limit of its norm, as a multiple of the median norm of this worker's last 31 accepted contributions
      (once 8 were accepted).
    - `staleness_max`: limit of its staleness, in the scheme's own unit.

    ```python
    guards = smb.train.Guards(norm_max=10.0)
    worker = smb.train.join(client, "digits", values, smb.train.LocalSGD(every=50), guards=guards)
    worker.close()
    ```
    """

    norm_max: float | None = None
    norm_factor: float | None = 100.0
    staleness_max: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            limit = getattr(self, field.name)
            if limit is not None and not (is_number(limit) and limit >= 0):
                raise InvalidArgumentError(f"guards: {field.name} must be a number from 0 on, not {limit!r}")
        if self.staleness_max is not None and not is_whole(self.staleness_max, 0):
            raise InvalidArgumentError(
                f"guards: staleness_max must be a whole number from 0 on, not {self.staleness_max!r}"
            )

    def settings(self) -> dict[str, Json]:
        """Return the limits as JSON."""
        return dataclasses.asdict(self)


class WorkerGuards:
    """Checks one worker's contributions against the guards."""

    def __init__(self, guards: Guards) -> None:
        self._guards = guards
        self._norms: deque[float] = deque(maxlen=_MEDIAN_OF)

    def check(self, contribution: Norm, staleness: int, *, whole: bool = True) -> float:
        """Return the norm of a contribution, or without `whole` of its parts so far. Raises
        RefusedContributionError.
        """
        guards, size = self._guards, math.sqrt(contribution.square)
        if contribution.bad:
            raise RefusedContributionError(
                f"contribution refused: {contribution.bad} of its {contribution.count} values are NaN or infinite; the "
                f"values are the shared model's again; look at the loss and the step size"
            )
        if guards.norm_max is not None and size > guards.norm_max:
            raise RefusedContributionError(
                f"contribution refused: its norm {size:.4g} exceeds norm_max={guards.norm_max:g}; the worker's values "
                f"are the shared model's again"
            )
        if guards.norm_factor is not None and len(self._norms) >= _MEDIAN_FROM:
            usual = statistics.median(self._norms)
            if size > guards.norm_factor * usual > 0:
                raise RefusedContributionError(
                    f"contribution refused: its norm {size:.4g} is more than norm_factor={guards.norm_factor:g} times "
                    f"this worker's usual norm, {usual:.4g}; the worker's values are the shared model's again"
                )
        if guards.staleness_max is not None and staleness > guards.staleness_max:
            raise RefusedContributionError(
                f"contribution refused: its staleness {staleness} exceeds staleness_max={guards.staleness_max}; the "
                f"worker's values are the shared model's again"
            )
        if whole:
            self._norms.append(size)
        return size


class Check(Protocol):
    """Checks a contribution before it is sent. Raises RefusedContributionError."""

    def __call__(self, contribution: Norm, *, whole: bool) -> None:
        """Check the parts so far; with `whole` they are the whole contribution."""


@dataclass
class Norm:
    """The figures that guards check, summed up block by block."""

    count: int = 0
    square: float = 0.0  # sum of the squares of the finite values
    bad: int = 0

    def join(self, other: Norm) -> None:
        """Add the figures of other blocks."""
        self.count += other.count
        self.square += other.square
        self.bad += other.bad

    def add(self, values: Values) -> None:
        """Add the figures of one more block of the contribution, float32 (n,)."""
        self.count += values.size
        with np.errstate(over="ignore", invalid="ignore"):
            square: Any = np.dot(values, values)
        if math.isfinite(square):
            self.square += float(square)
            return
        # A value is not finite, or the sum has overflowed float32, as it does if a value exceeds 1.8e19.
        for at in range(0, values.size, _BLOCK):
            block = values[at : at + _BLOCK].astype(np.float64)
            finite = np.isfinite(block)
            self.bad += int(np.count_nonzero(~finite))
            block[~finite] = 0.0
            self.square += float(np.dot(block, block))
