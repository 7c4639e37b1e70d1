"""What follows a failed try of a call to the coordinator, row by row; and what no row may do."""

from __future__ import annotations

import itertools

import pytest

from smb import errors
from smb.rpc.coordinator_tries import (
    COMES_BACK_S,
    NO_PLACES_MAX,
    STARTS_AGAIN_S,
    CoordinatorTries,
    FailedTry,
    Said,
    Then,
)

BEGUN_S, TIMEOUT_S = 100.0, 60.0
# Failures of which a change may have been carried out.
IN_DOUBT = (Said.NO_TIME, Said.NO_PLACE, Said.CUT_OFF, Said.DEPOSED, Said.OTHER)


def tries(*, several: bool = False, known: bool = True, repeatable: bool = True) -> CoordinatorTries:
    return CoordinatorTries(BEGUN_S, TIMEOUT_S, several=several, known=known, repeatable=repeatable)


def failed(said: Said, address: str = "a:1", text: str = "") -> FailedTry:
    """A change's try that has failed so, as the client describes it."""
    if said is Said.NOT_SENT:
        return FailedTry(said, address, None)
    outcome = errors.UNKNOWN if said in IN_DOUBT else errors.NOT_APPLIED
    failure = errors.UnavailableError(text or said.name, outcome=outcome)
    return FailedTry(said, address, failure, "7" if said is Said.STANDBY else "", said is Said.STANDBY)


def unreached() -> errors.Error:
    return errors.UnavailableError("no coordinator answers")


@pytest.mark.parametrize(
    ("said", "repeatable", "several", "known", "then"),
    [
        (Said.BUSY, False, False, False, Then.SAME),
        (Said.STANDBY, False, True, False, Then.NEXT),
        (Said.NOT_SENT, False, False, False, Then.NEXT),
        (Said.REFUSED, True, True, True, Then.FAIL),
        (Said.NO_TIME, True, True, True, Then.FAIL),
        (Said.OTHER, True, True, True, Then.FAIL),
        # The first time, at the same coordinator: it may be the leader under a flood.
        (Said.NO_PLACE, True, False, False, Then.SAME),
        (Said.NO_PLACE, False, True, True, Then.FAIL),
        # A connection to an address where no coordinator was ever seen may have been another program's.
        (Said.CUT_OFF, True, False, True, Then.NEXT),
        (Said.CUT_OFF, True, True, False, Then.NEXT),
        (Said.CUT_OFF, True, False, False, Then.FAIL),
        (Said.CUT_OFF, False, True, True, Then.FAIL),
        (Said.DEPOSED, True, True, False, Then.NEXT),
        (Said.DEPOSED, False, True, True, Then.FAIL),
    ],
)
def test_what_follows_a_first_failure(said: Said, repeatable: bool, several: bool, known: bool, then: Then) -> None:
    """The rows of the table, a second after the begin."""
    of_call = tries(several=several, known=known, repeatable=repeatable)
    assert of_call.after(failed(said), BEGUN_S + 1) is then


def test_no_change_is_repeated_that_may_have_been_carried_out() -> None:
    """Of a call that may not be carried out twice, whatever three tries say in whatever order, and of none after the
    timeout. Its error says that the outcome is unknown, unless the leader has answered after all.
    """
    for several, known, *said in itertools.product((True, False), (True, False), Said, Said, Said):
        of_call = tries(several=several, known=known, repeatable=False)
        for at, each in enumerate(said):
            then = of_call.after(failed(each, f"{'ab'[at % 2]}:1"), BEGUN_S + at)
            if then is Then.LOOK:
                then = of_call.looked(connects=True, now_s=BEGUN_S + at)
            if each in IN_DOUBT:
                assert then is Then.FAIL
                assert of_call.error(unreached).outcome == errors.UNKNOWN or each is Said.NO_TIME
            if then is Then.FAIL:
                break
        late = of_call.after(failed(Said.BUSY), BEGUN_S + TIMEOUT_S)
        assert late is Then.FAIL


