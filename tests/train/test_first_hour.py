"""What a trainer meets in the first hour: joining, looking, leaving without close(), deleting, beginning anew."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from tests.conftest import Connect
from tests.support.commands import run_here
from tests.support.daemons import wait_for
from tests.support.transports import FAR

SCRIPT = """
import os, sys
import numpy as np, smb, smb.train
client = smb.connect(sys.argv[1], name="forgetful")
values = np.zeros(100, np.float32)
worker = smb.train.join(client, "run", values, smb.train.SEASGD(every=1))
print(worker, flush=True)
worker.step(samples=5)
sys.stdin.readline()
"""


def values(size: int = 100) -> np.ndarray[Any, Any]:
    return np.zeros(size, np.float32)


def overview(client: smb.Client) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(client._coordinator.overview(10.0))
    return shown


def detail(client: smb.Client, name: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(client._coordinator.overview(10.0, training=name))
    return shown


def command(capsys: pytest.CaptureFixture[str], cluster: smb.LocalCluster, *arguments: str) -> tuple[int, str, str]:
    return run_here(capsys, *arguments, "-c", cluster.address)


def test_a_script_that_ends_without_close_is_not_lost(connect: Connect, cluster: smb.LocalCluster) -> None:
    """Its session is over and its slot free when it has exited; join told what it did, in one line on stderr."""
    watcher = connect()
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, cluster.address], input="", capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == "INFO smb.train: made training 'run' (seasgd); its weights are yours\n"
    assert "training 'run'" in ended.stdout
    (worker,) = smb.train.status(watcher, "run").workers
    assert not worker.alive
    assert worker.samples == 5
    wait_for(lambda: len(overview(watcher)["clients"]) == 1, "the end of its session")
    assert not [problem for problem in overview(watcher)["problems"] if "lost" in problem["title"]]


def test_who_finished_and_who_was_lost(
    connect: Connect, cluster: smb.LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker that was killed counts as lost when its lease is over, though nobody waits for it; one that closed has
    finished; and looking frees no slot.
    """
    watcher = connect()
    script = SCRIPT.replace("every=1)", "every=1), lease=1.0")
    command_line = [sys.executable, "-c", script, cluster.address]
    killed = subprocess.Popen(
        command_line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with killed:
        assert killed.stdout is not None
        assert "training 'run'" in killed.stdout.readline()
        with smb.train.join(connect(), "run", values()):
            assert [(worker.alive, worker.finished) for worker in smb.train.status(watcher, "run").workers] == [
                (True, False),
                (True, False),
            ]
        killed.kill()
    wait_for(lambda: not smb.train.status(watcher, "run").workers[0].alive, "the end of its lease")
    lost, finished = smb.train.status(watcher, "run").workers
    assert (lost.finished, finished.alive, finished.finished) == (False, False, True)
    assert finished.pid == os.getpid()
    _, said, _ = command(capsys, cluster, "train", "stat", "run")
    assert [line.split()[1] for line in said.splitlines()[-2:]] == ["lost", "finished"]
    assert watcher.open("run/members").read()[1, 0] == lost.incarnation


@pytest.mark.parametrize("level", ["warning", "debug"])
def test_smb_log_sets_the_level(cluster: smb.LocalCluster, connect: Connect, level: str) -> None:
    """Warnings alone leave the line out; with debug there is more than that."""
    connect()
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, cluster.address],
        input="", capture_output=True, text=True, timeout=60, env=os.environ | {"SMB_LOG": level},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ("made training" in ended.stderr) == (level == "debug")


