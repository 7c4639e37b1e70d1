"""memserver.segments, place and recovery: what a server holds, where, and what it finds again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from memserver.control import ControlService
from memserver.engine import Engine, SegmentForm
from memserver.memory_dir import MemoryDirectory
from memserver.recovery import recover
from memserver.registrant import Identity, Registrant
from memserver.replication import BACKUP, NONE, PRIMARY, Replication, boot_seconds
from memserver.segments import FOR_GOOD, Segments
from memserver.terms import NotRegisteredError
from smb import errors
from smb.daemon.host_memory import file_system_of
from smb.drop_reasons import Ground
from smb.errors import AlreadyExistsError
from smb.rpc import control_pb2 as pb
from tests.support.daemons import wait_for
from tests.support.raw import Frame, Opcode, RawClient, Status

MIB = 1 << 20
FORM = SegmentForm(id=0xABC, epoch=1, dtype=2, nbytes=MIB, chunk_bytes=256 << 10)


class Run:
    """One run of a server's books and engine on a directory."""

    def __init__(self, directory: Path, leaving: ExitStack, capacity_bytes: int = 4 * MIB, name: str = "a") -> None:
        self.memory_dir = MemoryDirectory(directory, name)
        leaving.callback(self.memory_dir.close)
        self.engine = Engine(1, 1, capacity_bytes)
        leaving.callback(self.engine.close)
        self.segments = Segments(self.engine, self.memory_dir, capacity_bytes)
        recover(self.engine, self.memory_dir, self.segments, capacity_bytes)


@pytest.fixture
def leaving() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix not in (".lock", ".journal"))


def test_room_is_given_up_as_it_was_seen_alone(tmp_path: Path, leaving: ExitStack) -> None:
    """Not if it was asked for, or made anew, since; it may be made again in the same epoch."""
    run = Run(tmp_path, leaving)
    made = replace(FORM, epoch=3)

    def copying() -> None:
        """It has no whole copy yet."""
        run.engine.copies.set_replica(made.id, made.epoch, BACKUP, "b", copying=True)

    run.segments.create(made, replicate=copying)
    seen = run.segments.held()[FORM.id]
    assert not run.segments.give_up(seen, 2), "of a later epoch"
    run.segments.create(replace(made), replicate=copying)
    assert not run.segments.give_up(seen, 3), "asked for since"
    assert run.segments.ids() == [FORM.id]
    seen = run.segments.held()[FORM.id]
    assert run.segments.give_up(seen, 3)
    assert not run.segments.give_up(seen, 3), "gone already"
    assert (files(tmp_path), run.segments.used_bytes()) == ([], 0)
    run.segments.create(replace(made), replicate=copying)
    assert not run.segments.give_up(seen, 3), "made again"
    assert run.segments.ids() == [FORM.id]


@pytest.mark.parametrize("case", ["begun", "whole", "asked for since"])
def test_a_copy_of_later_records_is_dropped_at_a_registration_if_it_was_only_begun(
    tmp_path: Path, leaving: ExitStack, case: str
) -> None:
    """It was made in epoch 3, and the coordinator's records are of epoch 1 since a backup was restored."""
    run = Run(tmp_path, leaving)
    made = replace(FORM, epoch=3)

    def copying() -> None:
        run.engine.copies.set_replica(made.id, made.epoch, BACKUP, "b", copying=case != "whole")

    run.segments.create(made, replicate=copying)
    identity = Identity("a", 1, "127.0.0.1:1", "127.0.0.1:2", "", "", 1)
    turn = Registrant("127.0.0.1:3", identity, run.segments, pb.ServerLoad, Mock(), Mock()).turn()
    (listed,) = next(turn).request.segment_ids
    if case == "asked for since":
        run.segments.create(replace(made), replicate=copying)
    reply = pb.RegisterServerReply(
        lease_ms=3000,
        drop_segment_ids=[listed],
        drop_epochs=[1],
        room_segment_ids=[listed],
        drop_grounds=[Ground.SUPERSEDED.name],
    )
    with pytest.raises(StopIteration):
        turn.send(reply)
    assert run.segments.ids() == ([] if case == "begun" else [FORM.id])


def test_a_creation_that_fails_leaves_nothing(tmp_path: Path, leaving: ExitStack) -> None:
    """A role that could not be taken left a segment that nobody knew of, and its room was gone."""
    run = Run(tmp_path, leaving)

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError):
        run.segments.create(FORM, replicate=fail)
    assert (run.segments.ids(), files(tmp_path)) == ([], [])
    run.segments.create(FORM)
    assert run.segments.ids() == [FORM.id]


