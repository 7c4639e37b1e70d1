"""Groups of workers, at moments that review found to be wrong: each test is one of them."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.config.parse import TRAIN_HOST_VARIABLE
from smb.train import ASP, BSP, HSGD, SEASGD, SSP, DiLoCo, LocalSGD, WorkUnits, members
from smb.train import group as groups
from smb.train import member_table as t
from smb.train.scheme import Values
from tests.conftest import Connect
from tests.support.clients import in_process
from tests.support.daemons import wait_for
from tests.support.training import (
    DEADLINE_S,
    Crew,
    delta_of,
    local_step,
    mean_round,
    signal_at,
    start,
    take_part,
    together,
    waiting,
)

SIZE = 1000
LEASE_S = 0.5


def _ones(count: int = SIZE) -> Values:
    return np.ones(count, np.float32)


def _unavailable(*_: Any, **__: Any) -> Any:
    raise smb.UnavailableError("the server is away")


def test_a_step_is_taken_once_if_its_event_cannot_be_completed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read for an event's round raised out of step(), after the exchange; the caller's second call was a second
    step.
    """
    events: list[smb.train.ExchangeEvent] = []
    with smb.train.join(connect(), "run", _ones(), BSP()) as worker:
        worker.on_exchange(events.append)
        worker.step()
        with monkeypatch.context() as patch:
            patch.setattr(t.Table, "read", _unavailable)
            worker._listeners.tell(7, 0.5)
        worker.step()
        assert worker.contributions == 2
    assert [(event.step, event.round, event.members) for event in events] == [(1, 1, 1), (1, 1, 1), (2, 2, 1)]