def test_a_program_that_logs_by_itself_has_the_say(cluster: smb.LocalCluster, connect: Connect) -> None:
    """With handlers of its own at WARNING nothing of ours is written."""
    connect()
    quiet = "import logging; logging.basicConfig(level=logging.WARNING)\n" + SCRIPT
    ended = subprocess.run(
        [sys.executable, "-c", quiet, cluster.address], input="", capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_join_tells_who_is_there(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """Scheme, round and workers; that the own weights were replaced."""
    with caplog.at_level(logging.INFO, logger="smb.train"):
        first = smb.train.join(connect(), "run", values(), smb.train.BSP())
        first.step()
        second = smb.train.join(connect(), "run", values())
    assert caplog.messages[0] == "made training 'run' (bsp); its weights are yours"
    assert caplog.messages[-1] == "joined training 'run' (bsp, round 1, 2 workers; its weights replaced yours)"
    assert repr(second).startswith("<smb.train.Worker 1 of training 'run': BSP(")
    second.close()
    assert repr(second).endswith("closed>")
    first.close()


def test_fresh_begins_anew_where_nobody_is_alive(connect: Connect) -> None:
    """Refused while one trains; afterwards the training is a new one, with the joiner's weights and scheme."""
    client, other = connect(), connect()
    first = smb.train.join(client, "run", values() + 1, smb.train.SEASGD())
    with pytest.raises(smb.AlreadyExistsError, match="1 of its workers are alive"):
        smb.train.join(other, "run", values(), smb.train.BSP(), fresh=True)
    first.close()
    mine = values(50) + 3
    second = smb.train.join(other, "run", mine, smb.train.BSP(), fresh=True)
    assert second.made
    assert (smb.train.shared(client, "run") == 3).all()
    second.close()


def test_fresh_that_could_not_begin_deletes_nothing(connect: Connect) -> None:
    """No scheme, or more fragments than there is to cut: the former training was gone by then."""
    client = connect()
    smb.train.join(client, "run", values(2) + 1, smb.train.SEASGD()).close()
    with pytest.raises(smb.InvalidArgumentError, match=r"unknown option overlap=.* an option of smb\.torch\.join"):
        smb.train.join(client, "run", values(2), smb.train.BSP(), fresh=True, overlap="both")
    with smb.train.join(client, "samples", values(2), smb.train.BSP()) as worker:
        for samples in ("3", -1, 2.5):
            with pytest.raises(smb.InvalidArgumentError, match="samples must be a whole number from 0 on"):
                worker.step(samples)  # type: ignore[arg-type]
    for wrong in ("diloco", smb.train.BSP):
        for options in ({}, {"fresh": True}):
            with pytest.raises(smb.InvalidArgumentError, match=r"scheme must be an object .* smb\.train\.DiLoCo"):
                smb.train.join(client, "run", values(2), wrong, **options)  # type: ignore[arg-type]
    with pytest.raises(smb.InvalidArgumentError, match=r"fresh=True needs a scheme; .*nothing was deleted"):
        smb.train.join(client, "run", values(2), fresh=True)
    cut = smb.train.DiLoCo(every=4, fragments=3)
    with pytest.raises(smb.InvalidArgumentError, match="fragments must be at most 2, the model's elements, not 3"):
        smb.train.join(client, "run", values(2), cut, fresh=True)
    with pytest.raises(smb.InvalidArgumentError, match=r"lease must be from 0.05 to 3600 seconds, not 0.01"):
        smb.train.join(client, "run", values(2), smb.train.BSP(), lease=0.01, fresh=True)
    assert (smb.train.shared(client, "run") == 1).all()


@pytest.mark.parametrize("scheme", [smb.train.DiLoCo(every=1), smb.train.SEASGD(every=1), smb.train.SSP()])
def test_a_deleted_training_says_so(connect: Connect, scheme: smb.train.Scheme) -> None:
    """The next step of a worker raises, also of one that waits for others; its close() succeeds."""
    client, other = connect(), connect()
    worker = smb.train.join(client, "run", values(), scheme)
    waiting = smb.train.join(other, "run", values())
    errors: list[BaseException] = []

    def steps() -> None:
        try:
            while True:
                waiting.step()
        except smb.Error as error:
            errors.append(error)

    thread = threading.Thread(target=steps)
    thread.start()
    if not isinstance(scheme, smb.train.DiLoCo):
        worker.step()
    smb.train.delete(client, "run")
    thread.join(60)
    assert [str(error) for error in errors] == ["training 'run' was deleted"]
    assert isinstance(errors[0], smb.NotFoundError)
    assert worker.deleted
    worker.close()
    waiting.close()
    assert client.list() == []


def test_close_without_a_coordinator_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever is done has nothing to fail at: what could not be tidied is said."""
    with smb.LocalCluster(servers=1, capacity="16MiB") as own, smb.connect(own.address) as client:
        worker = smb.train.join(client, "run", values(), smb.train.DiLoCo(every=1))
        worker.step()
        own.coordinator.kill()
        worker.close()
        assert any("some of its buffers could not be deleted" in text for text in caplog.messages)


def test_the_coordinator_hears_of_trainings(connect: Connect) -> None:
    """Round, workers by their labels, samples where they were told; a group's buffers are its; names of tensors."""
    client, other = connect(name="alice"), connect(name="bob")
    tensors = {"layer.weight": ((10, 5), "float32"), "layer.bias": ((50,), "float32")}
    client.create("table", tensors=tensors)
    own = values()
    first = smb.train.join(client, "team/run", own, smb.train.SEASGD(every=1))
    second = smb.train.join(other, "team/run", values())

    def told() -> bool:
        first.step(samples=32)
        second.step()
        (row,) = overview(client)["trainings"]
        return bool(row["workers"] == 2 and row["samples_per_s"])

    wait_for(told, "rates of two workers")
    (row,) = overview(client)["trainings"]
    assert (row["name"], row["scheme"], row["state"], row["elements"]) == ("team/run", "seasgd", "ok", 100)
    found = detail(client, "team/run")
    assert [worker["client"].partition(" ")[0] for worker in found["worker_list"]] == ["alice", "bob"]
    assert found["worker_list"][0]["samples"] % 32 == 0
    assert found["worker_list"][1]["samples"] is None
    assert {buffer["name"] for buffer in found["buffers"]} >= {"team/run", "team/run/members", "team/run/tick"}
    folded = {buffer["name"]: buffer["training"] for buffer in overview(client)["buffers"]}
    assert folded["team/run/tick"] == "team/run"
    assert folded["table"] is None
    table = json.loads(client._coordinator.overview(10.0, buffer="table"))
    assert [tensor["name"] for tensor in table["tensors"]] == ["layer.weight", "layer.bias"]
    own[:] = np.nan
    with pytest.raises(smb.train.RefusedContributionError):
        first.step(samples=1)
    wait_for(lambda: "NaN" in detail(client, "team/run")["guard"], "what the guard said")
    second.close()
    first.close()
    wait_for(lambda: overview(client)["trainings"][0]["workers"] == 0, "nobody left")


@pytest.mark.parametrize("stays", [False, True])
def test_the_last_round_of_one_that_is_over(connect: Connect, stays: bool) -> None:
    """It was "none", and a training of two seconds was never heard of. Also where the client goes on as one."""
    watcher, client = connect(), connect()
    with smb.train.join(client, "run", values(), smb.train.BSP()) as worker:
        for _ in range(7):
            worker.step(samples=1)
    if not stays:
        client.close()

    def seen() -> tuple[int, int]:
        (row,) = overview(watcher)["trainings"]
        return row["workers"], row["round"]

    wait_for(lambda: seen() == (0, 7), "the last report")


def test_which_buffers_and_clients_are_busy(connect: Connect) -> None:
    """What is moved for each is told per second."""
    client = connect(FAR, name="mover")
    busy, idle = client.create("busy", 100_000), client.create("idle", 10)
    idle.fill(1)

    def moved() -> bool:
        busy.fill(1)
        busy.read()
        rows = {row["name"]: row["rates"]["bytes"] for row in overview(client)["buffers"]}
        by = [row["rates"]["bytes"] for row in overview(client)["clients"] if row["name"].startswith("mover (")]
        return rows.get("busy", 0) > 10_000 > rows["idle"] and max(by, default=0) > 10_000

    wait_for(moved, "rates by buffer and client")


def test_trainings_from_the_command_line(
    connect: Connect, cluster: smb.LocalCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ls, stat, rm; `smb rm` refuses what is a training's; an answer of no keeps it."""
    client = connect()
    assert "No training" in command(capsys, cluster, "train", "ls")[1]
    worker = smb.train.join(client, "team/run", values(), smb.train.DiLoCo(every=1))
    worker.step()
    client.create("other", 10)
    code, out, _ = command(capsys, cluster, "train", "ls")
    assert code == 0
    assert out.splitlines()[1].split() == ["team/run", "diloco", "1", "-", "1", "-", "400", "B"]
    code, out, _ = command(capsys, cluster, "train", "stat", "team/run")
    assert code == 0
    assert "DiLoCo" not in out
    assert "diloco(" in out
    assert out.rstrip().endswith("-")  # no samples: nobody told
    found = json.loads(command(capsys, cluster, "train", "stat", "team/run", "--json")[1])
    assert found["workers"][0]["alive"]
    out = command(capsys, cluster, "ls")[1]
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["other", "team/run"]
    assert re.search(r"and \d+ buffers of trainings", out)
    assert "team/run/tick" not in out
    assert "team/run/tick" in command(capsys, cluster, "ls", "--all")[1]
    for name in ("team/run", "team/run/tick"):
        code, _, err = command(capsys, cluster, "rm", name)
        assert code == 1
        assert "smb train rm team/run" in err
    monkeypatch.setattr("typer.confirm", lambda *_: False)
    assert command(capsys, cluster, "train", "rm", "team/run")[0] == 1
    assert smb.train.status(client, "team/run").round == 1
    assert command(capsys, cluster, "train", "rm", "team/run", "--yes")[1] == (
        "training 'team/run' is deleted, with its model\n"
    )
    assert [info.name for info in client.list()] == ["other"]
    assert command(capsys, cluster, "train", "rm", "team/run", "--missing-ok")[0] == 0
    assert command(capsys, cluster, "train", "rm", "team/run")[0] == 1
    code, _, err = command(capsys, cluster, "train", "stat", "team/run")
    assert code == 1
    assert "there is no training 'team/run'; list the trainings with: smb train ls" in err
    worker.close()


def test_the_command_line_tells_what_of_a_training_is_done(
    connect: Connect, cluster: smb.LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first round is 0 and no dash; epochs are counted, and said to be done when somebody found none left."""
    client = connect()
    worker = smb.train.join(client, "run", values(), smb.train.LocalSGD(every=100))

    def row() -> list[str]:
        return command(capsys, cluster, "train", "ls")[1].splitlines()[1].split()[2:-2]

    assert row() == ["0", "-", "1", "-"]
    with smb.train.WorkUnits(client, "run/units", 3, 1, epochs=2, worker=worker) as units:
        for number, _ in enumerate(units):
            assert row() == ["0", str(number // 3), "1", "-"]
            worker.step(samples=10)
        assert row() == ["1", "2,", "all", "done", "1", "60"]
    worker.close()
    found = json.loads(command(capsys, cluster, "train", "stat", "run", "--json")[1])
    assert found["workers"][0]["finished"] is True
    assert (found["samples"], found["epochs"], found["done"]) == (60, 2, True)


def test_the_warning_of_a_death_names_the_worker_and_the_training_once(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that died is told of by host, process and training, and not again for the batch that it had."""
    client, dead = connect(), connect()
    own = smb.train.join(client, "run", values(), smb.train.BSP(), lease=0.4)
    other = smb.train.join(dead, "run", values())
    with (
        smb.train.WorkUnits(client, "run/units", 2, 1, epochs=1, lease=0.4, worker=own) as units,
        caplog.at_level("WARNING", "smb"),
    ):
        lost = smb.train.WorkUnits(dead, "run/units", 2, 1, epochs=1, lease=0.4, worker=other)
        assert lost.take()
        host, pid = other.status.host, other.status.pid
        dead._session.renewals.close()  # as in a dead process
        for _ in units:
            own.step()
    said = [record.message for record in caplog.records if "died" in record.message]
    assert said == [f"worker {host}:{pid} of training 'run' died; going on without it"]
    own.close()


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 65])
def test_a_label_is_short_and_printable(cluster: smb.LocalCluster, name: str) -> None:
    with pytest.raises(smb.InvalidArgumentError, match="name must have 1 to 64 printable characters"):
        smb.connect(cluster.address, name=name)
