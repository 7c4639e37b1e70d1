"""Deltas by way of mirrors: every reader has what was published, to the bit, whichever part lags, dies or is gone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import smb
import smb.torch
from smb.buffer import Buffer
from smb.call.versions import Versions
from smb.relay import arrived
from smb.relay import reader_source as module
from smb.relay.publication_log import LogEntry, PublicationLog, chain, next_of
from tests.support.commands import run_here
from tests.support.daemons import DEADLINE_S, relay_of, tidy, wait_for
from tests.support.transports import FAR

ELEMENTS = 400_000
NAME = "steps"
NEAR = "server-1"
BESIDE = ("", ".log")
LONG = os.environ.get("SMB_LONG") == "1"


def state(number: int) -> dict[str, torch.Tensor]:
    """A state that differs in 2 % of its elements from the one before."""
    random = np.random.default_rng(11)
    bits = random.integers(0, 65536, ELEMENTS, np.uint16)
    bits[(number * 8009 + np.arange(ELEMENTS // 50)) % ELEMENTS] += np.uint16(number)
    return {"w": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), "n": torch.tensor([number])}


def check(follower: smb.torch.Follower) -> int:
    """Read, compare all bits with what that generation was published as, and return which it is."""
    found = follower.state_dict()
    for name, tensor in state(follower.generation).items():
        assert found[name].view(torch.uint8).equal(tensor.view(torch.uint8)), (name, follower.generation)
    return follower.generation


@pytest.fixture
def read_from(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the buffers whose elements were read; readers take server-1 for what is near."""
    names: set[str] = set()
    read, read_ranges = Buffer.read, Versions.read_ranges

    def of_buffer(buffer: Buffer, *arguments: Any, **options: Any) -> Any:
        names.add(buffer.name)
        return read(buffer, *arguments, **options)

    def of_versions(versions: Versions, *arguments: Any) -> int:
        names.add(versions._calls.info.name)
        return read_ranges(versions, *arguments)

    monkeypatch.setattr(Buffer, "read", of_buffer)
    monkeypatch.setattr(Versions, "read_ranges", of_versions)
    monkeypatch.setattr(module, "near_servers", lambda *_: (frozenset({NEAR}), frozenset()))
    # A coordinator that answers after a second, on a busy machine, is one that is away: then it is the source.
    monkeypatch.setattr(module, "_ASK_S", DEADLINE_S)
    return names


def near(*ends: str) -> set[str]:
    return {f"{NAME}{end}.mirror.{NEAR}" for end in ends}


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=4, capacity="64MiB") as cluster:
        yield cluster


