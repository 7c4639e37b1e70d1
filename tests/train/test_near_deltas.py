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
from smb.relay import nearest as module
from smb.relay.arrived import Arrived
from smb.relay.generations import Entry, Head
from smb.relay.ring import missing_of
from tests.support.commands import run_here
from tests.support.daemons import DEADLINE_S, relay_of, tidy, wait_for
from tests.support.transports import FAR

ELEMENTS = 400_000
NAME = "steps"
NEAR = "server-1"
BESIDE = ("", ".deltas", ".generations")
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
    return {f"{NAME}{end}.mirror.{NEAR}" for end in ends} | {f"{NAME}.deltas.mirror.{NEAR}{arrived.SUFFIX}"}


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
    trainer.open(f"{NAME}.generations.mirror.{server}").wait(number, timeout=DEADLINE_S)

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
        assert number == 1 or near(".deltas") <= read_from
    assert early.source == f"{NAME}.mirror.{NEAR}"
    read_from.clear()
    late = follow()
    assert check(late) == 7
    assert near("", ".deltas") <= read_from <= near(*BESIDE)
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
        ring = publisher._writer._ring  # type: ignore[attr-defined]
        number = 3
        while ring.anchors.version < 4:
            number += 1
            publisher.publish(state(number))
        assert check(early) == 3
        assert check(follow()) in (3, number)  # its whole state may be gone, and then it is the source's
    finally:
        os.kill(relay, signal.SIGCONT)
    has_come(trainer, number)
    # Whole states come by themselves.
    trainer.open(f"{NAME}.mirror.{NEAR}").wait(ring.anchors.version, timeout=DEADLINE_S)
    # It brought the deltas since the last whole state, unless it had heard of one in between: others are the source's.
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
    assert read_from == near(".deltas", ".generations")


