"""Which mirror a reader takes: by host, then zone, then rate, and never one that is gone."""

from __future__ import annotations

from smb.buffer_info import Mirror
from smb.relay.reader_source import nearest


def mirror(server: str, *, alive: bool = True, **feeds: float) -> Mirror:
    return Mirror(
        f"p.mirror.{server}", server, "", alive, 1, 0, 1, {f"p.mirror.{name}": r for name, r in feeds.items()}
    )


NOBODY: frozenset[str] = frozenset()


def test_on_this_host_before_in_this_zone_before_elsewhere() -> None:
    three = [mirror("far"), mirror("near"), mirror("here")]
    assert nearest(three, {"s"}, {"here"}, {"near", "here"}, "me") == "p.mirror.here"
    assert nearest(three[:2], {"s"}, {"here"}, {"near", "here"}, "me") == "p.mirror.near"
    assert nearest(three[:1], {"s"}, {"here"}, {"near", "here"}, "me") == "p.mirror.far"


def test_the_source_where_it_is_nearer_or_nothing_else_lives() -> None:
    assert nearest([], {"s"}, NOBODY, NOBODY, "me") == ""
    assert nearest([mirror("a", alive=False)], {"s"}, {"a"}, NOBODY, "me") == ""
    assert nearest([mirror("a")], {"s"}, {"s", "a"}, NOBODY, "me") == ""
    assert nearest([mirror("a")], {"s"}, NOBODY, {"s"}, "me") == ""
    assert nearest([mirror("a")], {"s"}, NOBODY, {"s", "a"}, "me") == "p.mirror.a"


def test_faster_ones_first_and_equal_ones_in_turns() -> None:
    some = [mirror("a", b=1e9), mirror("b", a=1e6), mirror("c")]  # b sends to a
    assert nearest(some, {"s"}, NOBODY, NOBODY, "me") == "p.mirror.b"
    equal = [mirror(name) for name in "abcd"]
    taken = [nearest(equal, {"s"}, NOBODY, NOBODY, f"reader {i}") for i in range(400)]
    assert all(40 < taken.count(each.name) < 200 for each in equal)