def test_a_segment_is_made_once_and_dropped_with_its_file(tmp_path: Path, leaving: ExitStack) -> None:
    """The same creation again is no error, another form under its id is, and a drop leaves no file."""
    run = Run(tmp_path, leaving)
    run.segments.create(FORM)
    run.segments.create(FORM)
    assert files(tmp_path) == ["smb.a.0000000000000abc.segment"]
    assert run.segments.ids() == [0xABC]
    assert run.segments.used_bytes() == (tmp_path / files(tmp_path)[0]).stat().st_size
    with pytest.raises(errors.AlreadyExistsError, match="and differs"):
        run.segments.create(replace(FORM, nbytes=8))
    run.segments.drop(0xABC)
    run.segments.drop(0xABC)
    assert files(tmp_path) == []
    assert run.segments.used_bytes() == 0


def test_a_creation_that_comes_after_its_drop_is_refused(tmp_path: Path, leaving: ExitStack) -> None:
    """A straggler of a creation that was given up makes nothing, whether or not the segment was ever there."""
    run = Run(tmp_path, leaving)
    run.segments.drop(FORM.id)
    with pytest.raises(errors.NotFoundError, match="was dropped before"):
        run.segments.create(FORM)
    assert files(tmp_path) == []
    run.segments.create(replace(FORM, id=2))
    run.segments.drop(3, epoch=2)
    with pytest.raises(errors.NotFoundError, match="was dropped before"):
        run.segments.create(replace(FORM, id=3))
    run.segments.registered(5)  # with another run of the coordinator, whose records may be older
    run.segments.create(FORM)
    run.segments.drop(FORM.id)
    run.segments.registered(5)  # again with the same
    with pytest.raises(errors.NotFoundError, match="was dropped before"):
        run.segments.create(FORM)
    run.segments.create(replace(FORM, id=3))


def test_only_the_coordinator_of_the_last_registration_drops(tmp_path: Path, leaving: ExitStack) -> None:
    """A call of a former one may be held up by the network until the records were restored. A call of the next one may
    come before the registration, whose list would be wrong then."""
    run = Run(tmp_path, leaving)
    run.segments.create(FORM)
    (seen,) = run.segments.held().values()
    former, present = 5, 6

    def refused(term: int) -> None:
        with pytest.raises(NotRegisteredError, match="term"):
            run.segments.drop(FORM.id, term=term)
        with pytest.raises(NotRegisteredError, match="term"):
            run.segments.give_up(seen, FORM.epoch, term)
        with pytest.raises(NotRegisteredError, match="term"):
            run.segments.retire([FORM.id], 0, term)
        with pytest.raises(NotRegisteredError, match="term"):
            run.segments.create(replace(FORM, epoch=9), replicate=Mock(), anew=True, term=term)

    run.segments.registered(former)
    refused(present)
    with pytest.raises(NotRegisteredError, match="term"):
        run.segments.terms.check(present)
    run.segments.list_for_coordinator()
    refused(former)
    refused(present)
    run.segments.terms.check(former)  # roles count also while it registers again
    run.segments.registered(present)
    refused(former)
    with pytest.raises(NotRegisteredError, match="term"):
        run.segments.terms.check(former)
    run.segments.terms.check_not_left(present)
    with pytest.raises(NotRegisteredError, match="leads no more"):
        run.segments.terms.check_not_left(former)
    assert len(files(tmp_path)) == 1
    run.segments.drop(FORM.id, term=present)
    assert files(tmp_path) == []


def test_another_term_may_give_a_role_that_was_ended_later(tmp_path: Path, leaving: ExitStack) -> None:
    """Records that were restored count epochs on from old ones: nobody could read the segment as long as this server
    ran.
    """
    run = Run(tmp_path, leaving)
    run.segments.registered(5)
    run.segments.create(FORM, replicate=lambda: run.engine.copies.set_replica(FORM.id, 2, PRIMARY, ""))
    run.engine.copies.set_replica(FORM.id, 6, NONE, "")
    for term, leads in ((5, False), (6, True)):
        run.segments.registered(term)
        run.engine.copies.set_replica(FORM.id, 3, PRIMARY, "")
        held = run.engine.holds(FORM.id)
        assert held is not None
        assert (held.role == PRIMARY) is leads


