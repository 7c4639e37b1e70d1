"""Workers whose updates mark the model (tests/support/training_judges.py), in processes of their own or in threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import smb
import smb.train
from tests.support.training_judges import Seen, mark_of, seen_in

SIZE = 300_000  # several chunks on each of three servers
JOIN_S = 30.0


def mark_steps(
    messages: Any,
    address: str,
    scheme: smb.train.Scheme,
    worker: int,
    workers: int,
    *,
    steps: int = 10**9,
    lease: float = 30.0,
    whole: bool = True,
    halt: Any = None,
) -> None:
    """Join, wait for all others, then take `steps` steps; tell what each was seen to contain, then "done".

    `halt`, an event, ends it before. `whole`: reads must not contain a part of an update. Over TCP: one that is stopped
    over shm may hold a chunk's lock, and what is to be seen is whom the scheme holds up.
    """
    with smb.connect(address, transport="tcp", timeout=30) as client:
        values = np.zeros(SIZE, np.float32)
        mark = mark_of(worker, SIZE, workers)
        with smb.train.join(client, "run", values, scheme, lease=lease) as training:
            client.barrier("all-have-joined", workers, timeout=JOIN_S)
            for clock in range(1, steps + 1):
                values += mark
                training.step(samples=1)
                messages.put(seen_in(values, worker, clock, workers, whole=whole))
                if halt is not None and halt.is_set():
                    break
    messages.put("done")


def in_threads(tasks: list[Callable[[Any], None]]) -> list[Seen]:
    """Run each task(messages) in a thread; return all that they told, by worker. Raises what one of them raised."""
    queues: list[Any] = [queue.Queue() for _ in tasks]
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            tasks[number](queues[number])
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive() or errors, "a worker hangs"
    if errors:
        raise errors[0]
    return [told for found in queues for told in list(found.queue) if isinstance(told, Seen)]


def drain(messages: Any, timeout: float = 30.0) -> list[Seen]:
    """Return all that a process told until it was done."""
    told = []
    while (message := messages.get(timeout=timeout)) != "done":
        told.append(message)
    return told


def waiting(messages: Any) -> list[Seen]:
    """Return what a process has told so far, and nobody has taken; for one that was killed."""
    told = []
    while True:
        try:
            told.append(messages.get(timeout=0.2))
        except queue.Empty:
            return told


def members(client: smb.Client) -> tuple[smb.train.WorkerStatus, ...]:
    """Return who is or was in the group; nobody before it is there."""
    try:
        return smb.train.status(client, "run").workers
    except smb.NotFoundError:
        return ()
