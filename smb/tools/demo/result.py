"""The result of a run of the demo."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from smb.tools.demo.config import DemoConfig


@dataclass(frozen=True)
class AccuracyPoint:
    """Test accuracy (0 to 1) at a time in seconds since training began, after `samples` samples of all workers."""

    seconds: float
    samples: int
    accuracy: float


@dataclass(frozen=True)
class DemoEvent:
    """An event of a worker, at a time in seconds since training began: joined, killed, done, failed."""

    seconds: float
    worker: str
    what: str


@dataclass(frozen=True)
class WorkerResult:
    """One worker's work, up to its last report before it finished or died."""

    name: str
    status: str
    steps: int
    samples: int
    exchanges: int
    bytes_moved: int
    training_seconds: float
    communication_seconds: float
    rates: tuple[tuple[float, float], ...]
    """(seconds since training began, samples/s since the report before)."""


@dataclass(frozen=True)
class DemoResult:
    """Accuracies are fractions (0 to 1) of the 360 test digits.

    The alone_... numbers are of the process that has one worker's digits. The pooled_... numbers are of the one that
    has everybody's, in the generations of its model that the reader loaded. Without compare they are None.
    """

    config: DemoConfig
    transports: tuple[str, ...]
    parameters: int
    bytes_by_server: dict[str, int]
    accuracy: float
    seconds: float
    samples: int
    curve: tuple[AccuracyPoint, ...]
    events: tuple[DemoEvent, ...]
    workers: tuple[WorkerResult, ...]
    alone_accuracy: float | None = None
    alone_seconds: float | None = None
    alone_samples: int | None = None
    alone_curve: tuple[AccuracyPoint, ...] = ()
    pooled_accuracy: float | None = None
    pooled_seconds: float | None = None
    pooled_samples: int | None = None
    pooled_curve: tuple[AccuracyPoint, ...] = ()
    published: int | None = None
    """Generations that the last process published; pooled_curve has a point for each that the reader loaded."""
    plot: str | None = None
    stopped: bool = False
    """Whether it was interrupted: then this is how far it came."""

    @property
    def passed(self) -> bool:
        """True if the shared model reached the target."""
        return self.accuracy >= self.config.target

    @property
    def samples_per_second(self) -> float:
        """The rate of all workers together."""
        return self.samples / self.seconds

    @property
    def alone_samples_per_second(self) -> float | None:
        """The rate of the process that trains alone."""
        if self.alone_samples is None or not self.alone_seconds:
            return None
        return self.alone_samples / self.alone_seconds

    @property
    def pooled_samples_per_second(self) -> float | None:
        """The rate of the process that has everybody's digits."""
        if self.pooled_samples is None or not self.pooled_seconds:
            return None
        return self.pooled_samples / self.pooled_seconds

    @property
    def conclusion(self) -> str:
        """What was compared, and when sharing does not pay: two sentences. Empty if not all was compared."""
        if self.alone_accuracy is None or self.pooled_accuracy is None:
            return ""
        each, workers = self.config.digits, self.config.workers
        return (
            f"{workers} workers with {each} digits each that no other process had came to {self.accuracy:.1%} "
            f"together, and one process with its own {each} alone to {self.alone_accuracy:.1%}, both with "
            f"{self.samples:,} samples. Sharing does not pay where one process can have all the data: one with the "
            f"{self.config.all_digits} digits of all workers, the late one included, came to "
            f"{self.pooled_accuracy:.1%}, and exchanged nothing."
        )

    @property
    def bytes_moved(self) -> int:
        """Bytes that all workers have sent and received as contributions and models."""
        return sum(worker.bytes_moved for worker in self.workers)

    @property
    def communication_share(self) -> float:
        """Fraction (0 to 1) of the workers' time spent in exchanges, including waits for each other."""
        total = sum(worker.training_seconds for worker in self.workers)
        return sum(worker.communication_seconds for worker in self.workers) / total if total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return everything, including computed numbers, for json.dumps."""
        config = asdict(self.config) | {"settings": self.config.settings, "plot": None}
        computed = {
            "passed": self.passed,
            "samples_per_second": self.samples_per_second,
            "alone_samples_per_second": self.alone_samples_per_second,
            "pooled_samples_per_second": self.pooled_samples_per_second,
            "conclusion": self.conclusion,
            "bytes_moved": self.bytes_moved,
            "communication_share": self.communication_share,
        }
        return asdict(self) | {"config": config} | computed
