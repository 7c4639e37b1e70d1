"""More members than a round takes, of a scheme without rounds: exact over a kill, late joins and leaves."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.train import member_table as t
from smb.train.scheme import SCHEMES
from tests.conftest import Connect
from tests.fault.long import times
from tests.support.daemons import wait_for

PROCESSES, ROUNDS = 4, 3
EACH = times(17, 32)  # 68 in all: more than a round takes, and than bits of a word


class Members:
    """A process with many members."""

    def __init__(self, address: str, count: int, scheme: str) -> None:
        arguments = [sys.executable, "-m", "tests.support.many_members", address, "many", str(count), scheme]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def begin(self, rounds: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{rounds}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0


@pytest.fixture
def started() -> Iterator[list[Members]]:
    started: list[Members] = []
    yield started
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        for stream in (each.process.stdin, each.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        each.process.wait()


def test_many_members_one_process_of_which_dies(
    cluster: smb.LocalCluster, connect: Connect, started: list[Members]
) -> None:
    """Four processes with many members each; one is killed, another takes its place. Each contribution counts once."""
    client = connect()
    for _ in range(PROCESSES):
        started.append(Members(cluster.address, EACH, "asp"))
        assert started[-1].read()
    assert len(client.open("many/members").read()) == 1 + 512
    found = smb.train.status(client, "many")
    assert [worker.slot for worker in found.workers if worker.alive] == list(range(EACH * PROCESSES))
    for each in started:
        each.begin(ROUNDS)
    made = [int(each.read()) for each in started]
    assert made == [EACH * ROUNDS] * PROCESSES
    dead = started[1]
    dead.process.kill()
    dead.process.wait()

    def alive() -> int:
        return sum(worker.alive for worker in smb.train.status(client, "many").workers)

    wait_for(lambda: alive() == EACH * (PROCESSES - 1), "the leases of the dead members to end", 60)
    late = Members(cluster.address, EACH, "asp")
    started.append(late)
    slots = json.loads(late.read())
    assert len(slots) == EACH
    assert max(slots) < EACH * (PROCESSES + 1)
    for each in (started[0], started[2], started[3], late):
        each.begin(ROUNDS)
    made = [made[1], *(int(each.read()) for each in (started[0], started[2], started[3], late))]
    assert made == [EACH * ROUNDS, *[2 * EACH * ROUNDS] * (PROCESSES - 1), EACH * ROUNDS]
    assert (client.open("many").read() == sum(made)).all()
    found = smb.train.status(client, "many")
    assert sum(worker.contributions for worker in found.workers) == sum(made)
    assert found.samples == sum(made)
    for each in (started[0], started[2], started[3], late):
        each.end()
    assert alive() == 0


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


def test_only_rows_in_use_are_read(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 slots the first 48, and as many more as were ever taken; from another process's view, too."""
    buffer = client.create("members", (1 + t.SLOTS_MAX, t.FIELDS), "int64", servers=1)
    read: list[int] = []
    real = type(buffer).read

    def counted(self: smb.Buffer, *arguments: Any, **options: Any) -> Any:
        read.append(options["out"].size)
        return real(self, *arguments, **options)

    monkeypatch.setattr(type(buffer), "read", counted)
    mine, others = t.Table(buffer), t.Table(client.open("members"))
    for table in (mine, others):
        assert table.read().shape == (1 + t.SLOTS_MAX, t.FIELDS)
    mine.show(47)
    mine.show(99)
    mine.add(100, t.STEPS, 7)
    assert [int(table.read()[100, t.STEPS]) for table in (mine, others, others)] == [7] * 3
    assert [size // t.FIELDS for size in read] == [49, 49, 101, 49, 101, 101]


def test_each_scheme_has_as_many_slots_as_it_can_tell_apart() -> None:
    limits = {name: scheme.MEMBERS_MAX for name, scheme in SCHEMES.items()}
    rounds = {name: most for name, most in limits.items() if hasattr(SCHEMES[name], "quorum")}
    assert set(rounds.values()) == {48}
    assert limits["r2sp"] == 128
    assert {most for name, most in limits.items() if name not in {*rounds, "r2sp"}} == {512}