def test_a_role_that_cannot_be_taken_is_reported(tmp_path: Path, leaving: ExitStack) -> None:
    """Of two segments that move together, restored records know the one that had no later roles. Nobody could use it as
    long as this server had those of the other one.
    """
    run = Run(tmp_path, leaving)
    replication = Replication(run.engine)
    leaving.callback(replication.close)

    def take(number: int, epoch: int, role: int = PRIMARY, *, registers: bool = False) -> dict[int, int]:
        part = pb.Replica(segment_id=number, epoch=epoch, role=role, copying=role == BACKUP)
        replication.take([part], from_other_records=registers)
        return {pair.segment_id: pair.epoch for pair in replication.broken() if pair.segment_id == 1}

    for number in (1, 2):
        run.segments.create(replace(FORM, id=number), replicate=lambda number=number: take(number, 1), bundle_id=1)
    assert take(2, 4) == {}
    assert take(1, 2) == {1: 4}
    assert take(1, 4) == {}
    assert take(1, 2) == {}  # an answer that was overtaken
    assert take(2, 6, BACKUP) == {}
    assert take(1, 6) == {1: 7}  # the epoch is the same, but the role is not
    assert take(1, 8) == {}
    assert take(2, 9) == {}
    assert take(1, 8) == {}, "a renewal tells what was taken before"
    assert take(1, 8, registers=True) == {1: 9}, "records that lack the other one"
    assert take(1, 8) == {1: 9}
    assert take(1, 10) == {}


@pytest.mark.parametrize("told", [1, 2])
def test_a_primary_that_may_have_more_than_its_backup_does_not_take_it_back(
    tmp_path: Path, leaving: ExitStack, told: int
) -> None:
    """Records were restored twice: the first ones had another primary, the next ones the old pair. What the backup had
    not confirmed counted as confirmed, was read, and was gone once the backup took over.
    """
    run = Run(tmp_path, leaving)
    replication = Replication(run.engine)
    leaving.callback(replication.close)
    pair = partial(pb.Replica, segment_id=FORM.id, role=PRIMARY, peer="b")
    run.segments.create(FORM, replicate=partial(replication.take, [pair(epoch=1)]))
    replication.serve_until(boot_seconds() + 600)
    with RawClient(run.engine.listen_tcp("127.0.0.1", 0)).hello() as client:
        client.send(Frame(Opcode.WRITE, FORM.dtype, segment=FORM.id, epoch=1, length=8, payload=8), bytes(8))
        wait_for(lambda: run.engine.copies.replicas()[0].unconfirmed == 1, "a change that waits for the backup")
        replication.take([pb.Replica(segment_id=FORM.id, epoch=1, role=NONE)])
        assert client.receive()[0].status == Status.STALE_EPOCH
    replication.take([pair(epoch=told)], from_other_records=True)
    assert [(each.segment_id, each.epoch) for each in replication.broken()] == [(FORM.id, told + 1)]
    replication.take([pb.Replica(segment_id=FORM.id, epoch=told + 2, role=PRIMARY)])
    (status,) = run.engine.copies.replicas()
    assert (status.role, status.epoch, replication.broken()) == (PRIMARY, told + 2, [])


