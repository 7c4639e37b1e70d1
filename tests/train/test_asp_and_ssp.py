"""ASP and SSP: equal to numpy in a given order; and what every read contains, with workers stopped and killed."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

import smb
import smb.train
from smb.train.member_table import FIELDS, MARK, incarnation_of
from smb.train.member_table import mark as mark_of_member
from tests.support.checkers import BadHistoryError
from tests.support.clients import in_process, make_event
from tests.support.daemons import stop, wait_for
from tests.support.marking_workers import drain, in_threads, mark_steps, members, waiting
from tests.support.training_judges import (
    Quadratic,
    check_bound,
    check_own,
    check_rotation,
    reference,
    seen_in,
    staleness_of,
)

Connect = Callable[..., smb.Client]
WORKERS = 3


def _some_order(seed: int, steps: int, bound: int) -> list[int]:
    """A random order of steps in which nobody is more than `bound` ahead."""
    rng, clocks, order = random.Random(seed), [0] * WORKERS, []
    while len(order) < steps:
        worker = rng.randrange(WORKERS)
        if clocks[worker] + 1 - min(clocks) <= bound:
            clocks[worker] += 1
            order.append(worker)
    return order


@pytest.mark.parametrize("scheme", [smb.train.ASP(), smb.train.SSP(staleness=2)], ids=["asp", "ssp"])
def test_golden_trace(client: smb.Client, connect: Connect, scheme: smb.train.Scheme) -> None:
    """In a given order the shared model and each worker's are those of numpy, bit for bit, with momentum too."""
    seed, size = 11, 100_000
    order = _some_order(seed, 30, 2)
    task, ours = Quadratic(size, seed), Quadratic(size, seed)
    shared, expected = reference(order, WORKERS, task.start(), task)
    with ExitStack() as stack:
        values = [task.start() for _ in range(WORKERS)]
        workers = [stack.enter_context(smb.train.join(client, "run", values[0], scheme))]
        workers += [stack.enter_context(smb.train.join(connect(), "run", other)) for other in values[1:]]
        for worker in order:
            ours(worker, values[worker])
            workers[worker].step(samples=8)
        assert np.array_equal(workers[0].shared(), shared), f"seed {seed}, order {order}"
        for mine, theirs in zip(values, expected, strict=True):
            assert np.array_equal(mine, theirs), f"seed {seed}, order {order}"
        assert not np.array_equal(values[0], values[1])  # each as of its own last step


def test_bytes_are_counted_as_they_travel(client: smb.Client) -> None:
    """Deltas take the wire's bytes, the sums that come back are exact."""
    values = np.zeros(10_000, np.float32)
    with smb.train.join(client, "run", values, smb.train.ASP(), wire="bfloat16") as worker:
        for _ in range(3):
            values += 1
            worker.step()
        (status,) = smb.train.status(client, "run").workers
    assert status.bytes == 3 * (2 + 4) * values.size


def test_asp_loses_nothing(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Three that never wait: every update is in the model once, and nobody sees another's disappear."""
    client = connect()
    steps = 40
    tasks = [
        partial(mark_steps, address=cluster.address, scheme=smb.train.ASP(), worker=number, workers=WORKERS,
                steps=steps, whole=False)
        for number in range(WORKERS)
    ]  # fmt: skip
    history = in_threads(tasks)
    check_own(history)
    assert len(history) == WORKERS * steps
    shared = client.open("run").read()
    assert (shared == steps).all()
    status = smb.train.status(client, "run")
    assert [worker.contributions for worker in status.workers] == [steps] * WORKERS
    assert max(worker.staleness_max for worker in status.workers) >= 1
    assert max(staleness_of(history)) >= 1


def test_asp_refuses_what_is_too_stale(client: smb.Client, connect: Connect) -> None:
    """The guards' bound holds for a scheme that has none of its own."""
    first, second = np.zeros(10, np.float32), np.zeros(10, np.float32)
    guards = smb.train.Guards(staleness_max=2)
    with (
        smb.train.join(client, "run", first, smb.train.ASP(), guards=guards) as fast,
        smb.train.join(connect(), "run", second) as slow,
    ):
        for _ in range(2):
            first += 1
            fast.step()
        second += 1
        slow.step()  # two of the other's since it read: as many as may be
        assert slow.status.staleness == 2
        for _ in range(3):
            first += 1
            fast.step()
        second += 1
        with pytest.raises(smb.train.RefusedContributionError, match="staleness 3"):
            slow.step()
        assert (second == 6).all()  # the shared model, without what was refused
        second += 1
        slow.step()
        assert (second == 7).all()
        assert (slow.status.contributions, slow.status.refused) == (2, 1)


@pytest.mark.parametrize("bound", [0, 2])
def test_ssp_bound_holds_with_a_stopped_worker(cluster: smb.LocalCluster, connect: Connect, bound: int) -> None:
    """While one worker is stopped the others come to the bound and wait there; no read ever contains less than the
    bound says, and reads come as close to it as they may.
    """
    client = connect()
    halt, scheme = make_event(), smb.train.SSP(staleness=bound)
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                in_process(mark_steps, cluster.address, scheme, number, WORKERS, whole=False, halt=halt)
            )
            for number in range(WORKERS)
        ]
        first = [messages.get(timeout=60) for _, messages in running]
        stopped = running[0][0]
        stop(stopped.pid)

        def clocks() -> list[int]:
            """The stopped one's first."""
            return [w.clock for w in sorted(members(client), key=lambda w: w.pid != stopped.pid)]

        # Whoever waits has told one clock more than it may read at.
        wait_for(lambda: min(clocks()[1:]) == max(clocks()[1:]) == clocks()[0] + bound + 1, "the others at the bound")
        held = clocks()
        assert [told.worker for told in first] == list(range(WORKERS))
        os.kill(stopped.pid, signal.SIGCONT)
        wait_for(lambda: min(clocks()) > max(held) + 5, "all going on")
        halt.set()
        history = first + [told for _, messages in running for told in drain(messages)]
    left = {worker: max(read.clock for read in history if read.worker == worker) for worker in range(WORKERS)}
    check_bound(history, bound, left)
    if bound:
        with pytest.raises(BadHistoryError, match="bound is"):
            check_bound(history, bound - 1, left)  # the judge would have seen it
    if bound == 0:  # lock-step
        for read in history:
            assert max(read.seen) <= read.clock + 1


