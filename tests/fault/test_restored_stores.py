"""Backups of the coordinator's state are restored after what came since: nothing that servers hold is destroyed by it.

A buffer that the backup knows is there with its data, wherever it lies by now. One that it does not know is listed as
quarantined, and is there again with a store that knows it. A deletion since then may be undone, no more.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import smb
from tests.fault.long import LIMIT_S, LONG
from tests.support.checkers import check_at_rest, delta
from tests.support.commands import run_smb
from tests.support.daemons import Daemon, running_daemons, wait_for
from tests.support.etcd import needs_etcd, running_etcd
from tests.support.returning import quarantined
from tests.support.second_copy import are_whole, lose
from tests.support.stores import EtcdSnapshot, SqliteFile, Store, digest, held
from tests.support.transports import SLOWNESS

pytestmark = pytest.mark.timeout(LIMIT_S)

needs_etcdctl = pytest.mark.skipif(
    shutil.which("etcdctl") is None, reason="etcdctl is not here (`make etcd-server` installs Debian's etcd-client)"
)
SERVERS = ("a", "b", "c")
COUNT = 20_011
BACK_S = 40.0 * SLOWNESS  # until servers and buffers are back
ONE, TWO = "one", "two"  # over all servers, with one copy and with two


class Drill:
    """A cluster of three servers with buffers, whose store is backed up at first."""

    def __init__(self, store: Store, memory: Path, start: Callable[[str], Daemon], directory: Path) -> None:
        self.store, self.memory, self._start, self._directory = store, memory, start, directory
        self.servers = {name: start(name) for name in SERVERS}
        assert all(server.address for server in self.servers.values())
        self.added: dict[str, int] = {}
        self._saved = 0
        with self.client() as client:
            wait_for(lambda: sum(server.alive for server in client.servers()) == len(SERVERS), "all servers", BACK_S)
            for name, copies in ((ONE, 1), (TWO, 2)):
                client.create(name, COUNT, "int64", stripe="16KiB", replicas=copies)
            for server in SERVERS:
                client.create(f"one-{server}", COUNT, "int64", servers=[server])
                client.create(f"two-{server}", COUNT, "int64", servers=[server], replicas=2)
            self.add(client)

    def client(self) -> contextlib.AbstractContextManager[smb.Client]:
        """A new one."""
        return smb.connect(self.store.address, timeout=BACK_S)

    def add(self, client: smb.Client) -> None:
        """Change every buffer that is there."""
        for info in client.list():
            client.open(info.name).accumulate(delta(COUNT))
            self.added[info.name] = self.added.get(info.name, 0) + 1

    def check(self, client: smb.Client, name: str) -> None:
        """All that was acknowledged is there, once."""
        check_at_rest(client.open(name).read(), self.added[name], name)

    def save(self) -> Path:
        """Back up."""
        self._saved += 1
        path = self._directory / f"backup-{self._saved}"
        self.store.save(path)
        self.wait_until_back()
        return path

    def wait_until_back(self) -> None:
        """All servers are there, with what they have."""
        with self.client() as client:
            wait_for(lambda: sum(server.alive for server in client.servers()) == len(SERVERS), "all servers", BACK_S)
            wait_for(lambda: are_whole(client), "two copies of each segment", BACK_S)

    def kill(self, name: str, *, with_memory: bool = False) -> None:
        """A server is killed, and its segments of two copies go on elsewhere."""
        self.servers[name].kill()
        if with_memory:
            lose(self.memory, name)
        with self.client() as client:
            wait_for(lambda: are_whole(client, without=name), f"two copies without {name}", BACK_S)

    def begin(self, name: str) -> Daemon:
        """Start a server, with what it has in memory."""
        started = self._start(name)
        assert started.address
        return started

    def start(self, name: str) -> None:
        """It is back, and all is whole again."""
        self.servers[name] = self.begin(name)
        self.wait_until_back()

    def _registrations(self) -> list[int]:
        return [server.log.read_text().count('registered as "') for server in self.servers.values()]

    def contents(self, client: smb.Client) -> dict[int, str]:
        """Return each segment's digest, by its number, as its primary has it."""
        return {
            place.id: digest(self.memory, place.server, place.id)
            for info in client.list()
            for place in info.layout.segments
        }

    @contextlib.contextmanager
    def restored(self, path: Path) -> Iterator[smb.Client]:
        """Restore it under a client that has all buffers open, which goes on with them; nothing was destroyed."""
        with self.client() as before, self.client() as client:
            kept = [before.open(info.name) for info in before.list() if info.name in self.added]
            contents, registered = self.contents(before), self._registrations()
            self.store.restore(path)
            # A server says so once it has done what it was told.
            wait_for(
                lambda: all(now > then for now, then in zip(self._registrations(), registered, strict=True)),
                "registrations of all servers",
                BACK_S,
            )
            there = held(self.memory)
            for number, content in contents.items():
                found = {digest(self.memory, server, number) for server in there.get(number, ())}
                assert content in found, f"segment {number:016x} was destroyed"
            yield client
            for buffer in kept:
                with contextlib.suppress(smb.NotFoundError):  # the restored store does not know it
                    if any(info.name == buffer.name for info in client.list()):
                        buffer.accumulate(delta(COUNT))
                        self.added[buffer.name] += 1
                        self.check(client, buffer.name)

    def check_known(self, client: smb.Client, *names: str) -> None:
        """These are there with their data, and none is called lost."""
        wait_for(lambda: set(names) <= {info.name for info in client.list()}, f"{names}", BACK_S)
        wait_for(
            lambda: not any(info.lost for info in client.list() if info.name in names), f"{names} not lost", BACK_S
        )
        for name in names:
            self.check(client, name)

    def check_memory(self, client: smb.Client) -> None:
        """What a server holds is a buffer's, or is listed as quarantined."""

        def unaccounted() -> list[str]:
            places = {
                (server, place.id)
                for info in client.list()
                for place in info.layout.segments
                for server in (place.server, place.backup, place.copying_to)
            }
            listed = quarantined(self.store.address)
            return [
                f"{number:016x} on {server}"
                for number, servers in held(self.memory).items()
                for server in servers
                if (server, number) not in places and (server, number) not in listed
            ]

        try:
            wait_for(lambda: not unaccounted(), "account of all memory", BACK_S)
        except AssertionError:
            raise AssertionError(f"neither a buffer's nor quarantined: {unaccounted()}") from None


