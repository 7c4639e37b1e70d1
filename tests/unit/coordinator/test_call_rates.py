"""smb.coordinator.call_rates: which calls of a certificate wait, and how long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from smb.coordinator import call_places, call_rates
from smb.coordinator.call_places import BusyError, CallPlaces
from smb.coordinator.call_rates import MANY, OTHERS_S, SAVED_S, SHARE, SHARE_OF_MANY, CallRates, LoopTime, busy_s
from smb.rpc import control_pb2 as pb
from smb.security import roles
from smb.security.roles import Caller, Role

COST_S = 0.001
READER, OTHER = Caller(Role.READER, "r"), Caller(Role.CLIENT, "c")


class Loop:
    """A clock and a loop, each of whose calls takes COST_S."""

    def __init__(self) -> None:
        self.now = self.busy = 100.0
        self.rates = CallRates(lambda: self.now, lambda: self.busy)

    def answer(self, calls: int, seconds: float, cost_s: float = COST_S) -> None:
        """Calls end at some port, in that time."""
        for _ in range(calls):
            self.rates.ended()
        self.busy += calls * cost_s
        self.now += seconds

    def with_others(self) -> Loop:
        """Two certificates have asked, and a call's cost is known."""
        self.answer(100, 1.0)
        assert self.begin("other") is None
        assert self.begin("flood") is None
        return self

    def begin(self, who: str = "flood", kind: str = "") -> asyncio.Future[float] | None:
        """Return None if the call begins at once."""
        turn = self.rates.begin(who, kind)
        return None if turn.done() else turn

    def flood(self, most: int = 100_000) -> int:
        """Begin calls until one has to wait, and return how many began; `most` if none has to."""
        return next((number for number in range(most) if self.begin() is not None), most)

    async def after(self, seconds: float, waiting: Iterable[asyncio.Future[float]], busy: float = 1.0) -> int:
        """Return how many of these have begun so many seconds later. The loop was busy for that part of the time."""
        self.now += seconds
        self.busy += busy * seconds
        await self.round()
        return sum(turn.done() for turn in waiting)

    async def round(self) -> None:
        """In place of the timer, which has another clock."""
        if self.rates._round is not None:
            self.rates._begin_round()
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_rates, "_ROUND_S", 3600.0)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


SAVED, PER_S = round(SAVED_S / COST_S), round(SHARE / COST_S)


def test_a_certificate_takes_what_it_has_saved_and_then_its_share() -> None:
    """Its calls begin in the order of their arrival, and another one's do not wait."""

    async def scenario() -> None:
        loop = Loop().with_others()
        assert loop.flood() == pytest.approx(SAVED, abs=3)
        waiting = [loop.begin() for _ in range(MANY - 1)]
        assert None not in waiting
        turns = [turn for turn in waiting if turn is not None]
        assert loop.begin("other") is None
        assert await loop.after(20 / PER_S, turns) == pytest.approx(20, abs=2)
        assert [turn.done() for turn in turns] == sorted((turn.done() for turn in turns), reverse=True)
        assert loop.begin() is not None
        while not turns[-1].done():
            await loop.after(1 / PER_S, turns)
        await loop.after(1.0, ())
        assert loop.flood() == pytest.approx(PER_S, abs=3)
        await loop.after(OTHERS_S - 5, ())
        assert loop.flood() == pytest.approx(SAVED, abs=3)

    run(scenario)


def test_a_certificate_of_which_many_calls_wait_has_a_smaller_share() -> None:
    async def scenario() -> None:
        loop = Loop().with_others()
        loop.flood()
        turns = [turn for _ in range(10 * MANY) if (turn := loop.begin()) is not None]
        begun = await loop.after(MANY * COST_S / SHARE_OF_MANY, turns)
        assert begun == pytest.approx(MANY, abs=3)
        while sum(not turn.done() for turn in turns) > MANY:
            await loop.after(0.1, turns)
        before = sum(turn.done() for turn in turns)
        assert await loop.after(20 * COST_S / SHARE, turns) == pytest.approx(before + 20, abs=3)

    run(scenario)


