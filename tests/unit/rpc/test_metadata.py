"""smb.rpc.metadata: which objects can be stored with a buffer, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from smb import errors
from smb.coordinator.records import Kind
from smb.coordinator.validate import Creation, check_creation
from smb.rpc import metadata

GOOD = {
    "smb.train": {"scheme": "diloco", "every": 50, "rate": 0.7, "on": True, "none": None},
    "ä\ud800": ["x", [1e-300]],
}


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def test_what_goes_in_comes_out() -> None:
    """Any JSON object, with odd strings, comes back equal; each decode is a dict of its own; tuples become lists."""
    for good in (GOOD, nested(metadata.NESTING_MAX), {"n": 10**30, "f": float(np.float64(0.1))}, {}):
        text = metadata.encode("create", good)
        metadata.check("create", text)
        assert metadata.decode(text) == good
        assert metadata.decode(text) is not metadata.decode(text)
    assert metadata.decode(metadata.encode("create", {"shape": (1, 2)})) == {"shape": [1, 2]}
    assert metadata.encode("create", {}) == ""


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([1], "list is no mapping"),
        ("{}", "str is no mapping"),
        ({"a": {1: 2}}, r"metadata\['a'\] has the key 1"),
        ({"a": [0, float("nan")]}, r"metadata\['a'\]\[1\] is nan"),
        ({"a": float("inf")}, "is inf"),
        ({"a": np.zeros(3)}, "of type ndarray, which is no JSON"),
        ({"a": np.int64(3)}, "of type int64"),
        ({"a": b"x"}, "of type bytes"),
        ({"a": {"b", "c"}}, "of type set"),
        ({"a": 10**5000}, "metadata: .*digits"),
        (nested(metadata.NESTING_MAX + 1), "deeper than 64"),
        ({"a": "x" * metadata.BYTES_MAX}, "of metadata as JSON; there is room for 1 MiB"),
    ],
)
def test_what_is_no_json_is_refused_where_it_is(wrong: Any, told: str) -> None:
    """The message begins with what was asked, and says where the odd value is."""
    with pytest.raises(errors.InvalidArgumentError, match=f"^create of w: .*{told}"):
        metadata.encode("create of w", wrong)


def test_an_object_that_holds_itself_is_refused() -> None:
    """A circle ends at the limit of depth."""
    circle: dict[str, Any] = {}
    circle["again"] = circle
    with pytest.raises(errors.InvalidArgumentError, match="deeper than 64"):
        metadata.encode("create", circle)


def test_the_limit_is_the_last_byte() -> None:
    """An object of exactly 1 MiB as text passes, one more byte does not; characters beyond ASCII take six."""
    most = metadata.BYTES_MAX - len('{"a":""}')
    assert len(metadata.encode("create", {"a": "x" * most})) == metadata.BYTES_MAX
    with pytest.raises(errors.InvalidArgumentError, match="room for 1 MiB"):
        metadata.encode("create", {"a": "x" * (most + 1)})
    metadata.check("create", '{"a":"' + "x" * most + '"}')
    with pytest.raises(errors.InvalidArgumentError, match="room for 1 MiB"):
        metadata.check("create", '{"a":"' + "ä" * (most // 2 + 1) + '"}')


@pytest.mark.parametrize(
    ("hostile", "told"),
    [
        ("{", "is no JSON"),
        ("[]", "is no JSON object"),
        ("3", "is no JSON object"),
        ("null", "is no JSON object"),
        ('{"a":NaN}', "NaN is no JSON number"),
        ('{"a":-Infinity}', "no JSON number"),
        ('{"a":1e999}', "is inf"),
        ('{"a":' + "1" * 5000 + "}", "is no JSON"),
        ('{"a":' * 65 + "1" + "}" * 65, "deeper than 64"),
        ('{"a":' * 150_000 + "1" + "}" * 150_000, "deeper than 64"),
        ("[" * 500_000, "deeper than 64|no JSON"),
        (" " * (metadata.BYTES_MAX + 1), "room for 1 MiB"),
    ],
)
def test_the_coordinator_takes_no_text_that_a_client_could_not_read(hostile: str, told: str) -> None:
    """What other clients may send is checked as if nobody had checked it before."""
    with pytest.raises(errors.InvalidArgumentError, match=told):
        metadata.check("create", hostile)
    creation = Creation("w", (1,), "float32", kind=Kind.BUFFER)
    assert check_creation(creation, replicas=1) is creation
    with pytest.raises(errors.InvalidArgumentError, match=r'create of "w": .*metadata'):
        check_creation(replace(creation, metadata=hostile), replicas=1)
