"""A training process of an experiment that learns digits for real (digits.py): takes a request a line on stdin, as
perf/training/worker.py does.

{"do": "connect", "coordinator": "HOST:PORT", "count": 1}
{"do": "load", "file": FILE.npz}                       the digits
{"do": "join", "name": "NAME", "scheme": "r2sp", "settings": {...}, "seed": N, ...}    and options of smb.train.join
{"do": "train", "start": T, "steps": K, "batch": B, "sample_s": S, "lr": R, "seed": N, "keep": true, "jitter": J}
    from time.monotonic() T on, K times: a step of SGD, on B samples or as many as the scheme says; sleep until S
    seconds for each sample are over (never less than the step took); the scheme's step. With "jitter" a step's S is
    multiplied by a random number of mean 1, log-normal with a sigma of J. With "keep" the model after each is kept.
    -> iterations: [end of computing, end of exchange, samples, staleness]
{"do": "losses"}                                       -> losses: of the models kept, over all training digits; accuracy
{"do": "leave"}
{"do": "delete"}                                       the group that all have left
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

import smb
import smb.train
from perf.scaling.worker import answer_requests
from perf.training.digits import SIZE, Network, Values, flat_images, initial_values
from perf.training.worker import TrainingProcess
from smb.tools.demo.digits import Digits
from smb.train import member_table as table

LEASE_S = 60.0


class DigitsProcess(TrainingProcess):
    """Trains a network for real."""

    def load(self, file: str) -> dict[str, Any]:
        self._digits = Digits.load(Path(file))
        self._images, self._test_images = flat_images(self._digits)
        return {}

    def join(self, name: str, scheme: str, settings: dict[str, Any], seed: int, **options: Any) -> dict[str, Any]:
        self._name = name
        self._values = initial_values(seed)
        self._network = Network(self._values)
        rule = smb.train.SCHEMES[scheme](**settings)
        self._worker = smb.train.join(self._client, name, self._values, rule, lease=LEASE_S, **options)
        self._kept: list[Values] = []
        self._network.step(self._images[:1], self._digits.train_labels[:1], 0.0)  # first touches
        return {}

    def train(
        self,
        start: float,
        steps: int,
        batch: int,
        sample_s: float,
        lr: float,
        seed: int,
        keep: bool,
        jitter: float = 0.0,
    ) -> dict[str, Any]:
        random, labels, member = np.random.default_rng(seed), self._digits.train_labels, self._worker.group.member
        if keep:
            self._kept = list(np.empty((steps, SIZE), np.float32))
        iterations = []
        time.sleep(max(0.0, start - time.monotonic()))
        for step in range(steps):
            began = time.monotonic()
            samples = self._worker.batch_size or batch
            chosen = random.integers(len(labels), size=samples)
            self._network.step(self._images[chosen], labels[chosen], lr * self._worker.gradient_scale)
            spread = random.lognormal(-(jitter**2) / 2, jitter) if jitter else 1.0
            time.sleep(max(0.0, began + samples * sample_s * spread - time.monotonic()))
            computed = time.monotonic()
            self._worker.step(samples=samples)
            iterations.append((computed, time.monotonic(), samples, member.get(table.STALENESS)))
            if keep:
                self._kept[step][:] = self._values
        self._worker.flush()
        return {"iterations": iterations}

    def losses(self) -> dict[str, Any]:
        labels = self._digits.train_labels
        return {
            "losses": [Network(values).loss(self._images, labels) for values in self._kept],
            "accuracy": self._network.accuracy(self._test_images, self._digits.test_labels),
        }

    def leave(self) -> dict[str, Any]:
        self._kept = []
        return super().leave()


if __name__ == "__main__":
    answer_requests(DigitsProcess())