def test_a_role_that_no_record_has_is_served_as_long_as_the_backup_confirms_it(
    tmp_path: Path, leaving: ExitStack
) -> None:
    """A server hung, another one took over, and the buffer was deleted. As the first one had been told of records that
    were lost by a restore, it kept its copy, and its new lease let it answer reads with old values. So did a server
    whose registration took so long that it did not name a new segment, and had lost it to its backup meanwhile. Without
    records of the buffer, but with its backup, it goes on: its clients may be using what a restore has lost.
    """
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    primary, backup = Run(tmp_path / "a", leaving), Run(tmp_path / "b", leaving, name="b")
    replication = Replication(primary.engine)
    leaving.callback(replication.close)
    address = f"127.0.0.1:{backup.engine.listen_tcp('127.0.0.1', 0)}"
    for number in (1, 2):
        form = replace(FORM, id=number)
        follow = partial(backup.engine.copies.set_replica, number, 1, BACKUP, "a")
        backup.segments.create(form, replicate=follow, bundle_id=1)
        part = pb.Replica(segment_id=number, epoch=1, role=PRIMARY, peer="b", data_address=address, instance_id=1)
        primary.segments.create(form, replicate=partial(replication.take, [part]), bundle_id=1)
    replication.serve_until(boot_seconds() + 600)
    wait_for(lambda: primary.engine.copies.replicas()[0].broken_ms == 0, "the connection to the backup")
    port = primary.engine.listen_tcp("127.0.0.1", 0)

    def read() -> list[int]:
        with RawClient(port, timeout=0.5).hello() as client:
            frames = [Frame(Opcode.READ, FORM.dtype, segment=number, epoch=1, length=8) for number in (1, 2)]
            return [client.ask(frame)[0].status for frame in frames]

    recorded = pb.Replica(segment_id=1, epoch=1, role=PRIMARY)
    replication.note_records([])
    assert read() == [Status.OK] * 2
    replication.note_records([recorded])
    backup.engine.copies.set_replica(1, 2, PRIMARY, "")
    assert read() == [Status.OK] * 2, "they have one role, and the records have it"
    for others in ([], [pb.Replica(segment_id=1, epoch=1, role=BACKUP)], [pb.Replica(segment_id=1, role=PRIMARY)]):
        replication.note_records([recorded])
        replication.note_records(others)
        with pytest.raises(TimeoutError):
            read()


def test_no_role_of_a_former_coordinator_is_taken_after_a_registration(tmp_path: Path, leaving: ExitStack) -> None:
    """A registration that came between the check of the term and the role was overruled by the former coordinator. Now
    it waits for the lock that is held over both.
    """
    run = Run(tmp_path, leaving)
    run.segments.registered(5)
    seen = []

    def take_one(*_: object, **__: object) -> None:
        with ThreadPoolExecutor(1) as threads:
            seen.append("free" if threads.submit(run.segments._lock.acquire, blocking=False).result(20) else "held")

    engine = Mock(wraps=run.engine)
    engine.copies.set_replica = take_one
    service = ControlService(run.segments, Mock(), Replication(engine), Mock())
    role = pb.Replica(segment_id=FORM.id, epoch=1, role=NONE)
    creation = pb.CreateSegmentRequest(
        id=FORM.id,
        epoch=1,
        dtype="float32",
        nbytes=FORM.nbytes,
        chunk_bytes=FORM.chunk_bytes,
        replica=role,
        stamp=pb.StoreStamp(cluster=1, term=5, sequence=9),
    )
    service.TakeRoles(pb.TakeRolesRequest(replicas=[role], term=5), Mock())
    service.CreateSegment(creation, Mock())
    assert seen == ["held", "held"]
    run.segments.drop(FORM.id)
    context = Mock(abort=Mock(side_effect=RuntimeError))
    make = run.segments._make

    def make_late(*arguments: Any) -> None:
        make(*arguments)
        run.segments.registered(6)

    run.segments.registered(7)
    run.segments.registered(5)
    run.segments._make = make_late  # type: ignore[method-assign]
    for call in (partial(service.CreateSegment, creation), partial(service.TakeRoles, pb.TakeRolesRequest(term=5))):
        with pytest.raises(RuntimeError):
            call(context)
        assert context.abort.call_args[0][0] is grpc.StatusCode.ABORTED
    assert (run.segments.ids(), files(tmp_path)) == ([], [])
    assert seen == ["held", "held"]


def test_a_term_that_has_come_back_may_drop_again(tmp_path: Path, leaving: ExitStack) -> None:
    """A server that asks two coordinators by turns, and a coordinator that names no term, are heard."""
    run = Run(tmp_path, leaving)
    for term in (5, 6, 5):
        run.segments.registered(term)
    run.segments.terms.check_not_left(5)
    for number, term in ((1, 5), (2, 0)):
        run.segments.create(replace(FORM, id=number))
        run.segments.drop(number, term=term)
    assert files(tmp_path) == []


