"""smb.transport: the choice of a way, and what is said about it, without servers."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from smb.config.transports import CHOICES, check_choice
from smb.errors import InvalidArgumentError, TransportError, UnavailableError
from smb.transport.base import Deadline, NoAnswerError, NoPathError, SegmentLocation, SegmentPath
from smb.transport.choose import choose, describe, for_each


class Fixed:
    """A transport with one answer."""

    def __init__(self, name: str, answer: SegmentPath | Exception) -> None:
        self.name = name
        self._answer = answer

    def reach(self, place: SegmentLocation, epoch: int, deadline: Deadline) -> SegmentPath:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def close(self) -> None:
        pass


def place(server: str) -> SegmentLocation:
    return SegmentLocation(1, server, 8, "10.0.0.2:7071", "/dev/shm/x.sock", 5)


FAR = SegmentPath("tcp", "10.0.0.2:7071")
NEAR = SegmentPath("shm", "same host")


def test_the_first_way_is_taken_and_the_others_refusals_told() -> None:
    """A transport that leads there wins; one that does not is passed over, and its reason goes into the log line."""
    deadline = Deadline(1)
    assert choose([Fixed("shm", NEAR), Fixed("tcp", FAR)], place("a"), 1, deadline) is NEAR
    chosen = choose([Fixed("shm", NoPathError("no socket")), Fixed("tcp", FAR)], place("a"), 1, deadline)
    assert (chosen.transport, chosen.why) == ("tcp", "10.0.0.2:7071 (no socket)")


def test_no_way_names_all_reasons_and_a_server_that_is_down_ends_the_search() -> None:
    """Without any way the error lists why; a server that does not answer is no reason to try something else."""
    ways = [Fixed("shm", NoPathError("no socket")), Fixed("tcp", NoPathError("no network"))]
    with pytest.raises(TransportError, match="server a can't be reached over shm or tcp: no socket; no network"):
        choose(ways, place("a"), 1, Deadline(1))
    with pytest.raises(UnavailableError, match="down"):
        choose([Fixed("shm", UnavailableError("down")), Fixed("tcp", FAR)], place("a"), 1, Deadline(1))


def test_a_server_that_may_come_back_is_unavailable() -> None:
    """Where a transport may lead there later, another one is taken now, and with none at all it is worth waiting."""
    down, none = Fixed("shm", NoAnswerError("nobody answers")), Fixed("tcp", NoPathError("no network"))
    assert choose([down, Fixed("tcp", FAR)], place("a"), 1, Deadline(1)).why == "10.0.0.2:7071 (nobody answers)"
    for ways in ([down], [down, none], [none, down]):
        with pytest.raises(UnavailableError, match=r"server a can't be reached over .*nobody answers"):
            choose(ways, place("a"), 1, Deadline(1))


def test_servers_are_told_once_by_their_way() -> None:
    """The log line groups servers by transport and reason, each once, in the layout's order."""
    ways = [(place("a"), NEAR), (place("b"), FAR), (place("c"), NEAR), (place("a"), NEAR)]
    assert describe(ways) == "shm to a, c: same host; tcp to b: 10.0.0.2:7071"


def test_choices() -> None:
    """auto, shm, verbs and tcp are there; others are refused as unknown."""
    assert [check_choice(name) for name in CHOICES] == ["auto", "shm", "verbs", "tcp"]
    for name in ("TCP", "", "rdma"):
        with pytest.raises(InvalidArgumentError, match="transport must be one of"):
            check_choice(name)


def test_deadlines_run_out() -> None:
    """What is left never falls below nothing; the engine is always given at least a millisecond."""
    assert Deadline(0).left() == 0
    assert Deadline(0).left_ms() == 1
    assert 0 < Deadline(100).left() <= 100
    assert 99_000 < Deadline(100).left_ms() <= 100_000
    assert Deadline(1e9).left_ms() == 2**31


def test_servers_far_away_are_asked_at_the_same_time() -> None:
    """All but the first wait for each other here, and get to their end; answers come in order, near ones one by one."""
    places = [place(name) for name in "abcd"]
    together = threading.Barrier(3)

    def ask(one: SegmentLocation) -> str:
        if one is not places[0]:
            together.wait(20)
        return one.server

    assert for_each(places, ask, lambda _: True) == tuple("abcd")
    threads = for_each(places, lambda _: threading.get_ident(), lambda _: False)
    assert set(threads) == {threading.get_ident()}


def test_what_fails_far_away_is_raised() -> None:
    """Whichever it is, also the first, after which nobody else is asked."""
    places = [place(name) for name in "abcd"]
    for failing in "abcd":
        asked: list[str] = []

        def ask(one: SegmentLocation, failing: str = failing, asked: list[str] = asked) -> str:
            asked.append(one.server)
            if one.server == failing:
                raise UnavailableError(f"{one.server} is down")
            return one.server

        with pytest.raises(UnavailableError, match=f"{failing} is down"):
            for_each(places, ask, lambda _: True)
        assert failing != "a" or asked == ["a"]


def test_servers_far_away_are_asked_at_the_end_of_the_process() -> None:
    """Where Python starts no more threads they are asked one after the other."""
    code = """
import atexit
from smb.transport.choose import for_each
atexit.register(lambda: print(for_each("abc", str.upper, lambda _: True)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "('A', 'B', 'C')\n", done.stderr