@pytest.fixture
def trainer(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with tidy(cluster, DEADLINE_S) as client:
        yield client


@pytest.fixture
def follow(cluster: smb.LocalCluster) -> Iterator[Callable[[], smb.torch.Follower]]:
    with smb.connect(cluster.address, timeout=4, transport=FAR) as client:
        yield lambda: smb.torch.follow(client, NAME, timeout=DEADLINE_S)


def publisher_of(trainer: smb.Client, *relays: str, deltas: int = 4) -> smb.torch.Publisher:
    return smb.torch.Publisher(
        trainer, NAME, state(0), deltas=deltas, relays=relays or [NEAR], versions=3, servers=["server-0"]
    )


def has_come(trainer: smb.Client, number: int, server: str = NEAR) -> None:
    """Wait until a mirror has that generation, and the coordinator knows that it lives."""
    trainer.open(f"{NAME}.log.mirror.{server}").wait(number, timeout=DEADLINE_S)

    def lives() -> bool:
        mirrors = [mirror for end in BESIDE for mirror in trainer.open(NAME + end).info.mirrors]
        return all(mirror.alive for mirror in mirrors if mirror.server == server)

    wait_for(lives, "a report of the mirrors", DEADLINE_S)


def test_deltas_and_whole_states_come_from_the_nearest(
    cluster: smb.LocalCluster, trainer: smb.Client, follow: Callable[[], smb.torch.Follower], read_from: set[str]
) -> None:
    """A reader of each generation and a late one take nothing from where the trainer writes; where the mirror's server
    dies all comes from there, and from the mirror again once that is back; so with the mirror stopped."""
    publisher = publisher_of(trainer)
    early = follow()
    for number in range(1, 8):
        assert publisher.publish(state(number)) == number
        has_come(trainer, number)
        assert early.wait(timeout=DEADLINE_S) == number
        read_from.clear()
        assert check(early) == number
        assert number == 1 or early.received_bytes < publisher.buffer.nbytes // 10
        assert read_from <= near(*BESIDE)
        assert number == 1 or near(".log") <= read_from
    assert early.source == f"{NAME}.mirror.{NEAR}"
    read_from.clear()
    late = follow()
    assert check(late) == 7
    assert near("", ".log") <= read_from <= near(*BESIDE)
    cluster.servers[1].kill()
    publisher.publish(state(8))
    for follower in (early, late, follow()):
        assert follower.wait(generation=8, timeout=DEADLINE_S) == 8
        read_from.clear()
        assert check(follower) == 8
        assert read_from
        assert not any("mirror" in name for name in read_from)
    cluster.servers[1].start()
    publisher.publish(state(9))
    has_come(trainer, 9)
    read_from.clear()
    assert check(follow()) == 9
    assert read_from <= near(*BESIDE)
    trainer.stop_relays(NAME)
    assert sorted(info.name for info in trainer.list()) == [NAME + end for end in BESIDE]
    publisher.publish(state(10))
    assert early.wait(generation=10, timeout=DEADLINE_S) == 10
    assert check(early) == 10


def test_a_mirror_that_lags(
    cluster: smb.LocalCluster, trainer: smb.Client, follow: Callable[[], smb.torch.Follower], read_from: set[str]
) -> None:
    """While a relay is stopped its readers have the generation that it has; the source names
    what the mirror lacks no more. Let go it has the latest, and its readers have that from it."""
    publisher = publisher_of(trainer, deltas=2)
    early, slow = follow(), follow()
    for number in (1, 2, 3):
        publisher.publish(state(number))
        has_come(trainer, number)
    assert check(early) == check(slow) == 3
    relay = relay_of(cluster.servers[1])
    os.kill(relay, signal.SIGSTOP)
    try:
        number = 3
        while publisher.buffer.version < 4:
            number += 1
            publisher.publish(state(number))
        assert check(early) == 3
        assert check(follow()) in (3, number)  # its whole state may be gone, and then it is the source's
    finally:
        os.kill(relay, signal.SIGCONT)
    has_come(trainer, number)
    # Whole states come by themselves.
    trainer.open(f"{NAME}.mirror.{NEAR}").wait(publisher.buffer.version, timeout=DEADLINE_S)
    # It brought the deltas since the last whole state, unless it had heard of one in between.
    assert check(slow) == check(early) == number
    # The next generation names that whole state. This one names the one before, which may be the source's alone.
    number = publisher.publish(state(number + 1))
    has_come(trainer, number)
    read_from.clear()
    assert check(follow()) == number
    assert read_from <= near(*BESIDE)
    assert check(early) == number
    publisher.publish(state(number + 1))
    assert early.wait(timeout=DEADLINE_S) == number + 1
    read_from.clear()
    assert check(early) == number + 1
    assert read_from == near(".log")


def test_what_was_overwritten_in_a_mirror_is_not_taken_from_there(
    cluster: smb.LocalCluster, trainer: smb.Client, follow: Callable[[], smb.torch.Follower], read_from: set[str]
) -> None:
    """A reader that finds, time and again, that the mirror has gone over a delta since takes it from the source. Where
    the mirror does not say so the sum does, and the reader takes all from the source."""
    publisher = publisher_of(trainer)
    first, second = follow(), follow()
    publisher.publish(state(1))
    has_come(trainer, 1)
    assert check(first) == check(second) == 1
    publisher.publish(state(2))
    has_come(trainer, 2)
    os.kill(relay := relay_of(cluster.servers[1]), signal.SIGSTOP)
    try:
        mirror = trainer.open(f"{NAME}.log.mirror.{NEAR}")
        log = PublicationLog(mirror)
        mirror.write(np.full(log.size, 255, np.uint8), log.start)
        looks: list[str] = []

        def holds(_: PublicationLog, of: Buffer, *__: Any) -> bool:
            looks.append(of.name)
            return of.name == f"{NAME}.log"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PublicationLog, "holds", holds)
            read_from.clear()
            assert check(first) == 2
        assert set(looks[:-1]) == {mirror.name}
        assert looks[-1] == f"{NAME}.log"
        assert read_from == {mirror.name, f"{NAME}.log"}
        read_from.clear()
        assert check(second) == 2  # and nothing says that it was overwritten
        assert {f"{NAME}.log", mirror.name} <= read_from
    finally:
        os.kill(relay, signal.SIGCONT)