def test_a_copy_is_made_anew_in_a_later_epoch_alone(tmp_path: Path, leaving: ExitStack) -> None:
    """What is here of it goes then, as nobody knows how old it is. Late creations and late drops do nothing."""
    run = Run(tmp_path, leaving)
    told: list[int] = []

    def make(epoch: int) -> None:
        run.segments.create(replace(FORM, epoch=epoch), replicate=lambda: told.append(epoch), anew=True)

    make(3)
    make(3)  # asked for again
    make(5)
    assert told == [3, 5]
    assert run.segments.used_bytes() == (tmp_path / files(tmp_path)[0]).stat().st_size
    for late in (3, 4):
        with pytest.raises(errors.NotFoundError):
            make(late)
    run.segments.drop(FORM.id, 4)
    assert run.segments.ids() == [FORM.id]
    run.segments.drop(FORM.id, 6)
    with pytest.raises(errors.NotFoundError):
        make(6)
    make(7)
    run.segments.drop(FORM.id)
    with pytest.raises(errors.NotFoundError):
        make(8)
    assert files(tmp_path) == []


def test_capacity_is_kept_and_a_refusal_leaves_nothing(tmp_path: Path, leaving: ExitStack) -> None:
    """What does not fit is refused with what is free; the memory of the others is untouched."""
    run = Run(tmp_path, leaving)
    run.segments.create(FORM)
    with pytest.raises(errors.OutOfMemoryError, match=r"3\.1 MiB were asked for, and 3 MiB of 4 MiB are free"):
        run.segments.create(replace(FORM, id=2, nbytes=3 * MIB))
    with pytest.raises(errors.InvalidArgumentError, match="a segment cannot have 0 bytes"):
        run.segments.create(replace(FORM, id=3, nbytes=0))
    assert run.segments.ids() == [0xABC]
    assert len(files(tmp_path)) == 1
    run.segments.create(replace(FORM, id=2, nbytes=2 * MIB))


def test_one_segment_has_one_operation_at_a_time(tmp_path: Path, leaving: ExitStack) -> None:
    """Creates and drops of one id from many threads at once end in one consistent way: no file without a book entry."""
    run = Run(tmp_path, leaving, capacity_bytes=64 * MIB)
    start = threading.Barrier(8)

    def race(number: int) -> None:
        start.wait(10)
        for segment_id in range(1, 30):
            try:
                if number % 2:
                    run.segments.drop(segment_id)
                else:
                    run.segments.create(replace(FORM, id=segment_id))
            except errors.NotFoundError:
                assert number % 2 == 0

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(race, range(8)))
    assert run.segments.ids() == []
    assert files(tmp_path) == []
    assert run.segments.used_bytes() == 0


def test_the_next_run_finds_the_segments(tmp_path: Path) -> None:
    """Segments come back with form and used bytes; unfinished ones go, alien files stay, other names are not ours."""
    with ExitStack() as leaving:
        run = Run(tmp_path, leaving)
        run.segments.create(FORM)
        used = run.segments.used_bytes()
    garbage = tmp_path / "smb.a.00000000000000ff.segment"
    garbage.write_text("no segment")
    (tmp_path / "smb.a.00000000000000fe.segment.new").write_text("half")
    (tmp_path / "smb.a.b.00000000000000fd.segment").write_text("of the server a.b")
    with ExitStack() as leaving:
        run = Run(tmp_path, leaving)
        assert run.segments.ids() == [0xABC]
        assert run.segments.used_bytes() == used
        run.segments.create(FORM)
        run.segments.drop(0xABC)
    assert files(tmp_path) == ["smb.a.00000000000000ff.segment", "smb.a.b.00000000000000fd.segment"]
    assert garbage.read_text() == "no segment"


def test_a_capacity_below_what_is_there_is_refused(tmp_path: Path) -> None:
    """The segments are somebody's data: none is given up, the start fails and says how much they take."""
    with ExitStack() as leaving:
        Run(tmp_path, leaving).segments.create(FORM)
    with ExitStack() as leaving, pytest.raises(errors.InvalidArgumentError, match="is less than what the segments"):
        Run(tmp_path, leaving, capacity_bytes=MIB)
    assert len(files(tmp_path)) == 1


def test_a_name_is_held_by_one_daemon(tmp_path: Path) -> None:
    """The second of a name is refused, another name is not, and closing gives the name back without a file left."""
    first = MemoryDirectory(tmp_path, "a")
    with pytest.raises(errors.AlreadyExistsError, match='"a" runs already'):
        MemoryDirectory(tmp_path, "a")
    MemoryDirectory(tmp_path, "b").close()
    first.close()
    MemoryDirectory(tmp_path, "a").close()
    assert list(tmp_path.iterdir()) == []


