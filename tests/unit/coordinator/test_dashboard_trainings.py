"""What the coordinator remembers of trainings (smb/coordinator/dashboard/trainings.py)."""

from __future__ import annotations

import time

from smb.coordinator.dashboard.trainings import REPORTS_MAX, SPAN_S, STEP_S, TRAININGS_MAX, TimeShares, Trainings
from smb.coordinator.events import Instant
from smb.rpc import control_pb2 as pb


def at(seconds: float) -> Instant:
    return Instant(seconds, 1000.0 + seconds)


def report(name: str = "run", **fields: int) -> pb.TrainingReport:
    return pb.TrainingReport(name=name, **fields)


def test_samples_per_second_are_those_between_two_reports() -> None:
    """Unknown after the first one, and for a worker that never told any."""
    seen = Trainings()
    seen.record_reports(1, [report(slot=0, samples=100)], at(10))
    seen.record_reports(2, [report(slot=1)], at(10))
    assert [each.samples_per_s for each in seen.workers()["run"]] == [None, None]
    seen.record_reports(1, [report(slot=0, samples=300)], at(12))
    seen.record_reports(2, [report(slot=1)], at(12))
    assert [each.samples_per_s for each in seen.workers()["run"]] == [100.0, None]
    seen.ended([1])
    assert [each.report.slot for each in seen.workers()["run"]] == [1]
    seen.record_reports(2, [], at(14))  # it has left the training, and is still a client
    assert seen.workers() == {}


def test_rounds_over_time() -> None:
    """The furthest worker's clock, kept while nobody tells; none of it after the training was deleted."""
    seen = Trainings()
    seen.record_reports(1, [report(clock=3)], at(100))
    seen.record_reports(2, [report(slot=1, clock=5)], at(100.5))
    seen.record_reports(1, [report(clock=8)], at(106))
    past = seen.rounds("run", at(112))
    assert past.end == 1112.0
    assert list(past.rounds[-7:]) == [0, 5, 5, 5, 8, 8, 8]
    assert len(past.rounds) == SPAN_S / STEP_S
    seen.deleted("run")
    assert set(seen.rounds("run", at(112)).rounds) == {0.0}


def test_one_that_is_over() -> None:
    """The last report of a worker that leaves counts, and is of nobody who trains; the last round stays known."""
    seen = Trainings()
    seen.record_reports(1, [report(clock=8, left=True)], at(10))
    assert seen.workers() == {}
    assert seen.furthest() == {"run": 8}
    seen.record_reports(2, [report(slot=1, clock=5, left=True)], at(11))  # it was behind
    assert seen.furthest() == {"run": 8}
    seen.deleted("run")
    assert seen.furthest() == {}


def test_it_is_bounded() -> None:
    """Whatever clients tell: so many trainings of one session, so many pasts, so many steps."""
    seen = Trainings()
    seen.record_reports(1, [report(f"t{i}") for i in range(100)], at(0))
    assert len(seen.workers()) == REPORTS_MAX
    for i in range(2 * TRAININGS_MAX):
        seen.record_reports(i, [report(f"run{i}")], at(i))
    assert len(seen._past) == TRAININGS_MAX
    for second in range(5000):
        seen.record_reports(1, [report(clock=second)], at(second))
    assert len(seen._past["run"].steps) <= SPAN_S / STEP_S + 2


def test_a_report_does_not_visit_those_of_other_sessions() -> None:
    """With 40 times the sessions it takes as long, also if all report one training: the shortest of many counts."""

    def shortest_s(sessions: int) -> float:
        seen = Trainings()
        for session in range(sessions):
            seen.record_reports(session, [report(name=f"run{k}", slot=session, clock=1) for k in range(4)], at(10))
        found = []
        for turn in range(50):
            begun = time.perf_counter()
            seen.record_reports(0, [report(name=f"run{k}", clock=turn) for k in range(4)], at(12 + turn))
            found.append(time.perf_counter() - begun)
        return min(found)

    assert shortest_s(4000) < 5 * shortest_s(100)


def test_rates_add_up_over_reports_and_ends() -> None:
    seen = Trainings()
    for clock in (10, 12):
        for session in (1, 2, 3):
            seen.record_reports(session, [report(slot=session, samples=clock * 100)], at(clock))
    assert seen.rounds("run", at(14)).samples[-1] == 300.0
    seen.ended([1])
    seen.record_reports(2, [report(slot=2, samples=1400)], at(14))
    assert seen.rounds("run", at(16)).samples[-1] == 200.0
    seen.ended([2, 3])
    assert seen.workers() == {}


def test_how_a_workers_time_passes() -> None:
    """Shares of the last 15 to 30 s: of what was reported between, not since the beginning; what a worker reports
    beyond the time that passed is cut; nothing is known of versions that do not report it."""
    trainings = Trainings()

    def after(seconds: float, member: int, blocked: int, exchanging: int, waiting: int) -> TimeShares | None:
        told = report(member_ms=member, blocked_ms=blocked, exchanging_ms=exchanging, waiting_ms=waiting)
        trainings.record_reports(1, [told], at(seconds))
        (seen,) = trainings.workers()["run"]
        return seen.shares

    assert after(100.0, 1000, 0, 0, 0) is None  # the first
    for number in range(1, 30):  # it computes all the while
        assert after(100.0 + 2 * number, 1000 + 2000 * number, 0, 0, 0) == TimeShares(1.0, 0.0, 0.0)
    for number in range(1, 17):  # then it waits and exchanges
        shares = after(158.0 + 2 * number, 59_000 + 2000 * number, 1500 * number, 500 * number, 1000 * number)
    assert shares == TimeShares(0.25, 0.25, 0.5)  # what was before is forgotten after 32 s
    shares = after(192.0, 93_000, 10**9, 0, 10**9)
    assert shares is not None
    assert (shares.computing, shares.waiting) == (0.0, 1.0)
    assert trainings.workers()["run"][0].marks[0].marks == ()  # a report does not keep all earlier ones
    for seconds in (0.0, 2.0):
        trainings.record_reports(2, [report("old", samples=5)], at(seconds))
    assert trainings.workers()["old"][0].shares is None