def test_relays_feed_each_other_with_deltas_and_one_is_killed(
    cluster: smb.LocalCluster, trainer: smb.Client, follow: Callable[[], smb.torch.Follower], read_from: set[str]
) -> None:
    """Of three mirrors each has every generation, and deltas come from each other, too. One that is killed while it is
    filled goes on; nothing that its readers have is mixed."""
    servers = ["server-1", "server-2", "server-3"]
    publisher, number = publisher_of(trainer, *servers, deltas=16), 0
    reader = follow()
    relayed: set[str] = set()

    def fed_by_others() -> bool:
        nonlocal number
        number = publisher.publish(state(number + 1))
        for server in servers:
            has_come(trainer, number, server)
        assert reader.wait(timeout=DEADLINE_S) == check(reader) == number
        for mirror in trainer.open(f"{NAME}.log").info.mirrors:
            relayed.update(mirror.server for parent in mirror.feeds if parent != f"{NAME}.log")
        return len(relayed) >= 2

    wait_for(fed_by_others, "relays that feed each other with deltas", DEADLINE_S)
    words = trainer.open(f"{NAME}.log.mirror.{NEAR}{arrived.SUFFIX}")
    for _ in range(3 if LONG else 1):
        begun = words.version + 1
        number = publisher.publish(state(number + 1))
        words.wait(begun, timeout=DEADLINE_S)
        os.kill(relay_of(cluster.servers[1]), signal.SIGKILL)
        number = publisher.publish(state(number + 1))
        for server in servers:
            has_come(trainer, number, server)
        read_from.clear()
        assert check(reader) == number
        assert check(follow()) == number
        assert read_from <= near(*BESIDE)


