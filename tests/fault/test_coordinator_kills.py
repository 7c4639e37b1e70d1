"""kill -9 of the coordinator or a memory server at every step of create, delete, register, renew and a session's end.

Afterwards the name is whole or free, the servers hold the segments of the buffers and no others, and a process that
adds to another buffer all the while has noticed nothing. The daemons are real; each step has a failpoint, and a test
fails if its failpoint does not fire. SMB_LONG=1 adds second times and other ways to the same steps.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

import smb
from smb.daemon.failpoint import ALLOWED_VARIABLE, POINT_VARIABLE
from smb.rpc import control_pb2 as pb
from tests.fault.long import PAUSE_AFTER, PAUSE_S, some
from tests.fault.test_drain import MOVING, MOVING_ONE
from tests.fault.test_elastic_kills import HSGD
from tests.fault.test_switched_roles import SWITCHING
from tests.fault.test_train_kills import CLOSING, SENT
from tests.support.clients import add_forever, make_event, spawn
from tests.support.daemons import Daemon, Daemons, running_daemons, stopped, wait_for
from tests.support.memory_server import coordinator_stub

MIB = 1 << 20
SOURCES = Path(__file__).parents[2]
SERVERS = ("a", "b")
VICTIM = "b"  # of the memory servers
CALL_S = 8.0
SESSION_IDS = itertools.count(4242)


class Cluster:
    """A coordinator and two memory servers, each started again at its old address, and what must be there."""

    def __init__(self, daemons: Daemons) -> None:
        self._daemons = daemons
        self._addresses: dict[str, str] = {}
        self.running: dict[str, Daemon] = {}
        self.stub: Any = None
        self.locks: dict[str, Any] = {}  # by name, as first answered

    @property
    def address(self) -> str:
        """The coordinator's."""
        return self._addresses["coordinator"]

    def start(self, name: str, armed: str = "") -> Daemon:
        """Start a daemon, with a failpoint armed. Waits until it serves only where none is."""
        if armed:
            self._daemons.variables = {POINT_VARIABLE: armed, ALLOWED_VARIABLE: "1"}
        try:
            listen = self._addresses.get(name, "127.0.0.1:0")
            if name == "coordinator":
                # All cases look at the locks of earlier ones: none is freed for not being used meanwhile.
                daemon = self._daemons.coordinator(listen, None, "--idle-names", "86400")
            else:
                daemon = self._daemons.memory_server(self.address, name, "--listen", listen)
        finally:
            self._daemons.variables = {}
        self.running[name] = daemon
        if not armed:
            self._addresses[name] = daemon.address
        return daemon

    def kill(self, name: str) -> None:
        """SIGKILL it, if it lives, and forget that it was ready."""
        self.running[name].kill()

    def create(self, name: str = "w", stripe: int = MIB) -> Any:
        """Create a buffer with a segment on each server."""
        request = pb.CreateBufferRequest(
            name=name, shape=[3 * stripe], dtype="uint8", server_names=SERVERS, stripe_bytes=stripe
        )
        return self.stub.CreateBuffer(request, timeout=CALL_S, wait_for_ready=True)

    def delete(self, name: str = "w") -> None:
        """Delete a buffer."""
        self.stub.DeleteBuffer(pb.DeleteBufferRequest(name=name), timeout=CALL_S, wait_for_ready=True)

    def use_lock(self, name: str) -> Any:
        """Return a lock's place; the first answer is the one that counts."""
        request = pb.CreateBufferRequest(name=name, kind=pb.LOCK, exist_ok=True)
        lock = self.stub.CreateBuffer(request, timeout=CALL_S, wait_for_ready=True)
        return self.locks.setdefault(name, lock)

    def names(self) -> set[str]:
        """Return the names of all buffers."""
        reply = self.stub.ListBuffers(pb.ListBuffersRequest(), timeout=CALL_S, wait_for_ready=True)
        return {buffer.name for buffer in reply.buffers}

    def whole(self) -> str:
        """Return what is wrong with the servers' memory, "" for nothing: files, records and counts must agree."""
        reply = self.stub.ListBuffers(pb.ListBuffersRequest(), timeout=CALL_S, wait_for_ready=True)
        expected: defaultdict[str, set[int]] = defaultdict(set)
        for buffer in [*reply.buffers, *self.locks.values()]:
            for segment in buffer.layout.segments:
                expected[segment.server].add(segment.id)
        servers = self.stub.ListServers(pb.ListServersRequest(), timeout=CALL_S).servers
        for server in servers:
            files = dict(_segment_files(self._daemons.memory, server.name))
            if files.keys() != expected[server.name]:
                return f"{server.name} holds {sorted(files)}, buffers have {sorted(expected[server.name])}"
            if not server.alive or server.used_bytes != sum(files.values()):
                return f"{server.name} alive {server.alive}, {server.used_bytes} bytes of {sum(files.values())}"
        return "" if len(servers) == len(SERVERS) else f"{len(servers)} servers"


