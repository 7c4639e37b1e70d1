"""Workers whose every step leaves its own mark in the model, and a judge of what became of the steps that returned.

Step k of worker u adds 1 to element u * STEPS + k of its values. So the element of the model is above 0 if, and only
if, the contribution that the step went into counted. The judge takes nothing from what a scheme says but `dropped`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import smb
import smb.train
from smb.train import member_table as t

STEPS = 2000  # of one worker, at most
WORKERS = 40  # of one training, over its life
SIZE = STEPS * WORKERS
RETRY_S = 60.0  # for a call while daemons are away
CALL_S = 20.0
DOUBLE = 1e-3  # above 1: by so much rounding may be off


def take_steps(address: str, transport: str, number: int, directory: str, pause_s: float, seed: int) -> None:
    """Join the training "run", and step until DIRECTORY/stop is there. In a process of its own.

    Writes a line for each step that returned into DIRECTORY/NUMBER: its k, and the contributions dropped so far.
    """
    random, never, path = np.random.default_rng([seed, number]), threading.Event(), Path(directory)
    values = np.zeros(SIZE, np.float32)
    with (path / str(number)).open("w", buffering=1) as log:
        client = _repeated(lambda: smb.connect(address, transport=transport, timeout=CALL_S))
        worker: smb.train.Worker = _repeated(lambda: smb.train.join(client, "run", values))
        log.write("joined\n")

        def dropped() -> int:
            return worker.group.member.get(t.DROPPED)

        k = 0
        while k < STEPS and not (path / "stop").exists():
            values[number * STEPS + k] += 1
            _repeated(worker.step)
            log.write(f"{k} {dropped()}\n")
            never.wait(random.random() * pause_s)
            k += 1
        worker.close()
        log.write(f"closed {dropped()}\n")
        client.close()


def _repeated(call: Any) -> Any:
    end = time.monotonic() + RETRY_S
    while True:
        try:
            return call()
        except (smb.UnavailableError, smb.TimeoutError):
            if time.monotonic() > end:
                raise


def faults_of(model: NDArray[np.float32], number: int, log: str, *, killed: bool, may_lose_last: bool) -> Iterator[str]:
    """Say what is wrong with the steps of a worker, from the model at the end and what the worker wrote.

    A contribution is of one step or of several that follow each other, so no more gaps may be missing than were
    dropped. may_lose_last: a worker that was killed may have had steps that it had not sent, as the scheme lets it.
    """
    lines = [line.split() for line in log.splitlines() if line.endswith(tuple("0123456789"))]
    returned = [int(first) for first, *_ in lines if first != "closed"]
    dropped = int(lines[-1][1]) if lines else 0
    own = model[number * STEPS : (number + 1) * STEPS]
    if returned != list(range(len(returned))):
        yield f"worker {number}: its log is torn: {returned}"
    begun = len(returned) + killed  # one may have counted before its step returned
    if own[begun:].any():
        yield f"worker {number}: steps {np.flatnonzero(own[begun:]) + begun} were never made"
    if (own > 1 + DOUBLE).any() or not np.isfinite(own).all():
        yield f"worker {number}: steps {np.flatnonzero(~(own <= 1 + DOUBLE))} count more than once: {own.max()}"
    gaps = gaps_in([bool(own[k] > 0) for k in returned])
    if gaps and killed and may_lose_last and gaps[-1][-1] == len(returned) - 1:
        gaps = gaps[:-1]
    if len(gaps) > dropped:
        yield f"worker {number}: of {len(returned)} steps {gaps} are not in the model, and {dropped} dropped"


def gaps_in(found: Sequence[bool]) -> list[list[int]]:
    """Return the runs of those that are missing."""
    gaps: list[list[int]] = []
    for k, there in enumerate(found):
        if there:
            continue
        if gaps and gaps[-1][-1] == k - 1:
            gaps[-1].append(k)
        else:
            gaps.append([k])
    return gaps


def stop(directory: Path) -> None:
    """Have all workers leave after their step."""
    (directory / "stop").touch()


def log_of(directory: Path, number: int) -> str:
    """Return what a worker has written."""
    path = directory / str(number)
    return path.read_text() if path.exists() else ""
