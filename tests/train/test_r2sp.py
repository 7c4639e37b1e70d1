"""R2SP: turns go round, one update at a time, whoever is stopped, late, killed, comes or leaves."""

from __future__ import annotations

import itertools
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.train import member_table as t
from smb.train.exchange.mover import ArrayMover
from smb.train.ledger import Run
from smb.train.rare.rotation import gap_s, staleness_max
from tests.support.checkers import BadHistoryError
from tests.support.clients import in_process, make_event
from tests.support.daemons import stop, wait_for
from tests.support.marking_workers import SIZE, drain, in_threads, mark_steps, members
from tests.support.training_judges import Quadratic, Seen, check_own, check_rotation, reference, staleness_of

Connect = Callable[..., smb.Client]
WORKERS = 3


def _clocks(client: smb.Client) -> list[int]:
    return [worker.contributions for worker in members(client)]


def test_golden_trace(client: smb.Client, connect: Connect) -> None:
    """In rotation the shared model and each worker's are those of numpy, bit for bit."""
    seed, size = 12, 100_000
    order = [0, 1, 2] * 8
    task, ours = Quadratic(size, seed), Quadratic(size, seed)
    shared, expected = reference(order, WORKERS, task.start(), task)
    with ExitStack() as stack:
        values = [task.start() for _ in range(WORKERS)]
        workers = [stack.enter_context(smb.train.join(client, "run", values[0], smb.train.R2SP()))]
        workers += [stack.enter_context(smb.train.join(connect(), "run", other)) for other in values[1:]]
        for worker in order:
            ours(worker, values[worker])
            workers[worker].step(samples=8)
        assert np.array_equal(workers[0].shared(), shared), f"seed {seed}"
        for mine, theirs in zip(values, expected, strict=True):
            assert np.array_equal(mine, theirs), f"seed {seed}"


