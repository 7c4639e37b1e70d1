"""smb.files.names, views and codes: which path shows what, and of which bytes it is made."""

from __future__ import annotations

import errno
import io
import random

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load, save

import smb
from smb.coordinator.records import Kind
from smb.coordinator.validate import check_name
from smb.files.error_codes import as_os_errors
from smb.files.formats import (
    forms_of,
    header_bytes,
    named,
    npy_header,
    path_in,
    spec_of,
    view_of,
)
from smb.files.names import (
    Form,
    ShownBuffer,
    entries,
    is_long,
    is_private,
    listed_as,
    meanings,
    name_of,
    path_of,
    private_of,
)
from smb.files.open_file import split_url
from smb.files.temporary_names import private_name
from smb.safetensors import parse_safetensors, safetensors_header
from smb.tensors import TensorTable


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("w", [ShownBuffer("w")]),
        ("a/b.npy", [ShownBuffer("a/b.npy"), ShownBuffer("a/b", Form.NPY)]),
        ("a/b.safetensors", [ShownBuffer("a/b.safetensors"), ShownBuffer("a/b", Form.SAFETENSORS)]),
        ("w@12", [ShownBuffer("w@12"), ShownBuffer("w", Form.RAW, 12)]),
        ("w@12.npy", [ShownBuffer("w@12.npy"), ShownBuffer("w@12", Form.NPY), ShownBuffer("w", Form.NPY, 12)]),
        ("w@raw", [ShownBuffer("w@raw"), ShownBuffer("w")]),
        ("w@raw.npy", [ShownBuffer("w@raw.npy"), ShownBuffer("w@raw", Form.NPY)]),
        ("w@", [ShownBuffer("w@")]),
        ("@3", [ShownBuffer("@3")]),
        ("a/@3", [ShownBuffer("a/@3")]),
        (".npy", [ShownBuffer(".npy")]),
        ("a/.npy", [ShownBuffer("a/.npy")]),
    ],
)
def test_paths_mean(path: str, shown: list[ShownBuffer]) -> None:
    """A buffer of that very path comes before a form of another, and before a version."""
    assert list(meanings(path)) == shown
    assert all(one in meanings(one.path) for one in shown)


def test_directories_come_from_slashes() -> None:
    """A directory has what is right below it; what is on its way to a name is nobody's to see."""
    names = ["a", "a/b", "a/c/d", "x/y", private_of("a") + "/1", private_of("x/y") + "/1"]
    assert names[-2:] == [".smb-files/1", "x/.smb-files/1"]
    assert [is_private(name) for name in (*names, "x/.smb-files", "a/b/.smb-files/c")] == [False] * 4 + [True] * 3 + [
        False
    ]
    assert entries("x", names) == (set(), {"y"})
    assert entries("", names) == ({"a", "x"}, {"a"})
    assert entries("a", names) == ({"c"}, {"b"})
    assert entries("nowhere", names) == (set(), set())


ARRAY = (Form.RAW, Form.NPY)


def test_a_buffer_is_listed_once() -> None:
    """By its richest form, as numpy and safetensors wrote it; by another where that path is somebody else's."""
    assert listed_as("w", (Form.RAW,), {"w"}, ()) == "w"
    assert listed_as("w", ARRAY, {"w"}, ()) == "w.npy"
    assert listed_as("d/w", tuple(Form), {"d/w"}, {"d"}) == "d/w.safetensors"
    assert listed_as("w.npy", (Form.RAW,), {"w.npy"}, ()) == "w.npy"
    assert listed_as("w.npy", ARRAY, {"w.npy"}, ()) == "w.npy", "it was put there as such a file"
    assert listed_as("w", ARRAY, {"w", "w.npy"}, ()) == "w"
    assert listed_as("w", ARRAY, {"w"}, {"w.npy"}) == "w"
    assert listed_as("a", (Form.RAW,), {"a", "a/b"}, {"a"}) == "a@raw"
    assert listed_as("a", ARRAY, {"a", "a/b"}, {"a"}) == "a.npy"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("run/w_1-a.b", "run/w_1-a.b"),
        ("part/c=x", "part/_.c_3dx"),
        ("air temp.npy", "_.air_20temp.npy"),
        ("new/1.M2P3.host:2,S", "new/_.1.M2P3.host_3a2_2cS"),
        ("a~", "_.a_7e"),
        ("ü", "_._c3_bc"),
        ("\udcff", "_._ff"),
        ("a\n@\\", "_.a_0a_40_5c"),
        ("_.a_7e", "_._5f.a_5f7e"),
        ("_.a_7E", "_.a_7E"),
        ("_.abc", "_.abc"),
        ("_.", "_."),
        ("_._2f", "_._2f"),
        ("..a", "..a"),
    ],
)
def test_paths_have_names(path: str, name: str) -> None:
    """Ordinary parts are as they are; others are escaped, and what looks like that is escaped too."""
    assert name_of(path) == name
    assert path_of(name) == path


