"""Schemes: their settings, and one worker's side of an exchange.

A scheme is a frozen dataclass of settings that a whole group shares; all values are JSON values (numbers, strings,
booleans, None). It does no I/O. An Exchange, made by run(), does the work for one worker.

All schemes exchange changes of values, never gradients: delta = values - base, where base is the values that the worker
last took over from the group (as in Petuum's SSP: Ho et al. 2013). So any optimizer may run between two exchanges. For
SGD, with momentum too, the mean of the workers' deltas equals one step on all their samples: the rule is linear in the
gradient.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, cast

from smb.errors import InvalidArgumentError
from smb.train import member_table as t
from smb.train.fragments import Span
from smb.train.member_table import Rows
from smb.train.parameters import Parameters, Values
from smb.train.traits import FUSED, Traits

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.train.group import Group

Json: TypeAlias = Any

__all__ = [
    "SCHEMES",
    "WHOLE_MAX",
    "Exchange",
    "Footprint",
    "Json",
    "Scheme",
    "Span",
    "Values",
    "by_traits",
    "is_number",
    "is_whole",
    "scheme_of",
]

WHOLE_MAX = (1 << 63) - 1  # largest value of a setting that a word of the group's table can hold

SCHEMES: dict[str, type[Scheme]] = {}
"""Every scheme by its name."""


class Exchange(ABC):
    """One worker's side of a scheme. Made by Scheme.run when the worker has joined; then restart() is called.

    Calls come from one thread. Each may raise the errors of the client's calls, MembershipLostError (the Worker joins
    again and makes a new exchange) and RefusedContributionError (the Worker calls restart).
    """

    EACH_STEP: ClassVar[bool] = False  # whether each step is a contribution; then the Worker counts a lost one

    @property
    def batch_size(self) -> int | None:
        """How many samples the next local step should have; None if the scheme leaves that to the user."""
        return None

    @property
    def gradient_scale(self) -> float:
        """The factor for the gradient, or the loss, of the next local step, which follows from its batch_size."""
        return 1.0

    @abstractmethod
    def step(self, samples: int) -> None:
        """Count one local step over this many samples, and exchange when the scheme says so.

        If no exchange is due, the time does not grow with the size of the model.
        """

    @abstractmethod
    def restart(self) -> None:
        """Set the parameters to the shared model, and drop local changes. If this raises, the
        parameters are unchanged.
        """

    def flush(self) -> None:
        """Finish exchanges in the background; afterwards no contribution of this worker is in flight."""
        return

    @property
    def rests_count(self) -> bool:
        """True if contribute_rest contributes to a round that waits for all present members."""
        return False

    def contribute_rest(self) -> int:
        """Contribute the local steps since the last exchange, if the scheme can do so without waiting for others.

        Returns the number of these steps that were not contributed, as far as the scheme counts them.
        """
        return 0

    def close(self) -> None:
        """Flush, and remove this worker's traces. Afterwards the Worker frees its slot."""
        self.flush()

    def abandon(self) -> int:
        """End after a lost membership: work in progress no longer counts, and must not change `values`.

        Returns the number of local steps that are lost, as far as the scheme counts them; a second call returns 0.
        """
        return 0


class Footprint(NamedTuple):
    """How many times a scheme keeps the model's memory on the memory servers: for the group, each worker, each host."""

    group: int = 1
    worker: int = 0
    host: int = 0

    def __str__(self) -> str:
        """Return "5 + 1 for each worker"."""
        per = [f"{n} for each {what}" for n, what in ((self.host, "host"), (self.worker, "worker")) if n]
        return " + ".join([str(self.group), *per])


class Scheme(ABC):
    """A rule of exchange and its settings: a frozen dataclass with a NAME and TRAITS.

    A scheme is one file. Its traits say everything that lists, plans and overlap= need to know of it.
    """

    NAME: ClassVar[str]
    TRAITS: ClassVar[Traits] = Traits(way=FUSED)
    WAITS: ClassVar[bool] = False  # whether each worker waits for the others' contributions
    MEMBERS_MAX: ClassVar[int] = t.SLOTS_MAX  # of a training, at a time

    def __init_subclass__(cls) -> None:
        """Register the scheme under its name."""
        if "NAME" in cls.__dict__:
            SCHEMES[cls.NAME] = cls

    @property
    def traits(self) -> Traits:
        """The traits with these settings."""
        return self.TRAITS

    def settings(self) -> dict[str, Json]:
        """Return the settings as JSON, as they are kept with the group."""
        return dataclasses.asdict(cast(Any, self))

    @classmethod
    def from_settings(cls, settings: dict[str, Json]) -> Scheme:
        """Return the scheme of these settings. Raises InvalidArgumentError."""
        fields = dataclasses.fields(cast(Any, cls))
        takes = f"it takes {', '.join(field.name for field in fields)}" if fields else "it has no settings"
        if foreign := settings.keys() - {field.name for field in fields}:
            raise InvalidArgumentError(f"scheme {cls.NAME!r} has no setting {', '.join(sorted(foreign))}; {takes}")
        needed = {field.name for field in fields if field.default is dataclasses.MISSING}
        if missing := needed - settings.keys():
            raise InvalidArgumentError(
                f"scheme {cls.NAME!r} needs {', '.join(f'{key}=' for key in sorted(missing))}, which has no default"
            )
        return cls(**settings)

    def interval(self) -> int:
        """Return after how many local steps a worker may have something to exchange. The steps between may then be
        reported all at once.
        """
        return 1

    def footprint(self) -> Footprint:
        """Return how many times the scheme keeps the model's memory on the memory servers."""
        return Footprint()

    def check(self, name: str, parameters: Parameters) -> None:  # noqa: B027 - most schemes train whatever there is
        """Raise InvalidArgumentError if a worker with these parameters can't take part in the training `name`."""

    def spans(self, weights: Buffer) -> tuple[Span, ...]:
        """Return the parts of the shared weights that are exchanged at times of their own: round r exchanges part r
        modulo their number. Raises InvalidArgumentError if the weights can't be cut into these parts.
        """
        return (Span(0, weights.size),)

    def first_clock(self, rows: Rows) -> int:
        """Return the clock with which a joiner begins, from the table. It must not hold up other members."""
        return int(rows[0, t.ROUND]) >> t.ROUND_SHIFT

    @abstractmethod
    def run(self, group: Group, parameters: Parameters) -> Exchange:
        """Return this worker's exchange. May create buffers. Does not change the parameters."""


def is_whole(value: object, least: int, most: int = WHOLE_MAX) -> bool:
    """Return True if a setting is a whole number in this range. True and 2.0 do not count, since they are likely
    mistakes.
    """
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> bool:
    """Return True if a setting is a finite number. True does not count."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int that is larger than any float
        return False


def by_traits() -> list[tuple[str, type[Scheme]]]:
    """Return all schemes with their names, in the order of lists: see Traits.sort_key."""
    return sorted(SCHEMES.items(), key=lambda each: each[1].TRAITS.sort_key)


def scheme_of(name: str, settings: dict[str, Json]) -> Scheme:
    """Return the scheme of that name with these settings. Does not block. Raises InvalidArgumentError.

    ```python
    smb.train.scheme_of("localsgd", {"every": 50}).interval()  # 50
    ```
    """
    if name not in SCHEMES:
        raise InvalidArgumentError(f"there is no scheme {name!r}; the schemes are {', '.join(sorted(SCHEMES))}")
    return SCHEMES[name].from_settings(settings)
