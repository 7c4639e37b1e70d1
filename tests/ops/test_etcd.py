"""Coordinators on a real etcd of one member: who leads, what becomes of calls then, etcd's limits, moving."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import smb
from tests.support.clocks import Clock
from tests.support.commands import run_smb
from tests.support.daemons import Daemon, Daemons, running_daemons, stop, wait_for
from tests.support.etcd import Coordinators, EtcdCluster, Gate, needs_etcd, running_etcd
from tests.support.transports import SLOWNESS

pytestmark = needs_etcd

LEASE_S = 3  # one member has no elections that a lease must outlast
TIMEOUT_S = 60.0 * SLOWNESS
DAY_S = 86_400
RENEWALS = ("RenewServer", "RenewSession")
LEASE = ("--leader-lease", str(LEASE_S))


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with running_etcd() as running:
        running.wait_ready()
        yield running


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with running_daemons(tmp_path) as running:
        yield running


@contextlib.contextmanager
def coordinators(
    daemons: Daemons, etcd: EtcdCluster | str, prefix: str, count: int = 2, *options: str, clocks: Sequence[Clock] = ()
) -> Iterator[Coordinators]:
    addresses = etcd if isinstance(etcd, str) else etcd.addresses
    running = Coordinators(daemons, f"etcd://{addresses}/{prefix}", count, *LEASE, *options, clocks=clocks)
    try:
        yield running
    finally:
        daemons.kill_all()
        running.close()


def ready(daemons: Daemons, address: str, *names: str) -> list[Daemon]:
    servers = [daemons.memory_server(address, name) for name in names]
    assert all(server.address for server in servers)
    return servers


def test_one_leads_and_the_others_say_who(etcd: EtcdCluster, daemons: Daemons) -> None:
    """One of two answers; the other is well, says who leads, and refuses calls. `smb status` tells."""
    with coordinators(daemons, etcd, "one") as two:
        leader = two.leader()
        standby = 1 - leader
        health = two.health(standby)
        assert health["ok"]
        assert (health["leadership"], health["leader"]) == ("standby", two.addresses[leader])
        with pytest.raises(smb.UnavailableError, match=f"does not lead now, {two.addresses[leader]} does"):
            smb.connect(two.addresses[standby], timeout=0.5)
        ready(daemons, two.address, "a")
        told = json.loads(run_smb("status", "--json", coordinator=two.address).stdout)
        assert [each["role"] for each in told["coordinators"]] == [
            "leader" if index == leader else "standby" for index in range(2)
        ]
        assert told["totals"]["alive"] == 1


def test_a_killed_leader_is_followed(etcd: EtcdCluster, daemons: Daemons) -> None:
    """kill -9 of the leader: calls that change and calls that wait last over it, sessions and locks go on, data too."""
    with coordinators(daemons, etcd, "kill") as two:
        ready(daemons, two.address, "a", "b")
        leader = two.leader()
        with (
            smb.connect(two.address, timeout=TIMEOUT_S) as client,
            smb.connect(two.address, timeout=TIMEOUT_S) as other,
        ):
            buffer = client.create("kept", 1000)
            lock = client.lock("held", ttl=60.0)
            lock.acquire()
            opened: list[smb.Buffer] = []
            opener = threading.Thread(target=lambda: opened.append(other.open("later", timeout=TIMEOUT_S)))
            opener.start()
            two.running[leader].kill()
            begun = time.monotonic()
            buffer.accumulate(np.ones(1000, "f4"))
            client.create("later", 10)
            assert time.monotonic() - begun < (LEASE_S + 2) * SLOWNESS + 5  # what a busy machine takes for its own
            opener.join(TIMEOUT_S)
            assert opened[0].name == "later"
            assert two.leader(but=leader) == 1 - leader
            assert {info.name for info in other.list()} == {"kept", "later"}
            assert lock.token > 0
            with pytest.raises(smb.TimeoutError):
                other.lock("held", timeout=0.1).acquire()
            lock.release()
            two.start(leader)
            wait_for(lambda: two.health(leader).get("leadership") == "standby", "return of the killed one")
            assert float(other.open("kept").read()[0]) == 1.0
            # Stopped cleanly, it lets the other one lead at once.
            begun = time.monotonic()
            assert two.running[1 - leader].stop() == 0
            client.delete("later")
            assert time.monotonic() - begun < LEASE_S


def test_wall_clocks_that_jump(etcd: EtcdCluster, daemons: Daemons, tmp_path: Path) -> None:
    """The leader's is set three days ahead, then behind, and it leads on; then one that is ahead takes the lead. No
    session, lock, memory server or buffer ends."""
    clocks = [Clock(tmp_path, str(index)) for index in range(2)]
    with coordinators(daemons, etcd, "clocks", 2, "--session-lease", "6", clocks=clocks) as two:
        ready(daemons, two.address, "a")
        leader = two.leader()

        def renewed() -> list[str]:
            """Return the samples that count how often the leader renewed a memory server's lease and a session's."""
            lines = two.running[leader].page("/metrics").splitlines()
            heads = [f'smb_coordinator_rpcs_total{{code="OK",method="{each}"}}' for each in RENEWALS]
            return [next((line for line in lines if line.startswith(head)), "") for head in heads]

        def is_renewed() -> None:
            before = renewed()
            wait_for(lambda: all(now != then for now, then in zip(renewed(), before, strict=True)), "renewals", 60)

        with smb.connect(two.address, timeout=TIMEOUT_S) as client:
            lock = client.lock("held", ttl=600.0)
            lock.acquire()
            buffer = client.create("kept", 10)
            number = 0

            def goes_on() -> None:
                nonlocal number
                is_renewed()
                number += 1
                client.create(f"b{number}", 10)
                buffer.accumulate(np.ones(10, "f4"))
                assert two.leader() == leader
                assert two.running[leader].metric("smb_coordinator_servers_alive") == 1

            for ahead_s in (3 * DAY_S, -3 * DAY_S):
                clocks[leader].set(ahead_s)
                goes_on()
            clocks[1 - leader].set(3 * DAY_S)
            two.running[leader].kill()
            leader = two.leader(but=leader)
            goes_on()
            lock.release()
            assert {info.name for info in client.list()} == {"kept", *(f"b{each + 1}" for each in range(number))}
            assert buffer.read().tolist() == [number] * 10


def test_a_stopped_leader_answers_nobody_afterwards(etcd: EtcdCluster, daemons: Daemons) -> None:
    """SIGSTOP of the leader, and SIGCONT once another leads: what it had not answered yet is refused, not answered by
    what it knew; nothing that it stores arrives.
    """
    with coordinators(daemons, etcd, "stop") as two:
        ready(daemons, two.address, "a")
        leader = two.leader()
        with smb.connect(two.address, timeout=TIMEOUT_S) as client:
            client.create("before", 10)
            alone = smb.connect(two.addresses[leader], timeout=TIMEOUT_S)
            stop(two.running[leader].pid)
            late: list[str] = []

            def ask() -> None:
                try:
                    alone.delete("before")
                    late.append("deleted")
                except smb.UnavailableError as error:
                    late.append(str(error))

            asking = threading.Thread(target=ask)
            asking.start()
            client.create("after", 10)
            os.kill(two.running[leader].pid, signal.SIGCONT)
            alone_closed = threading.Timer(5.0, alone.close)  # it waits for that one to lead again, else
            alone_closed.start()
            asking.join(TIMEOUT_S)
            alone_closed.join()
            assert late
            assert late != ["deleted"]
            assert {info.name for info in client.list()} == {"before", "after"}
            wait_for(lambda: two.health(leader).get("leadership") == "standby", "the stopped one to stand by")


def _targets(daemon: Daemon) -> set[tuple[str, str]]:
    """Return what a coordinator lists for Prometheus: role and address; nothing while it answers otherwise."""
    with contextlib.suppress(OSError):
        found = json.loads(daemon.page("/targets"))
        return {(each["labels"]["smb_role"], address) for each in found for address in each["targets"]}
    return set()


def test_a_standby_lists_all_daemons(etcd: EtcdCluster, daemons: Daemons) -> None:
    """Who leads and who stands by list the same daemons for Prometheus, also while etcd is cut off and after the leader
    was killed; a coordinator that stopped in order is listed no more. A standby is well, and says in its metrics how
    it is. The list is made anew every 5 s, so this takes some times 5 s."""
    gate = Gate(etcd.addresses)
    with contextlib.closing(gate), coordinators(daemons, gate.address, "roster") as two:
        leader = two.leader()
        standby = two.running[1 - leader]
        (server,) = ready(daemons, two.address, "a")
        pages = {("coordinator", each.metrics) for each in two.running}
        everybody = pages | {("server", server.metrics)}
        for daemon in two.running:
            wait_for(lambda: _targets(daemon) == everybody, "the whole list")  # noqa: B023 - called at once
        assert standby.metric("smb_coordinator_leads") == 0
        assert standby.metric("smb_coordinator_etcd_silent_seconds") < 30
        assert json.loads(standby.page("/livez"))["leadership"] == "standby"
        assert json.loads(standby.page("/readyz"))["etcd_silent_s"] < 30
        with pytest.raises(urllib.error.HTTPError) as told:
            standby.page("/")
        assert f"http://{two.running[leader].metrics}/" in told.value.read().decode()
        gate.shut()
        wait_for(lambda: standby.metric("smb_coordinator_etcd_silent_seconds") > 6, "the silence of etcd to be counted")
        assert [_targets(each) for each in two.running] == [everybody, everybody]
        gate.open()
        wait_for(lambda: standby.metric("smb_coordinator_etcd_silent_seconds") < 6, "etcd to be heard again")
        leader = two.leader()
        wait_for(lambda: run_smb("status", "--check", coordinator=two.address).returncode == 0, "the server's report")
        two.running[leader].kill()
        follower = two.running[two.leader(but=leader)]
        warned = run_smb("status", "--check", coordinator=two.address)
        assert warned.returncode == 1
        assert f"WARNING The coordinator at {two.addresses[leader]} does not answer" in warned.stdout
        wait_for(lambda: server.metric("smb_server_coordinator_connected") == 1, "the server at the new leader")
        assert _targets(follower) == everybody
        assert two.start(leader).address
        assert two.running[leader].stop() == 0
        left = {("coordinator", follower.metrics), ("server", server.metrics)}
        wait_for(lambda: _targets(follower) == left, "the list without the one that stopped")


def test_a_leader_that_is_cut_off_steps_down(etcd: EtcdCluster, daemons: Daemons) -> None:
    """Cut off from etcd, it stops answering before another leads, says that it is lost, and stands by later."""
    gate = Gate(etcd.addresses)
    with contextlib.closing(gate), coordinators(daemons, gate.address, "cut", 1) as first:
        assert first.leader() == 0
        second = daemons.coordinator("127.0.0.1:0", f"etcd://{etcd.addresses}/cut", *LEASE, name="second")
        assert second.address
        ready(daemons, f"{first.address},{second.address}", "a")
        gate.shut()
        wait_for(lambda: json.loads(_page(second))["leadership"] == "leader", "the other one to lead")
        assert first.health(0)["leadership"] == "lost"
        with smb.connect(f"{first.address},{second.address}", timeout=TIMEOUT_S) as client:
            client.create("meanwhile", 10)
        gate.open()
        wait_for(lambda: first.health(0).get("leadership") == "standby", "the first one to stand by")


def _page(daemon: Daemon) -> str:
    with contextlib.suppress(OSError):
        return daemon.page("/healthz")
    return '{"leadership": ""}'


def test_what_no_transaction_takes_is_refused_by_name(etcd: EtcdCluster, daemons: Daemons) -> None:
    """A rename of more metadata than fits etcd's request, and of a folder with too many buffers: refused, nothing
    changed, and the coordinator is as well as before. Very many sessions that end at once all end.
    """
    with coordinators(daemons, etcd, "limits", 1, "--session-lease", "2", "--idle-names", "2") as one:
        ready(daemons, one.address, "a")
        with smb.connect(one.address, timeout=TIMEOUT_S) as client:
            for name in ("large", "larger"):
                client.create(name, 10, metadata={"noise": os.urandom(600_000).hex()})
            with pytest.raises(smb.OutOfMemoryError, match='record of "buffer/'):
                client.displace("large", "larger", "largest")
            client.delete("larger")
            for number in range(64):
                client.create(f"folder/{number}", 1)
            with pytest.raises(smb.OutOfMemoryError, match="the change has 128 records"):
                client.rename_folder("folder", "other")
            client.delete("folder/0")
            client.rename_folder("folder", "other")
            assert {info.name for info in client.list()} == {"large"} | {f"other/{n}" for n in range(1, 64)}
            assert one.health(0)["store"] == "ok"
            for _ in range(300):  # sessions that nobody renews
                client._coordinator.open_session("silent", TIMEOUT_S)
            wait_for(
                lambda: one.running[0].metric('smb_coordinator_leases_lost_total{of="client"}') == 300,
                "300 lost leases",
            )
            assert one.health(0)["leadership"] == "leader"


def test_a_full_etcd_refuses_what_adds(daemons: Daemons) -> None:
    """Its quota used up: creates are refused and nothing is left, health tells, data go on, buffers can be deleted."""
    with running_etcd(options=("--quota-backend-bytes", str(16 << 20))) as small:
        small.wait_ready()
        with coordinators(daemons, small, "full", 1) as one:
            ready(daemons, one.address, "a")
            with smb.connect(one.address, timeout=TIMEOUT_S) as client:
                kept = client.create("kept", 10)

                def fill() -> None:
                    for number in range(40):
                        client.create(f"big/{number}", 1, metadata={"noise": os.urandom(300_000).hex()})

                with pytest.raises(smb.Error, match="space exceeded"):
                    fill()
                made = {info.name for info in client.list()}
                wait_for(lambda: one.health(0)["store"] == "failing", "health to tell")
                with pytest.raises(smb.Error, match="space exceeded"):
                    client.create("one-more", 1)
                kept.write(np.ones(10, "f4"))
                client.delete("big/0")
                assert {info.name for info in client.list()} == made - {"big/0"}
                assert one.health(0)["leadership"] == "leader"


# More than 5 s: a real etcd starts, and coordinators on it and beside it.
def test_records_move_to_etcd_and_back(etcd: EtcdCluster, daemons: Daemons) -> None:
    """Every record is there afterwards; the old place is served no more; a place in use is refused."""
    state = f"etcd://{etcd.addresses}/moved"
    first = daemons.coordinator()
    address = first.address
    (server,) = ready(daemons, address, "a")
    with smb.connect(address, timeout=TIMEOUT_S) as client:
        client.create("kept", 10, metadata={"a": 1}).write(np.full(10, 7, "f4"))
    directory = str(daemons.directory / "state")
    move = ("coordinator", "migrate", "--from", directory, "--to", state)
    running = run_smb(*move)
    assert running.returncode == 1
    assert "in use by another coordinator" in running.stderr
    assert first.stop() == 0
    moved = run_smb(*move)
    assert moved.returncode == 0, moved.stderr
    assert "records are in" in moved.stdout
    assert run_smb(*move).returncode == 1
    refused = daemons.coordinator(address)
    assert refused.wait() == 1
    assert "not the current ones: moved to etcd://" in refused.log.read_text()
    second = daemons.coordinator(address, state, *LEASE)
    assert second.address == address
    with smb.connect(address, timeout=TIMEOUT_S) as client:
        buffer = client.open("kept")
        assert buffer.metadata == {"a": 1}
        assert buffer.read().tolist() == [7.0] * 10
        client.create("new", 1)
    back = ("coordinator", "migrate", "--from", state, "--to", directory)
    led = run_smb(*back)
    assert led.returncode == 1
    assert "stop all of its coordinators" in led.stderr
    assert second.stop() == 0
    assert run_smb(*back).returncode == 0
    third = daemons.coordinator(address)
    assert third.address == address
    with smb.connect(address, timeout=TIMEOUT_S) as client:
        assert {info.name for info in client.list()} == {"kept", "new"}
    assert server.process.poll() is None


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here: no certificates for etcd")
def test_etcd_with_certificates_and_roles(daemons: Daemons, tmp_path: Path) -> None:
    """Over TLS with a certificate, as a user of etcd that may use one prefix: it leads there; without either, or at
    another prefix, it never does.
    """
    access = certificates(tmp_path / "access")
    tls = (f"--cert-file={access}/cert.pem", f"--key-file={access}/key.pem", f"--trusted-ca-file={access}/ca.pem")
    with running_etcd(options=(*tls, "--client-cert-auth")) as secured:
        address = secured.addresses
        etcdctl = ["etcdctl", f"--endpoints=https://{address}", *_flags(access)]
        for command in (
            "user add root:secret", "user add smb:word", "role add smb",
            "role grant-permission smb readwrite mine/ mine0",
            "user grant-role smb smb", "user grant-role root root", "auth enable",
        ):  # fmt: skip
            wait_for(lambda command=command: _done([*etcdctl, *command.split()]), f"etcdctl {command}")  # type: ignore[misc]
        credentials = ("--etcd-credentials", str(access))
        stranger = daemons.coordinator("127.0.0.1:0", f"etcd://{address}/mine", *LEASE, *credentials, name="stranger")
        wait_for(lambda: "permission denied" in stranger.log.read_text(), "the stranger's refusal")
        (access / "user").write_text("smb:word\n")
        (access / "user").chmod(0o600)
        other = daemons.coordinator("127.0.0.1:0", f"etcd://{address}/other", *LEASE, *credentials, name="other")
        wait_for(lambda: "permission denied" in other.log.read_text(), "the refusal of another prefix")
        with coordinators(daemons, address, "mine", 1, *credentials) as one:
            ready(daemons, one.address, "a")
            with smb.connect(one.address, timeout=TIMEOUT_S) as client:
                client.create("kept", 10)
                assert [info.name for info in client.list()] == ["kept"]


def certificates(directory: Path) -> Path:
    """An authority, and one certificate for 127.0.0.1 that serves etcd and is shown to it."""
    directory.mkdir()
    for command in (
        "req -x509 -days 2 -subj /CN=authority -keyout ca.key -out ca.pem",
        "req -subj /O=etcd -keyout key.pem -out request.pem",
    ):
        of = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
        subprocess.run(["openssl", *command.split(), *of.split()], cwd=directory, check=True, capture_output=True)
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    sign = "x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out cert.pem"
    subprocess.run(["openssl", *sign.split()], cwd=directory, check=True, capture_output=True)
    (directory / "key.pem").chmod(0o600)
    return directory


def _flags(access: Path) -> list[str]:
    return [f"--cacert={access}/ca.pem", f"--cert={access}/cert.pem", f"--key={access}/key.pem"]


def _done(command: list[str]) -> bool:
    environment = {**os.environ, "ETCDCTL_API": "3"}
    found = subprocess.run(command, capture_output=True, env=environment, text=True)
    return found.returncode == 0 or "already" in found.stderr
