"""Elastic averaging in one process, in numpy: what a trace of the schemes must equal, written as its authors write it.

Each worker is a generator that runs to its next `yield` when it is its turn, so an order of turns is one deterministic
interleaving. Every operation is in float32 and rounds as the schemes' do: traces are equal to the bit. Below: workers
that record what they send and are killed, and the judge of what became of it.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import smb
import smb.train
from smb.config.parse import TRAIN_HOST_VARIABLE
from smb.train.exchange.elastic_force import Elastic
from smb.train.rare import hsgd as hsgd_module

Values = NDArray[np.float32]
Step = Callable[[int, Values], None]  # (worker, values): one local step, in place


@dataclass
class Trace:
    """The shared model, and every worker's values, after each turn."""

    shared: list[Values] = field(default_factory=list)
    local: list[Values] = field(default_factory=list)


def easgd(order: Sequence[int], start: Values, step: Step, alpha: float, every: int) -> Trace:
    """Zhang, Choromanska, LeCun 2015, Algorithm 1 (and 2, where the step has Nesterov's momentum)."""
    shared = start.copy()

    def worker(number: int, x: Values) -> Generator[None]:
        clock = 0
        while True:
            d = np.zeros_like(x)
            if clock > 0 and clock % every == 0:
                d = np.float32(alpha) * (x - shared)
                shared[:] = shared + d
            yield
            step(number, x)
            x -= d
            clock += 1

    return _run(order, start, worker, shared)


def seasgd(order: Sequence[int], start: Values, step: Step, alpha: float, every: int) -> Trace:
    """Ahn and others 2018, with each addition there before the next turn."""
    shared = start.copy()

    def worker(number: int, w: Values) -> Generator[None]:
        clock = 0
        while True:
            yield
            step(number, w)
            clock += 1
            if clock % every == 0:
                d = np.float32(alpha) * (w - shared)
                w -= d
                shared[:] = shared + d

    return _run(order, start, worker, shared)


def _run(
    order: Sequence[int], start: Values, worker: Callable[[int, Values], Generator[None]], shared: Values
) -> Trace:
    local = {number: start.copy() for number in sorted(set(order))}
    workers = {number: worker(number, values) for number, values in local.items()}
    for each in workers.values():
        next(each)
    trace = Trace()
    for number in order:
        next(workers[number])
        trace.shared.append(shared.copy())
        trace.local.append(local[number].copy())
    return trace


def gradient(number: int, at: Values) -> Values:
    """The gradient of worker number's own loss, |a x - b|^2 / 2 with a and b of its own: deterministic, float32."""
    places = np.arange(at.size, dtype=np.float32)
    a = np.float32(0.5) + np.float32(0.125) * ((places + np.float32(number)) % 7)
    b = (places % 5) - np.float32(number)
    return (a * (a * at - b)).astype(np.float32)


def sgd(number: int, values: Values) -> None:
    """One step of plain SGD on it."""
    values -= np.float32(0.05) * gradient(number, values)


def hsgd(
    order: Sequence[int], hosts: Sequence[Sequence[int]], start: Values, step: Step, alpha: float, every: int
) -> Trace:
    """Ahn and others 2018: turns are of hosts, each with its workers in the order of their slots; `local` are the
    hosts' models.
    """
    shared = start.copy()

    def host(number: int, model: Values) -> Generator[None]:
        clock = 0
        workers = hosts[number]
        share = np.float32(1 / len(workers))
        while True:
            yield
            deltas = []
            for worker in workers:
                w = model.copy()
                step(worker, w)
                deltas.append(w - model)
            for delta in deltas:
                model += share * delta
            clock += 1
            if clock % every == 0:
                d = np.float32(alpha) * (model - shared)
                model -= d
                shared[:] = shared + d

    return _run(order, start, host, shared)


# ---- in processes that are killed


def record_sent(note: Callable[[Elastic, Values], None], acknowledged: Callable[[Elastic], None]) -> None:
    """Have every worker of this process tell each difference before it is sent, and each acknowledgement."""
    send, finish = Elastic.send, Elastic.finish

    def noted_send(self: Elastic, samples: int) -> None:
        note(self, self._mover.difference)
        send(self, samples)

    def noted_finish(self: Elastic) -> None:
        sent = self.under_way
        finish(self)
        if sent:
            acknowledged(self)

    Elastic.send, Elastic.finish = noted_send, noted_finish  # type: ignore[method-assign]


def train_and_record(
    messages: Any,
    address: str,
    number: int,
    directory: str,
    host: str = "",
    point: str = "",
    count: int = 1,
    how: int = signal.SIGKILL,
) -> None:
    """Join "run" and train for ever: every step adds number + 1. Keeps what it sends in `directory`; tells "joined",
    then after each step (times it joined again, contributions). With `point` it sends itself a signal when it gets
    there for the count-th time.
    """
    if host:
        os.environ[TRAIN_HOST_VARIABLE] = host
    file, acked = Path(directory, f"sent-{number}"), Path(directory, f"acked-{number}")
    acked.touch()

    def note(_: Elastic, difference: Values) -> None:
        with file.open("ab") as sent:
            sent.write(difference.tobytes())

    def acknowledged(_: Elastic) -> None:
        with acked.open("ab") as one_more:
            one_more.write(b".")

    record_sent(note, acknowledged)
    left = count

    def reach(name: str) -> None:
        nonlocal left
        left -= name == point
        if name == point and left == 0:
            os.kill(os.getpid(), how)

    hsgd_module.failpoint = reach  # type: ignore[assignment]
    with smb.connect(address, transport="auto" if host else "tcp", timeout=30) as client:
        values = np.zeros(client.open("run").size, np.float32)
        worker = smb.train.join(client, "run", values)
        messages.put("joined")
        while True:
            values += number + 1
            worker.step()
            messages.put((worker.status.rejoins, worker.status.contributions))


def recorded(directory: Path, number: int, size: int) -> tuple[list[Values], Values | None]:
    """Return the differences that a killed process knew to be acknowledged, and the one of which it did not know."""
    sent = np.fromfile(directory / f"sent-{number}", np.float32)
    sent = sent[: sent.size // size * size].reshape(-1, size)
    acked = (directory / f"acked-{number}").stat().st_size
    assert acked in (len(sent) - 1, len(sent))
    return list(sent[:acked]), sent[acked] if acked < len(sent) else None


def check_sum(change: Values, acknowledged: Sequence[Values], in_doubt: Sequence[Values], tolerance: float) -> None:
    """Every acknowledged addition changed the shared model once. One of unknown outcome changed each element once or
    not at all.
    """
    rest = change.astype(np.float64)
    for difference in acknowledged:
        rest -= difference
    nearest = np.full(rest.shape, np.inf)
    for chosen in itertools.product((0, 1), repeat=len(in_doubt)):
        parts = sum((c * d.astype(np.float64) for c, d in zip(chosen, in_doubt, strict=True)), np.zeros_like(rest))
        nearest = np.minimum(nearest, np.abs(rest - parts))
    worst = float(nearest.max())
    assert worst <= tolerance, f"{int((nearest > tolerance).sum())} elements are off, by up to {worst:g}"
