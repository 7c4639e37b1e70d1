"""More members than fit in one word: schemes with and without rounds are exact over kills, late joins and
leaves; and trainings of releases that knew tables of 48 slots alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.train import BSP, LocalSGD
from smb.train import member_table as t
from smb.train.exchange import round_closing
from smb.train.exchange.round_closing import COUNTED, Closer
from smb.train.exchange.rounds import RoundExchange, RoundScheme
from smb.train.group import METADATA
from smb.train.scheme import SCHEMES, scheme_of
from tests.conftest import Connect
from tests.fault.long import LONG, times
from tests.support import forks
from tests.support.daemons import wait_for
from tests.support.many_members import SIZE, change_of, samples_of
from tests.support.training import mean_round

PROCESSES, ROUNDS = 4, times(1, 3)
EACH = times(13, 32)  # 52 in all: more than the 48 slots of a word
LIMIT_S = 120


class Members:
    """A process with many members, a fork that finds its modules there; `slots` are theirs."""

    slots: list[int]

    def __init__(self, context: Any, address: str, count: int, scheme: str, **more: Any) -> None:
        task = {"address": address, "name": "many", "count": count, "scheme": scheme, "settings": {}, **more}
        arguments = [sys.executable, "-m", "tests.support.many_members", json.dumps(task)]
        self.process = forks.launch_with_pipes(context, arguments, 2, os.environ | {"SMB_LOG": "error"})

    def joined(self) -> Members:
        self.slots = json.loads(self.read())
        return self

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def begin(self, steps: int = 1) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n".encode())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0


Start = Callable[..., Members]


@pytest.fixture
def start(cluster: smb.LocalCluster, context: Any) -> Iterator[Start]:
    """Start a process; it still has to join."""
    started: list[Members] = []

    def start(scheme: str, **more: Any) -> Members:
        started.append(Members(context, cluster.address, EACH, scheme, **more))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        for stream in (each.process.stdin, each.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        each.process.wait()


def _alive(client: smb.Client) -> int:
    return sum(worker.alive for worker in smb.train.status(client, "many").workers)


def test_many_members_one_process_of_which_dies(connect: Connect, start: Start) -> None:
    """Four processes with many members each; one is killed, another takes its place. Each contribution counts once."""
    client = connect()
    started = [start("asp").joined() for _ in range(PROCESSES)]
    assert len(client.open("many/members").read()) == 1 + 512
    found = smb.train.status(client, "many")
    assert [worker.slot for worker in found.workers if worker.alive] == list(range(EACH * PROCESSES))
    for each in started:
        each.begin(ROUNDS)
    made = [int(each.read()) for each in started]
    assert made == [EACH * ROUNDS] * PROCESSES
    started[1].kill()
    wait_for(lambda: _alive(client) == EACH * (PROCESSES - 1), "the leases of the dead members to end", 60)
    late = start("asp").joined()
    assert max(late.slots) < EACH * (PROCESSES + 1)
    for each in (started[0], started[2], started[3], late):
        each.begin(ROUNDS)
    made = [made[1], *(int(each.read()) for each in (started[0], started[2], started[3], late))]
    assert made == [EACH * ROUNDS, *[2 * EACH * ROUNDS] * (PROCESSES - 1), EACH * ROUNDS]
    assert (client.open("many").read() == sum(made)).all()
    found = smb.train.status(client, "many")
    assert sum(worker.contributions for worker in found.workers) == sum(made)
    assert found.samples == sum(
        samples_of(slot) * ROUNDS * (2 - (slot in started[1].slots)) for slot in range(EACH * PROCESSES)
    ) + (sum(samples_of(slot) * ROUNDS for slot in late.slots))
    for each in (started[0], started[2], started[3], late):
        each.end()
    assert _alive(client) == 0


class Rounds:
    """What the rounds of the training "many" come to. A member's own row says whether its contribution counted."""

    def __init__(self, client: smb.Client, scheme: str) -> None:
        self.client = client
        self._scheme = scheme
        self._weights = self._before = np.zeros(SIZE, np.float32)
        self._table = t.Table(client.open("many/members"))
        self._closed = 0

    def marked(self) -> int:
        """How many contributions the open round has."""
        return len(round_closing.contributions(self._table.read(), self._closed))

    def closed(self, late: Collection[int] = ()) -> set[int]:
        """After exactly one round: check that the shared model is, to the bit, what the recorded contributions make,
        and return their slots. Those of `late` began from the model of a round before.
        """
        rows = self._table.read()
        self._closed += 1
        assert round_closing.round_of(rows) == self._closed
        counted = [slot for slot in range(self._table.slots) if rows[1 + slot, COUNTED] == self._closed]
        contributions = []
        for slot in counted:
            base = self._before if slot in late else self._weights
            weight = float(np.float32(samples_of(slot) / np.sqrt(2 if slot in late else 1)))
            contributions.append(((base + np.float32(change_of(self._scheme, slot))) - base, weight))
        self._before, self._weights = self._weights, mean_round(self._weights, contributions)
        assert np.array_equal(self.client.open("many").read(), self._weights), counted
        return set(counted)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("scheme", ["bsp", *(["localsgd"] if LONG else [])])
