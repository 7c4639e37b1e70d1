"""Parts of a training that no command saw came into the next one of its name: a momentum, a host's model, inboxes.

They were left by a load that was killed, and by a deletion beside a join, which made buffers after the deletion had
listed what there was.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import smb
import smb.train
from smb.config.parse import TRAIN_HOST_VARIABLE
from smb.tools.cli.main import app
from smb.train import HSGD, DiLoCo, LocalSGD, WorkUnits, group, group_deletion, saved
from smb.train.exchange import round_closing
from smb.train.rare import hsgd
from tests.support.daemons import DEADLINE_S

Connect = Callable[..., smb.Client]

SCHEME = DiLoCo(every=1)
LEASE_S = 2.0
AT_ONCE_S = 0.5  # a deletion that waits for nobody is done by then
COUNT = 10


class _Killed(BaseException):
    pass


def _zeros(count: int = COUNT) -> np.ndarray:  # type: ignore[type-arg]
    return np.zeros(count, np.float32)


def _names(client: smb.Client) -> list[str]:
    return [info.name for info in client.list()]


@pytest.fixture
def client(connect: Connect) -> smb.Client:
    """Over whatever transport."""
    return connect()


@pytest.fixture
def file(client: smb.Client, tmp_path: Path) -> Path:
    """A training with momentum."""
    values = _zeros()
    with smb.train.join(client, "source", values, SCHEME) as worker:
        for _ in range(3):
            values += 1
            worker.step()
    smb.train.save(client, "source", tmp_path / "file")
    smb.train.delete(client, "source")
    return tmp_path / "file"


@pytest.fixture(params=["run/tick", "run/outer/0/0", "run/outer/1/0", "ready"])
def killed_load(
    client: smb.Client, file: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> smb.Client:
    """A client after a load that was killed before it made this buffer, or said that the group is ready."""
    create, add = client.create, saved.t.Table.add

    def made(name: str, *arguments: Any, **options: Any) -> smb.Buffer:
        if name == request.param and client.list():
            raise _Killed
        return create(name, *arguments, **options)

    def added(table: saved.t.Table, row: int, column: int, value: int) -> int:
        if request.param == "ready" and (row, column) == (0, saved.t.READY):
            raise _Killed
        return add(table, row, column, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "create", made)
        patch.setattr(saved.t.Table, "add", added)
        patch.setattr(saved, "_drop", lambda *_: None)  # the dead tidy nothing
        with pytest.raises(_Killed):
            smb.train.load(client, "run", file)
    assert client.list()
    with pytest.raises(smb.NotFoundError, match="there is no training 'run'"):
        smb.train.status(client, "run")
    return client


def test_a_join_after_a_killed_load(killed_load: smb.Client) -> None:
    """It is a new training: its momentum is 0."""
    values = _zeros()
    with smb.train.join(killed_load, "run", values, SCHEME) as worker:
        values += 1
        worker.step()
        np.testing.assert_allclose(values, 0.7 * 1.9)
        assert smb.train.status(killed_load, "run").round == 1
    smb.train.delete(killed_load, "run")
    assert killed_load.list() == []


def test_a_load_after_a_killed_load(killed_load: smb.Client, file: Path) -> None:
    """It is the file's training."""
    assert smb.train.load(killed_load, "run", file) == 3
    smb.train.delete(killed_load, "run")
    assert killed_load.list() == []


def test_the_rest_of_a_killed_load_is_deleted(killed_load: smb.Client, cluster: smb.LocalCluster) -> None:
    """By `smb train rm`; a second time there is nothing."""
    smb.train.delete(killed_load, "run")
    assert killed_load.list() == []
    with pytest.raises(smb.NotFoundError, match="there is no training 'run'"):
        smb.train.delete(killed_load, "run")


def test_train_rm_of_parts(client: smb.Client, cluster: smb.LocalCluster) -> None:
    """The command does not ask for a training first."""
    client.create("run/inbox/2", 1)
    remove = ["train", "rm", "run", "--coordinator", cluster.address]
    assert CliRunner().invoke(app, remove).exit_code == 0
    assert client.list() == []
    assert CliRunner().invoke(app, remove).exit_code != 0
    assert CliRunner().invoke(app, [*remove, "--missing-ok"]).exit_code == 0


@pytest.mark.parametrize("way", ["join", "load", "delete"])
def test_parts_without_a_group(client: smb.Client, file: Path, way: str) -> None:
    """They go. Buffers of other names stay, as nothing says that they are of a training that was there."""
    for part in ("next", "outer/0/0", "inbox/2", "host/B", "host/B/inbox/1", "state"):
        client.create(f"run/{part}", 3)
    client.create("run/mine", 1)
    client.create("runner/next", 1)
    if way == "join":
        smb.train.join(client, "run", _zeros(), SCHEME).close()
    elif way == "load":
        smb.train.load(client, "run", file)
    else:
        smb.train.delete(client, "run")
    assert {"run/inbox/2", "run/host/B", "run/host/B/inbox/1", "run/state"} & set(_names(client)) == set()
    assert {"run/mine", "runner/next"} <= set(_names(client))