def test_a_read_that_a_round_overtakes_is_of_one_round(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader had the old weights in the first half, and the new ones, which were just being copied, in the second."""
    client = connect()
    with smb.train.join(client, "run", _ones(), BSP()):
        group = groups.view(client, "run")
        old, new = group.table.get(0, t.ROUND), np.full(SIZE, 2, np.float32)
        read = group.weights.read

        def overtaken(out: Values, wire: str) -> None:
            read(out=out)
            if group.table.swap(0, t.ROUND, old, old | groups.BUILT) == old:
                group.weights.write(new[: SIZE // 2], SIZE // 2)
                read(SIZE // 2, out=out[SIZE // 2 :])

        def commit() -> bool:
            group.weights.write(new)
            group.table.swap(0, t.ROUND, old | groups.BUILT, 1 << t.ROUND_SHIFT)
            return True

        monkeypatch.setattr(group.weights, "read", overtaken, raising=False)
        monkeypatch.setattr(group, "wait", commit)
        values = np.zeros(SIZE, np.float32)
        assert group.read(values) == 1
        assert (values == 2).all()


def _step_alone(messages: Any, address: str, point: str) -> None:
    signal_at(point, 1, signal.SIGKILL)
    with smb.connect(address) as client:
        values = _ones()
        worker = smb.train.join(client, "run", values, DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0), lease=LEASE_S)
        values += 1
        worker.step()


@pytest.mark.parametrize("point", ["train-computed", "train-built", "train-copied"])
@pytest.mark.parametrize("joins", [True, False])
def test_the_only_member_is_killed_while_it_closes(
    cluster: smb.LocalCluster, connect: Connect, point: str, joins: bool
) -> None:
    """Who joined afterwards waited without end for the new weights, and shared() failed, as there was nobody left to
    put them in place."""
    with in_process(_step_alone, cluster.address, point) as (process, _):
        process.join(DEADLINE_S)
        assert process.exitcode == -signal.SIGKILL
    client, values = connect(), np.zeros(SIZE, np.float32)
    if joins:
        with waiting(lambda: smb.train.join(client, "run", values)) as result:
            worker = result()
        values_then = values.copy()
        worker.step()
        worker.close()
        values = values_then
    else:
        with waiting(lambda: smb.train.shared(client, "run")) as result:
            values = result()
    assert (values == (1 if point == "train-computed" else 2)).all()


def test_who_leaves_while_a_server_is_away_is_not_waited_for(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock was renewed for as long as its process lived, so the others took it for alive."""
    values = [_ones(), _ones()]
    first, second = (smb.train.join(connect(), "run", own, BSP(), lease=LEASE_S) for own in values)
    with monkeypatch.context() as away:
        away.setattr(first.group.member._table, "swap", _unavailable)
        first.close()  # best effort
    with waiting(second.step):
        pass
    second.close()


@pytest.mark.parametrize("what", ["admit", "read"])
def test_joining_again_is_tried_again(connect: Connect, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A worker that lost its lease, and could not join again as a server was away, never could."""
    values = _ones()
    with smb.train.join(connect(), "run", values, ASP(), lease=LEASE_S) as worker:
        lock = worker.group.member._lock
        lock.lose(lock.token)
        values += 5
        with monkeypatch.context() as away:
            away.setattr(members if what == "admit" else worker.group.weights, what, _unavailable, raising=False)
            for _ in range(2):
                with pytest.raises(smb.UnavailableError, match="away"):
                    worker.step()
        worker.step()
        assert (values == 1).all()
        values += 1
        worker.step()
        assert (worker.shared() == 2).all()
        assert worker.status.alive


def test_who_was_stopped_on_the_way_into_a_slot_leaves_it_alone(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lost the slot's lock; when it went on it put itself in the place of the one who had got the slot since."""
    client, other = connect(), connect()
    first = smb.train.join(connect(), "stopped", _ones(), ASP(), lease=LEASE_S)  # keeps its slot: its client goes on
    found: list[smb.train.Worker] = []

    def is_free() -> bool:
        try:
            members.lock_of(other, "stopped", 1, LEASE_S, 1).acquire().release()
        except smb.TimeoutError:
            return False
        return True

    class Stopped(t.Table):
        def add(self, row: int, column: int, value: int) -> int:
            if not found:
                client._session.renewals.close()  # as in a stopped process
                wait_for(is_free, "the end of the lease")
                found.append(smb.train.join(other, "stopped", _ones()))
            return super().add(row, column, value)

    table = Stopped(first.group.table.buffer)
    member = members.admit(client, "stopped", table, LEASE_S, lambda _: 0)
    assert found[0].status.slot == 1
    assert found[0].status.alive
    found[0].step()
    assert found[0].status.rejoins == 0
    assert member.slot == 2
    member.leave()
    found[0].close()
    first.close()


def test_who_was_missed_steps_aside(connect: Connect) -> None:
    """A worker whose slot was another's by then, and had something to tell, failed on the way out."""
    with smb.train.join(connect(), "run", _ones(), SSP()) as worker:
        member = worker.group.member
        worker.group.table.swap(member.row, t.MARK, member.mark, t.mark(member.incarnation + 1, 0))
        worker.exchange._clock += 1  # type: ignore[attr-defined]
        with worker.aside():
            pass
        worker.step()
        assert worker.status.alive


def test_a_claim_whose_answer_was_lost(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit was the worker's without its knowing: it waited for itself without end."""
    with WorkUnits(connect(), "units", 5, 1, epochs=1, lease=LEASE_S) as units:
        swap = units._words.compare_swap

        def answer_lost(*words: int) -> int:
            swap(*words)
            raise smb.UnavailableError("outcome unknown")

        with monkeypatch.context() as away:
            away.setattr(units._words, "compare_swap", answer_lost, raising=False)
            with pytest.raises(smb.UnavailableError):
                units.take()
        with waiting(lambda: [unit.start for unit in units]) as result:
            assert sorted(result()) == list(range(5))


def test_workers_that_come_back_at_once_revive_their_host(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each took the other for one that had been there all the time, and the host went on from its old model. They join
    one after the other now.
    """
    monkeypatch.setenv(TRAIN_HOST_VARIABLE, "host")
    first = smb.train.join(connect(), "run", _ones(), HSGD(alpha=0.5), lease=LEASE_S)
    first.step()
    first.flush()
    model = first.exchange._host.weights  # type: ignore[attr-defined]
    first.close()
    model.fill(50.0)  # as if the shared model had gone on
    clients = [connect(), connect()]
    workers = together(*(lambda client=client: smb.train.join(client, "run", _ones()) for client in clients))
    assert (connect().open(model.name).read() == 1).all()
    for worker in workers:
        worker.close()


def test_the_dead_have_no_part_in_the_elastic_force(connect: Connect) -> None:
    """alpha=None is 0.9 / p, and p went on to count those who had died, as nobody waits for them."""
    client, values = connect(), _ones()
    with smb.train.join(client, "run", values, SEASGD(alpha=None), lease=LEASE_S) as worker:
        other = connect()
        dead = smb.train.join(other, "run", _ones())
        dead.step()
        other._session.renewals.close()  # as in a dead process
        wait_for(lambda: worker.step() or worker.members == 1, "the one who is left to be alone")
        worker.flush()
        shared = worker.shared()
        values[:] = shared + 1
        worker.step()
        np.testing.assert_allclose(values, shared + 0.1, rtol=1e-6)


def test_who_comes_many_rounds_late_counts(connect: Connect) -> None:
    """After a quorum, its contribution is to count in the next round; more than 16 rounds later it was lost."""
    values = [_ones() for _ in range(3)]
    workers = [smb.train.join(connect(), "run", own, LocalSGD(every=1, quorum=2)) for own in values]
    for _ in range(20):
        together(workers[0].step, workers[1].step)
    values[2] += 21
    with waiting(workers[2].step):
        wait_for(lambda: workers[2].status.clock == 21, "its mark")
        workers[0].step()
    weight = 1 / np.sqrt(21)
    np.testing.assert_allclose(workers[0].shared(), 1 + 21 * weight / (1 + weight), rtol=1e-5)
    assert (workers[2].status.contributions, workers[2].status.staleness) == (1, 20)
    for worker in workers:
        worker.close()


def test_who_comes_many_rounds_late_to_bsp_is_dropped(connect: Connect) -> None:
    """As above, where it is dropped: that was not counted."""
    workers = [smb.train.join(connect(), "run", _ones(), BSP(quorum=2)) for _ in range(3)]
    for _ in range(20):
        together(workers[0].step, workers[1].step)
    workers[2].step()
    assert (workers[2].status.contributions, workers[2].status.dropped) == (0, 1)
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("point", ["train-decided", "train-added"])
def test_a_stopped_closer_finds_the_others_gone(cluster: smb.LocalCluster, connect: Connect, point: str) -> None:
    """It failed for want of their inboxes, or made them anew, for good."""
    crew = Crew(connect, 2, DiLoCo(every=1), lease=LEASE_S)
    with in_process(take_part, cluster.address, 2, 1, point, 1, signal.SIGSTOP) as (process, messages):
        assert messages.get(timeout=DEADLINE_S) == "joined"
        with waiting(lambda: crew.step(0)), waiting(lambda: crew.step(1)):
            wait_for(lambda: crew.marked() == {0, 1}, "the first two")
            crew.clients[0].create("go", 1)
        crew.close()
        os.kill(process.pid, signal.SIGCONT)
        _, values = messages.get(timeout=DEADLINE_S)
        assert np.array_equal(values, crew.values[0])
        assert messages.get(timeout=DEADLINE_S) == "left"
    assert not {"run/inbox/1", "run/inbox/2"} & {info.name for info in crew.clients[0].list()}


def test_a_group_that_was_deleted_in_part(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a deletion broke off, the group could not be deleted again, and the next one of its name got the momentum
    of the old one."""
    client, values = connect(), _ones()
    with smb.train.join(client, "run", values, DiLoCo(every=1)) as worker:
        values += 1
        worker.step()
    delete = client.delete

    def break_off(name: str, **options: Any) -> None:
        if name == "run/next":
            raise smb.UnavailableError("killed here")
        delete(name, **options)

    with monkeypatch.context() as broken:
        broken.setattr(client, "delete", break_off)
        with pytest.raises(smb.UnavailableError):
            smb.train.delete(client, "run")
    smb.train.delete(client, "run")
    assert client.list() == []


def test_a_repeated_step_counts_its_samples_once(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that failed because a server was away, and was called again, weighed twice as much."""
    scheme = BSP(token_weights=True)
    values = [np.zeros(SIZE, np.float32) for _ in range(2)]
    workers = [smb.train.join(connect(), "run", own, scheme) for own in values]
    inbox = workers[0].exchange._inbox  # type: ignore[attr-defined]
    with monkeypatch.context() as away:
        away.setattr(inbox, "write", _unavailable, raising=False)
        values[0] += 1
        with pytest.raises(smb.UnavailableError, match="away"):
            workers[0].step(samples=2)
    values[1] += 4
    together(lambda: workers[0].step(samples=2), lambda: workers[1].step(samples=1))
    assert np.allclose(values[0], 2)  # (2 * 1 + 1 * 4) / 3
    for worker in workers:
        worker.close()


def test_close_contributes_the_rest(connect: Connect) -> None:
    """The local steps since the last exchange were lost by close(), though nobody else had to be waited for."""
    values = start()
    worker = smb.train.join(connect(), "run", values, LocalSGD(every=5))
    for step in range(7):
        local_step(values, 0, step)
        worker.step(samples=3)
    worker.close()
    weights = start()
    for steps in (range(5), range(5, 7)):
        weights = mean_round(weights, [(delta_of(weights, 0, steps), 1.0)])
    client = connect()
    assert np.array_equal(smb.train.shared(client, "run"), weights)
    assert smb.train.status(client, "run").samples == 21
    assert not [info.name for info in client.list() if "/inbox/" in info.name]


def test_a_rest_weighs_what_it_is_and_holds_nobody_up(connect: Connect) -> None:
    """A worker that leaves after two of five steps waits for nobody. Its two steps weigh 2/5 in the round that the
    other closes, and its inbox goes with that round."""
    crew, weights = Crew(connect, 2, LocalSGD(every=5)), start()
    for _ in range(2):
        crew.step_all()
    crew.workers[0].close()
    assert smb.train.status(crew.clients[1], "run").round == 0
    for _ in range(3):
        crew.step(1)
    expected = mean_round(weights, [(delta_of(weights, 0, range(2)), 2 / 5), (delta_of(weights, 1, range(5)), 1.0)])
    assert np.array_equal(crew.workers[1].shared(), expected)
    inboxes = [info.name for info in crew.clients[1].list() if "/inbox/" in info.name]
    assert len(inboxes) == 1, inboxes
    crew.workers[1].close()


def test_no_rest_of_who_fails_and_of_a_scheme_with_momentum(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever leaves by an exception sends nothing. DiLoCo sends whole rounds only, and close() says what it leaves."""
    values = _ones()
    worker = smb.train.join(connect(), "run", values, LocalSGD(every=5))
    values += 1
    worker.step()
    with pytest.raises(ZeroDivisionError), worker:
        raise ZeroDivisionError
    assert (smb.train.shared(connect(), "run") == 1).all()
    values = _ones()
    worker = smb.train.join(connect(), "outer", values, DiLoCo(every=5))
    with caplog.at_level("INFO", "smb.train"):
        for _ in range(3):
            values += 1
            worker.step()
        worker.close()
    assert (smb.train.shared(connect(), "outer") == 1).all()
    said = [record.message for record in caplog.records if record.message.startswith("left training")]
    assert said == [
        "left training 'outer': 3 local steps are not in its model, those since the last exchange; diloco exchanges "
        "whole rounds of 5 steps"
    ]


def test_all_samples_are_in_the_model_that_all_end_with(connect: Connect) -> None:
    """Workers that divide 23 units, in rounds of four steps: each ends with the same model, in which all units are,
    and the table has each worker once."""
    values = [_ones() for _ in range(3)]
    workers = [smb.train.join(connect(), "run", own, LocalSGD(every=4)) for own in values]

    def train(worker: smb.train.Worker, own: Values) -> Values:
        with WorkUnits(worker.group.client, "run/units", 23, 1, epochs=2, worker=worker) as units:
            for unit in units:
                own += 1
                worker.step(samples=unit.count)
        ended = worker.shared()
        worker.close()
        return ended

    jobs = [lambda job=job: train(*job) for job in zip(workers, values, strict=True)]
    first, *others = together(*jobs)
    assert all(np.array_equal(first, other) for other in others)
    found = smb.train.status(connect(), "run")
    assert found.samples == 2 * 23
    assert (found.epochs, found.done) == (2, True)
    assert len(found.workers) == 3, found.workers
    assert sum(worker.samples for worker in found.workers) == 2 * 23


def test_who_stands_aside_twice_in_a_round_has_its_slot_again(connect: Connect) -> None:
    """The mark of one that came back in the open round was taken for a contribution to it: it took another slot, and
    stood in the table twice."""
    crew = Crew(connect, 2, LocalSGD(every=2))
    for _ in range(2):
        crew.step_all([5, 5])
    for _ in range(2):
        with crew.workers[0].aside():
            pass
    found = smb.train.status(crew.clients[0], "run")
    assert [(worker.slot, worker.samples) for worker in found.workers] == [(0, 10), (1, 10)]
    crew.close()


def test_a_worker_that_changes_its_slot_stands_in_the_table_once(connect: Connect) -> None:
    """A worker stood aside while its contribution to the open round may count yet, and so came back in another slot:
    the table showed it twice, with all its samples in both."""
    crew = Crew(connect, 2, LocalSGD(every=3))
    for _ in range(2):
        crew.step_all([5, 7])
    crew.workers[0].contribute_rest()
    totals = [smb.train.status(crew.clients[1], "run").samples]
    with crew.workers[0].aside():
        totals.append(smb.train.status(crew.clients[1], "run").samples)
    found = smb.train.status(crew.clients[1], "run")
    assert [(worker.slot, worker.samples) for worker in found.workers] == [(1, 0), (2, 10)]
    crew.step(1, 7)
    late = smb.train.join(connect(), "run", np.zeros_like(crew.values[0]), None)
    assert late.status.slot == 0
    totals += [found.samples, smb.train.status(crew.clients[1], "run").samples]
    assert totals == [10, 10, 10, 31]
    late.close()
    crew.close()
