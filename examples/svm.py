"""A support vector machine that several processes train in shared buffers, beside scikit-learn's (libsvm).

Run it: python examples/svm.py [cancer | digits | generated] [--workers 1,2,4] [--kill]

A worker needs no number and knows no other worker. Under a lock it takes the rows that violate the optimum most, of
those that nobody else has in hand. Without the lock it computes their kernel values, which is the costly part. Under
the lock it then takes the exact step for the gradient as it is by then, so no worker's step is lost because of another
one's. Rows that no pair can move any more are eliminated (Vishnu et al. 2015), and reconstructed before the end. If a
worker is killed in the middle of a step, its mark stays, and the next worker reconstructs everything from alpha.

libsvm, which is C++ with a cache of kernel values, is faster on one core. This shows how processes share such a state.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import time
from typing import Any

import numpy as np

import smb

TOLERANCE = 1e-3  # half of the gap at which the training ends
BLOCK = 64  # rows of a step
CHECK = 20  # steps between two eliminations
CLAIM = 256  # a claim of rows is over after so many picks: its worker may be dead
STEPS, KERNEL_VALUES, RECONSTRUCTIONS, RECOVERIES = range(4)  # counters
# The state: alpha, f, active and claim of each row, then these words. One buffer, because a fence belongs to one.
UNFINISHED, DONE, EPOCH, PICKS, WORDS = range(5)  # EPOCH: how often rows became active again
Array = Any


def kernel(a: Array, b: Array, gamma: float) -> Array:
    """Return exp(-gamma |a_i - b_j|^2)."""
    square = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2 * (a @ b.T)
    return np.exp(-gamma * np.maximum(square, 0))


def movable(alpha: Array, y: Array, c: float) -> tuple[Array, Array]:
    """Return which rows' y alpha can grow, and which rows' can shrink."""
    low, high = alpha > 1e-9 * c, alpha < c * (1 - 1e-9)
    return np.where(y > 0, high, low), np.where(y > 0, low, high)


def gap(alpha: Array, f: Array, y: Array, c: float) -> tuple[float, float]:
    """Return the least f of rows that can grow, and the largest f of rows that can shrink; equal at the optimum."""
    up, down = movable(alpha, y, c)
    return f[up].min(initial=np.inf), f[down].max(initial=-np.inf)


def solve(alpha: Array, f: Array, y: Array, k: Array, c: float) -> Array:
    """Return alpha of a block after steps of its most violating pairs (SMO, Keerthi et al. 2001)."""
    alpha, f = alpha.copy(), f.copy()
    for _ in range(8 * len(y)):
        up, down = movable(alpha, y, c)
        i, j = int(np.where(up, f, np.inf).argmin()), int(np.where(down, f, -np.inf).argmax())
        if not (up[i] and down[j]) or f[j] - f[i] <= TOLERANCE:
            break
        step = (f[j] - f[i]) / max(2 - 2 * k[i, j], 1e-9)
        step = min(step, c - alpha[i] if y[i] > 0 else alpha[i], alpha[j] if y[j] > 0 else c - alpha[j])
        alpha[i] += y[i] * step
        alpha[j] -= y[j] * step
        f += step * (k[:, i] - k[:, j])
    return np.clip(alpha, 0, c)


class Machine:
    """The shared state, as one worker sees it. Methods that change it need the lock."""

    def __init__(self, client: smb.Client) -> None:
        data, self.state, self.counters = (client.open(f"svm/{name}") for name in ("data", "state", "counters"))
        rows = data.read().astype(np.float64)
        self.x, self.y, self.n, self.settings = rows[:, 1:], rows[:, 0], len(rows), data.metadata
        self.c, self.gamma = self.settings["c"], self.settings["gamma"]
        self.lock = self.state.lock(ttl=5, timeout=120)

    def read(self) -> tuple[Array, Array, Array, Array, Array]:
        """Return alpha, f, active, claims, words."""
        parts = np.split(self.state.read(), self.n * np.arange(1, 5))
        return parts[0], parts[1], parts[2] > 0, parts[3], parts[4]

    def count(self, which: int, by: int = 1) -> int:
        """Return a counter's value after adding to it."""
        return self.counters.fetch_add(which, by) + by

    def word(self, which: int, value: float) -> None:
        """Set one of the words."""
        self.state.write(np.array([value], np.float64), 4 * self.n + which, fence=self.lock)

    def reconstruct(self) -> None:
        """Make f anew from alpha, for eliminated rows or after an unfinished step for all; all become active."""
        alpha, f, active, _, words = self.read()
        if words[UNFINISHED]:
            # Half of a step may break sum(alpha y) = 0: take the excess from the rows that have it.
            excess, side = alpha @ self.y, np.sign(alpha @ self.y)
            part = np.where(self.y == side, alpha, 0)
            alpha -= np.clip(abs(excess) - (np.cumsum(part) - part), 0, part)
            active[:] = False
            self.count(RECOVERIES)
        wanted, support = np.flatnonzero(~active), np.flatnonzero(alpha > 0)
        for some in np.array_split(wanted, len(wanted) // 1024 + 1):
            k = kernel(self.x[some], self.x[support], self.gamma)
            f[some] = k @ (alpha[support] * self.y[support]) - self.y[some]
        self.word(UNFINISHED, 1)  # a kill in the next call is recovered, too
        self.state.write(np.concatenate([alpha, f, np.ones(self.n), np.zeros(self.n)]), 0, fence=self.lock)
        self.word(EPOCH, words[EPOCH] + 1)
        self.word(UNFINISHED, 0)
        self.count(KERNEL_VALUES, len(wanted) * len(support))
        self.count(RECONSTRUCTIONS)

    def pick(self) -> tuple[Array, Array, Array, Array, float] | None:
        """Return rows to move that no one else has claimed, active rows, alpha, f and the epoch; or None at the end."""
        alpha, f, active, claims, words = self.read()
        rows = np.flatnonzero(active)
        least, most = gap(alpha[rows], f[rows], self.y[rows], self.c)
        if words[UNFINISHED] or (most - least <= 2 * TOLERANCE and not active.all()):
            self.reconstruct()
            return self.pick()
        if words[DONE] or most - least <= 2 * TOLERANCE:
            self.word(DONE, 1)
            return None
        up, down = movable(alpha, self.y, self.c)
        free = active & ((claims == 0) | (words[PICKS] - claims > CLAIM))
        ups, downs = np.flatnonzero(free & up & (f < most)), np.flatnonzero(free & down & (f > least))
        ups, downs = ups[f[ups].argsort()[: BLOCK // 2]], downs[(-f[downs]).argsort()[: BLOCK // 2]]
        block = np.union1d(ups, downs)
        if f[downs].max(initial=-np.inf) - f[ups].min(initial=np.inf) <= TOLERANCE:
            block = block[:0]  # others have the partners of these rows: leave these rows to them, too
        now = words[PICKS] + 1
        self.word(PICKS, now)
        self.state.accumulate_sparse(3 * self.n + block, now - claims[block], fence=self.lock)
        return block, rows, alpha, f, words[EPOCH]

    def step(self, block: Array, k: Array, rows: Array, epoch: float, moved: Array, may_die: bool) -> None:
        """Move the rows of `moved` as far as is best now, and give the block back. k: kernel values of rows, moved."""
        alpha, f, active, claims, words = self.read()
        if words[EPOCH] != epoch or words[UNFINISHED] or not len(moved):
            return  # k lacks rows that are active again, or there is nothing to move
        n, y, at = self.n, self.y[moved], np.searchsorted(rows, moved)
        change = (solve(alpha[moved], f[moved], y, k[at], self.c) - alpha[moved]) * active[moved]
        changed_f = k @ (change * y)
        drop = np.zeros(0, np.int64)
        number = self.count(STEPS)
        if self.settings["eliminate"] and number % CHECK == 0:
            alpha[moved] += change
            f[rows] += changed_f
            least, most = gap(alpha[active], f[active], self.y[active], self.c)
            up, down = movable(alpha, self.y, self.c)
            drop = np.flatnonzero(active & ((down & ~up & (f < least)) | (up & ~down & (f > most))))
        places = [moved, n + rows, 2 * n + drop, 3 * n + block]
        values = [change, changed_f, -np.ones(len(drop)), -claims[block]]
        self.word(UNFINISHED, 1)
        if may_die and number > 5:  # --kill: half of a step, then nothing any more
            self.state.accumulate_sparse(moved[::2], change[::2], fence=self.lock)
            os.kill(os.getpid(), signal.SIGKILL)
        self.state.accumulate_sparse(np.concatenate(places), np.concatenate(values), fence=self.lock)
        self.word(UNFINISHED, 0)


def work(address: str, may_die: bool) -> None:
    """Train until the optimum."""
    with smb.connect(address, timeout=120) as client:
        machine = Machine(client)
        ready: tuple[Array, Array, Array, float, Array] | None = None
        while True:
            try:
                with machine.lock:
                    if ready:
                        machine.step(*ready, may_die)
                    picked = machine.pick()
            except smb.LockLostError:  # this process was stopped for long; what it was about to write is refused
                ready = None
                continue
            ready = None
            if picked is None:
                return
            block, rows, alpha, f, epoch = picked
            x, y = machine.x, machine.y
            inner = kernel(x[block], x[block], machine.gamma)
            moved = block[solve(alpha[block], f[block], y[block], inner, machine.c) != alpha[block]]
            if not len(moved):
                time.sleep(0.002)  # until others have moved their rows
            k = kernel(x[rows], x[moved], machine.gamma)
            machine.count(KERNEL_VALUES, len(rows) * len(moved) + len(block) ** 2)
            ready = (block, k, rows, epoch, moved)


def train(x: Array, y: Array, workers: int, eliminate: bool = True, kill: bool = False) -> tuple[Array, Array, float]:
    """Return alpha, the counters, and the seconds."""
    processes = multiprocessing.get_context("spawn")  # a client must not be used on both sides of a fork
    n = len(y)
    settings = {"c": 1.0, "gamma": 1 / x.shape[1], "eliminate": eliminate}
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address, timeout=120) as client:
        client.create("svm/data", (n, 1 + x.shape[1]), "float32", metadata=settings).write(
            np.c_[y, x].astype(np.float32)
        )
        state = client.create("svm/state", 4 * n + WORDS, "float64")
        state.write(np.concatenate([np.zeros(n), -y, np.ones(n), np.zeros(n + WORDS)]))
        counters = client.create("svm/counters", 4, "int64")
        began = time.monotonic()
        started = [processes.Process(target=work, args=(cluster.address, kill and not at)) for at in range(workers)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        killed = [process.exitcode for process in started if process.exitcode]
        if killed != [-signal.SIGKILL] * kill:
            raise RuntimeError(f"workers ended with exit codes {killed}")
        return state.read(count=n), counters.read(), time.monotonic() - began


def objective(alpha: Array, x: Array, y: Array) -> float:
    """Return what the training maximizes."""
    rows = np.flatnonzero(alpha > 0)
    v = alpha[rows] * y[rows]
    return float(alpha.sum() - v @ kernel(x[rows], x[rows], 1 / x.shape[1]) @ v / 2)


def load(name: str) -> tuple[Array, Array]:
    """Return rows, scaled to variance 1 and rounded to float32, and their labels, -1 or 1."""
    from sklearn import datasets
    from sklearn.preprocessing import StandardScaler

    if name == "generated":
        settings = {"n_informative": 8, "n_redundant": 4, "class_sep": 1.6, "flip_y": 0.005, "random_state": 1}
        x, y = datasets.make_classification(20_000, 20, **settings)
    else:
        x, y = (datasets.load_breast_cancer if name == "cancer" else datasets.load_digits)(return_X_y=True)
    return StandardScaler().fit_transform(x).astype(np.float32).astype(np.float64), np.where(y % 2 == 1, 1.0, -1.0)


def main() -> None:
    """Train with each number of workers, with and without elimination, and compare with libsvm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="cancer", choices=("cancer", "digits", "generated"))
    parser.add_argument("--workers", default="1,2", help="numbers of processes, separated by commas")
    parser.add_argument("--kill", action="store_true", help="kill one worker in the middle of a step")
    chosen = parser.parse_args()
    from sklearn.svm import SVC

    x, y = load(chosen.data)
    began = time.monotonic()
    svc = SVC(C=1.0, gamma=1 / x.shape[1], tol=2 * TOLERANCE).fit(x, y)
    took = time.monotonic() - began
    theirs = np.zeros(len(y))
    theirs[svc.support_] = np.abs(svc.dual_coef_[0])
    best = objective(theirs, x, y)
    print(f"libsvm: objective {best:.6f}, {len(svc.support_)} of {len(y)} rows are support vectors, {took:.2f} s")
    for workers in map(int, chosen.workers.split(",")):
        for eliminate in (False, True):
            alpha, counters, took = train(x, y, workers, eliminate, chosen.kill)
            other = len(set(np.flatnonzero(alpha > 0)) ^ set(svc.support_))
            own, switch = objective(alpha, x, y), "on" if eliminate else "off"
            print(
                f"workers {workers}, elimination {switch}: objective {own:.6f}, "
                f"differs by {own / best - 1:+.1e}, {other} other support vectors, "
                f"{counters[KERNEL_VALUES]} kernel values, {counters[STEPS]} steps, "
                f"{counters[RECONSTRUCTIONS]} reconstructions, {counters[RECOVERIES]} recoveries, {took:.1f} s"
            )


if __name__ == "__main__":
    main()