@pytest.mark.parametrize("crowds", [1, 4, 16])
def test_certificates_that_ask_without_pause_share_half_of_the_time(crowds: int) -> None:
    """Each of four had a quarter of it, so nothing was left for others, and gRPC's queue stayed long."""

    async def scenario() -> None:
        loop = Loop().with_others()
        names = [f"flood{number}" for number in range(crowds)]
        for name in names:
            loop.rates.begin(name)
            loop.rates._buckets[f"{name} "].take(100 * SAVED_S, loop.now, SHARE)
        loop.answer(100, 1.0)
        turns = [loop.rates.begin(name) for name in names for _ in range(4 * MANY)]
        for bucket in loop.rates._buckets.values():
            bucket.full_at = min(bucket.full_at, loop.now + SAVED_S / SHARE)  # they have taken what they saved
        begun = [await loop.after(0.002, turns) for _ in range(200)][-1]
        assert begun == pytest.approx((SHARE_OF_MANY if crowds == 1 else SHARE) * 0.4 / COST_S, abs=2 * crowds)
        assert loop.begin("other") is None

    run(scenario)


def test_a_certificate_that_asks_alone_does_not_wait() -> None:
    """From the first call of another one on it does, until that one has not called for a while."""

    async def scenario() -> None:
        loop = Loop()
        loop.answer(100, 1.0)
        assert loop.flood() == 100_000
        assert loop.begin("other") is None
        assert loop.flood() == pytest.approx(SAVED, abs=3)
        await loop.after(OTHERS_S - 1, ())
        assert loop.flood() == pytest.approx(SAVED, abs=3)
        await loop.after(2, ())
        await loop.after(2, ())
        assert loop.flood() == 100_000

    run(scenario)


