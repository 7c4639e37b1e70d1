"""What was deleted, or half made, by name could be another's by then: a training that had been made anew meanwhile."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.call.sync_requests import Home
from smb.lock import Lock
from smb.train import DiLoCo, LocalSGD, WorkUnits, delete_units, group, join_locks, members, saved
from smb.train.exchange.rounds import RoundScheme
from smb.train.parameters import ArrayParameters
from tests.conftest import Connect
from tests.support.daemons import DEADLINE_S, wait_for, waiting
from tests.support.transports import SLOWNESS

SCHEME = LocalSGD(every=1)
TTL_S = 1.0 * SLOWNESS  # of a setup lock that is lost


def join(client: smb.Client, value: float = 1.0, **options: Any) -> smb.train.Worker:
    return smb.train.join(client, "run", np.full(10, value, np.float32), SCHEME, **options)


def leave_one(client: smb.Client) -> None:
    """Make a training in which somebody has trained, and nobody is any more."""
    with join(client) as worker:
        worker.step()


def names(client: smb.Client) -> set[str]:
    return {info.name for info in client.list()}


@contextlib.contextmanager
def late(client: smb.Client, last: str, deleting: Callable[[], object]) -> Iterator[threading.Event]:
    """Delete in a thread, whose request to delete `last` waits for the event; all is deleted at the end."""
    reached, go, delete = threading.Event(), threading.Event(), client.delete
    failed: list[smb.Error] = []

    def slow(name: str, **options: Any) -> None:
        if name == last:
            reached.set()
            assert go.wait(DEADLINE_S)
        delete(name, **options)

    def run() -> None:
        try:
            deleting()
        except smb.Error as error:
            failed.append(error)
            reached.set()

    client.delete = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert reached.wait(DEADLINE_S)
        yield go
    finally:
        go.set()
        thread.join()
        client.delete = delete  # type: ignore[method-assign]
    assert failed == []


def made_beside(cluster: smb.LocalCluster, go: threading.Event, make: Callable[[], object]) -> None:
    """Make anew what is being deleted; let the deletion go on once this waits for it, or is done."""
    done = threading.Event()

    def run() -> None:
        with contextlib.suppress(smb.Error):  # the caller finds nothing made
            make()
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(lambda: done.is_set() or waiting(cluster) > 0, "a join that waits, or is done")
    finally:
        go.set()
        thread.join()


def test_a_join_beside_a_deletion_whose_last_request_is_late(cluster: smb.LocalCluster, connect: Connect) -> None:
    """It waits for the deletion, and nothing of what it makes is deleted."""
    first, second = connect(), connect()
    leave_one(first)
    workers: list[smb.train.Worker] = []
    with late(first, "run", lambda: smb.train.delete(first, "run")) as go:
        made_beside(cluster, go, lambda: workers.append(join(second, 5.0)))
    (worker,) = workers
    with worker:
        assert worker.made
        worker.step()
        assert (worker.shared() == 5).all()
    smb.train.delete(first, "run")
    assert first.list() == []


def test_work_units_beside_a_deletion_whose_last_request_is_late(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Who makes them anew waits for the deletion, and all units are done."""
    first, second = connect(), connect()
    WorkUnits(first, "units", 10, 1, epochs=1).close()
    made: list[WorkUnits] = []
    with late(first, "units/tick", lambda: delete_units(first, "units")) as go:
        made_beside(cluster, go, lambda: made.append(WorkUnits(second, "units", 10, 1, epochs=1)))
    (units,) = made
    with units:
        assert len(list(units)) == 10
    delete_units(first, "units")
    assert first.list() == []


