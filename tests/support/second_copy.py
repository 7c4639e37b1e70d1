"""Clients of buffers with two copies, whose servers are killed with their memory, or with one, which move: what they
do, what must hold.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import smb
from tests.support.checkers import Operation, check_linearizable, check_tickets
from tests.support.clients import pattern
from tests.support.daemons import wait_for
from tests.support.history import NEVER, Notes, Step, operations_of, read_notes, tickets_of

COUNT = 100_003  # of "sum": several chunks on each server
CLIENTS_MAX = 8  # elements of "board", each written by one client alone
PUBLISHED = 6_000  # elements of "news", all of one number in each version
TURNS = 1_200  # of "turns", changed under its lock alone: its first element counts, the others repeat it
LEASE_S = 20.0  # longer than a fail-over takes: nobody's turn ends before its time
# of "into", which gets "source" added, and of "weights", which step with "ones", on another server, as the gradient
STEPPED = 5_000
WITH_STATE = 600  # of each client's rounds, so that float32 counts what eight of them do
SEGMENTS = 3 + 1 + 1 + 1 + 3 + 3 + 2 * 3 + 3 * 1  # of all in two copies, with three servers
BUFFERS = ("sum", "counter", "element", "board", "news", "turns", "into", "source", "weights", "ones", "velocity")
CALL_S = 60.0
TWO_ROUNDS = 14  # notes
CHANGES = 8  # of a round, about


def make(client: smb.Client, replicas: int = 2) -> None:
    """Create the buffers of one round."""
    client.create("sum", COUNT, "int64", stripe="64KiB", replicas=replicas)
    client.create("counter", 2, "int64", replicas=replicas)
    client.create("element", 1, "int64", replicas=replicas)
    client.create("board", CLIENTS_MAX, "int64", replicas=replicas)
    client.create("news", PUBLISHED, "int64", stripe="16KiB", replicas=replicas, versions=2)
    client.create("turns", TURNS, "int64", stripe="4KiB", replicas=replicas)
    into = client.create("into", STEPPED, "int64", stripe="8KiB", replicas=replicas)
    client.create("source", like=into, replicas=replicas).write(pattern(0, STEPPED, "int64"))
    weights = client.create("weights", STEPPED, stripe="64KiB", replicas=replicas)
    server = weights.layout.segments[0].server
    if replicas > 1:
        server = next(each.name for each in client.servers() if each.name != server)
    client.create("ones", STEPPED, stripe="64KiB", servers=[server], replicas=replicas).fill(1)
    if replicas > 1:
        client.create("velocity", state_of=weights)


def drop(client: smb.Client) -> None:
    """Delete them."""
    for name in BUFFERS:
        client.delete(name, missing_ok=True)


def work(
    messages: Any, address: str, way: str, number: int, path: Path, stop: Path, pause_s: float = 0.0, rounds: int = 1
) -> None:
    """Add, count, swap, write and read until the file `stop` is there, with a pause after so many rounds; tell how many
    rounds there were, or what went wrong.
    """
    notes, done = Notes(path), 0
    try:
        with smb.connect(address, transport=way, timeout=CALL_S) as client:
            total, counter, board = client.open("sum"), client.open("counter"), client.open("board")
            velocity = _velocity(client)
            element, rng = client.open("element"), random.Random(number)
            news, turns = client.open("news"), client.open("turns")
            into, source, weights, ones = (client.open(name) for name in ("into", "source", "weights", "ones"))
            delta, seen, version, token = pattern(0, COUNT, "int64"), board.read(), 0, 0
            while not stop.exists():
                total.accumulate(delta)
                notes.add(Step.ASKS)
                notes.add(Step.TOLD, counter.fetch_add(0, 1))
                value = int(counter.read(1, 1)[0])
                while (found := counter.compare_swap(1, value, value + 1)) != value:
                    value = found
                done += 1
                _use_element(element, notes, rng, number << 32 | done)
                into.accumulate_from(source)
                # With one copy, a rule with a state would have it stay where it is.
                if velocity is not None and done <= WITH_STATE:
                    # the state counts these steps, and the k-th one adds k to the weights
                    weights.apply("momentum", ones, velocity, lr=-1, mu=1)
                else:
                    weights.apply("sgd", ones, lr=-1)
                board.write([done], number)
                now = board.read()
                assert now[number] == done, f"wrote {done}, read {now[number]}"
                assert (now >= seen).all(), f"read {now} after {seen}"
                seen = now
                version = _publish_and_read(news, version, number)
                token = _take_a_turn(turns, token)
                if done % rounds == 0:
                    time.sleep(pause_s)
        messages.put((number, done, ""))
    except BaseException as error:  # noqa: BLE001 - told to the test
        messages.put((number, done, f"{type(error).__name__}: {error}"))


def _velocity(client: smb.Client) -> smb.Buffer | None:
    """Return the state of "weights", where they have two copies."""
    return client.open("velocity") if client.open("weights").info.replicas > 1 else None


def _publish_and_read(news: smb.Buffer, before: int, number: int) -> int:
    """Publish, read a version of one publisher, and return the latest, which never goes back."""
    published = news.publish(np.full(PUBLISHED, number + 1, np.int64))
    assert published > before, f"published {published} after {before}"
    assert news.wait(published, timeout=CALL_S) >= published
    found = news.read()
    assert (found == found[0]).all(), f"a mix of versions: {np.unique(found)}"
    with news.pin() as pin:
        assert pin.version >= published, f"version {pin.version} after {published}"
        found = pin.read()
        assert (found == found[0]).all(), f"a mix of versions: {np.unique(found)}"
        return pin.version


def _use_element(element: smb.Buffer, notes: Notes, rng: random.Random, unique: int) -> None:
    """Make one call on it, of which others make theirs at the same time."""
    match rng.randrange(4):
        case 0:
            notes.add(Step.READS)
            notes.add(Step.FOUND, int(element.read()[0]))
        case 1:
            notes.add(Step.PUTS, unique)
            element.write([unique])
            notes.add(Step.FOUND)
        case 2:
            notes.add(Step.ADDS, 1)
            notes.add(Step.FOUND, element.fetch_add(0, 1))
        case _:
            notes.add(Step.READS)
            seen = int(element.read()[0])
            notes.add(Step.FOUND, seen)
            notes.add(Step.EXPECTS, seen)
            notes.add(Step.SWAPS, unique)
            notes.add(Step.FOUND, element.compare_swap(0, seen, unique))


def _take_a_turn(turns: smb.Buffer, before: int) -> int:
    """Count under the lock, what no two can do at once; and return its token, which never goes back."""
    with turns.lock(ttl=LEASE_S, timeout=CALL_S) as lock:
        assert lock.token > before, f"token {lock.token} after {before}"
        found = turns.read()
        assert (found == found[0]).all(), f"two at once: {np.unique(found)}"
        turns.write(np.full(TURNS, found[0] + 1, np.int64), fence=lock)
        return lock.token


def check(client: smb.Client, done: list[int], histories: list[Path]) -> None:
    """Every call of every client counts, once; tickets are in the order of real time."""
    found, rounds = client.open("sum").read(), sum(done)
    assert (found == rounds * pattern(0, COUNT, "int64")).all(), (
        f"{rounds} additions, and elements from {(found / pattern(0, COUNT, 'int64')).min()} to "
        f"{(found / pattern(0, COUNT, 'int64')).max()}"
    )
    into, weights = client.open("into").read(), client.open("weights").read()
    assert (into == rounds * pattern(0, STEPPED, "int64")).all(), f"{into} after {rounds} rounds"
    stepped = 0
    if (velocity := _velocity(client)) is not None:
        counted, stepped = velocity.read(), sum(min(each, WITH_STATE) for each in done)
        assert (counted == stepped).all(), f"{np.unique(counted)} after {stepped} steps"
    sum_of_all = stepped * (stepped + 1) // 2 + rounds - stepped
    assert (weights == sum_of_all).all(), f"{np.unique(weights)} after {rounds} rounds, {stepped} with a state"
    counter = client.open("counter").read()
    assert counter.tolist() == [rounds, rounds], f"{counter} after {rounds} rounds"
    operations = [call for path in histories for call in operations_of(read_notes(path))]
    began, last = time.monotonic(), int(client.open("element").read()[0])
    check_linearizable([*operations, Operation(began, time.monotonic(), "read", (), last)], 0)
    turns = client.open("turns").read()
    assert (turns == rounds).all(), f"{np.unique(turns)} after {rounds} rounds"
    assert client.open("news").version == rounds
    tickets = [ticket for path in histories for ticket in tickets_of(read_notes(path))]
    assert not any(ticket.ended == NEVER for ticket in tickets)
    check_tickets(tickets, 0, rounds)
    assert client.open("board").read()[: len(done)].tolist() == done


def are_whole(client: smb.Client, without: str = "") -> bool:
    """Whether each segment of each buffer has two copies, none on the server `without`: its loss was noticed."""
    places = [place for info in client.list() if info.replicas > 1 for place in info.layout.segments]
    return all(place.backup and without not in (place.server, place.backup) for place in places)


def check_copies(client: smb.Client, memory: Path) -> int:
    """The two copies of each segment that has them are equal, byte by byte. Returns how many segments have."""
    compared = 0
    for info in client.list():
        for place in client.open(info.name).layout.segments:
            if place.backup:
                copies = [_data(memory, server, place.id) for server in (place.server, place.backup)]
                assert np.array_equal(*copies), f"{info.name} on {place.server} and {place.backup}"
                compared += 1
    return compared


def lose(memory: Path, server: str) -> None:
    """Delete all that a server had in memory."""
    for path in memory.glob(f"smb.{server}.*"):
        path.unlink()


def _data(memory: Path, server: str, segment_id: int) -> np.ndarray[Any, Any]:
    with (memory / f"smb.{server}.{segment_id:016x}.segment").open("rb") as file:
        header = file.read(128)
        (nbytes,), (at,) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<Q", header, 64)
        file.seek(at)
        return np.frombuffer(file.read(nbytes), np.uint8)


class _Printed:
    """In place of a queue, for a process by itself."""

    def put(self, told: Any) -> None:
        print(json.dumps(told), flush=True)


def main(what: str, address: str, *arguments: str) -> None:
    """One step of a test whose servers this process reaches, and the test does not."""
    match what, arguments:
        case "make", ():
            with smb.connect(address, timeout=CALL_S) as client:
                wait_for(lambda: sum(server.alive for server in client.servers()) == 3, "all servers")
                make(client)
        case "work", (way, number, path, stop):
            work(_Printed(), address, way, int(number), Path(path), Path(stop))
        case "whole", ():
            with smb.connect(address, timeout=CALL_S) as client:
                wait_for(lambda: are_whole(client), "two copies of each segment", CALL_S)
        case "check", (memory, done, *histories):
            with smb.connect(address, transport="tcp", timeout=CALL_S) as client:
                check(client, json.loads(done), [Path(path) for path in histories])
                print(check_copies(client, Path(memory)))
        case _:
            raise SystemExit(f"{what} of {arguments}?")


if __name__ == "__main__":
    main(*sys.argv[1:])
