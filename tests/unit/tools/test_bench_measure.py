from __future__ import annotations

import numpy as np
import pytest

from smb.tools.bench.measure import ROUNDS_MAX, ROUNDS_MIN, WARM_UP_ROUNDS, summarize, time_interleaved


def test_contenders_take_turns() -> None:
    """Every round calls each contender once, and who goes first changes from round to round."""
    calls: list[str] = []
    times = time_interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, seconds=0.0)
    rounds = [tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert len(rounds) == ROUNDS_MIN + WARM_UP_ROUNDS
    assert {len(values) for values in times.values()} == {ROUNDS_MIN}
    assert all(sorted(pair) == ["a", "b"] for pair in rounds)
    assert {pair[0] for pair in rounds} == {"a", "b"}


def test_rounds_end_before_sums_lose_exactness() -> None:
    """However long it may take, there are at most ROUNDS_MAX calls, so that sums of patterns stay exact in float32."""
    count = 0

    def call() -> None:
        nonlocal count
        count += 1

    time_interleaved({"a": call}, seconds=3600.0)
    assert count == ROUNDS_MAX
    assert (2**11 - 1) * ROUNDS_MAX < 2**24


def test_the_faster_limit_counts() -> None:
    """The ratio is taken to the fastest other contender, at the medians; p99 is a time that was measured."""
    times = {
        "ours": np.array([2.0, 2.0, 8.0]),
        "slow": np.array([4.0, 4.0, 4.0]),
        "fast": np.array([1.0, 1.0, 9.0]),
    }
    line = summarize("tcp", "write", 100, times, "ours")
    assert (line.limit, line.ratio, line.p50_seconds, line.p99_seconds) == ("fast", 0.5, 2.0, 8.0)
    assert line.bytes_per_second == 50.0
    assert line.to_json()["ratio"] == 0.5


def test_without_a_limit_there_is_no_ratio() -> None:
    """Where nothing comparable was measured the ratio is None, not a made-up number."""
    line = summarize("tcp", "write", 8, {"ours": np.array([1.0])}, "ours")
    assert line.limit is None
    assert line.ratio is None
    assert line.to_json()["limit_p50_seconds"] is None


def test_pattern_depends_on_the_position() -> None:
    """The pattern has whole numbers below 2^11 and differs between stripes and servers, so misplaced bytes show."""
    from smb.tools.bench.run import _pattern

    pattern = _pattern(1 << 20)
    assert pattern.dtype == np.float32
    assert pattern.max() < 2**11
    assert np.array_equal(pattern, np.round(pattern))
    for distance in (1, 64 << 10, 256 << 10, 512 << 10):
        assert np.mean(pattern[distance:] == pattern[:-distance]) < 0.01


def test_wrong_bytes_are_an_error() -> None:
    """A difference in one element is reported with its index and both values; equal arrays pass."""
    from smb.errors import Error
    from smb.tools.bench.run import _check

    good = np.arange(5, dtype=np.float32)
    _check(good.copy(), good, "write", "shm")
    bad = good.copy()
    bad[3] = 9.0
    with pytest.raises(Error, match=r"write over shm: 1 of 5 .* element 3 is 9\.0, expected 3\.0"):
        _check(bad, good, "write", "shm")