def test_every_path_has_one_name_and_every_name_one_path() -> None:
    """Of any bytes, and of any name a buffer may have; names are what a coordinator takes."""
    rng = random.Random(5)
    for _ in range(20_000):
        data = bytes(rng.choice(b"_..a7eE35f2 ~\xff\xc3\xbc=") for _ in range(rng.randrange(1, 12)))
        path = data.decode("utf-8", "surrogateescape")
        if path not in (".", ".."):
            check_name(Kind.BUFFER, name_of(path))
            assert path_of(name_of(path)) == path
        name = "".join(rng.choice("_..a7eE35f2") for _ in range(rng.randrange(1, 12)))
        assert name_of(path_of(name)) == name


def test_long_paths_have_a_digest_for_a_name() -> None:
    """In their namespace, beside what is on its way; the spec of the file says the path. Longer ones are refused."""
    for path in (
        "d/" + "x" * 255,
        "ü" * 127,
        "/".join(["y" * 255] * 16),
        "/".join("=" * 2048),
        "n" * 200 + "/" + "z" * 200,
    ):
        name = name_of(path)
        assert is_long(name)
        assert is_private(name)
        check_name(Kind.BUFFER, name)
        check_name(Kind.BUFFER, private_name(name))
        spec = named(spec_of(path, b"abc", 3))
        assert path_in(spec.metadata) == path
        assert path_in(named(spec_of(path, b"", 0)).metadata) == path
    assert name_of("d/" + "x" * 255).startswith("d/.smb-files/")
    assert not is_long(name_of("x" * 255))
    for path, number in (
        ("x" * 256, errno.ENAMETOOLONG),
        ("d/" + "ü" * 128, errno.ENAMETOOLONG),
        ("x/" * 2048 + "x", errno.ENAMETOOLONG),
        ("a\0b", errno.EINVAL),
        ("\ud800", errno.EINVAL),
    ):
        with pytest.raises(OSError, match="path") as caught:
            name_of(path)
        assert caught.value.errno == number


@pytest.mark.parametrize("dtype", [
    "float16", "float32", "float64", "int32", "int64", "uint8", "bfloat16", "int8", "int16", "uint16", "uint32",
    "uint64", "complex64", "bool", "float8_e4m3fn",
])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 3, 5)])
def test_a_npy_file_is_what_numpy_writes(dtype: str, shape: tuple[int, ...]) -> None:
    """The header is numpy's own, so that a file that numpy wrote becomes a buffer of its dtype and shape."""
    element = np.dtype(getattr(ml_dtypes, dtype, dtype))
    file = io.BytesIO()
    np.save(file, np.ones(shape, element))
    data = file.getvalue()
    assert data.startswith(npy_header(element, shape))
    spec = spec_of("w.npy", data, len(data))
    # a V1 or V2 may be anything; plain bytes stay a file
    if dtype in ("bfloat16", "float8_e4m3fn") or (dtype == "uint8" and len(shape) == 1):
        assert (spec.name, spec.dtype, spec.shape) == ("w.npy", "uint8", (len(data),))
    else:
        assert (spec.name, spec.dtype, spec.shape) == ("w", dtype, shape)
    assert spec.view.nbytes == len(data)


def test_what_is_not_exactly_a_view_stays_bytes() -> None:
    """A file that is cut, longer, in Fortran's order, of another version or no .npy at all is kept as it is."""
    file = io.BytesIO()
    np.save(file, np.arange(12.0).reshape(3, 4))
    good = file.getvalue()
    assert spec_of("w.npy", good, len(good)).name == "w"
    fortran = io.BytesIO()
    np.save(fortran, np.asfortranarray(np.arange(12.0).reshape(3, 4)))
    for data in (good[:-1], good + b"x", good[:20], b"", b"junk", fortran.getvalue(), good[:6] + b"\2" + good[7:]):
        spec = spec_of("w.npy", data, len(data))
        assert (spec.name, spec.view.nbytes) == ("w.npy", len(data))
    assert spec_of("w", good, len(good)).name == "w"
    assert spec_of("w", good, len(good)).dtype == "uint8"


def test_a_safetensors_file_is_what_the_library_writes() -> None:
    """Its tensors, order and metadata are those of the file, and the header made up for them is the file's, byte by
    byte; the library reads what a view shows.
    """
    tensors = {"b": np.ones((3, 5), "f4"), "a": np.arange(7), "half": np.ones(3, "f2"), "none": np.ones((0, 4), "f4")}
    for metadata in (None, {"format": "pt", "ü": "€"}):
        data = save(tensors, metadata=metadata)
        spec = spec_of("d/m.safetensors", data[: header_bytes(data[:16])], len(data))
        assert spec.name == "d/m"
        assert spec.tensors is not None
        assert spec.view.extents[0].header == data[: len(spec.view.extents[0].header)]
        assert {name: place.shape for name, place in spec.tensors.items()} == {k: v.shape for k, v in tensors.items()}
    table = TensorTable.of(tensors)
    header = safetensors_header(table)
    body = b"".join(tensor.tobytes() for tensor in tensors.values())
    assert all(np.array_equal(tensors[name], read) for name, read in load(header + body).items())


