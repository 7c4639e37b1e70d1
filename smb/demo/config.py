"""What can be chosen about a run of the demo, and what each process is told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from smb.errors import InvalidArgumentError

SCHEMES = ("seasgd",)
TRANSPORTS = ("auto", "shm", "tcp")
# Small enough that the 150 KiB of parameters lie on all of a few servers.
STRIPE_BYTES = 16 * 1024
# The moving rate is shared out among the workers; their sum stays below 1, or the shared model would overshoot.
MOVING_RATE_SUM = 0.8


@dataclass(frozen=True)
class DemoConfig:
    """One run of the demo. The defaults take about 40 s on two cores; `short()` is for tests.

    epochs counts passes over the training digits, all workers together. kill_at and join_at are shares (0 to 1) of them
    after which one worker is killed and another one joins; the process alone then trains the same number of samples,
    unless compare is False. tau is the number of batches between two exchanges with the shared model. plot None: none.

    Raises InvalidArgumentError where a value can't be meant, and names what can.
    """

    scheme: str = "seasgd"
    transport: str = "auto"
    workers: int = 4
    servers: int = 2
    epochs: float = 200.0
    seed: int = 0
    batch_size: int = 32
    tau: int = 4
    target: float = 0.97
    kill_at: float = 0.5
    join_at: float = 0.6
    compare: bool = True
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise InvalidArgumentError(f"scheme {self.scheme!r} is not there yet; there is: {', '.join(SCHEMES)}")
        if self.transport not in TRANSPORTS:
            raise InvalidArgumentError(f"transport {self.transport!r} is unknown; there are: {', '.join(TRANSPORTS)}")
        if self.workers < 2:
            raise InvalidArgumentError(f"workers={self.workers}: one is killed half-way, so the demo takes 2 or more")
        for name in ("servers", "epochs", "batch_size", "tau"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: must be more than 0")
        for name in ("target", "kill_at", "join_at"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: must be between 0 and 1")

    @classmethod
    def short(cls, *, transport: str = "auto", seed: int = 0) -> DemoConfig:
        """Return a run of a few seconds that still learns, dies and joins: three workers, no comparison, no plot."""
        return cls(transport=transport, seed=seed, workers=3, epochs=50.0, target=0.95, compare=False)

    @property
    def alpha(self) -> float:
        """The moving rate of elastic averaging: which share of the difference worker and shared model give up."""
        return MOVING_RATE_SUM / self.workers


@dataclass(frozen=True)
class WorkerTask:
    """What one training process needs to know. Travels as JSON on its command line.

    coordinator None: train alone, sharing nothing. samples counts those of all workers together.
    """

    name: str
    digits: str
    network_seed: int
    order_seed: int
    batch_size: int
    samples: int
    coordinator: str | None = None
    transport: str = "auto"
    weights: str = ""
    claimed: str = ""
    tau: int = 1
    alpha: float = 0.0

    def to_json(self) -> str:
        """Return the task as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> WorkerTask:
        """Return what to_json() was called on."""
        return cls(**json.loads(line))