def test_ssp_goes_on_without_the_dead(cluster: smb.LocalCluster, connect: Connect) -> None:
    """A worker that is killed holds up the others for its lease at most; a newcomer holds up nobody."""
    client = connect()
    halt, scheme = make_event(), smb.train.SSP(staleness=1)
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                in_process(mark_steps, cluster.address, scheme, number, 2, whole=False, lease=0.5, halt=halt)
            )
            for number in range(2)
        ]
        for _, messages in running:
            messages.get(timeout=60)
        killed = running[0][0]
        killed.kill()

        def clock() -> int:
            return next(worker.clock for worker in members(client) if worker.pid != killed.pid)

        before = clock()
        wait_for(lambda: clock() > before + 10, "the other going on")
        assert {worker.pid: worker.alive for worker in members(client)}[killed.pid] is False
        with smb.train.join(client, "run", np.zeros(client.open("run").size, np.float32)) as late:
            assert late.status.clock >= before
            halt.set()
            late.step()
        drain(running[1][1])
        waiting(running[0][1])


def test_ssp_tells_no_clock_in_anothers_slot(client: smb.Client) -> None:
    """Who was stopped after the look at its lease finds another member's mark in its place: so it joins again."""
    values = np.zeros(8, np.float32)
    with smb.train.join(client, "run", values, smb.train.SSP(staleness=1)) as worker:
        values += 1
        worker.step()
        table, row = client.open("run/members"), 1  # the first slot's
        mark = int(table.read()[row, MARK])
        another = mark_of_member(incarnation_of(mark) + 1, 7)
        assert table.compare_swap(row * FIELDS + MARK, mark, another) == mark
        values += 1
        worker.step()
        assert worker.status.rejoins == 1


def test_ssp_refused_contributions_hold_up_nobody(client: smb.Client, connect: Connect) -> None:
    """One whose loss exploded keeps step with the others; nothing of it is in the model."""
    good, bad = np.zeros(10, np.float32), np.zeros(10, np.float32)
    with (
        smb.train.join(client, "run", good, smb.train.SSP(staleness=0)) as healthy,
        smb.train.join(connect(), "run", bad) as sick,
    ):

        def explode(_: object) -> None:
            for _ in range(5):
                bad[:] = np.nan
                with pytest.raises(smb.train.RefusedContributionError, match="NaN"):
                    sick.step()
                assert np.isfinite(bad).all()

        def go_on(_: object) -> None:
            for _ in range(5):
                good[:] += 1
                healthy.step()

        in_threads([explode, go_on])
        assert (healthy.shared() == 5).all()
        assert sick.status.refused == 5


@pytest.mark.parametrize(
    "scheme", [smb.train.ASP(), smb.train.SSP(staleness=1), smb.train.R2SP()], ids=["asp", "ssp", "r2sp"]
)
def test_killed_servers_lose_nothing(scheme: smb.train.Scheme) -> None:
    """Memory servers are killed and started again under three workers: every update is in the model once, and what the
    scheme promises of staleness holds all the while.
    """
    halt = threading.Event()
    with smb.LocalCluster(servers=2, capacity="64MiB") as own, smb.connect(own.address, timeout=30) as client:

        def steps() -> list[int]:
            return [worker.contributions for worker in members(client)]

        def kill(_: object) -> None:
            for server in [*own.servers, own.servers[0]]:
                before = min(steps(), default=0)
                wait_for(lambda before=before: len(steps()) == WORKERS and min(steps()) > before + 2, "steps")  # type: ignore[misc]
                server.kill()
                server.start()
            before = min(steps())
            wait_for(lambda: min(steps()) > before + 2, "steps after the last kill")
            halt.set()

        workers = [
            partial(mark_steps, address=own.address, scheme=scheme, worker=number, workers=WORKERS, halt=halt,
                    whole=isinstance(scheme, smb.train.R2SP))
            for number in range(WORKERS)
        ]  # fmt: skip
        history = in_threads([*workers, kill])
        check_own(history)
        left = {worker: max(read.clock for read in history if read.worker == worker) for worker in range(WORKERS)}
        found = seen_in(client.open("run").read(), 0, left[0], WORKERS)
        assert found.seen == tuple(left.values())
        if isinstance(scheme, smb.train.SSP):
            check_bound(history, 1, left)
        if isinstance(scheme, smb.train.R2SP):
            together = min(left.values())
            check_rotation([read for read in history if read.clock < together], WORKERS)
