"""A coordinator that was started again ended trainings. A worker that waited for a dead one could not ask whether that
one lives, and its step raised UnavailableError after 2 s, whatever the client's timeout said. So did any call that the
coordinator answers.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

import smb
import smb.train
from smb.rpc import coordinator_tries
from tests.support.clients import in_process
from tests.support.daemons import stop, wait_for
from tests.support.training import COUNT, DEADLINE_S, take_part, waiting

LEASE_S = 1.2


def unread(address: str) -> int:
    """Bytes that were sent to a process of this host, and that it has not read."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    lines = "".join(Path(f"/proc/net/{family}").read_text() for family in ("tcp", "tcp6")).splitlines()
    rows = [line.split() for line in lines if "local_address" not in line]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[1].endswith(port))


def joins_again(worker: smb.train.Worker) -> bool:
    """Whether a step could do so; the coordinator may still be away."""
    try:
        worker.step()
    except smb.UnavailableError:
        return False
    return True


@pytest.mark.parametrize("hangs", [False, True])
def test_a_training_loses_a_worker_while_the_coordinator_is_away(caplog: pytest.LogCaptureFixture, hangs: bool) -> None:
    """The other one's step goes on once the coordinator is back; its client's timeout has run out twice by then."""
    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=1.0) as client,
    ):
        values = np.zeros(COUNT, np.float32)
        worker = smb.train.join(client, "run", values, smb.train.BSP(), lease=LEASE_S)
        with in_process(take_part, cluster.address, 1, 1) as (process, messages):
            assert messages.get(timeout=DEADLINE_S) == "joined"
            process.kill()
            process.join()
        if hangs:
            stop(cluster.coordinator.pid)
        else:
            cluster.coordinator.kill()
        values += 1
        with caplog.at_level(logging.WARNING), waiting(worker.step) as result:
            wait_for(lambda: caplog.text.count("unknown whether worker") > 1, "asking whether it lives", DEADLINE_S)
            if hangs:
                os.kill(cluster.coordinator.pid, signal.SIGCONT)
            else:
                cluster.coordinator.start()
            result()
        assert (values == 1).all()
        assert worker.members == 1
        worker.close()


def test_a_call_waits_for_the_coordinator_as_long_as_its_client_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was answered before waits; a lock that must be had at once does not."""
    monkeypatch.setattr(coordinator_tries, "COMES_BACK_S", 0.0)
    monkeypatch.setattr(coordinator_tries, "STARTS_AGAIN_S", DEADLINE_S)  # a start takes long on a busy machine
    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=DEADLINE_S) as client,
    ):
        client.create("w", 10)
        cluster.coordinator.kill()
        begun = time.monotonic()
        with pytest.raises(smb.UnavailableError, match="no coordinator answers"):
            client.lock("l", timeout=0.0)
        assert time.monotonic() - begun < DEADLINE_S / 2
        with waiting(lambda: client.open("w")) as result:
            cluster.coordinator.start()
            result().fill(1)


def test_a_call_goes_on_whose_coordinator_died_in_the_middle() -> None:
    """It was sent, and its answer is lost: a wait for a buffer goes on at the next run. A delete does not, as what is
    there then may be another's.
    """

    def refused_delete() -> str:
        with pytest.raises(smb.UnavailableError) as caught:
            client.delete("w")
        return caught.value.outcome

    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=DEADLINE_S) as client,
        smb.connect(cluster.address, timeout=DEADLINE_S) as other,
    ):
        other.create("w", 10)
        stop(cluster.coordinator.pid)
        with waiting(lambda: client.open("later", timeout=DEADLINE_S)) as opened:
            first = wait_for(lambda: unread(cluster.address), "the wait", DEADLINE_S)
            with waiting(refused_delete) as outcome:
                wait_for(lambda: unread(cluster.address) > first, "the delete", DEADLINE_S)
                cluster.coordinator.kill()
                assert outcome() == smb.errors.UNKNOWN
            cluster.coordinator.start()
            other.create("later", 10)
            opened().fill(1)


def test_an_address_that_never_answered_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a wrong one: connect says so at once, whatever its timeout."""
    monkeypatch.setattr(coordinator_tries, "COMES_BACK_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    begun = time.monotonic()
    with pytest.raises(smb.UnavailableError, match="no coordinator answers"):
        smb.connect(address, timeout=10 * DEADLINE_S)
    assert time.monotonic() - begun < DEADLINE_S


def test_a_dead_worker_is_missed_beside_one_that_nobody_has_asked_for() -> None:
    """Who looks for the dead stopped at the first whose lock it could not find, in the order of the slots: the next
    one, whose lock it knew, held up the training until the coordinator was back.
    """
    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=DEADLINE_S) as client,
        smb.connect(cluster.address) as other,
    ):
        workers = [
            smb.train.join(each, "run", np.zeros(COUNT, np.float32), smb.train.BSP(), lease=LEASE_S)
            for each in (client, other, other)
        ]
        group, dead = workers[0].group, workers[2].group.member
        assert group.reap([dead.slot]) == []
        dead.release()
        cluster.coordinator.kill()
        assert group.reap([workers[1].group.member.slot, dead.slot]) == [dead.slot]
        cluster.coordinator.start()
        for worker in workers:
            worker.abandon()