@pytest.mark.parametrize("what", ["training", "units"])
def test_a_deletion_that_can_not_have_the_lock(connect: Connect, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """It does not wait for ever, says who holds the lock, and has deleted nothing."""
    client, other = connect(), connect()
    if what == "training":
        leave_one(client)
    else:
        WorkUnits(client, "run", 10, 1, epochs=1).close()
    delete = smb.train.delete if what == "training" else delete_units
    before = names(client)
    monkeypatch.setattr(join_locks, "_SETUP_S", 0.1)
    with other.lock("run/setup"):
        with pytest.raises(smb.TimeoutError, match=f"nothing was deleted, .*: {re.escape(other.name)} holds it"):
            delete(client, "run")
        assert names(client) == before
    delete(client, "run")
    assert client.list() == []


def test_a_deletion_while_the_server_of_the_lock_is_away(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That server may be gone for good: the training is deleted all the same."""
    client = connect()
    leave_one(client)
    ask_lock = Home.ask_lock

    def away(home: Home, *arguments: Any) -> Any:
        if home.what == repr("run/setup"):
            raise smb.UnavailableError("the server is away")
        return ask_lock(home, *arguments)

    monkeypatch.setattr(Home, "ask_lock", away)
    smb.train.delete(client, "run")
    assert client.list() == []
    assert "deleting without its lock, because the lock's server is away" in caplog.text


@pytest.fixture
def half_deleted(connect: Connect, request: pytest.FixtureRequest) -> smb.Client:
    """A client whose deletion of a training with momentum was interrupted before that buffer was deleted."""
    client, values = connect(), np.ones(10, np.float32)
    with smb.train.join(client, "run", values, DiLoCo(every=1)) as worker:
        values += 1
        worker.step()
    client.create("run/left", 1)
    delete = client.delete

    def cut(name: str, **options: Any) -> None:
        if name == request.param:
            raise KeyboardInterrupt
        delete(name, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "delete", cut)
        with pytest.raises(KeyboardInterrupt):
            smb.train.delete(client, "run")
    assert "run" in names(client)
    return client


each_cut = pytest.mark.parametrize("half_deleted", ["run/left", "run/next", "run/tick", "run/members"], indirect=True)


@each_cut
def test_a_join_after_an_interrupted_deletion(half_deleted: smb.Client, connect: Connect) -> None:
    """It makes the training anew, with its own values, and nothing of the former one is left."""
    values = np.full(10, 3, np.float32)
    with smb.train.join(connect(), "run", values, DiLoCo(every=1)) as worker:
        assert (worker.made, worker.deleted) == (True, False)
        assert (values == 3).all()
        assert smb.train.status(half_deleted, "run").round == 0
        assert "run/left" not in names(half_deleted)
        assert not any(half_deleted.open(f"run/outer/{copy}/0").read().any() for copy in (0, 1))


@each_cut
def test_a_load_after_an_interrupted_deletion(half_deleted: smb.Client, tmp_path: Path) -> None:
    """The file takes the place of what is left; without one, what is left counts as no training."""
    values = np.full(10, 3, np.float32)
    smb.train.join(half_deleted, "other", values, SCHEME).close()
    smb.train.save(half_deleted, "other", tmp_path / "other")
    for look in (smb.train.shared, lambda *named: smb.train.save(*named, tmp_path / "run")):
        with pytest.raises(smb.NotFoundError, match="there is no training 'run'"):
            look(half_deleted, "run")
    smb.train.load(half_deleted, "run", tmp_path / "other")
    assert (smb.train.shared(half_deleted, "run") == 3).all()
    assert names(half_deleted) >= {"run", "run/members", "run/tick"}
    assert not {"run/left", "run/next", "run/outer/0/0"} & names(half_deleted)


@pytest.mark.parametrize("half_deleted", ["run/left", "run/next", "run/tick"], indirect=True)
def test_an_interrupted_deletion_is_done_again(half_deleted: smb.Client) -> None:
    """`smb train rm`, which asks for the status first, can do it."""
    assert smb.train.status(half_deleted, "run").name == "run"
    smb.train.delete(half_deleted, "run")
    assert half_deleted.list() == []


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Callable[[smb.Client], None]:
    """Renew no lock of this client any more, as if it was stopped: it loses the setup lock, whose lease is short."""
    init = Lock.__init__

    def brief(lock: Lock, homes: Any, renewals: Any, ttl: float, *rest: Any, **options: Any) -> None:
        init(lock, homes, renewals, TTL_S if homes[0].what == repr("run/setup") else ttl, *rest, **options)

    monkeypatch.setattr(Lock, "__init__", brief)

    def stopped(client: smb.Client) -> None:
        with client._session.renewals._changed:
            client._session.renewals._due.clear()

    return stopped


Stop = Callable[[smb.Client], None]


def goes_on(worker: smb.train.Worker) -> None:
    """Its training is whole: it steps, and closes."""
    worker.step()
    assert (worker.shared() == 7).all()
    worker.close()


def test_a_maker_that_was_stopped(connect: Connect, monkeypatch: pytest.MonkeyPatch, stop: Stop) -> None:
    """What it has made was made anew by another, and is left alone when its join fails."""
    client, other, store, made = connect(), connect(), ArrayParameters.store, []

    def stopped(parameters: ArrayParameters, weights: smb.Buffer) -> None:
        if not made:
            made.append(None)
            stop(client)
            made[0] = join(other, 7.0)
        store(parameters, weights)

    monkeypatch.setattr(ArrayParameters, "store", stopped)
    with pytest.raises(smb.NotFoundError, match="deleted and created again"):
        join(client)
    goes_on(made[0])


def test_a_load_that_was_stopped(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, stop: Stop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same of smb.train.load."""
    client, other, fill, made = connect(), connect(), saved._fill, []
    leave_one(client)
    smb.train.save(client, "run", tmp_path / "run")
    smb.train.delete(client, "run")

    def stopped(*arguments: Any) -> None:
        if not made:
            stop(client)
            made.append(join(other, 7.0))
        fill(*arguments)

    monkeypatch.setattr(saved, "_fill", stopped)
    with pytest.raises(smb.NotFoundError, match="deleted and created again"):
        smb.train.load(client, "run", tmp_path / "run")
    assert "could not delete what it made of training 'run'" in caplog.text
    goes_on(made[0])


def test_a_fresh_join_that_was_stopped(connect: Connect, monkeypatch: pytest.MonkeyPatch, stop: Stop) -> None:
    """Somebody joined after it had looked who is alive: nothing is deleted."""
    client, other, reap, joined = connect(), connect(), members.reap, []
    join(client, 7.0).close()

    def stopped(*arguments: Any) -> list[int]:
        dead = reap(*arguments)
        if arguments[0] is client and not joined:
            stop(client)
            joined.append(join(other, 7.0))
        return dead

    monkeypatch.setattr(members, "reap", stopped)
    with pytest.raises(smb.LockLostError):
        join(client, fresh=True)
    goes_on(joined[0])


def test_a_deletion_that_was_stopped(connect: Connect, monkeypatch: pytest.MonkeyPatch, stop: Stop) -> None:
    """Another has made the training anew meanwhile: that is left alone, and the error says so."""
    client, other, delete, made = connect(), connect(), smb.Client.delete, []
    leave_one(client)

    def stopped(self: smb.Client, name: str, **options: Any) -> None:
        delete(self, name, **options)
        if self is client and not made:
            made.append(None)
            stop(client)
            made[0] = join(other, 7.0)

    monkeypatch.setattr(smb.Client, "delete", stopped)
    with pytest.raises(smb.LockLostError, match="delete of training 'run' stopped half-way; call it again"):
        smb.train.delete(client, "run")
    assert made[0].made
    goes_on(made[0])


def test_a_joiner_whose_training_is_made_anew(connect: Connect, monkeypatch: pytest.MonkeyPatch, stop: Stop) -> None:
    """It was stopped for so long that it lost the lock. It deletes no inbox of the new training, and makes none.
    An inbox of that has the name of its slot's former holder's.
    """
    client, other, run, made = connect(), connect(), RoundScheme.run, []
    leave_one(client)

    def after(scheme: RoundScheme, joined: group.Group, parameters: Any) -> Any:
        if joined.client is client:
            stop(client)
            smb.train.delete(other, "run")
            made.append(join(other, 7.0))
            made[0].step()
        return run(scheme, joined, parameters)

    monkeypatch.setattr(RoundScheme, "run", after)
    with pytest.raises(smb.NotFoundError):
        join(client)
    assert {name for name in names(other) if "inbox" in name} == {"run/inbox/1"}
    goes_on(made[0])
