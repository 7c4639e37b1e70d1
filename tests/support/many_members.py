"""A process with many members of one training: `python -m tests.support.many_members JSON`.

JSON is an object: address, name, count (of members), scheme, settings of the scheme. It may have wire, lease, change
(what each member adds, if not `change_of` its slot), and point and times of signal_at.

Each line of its input is a number of steps: every member then adds its change to each value and takes a step, that
often, in a thread of its own. Then the process prints how many contributions it has made in all. At the end of the
input all leave.
"""

from __future__ import annotations

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import smb
import smb.train
from smb.train.scheme import Values
from tests.support.training import signal_at

SIZE = 64
LEASE_S = 6.0


def change_of(scheme: str, slot: int) -> int:
    """What a member adds to its values before each step: whole numbers, 1 where a mean would not be whole anyway."""
    return 1 if scheme == "asp" else 1 + slot


def samples_of(slot: int) -> int:
    """A member's samples in a step."""
    return 1 + slot % 3


def main() -> None:
    task: dict[str, Any] = json.loads(sys.argv[1])
    if "point" in task:
        signal_at(task["point"], task["times"], signal.SIGKILL)
    count = int(task["count"])
    with smb.connect(task["address"], timeout=120) as client, ThreadPoolExecutor(count) as threads:
        arrays = [np.zeros(SIZE, np.float32) for _ in range(count)]
        scheme = smb.train.scheme_of(task["scheme"], task["settings"])
        wire = task.get("wire", "exact")
        lease = task.get("lease", LEASE_S)
        workers = [smb.train.join(client, task["name"], values, scheme, lease=lease, wire=wire) for values in arrays]
        slots = [worker.status.slot for worker in workers]
        print(sorted(slots), flush=True)

        def take(values: Values, worker: smb.train.Worker, slot: int, steps: int) -> None:
            for _ in range(steps):
                values += task.get("change", change_of(task["scheme"], slot))
                worker.step(samples=samples_of(slot))

        for line in sys.stdin:
            for each in [
                threads.submit(take, *member, int(line)) for member in zip(arrays, workers, slots, strict=True)
            ]:
                each.result()
            print(sum(worker.contributions for worker in workers), flush=True)
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    main()
