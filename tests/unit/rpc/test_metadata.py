"""smb.rpc.metadata: which objects can be stored with a buffer, and what is refused."""

from __future__ import annotations

import random
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from smb import errors
from smb.coordinator.limits import METADATA_BYTES_MAX
from smb.coordinator.records import Kind
from smb.coordinator.validate import Creation, check_creation
from smb.rpc import metadata
from smb.tensors import TensorTable

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
        packed = metadata.encode("create", good)
        metadata.check("create", packed)
        text = metadata.unpack(packed)
        assert metadata.decode(text) == good
        assert metadata.decode(text) is not metadata.decode(text)
    assert metadata.decode(metadata.unpack(metadata.encode("create", {"shape": (1, 2)}))) == {"shape": [1, 2]}
    assert metadata.encode("create", {}) == b""


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([1], "must be a mapping of names to JSON values, not list"),
        ("{}", "must be a mapping of names to JSON values, not str"),
        ({"a": {1: 2}}, r"metadata\['a'\] has the key 1"),
        ({"a": [0, float("nan")]}, r"metadata\['a'\]\[1\] is nan"),
        ({"a": float("inf")}, "is inf"),
        ({"a": np.zeros(3)}, "of type ndarray, which JSON does not have"),
        ({"a": np.int64(3)}, "of type int64"),
        ({"a": b"x"}, "of type bytes"),
        ({"a": {"b", "c"}}, "of type set"),
        ({"a": 10**5000}, "metadata: .*digits"),
        (nested(metadata.NESTING_MAX + 1), "deeper than 64"),
        ({"a": [[]] * metadata.PARTS_MAX}, "524289 commas and opening brackets as JSON, but may have at most 262144"),
        ({"a": "x" * metadata.TEXT_BYTES_MAX}, "metadata .as JSON. may have at most 4 MiB"),
        ({"a": random.Random(1).randbytes(1 << 20).hex()}, "metadata .packed. may have at most 1 MiB"),
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
    """An object of exactly 4 MiB as text passes, one more byte does not; characters beyond ASCII take six. Packed it
    may have 1 MiB."""
    most = metadata.TEXT_BYTES_MAX - len('{"a":""}')
    assert len(metadata.unpack(metadata.encode("create", {"a": "x" * most}))) == metadata.TEXT_BYTES_MAX
    with pytest.raises(errors.InvalidArgumentError, match=r"metadata \(as JSON\) may have at most 4 MiB"):
        metadata.encode("create", {"a": "x" * (most + 1)})
    metadata.check("create", metadata.pack('{"a":"' + "x" * most + '"}'))
    with pytest.raises(errors.InvalidArgumentError, match="more than 4 MiB"):
        metadata.check("create", metadata.pack('{"a":"' + "ä" * (most // 2 + 1) + '"}'))
    with pytest.raises(errors.InvalidArgumentError, match=r"metadata \(packed\) may have at most 1 MiB"):
        metadata.check("create", bytes(metadata.PACKED_BYTES_MAX + 1))


@pytest.mark.parametrize("spoil", [lambda packed: packed[:-1], lambda packed: packed + b"x", lambda packed: b"{}"])
def test_what_cannot_be_unpacked_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    """Cut off, with something behind it, or not packed at all: the coordinator says so, and keeps nothing."""
    with pytest.raises(errors.InvalidArgumentError, match=r"^create: metadata cannot be unpacked"):
        metadata.check("create", spoil(metadata.encode("create", GOOD)))


def test_a_small_text_that_unpacks_to_a_large_one_is_stopped() -> None:
    """0.9 GiB of zeros in 1 MiB: no more of them are made than the bound and one."""
    stream = zlib.compressobj()
    first, other = (stream.compress(bytes(1 << 20)) + stream.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    bomb = first + 921 * other + stream.flush()  # a flush of this kind makes a block that stands by itself
    assert len(bomb) < metadata.PACKED_BYTES_MAX
    tracemalloc.start()
    try:
        with pytest.raises(errors.InvalidArgumentError, match="more than 4 MiB"):
            metadata.check("create", bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * metadata.TEXT_BYTES_MAX
    finally:
        tracemalloc.stop()


def test_models_of_ten_thousand_tensors_fit() -> None:
    """Their table has 1.5 MiB as text, and takes a fortieth of the room of all buffers at most."""
    names = (
        f"model.layers.{layer}.block.mlp.experts.{expert}.{part}_proj.weight_packed_for_inference_by_the_quantizer"
        for layer in range(48)
        for expert in range(70)
        for part in ("gate", "up", "down")
    )
    table = TensorTable.of({name: ((2048 + len(name), 7168), "bfloat16") for name in names})
    assert len(table) > 10_000
    packed = metadata.encode("create", table.to_metadata())
    assert len(metadata.unpack(packed)) > 1_500_000
    assert len(packed) < METADATA_BYTES_MAX // 40
    assert TensorTable.from_metadata(metadata.decode(metadata.unpack(packed)), table.dtype, table.nbytes) == table


@pytest.mark.parametrize(
    ("hostile", "told"),
    [
        ("{", "metadata is not JSON"),
        ("[]", "must be a JSON object"),
        ("3", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"a":NaN}', "NaN is not a JSON number"),
        ('{"a":-Infinity}', "not a JSON number"),
        ('{"a":[0,[1e999]]}', "an infinite number"),
        ('{"a":-1e999}', "an infinite number"),
        ('{"a":[' + "[]," * metadata.PARTS_MAX + "1]}", "524290 commas and opening brackets"),
        ('{"a":' + "1" * 5000 + "}", "metadata is not JSON"),
        ('{"a":' * 65 + "1" + "}" * 65, "deeper than 64"),
        ('{"a":' * 130_000 + "1" + "}" * 130_000, "deeper than 64"),
        ("[" * 130_000, "deeper than 64|not JSON"),
        (" " * (metadata.TEXT_BYTES_MAX + 1), "more than 4 MiB"),
    ],
)
def test_the_coordinator_takes_no_text_that_a_client_could_not_read(hostile: str, told: str) -> None:
    """What other clients may send is checked as if nobody had checked it before."""
    with pytest.raises(errors.InvalidArgumentError, match=told):
        metadata.check("create", metadata.pack(hostile))
    creation = Creation("w", (1,), "float32", kind=Kind.BUFFER)
    assert check_creation(creation, replicas=1) == creation
    with pytest.raises(errors.InvalidArgumentError, match=r'create of "w": .*metadata'):
        check_creation(replace(creation, metadata=metadata.pack(hostile)), replicas=1)