@pytest.fixture(params=["sqlite", *([pytest.param("etcd", marks=[needs_etcd, needs_etcdctl])] if LONG else [])])
def drill(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Drill]:
    """A cluster, with its state in either."""
    with contextlib.ExitStack() as left:
        etcd = left.enter_context(running_etcd()) if request.param == "etcd" else None
        if etcd is not None:
            etcd.wait_ready()
        daemons = left.enter_context(running_daemons(tmp_path))
        store = EtcdSnapshot(daemons, etcd) if etcd is not None else SqliteFile(daemons, tmp_path)
        left.callback(store.close)
        yield Drill(store, daemons.memory, lambda name: daemons.memory_server(store.address, name), tmp_path)


ALL = (ONE, TWO, *(f"{kind}-{server}" for kind in ("one", "two") for server in SERVERS))


# More than 5 s: a server is drained and taken back, and a second cluster starts from the backup.
def test_after_drains(drill: Drill) -> None:
    """Every buffer lies elsewhere by now; each is recognised where it is."""
    saved = drill.save()
    for name in SERVERS[: 2 if LONG else 1]:
        assert (done := run_smb("drain", name, "--wait", coordinator=drill.store.address)).returncode == 0, done.stderr
        assert (done := run_smb("undrain", name, coordinator=drill.store.address)).returncode == 0, done.stderr
        with drill.client() as client:
            drill.add(client)
    with drill.restored(saved) as client:
        drill.check_known(client, *ALL)
        drill.check_memory(client)


@pytest.mark.skipif(not LONG, reason="waits for copies and leases; SMB_LONG=1")
def test_after_fail_overs(drill: Drill) -> None:
    """Primaries and backups are others by now, one server was lost with its memory; afterwards any one may be lost."""
    with drill.client() as client:
        client.delete("one-c")
        client.delete(ONE)
        for name in ("one-c", ONE):
            drill.added.pop(name)
    saved = drill.save()
    for name, with_memory in (("a", False), ("b", False), ("c", True)):
        drill.kill(name, with_memory=with_memory)
        drill.start(name)
        with drill.client() as client:
            drill.add(client)
    known = [name for name in ALL if name not in ("one-c", ONE)]
    with drill.restored(saved) as client:
        drill.check_known(client, *known)
        drill.check_memory(client)
    drill.wait_until_back()
    drill.kill("a", with_memory=True)
    with drill.client() as client:
        drill.check_known(client, *(name for name in known if name != "one-a"))