def test_a_socket_path_that_the_system_cannot_take_is_refused(tmp_path: Path) -> None:
    """Up to 107 bytes are fine, one more is not, and the error says what to shorten."""
    name_bytes = 107 - len(f"{tmp_path}/smb..sock")
    MemoryDirectory(tmp_path, "x" * name_bytes).close()
    with pytest.raises(errors.InvalidArgumentError, match="longer than the system's 107 bytes"):
        MemoryDirectory(tmp_path, "x" * (name_bytes + 1))


def test_a_capacity_beyond_the_file_system_is_refused(tmp_path: Path, leaving: ExitStack) -> None:
    """More than there is in all cannot ever be had; a small one passes."""
    memory_dir = MemoryDirectory(tmp_path, "a")
    leaving.callback(memory_dir.close)
    memory_dir.check_capacity(MIB)
    with pytest.raises(errors.InvalidArgumentError, match="has in all"):
        memory_dir.check_capacity(1 << 55)


def test_file_systems_are_told_apart() -> None:
    """/dev/shm is memory, /proc is proc."""
    assert file_system_of(Path("/dev/shm")) == "tmpfs"
    assert file_system_of(Path("/proc/self")) == "proc"


def test_quarantine_outlives_the_daemon(tmp_path: Path, leaving: ExitStack) -> None:
    """Only a reason of the coordinator ends it; a copy is not made over it. A mark without a segment goes."""
    run = Run(tmp_path, leaving)
    run.segments.create(FORM)
    run.segments.quarantine([FORM.id, FORM.id + 1])
    run.memory_dir.quarantine(FORM.id + 2)
    again = Segments(run.engine, run.memory_dir, 64 * MIB)
    again.adopt(FORM)
    assert [quarantined for _, quarantined in again.inventory().values()] == [True]
    assert len(list(tmp_path.glob("*.quarantined"))) == 1
    for ground in (Ground.UNKNOWN, Ground.NEVER_MADE, Ground.SUPERSEDED):
        again.drop(FORM.id, FOR_GOOD, ground)
        assert not again.give_up(again.held()[FORM.id], 99)
        assert again.ids() == [FORM.id], ground
    with pytest.raises(AlreadyExistsError, match="cannot be made anew"):
        again.create(replace(FORM, epoch=7), anew=True)
    again.drop(FORM.id, FOR_GOOD, Ground.FORGOTTEN)
    assert (again.ids(), list(tmp_path.glob("*.quarantined"))) == ([], [])
    again.create(replace(FORM, epoch=7), anew=True)  # it may get a copy again


def test_what_clients_have_written_to_was_made(tmp_path: Path, leaving: ExitStack) -> None:
    """Whatever a coordinator with old records says: the segment is kept, in quarantine. An untouched one goes."""
    run = Run(tmp_path, leaving)
    run.segments.create(FORM)
    assert [held.untouched for held, _ in run.segments.inventory().values()] == [True]
    run.segments.drop(FORM.id, FOR_GOOD, Ground.NEVER_MADE)
    assert run.segments.ids() == []
    used = replace(FORM, id=FORM.id + 1)
    run.segments.create(used)
    with RawClient(run.engine.listen_tcp("127.0.0.1", 0)) as client:
        write = Frame(Opcode.WRITE, dtype=used.dtype, segment=used.id, epoch=used.epoch, length=8)
        reply, _ = client.hello().ask(write, bytes(8))
        assert reply.status == Status.OK
    run.segments.drop(used.id, FOR_GOOD, Ground.NEVER_MADE)
    assert [(held.untouched, quarantined) for held, quarantined in run.segments.inventory().values()] == [(False, True)]


def test_a_later_copy_is_not_superseded_by_an_earlier_one(tmp_path: Path, leaving: ExitStack) -> None:
    """Whatever a coordinator with old records says. Nor does an older role take its epoch, after a restart."""
    run = Run(tmp_path, leaving)
    made = replace(FORM, epoch=3)
    run.segments.create(made, replicate=lambda: run.engine.copies.set_replica(made.id, 3, PRIMARY, ""))
    run.segments.drop(made.id, 2, Ground.SUPERSEDED)
    assert run.segments.ids() == [made.id]
    other = Engine(2, 1, 64 * MIB)
    leaving.callback(other.close)
    (path,) = tmp_path.glob("*.segment")
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    other.adopt_segment(copy)
    other.copies.set_replica(made.id, 2, BACKUP, "b", copying=True)
    held = other.holds(made.id)
    assert held is not None
    assert (held.epoch, held.whole, held.role) == (3, True, 0)