def test_rounds_of_many_members_with_kills(connect: Connect, start: Start, scheme: str) -> None:
    """Killed are a process of which a member closes a round and has decided a part of it, and one whose members have
    contributed to the open round. Others join late. Each round is the mean, by samples, of the
    contributions that are recorded.
    """
    client = connect()
    settings = {"token_weights": True} | ({"every": 1} if scheme == "localsgd" else {})
    first = start(scheme, settings=settings).joined()
    closes = {"point": "train-word-decided", "times": 2}
    others = [start(scheme, settings=settings, **more) for more in ({}, {}, closes)]
    started = [first, *(each.joined() for each in others)]
    everybody = {slot for each in started for slot in each.slots}
    assert everybody == set(range(EACH * PROCESSES))
    rounds = Rounds(client, scheme)

    # The last process closes the round, and dies when it has decided about the first 96 slots.
    for each in started[:3]:
        each.begin()
    wait_for(lambda: rounds.marked() == 3 * EACH, "three processes to contribute", LIMIT_S)
    started[3].begin()
    assert started[3].process.wait(LIMIT_S) == -9
    assert [int(each.read()) for each in started[:3]] == [EACH] * 3
    assert rounds.closed() == everybody

    # The round does not wait for the dead once their leases have ended.
    for each in started[:3]:
        each.begin()
    assert [int(each.read()) for each in started[:3]] == [2 * EACH] * 3
    assert rounds.closed() == everybody - {*started[3].slots}

    # Members that have contributed die; their contributions count.
    started[1].begin()
    wait_for(lambda: rounds.marked() == EACH, "one process to contribute", LIMIT_S)
    started[1].kill()
    left = [started[0], started[2]]
    for each in left:
        each.begin()
    assert [int(each.read()) for each in left] == [3 * EACH] * 2
    assert rounds.closed() == everybody - {*started[3].slots}

    # Joiners take free slots and further ones. A round does not wait for who joins in the middle of it.
    late = [start(scheme, settings=settings) for _ in range(2)]
    late = [each.joined() for each in late]
    for each in left:
        each.begin()
    assert [int(each.read()) for each in left] == [4 * EACH] * 2
    assert rounds.closed() == {*left[0].slots, *left[1].slots}
    # What the joiners do first comes too late for that round. BSP drops it; elsewhere it counts in the next one.
    joiners = {slot for each in late for slot in each.slots}
    for each in left:
        each.begin()
    for each in late:
        each.begin(2 if scheme == "bsp" else 1)
    assert [int(each.read()) for each in (*left, *late)] == [5 * EACH] * 2 + [EACH] * 2
    assert rounds.closed(late=set() if scheme == "bsp" else joiners) == {*left[0].slots, *left[1].slots, *joiners}
    assert len(joiners) == 2 * EACH
    for each in (*left, *late):
        each.end()
    assert _alive(client) == 0