def test_the_rest_of_a_training_goes_and_another_one_under_its_name_stays(client: smb.Client) -> None:
    """A buffer of the first one's is there still, so all under its name was to be deleted with it."""
    other = smb.train.join(client, "run/other", _zeros(), SCHEME)
    client.create("run/members", 1)
    client.create("run/left", 1)
    client.create("run/host/B", 1)
    with smb.train.join(client, "run", _zeros(), SCHEME):
        assert {"run/left", "run/host/B"} & set(_names(client)) == set()
        other.step()
    other.close()


def _beside_a_deletion(
    client: smb.Client, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], act: Callable[[], object]
) -> None:
    """Act. As it comes to a place a deletion begins; if that waits for nobody it lists what there is before the act is
    done, and deletes that afterwards."""
    listed, acted, real, all_of = threading.Event(), threading.Event(), getattr(*place), group_deletion._all_of
    threads: list[threading.Thread] = []

    def there(*arguments: Any, **options: Any) -> Any:
        if not threads:
            threads.append(threading.Thread(target=smb.train.delete, args=(client, "run")))
            threads[0].start()
            listed.wait(AT_ONCE_S)
        return real(*arguments, **options)

    def listing(*arguments: Any) -> list[str]:
        found = all_of(*arguments)
        listed.set()
        assert acted.wait(DEADLINE_S)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(*place, there)
        patch.setattr(group_deletion, "_all_of", listing)
        try:
            with contextlib.suppress(smb.Error):
                act()
        finally:
            acted.set()
            threads[0].join(DEADLINE_S)


@pytest.mark.parametrize(
    ("scheme", "place"),
    [
        (LocalSGD(every=2), (group.Group, "buffer")),
        (SCHEME, (group.Group, "buffer")),
        (HSGD(), (hsgd, "enter")),
    ],
)
def test_a_deletion_beside_a_join(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, scheme: smb.train.Scheme, place: tuple[Any, str]
) -> None:
    """It waits until the join has made its buffers, and deletes these, too."""
    client, joiner = connect(), connect()
    monkeypatch.setenv(TRAIN_HOST_VARIABLE, "A")
    first = smb.train.join(client, "run", _zeros(), scheme)
    monkeypatch.setenv(TRAIN_HOST_VARIABLE, "B")
    joined: list[smb.train.Worker] = []
    _beside_a_deletion(
        client, monkeypatch, place, lambda: joined.append(smb.train.join(joiner, "run", _zeros(), scheme))
    )
    for worker in (first, *joined):
        worker.close()
    assert client.list() == []
    with (
        smb.train.join(client, "run", _zeros(2 * COUNT), scheme),
        smb.train.join(joiner, "run", _zeros(2 * COUNT)),
    ):
        pass
    smb.train.delete(client, "run")
    assert client.list() == []


def test_a_deletion_beside_one_that_comes_back(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that joins again, as its lease was over, makes no inbox in a deleted training."""
    client = connect()
    first = smb.train.join(client, "run", _zeros(), LocalSGD(every=2))
    second = smb.train.join(connect(), "run", _zeros())
    second.group.member._lock.release()
    assert first.group.reap([1]) == [1]
    second.step()
    _beside_a_deletion(client, monkeypatch, (group.Group, "buffer"), second.step)
    for worker in (first, second):
        worker.close()
    assert client.list() == []


def test_a_deletion_beside_work_units(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next training of this name begins with its first batch."""
    client = connect()
    worker = smb.train.join(client, "run", _zeros(), LocalSGD(every=2))
    # What a deletion lists does not have them yet.
    _beside_a_deletion(
        client,
        monkeypatch,
        (smb.Client, "create"),
        lambda: WorkUnits(worker.group.client, "run/units", 10, 1, worker=worker),
    )
    worker.close()
    assert client.list() == []


@pytest.mark.parametrize("end", ["left", "died", "died while it closed a round"])
def test_a_host_whose_workers_have_gone(connect: Connect, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """The next one there begins with the shared model, not with the host's, also if that never closed a round."""
    monkeypatch.setenv(TRAIN_HOST_VARIABLE, "A")
    values = _zeros()
    first = smb.train.join(connect(), "run", values, HSGD(alpha=0.5), lease=LEASE_S)
    monkeypatch.setenv(TRAIN_HOST_VARIABLE, "B")
    own = _zeros()
    gone = smb.train.join(connect(), "run", own)
    if end == "died while it closed a round":
        with pytest.MonkeyPatch.context() as patch:

            def failpoint(name: str) -> None:
                if name == "train-built":
                    raise _Killed

            patch.setattr(round_closing, "failpoint", failpoint)
            own += 1
            with pytest.raises(_Killed):
                gone.step()
    if end == "left":
        gone.close()
    else:
        for seat in (gone.group, gone.group.nested):
            assert seat is not None
            seat.member._lock.release()
    for _ in range(20):
        values += 1
        first.step()
    first.flush()
    shared = first.shared()
    assert shared[0] > 5
    own = np.full(COUNT, -5, np.float32)
    with smb.train.join(connect(), "run", own) as worker:
        np.testing.assert_array_equal(own, shared)
        worker.step()
        worker.flush()
        np.testing.assert_array_equal(own, shared)
    np.testing.assert_array_equal(first.shared(), shared)
    first.close()