def test_who_leaves_while_the_coordinator_is_away_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked for the end of its inbox first, and held its slot meanwhile: the others waited for it as long."""
    monkeypatch.setattr(coordinator_tries, "STARTS_AGAIN_S", DEADLINE_S)
    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=DEADLINE_S) as client,
        smb.connect(cluster.address, timeout=DEADLINE_S) as other,
    ):
        worker, leaver = (
            smb.train.join(each, "run", np.zeros(COUNT, np.float32), smb.train.BSP()) for each in (client, other)
        )
        cluster.coordinator.kill()
        with waiting(leaver.close):
            worker.step()
            assert worker.members == 1
            cluster.coordinator.start()
        assert [info.name for info in client.list() if "/inbox/" in info.name] == ["run/inbox/1"]
        worker.close()


def test_who_joins_again_takes_one_slot_however_often_it_tries() -> None:
    """A worker that lost its slot took another one with each step until the coordinator was back. Each counted as a
    time that it had joined again, and the inbox from before stayed.
    """
    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=1.0) as client,
    ):
        values = np.zeros(COUNT, np.float32)
        worker = smb.train.join(client, "run", values, smb.train.BSP())
        worker.step()
        worker.group.member.release()
        cluster.coordinator.kill()
        for _ in range(2):
            with pytest.raises(smb.UnavailableError, match="no coordinator answers"):
                worker.step()
        cluster.coordinator.start()
        wait_for(lambda: joins_again(worker), "the coordinator", DEADLINE_S)
        values += 1
        worker.step()
        assert (worker.status.slot, worker.status.rejoins) == (0, 1)
        assert [info.name for info in client.list() if "/inbox/" in info.name] == ["run/inbox/2"]
        worker.close()


def test_a_unit_that_could_not_be_handed_out_is_not_done() -> None:
    """At the end of all a worker stood aside, and found a unit that another one had left. It could not come back
    without the coordinator, so its call failed; the next one took the unit for done.
    """

    def taken() -> bool:
        try:
            units.append(mine.take())
        except (smb.UnavailableError, smb.TimeoutError):  # the latter on a busy machine
            return False
        return True

    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=1.0) as client,
        smb.connect(cluster.address) as other,
    ):
        values = np.zeros(COUNT, np.float32)
        workers = [
            smb.train.join(each, "run", array, smb.train.BSP())
            for each, array in ((client, values), (other, values.copy()))
        ]
        units: list[smb.train.Unit | None] = []
        mine, others = (
            smb.train.WorkUnits(each, "run/units", 2, 1, epochs=1, worker=worker)
            for each, worker in zip((client, other), workers, strict=True)
        )
        assert taken()
        left = others.take()
        with waiting(taken) as result:
            wait_for(lambda: workers[1].members == 1, "the worker stands aside", DEADLINE_S)
            cluster.coordinator.kill()
            others.close()
            workers[1].abandon()
            assert not result()
        cluster.coordinator.start()
        wait_for(taken, "the coordinator", DEADLINE_S)
        assert units[1] == left
        values += 1
        workers[0].step()
        assert (workers[0].shared() == 1).all()
        assert mine.take() is None
        mine.close()
        workers[0].close()


def test_who_closes_a_round_without_the_inboxes_holds_up_nobody_who_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one to contribute took the locks, and asked the absent coordinator for inboxes under them. Another one,
    who had them open, could have closed the round.
    """
    monkeypatch.setattr(coordinator_tries, "STARTS_AGAIN_S", DEADLINE_S)

    def marked(worker: smb.train.Worker) -> bool:
        return worker.status.clock > worker.progress.round

    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=DEADLINE_S) as client,
        smb.connect(cluster.address, timeout=DEADLINE_S) as other,
    ):
        closer, late = workers = [
            smb.train.join(each, "run", np.zeros(COUNT, np.float32), smb.train.BSP(), lease=LEASE_S)
            for each in (client, other)
        ]
        with waiting(late.step):
            wait_for(lambda: marked(late), "a contribution", DEADLINE_S)
            closer.step()
        cluster.coordinator.kill()
        with waiting(closer.step) as closed:
            wait_for(lambda: marked(closer), "a contribution", DEADLINE_S)
            with waiting(late.step):
                closed()
                cluster.coordinator.start()
        assert [(worker.progress.round, worker.status.contributions) for worker in workers] == [(2, 2)] * 2
        for worker in workers:
            worker.abandon()