@pytest.mark.skipif(not LONG, reason="128 members of further schemes take minutes (SMB_LONG=1)")
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("wire", ["exact", "int8"])
def test_fragments_of_128_members(connect: Connect, start: Start, wire: str) -> None:
    """DiLoCo in two fragments, also in fewer bits, in both directions: the same over a kill, up to rounding, which does
    not add up over the rounds."""
    client = connect()
    settings = {"every": 2, "fragments": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "token_weights": True}
    more = {"settings": settings | {"step_wire": wire}, "wire": wire}
    started = [start("diloco", **more).joined() for _ in range(PROCESSES)]
    weights, alive = np.zeros(SIZE, np.float64), started
    for number in range(8):
        steps = 1 if number == 0 else 2  # since the fragment was exchanged last
        for each in alive:
            each.begin()
        assert [int(each.read()) for each in alive] == [EACH * (number + 1)] * len(alive)
        counted = [slot for each in alive for slot in each.slots]
        samples = [samples_of(slot) * steps for slot in counted]
        changes = [change_of("diloco", slot) * steps for slot in counted]
        half = slice(0, SIZE // 2) if number % 2 == 0 else slice(SIZE // 2, SIZE)
        weights[half] += np.average(changes, weights=samples)
        np.testing.assert_allclose(client.open("many").read(), weights, rtol=1e-5, atol=0 if wire == "exact" else 2)
        if number == 3:
            started[1].kill()
            alive = [started[0], *started[2:]]
    for each in alive:
        each.end()
    assert _alive(client) == 0


@pytest.mark.skipif(not LONG, reason="128 members of further schemes take minutes (SMB_LONG=1)")
@pytest.mark.timeout(3 * LIMIT_S)
def test_128_members_that_do_not_wait(connect: Connect, start: Start) -> None:
    """Asynchronous DiLoCo, whose rounds have one contribution or more: each member's counts, none twice, over a
    kill. With outer_lr=1 and no momentum the sum of the rounds' means is the model.
    """
    client = connect()
    settings = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    started = [start("asyncdiloco", settings=settings, change=1).joined() for _ in range(PROCESSES)]
    for each in started:
        each.begin(ROUNDS)
    for each in started:
        each.read()
    started[1].kill()
    alive = [started[0], *started[2:]]
    for each in alive:
        each.begin(ROUNDS)
    for each in alive:
        each.read()
    for each in alive:
        each.end()
    status = smb.train.status(client, "many")
    made = sum(worker.contributions for worker in status.workers)
    assert 0 < status.round <= made
    # A round adds the mean of deltas that are 1 each.
    np.testing.assert_allclose(client.open("many").read(), status.round, rtol=1e-5)


def test_clocks_of_members_beyond_the_48th(connect: Connect) -> None:
    """With a bound on staleness, a member in a slot that others have not seen yet holds them up like any other."""
    client, other = connect(), connect()
    arrays = [np.zeros(8, np.float32) for _ in range(60)]
    scheme = smb.train.SSP(staleness=1)
    first = [smb.train.join(client, "run", values, scheme) for values in arrays[:48]]
    table = first[0].group.table
    assert len(first[0].group.live(table.read())) == 48
    late = [smb.train.join(other, "run", values) for values in arrays[48:]]
    assert [worker.status.slot for worker in late] == list(range(48, 60))
    assert len(first[0].group.live(table.read())) == 60
    for worker in first:
        worker.step(samples=1)
    assert first[0].exchange._others()[59] == 0  # type: ignore[attr-defined]
    for values, worker in zip(arrays[48:], late, strict=True):
        values += 1
        worker.step(samples=1)
    assert min(first[0].exchange._others().values()) == 1  # type: ignore[attr-defined]
    assert (late[0].shared() == 12).all()
    for worker in (*late, *first):
        worker.close()


def _table(client: smb.Client, slots: int = t.SLOTS_MAX) -> t.Table:
    return t.Table(client.create("members", (1 + slots, t.FIELDS), "int64", servers=1))


def test_only_rows_in_use_are_read(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 slots the first 48, and as many more as were ever taken; from another process's view, too. A mark that
    brings the rows back brings those, and all of them."""
    mine = _table(client)
    others, third = t.Table(client.open("members")), t.Table(client.open("members"))
    read: list[int] = []
    real = type(mine.buffer).read

    def counted(self: smb.Buffer, *arguments: Any, **options: Any) -> Any:
        read.append(options["out"].size)
        return real(self, *arguments, **options)

    monkeypatch.setattr(type(mine.buffer), "read", counted)
    for table in (mine, others):
        assert table.read().shape == (1 + t.SLOTS_MAX, t.FIELDS)
    mine.show(47)
    mine.show(99)
    mine.add(100, t.STEPS, 7)
    assert [int(table.read()[100, t.STEPS]) for table in (mine, others, others)] == [7] * 3
    assert [size // t.FIELDS for size in read] == [49, 49, 101, 49, 101, 101]
    for table, reads in ((mine, 0), (third, 1), (third, 0)):
        read.clear()
        rows = table.raise_to(1, t.MARK, 5)
        assert (rows[100, t.STEPS], rows[1, t.MARK], len(read)) == (7, 5, reads)


# ---- what a round decides


class Decisions:
    """Closers that decide rounds in one table, without weights and inboxes."""

    def __init__(self, table: t.Table) -> None:
        self.table = table

    def closer(self) -> Closer:
        closer = Closer.__new__(Closer)
        closer._group = self  # type: ignore[assignment]
        return closer

    def mark(self, number: int, *slots: int) -> None:
        """Have members contribute to a round, with weight 1."""
        one = int(np.float32(1).view(np.int32))
        for slot in slots:
            self.table.show(slot)
            self.table.write(1 + slot, t.MARK, np.array([t.mark(1 + slot, number + 1), 1 + slot << 32 | one]))


class StoppedError(Exception):
    """Stops a closer half-way."""


def test_a_decision_of_several_closers(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closer decides about the first 48 slots, from what it saw, and is stopped. Others decide the rest from what
    they see. All closers find the same, the first one too when it goes on; a later round is not touched."""
    rounds = Decisions(_table(client))
    rounds.mark(0, 3, 50)
    before = rounds.table.read()

    def stop(_: str) -> None:
        raise StoppedError

    with monkeypatch.context() as stopped:
        stopped.setattr(round_closing, "failpoint", stop)
        with pytest.raises(StoppedError):
            rounds.closer().decide(0, before.copy())
    rounds.mark(0, 4, 51, 99, 511)  # 4 is late for the word that is decided
    after = rounds.table.read()
    assert rounds.closer().decide(0, after) == [3, 50, 51, 99, 511]
    rounds.mark(0, 49, 120)  # too late
    assert rounds.closer().decide(0, rounds.table.read()) == [3, 50, 51, 99, 511]
    # Its view had slots up to 50, so it decides about those alone; who claims the round next sees more.
    assert rounds.closer().decide(0, before.copy()) == [3, 50, 51]
    rounds.table.write(0, t.ROUND, np.array([1 << t.ROUND_SHIFT]))
    rounds.mark(1, 3, 60)
    assert rounds.closer().decide(1, rounds.table.read()) == [3, 60]
    now = rounds.table.read()
    assert rounds.closer().decide(0, before.copy()) is None
    assert np.array_equal(rounds.table.read(), now)


@pytest.mark.parametrize("number", [0, 0x7FFE, 0x7FFF, 0xFFFE])
def test_words_that_were_never_written(client: smb.Client, number: int) -> None:
    """Slots beyond the 48th that are first taken in any round count there: no round takes an unwritten word for
    decided."""
    rounds = Decisions(_table(client))
    rounds.table.write(0, t.ROUND, np.array([number << t.ROUND_SHIFT]))
    rounds.mark(number, 1, 100)
    assert rounds.closer().decide(number, rounds.table.read()) == [1, 100]


# ---- trainings of other releases


def test_a_training_that_an_earlier_release_made(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """It goes on, with its 48 slots and decisions where earlier releases look for them; a copy of it has 512."""
    client = connect()
    arrays = [np.zeros(8, np.float32) for _ in range(3)]
    scheme = LocalSGD(every=1)
    with monkeypatch.context() as earlier:
        earlier.setattr(RoundScheme, "MEMBERS_MAX", t.SLOTS)
        first = smb.train.join(client, "run", arrays[0], scheme)
    assert client.open("run").metadata[METADATA]["settings"] == scheme.settings()
    second = smb.train.join(connect(), "run", arrays[1])
    assert first.group.table.slots == second.group.table.slots == 48
    second.close()
    for number in range(18):
        arrays[0] += 1
        first.step()
        rows = first.group.table.read()
        assert rows[0, t.DECIDED + number % 16] == (number + 1) << 48 | 1
    assert (first.shared() == 18).all()
    smb.train.save(client, "run", tmp_path / "run.smbtrain")
    smb.train.load(client, "copy", tmp_path / "run.smbtrain")
    copy = smb.train.join(client, "copy", arrays[2])
    assert copy.group.table.slots == 512
    arrays[2] += 1
    copy.step()
    assert (copy.shared() == 19).all()
    copy.close()
    first.close()


def test_earlier_releases_refuse_a_training_with_more_slots(client: smb.Client) -> None:
    """They read the scheme's settings from the metadata as here; and this release refuses more slots than it knows."""
    for scheme in (BSP(), smb.train.DiLoCo(), smb.train.AsyncDiLoCo(), LocalSGD(every=3)):
        worker = smb.train.join(client, "run", np.zeros(8, np.float32), scheme)
        stored = client.open("run").metadata[METADATA]
        with pytest.raises(smb.InvalidArgumentError, match="has no setting members"):
            scheme_of(stored["scheme"], stored["settings"])
        assert smb.train.status(client, "run").settings == scheme.settings()
        worker.close()
        smb.train.delete(client, "run")
    worker = smb.train.join(client, "run", np.zeros(8, np.float32), smb.train.ASP())
    assert client.open("run").metadata[METADATA]["settings"] == {}  # nothing is different for them
    worker.close()
    stored["settings"]["members"] = 513
    client.create("later", 8, metadata={METADATA: stored})
    with pytest.raises(smb.InvalidArgumentError, match=r"'later' is not a group of this release.*513 slots"):
        smb.train.join(client, "later", np.zeros(8, np.float32))


def test_each_scheme_has_as_many_slots_as_it_can_tell_apart() -> None:
    limits = {name: scheme.MEMBERS_MAX for name, scheme in SCHEMES.items()}
    assert limits.pop("r2sp") == 128
    assert set(limits.values()) == {512}
    assert BSP(quorum=512).quorum == 512
    with pytest.raises(smb.InvalidArgumentError, match=r"quorum must be .* from 1 to 512, not 513"):
        BSP(quorum=513)


def test_members_that_may_all_close_a_round_do_not_all_open_its_inboxes(connect: Connect) -> None:
    """Of many that find a round complete a few at random try to close it, and whoever has its inboxes open."""
    client = connect()
    workers = [smb.train.join(client, "run", np.zeros(8, np.float32), BSP()) for _ in range(40)]
    exchange = workers[0].exchange
    assert isinstance(exchange, RoundExchange)
    closer, table = exchange._closer, workers[0].group.table
    rows = table.read().copy()
    one = int(np.float32(1).view(np.int32))
    for worker in workers:
        member = worker.group.member
        rows[member.row, t.MARK] = t.mark(member.incarnation, 1)
        rows[member.row, t.WEIGHT] = member.incarnation << 32 | one
    tried = sum(closer.should_try(0, rows, 0) for _ in range(10_000))
    assert 0.15 < tried / 10_000 < 0.25  # 8 of 40
    assert all(closer.should_try(0, rows, 2) for _ in range(100))  # the others may be dead
    alone = rows.copy()
    alone[2:, t.WEIGHT] = 0
    assert closer.should_try(0, alone, 0)  # its own inbox is open
    few = rows.copy()
    few[9:, t.WEIGHT] = 0
    assert all(closer.should_try(0, few, 0) for _ in range(100))
    # Whoever opens them stops once others have closed the round; later it goes on, and then it may close any round.
    table.write(0, t.ROUND, np.array([1 << t.ROUND_SHIFT]))
    assert not closer._open_inboxes(0, rows)
    assert len(closer._inboxes) == 1 + 16
    table.write(0, t.ROUND, np.array([0]))
    assert closer._open_inboxes(0, rows)
    assert len(closer._inboxes) == 40
    assert all(closer.should_try(0, rows, 0) for _ in range(100))
    for worker in workers:
        worker.close()


def test_a_table_is_one_chunk_whatever_the_stripe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in several chunks would not be read as of one moment."""
    monkeypatch.setenv("SMB_COORDINATOR_STRIPE", "16KiB")
    with smb.LocalCluster(servers=1) as cluster, smb.connect(cluster.address) as client:
        assert client.create("other", 100_000).layout.chunk_bytes < (1 + t.SLOTS_MAX) * t.FIELDS * 8
        worker = smb.train.join(client, "run", np.zeros(4, np.float32), BSP())
        assert client.open("run/members").layout.chunk_bytes >= (1 + t.SLOTS_MAX) * t.FIELDS * 8
        worker.close()


def test_a_host_of_hsgd_takes_members_of_earlier_releases(connect: Connect) -> None:
    """Its own group has as many slots as these know, so that both kinds of members step together."""
    client = connect()
    worker = smb.train.join(client, "run", np.zeros(4, np.float32), smb.train.HSGD(alpha=0.5, every=2))
    (table,) = [info.name for info in client.list() if re.fullmatch("run/host/[^/]+/members", info.name)]
    assert client.open(table).shape == (1 + t.SLOTS, t.FIELDS)
    assert "members" not in client.open(table.removesuffix("/members")).metadata[METADATA]["settings"]
    worker.close()
