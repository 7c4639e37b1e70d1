"""smb.coordinator.steps with published states and their mirrors, under any order of events, restarts included.

As test_coordinator_machine.py, whose rules and invariants hold here, too. `SMB_LONG=1` runs twenty times as many
examples. A failure prints the steps that lead to it.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from smb.coordinator.events import BufferDeleted, BufferMade, BufferRenamed
from smb.coordinator.mirrors.filling import Mirrors
from smb.coordinator.records import BufferRecord, Kind
from smb.coordinator.state import ARRIVED
from smb.coordinator.validate import Creation, check_creation
from smb.published import ABOUT, LOG, LOG_FORMAT, MIRROR
from smb.rpc.metadata import pack
from tests.engine.model.test_coordinator_machine import SERVERS, CoordinatorMachine
from tests.fault.long import LIMIT_S, times

pytestmark = pytest.mark.timeout(LIMIT_S)

SOURCES = st.sampled_from(["s", "s", f"s{LOG}", f"s{LOG}", "v", f"v{LOG}", f"s{MIRROR}b"])
STATE = pack(json.dumps({ABOUT: {"deltas": 16, "log": LOG_FORMAT}}))
ENDS = ("", LOG)


class MirrorsMachine(CoordinatorMachine):
    """Whatever is created, deleted, renamed or killed: a mirror has a source, and each one is somebody's task."""

    # Rules of what has no mirrors are left out, so that there are mirrors most of the time.
    create = use = use_at_once = session = close = counted = lose_power = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.publish(True, "a")
        for name, versions in (("v", 2), (f"v{LOG}", 1)):  # one without deltas, beside a buffer of such a name
            self.make(Creation(name, (64,), "uint8", server_names=("a",), versions=versions))

    @rule(deltas=st.booleans(), server=SERVERS)
    def publish(self, deltas: bool, server: str) -> None:
        """A Publisher makes its buffers, where they are not there."""
        self.serve()
        for end, versions in zip(ENDS, (2, 1), strict=True) if deltas else [("", 2)]:
            metadata = STATE if deltas and not end else b""
            self.make(Creation(f"s{end}", (64,), "uint8", server_names=(server,), versions=versions, metadata=metadata))

    @rule(target=CoordinatorMachine.pending, source=SOURCES, server=SERVERS)
    def mirror(self, source: str, server: str) -> object:
        return self.want(mirroring(source, server))

    @rule(source=SOURCES, server=SERVERS)
    def mirror_at_once(self, source: str, server: str) -> None:
        """As `mirror`, and it is made before anything else happens; so are the words beside it."""
        self.serve()
        if self.make(mirroring(source, server)):
            name = f"{source}{MIRROR}{server}{ARRIVED}"
            self.make(Creation(name, (18,), "int64", server_names=(server,), exist_ok=True))

    @rule(source=SOURCES, server=SERVERS)
    def mirror_of_what_goes(self, source: str, server: str) -> None:
        """It is deleted while the mirror's memory is made: no mirror is left, nor its memory."""
        self.serve()
        creation = mirroring(source, server)
        if creation.key not in self.state.buffers:
            self.want(creation)
            self.do(BufferDeleted(source, True))
            if creation.key in self.state.buffers:
                self.finish((creation.key, self.state.buffers[creation.key].id), True)
                assert creation.key not in self.state.buffers

    def serve(self) -> None:
        """All servers are there, with what they had."""
        for name in "abc":
            known = self.state.servers.get(name)
            self.register(name, known.instance_id if known else 1, frozenset(), False, 4 << 20, 1.0)

    def make(self, creation: Creation) -> bool:
        """Whether it is there now, and was not before."""
        if creation.key in self.state.buffers:
            return False
        self.want(check_creation(creation, replicas=1))
        if creation.key in self.state.buffers:
            self.do(BufferMade(creation.key))
        return creation.key in self.state.buffers

    @rule(source=SOURCES)
    def delete_published(self, source: str) -> None:
        """Whatever was filled from it, and lay beside that, is gone with it."""
        record = self.state.find(Kind.BUFFER, source)
        gone = [each.name for each in self.state.mirrors(record)] if record is not None else []
        self.do(BufferDeleted(source, False))
        for name in [source, *gone, *(each + ARRIVED for each in gone)]:
            assert self.state.find(Kind.BUFFER, name) is None

    @rule(source=SOURCES, server=SERVERS)
    def stop(self, source: str, server: str) -> None:
        self.do(BufferDeleted(f"{source}{MIRROR}{server}", True))
        for end in ("", ARRIVED):
            assert self.state.find(Kind.BUFFER, f"{source}{MIRROR}{server}{end}") is None

    @rule(source=SOURCES)
    def rename(self, source: str) -> None:
        """Not of what has mirrors, nor of one: they would be found under neither name."""
        record = self.state.find(Kind.BUFFER, source)
        stays = record is not None and (record.mirror_of > 0 or bool(self.state.mirrors(record)))
        self.do(BufferRenamed(source, "renamed", replace=True))
        assert not stays or self.state.find(Kind.BUFFER, source) == record
        self.do(BufferDeleted("renamed", True))

    @invariant()
    def mirrors_are_of_something_and_look_like_it(self) -> None:
        for record in self.mirrors_here():
            source = self.state.source(record)
            assert source is not None, "filled from nothing"
            assert source.ready
            assert not source.mirror_of
            assert (record.shape, record.dtype, record.versions) == (source.shape, source.dtype, source.versions)
            assert source.versions > 1 or source.name == f"s{LOG}", "nobody publishes there"
            assert {segment.server for segment in source.segments} != {record.segments[0].server}
            assert record in self.state.mirrors(source)

    @invariant()
    def each_mirror_is_its_servers_task(self) -> None:
        tasks = {task.name: task for server in "abc" for task in Mirrors().tasks(self.state, server, self.now)}
        assert tasks.keys() == {record.name for record in self.mirrors_here()}
        for name, task in tasks.items():
            record = self.state.buffers[name]
            assert task.id == record.id
            source = self.state.source(record)
            assert source is not None
            assert task.source == source.name
            assert not task.plans, "no relay has reported"

    def mirrors_here(self) -> list[BufferRecord]:
        return [record for record in self.state.buffers.values() if record.mirror_of and record.ready]


def mirroring(source: str, server: str) -> Creation:
    return check_creation(
        Creation(f"{source}{MIRROR}{server}", (), "", server_names=(server,), mirror_of=source), replicas=1
    )


MirrorsMachine.TestCase.settings = settings(
    max_examples=times(60, 1200),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
TestMirrors = MirrorsMachine.TestCase