@pytest.mark.parametrize(
    ("several", "known", "patience_s"), [(False, False, COMES_BACK_S), (False, True, STARTS_AGAIN_S)]
)
def test_a_single_coordinator_is_waited_for_while_it_restarts(several: bool, known: bool, patience_s: float) -> None:
    """From the first failure on. Then a look tells one that is away from one that very many connect to."""
    for connects in (False, True):
        of_call = tries(several=several, known=known)
        assert of_call.after(failed(Said.NOT_SENT), BEGUN_S + 1) is Then.NEXT
        assert of_call.after(failed(Said.NOT_SENT), BEGUN_S + 1 + patience_s - 0.01) is Then.NEXT
        late_s = BEGUN_S + 1 + patience_s
        assert of_call.after(failed(Said.NOT_SENT), late_s) is Then.LOOK
        assert of_call.looked(connects=connects, now_s=late_s) is (Then.NEXT if connects else Then.FAIL)
        if connects:
            assert of_call.after(failed(Said.NOT_SENT), BEGUN_S + TIMEOUT_S - 0.01) is Then.NEXT
        assert str(of_call.error(unreached)) == "no coordinator answers"
    of_several = tries(several=True, known=known)
    assert of_several.after(failed(Said.NOT_SENT), BEGUN_S) is Then.NEXT
    assert of_several.after(failed(Said.NOT_SENT), BEGUN_S + TIMEOUT_S - 0.01) is Then.NEXT


def test_a_coordinator_without_a_place_is_asked_some_times_before_the_next() -> None:
    """And each time it is known to be there, so patience begins anew."""
    of_call = tries(several=True)
    found = [of_call.after(failed(Said.NO_PLACE), BEGUN_S + at) for at in range(2 * NO_PLACES_MAX)]
    assert found == 2 * [*[Then.SAME] * (NO_PLACES_MAX - 1), Then.NEXT]
    alone = tries()
    for at in range(4):
        assert alone.after(failed(Said.NO_PLACE), BEGUN_S + at * (STARTS_AGAIN_S - 1)) is Then.SAME


def test_the_error_says_what_each_coordinator_said() -> None:
    """If one stands by, and the leader has not answered; a leader's own answer is the error as it is."""
    of_call = tries(several=True)
    of_call.after(failed(Said.STANDBY, "a:1", "stands by"), BEGUN_S)
    assert of_call.named == "7"
    of_call.after(failed(Said.NOT_SENT, "b:1"), BEGUN_S + TIMEOUT_S)
    said = str(of_call.error(unreached))
    assert "a:1: stands by; b:1: it cannot be reached" in said
    of_call.after(failed(Said.REFUSED, "b:1", "the name is taken"), BEGUN_S + 1)
    assert str(of_call.error(unreached)) == "the name is taken"


def test_a_standby_that_had_no_time_to_say_so_again_has_said_it() -> None:
    """Nothing was done then; and one that cannot be reached any more stands by no longer."""
    of_call = tries(several=True)
    of_call.after(failed(Said.STANDBY, "a:1", "stands by"), BEGUN_S)
    late = failed(Said.NO_TIME)._replace(failure=errors.TimeoutError("no answer"))
    assert late.failure is not None
    late.failure.outcome = errors.NOT_APPLIED
    assert of_call.after(late, BEGUN_S + TIMEOUT_S) is Then.FAIL
    assert str(of_call.error(unreached)) == "stands by"
    of_call = tries(several=True)
    of_call.after(failed(Said.STANDBY, "a:1", "stands by"), BEGUN_S)
    of_call.after(failed(Said.NOT_SENT, "a:1"), BEGUN_S + TIMEOUT_S)
    assert str(of_call.error(unreached)) == "no coordinator answers"


def test_an_error_after_a_try_in_doubt_says_so() -> None:
    """A leader's later answer counts: it knows the call by its number."""
    of_call = tries(several=True)
    of_call.after(failed(Said.CUT_OFF, text="the connection broke"), BEGUN_S)
    of_call.after(failed(Said.NOT_SENT), BEGUN_S + TIMEOUT_S)
    error = of_call.error(unreached)
    assert error.outcome == errors.UNKNOWN
    assert "An earlier attempt may have been carried out" in str(error)
    of_call.after(failed(Said.REFUSED, text="no room"), BEGUN_S + 1)
    assert of_call.error(unreached).outcome == errors.NOT_APPLIED
