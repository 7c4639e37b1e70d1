"""smb.coordinator.leases: who lives until when."""

from __future__ import annotations

from smb.coordinator.leases import Leases


def test_a_lease_runs_for_its_duration_and_a_renewal_moves_its_end() -> None:
    """A granted lease runs until, and not at, its end; granting again starts it anew."""
    leases = Leases[str](6.0).grant("a", now=100.0)
    assert leases.runs("a", 105.9)
    assert not leases.runs("a", 106.0)
    renewed = leases.grant("a", now=105.0)
    assert renewed.runs("a", 110.9)
    assert not leases.runs("a", 110.9), "the earlier leases must not have changed"


def test_nobody_without_a_grant_has_a_lease() -> None:
    """A stranger, and one whose lease was let go of, have none."""
    leases = Leases[str](6.0).grant("a", now=0.0)
    assert not leases.runs("b", 0.0)
    assert not leases.end("a").runs("a", 0.0)
    assert leases.end("b").runs("a", 0.0), "letting go of a lease that nobody holds changes nothing"


def test_those_that_ran_out_are_told_until_they_are_let_go_of() -> None:
    """run_out names exactly the holders past their end, and none of them again after end()."""
    leases = Leases[str](6.0).grant("a", now=0.0).grant("b", now=3.0)
    assert leases.run_out(5.9) == ()
    assert leases.run_out(6.0) == ("a",)
    assert leases.run_out(9.0) == ("a", "b")
    assert leases.end("a").run_out(9.0) == ("b",)


def test_leases_grow_with_their_holders() -> None:
    """So that all together renew no more than so many times a second; of those granted at once each has the same."""
    leases = Leases[int](30.0, most_per_s=100.0).grant_all(range(1000), now=50.0)
    assert leases.granted_s == 30.0
    assert leases.grant(1000, now=50.0).granted_s == 3 * 1001 / 100
    many = leases.grant_all(range(2000), now=60.0)
    assert many.granted_s == 60.0
    assert set(many.ends.values()) == {120.0}
    assert many.end(*range(500, 2000)).granted_s == 30.0
    assert many.end(*range(500, 2000)).runs(0, 119.0), "what was granted stays granted"