def _segment_files(memory: Path, server: str) -> Iterator[tuple[int, int]]:
    for path in memory.glob(f"smb.{server}.*.segment*"):
        *_, number, suffix = path.name.removesuffix(".new").split(".")
        assert suffix == "segment"
        with suppress(FileNotFoundError):  # deleted, or given its name, this very moment: who asks asks again
            yield int(number, 16), path.stat().st_size


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_daemons(tmp_path_factory.mktemp("kills")) as daemons, ExitStack() as leaving:
        made = Cluster(daemons)
        for name in ("coordinator", *SERVERS):
            made.start(name)
        made.stub = leaving.enter_context(coordinator_stub(made.address))
        yield made


@dataclass
class Writer:
    """A process that adds to the buffer "steady" without end, and dies of the first error."""

    process: Any
    added: Any  # event

    def goes_on(self) -> None:
        """Wait until it has added once more, from now on."""
        self.added.clear()
        wait_for(lambda: self.added.is_set() or self.process.exitcode is not None, "addition", deadline_s=30)
        assert self.process.exitcode is None, "the writer noticed; its error is on the standard error"


@pytest.fixture(scope="module")
def writer(cluster: Cluster) -> Iterator[Writer]:
    cluster.create("steady", 4096)  # a larger one takes the processors for which the daemons wait
    added = make_event()
    process = spawn(add_forever, cluster.address, "tcp", "steady", added, PAUSE_S, PAUSE_AFTER)
    made = Writer(process, added)
    try:
        made.goes_on()
        yield made
    finally:
        process.kill()
        process.join()