@pytest.mark.parametrize(
    ("slower", "calls", "seconds", "begin"),
    [(1, 200, 1.0, SAVED), (4, 200, 1.0, SAVED // 4), (4, 10, 1.0, SAVED), (4, 200, 20.0, SAVED), (50, 20, 1.0, 200)],
)
def test_a_call_counts_as_much_as_calls_cost_on_average(slower: int, calls: int, seconds: float, begin: int) -> None:
    """Outside their handlers: on a machine that is four times slower, a quarter of the calls begins. A time with few
    calls does not count, since the loop's other work would be theirs, and they count 5 ms at most."""

    async def scenario() -> None:
        loop = Loop().with_others()
        loop.answer(calls, seconds, slower * COST_S)
        assert loop.flood() == pytest.approx(begin, abs=3)

    run(scenario)


def test_calls_of_another_kind_have_a_bucket_of_their_own() -> None:
    async def scenario() -> None:
        loop = Loop().with_others()
        loop.flood()
        assert loop.begin("flood", "sessions") is None

    run(scenario)


def test_no_more_calls_wait_than_may_and_who_goes_away_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_rates, "CALLS_WAITING_MAX", 400)  # of which one certificate gets a quarter

    async def scenario() -> None:
        loop = Loop().with_others()
        loop.flood()
        turns = [turn for _ in range(99) if (turn := loop.begin()) is not None]
        for _ in range(2):
            with pytest.raises(asyncio.QueueFull):
                loop.begin()
        for turn in turns[:50]:
            turn.cancel()
        await asyncio.sleep(0)
        assert loop.begin() is not None
        assert await loop.after(10 / PER_S, turns[50:]) == pytest.approx(9, abs=2)

    run(scenario)


def test_calls_of_all_certificates_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of both kinds together, of one certificate and of all: each leaves room for the next. A call that need not
    wait begins nevertheless.
    """
    monkeypatch.setattr(call_rates, "CALLS_WAITING_MAX", 40)

    async def scenario() -> None:
        loop = Loop().with_others()
        for who in ("flood", "other"):
            for kind in ("", "sessions"):
                loop.begin(who, kind)
                loop.rates._buckets[f"{who} {kind}"].take(1000.0, loop.now, SHARE)
        waiting = [loop.rates.begin("flood", kind) for kind in ("", "sessions") for _ in range(5)]
        for kind in ("", "sessions"):
            with pytest.raises(asyncio.QueueFull, match=r"^10 calls wait already, 10 of the same certificate$"):
                loop.begin("flood", kind)
        for _ in range(8):  # 3 * 8 are more than the other 40 - 10 - 8
            assert loop.begin("other") is not None
        with pytest.raises(asyncio.QueueFull, match=r"^18 calls wait already, 8 of the same certificate$"):
            loop.begin("other", "sessions")
        assert loop.begin("third") is None
        for turn in waiting:
            turn.cancel()
        await asyncio.sleep(0)
        assert loop.begin("other", "sessions") is not None
        assert loop.rates._waiting == {"other": 9}

    run(scenario)


def test_a_timer_lets_waiting_calls_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the clock and the loop as they are."""
    monkeypatch.setattr(call_rates, "_OUTSIDE_S", 0.1)
    monkeypatch.setattr(call_rates, "_ROUND_S", 0.002)

    async def scenario() -> None:
        rates = CallRates(busy=time.monotonic)
        rates.begin("other")
        turns = [turn for _ in range(round(SAVED_S / 0.1) + 5) if not (turn := rates.begin("flood")).done()]
        assert len(turns) > 2
        await asyncio.wait_for(asyncio.gather(*turns), 20)

    run(scenario)


def test_waiting_calls_begin_while_the_loop_is_idle() -> None:
    """One of each certificate in turn, and what has begun so is not charged. None of a flood does: it stands in gRPC's
    queue as well, and a loop that waits for another thread seems idle.
    """

    async def scenario() -> None:
        loop = Loop().with_others()
        waiting: dict[str, list[asyncio.Future[float]]] = {"flood": [], "other": [], "many": []}
        for who, turns in waiting.items():
            loop.begin(who)
            loop.rates._buckets[f"{who} "].take(1000.0, loop.now, SHARE)  # nothing begins by its share
            turns += [loop.rates.begin(who) for _ in range(3 * MANY if who == "many" else MANY // 2)]
        full_at = [bucket.full_at for bucket in loop.rates._buckets.values()]
        every = [turn for turns in waiting.values() for turn in turns]
        assert await loop.after(0.001, every) == 0
        assert await loop.after(40 * COST_S, every, busy=0.0) == pytest.approx(20, abs=2)
        begun = {who: sum(turn.done() for turn in turns) for who, turns in waiting.items()}
        assert abs(begun["flood"] - begun["other"]) < 2
        assert not begun["many"]
        assert [bucket.full_at for bucket in loop.rates._buckets.values()] == full_at
        for _ in range(20):
            most = await loop.after(0.002, every)
        assert most < 30  # no more begin once the loop is busy
        assert not all(turn.done() for turn in waiting["flood"])

    run(scenario)


def test_a_full_bucket_pays_for_a_call_whatever_calls_seem_to_cost() -> None:
    """The host stood still during a call: its certificate waits for some seconds, and others for nothing."""

    async def scenario() -> None:
        loop = Loop().with_others()
        first = loop.rates.begin("flood")
        loop.now += 60.0
        loop.busy += 60.0
        loop.rates.took("flood", "", first.result(), 60.0)
        assert loop.begin("other") is None
        waiting = [turn for _ in range(30) if (turn := loop.begin()) is not None]
        loop.answer(300, 1.0, cost_s=1.0)  # all of the loop's time was other work
        await loop.after(2 * SAVED_S / SHARE, ())
        assert waiting[0].done()
        until = loop.now + 5
        for turn in waiting:
            while not turn.done() and loop.now < until:
                await loop.after(0.002, ())
            loop.rates.took("flood", "", turn.result(), COST_S)
        assert loop.begin() is None

    run(scenario)


def test_calls_that_wait_begin_once_their_certificate_asks_alone() -> None:
    async def scenario() -> None:
        loop = Loop().with_others()
        loop.flood()
        waiting = [turn for _ in range(MANY // 2) if (turn := loop.begin()) is not None]
        bucket = loop.rates._buckets["flood "]
        bucket.take(10_000.0, loop.now, SHARE)
        assert await loop.after(OTHERS_S - 1, waiting) == 0
        assert await loop.after(2, waiting) == len(waiting)

    run(scenario)


@pytest.mark.parametrize("dear_s", [0.02, 0.005])
def test_who_asks_for_dear_calls_pays_for_them(dear_s: float) -> None:
    """One certificate asks without pause for calls that take the loop for long, another 300 times a second for a small
    one: the small ones do not wait, the dear ones have at least half of the time, and none is left over.
    """

    async def scenario() -> None:
        loop, cheap_s = Loop(), 0.0005
        waiting: dict[str, list[asyncio.Future[float]]] = {"dear": [], "cheap": []}
        took, due, round_at, end = {"dear": 0.0, "cheap": 0.0}, loop.now, loop.now, loop.now + 30
        most = 0
        while loop.now < end:
            while due <= loop.now:
                waiting["cheap"].append(loop.rates.begin("cheap"))
                due += 1 / 300
            while len(waiting["dear"]) < 30:
                waiting["dear"].append(loop.rates.begin("dear"))
            if loop.now >= round_at + 0.002:
                round_at = loop.now
                await loop.round()
            begun = [(who, turn) for who, turns in waiting.items() for turn in turns if turn.done()]
            for who, turn in begun:
                cost_s = dear_s if who == "dear" else cheap_s
                loop.now += cost_s
                loop.busy += cost_s
                took[who] += cost_s
                loop.rates.ended()
                loop.rates.took(who, "", turn.result(), cost_s)
                waiting[who].remove(turn)
            most = max(most, len(waiting["cheap"])) if loop.now > end - 20 else 0
            if not begun:
                loop.now += 0.0005
        assert took["cheap"] == pytest.approx(300 * 30 * cheap_s, rel=0.02)
        assert took["dear"] > 30 * SHARE
        assert most < 300  # of a second
        assert took["dear"] + took["cheap"] > 0.75 * 30

    run(scenario)


def test_what_a_handler_takes_of_the_loop_is_measured() -> None:
    """Also if it fails or is cancelled; the time for which it waits is not counted."""

    def work(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    async def handler(fails: bool, go: asyncio.Event) -> str:
        work(0.05)
        try:
            await go.wait()
        finally:
            work(0.05)
        if fails:
            raise ValueError
        return "answer"

    async def scenario() -> None:
        for fails, cancelled in ((False, False), (True, False), (False, True)):
            loop_time, go = LoopTime(), asyncio.Event()

            async def call(loop_time: LoopTime = loop_time, fails: bool = fails, go: asyncio.Event = go) -> Any:
                return await loop_time.of(handler(fails, go))

            task = asyncio.create_task(call())
            await asyncio.sleep(0)
            begun = time.monotonic()
            while time.monotonic() < begun + 0.3:
                await asyncio.sleep(0.01)
            go.set()
            if cancelled:
                task.cancel()
            ended: Any = (await asyncio.gather(task, return_exceptions=True))[0]
            expected = asyncio.CancelledError if cancelled else ValueError
            assert isinstance(ended, expected) if fails or cancelled else ended == "answer"
            assert 0.1 <= loop_time.seconds < 0.3

    run(scenario)


def test_a_thread_is_busy_while_it_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The time in which it waits for a processor counts, too, if the kernel says it."""
    for path in (call_rates._SCHEDSTAT, tmp_path / "none"):
        monkeypatch.setattr(call_rates, "_SCHEDSTAT", path)
        begun, before, worked_s = time.monotonic(), busy_s(), time.thread_time()
        while time.thread_time() < worked_s + 0.05:
            pass
        busy = busy_s() - before
        assert 0.03 < busy < time.monotonic() - begun + 0.03


class Port:
    """A port whose calls are answered at once. `begun`: the methods that were carried out."""

    def __init__(self, waits: Iterable[bool | None]) -> None:
        """`waits`: whether each call waits for ever; None: too many wait."""
        self._waits = iter(waits)
        self.places = CallPlaces(cast(Any, SimpleNamespace(begin=self.begin, took=self.took, refused=self.refused)))
        self.kinds: list[str] = []
        self.begun: list[str] = []
        self.charged: list[tuple[str, float]] = []
        self.refusals: list[str] = []

    def refused(self, _certificate: str, kind: str) -> None:
        self.refusals.append(kind)

    def took(self, _certificate: str, kind: str, charged_s: float, seconds: float) -> None:
        self.charged.append((kind, charged_s))
        assert seconds >= 0

    def begin(self, _certificate: str, kind: str) -> asyncio.Future[float]:
        self.kinds.append(kind)
        waits = next(self._waits)
        if waits is None:
            raise asyncio.QueueFull("7 calls wait already")
        turn: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        if not waits:
            turn.set_result(0.25)
        return turn

    def call(self, who: Caller, method: str, request: Any) -> asyncio.Task[None]:
        async def answer(_request: Any, _context: Any) -> None:
            self.begun.append(method)

        async def found(_details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer)

        async def calling() -> None:
            roles._caller.set(who)
            handler = await self.places.intercept_service(found, SimpleNamespace(method=f"/smb/{method}"))  # type: ignore[arg-type]
            await cast(Any, handler).unary_unary(request, None)

        return asyncio.create_task(calling())


def test_a_call_that_is_to_wait_begins_later_and_operators_never_wait(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log names the certificate once. An open that waits for a name waits for its turn, too, and a call beyond what
    may wait is refused."""

    async def scenario() -> None:
        port = Port([True, True, True, False, None])
        waiting = [
            port.call(READER, "ListBuffers", pb.ListBuffersRequest()),
            port.call(READER, "OpenBuffer", pb.OpenBufferRequest(name="w", timeout_ms=1000)),
            port.call(READER, "RenewSession", pb.RenewSessionRequest()),
        ]
        await asyncio.wait({port.call(OTHER, "Overview", pb.OverviewRequest())})
        for trusted in (Caller(Role.OPERATOR, "op"), Caller(Role.SERVER, "s")):
            await port.call(trusted, "Leader", pb.LeaderRequest())
        assert port.begun == ["Overview", "Leader", "Leader"]
        assert port.kinds == ["", "", "sessions", ""]
        assert port.charged == [("", 0.25)]
        with pytest.raises(
            BusyError, match=r"^ListServers of .* role reader, .*: 7 calls wait already; nothing"
        ) as refused:
            await port.call(READER, "ListServers", pb.ListServersRequest())
        assert refused.value.outcome == "not applied"
        for each in waiting:
            assert not each.done()
            each.cancel()
        await asyncio.wait(waiting)

    monkeypatch.setattr(call_places, "_SAID_FROM_S", 0.0)
    with caplog.at_level(logging.WARNING, "coordinator"):
        asyncio.run(scenario())
    (said,) = caplog.messages
    assert said == (
        'calls of a certificate of role reader, "r" ask for too much of the coordinator\'s time: one waited 0 s'
    )


def test_large_requests_that_wait_have_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that thousands can wait, and what their requests take is bounded: one beyond the bound is refused at once, as
    a message keeps its memory as long as it lives. Small calls begin beside them.
    """
    monkeypatch.setattr(call_places, "LARGE_REQUESTS_MAX", 32)

    async def scenario() -> None:
        port = Port([*[True] * 106, False])
        small, large = (pb.CreateBufferRequest(name="w", packed_metadata=bytes(size)) for size in (10, 5000))
        waiting = [port.call(READER, "CreateBuffer", small) for _ in range(100)]
        waiting += [port.call(READER, "CreateBuffer", large) for _ in range(6)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match=r"6 requests of more than 4096 bytes in progress already, 6 of") as refused:
            await port.call(READER, "CreateBuffer", large)
        assert refused.value.outcome == "not applied"
        assert port.refusals == [""]  # charged all the same
        assert not port.begun
        await port.call(READER, "CreateBuffer", small)
        assert port.begun == ["CreateBuffer"]
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)

    asyncio.run(scenario())