@pytest.mark.parametrize(
    "head",
    [
        b"", b"\0" * 16, b"\xff" * 32, (10).to_bytes(8, "little") + b"{", (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}", (17).to_bytes(8, "little") + b'{"a":{"dtype":1}}',
    ],
)  # fmt: skip
def test_a_broken_safetensors_header_is_refused(head: bytes) -> None:
    """No header crashes the parser: it is refused, and the file stays bytes."""
    with pytest.raises(smb.InvalidArgumentError):
        parse_safetensors(head)
    assert spec_of("m.safetensors", head, len(head) + 1).name == "m.safetensors"


def test_every_byte_of_a_view_has_one_place() -> None:
    """Any range's parts follow each other without a gap, and lie in the header or in their tensor."""
    table = TensorTable.of({"a": ((3,), "uint8"), "b": ((5,), "float64"), "c": ((2, 2), "float16")})
    view = view_of(Form.SAFETENSORS, table.dtype, (table.size,), table, {})
    assert view is not None
    memory = np.arange(table.size, dtype=np.uint8)
    header = view.extents[0].header
    whole = np.frombuffer(
        header + b"".join(memory[p.offset : p.offset + p.nbytes].tobytes() for p in table.values()), "u1"
    )
    assert whole.size == view.nbytes
    for seed in range(300):
        rng = random.Random(seed)
        offset, length = rng.randrange(view.nbytes + 20), rng.randrange(1, view.nbytes + 20)
        end, out = 0, bytearray()
        for first, last, extent, inside in view.parts(offset, length):
            assert first == end
            end = last
            source = extent.header if extent.header else memory.tobytes()[extent.start :]
            out += source[inside : inside + last - first]
        assert bytes(out) == whole[offset : offset + length].tobytes(), (offset, length)


def test_forms() -> None:
    """Plain bytes have one form, arrays two, tensors three where the format knows their types."""
    assert forms_of(np.dtype("u1"), (10,), None) == (Form.RAW,)
    assert forms_of(np.dtype("f4"), (10,), None) == (Form.RAW, Form.NPY)
    assert forms_of(np.dtype("f4"), (6,), TensorTable.of({"a": (6, "float32")})) == tuple(Form)
    assert Form.SAFETENSORS not in forms_of(np.dtype("u1"), (16,), TensorTable.of({"a": (1, "complex128")}))


@pytest.mark.parametrize(
    ("error", "kind", "number"),
    [
        (smb.NotFoundError("x"), FileNotFoundError, errno.ENOENT),
        (smb.AlreadyExistsError("x"), FileExistsError, errno.EEXIST),
        (smb.OutOfMemoryError("x"), OSError, errno.ENOSPC),
        (smb.PermissionDeniedError("x"), PermissionError, errno.EACCES),
        (smb.UnavailableError("x"), OSError, errno.EHOSTUNREACH),
        (smb.TimeoutError("x"), TimeoutError, errno.ETIMEDOUT),
        (smb.InvalidArgumentError("x"), OSError, errno.EINVAL),
        (smb.LockLostError("x"), OSError, errno.ESTALE),
        (smb.Error("x"), OSError, errno.EIO),
    ],
)
def test_errors_have_a_number(error: smb.Error, kind: type[OSError], number: int) -> None:
    """Each of smb's errors is the OSError that fits, with its message."""
    with pytest.raises(kind, match="x") as caught, as_os_errors():
        raise error
    assert caught.value.errno == number


@pytest.mark.parametrize(
    ("url", "address", "path"),
    [
        ("run/w", None, "run/w"),
        ("/run/w/", None, "run/w"),
        ("softmem://host:7070/run/w", "host:7070", "run/w"),
        ("softmem://[::1]:7070/w", "[::1]:7070", "w"),
        ("softmem:///run/w", None, "run/w"),
        ("softmem://run/w", None, "run/w"),
        ("softmem://w", None, "w"),
        ("softmem://host:7070", "host:7070", ""),
    ],
)
def test_urls(url: str, address: str | None, path: str) -> None:
    """What has a colon is an address, as no name has one; else it is of the cluster that one is connected to."""
    assert split_url(url) == (address, path)


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2", ">i4", ">i8", "<f4"])
def test_arrays_of_another_byte_order_stay_bytes(dtype: str) -> None:
    """A .npy file is an array of the buffer's byte order, or kept as bytes: never other numbers."""
    kept = io.BytesIO()
    np.save(kept, np.arange(5).astype(dtype))
    spec = spec_of("w.npy", kept.getvalue(), len(kept.getvalue()))
    assert (spec.name, spec.dtype) == (("w", "float32") if dtype == "<f4" else ("w.npy", "uint8"))