def test_commands_show_and_remove_mirrors_of_deltas(
    trainer: smb.Client, capsys: pytest.CaptureFixture[str], read_from: set[str]
) -> None:
    """`smb ls` folds them, `smb relay` and `smb stat` show the generation and who feeds deltas, `--stop` and `smb rm`
    leave none; a server on which a part of them lies has none; of a log alone none can be made."""

    def said(*arguments: str) -> str:
        code, out, err = run_here(capsys, *arguments, "-c", trainer.address)
        assert code == 0, err
        return out

    publisher = publisher_of(trainer)
    for number in (1, 2):
        publisher.publish(state(number))
        has_come(trainer, number)
    number = 2

    def has_rates() -> bool:
        """It may have come too late for the deltas so far, and has none of these then."""
        nonlocal number
        if json.loads(said("relay", NAME, "--json"))[0]["delta_feeds"]:
            return True
        number += 1
        publisher.publish(state(number))
        has_come(trainer, number)
        return False

    wait_for(has_rates, "its rates", DEADLINE_S)
    listed = said("ls")
    assert NEAR + arrived.SUFFIX not in listed
    assert "and 5 buffers of published states" in listed
    wait_for(lambda: json.loads(said("relay", NAME, "--json"))[0]["generation"] == number, "its report", DEADLINE_S)
    for shown in (said("relay", NAME), said("stat", NAME)):
        assert "DELTAS ON" in shown
        assert "the source" in shown.partition("DELTAS ON")[2]
    (mirror,) = json.loads(said("stat", NAME, "--json"))["mirrors"]
    assert (mirror["generation"], list(mirror["delta_feeds"])) == (number, [f"{NAME}.log"])
    assert "has no mirrors" in said("relay", NAME, "--stop")
    assert sorted(info.name for info in trainer.list()) == [NAME + end for end in BESIDE]
    assert trainer.relay(NAME, [NEAR]) == [NEAR]
    trainer.delete(f"{NAME}.log.mirror.{NEAR}")
    assert trainer.relay(NAME, [NEAR]) == [NEAR]  # what is missing
    assert f"{NAME}.log.mirror.{NEAR}" in [info.name for info in trainer.list()]
    has_come(trainer, number)
    said("rm", NAME)
    assert trainer.list() == []
    smb.torch.Publisher(trainer, NAME, state(0), deltas=4, servers=["server-0", "server-1"], relays=[NEAR, "server-2"])
    made = [info.name for info in trainer.list() if info.mirror_of]
    assert made == sorted([*(f"{NAME}.mirror.{each}" for each in (NEAR, "server-2")),
        f"{NAME}.log.mirror.server-2"])  # fmt: skip
    trainer.create("plain", 8, "uint8", versions=2)
    trainer.create("plain.log", 8, "uint8", servers=["server-0"])
    with pytest.raises(smb.InvalidArgumentError, match="not published"):
        trainer.relay("plain.log", [NEAR])


def test_what_a_mirror_takes_next() -> None:
    """The pure part: what entries are there, and which one is brought, for a mirror that is new, goes on or lags."""

    class Log:
        name = "w.log"
        versions = 1
        dtype = np.dtype(np.uint8)
        size, metadata = PublicationLog.form(4, 1 << 20)

        class layout:  # noqa: N801 - as Buffer's
            chunk_bytes = 4096

    buffer: Any = Log()
    log = PublicationLog(buffer)

    def lies(generation: int, whole: int = 7, place: int = 0) -> LogEntry:
        return LogEntry(generation, place or 10_000 * generation, 10_000, 2**64 - generation, whole, 3, 2**63)

    entries = tuple(lies(number, whole=3 if number <= 7 else 7) for number in range(5, 11))  # of three pieces each
    slots = np.zeros((log.slots, 8), np.int64)
    for entry in entries:
        slots[entry.generation % log.slots] = entry.to_words()
    assert log.known(slots, 1, 10) == entries
    assert log.known(slots, 7, 10) == entries[2:]
    assert log.known(slots, 1, 9) == entries[:-1]
    assert log.known(slots, 1, 11) == ()
    with pytest.raises(smb.Error, match="cannot have"):
        LogEntry.of(entries[0].to_words(), 5, 9_999)
    slots[0, 1] = 1  # another format: of generation 10
    with pytest.raises(smb.Error, match="entry of generation 10 is invalid"):
        log.known(slots, 1, 10)
    slots[0] = lies(10, place=10_000 * 6 + log.room).to_words()  # the ring went round
    assert [entry.generation for entry in log.known(slots, 1, 10)] == [7, 8, 9, 10]
    assert chain(entries, 7, 10) == entries[3:]
    assert chain(entries, 3, 10) is None
    assert chain((*entries[:4], lies(9, whole=9), entries[5]), 7, 10) is None

    taken = next_of(entries, 0)  # new: since the whole state
    assert taken == LogEntry(7, 80_000, 0, 2**63, 7, 3, 2**63)
    assert [next_of(entries, after) for after in range(4, 10)] == list(entries)
    assert next_of(entries, 3) == taken  # 4 is gone
    assert next_of(entries[4:], 3) is None  # so is 8
    whole = LogEntry(11, 110_000, 0, 1, 11, 4, 1)
    assert {next_of((*entries, whole), after) for after in (0, 3, 9, 10)} == {whole}
    assert next_of((*entries, whole, lies(12, whole=11)), 11) == lies(12, whole=11)
