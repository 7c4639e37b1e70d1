"""Calls of all ranks: what the speaker asks for is done at each rank, and errors reach all. Ranks are threads here."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

import smb
from smb.torch.meshes.rank_calls import RankCalls

COUNT = 3
DEADLINE_S = 30.0


class ThreadRanks:
    """A rank that talks with the other threads' ranks as smb.torch.ranks.Ranks does: by pickled messages."""

    def __init__(self, rank: int, barrier: threading.Barrier, said: list[Any]) -> None:
        self.rank = rank
        self.speaks = rank == 0
        self._barrier = barrier
        self._said = said

    def gather(self, what: Any) -> list[Any]:
        """Return what each rank says."""
        self._said[self.rank] = pickle.dumps(what)
        self._barrier.wait(DEADLINE_S)
        found = [pickle.loads(each) for each in self._said]
        self._barrier.wait(DEADLINE_S)
        return found

    def tell(self, what: Any = None) -> Any:
        """Return what the speaker says."""
        return self.gather(what)[0]


class Part:
    """What a rank has."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.total = 0

    def add(self, value: int) -> int:
        """Add, and return the total."""
        self.total += value * (1 + self.rank)
        return self.total

    def fail(self, rank: int, error: BaseException) -> None:
        """Fail at one rank."""
        if self.rank == rank:
            raise error


def run(speak: Callable[[RankCalls], Any]) -> tuple[list[Part], list[Any]]:
    """Run `speak` at the speaker of three ranks; return their parts, and what each of them returned or raised."""
    barrier, said = threading.Barrier(COUNT), [None] * COUNT
    parts, ends = [Part(rank) for rank in range(COUNT)], [None] * COUNT

    def rank_of(rank: int) -> None:
        ranks: Any = ThreadRanks(rank, barrier, said)
        calls = RankCalls(ranks, parts[rank])
        try:
            with calls.together():
                if rank == 0:
                    ends[rank] = speak(calls)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            ends[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    return parts, ends


def test_each_rank_makes_each_call() -> None:
    """The speaker gets the results by rank, and the others go on once its block is over."""
    parts, ends = run(lambda calls: [calls.all(Part.add, 1), calls.all(Part.add, 10)])
    assert ends == [[[1, 2, 3], [11, 22, 33]], None, None]
    assert [part.total for part in parts] == [11, 22, 33]


@pytest.mark.parametrize("rank", range(COUNT))
def test_an_error_of_one_rank_is_raised_at_the_speaker(rank: int) -> None:
    """If the speaker goes on then, so do the others, with the next call."""

    def speak(calls: RankCalls) -> list[Any]:
        with pytest.raises(smb.UnavailableError, match="is away"):
            calls.all(Part.fail, rank, smb.UnavailableError("the server is away"))
        with pytest.raises(smb.Error, match=f"rank {rank} of the mesh: ValueError"):
            calls.all(Part.fail, rank, ValueError("no number"))
        return calls.all(Part.add, 1)

    assert run(speak)[1] == [[1, 2, 3], None, None]


def test_an_error_of_the_speaker_ends_all() -> None:
    """Each rank raises it: an error of ours in its class, another one by its text."""

    def speak(calls: RankCalls) -> None:
        calls.all(Part.add, 1)
        raise smb.NotFoundError("it is gone")

    _, ends = run(speak)
    assert [type(end) for end in ends] == [smb.NotFoundError] * COUNT

    def interrupted(_: RankCalls) -> None:
        raise KeyboardInterrupt

    _, ends = run(interrupted)
    assert isinstance(ends[0], KeyboardInterrupt)
    assert [str(end) for end in ends[1:]] == ["rank 0 of the mesh failed: KeyboardInterrupt()"] * 2


def test_calls_outside_the_block_are_refused() -> None:
    """At the interpreter's exit, for one: the other ranks would not answer."""
    ranks: Any = ThreadRanks(0, threading.Barrier(1), [None])
    with pytest.raises(smb.UnavailableError, match="do not take part"):
        RankCalls(ranks, Part(0)).all(Part.add, 1)
