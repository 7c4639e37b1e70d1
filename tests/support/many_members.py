"""A process with many members of one training: `python -m tests.support.many_members ADDRESS NAME COUNT SCHEME`.

Each line of its input is a number of rounds: every member then adds 1 to each value that often, and the process prints
how many contributions it has made in all. At the end of the input all leave.
"""

from __future__ import annotations

import sys

import numpy as np

import smb
import smb.train


def main() -> None:
    address, name, count, scheme = sys.argv[1:]
    with smb.connect(address, timeout=120) as client:
        arrays = [np.zeros(64, np.float32) for _ in range(int(count))]
        workers = [
            smb.train.join(client, name, values, smb.train.scheme_of(scheme, {}), lease=4.0) for values in arrays
        ]
        print(sorted(worker.status.slot for worker in workers), flush=True)
        for line in sys.stdin:
            for _ in range(int(line)):
                for values, worker in zip(arrays, workers, strict=True):
                    values += 1
                    worker.step(samples=1)
            print(sum(worker.contributions for worker in workers), flush=True)
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    main()