def test_staleness_is_exact(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Processes as fast as they can: every update but the first is exactly WORKERS - 1 others' stale, each one is whole
    before the next begins, and the turns go round in one order.
    """
    client = connect()
    steps = 40
    with ExitStack() as stack:
        running = [
            stack.enter_context(in_process(mark_steps, cluster.address, smb.train.R2SP(), number, WORKERS, steps=steps))
            for number in range(WORKERS)
        ]
        history = [told for _, messages in running for told in drain(messages, 60)]
    # Towards the end those who are done leave, and a rotation is of fewer.
    together = [read for read in history if min(sum(r.clock == read.clock for r in history), WORKERS) == WORKERS]
    complete = steps - 1
    check_rotation([read for read in together if read.clock <= complete], WORKERS)
    assert set(staleness_of([read for read in history if read.clock <= complete])) == {WORKERS - 1}
    assert (client.open("run").read() == steps).all()
    for worker in members(client):
        assert worker.staleness_max == WORKERS - 1


def test_gaps_are_kept(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Updates begin at least a gap apart, and a worker at its turn is woken, not much later."""
    gap = 0.15
    starts: list[tuple[float, int]] = []
    kept = threading.Lock()

    def work(messages: Any, number: int) -> None:
        with smb.connect(cluster.address) as mine:
            values = np.zeros(1000, np.float32)
            with smb.train.join(mine, "run", values, smb.train.R2SP(warmup=10**6)) as worker:
                mine.barrier("all", 2, timeout=30)
                if number == 0:  # as if measured
                    iteration = struct.unpack("<q", struct.pack("<d", 1.2 * 2 * gap))[0]
                    worker.group.table.write(0, t.GROUP_EXTRA + 1, np.array([iteration]))
                mine.barrier("measured", 2, timeout=30)
                for _ in range(8):
                    values += 1
                    worker.step()
                    with kept:
                        starts.append((time.monotonic(), number))

    in_threads([partial(work, number=number) for number in range(2)])
    starts.sort()
    assert [number for _, number in starts[:14]] == [starts[0][1], starts[1][1]] * 7
    apart = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(starts[:15])]
    assert gap_s(1.2 * 2 * gap, 2) == pytest.approx(gap)
    assert min(apart) > 0.8 * gap, apart  # what is recorded is when a step ended
    assert sorted(apart)[len(apart) // 2] < 2 * gap, apart


def test_the_iteration_is_measured_without_waiting(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Worker 0 computes for 10 ms, and waits for another that computes for 60: it tells about 10."""
    client = connect()
    computing = (0.01, 0.06)

    def work(messages: Any, number: int) -> None:
        with smb.connect(cluster.address) as mine:
            values = np.zeros(1000, np.float32)
            if number:
                wait_for(lambda: members(mine), "the first member")
            with smb.train.join(mine, "run", values, smb.train.R2SP(warmup=10)) as worker:
                mine.barrier("all", 2, timeout=30)
                for _ in range(21):
                    threading.Event().wait(computing[number])  # stands for computing
                    values += 1
                    worker.step()

    in_threads([partial(work, number=number) for number in range(2)])
    bits = int(client.open("run/members").read()[0, t.GROUP_EXTRA + 1])
    told = struct.unpack("<d", struct.pack("<q", bits))[0]
    assert 0.01 <= told < 0.05


def test_batches_follow_the_speed(cluster: smb.LocalCluster, connect: Connect) -> None:
    """A worker that is three times as fast takes about three times as many samples, and tells the scale of each."""
    per_sample = (0.0005, 0.0015)
    sizes: dict[int, list[int]] = {0: [], 1: []}

    def work(messages: Any, number: int) -> None:
        with smb.connect(cluster.address) as mine:
            values = np.zeros(1000, np.float32)
            with smb.train.join(mine, "run", values, smb.train.R2SP(batch_size=32)) as worker:
                mine.barrier("all", 2, timeout=30)
                for _ in range(30):
                    size = worker.batch_size
                    assert size is not None
                    assert worker.gradient_scale == pytest.approx(size / 32)
                    sizes[number].append(size)
                    threading.Event().wait(size * per_sample[number])  # stands for computing
                    values += 1
                    worker.step(samples=size)

    in_threads([partial(work, number=number) for number in range(2)])
    assert sizes[0][0] == sizes[1][0] == 32
    assert 42 <= np.median(sizes[0][15:]) <= 52, sizes  # 48
    assert 12 <= np.median(sizes[1][15:]) <= 22, sizes  # 16


def test_without_a_batch_size_it_is_yours(client: smb.Client) -> None:
    with smb.train.join(client, "run", np.zeros(9, np.float32), smb.train.R2SP()) as worker:
        assert worker.batch_size is None
        assert worker.gradient_scale == 1.0


def _halts_in_its_turn(messages: Any, address: str, worker: int, workers: int, after: int, lease: float) -> None:
    """As mark_steps, but at its turn after so many updates it tells so, and hangs."""
    add, sent = ArrayMover._add, []

    def hang(self: ArrayMover, run: Run, *, fetch: bool = False) -> None:
        if len(sent) == after:
            messages.put("in its turn")
            threading.Event().wait()
        sent.append(1)
        add(self, run, fetch=fetch)

    ArrayMover._add = hang  # type: ignore[method-assign]
    mark_steps(messages, address, smb.train.R2SP(), worker, workers, lease=lease)


def test_a_worker_killed_in_its_turn_is_passed_over(cluster: smb.LocalCluster, connect: Connect) -> None:
    """The rotation stands still for its lease at most, and is exact again among those who live."""
    client = connect()
    halt = make_event()
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                in_process(mark_steps, cluster.address, smb.train.R2SP(), number, WORKERS, lease=0.6, halt=halt)
            )
            for number in range(2)
        ]
        victim, told = stack.enter_context(in_process(_halts_in_its_turn, cluster.address, 2, WORKERS, 3, 0.6))
        while told.get(timeout=60) != "in its turn":
            pass
        wait_for(lambda: _turn_taken(client), "the turn that the victim has taken")
        standing = sum(_clocks(client))
        victim.kill()
        wait_for(lambda: sum(_clocks(client)) > standing + 20, "the rotation going on")
        assert [worker.alive for worker in members(client)].count(True) == 2
        halt.set()
        history = [read for _, messages in running for read in drain(messages)]
    check_own(history)
    later = [read for read in history if read.clock > 6]
    last = min(max(r.clock for r in later if r.worker == w) for w in range(2))
    check_rotation([read for read in later if read.clock < last], 2)


def _turn_taken(client: smb.Client) -> bool:
    from smb.train.rare.rotation import Turn

    return Turn.of(int(client.open("run/members").read()[0, t.GROUP_EXTRA])).taken


def test_a_worker_stopped_past_its_lease_comes_back(cluster: smb.LocalCluster, connect: Connect) -> None:
    """The others go on without it; it joins again by itself and the rotation is of all."""
    client = connect()
    halt = make_event()
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                in_process(mark_steps, cluster.address, smb.train.R2SP(), number, 2, lease=0.6, whole=False, halt=halt)
            )
            for number in range(2)
        ]
        for _, messages in running:
            messages.get(timeout=60)
        stopped = running[0][0]
        stop(stopped.pid)
        wait_for(lambda: [w.alive for w in members(client)].count(True) == 1, "the lease being over")
        before = sum(_clocks(client))
        wait_for(lambda: sum(_clocks(client)) > before + 5, "the other going on")
        os.kill(stopped.pid, signal.SIGCONT)

        def back() -> bool:
            workers = members(client)
            return all(w.alive for w in workers) and any(w.rejoins == 1 for w in workers)

        wait_for(back, "its return")
        before = min(_clocks(client))
        wait_for(lambda: min(_clocks(client)) > before + 5, "both going on")
        halt.set()
        _, told = running[1]
        drain(told)


def _living(client: smb.Client) -> list[smb.train.WorkerStatus]:
    """Who is there. A slot may be left free: the lock of a former test's killed member lasts as long as its lease."""
    return [worker for worker in members(client) if worker.alive]


def test_members_come_and_go(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Staleness is that of the members there are: 1 of two, 2 while a third is there, 1 again."""
    client = connect()
    halt = make_event()

    def least() -> int:
        clocks = [worker.contributions for worker in _living(client)]
        return min(clocks) if len(clocks) == 2 else 0

    with ExitStack() as stack:
        for number in range(2):
            stack.enter_context(in_process(mark_steps, cluster.address, smb.train.R2SP(), number, 2, halt=halt))
        wait_for(lambda: least() > 3, "two going round")
        status = _living(client)
        assert [worker.staleness for worker in status] == [1, 1]
        assert [worker.staleness_max for worker in status] == [1, 1]
        values = np.zeros(SIZE, np.float32)
        with smb.train.join(client, "run", values) as third:
            for _ in range(5):
                third.step()
            assert third.status.staleness == 2
        wait_for(lambda: [worker.staleness for worker in _living(client)] == [1, 1], "two again")
        before = least()
        wait_for(lambda: least() > before + 5, "going on")
        halt.set()
        wait_for(lambda: not _living(client), "both leaving")


def _steps(messages: Any, address: str, number: int, steps: int, scheme: smb.train.Scheme, go: Any, late: Any) -> None:
    """Two workers; the second one takes its second step only when `late` is set."""
    with smb.connect(address) as mine:
        values = np.zeros(1000, np.float32)
        with smb.train.join(mine, "run", values, scheme) as worker:
            mine.barrier("all", 2, timeout=30)
            for clock in range(steps):
                if number == 1 and clock == 1:
                    go.set()
                    assert late.wait(30)
                values[number::2] += 1
                worker.step()
                messages.put(Seen(number, clock + 1, (int(values[0]), int(values[1]))))


def test_a_late_worker_is_skipped_within_bounds(cluster: smb.LocalCluster, connect: Connect) -> None:
    """With skip_after its turns are passed on, `skips` in a row; then the other waits for it."""
    client = connect()
    skips, steps = 3, 8
    scheme = smb.train.R2SP(skip_after=0.05, skips=skips)
    go, late = threading.Event(), threading.Event()

    def release(_: object) -> None:
        assert go.wait(30)
        # Its update at the turn before, and one for each turn of the late one's that is passed on, are all there are.
        wait_for(lambda: max(_clocks(client)) >= skips + 1, "the other going on")
        late.set()

    tasks = [partial(_steps, address=cluster.address, number=n, steps=steps, scheme=scheme, go=go, late=late)
             for n in range(2)]  # fmt: skip
    history = in_threads([*tasks, release])
    check_own(history)
    assert max(staleness_of(history)) <= staleness_max(2, skips)
    assert max(staleness_of([read for read in history if read.worker == 1])) >= 2  # it was skipped
    with pytest.raises(BadHistoryError):
        check_rotation(history, 2)


def test_without_skipping_everybody_waits(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Strict rotation: while one is late, however long, nobody has two turns."""
    client = connect()
    go, late = threading.Event(), threading.Event()

    def release(_: object) -> None:
        assert go.wait(30)
        wait_for(lambda: max(_clocks(client)) == 2 or _clocks(client) == [1, 1], "the other at the end of its turn")
        version = client.open("run/tick").version
        with pytest.raises(smb.TimeoutError):  # nobody passes the turn on
            client.open("run/tick").wait(version + 2, timeout=0.5)
        assert max(_clocks(client)) <= 2
        late.set()

    tasks = [partial(_steps, address=cluster.address, number=n, steps=6, scheme=smb.train.R2SP(), go=go, late=late)
             for n in range(2)]  # fmt: skip
    history = in_threads([*tasks, release])
    check_rotation([read for read in history if read.clock < 6], 2)


@pytest.mark.parametrize(
    "settings",
    [{"batch_size": 0}, {"batch_size": 1.5}, {"warmup": 0}, {"skips": 0}, {"skip_after": 0.0}, {"skip_after": -1.0}],
)
def test_settings_that_are_none_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(smb.InvalidArgumentError, match=next(iter(settings))):
        smb.train.R2SP(**settings)
    smb.train.R2SP(batch_size=1, warmup=1, skips=1, skip_after=0.01)


def test_a_refused_contribution_passes_the_turn(client: smb.Client, connect: Connect) -> None:
    first, second = np.zeros(10, np.float32), np.zeros(10, np.float32)
    with (
        smb.train.join(client, "run", first, smb.train.R2SP()) as sick,
        smb.train.join(connect(), "run", second) as healthy,
    ):
        for _ in range(3):
            first[:] = np.inf
            with pytest.raises(smb.train.RefusedContributionError):
                sick.step()
            second += 1
            healthy.step()
        assert (healthy.shared() == 3).all()
        assert (sick.status.refused, sick.status.contributions) == (3, 0)
