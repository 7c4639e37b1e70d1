"""`smb clients` and `smb clients kick`: who is connected, and how an operator ends it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import smb
from smb.rpc.coordinator_client import Coordinator
from smb.security.credentials import load_directory
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import Role
from smb.tools.cli.main import app
from tests.support.daemons import wait_for


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lab")
    holders = [
        Holder(Role.COORDINATOR, ""), Holder(Role.OPERATOR, "ann"), Holder(Role.SERVER, "server-0"),
        Holder(Role.CLIENT, "alice", ("team",)), Holder(Role.CLIENT, "bob"), Holder(Role.READER, "carol"),
    ]  # fmt: skip
    make_set(made, holders)
    return made


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=1, capacity="32MiB", credentials=place, session_lease=6) as running:
        yield running


def run(cluster: smb.LocalCluster, place: Path, who: str, *arguments: str) -> Result:
    variables = {"SMB_COORDINATOR": cluster.address, "SMB_CREDENTIALS": str(place / who)}
    return CliRunner().invoke(app, ["clients", *arguments], env=variables)


def test_clients_are_listed_with_what_they_have(cluster: smb.LocalCluster, place: Path) -> None:
    """Certificate, role, namespaces, connections and locks; as a table and as JSON; without ids of sessions."""
    at = cluster.address
    with (
        smb.connect(at, transport="tcp", credentials=place / "alice", name="trainer") as alice,
        smb.connect(at, transport="tcp", credentials=place / "bob") as bob,
    ):
        alice.create("team/w", (10,)).write(np.ones(10, np.float32))
        with bob.lock("turn", ttl=60):

            def rows() -> dict[str, dict[str, object]]:
                listed = run(cluster, place, "ann", "--json")
                assert listed.exit_code == 0, listed.output
                found = {row["certificate"]: row for row in json.loads(listed.output)["clients"]}
                there = found["bob"]["held"] and found["alice"]["connections"] and found["bob"]["connections"]
                return found if there else {}

            found = wait_for(rows, "connections and locks of both")
            assert found["alice"]["role"] == "client"
            assert found["alice"]["namespaces"] == ["team"]
            assert str(found["alice"]["name"]).startswith("trainer (")
            assert found["bob"]["held"] == ["lock turn"]
            assert found["bob"]["holds"] == 1
            assert found["alice"]["holds"] == 0
            shown = run(cluster, place, "ann").output
            assert "lock turn" in shown
            assert "2 clients" in shown
            for client in (alice, bob):
                number = client._session._session_id
                assert f"{number:x}" not in shown
                assert str(number) not in json.dumps(found)
    refused = run(cluster, place, "alice")
    assert "limited to namespaces" in str(refused.exception)


def test_names_of_clients_steer_no_terminal(cluster: smb.LocalCluster, place: Path) -> None:
    """A program that does not use smb.connect may send any name: the coordinator escapes it."""
    coordinator, bad = Coordinator(cluster.address, load_directory(place / "bob")), "b\x1b]0;owned\x07\x9b\nü"
    escaped = "b\\x1b]0;owned\\x07\\x9b\\nü"
    try:
        coordinator.open_session(bad, 10)
        assert escaped in run(cluster, place, "ann").output
        listed = json.loads(run(cluster, place, "ann", "--json").output)["clients"]
        assert [row["name"] for row in listed if row["certificate"] == "bob"] == [f"{escaped} (bob)"]
        done = run(cluster, place, "ann", "kick", escaped)
        assert f"ended: {escaped} (bob)" in done.output
    finally:
        coordinator.close()


def test_a_kicked_client_hears_who_did_it(cluster: smb.LocalCluster, place: Path) -> None:
    """Its locks are free at once, its calls and waits fail and say so, it does not come back by itself; others go on;
    and it may connect anew."""
    at = cluster.address
    with (
        smb.connect(at, transport="tcp", credentials=place / "bob") as bob,
        smb.connect(at, credentials=place / "alice") as other,
        ThreadPoolExecutor(3) as threads,
    ):
        counter, stop = bob.create("counter", (1,), dtype="int64"), threading.Event()

        def count() -> int:
            done = 0
            while not stop.is_set():
                counter.fetch_add(0, 1)
                done += 1
            return done

        counting = threads.submit(count)
        try:
            alice = smb.connect(at, transport="tcp", credentials=place / "alice", name="trainer", timeout=5)
            weights = other.create("team/v", (10,))
            mine, published = alice.open("team/v"), alice.create("team/p", (4,), versions=2)
            mine.write(np.ones(10, np.float32))
            lock = alice.lock("team/turn", ttl=600)
            lock.acquire()
            waiting = threads.submit(published.wait, 1)
            opening = threads.submit(alice.open, "team/later", timeout=300.0)
            refused = run(cluster, place, "bob", "kick", "alice")
            assert "it takes the role operator" in str(refused.exception)
            missing = run(cluster, place, "ann", "kick", "nobody")
            assert "no client that is connected has the name" in str(missing.exception)
            done = run(cluster, place, "ann", "kick", "trainer")
            assert done.exit_code == 0, done.output
            assert "1 session of trainer ended" in done.output
            assert "ended: trainer (" in done.output
            with other.lock("team/turn", timeout=5):
                pass
            for use in (mine.read, lambda: waiting.result(20), lambda: alice.create("team/more", (1,))):
                with pytest.raises(
                    smb.UnavailableError, match=r"an operator ended the session of trainer .*kick, by ann"
                ):
                    use()
            with pytest.raises(smb.UnavailableError, match=r"an operator ended the session of this client .*, by ann"):
                opening.result(20)
            with pytest.raises(smb.UnavailableError, match="an operator ended the session"):
                alice.lock("team/turn").acquire()
            alice.close()
            assert weights.read().sum() == 10
        finally:
            stop.set()
        assert counting.result() == counter.fetch_add(0, 0)
        smb.connect(at, transport="tcp", credentials=place / "alice").close()


def test_a_client_that_maps_is_kicked_too(cluster: smb.LocalCluster, place: Path) -> None:
    """A view's calls end with the next renewal, and by the certificate's name all its programs are ended."""
    at = cluster.address
    with smb.connect(at, credentials=place / "bob") as one, smb.connect(at, credentials=place / "bob") as two:
        buffer = one.create("mapped", (10,))
        buffer.write(np.ones(10, np.float32))
        done = run(cluster, place, "ann", "kick", "bob")
        assert "2 sessions of bob ended" in done.output

        def refused() -> str:
            try:
                two.open("mapped").read()
                buffer.read()
            except smb.UnavailableError as error:
                return str(error)
            return ""

        assert "an operator ended the session" in wait_for(refused, "end of the mapping")