# What is done while a failpoint is armed: returns once the victim must be dead. Each says whether it was answered.
Act = Callable[[Cluster], "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What the client knows: the buffer is there for sure, gone for sure, or neither; the lock that it asked for."""

    present: bool | None = None
    lock: str = ""


def attempt(call: Callable[[], object]) -> bool:
    try:
        call()
    except grpc.RpcError:
        return False
    return True


def create(cluster: Cluster) -> Outcome:
    return Outcome(present=True if attempt(cluster.create) else None)


def delete(cluster: Cluster) -> Outcome:
    gone = attempt(cluster.create) and attempt(cluster.delete)
    return Outcome(present=False if gone else None)


def rename(cluster: Cluster) -> Outcome:
    """Over another one, which must be dropped: whatever happened in the middle, one of the two has the name."""
    if not (attempt(cluster.create) and attempt(lambda: cluster.create("spare"))):
        return Outcome()
    request = pb.RenameBufferRequest(name="spare", new_name="w", replace=True)
    attempt(lambda: cluster.stub.RenameBuffer(request, timeout=CALL_S, wait_for_ready=True))
    return Outcome(present=True)


def create_in_vain(cluster: Cluster) -> Outcome:
    """One server is stopped, so it makes its segment when the creation was given up long ago."""
    with stopped(cluster.running[VICTIM].pid):
        assert not attempt(cluster.create)
    return Outcome(present=False)


def use_lock(cluster: Cluster) -> Outcome:
    name = f"lock-{len(cluster.locks)}"
    attempt(lambda: cluster.use_lock(name))
    return Outcome(lock=name)


def wait(cluster: Cluster) -> Outcome:
    """It comes by itself."""
    return Outcome()


def open_session(cluster: Cluster) -> Outcome:
    request = pb.OpenSessionRequest(client_name="victim")
    attempt(lambda: cluster.stub.OpenSession(request, timeout=CALL_S, wait_for_ready=True))
    return Outcome()


def renew_session(cluster: Cluster) -> Outcome:
    request = pb.RenewSessionRequest(session_id=99, client_name="victim")
    attempt(lambda: cluster.stub.RenewSession(request, timeout=CALL_S, wait_for_ready=True))
    return Outcome()


def close_session(cluster: Cluster) -> Outcome:
    request = pb.CloseSessionRequest(session_id=next(SESSION_IDS))  # unknown, so it is taken to have lived before
    attempt(lambda: cluster.stub.CloseSession(request, timeout=CALL_S, wait_for_ready=True))
    return Outcome()


COORDINATOR_CASES: list[tuple[str, Act]] = [
    ("coordinator.create.asked", create),
    ("coordinator.create.pending_stored", create),
    ("coordinator.create.segment_made", create),
    ("coordinator.create.segments_made", create),
    ("coordinator.create.ready_stored", create),
    ("coordinator.create.ready_stored", use_lock),
    ("coordinator.create.taken_back", create_in_vain),
    ("coordinator.delete.asked", delete),
    ("coordinator.delete.erased", delete),
    ("coordinator.delete.segment_dropped", delete),
    ("coordinator.delete.dropped", delete),
    ("coordinator.rename.asked", rename),
    ("coordinator.rename.stored", rename),
    ("coordinator.register.asked", wait),
    ("coordinator.register.stored", wait),
    ("coordinator.renew.asked", wait),
    ("coordinator.renew.granted", wait),
    ("coordinator.session.opened", open_session),
    ("coordinator.session.renewal_asked", renew_session),
    ("coordinator.session.renewed", renew_session),
    ("coordinator.session.end_stored", close_session),
    ("coordinator.session.end_sent", close_session),
    # The changes of the store are the term, the pending record, the ready one, its end. Servers register as they were.
    ("coordinator.store.written:4", delete),
    ("coordinator.store.committed:3", delete),
]
LONG_CASES: list[tuple[str, Act]] = [
    ("coordinator.create.segment_made:2", create),
    ("coordinator.create.pending_stored", use_lock),
    ("coordinator.create.segments_made", use_lock),
    ("coordinator.delete.segment_dropped:2", delete),
    *((f"coordinator.store.{step}:1", wait) for step in ("written", "committed")),
    *((f"coordinator.store.{step}:{count}", delete) for step in ("written", "committed") for count in range(2, 5)),
]
if os.environ.get("SMB_LONG"):
    COORDINATOR_CASES += LONG_CASES
SERVER_CASES: list[tuple[str, Act]] = [
    ("memserver.create.asked", create),
    ("memserver.create.made", create),
    ("memserver.create.done", create),
    ("memserver.delete.asked", delete),
    ("memserver.delete.booked", delete),
    ("memserver.delete.done", delete),
    ("memserver.register.sending", wait),
    ("memserver.register.answered", wait),
    ("memserver.register.dropped", wait),
    ("memserver.register.done", wait),
    ("memserver.renew.sending", wait),
    ("memserver.renew.answered", wait),
    ("memserver.session.ended", close_session),
]


def test_every_failpoint_has_its_case() -> None:
    """None is forgotten, and none is tested that is not there."""
    sources = [*(SOURCES / "smb").rglob("*.py"), *(SOURCES / "memserver").rglob("*.py")]
    points = {point for path in sources for point in re.findall(r'\bfailpoint\("([^"]+)"\)', path.read_text())}
    # test_train_kills.py, test_elastic_kills.py, test_drain.py, test_switched_roles.py, tests/train/test_overlap.py,
    # tests/train/test_many_members.py
    elsewhere = {*CLOSING, *SENT, *HSGD, *MOVING, *MOVING_ONE, *SWITCHING, "train-part", "train-word-decided"}
    assert points == {point.split(":")[0] for point in [*dict(COORDINATOR_CASES + SERVER_CASES), *elsewhere]}


@pytest.mark.parametrize(("point", "act"), some(COORDINATOR_CASES), ids=lambda value: getattr(value, "__name__", value))
def test_a_coordinator_killed_at_any_step_leaves_nothing_half_done(
    cluster: Cluster, writer: Writer, point: str, act: Act
) -> None:
    """Started again, it knows every buffer that was whole, and takes back whatever was not."""
    cluster.kill("coordinator")
    armed = cluster.start("coordinator", point)
    if act is not wait:
        assert armed.address == cluster.address
    with killed(cluster, "coordinator"):
        outcome = act(cluster)
    check(cluster, writer, outcome)


@pytest.mark.parametrize(("point", "act"), some(SERVER_CASES), ids=lambda value: getattr(value, "__name__", value))
def test_a_memory_server_killed_at_any_step_leaves_nothing_half_done(
    cluster: Cluster, writer: Writer, point: str, act: Act
) -> None:
    """Started again, it holds the segments of the buffers, and no others."""
    if point == "memserver.register.dropped":
        cluster.create()
    cluster.kill(VICTIM)
    if point == "memserver.register.dropped":
        cluster.delete()
    armed = cluster.start(VICTIM, point)
    # Of sessions that ended before it hears while it registers, and then it never serves.
    if act not in (wait, close_session):
        assert armed.address
    with killed(cluster, VICTIM):
        outcome = act(cluster)
    check(cluster, writer, outcome)


@contextmanager
def killed(cluster: Cluster, victim: str) -> Iterator[None]:
    """What is done here has the victim killed by its own failpoint; afterwards it runs again, without one."""
    daemon = cluster.running[victim]
    yield
    assert daemon.wait() == -signal.SIGKILL, "the failpoint did not fire"
    assert "Traceback" not in daemon.log.read_text()
    cluster.kill(victim)
    cluster.start(victim)


def check(cluster: Cluster, writer: Writer, outcome: Outcome) -> None:
    """The name is whole or free as the client was told; nothing is left over; it can be created anew."""
    if outcome.lock:
        cluster.use_lock(outcome.lock)
    wrong: list[str] = []

    def whole() -> bool:
        wrong[:] = [cluster.whole()]
        return not wrong[0]

    try:
        wait_for(whole, "agreement of files, records and counts")
    except AssertionError as error:
        raise AssertionError(f"{error}: {wrong[0]}") from None
    names = cluster.names()
    assert "steady" in names
    assert names <= {"steady", "w", "spare"}
    if "spare" in names:
        cluster.delete("spare")
    if outcome.present is not None:
        assert ("w" in names) == outcome.present
    if "w" not in names:
        cluster.create()
    with smb.connect(cluster.address, transport="tcp") as client:
        assert not client.open("w").read().any()
    cluster.delete()
    for name, lock in cluster.locks.items():
        request = pb.OpenBufferRequest(name=name, kind=pb.LOCK)
        found = cluster.stub.OpenBuffer(request, timeout=CALL_S)
        assert [s.id for s in found.layout.segments] == [s.id for s in lock.layout.segments], "a second home"
    wait_for(lambda: not cluster.whole(), "agreement after a new creation and its end")
    writer.goes_on()
