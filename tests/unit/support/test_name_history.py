"""tests.support.name_history: histories that one coordinator can have, and planted ones that it cannot."""

from __future__ import annotations

from tests.support.name_history import EXISTS, MISSING, NEVER, OK, UNKNOWN, Call, find_order


def test_good_histories_are_found_good() -> None:
    """Calls that overlap take effect in either order; one of unknown outcome may, or may not, and later."""
    overlapping = [
        Call("create", "a", OK, 0, 3, mark=1),
        Call("read", "a", MISSING, 1, 2),
        Call("rename", "a", OK, 4, 6, new_name="b"),
        Call("read", "b", OK, 5, 7, mark=1),
        Call("create", "b", EXISTS, 8, 9, mark=2),
    ]
    assert find_order(overlapping, {}, {"b": 1})
    lost = [Call("delete", "a", UNKNOWN, 0, NEVER), Call("read", "a", OK, 1, 2, mark=1)]
    assert find_order(lost, {"a": 1}, {"a": 1})
    assert find_order([*lost, Call("read", "a", MISSING, 3, 4)], {"a": 1}, {})
    assert find_order([Call("replace", "a", OK, 0, 1, new_name="b")], {"a": 1, "b": 2}, {"b": 1})


def test_planted_faults_are_found() -> None:
    """A create that is forgotten, one that two were given, a read of before, and a delete that comes back."""
    assert not find_order([Call("create", "a", OK, 0, 1, mark=1)], {}, {})
    assert not find_order([Call("create", "a", OK, 0, 2, mark=1), Call("create", "a", OK, 1, 3, mark=2)], {}, {"a": 2})
    stale = [Call("delete", "a", OK, 0, 1), Call("read", "a", OK, 2, 3, mark=1)]
    assert not find_order(stale, {"a": 1}, {})
    assert not find_order([Call("delete", "a", OK, 0, 1)], {"a": 1}, {"a": 1})
    half = [Call("rename", "a", OK, 0, 1, new_name="b")]
    assert not find_order(half, {"a": 1}, {"a": 1, "b": 1})
    assert not find_order([Call("rename", "a", OK, 0, 1, new_name="b")], {"a": 1, "b": 2}, {"b": 1})
    twice = [Call("create", "a", OK, 0, 9, mark=1), Call("rename", "a", OK, 2, 3, new_name="b")]
    assert find_order(twice, {}, {"b": 1})
    assert not find_order(twice, {}, {"a": 1, "b": 1})