@pytest.mark.skipif(not LONG, reason="waits for leases; SMB_LONG=1")
def test_after_deletions_and_creations(drill: Drill) -> None:
    """What was deleted may be back, and can be deleted. What was created is quarantined; `smb forget` frees one, and
    with the store that knows it the other one is there again with its data.
    """
    saved = drill.save()
    with drill.client() as client:
        for name in ("one-a", "two-a"):
            client.delete(name)
            drill.added.pop(name)
        for name, copies in (("new", 1), ("new-two", 2)):
            client.create(name, COUNT, "int64", stripe="16KiB", replicas=copies)
        drill.add(client)
        new = {place.id: info.name for info in client.list() for place in info.layout.segments if "new" in info.name}
        copies = {number: servers for number, servers in held(drill.memory).items() if number in new}
    newest = drill.save()
    with drill.restored(saved) as client:
        drill.check_known(client, *(name for name in ALL if name not in ("one-a", "two-a")))
        drill.check_memory(client)
        for name in ("one-a", "two-a"):
            client.delete(name, missing_ok=True)
        listed = quarantined(drill.store.address)
        for number, servers in copies.items():
            for server in servers:
                entry = listed[server, number]
                path = drill.memory / f"smb.{server}.{number:016x}.segment"
                assert entry["bytes"] == path.stat().st_size, entry
                assert entry["reason"], entry
        assert any(server.used >= sum(entry["bytes"] for entry in listed.values() if entry["server"] == server.name) > 0
                   for server in client.servers())  # fmt: skip
    with drill.restored(newest) as client:
        drill.check_known(client, "new", "new-two", *(name for name in ALL if name not in ("one-a", "two-a")))
        drill.check_memory(client)
        assert not {number for _, number in quarantined(drill.store.address)} & new.keys()
    with drill.restored(saved) as client:
        server, number = min(key for key in quarantined(drill.store.address) if key[1] in new)
        forget = run_smb("forget", server, f"{number:016x}", coordinator=drill.store.address)
        assert forget.returncode == 0, forget.stderr
        wait_for(lambda: server not in held(drill.memory).get(number, set()), "freed memory", BACK_S)
        assert (server, number) not in quarantined(drill.store.address)
        refused = run_smb(
            "forget", server, f"{client.open(ONE).layout.segments[0].id:016x}", coordinator=drill.store.address
        )
        assert refused.returncode != 0
        drill.check(client, ONE)


@pytest.mark.skipif(not LONG, reason="waits for leases; SMB_LONG=1")
def test_after_renames(drill: Drill) -> None:
    """The old names lead to the buffers, with what was added under the new ones."""
    saved = drill.save()
    with drill.client() as client:
        for name in (ONE, TWO):
            client.rename(name, f"{name}-renamed")
            drill.added[f"{name}-renamed"] = drill.added.pop(name)
        drill.add(client)
    for name in (ONE, TWO):
        drill.added[name] = drill.added.pop(f"{name}-renamed")
    with drill.restored(saved) as client:
        drill.check_known(client, *ALL)
        drill.check_memory(client)


@pytest.mark.skipif(not LONG, reason="waits for leases; SMB_LONG=1")
@pytest.mark.parametrize("counted_on", [False, True], ids=["fewer-changes-of-roles", "more-changes-of-roles"])
def test_two_histories(drill: Drill, counted_on: bool) -> None:
    """The restored store goes on with an old copy, as the servers with the newest one are away.

    When they are back there are two histories of one segment, each with acknowledged changes: neither is destroyed,
    whichever had more epochs.
    """
    name = "two-a"
    saved = drill.save()
    with drill.client() as client:
        (place,) = client.open(name).layout.segments
    newest_on, old_on = place.server, place.backup
    (third,) = set(SERVERS) - {newest_on, old_on}
    drill.kill(old_on)
    with drill.client() as client:
        client.open(name).accumulate(delta(COUNT))
    newest = digest(drill.memory, newest_on, place.id)
    for server in (newest_on, third):
        drill.servers[server].kill()
    drill.store.restore(saved)
    drill.servers[old_on] = drill.begin(old_on)
    with drill.client() as client:
        client.open(name).accumulate(delta(COUNT) * 1000)  # in the restored history
        histories = {newest, digest(drill.memory, old_on, place.id)}
        assert len(histories) == 2
        if counted_on:
            drill.servers["d"] = drill.begin("d")
            for _ in range(3):
                wait_for(lambda: client.open(name).layout.segments[0].backup == "d", "a copy on d", BACK_S)
                drill.servers["d"].kill()
                wait_for(lambda: not client.open(name).layout.segments[0].backup, "the loss of d's copy", BACK_S)
                drill.servers["d"] = drill.begin("d")
            wait_for(lambda: client.open(name).layout.segments[0].backup == "d", "a copy on d", BACK_S)
        for server in (newest_on, third):
            drill.servers[server] = drill.begin(server)
        wait_for(lambda: all(server.alive for server in client.servers()), "all servers", BACK_S)
        wait_for(lambda: are_whole(client), "two copies of each segment", BACK_S)
        there = {digest(drill.memory, server, place.id) for server in held(drill.memory)[place.id]}
        assert histories <= there, f"{len(histories - there)} of 2 histories destroyed"
        drill.check_memory(client)
        assert client.open(name).read()[0] in (2, 1001)
