"""Settings of a run of the demo, and of each of its processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smb.errors import InvalidArgumentError
from smb.tools.demo.digits import TRAIN_COUNT
from smb.tools.demo.recipes import Recipe, recipe
from smb.train import scheme_of

TRANSPORTS = ("auto", "shm", "tcp")
# Small enough to spread the short form's 150 KiB of parameters over a few servers.
STRIPE_BYTES = 16 * 1024
SHORT_HIDDEN, SHORT_RATE = 64, 1.0
# How long a killed worker may delay the others, in schemes that wait.
LEASE_S = 1.5
# Workers claim samples in portions of this many batches.
PORTION_BATCHES = 4


@dataclass(frozen=True)
class DemoConfig:
    """One run of the demo. The defaults take less than a minute on two cores; `short()` is for tests.

    `scheme` is the name of one of smb.train's schemes; `options` override the demo's settings of it (recipes.py).
    `digits` is the number of training digits that each worker has and no other one; `workers` and one more, which joins
    late, have their own, out of TRAIN_COUNT. `hidden` is the size of the network's largest layer (512: 272,586
    parameters). `rate` is a factor of the learning rate. `epochs` counts passes over all these digits, all workers
    together. `kill_at` and `join_at` are the fractions (0 to 1) of them after which one worker is killed and another
    one joins. Unless `compare` is False, one process alone then trains the same number of samples with its own digits,
    and another one with everybody's: this one publishes its model, and a reader follows. `plot` is the picture's path,
    or None.

    Raises InvalidArgumentError for invalid values, and names the valid ones.
    """

    scheme: str = "seasgd"
    transport: str = "auto"
    workers: int = 4
    servers: int = 2
    digits: int = 40
    epochs: float = 200.0
    hidden: int = 512
    rate: float = 1.0
    seed: int = 0
    batch_size: int = 32
    target: float = 0.85
    kill_at: float = 0.2
    join_at: float = 0.32
    compare: bool = True
    plot: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise InvalidArgumentError(f"unknown transport {self.transport!r}; known are {', '.join(TRANSPORTS)}")
        if self.workers < 2:
            raise InvalidArgumentError(
                f"workers must be at least 2, since the demo kills one of them, not {self.workers}"
            )
        for name in ("servers", "digits", "epochs", "hidden", "rate", "batch_size"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(f"{name} must be more than 0, not {getattr(self, name)}")
        if self.all_digits > TRAIN_COUNT:
            raise InvalidArgumentError(
                f"{self.workers} workers and one that joins late can have {TRAIN_COUNT // (self.workers + 1)} digits "
                f"each, of {TRAIN_COUNT}, not {self.digits}"
            )
        for name in ("target", "kill_at", "join_at"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidArgumentError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        scheme_of(self.scheme, self.settings)

    @classmethod
    def short(cls, scheme: str = "seasgd", *, transport: str = "auto", seed: int = 0) -> DemoConfig:
        """Return a run of a few seconds that still learns, dies and joins: two workers, no comparison, no plot."""
        small: dict[str, Any] = {"hidden": SHORT_HIDDEN, "rate": SHORT_RATE, "kill_at": 0.5, "join_at": 0.6}
        return cls(
            scheme, transport, workers=2, digits=400, epochs=24.0, seed=seed, target=0.90, compare=False, **small
        )

    @property
    def all_digits(self) -> int:
        """The number of digits that all workers have, the late one included."""
        return self.digits * (self.workers + 1)

    @property
    def recipe(self) -> Recipe:
        """The demo's recipe for the scheme."""
        return recipe(self.scheme)

    @property
    def settings(self) -> dict[str, Any]:
        """The scheme's settings: the demo's, overridden by the options."""
        return {**self.recipe.settings_for(self.workers), **self.options}


@dataclass(frozen=True)
class WorkerTask:
    """Settings of one training process. Sent as JSON on its command line.

    `work` is what it does: "share", "alone" (shares nothing), "publish" (trains alone and publishes its model under
    `group`) or "read" (follows that). `digits` is the file with the digits that it trains and tests with. `samples`
    counts the samples of all workers together. `learning_rate` is a factor of the trainer's. `host` is the name of the
    host to pretend to be on ("": the real one). Once `waits_from` samples are claimed, the process waits to be killed:
    a short training could be over before the parent looks.
    """

    name: str
    work: str
    digits: str
    network_seed: int
    order_seed: int
    batch_size: int
    samples: int
    coordinator: str | None = None
    transport: str = "auto"
    group: str = ""
    claimed: str = ""
    servers: int = 1
    scheme: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    hidden: int = SHORT_HIDDEN
    stripe: int | None = None
    learning_rate: float = 1.0
    nesterov: bool = False
    host: str = ""
    waits_from: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> WorkerTask:
        """Parse the result of to_json()."""
        return cls(**json.loads(line))
