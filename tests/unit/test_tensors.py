"""smb.tensors: the table of named tensors, without a cluster."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from smb import errors
from smb.arrays.dtypes import DTYPES
from smb.tensors import ALIGNMENT_BYTES, ELEMENTS, METADATA_KEY, TensorInfo, TensorTable

FLOAT = np.dtype(np.float32)


def stored(**entries: Any) -> dict[str, Any]:
    return {METADATA_KEY: entries}


def entry(offset: Any = 0, shape: Any = (4,), dtype: Any = "float32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "offset": offset}


def test_tensors_lie_one_after_the_other_each_at_a_multiple_of_64_bytes() -> None:
    """Pairs, numpy arrays and torch tensors, of the host or of none, say what they are; empty ones take no room."""
    table = TensorTable.of(
        {
            "w": ((3, 7), "float32"),
            "b": np.zeros(16, np.float32),
            "e": ((0, 5), np.float32),
            "s": torch.zeros((), device="meta"),
            "n": (9, torch.float32),
        }
    )
    assert [(name, place.offset, place.shape) for name, place in table.items()] == [
        ("w", 0, (3, 7)), ("b", 128, (16,)), ("e", 192, (0, 5)), ("s", 192, ()), ("n", 256, (9,)),
    ]  # fmt: skip
    assert (table.dtype, table.size, table.nbytes) == (FLOAT, 73, 292)
    assert [place.nbytes for place in table.values()] == [84, 64, 0, 4, 36]


def test_a_buffer_has_the_dtype_of_its_tensors_or_bytes() -> None:
    """One element type with arithmetic is the buffer's; several, or one without arithmetic, make bytes."""
    for name in ELEMENTS:
        table = TensorTable.of({"a": (3, name), "b": (2, name)})
        assert table.dtype == (DTYPES[name].numpy if name in DTYPES and not DTYPES[name].storage else np.uint8)
        assert table["b"].offset == ALIGNMENT_BYTES
        assert table.size * table.dtype.itemsize == table.nbytes
    mixed = TensorTable.of({"a": (3, "float32"), "n": ((), "int64")})
    assert (mixed.dtype, mixed.size) == (np.uint8, 72)


@settings(max_examples=100, derandomize=True)
@given(
    some.dictionaries(
        some.text(min_size=1, max_size=20),
        some.tuples(some.lists(some.integers(0, 9), max_size=4).map(tuple), some.sampled_from(sorted(ELEMENTS))),
        min_size=1,
        max_size=12,
    )
)
def test_what_is_stored_is_read_back_and_views_do_not_overlap(tensors: dict[str, Any]) -> None:
    """Any table, through JSON; a value written to each view is there after all others were written."""
    table = TensorTable.of(tensors)
    metadata = json.loads(json.dumps(table.to_metadata()))
    again = TensorTable.from_metadata(metadata, table.dtype, table.nbytes)
    assert list(again.items()) == list(table.items())
    assert not table.differences(again)
    views = table.views(np.zeros(table.size, table.dtype))
    for number, view in enumerate(views.values()):
        view.reshape(-1).view(np.uint8)[:] = number + 1
    for number, (name, view) in enumerate(views.items()):
        assert (view.shape, view.dtype.name) == (tensors[name][0], tensors[name][1])
        assert (view.reshape(-1).view(np.uint8) == number + 1).all()


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({}, "must be a non-empty mapping of names to tensors"),
        ([((3,), "float32")], "must be a non-empty mapping"),
        ({"": (3, "float32")}, "a tensor's name must be a non-empty str, not ''"),
        ({3: (3, "float32")}, "a tensor's name must be a non-empty str, not 3"),
        ({"a": (3, "float31")}, r"tensor 'a': unsupported dtype 'float31'; supported are float16"),
        ({"a": np.zeros(3, ">f4")}, "unsupported dtype '>f4'"),
        ({"a": np.zeros(3, "U7")}, "unsupported dtype"),
        ({"a": ((3, -1), "float32")}, "invalid shape"),
        ({"a": ((1,) * 33, "float32")}, "invalid shape"),
        ({"a": ("xy", "float32")}, "invalid shape"),
        ({"a": (2.5, "float32")}, "invalid shape"),
        ({"a": 3.0}, r"pass an array or a pair .*, not 3.0"),
        ({"a": ((1 << 40, 1 << 40), "float32")}, "but a buffer has at most"),
    ],
)
def test_what_is_no_tensor_is_refused(tensors: Any, told: str) -> None:
    """The message begins with what was asked and names the tensor."""
    with pytest.raises(errors.InvalidArgumentError, match=f"^create 'w': .*{told}"):
        TensorTable.of(tensors, "create 'w'")


@pytest.mark.parametrize(
    "table",
    [
        [1],
        "x",
        {"a": 3},
        {"a": {}},
        {"a": entry(dtype="complex512")},
        {"a": entry(dtype=["float32"])},
        {"a": entry(dtype="int32")},
        {"a": entry(dtype="uint8")},
        {"a": entry(shape="ab")},
        {"a": entry(shape=(2.0,))},
        {"a": entry(shape=(-1, -4))},
        {"a": entry(shape=(1 << 60, 1 << 60))},
        {"a": entry(shape=(1,) * 40)},
        {"a": entry(shape=(65,))},
        {"a": entry(offset=-64)},
        {"a": entry(offset=4)},
        {"a": entry(offset=256)},
        {"a": entry(offset=1 << 70)},
        {"a": entry(offset=None)},
        {"a": entry(shape=(17,)), "b": entry(offset=64)},
        {"a": entry(offset=64), "b": entry(offset=0)},
    ],
)
def test_a_table_that_others_stored_is_not_trusted(table: Any) -> None:
    """Nothing outside the buffer, nothing overlapping, no other element type: an Error instead."""
    with pytest.raises(errors.Error, match="its table of tensors"):
        TensorTable.from_metadata({METADATA_KEY: table}, FLOAT, 256)
    good = stored(a=entry(), b=entry(offset=64, shape=(48,)))
    assert TensorTable.from_metadata(good, FLOAT, 256)["b"] == TensorInfo(FLOAT, (48,), 64)
    assert len(TensorTable.from_metadata({"other": table}, FLOAT, 256)) == 0


def test_differences_are_named() -> None:
    """A tensor that only one has, and one of another shape or dtype; of another place, if that is all."""
    one = TensorTable.of({"a": (3, "float32"), "b": (3, "float32"), "c": (3, "float32")})
    other = TensorTable.of({"a": (3, "float32"), "b": (4, "float32"), "d": (3, "float32")})
    assert one.differences(one) == []
    assert one.differences(other) == [
        "b: float32[3], not float32[4]", "c: only in one", "d: only in one",
    ]  # fmt: skip
    larger = TensorTable.of({"a": (30, "float32"), "b": (3, "float32"), "c": (3, "float32")})
    assert one.differences(larger) == ["a: float32[3], not float32[30]"]
    swapped = TensorTable.of({"b": (3, "float32"), "a": (3, "float32"), "c": (3, "float32")})
    assert one.differences(swapped) == ["a: at byte 0, not 64", "b: at byte 64, not 0"]


def test_views_need_the_memory_of_such_a_buffer() -> None:
    """Another size, or memory with gaps, is refused: views of a copy would be of no use."""
    table = TensorTable.of({"a": (3, "float32")})
    for wrong in (np.zeros(4, np.float32), np.zeros(6, np.float32)[::2]):
        with pytest.raises(errors.InvalidArgumentError, match="must be contiguous"):
            table.views(wrong)