def test_what_was_overwritten_in_a_mirror_is_not_taken_from_there(
    cluster: smb.LocalCluster, trainer: smb.Client, follow: Callable[[], smb.torch.Follower], read_from: set[str]
) -> None:
    """A reader that finds, after it read a delta, that the mirror went over it takes it from the source. Where the
    mirror does not say so the sum does, and the reader takes all from the source."""
    publisher = publisher_of(trainer)
    first, second = follow(), follow()
    publisher.publish(state(1))
    has_come(trainer, 1)
    assert check(first) == check(second) == 1
    publisher.publish(state(2))
    has_come(trainer, 2)
    os.kill(relay := relay_of(cluster.servers[1]), signal.SIGSTOP)
    try:
        mirror = trainer.open(f"{NAME}.deltas.mirror.{NEAR}")
        words = trainer.open(mirror.name + arrived.SUFFIX)
        true = arrived.look(words)
        read_from.clear()
        assert (true.version, true.oldest) == (2, 2)
        mirror.write(np.full(mirror.size, 255, np.uint8))
        looks: list[int] = []

        def look(of: Buffer) -> Arrived:
            looks.append(1)  # at the second one it has gone on
            return true if len(looks) == 1 else Arrived(4, 4, 0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(arrived, "look", look)
            assert check(first) == 2
        assert len(looks) == 2
        assert f"{NAME}.deltas" in read_from
        assert f"{NAME}.generations" not in read_from
        read_from.clear()
        assert check(second) == 2  # and nothing says that it was overwritten
        assert {f"{NAME}.deltas", f"{NAME}.generations", mirror.name} <= read_from
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
        for mirror in trainer.open(f"{NAME}.deltas").info.mirrors:
            relayed.update(mirror.server for parent in mirror.feeds if parent != f"{NAME}.deltas")
        return len(relayed) >= 2

    wait_for(fed_by_others, "relays that feed each other with deltas", DEADLINE_S)
    words = trainer.open(f"{NAME}.deltas.mirror.{NEAR}{arrived.SUFFIX}")
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
    leave none; a server on which a part of them lies has none; of a ring alone none can be made."""

    def said(*arguments: str) -> str:
        code, out, err = run_here(capsys, *arguments, "-c", trainer.address)
        assert code == 0, err
        return out

    publisher = publisher_of(trainer)
    for number in (1, 2):
        publisher.publish(state(number))
        has_come(trainer, number)
    listed = said("ls")
    assert NEAR + arrived.SUFFIX not in listed
    assert "and 8 buffers of published states" in listed
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
    wait_for(lambda: json.loads(said("relay", NAME, "--json"))[0]["generation"] == number, "its report", DEADLINE_S)
    for shown in (said("relay", NAME), said("stat", NAME)):
        assert "DELTAS ON" in shown
        assert "the source" in shown.partition("DELTAS ON")[2]
    (mirror,) = json.loads(said("stat", NAME, "--json"))["mirrors"]
    assert (mirror["generation"], list(mirror["delta_feeds"])) == (number, [f"{NAME}.deltas"])
    assert "has no mirrors" in said("relay", NAME, "--stop")
    assert sorted(info.name for info in trainer.list()) == [NAME + end for end in BESIDE]
    assert trainer.relay(NAME, [NEAR]) == [NEAR]
    trainer.delete(f"{NAME}.deltas.mirror.{NEAR}")
    assert trainer.relay(NAME, [NEAR]) == [NEAR]  # what is missing
    assert f"{NAME}.deltas.mirror.{NEAR}" in [info.name for info in trainer.list()]
    has_come(trainer, number)
    said("rm", NAME)
    assert trainer.list() == []
    smb.torch.Publisher(trainer, NAME, state(0), deltas=4, servers=["server-0", "server-1"], relays=[NEAR, "server-2"])
    made = [info.name for info in trainer.list() if info.mirror_of]
    assert made == sorted([*(f"{NAME}.mirror.{each}" for each in (NEAR, "server-2")), *(
        f"{NAME}{end}.mirror.server-2" for end in (".deltas", ".generations"))])  # fmt: skip
    trainer.create("plain", 8, "uint8", versions=2)
    trainer.create("plain.deltas", 8, "uint8", servers=["server-0"])
    with pytest.raises(smb.InvalidArgumentError, match="not published"):
        trainer.relay("plain.deltas", [NEAR])


def test_what_a_mirror_lacks_is_what_the_generation_names() -> None:
    """The pure part: what is brought, and the oldest that stays, for a mirror that is new, goes on, lags or was killed
    in the middle."""

    class Ring:
        size = 1 << 20

        class layout:  # noqa: N801 - as Buffer's
            chunk_bytes = 4096

    ring: Any = Ring()
    entries = tuple(Entry(number, 10_000 * number, 10_000) for number in range(5, 11))  # of three pieces each
    head = Head(10, anchor=3, anchor_generation=7, end=110_000, entries=entries)
    assert Head.of("t", head.to_words(80), 10, ring.size) == head
    with pytest.raises(smb.Error, match="of 10"):
        Head.of("t", head.to_words(80), 9, ring.size)
    with pytest.raises(smb.Error, match="can't have"):
        Head.of("t", head.to_words(80), 10, 9_999)

    def lacks(version: int, oldest: int, bits: int) -> tuple[list[int], int]:
        missing, stays = missing_of(head, ring, Arrived(version, oldest, bits))
        return [entry.generation for entry in missing], stays

    assert lacks(0, 0, 0) == ([8, 9, 10], 8)  # new: since the whole state
    assert lacks(9, 2, 0b111) == ([10], 5)
    assert lacks(9, 6, 0b101) == ([9, 10], 6)  # killed in the middle of 9
    assert lacks(6, 2, 0b111) == ([7, 8, 9, 10], 5)
    assert lacks(3, 2, 0b111) == ([8, 9, 10], 8)  # 4 is gone
    assert lacks(10, 8, 0b111) == ([], 8)
    assert lacks(5, 5, 0b011) == ([8, 9, 10], 8)
    assert missing_of(Head(4, anchor_generation=4), ring, Arrived(3, 1, 0)) == ((), 0)
    assert [Entry(1, start, 0).is_in(ring, Arrived(1, 1, 0)) for start in (0, 7)] == [True, True]
