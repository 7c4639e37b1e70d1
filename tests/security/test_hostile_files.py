"""Files that somebody else wrote are parsed in bounded memory and time, and refused with a sentence. What numpy, torch
and the safetensors library write is taken beside them, also the largest.

A process of its own parses them. It has few hundred MiB of addresses left when it begins, and some seconds.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import smb
import smb.train
from smb.config import limits
from smb.config.settings import read_file
from smb.config.untrusted import open_regular, parse_json, read_text
from smb.files import copying
from smb.files.checksums import Sums, state_of
from smb.files.formats import header_bytes, spec_of
from smb.safetensors import parse_safetensors, safetensors_header
from smb.security.credentials import load
from smb.security.page_access import read_token
from smb.tensors import TensorTable
from smb.tools.plan.spec import read_spec
from smb.train import DiLoCo, saved
from tests.support.other_users import AS_ROOT, DAEMON, ROOT, STRANGER, output_as, sticky

MIB = 1 << 20
# Says "taken" or the refusal, the seconds, and by how many MiB the process grew at most.
PARSE = """
import os, resource, sys, time
from pathlib import Path
import smb.train
from smb.errors import Error
from smb.files import copying
from smb.files.checksums import Sums
from smb.train import saved
from smb.config.settings import read_file
from smb.tools.plan.spec import read_spec

def restored(path):
    with copying.LocalFile(path) as file:
        return copying._spec(path.name, "x", file).name

ways = {"restore": restored, "sums": Sums.of_file, "config": read_file, "plan": read_spec}
ways["load"] = lambda path: saved._head(open(path, "rb"), path.name)
restored(Path(sys.argv[2]))  # once before: modules are imported
most = int(sys.argv[1])
used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + most, used + most))
for word in sys.argv[3:]:
    way, path = word.split("=", 1)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    try:
        told = ways[way](Path(path))
        told = "taken: " + (told if isinstance(told, str) else type(told).__name__)
    except (Error, OSError) as error:
        told = "refused: " + str(error)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    print(way, Path(path).name, f"{time.monotonic() - begun:.2f}", grown, told.replace(chr(10), " "), sep="|")
"""


def safetensors_of(header: object, data: bytes = b"") -> bytes:
    """A file with that header: JSON's text, or what it is made of."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: object = (1,), offsets: object = (0, 4), dtype: object = "F32") -> dict[str, object]:
    """What a header says of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def npy(header: bytes, data: bytes = bytes(8)) -> bytes:
    """A .npy with that header."""
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data


def parsed(place: Path, files: dict[str, tuple[str, bytes]], *, most: int, deadline_s: float = 60.0) -> dict[str, str]:
    """Parse the files, NAME: (way, bytes), in a process that may take `most` bytes more; return what it told."""
    small = place / "small.npy"
    small.write_bytes(npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n"))
    words = []
    for name, (way, data) in files.items():
        (place / name).write_bytes(data)
        words.append(f"{way}={place / name}")
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PARSE, str(most), small, *words], cwd=ROOT, capture_output=True, text=True,
        timeout=deadline_s, check=False,
    )  # fmt: skip
    print(done.stdout, f"{time.monotonic() - begun:.1f} s")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = {}
    for line in done.stdout.splitlines():
        _, name, _, _, told = line.split("|", 4)
        found[name] = told
    assert found.keys() == files.keys()
    return found


LARGE = 8 * MIB - 64


def bytes_kept() -> dict[str, bytes]:
    """NAME: a file. Made when it is needed: together they have 150 MiB."""
    return {
        # As large as the format allows: their header alone took 2.4 GiB and a minute.
        "99-mib-of-lists.safetensors": safetensors_of(b'{"a":[' + b"[]," * (33 * MIB) + b"0]}"),
        "lists.safetensors": safetensors_of(b'{"a":[' + b"[]," * (LARGE // 3) + b"0]}"),
        "objects.safetensors": safetensors_of(b'{"a":[' + b"{}," * (LARGE // 3) + b"0]}"),
        "nested.safetensors": safetensors_of(b'{"a":' + b"[" * LARGE),
        "nested-a-little.safetensors": safetensors_of(b'{"a":' + b"[" * 200_000),
        "digits.safetensors": safetensors_of(b'{"a":' + b"9" * LARGE + b"}"),
        "float.safetensors": safetensors_of(b'{"a":0.' + b"9" * LARGE + b"}"),
        "dimensions.safetensors": safetensors_of({"a": entry([1] * 100_000)}),
        "zero-and-huge.safetensors": safetensors_of({"a": entry([0, 1 << 56], [0, 0])}),
        "overflow.safetensors": safetensors_of({"a": entry([1 << 32, 1 << 32], [0, 0])}),
        "negative.safetensors": safetensors_of({"a": entry([-1, -1])}, bytes(4)),
        "dtype.safetensors": safetensors_of({"a": entry(dtype="F" * LARGE)}),
        "surrogate.safetensors": safetensors_of(
            b'{"\\udcff":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)
        ),
        "metadata.safetensors": safetensors_of({"__metadata__": {"a": [1]}, "a": entry()}, bytes(4)),
        "nan.safetensors": safetensors_of(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)),
        "twice.safetensors": safetensors_of(b'{"a":1,"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "utf-16.safetensors": safetensors_of(json.dumps({"a": entry()}).encode("utf-16"), bytes(4)),
        "says-2-to-63.safetensors": struct.pack("<Q", 1 << 63) + b"{" + bytes(100),
        "brackets.npy": npy(b"(" * 60_000),
        "code.npy": npy(b"{'descr': __import__('os'), 'fortran_order': False, 'shape': (2,), }\n"),
        "digits.npy": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 60_000 + b",), }\n"),
        "numbers.npy": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 600 + b"x), }\n"),
        "objects.npy": npy(b"{'descr': '|O8', 'fortran_order': False, 'shape': (1,), }\n"),
        "quote.npy": npy(b'{"""' + b"a" * 1000),
        "dimensions.npy": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1, " * 20_000 + b"), }\n"),
    }


def test_a_restore_keeps_what_it_cannot_parse_as_bytes(tmp_path: Path) -> None:
    """And needs no more memory for that than one of the larger headers that become tensors."""
    told = parsed(tmp_path, {name: ("restore", data) for name, data in bytes_kept().items()}, most=96 * MIB)
    assert {name: said for name, said in told.items() if said != f"taken: x.{name.rpartition('.')[2]}"} == {}


TRAINING: dict[str, Any] = {
    "version": 1, "scheme": "bsp", "settings": {}, "guards": {}, "lease": 10.0, "round": 3, "size": 4, "steps": 1,
    "samples": 1, "sha256": "0" * 64, "metadata": {},
}  # fmt: skip


def training(values: object = None, **fields: object) -> bytes:
    """A saved training's file that says something else."""
    about = {key: value for key, value in (TRAINING | fields).items() if value is not None}
    header = {"__metadata__": {"smb.train": json.dumps(about)}, "values": values or entry([4], [0, 16])}
    return safetensors_of(header, bytes(16))


def refusals() -> dict[str, tuple[bytes, str]]:
    """NAME: (a saved training's file, the end of the sentence)."""
    table = {"smb.tensors": {"a": {"dtype": "float32", "shape": [4], "offset": 0}}}
    statistics = {
        "size": 1 << 40,
        "metadata": {"smb.tensors": {"values": {"dtype": "float32", "shape": [4], "offset": 0}}},
    }
    two = {"a": entry([4], [0, 16]), "b": entry([4], [8, 24])}
    return {
        "large": (safetensors_of(b"{" + b" " * (33 * MIB) + b"}"), "bytes, not 34603010"),
        "lists": (safetensors_of(b'{"a":[' + b"[]," * (10 * MIB) + b"0]}"), "brackets, but may have at most 1572864"),
        "nested": (safetensors_of(b'{"a":' + b"[" * 500_000), "it is nested too deep"),
        "cut": (safetensors_of({})[:9], "the file is incomplete: it ends within its header"),
        "overlap": (safetensors_of(two, bytes(24)), "overlap other bytes, or leave a gap before them"),
        "dtype": (safetensors_of({"a": entry(dtype="F" * 10 * MIB)}), "which buffers do not support"),
        "name": (safetensors_of({"n" * 10 * MIB: entry(dtype="F")}), "n'..."),
        "shape": (training(entry([2, 2, 2], [0, 16])), "tensor 'values' has 16 bytes, but its shape needs 32"),
        "elements": (training(size=5), "tensor 'values' has 4 elements, not 5"),
        "size": (training(size=1 << 62), "its size is 4611686018427387904"),
        "round": (training(round=1 << 60), "its round is 1152921504606846976"),
        "lease": (training(lease=1e300), "lease must be from 0.05 to 3600 seconds, not 1e+300"),
        "nan": (training(lease=float("nan")), "it has NaN, which is not a JSON number"),
        "digits": (training(lease=10**400), "its lease is 1000"),
        "scheme": (training(scheme=["bsp"]), "its scheme is ['bsp']"),
        "unknown": (training(scheme="x" * 1000), "there is no scheme"),
        "setting": (training(scheme="diloco", settings={"every": 1 << 62, "fragments": 1 << 61}), "at most 65536"),
        "guards": (training(guards={"norm_max": [1]}), "guards: norm_max must be a number from 0 on, not [1]"),
        "guard": (training(guards={"x": 1}), "there is no guard 'x'"),
        "tensor": (training(metadata=table), "the file has no tensor 'a'"),
        "table": (training(metadata={"smb.tensors": 5}), "its table of tensors cannot be read"),
        "statistics": (training(statistics=statistics), "its statistics are not those of a training"),
        "nothing": (training(steps=None), "its steps is None"),
        "version": (training(version=2), "its format has version 2, and this release of smb reads 1"),
        "no-text": (safetensors_of({"__metadata__": {"smb.train": "{" * 1000}, "a": entry()}), "it is not JSON"),
    }  # fmt: skip


def test_a_load_refuses_what_no_save_wrote(tmp_path: Path) -> None:
    """With a sentence that quotes little of it, before anything is made."""
    wanted = refusals()
    files = {"good": ("load", training())} | {name: ("load", data) for name, (data, _) in wanted.items()}
    told = parsed(tmp_path, files, most=256 * MIB)
    assert told.pop("good") == "taken: _Head"
    for name, (_, why) in wanted.items():
        assert told[name].startswith(f"refused: load of {name}: "), told[name]
        assert why in told[name], told[name]
        assert len(told[name]) < 500, told[name]


SUMS = {"crc32c": 1, "source": "x", "nbytes": 5, "block": 16 << 20}
SMALL: dict[str, tuple[str, bytes, str]] = {
    "good.crc32c": ("sums", json.dumps(SUMS).encode() + b"\n0123abcd\n", ""),
    "list.crc32c": ("sums", b"[]\n", "the first line is not one that a snapshot writes"),
    "nested.crc32c": ("sums", b"[" * 100_000 + b"\n", "brackets, but may have at most 16"),
    "version.crc32c": (
        "sums",
        json.dumps(SUMS | {"crc32c": 2}).encode() + b"\n0123abcd\n",
        "another format version or block size",
    ),
    "block.crc32c": (
        "sums",
        json.dumps(SUMS | {"block": 8}).encode() + b"\n0123abcd\n",
        "another format version or block size",
    ),
    "number.crc32c": ("sums", json.dumps(SUMS | {"nbytes": -1}).encode(), "the first line is not one that a snapshot"),
    "lines.crc32c": ("sums", json.dumps(SUMS).encode() + b"\n" + b"0123abc\n" * 9, "not a checksum of 8 hexadecimal"),
    "binary.crc32c": ("sums", b"\xff" * 100, "can't decode byte 0xff in position 0"),
    "good.toml": ("config", b"[cluster]\ncoordinator = '127.0.0.1:1'\n", ""),
    "nested.toml": ("config", b"[cluster]\ncoordinator = " + b"[" * 200_000, "its values are nested too deep"),
    "key.toml": ("config", b"[cluster]\n" + b"k" * 200_000 + b" = 1\n", '..." is not a setting of [cluster]'),
    "section.toml": ("config", b"[" + b"s" * 200_000 + b"]\n", '..." is not a section'),
    "value.toml": ("config", b"[client]\nchecksum = '" + b"v" * 200_000 + b"'\n", "it must be true or false"),
    "dots.toml": ("config", b"a." * 100_000 + b"a = 1\n", "it has a key of more than 32 parts"),
    "quoted-dots.toml": ("plan", b"a = {" + b"'a' . " * 30_000 + b"a = 1}\n", "it has a key of more than 32 parts"),
    "large.toml": ("config", b"#" * (MIB // 4 + 1), "may have at most 256 KiB"),
    "binary.toml": ("config", b"\xff", "the file must be UTF-8, as TOML requires"),
    "good.json": ("plan", b'{"batch": 2, "bytes": 400, "compute_ms": {"1": 1, "2": 2}}', ""),
    "nested.json": ("plan", b"[" * 15_000, "it is nested too deep"),
    "dense.json": ("plan", b"[" + b"[]," * 60_000 + b"0]", "brackets, but may have at most 16000"),
    "batch.json": ("plan", b'{"batch": 1' + b"0" * 4000 + b"}", "must be a number of samples"),
    "digits.json": ("plan", b'{"batch": 1' + b"0" * 5000 + b"}", "it has a number of 5001 digits"),
    "time.json": (
        "plan",
        b'{"bytes": 4, "compute_ms": {"1": 1' + b"0" * 400 + b', "2": 2}}',
        "must be a number of milli",
    ),
    "name.json": ("plan", json.dumps({"x" * 200_000: 1}).encode(), "a spec must not have 'xxx"),
    "deep.toml": ("plan", b"a = " + b"[" * 100_000, "its values are nested too deep"),
}


def test_small_files_are_refused_with_a_sentence(tmp_path: Path) -> None:
    """Checksums, configurations, models of a plan: each beside a good one."""
    told = parsed(tmp_path, {name: (way, data) for name, (way, data, _) in SMALL.items()}, most=128 * MIB)
    for name, (_, _, why) in SMALL.items():
        assert told[name].startswith("refused: " if why else "taken: "), told[name]
        assert why in told[name], told[name]
        assert len(told[name]) < 700, told[name]


def test_the_largest_real_files_are_taken(tmp_path: Path) -> None:
    """Of 100 000 tensors, which stay bytes; and of as many as a buffer's metadata can name, which become tensors. The
    library writes both.
    """
    files, one = {}, np.ones((1, 2), "f4")
    for name, count in (("bytes", 100_000), ("tensors", 30_000)):
        data = safetensors.numpy.save(
            {f"model.layers.{at // 9}.experts.{at}.w": one for at in range(count)}, {"format": "pt"}
        )
        size = struct.unpack("<Q", data[:8])[0]
        print(f"{count} tensors: a header of {size / MIB:.1f} MiB")
        assert (size > limits.HEADER_BYTES_MAX) == (name == "bytes")
        files[f"{name}.safetensors"] = ("restore", data)
    told = parsed(tmp_path, files, most=128 * MIB)
    assert told == {"bytes.safetensors": "taken: x.safetensors", "tensors.safetensors": "taken: x"}
    spec = spec_of("x.safetensors", data[: header_bytes(data[:16])], len(data))
    assert spec.tensors is not None
    assert len(spec.tensors) == count
    assert spec.view.extents[0].header == data[: size + 8]


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "directory", "loop", "nothing"])
def test_no_reader_waits_for_what_is_not_a_file(kind: str, tmp_path: Path, client: smb.Client) -> None:
    """Each reader of files says what there is."""
    path = tmp_path / "x"
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path), "device": lambda: path.symlink_to("/dev/zero"), "directory": path.mkdir,
        "loop": lambda: path.symlink_to(path), "nothing": lambda: None, "socket": lambda: _socket(path),
    }  # fmt: skip
    make[kind]()
    ways: dict[str, Callable[[], object]] = {
        "restore": lambda: copying.restore(client, path, "w"),
        "load": lambda: smb.train.load(client, "run", path),
        "config": lambda: read_file(path),
        "plan": lambda: read_spec(path),
        "token": lambda: read_token(path),
        "key": lambda: load(path, path, path),
        "sums": lambda: Sums.of_file(path),
    }
    why = {
        "pipe": "is a pipe; a regular file is needed", "socket": "is a socket; a regular file is needed",
        "device": "is a device; a regular file is needed", "directory": "directory", "loop": "symbolic links",
        "nothing": "No such file",
    }[kind]  # fmt: skip
    for way in ways.values():
        with pytest.raises((smb.Error, OSError), match=f"(?i){why}"):
            way()
    (tmp_path / "w.npy").write_bytes(bytes(10))
    if kind in ("pipe", "device", "socket"):
        path.rename(tmp_path / "w.npy.crc32c")
        with pytest.raises(smb.InvalidArgumentError, match=why):
            copying.restore(client, tmp_path / "w.npy", "w")


def _socket(path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def test_a_sparse_file_of_an_exbibyte_is_refused_at_once(tmp_path: Path, client: smb.Client) -> None:
    """As bytes, and as a training that says that it is so large: nothing reads it through."""
    place = Path("/dev/shm") / f"smb-test-{os.getpid()}-sparse"
    elements = 1 << 53
    head = training(entry([elements], [0, 4 * elements]), size=elements)[:-16]
    try:
        with place.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + 4 * elements)
        with pytest.raises(smb.OutOfMemoryError, match=r"its weights take 32768 TiB, and the memory servers have"):
            smb.train.load(client, "run", place)
        with pytest.raises(smb.OutOfMemoryError, match="no room for 32768 TiB"):
            copying.restore(client, place, "w")
        with place.open("r+b") as file:
            file.truncate(1 << 60)
        with pytest.raises(smb.InvalidArgumentError, match="each extent of shape"):
            copying.restore(client, place, "w")
        assert client.list() == []
    finally:
        place.unlink()


def test_a_training_whose_file_shrinks_or_changes_is_not_loaded(
    client: smb.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its bytes were checked somebody cuts it, or writes into it: nothing is left of the load."""
    with smb.train.join(client, "run", np.arange(1000, dtype=np.float32), DiLoCo(every=1)):
        pass
    file, fill = tmp_path / "run", saved._fill
    smb.train.save(client, "run", file)
    whole = file.read_bytes()
    for change in ("cut", "written"):

        def changed(*args: Any, change: str = change) -> None:
            if change == "cut":
                os.truncate(file, len(whole) - 8)
            else:
                file.write_bytes(whole)
            fill(*args)

        file.write_bytes(whole)
        with monkeypatch.context() as patched:
            patched.setattr(saved, "_fill", changed)
            with pytest.raises(smb.InvalidArgumentError, match=r"the file .*was (cut|changed) while it was read"):
                smb.train.load(client, "again", file)
        assert [info.name for info in client.list() if info.name.startswith("again")] == []
    file.write_bytes(whole)
    assert smb.train.load(client, "again", file) == 0


def test_a_table_that_another_client_put_into_metadata(client: smb.Client, tmp_path: Path) -> None:
    """Names with half of a surrogate pair can't be in a file: the buffer is shown as bytes, and made by nobody here."""
    with pytest.raises(smb.InvalidArgumentError, match="half of a surrogate pair"):
        client.create("w", tensors={"\udcff": ((1,), "float32")})
    table: Any = {"smb.tensors": {"\udcff": {"dtype": "float32", "shape": [4], "offset": 0}}}
    client.create("w", 4, "float32", metadata=table)
    with pytest.raises(smb.InvalidArgumentError, match="no named tensors"):
        copying.snapshot(client, "w", tmp_path / "w.safetensors")
    copying.snapshot(client, "w", tmp_path / "w.npy")
    client.create("v", tensors={"a": ((4,), "float32")}, metadata={"safetensors": {"a": [1], "b": "\udcff"}})
    copying.snapshot(client, "v", tmp_path / "v.safetensors")
    assert list(safetensors.numpy.load_file(tmp_path / "v.safetensors")) == ["a"]


VALUES = [
    0,
    -1,
    1,
    1 << 31,
    1 << 63,
    1 << 64,
    10**30,
    1.5,
    None,
    True,
    "x",
    "F32",
    "\udcff",
    "../../x",
    "",
    float("nan"),
]


def _mutated(rng: random.Random, text: str) -> str:
    """JSON with one to four values replaced."""
    made = json.loads(text)
    for _ in range(rng.randint(1, 4)):
        node = made
        while isinstance(node, (dict, list)) and node:
            key = rng.choice([*node]) if isinstance(node, dict) else rng.randrange(len(node))
            if rng.random() < 0.5 or not isinstance(node[key], (dict, list)):
                node[key] = rng.choice([*VALUES, [], {}, [[]]])
                break
            node = node[key]
    return json.dumps(made)


def _spoilt(rng: random.Random, data: bytes) -> bytes:
    """Bytes with some replaced, perhaps cut."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        made[rng.randrange(len(made))] = rng.getrandbits(8)
    return bytes(made[: rng.randrange(len(made))] if rng.random() < 0.3 else made)


def test_mutated_files_are_refused_or_taken() -> None:
    """Nothing but our errors comes of them; and the file that they are made of is taken."""
    seed = int(os.environ.get("SMB_SEED", "0")) or random.randrange(1 << 32)
    print(f"SMB_SEED={seed}")
    rng = random.Random(seed)
    header = safetensors_header(TensorTable.of({"a": ((2, 3), "float32"), "b": ((4,), "int64")}), {"k": "v"})
    tensors, array = (
        header + bytes(56),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n", bytes(24)),
    )
    sums = json.dumps(SUMS) + "\n0123abcd\n"
    assert spec_of("x.safetensors", tensors, len(tensors)).name == "x"
    for _ in range(600):
        text = _mutated(rng, header[8:].decode()).encode()
        for data in (_spoilt(rng, tensors), safetensors_of(text, bytes(56)), _spoilt(rng, array)):
            for name in ("x.safetensors", "x.npy"):
                spec_of(name, data, len(data))
        about = _mutated(rng, json.loads(training()[8:-16])["__metadata__"]["smb.train"])
        run = io.BytesIO(safetensors_of({"__metadata__": {"smb.train": about}, "values": entry([4], [0, 16])}))
        for read in (
            lambda: parse_safetensors(safetensors_of(text)),  # noqa: B023 - called at once
            lambda: saved._head(run, "x"),  # noqa: B023
            lambda: Sums.of_text(_spoilt(rng, sums.encode()).decode("latin-1")),
            lambda: Sums.of_text(_mutated(rng, sums.partition("\n")[0]) + "\n"),
        ):
            with suppress(smb.Error):
                read()


def test_parts_of_json_are_counted_before_it_is_parsed() -> None:
    """And what json takes beyond the standard, or takes silently, is refused."""
    assert parse_json(b'{"a": [1, "\xc3\xbc"]}', 3) == {"a": [1, "ü"]}
    for text, why in (
        ('{"a": [1, 2]}', "it has 3 commas and opening brackets, but may have at most 2"),
        ('{"a": 1, "a": 2}', "it has the name 'a' twice in one object"),
        ("[NaN]", "it has NaN"), ("[-Infinity]", "it has -Infinity"), ("[1", "it is not JSON"),
        (b"\xff", "it is not UTF-8"),
        ("1" * 4301, "it has a number of 4301 digits"), ("[" * 100_000, "commas and opening brackets"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(why)):
            parse_json(text, 2)
    with pytest.raises(ValueError, match="it is nested too deep"):
        parse_json("[" * 100_000, 100_000)


def test_a_file_that_grows_is_read_up_to_its_bound(tmp_path: Path) -> None:
    """The size that it has at first counts, and what is read: a file of /proc says that it has none."""
    assert read_text(Path("/proc/self/comm")).endswith("\n")
    path = tmp_path / "x"
    path.write_bytes(bytes(limits.TOKEN_FILE_BYTES_MAX + 1))
    with pytest.raises(smb.InvalidArgumentError, match="may have at most 4 KiB"):
        read_text(path, limits.TOKEN_FILE_BYTES_MAX)
    with pytest.raises(smb.InvalidArgumentError, match="4 B or more, but may have at most 3 B"):
        read_text(Path("/proc/self/cmdline"), 3)
    os.close(open_regular(path))


GUESSED: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, victim: path.symlink_to(victim),
    "file": lambda path, _: path.write_bytes(b""),
    "pipe": lambda path, _: os.mkfifo(path, 0o666),
    "own": lambda path, victim: os.link(victim, path),  # a second name of this user's file, which it can remove
}


def plant(place: Path, kind: str, *names: str) -> Path:
    """Put what a stranger would under these names; return this user's file, which must stay as it is."""
    victim = place / "victim"
    victim.write_bytes(b"precious")
    os.chown(victim, DAEMON, DAEMON)
    for name in names:
        GUESSED[kind](place / name, victim)
        if kind != "own":
            os.chown(place / name, STRANGER, STRANGER, follow_symlinks=False)
        if kind == "file":
            (place / name).chmod(0o666)
    return victim


@AS_ROOT
def test_files_beside_a_file_are_this_users_own(cluster: smb.LocalCluster) -> None:
    """A stranger who guesses where a snapshot or a restore writes gets nothing written there, and nothing of this
    user's is cut. The restore is done all the same; the snapshot, where this user can remove what is there.
    """
    code = """
import encodings.idna
from pathlib import Path
import smb
from smb.files import copying
from smb.files.checksums import state_of
become()
with smb.connect(sys.argv[2]) as client:
    for place in map(Path, sys.argv[3:]):
        print("==", place.name)
        with state_of(place / "planted", "target") as state:
            print("state", state)
        with state_of(place / "file", "target") as state:
            print("state", state)
        buffer = copying.restore(client, place / "file", place.name)
        print("restored", buffer.nbytes)
        try:
            copying.snapshot(client, place.name, place / "out")
            print("written", (place / "out").stat().st_uid, (place / "out").read_bytes())
        except OSError as error:
            print("refused", error)
        client.delete(buffer)
"""
    with sticky() as directory:
        places = [directory / kind for kind in GUESSED]
        victims = []
        for place in places:
            place.mkdir()
            place.chmod(0o1777)
            (place / "file").write_bytes(b"some bytes")
            with state_of(place / "planted", "target") as state:
                assert state is not None
                guessed = state._path.name
            victims.append(plant(place, place.name, "out.part", "out.part.crc32c", guessed))
        told = output_as(DAEMON, code, cluster.address, *places).split("== ")[1:]
        for place, victim, text in zip(places, victims, told, strict=True):
            assert "state None" in text, text
            assert "RestoreProgress object" in text, text
            assert "restored 10" in text, text
            if place.name == "own":
                assert f"written {DAEMON} b'some bytes'" in text, text
            else:
                assert f"refused [Errno 1] Operation not permitted: '{place / 'out.part'}'" in text, text
            assert victim.read_bytes() == b"precious"


def test_a_file_that_is_swapped_meanwhile(tmp_path: Path, client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was opened first is what is restored, whatever has its name by then."""
    path = tmp_path / "w.npy"
    np.save(path, np.arange(100.0))
    spec = copying._spec

    def swapped(*args: Any) -> Any:
        found = spec(*args)
        path.unlink()
        os.mkfifo(path)
        return found

    monkeypatch.setattr(copying, "_spec", swapped)
    assert np.array_equal(copying.restore(client, path, "w").read(), np.arange(100.0))


@pytest.mark.parametrize(("kind", "is_array"), [("<f4", True), ("<a4", False), ("<S4", False), ("<U1", False)])
def test_a_text_type_of_numpy_is_bytes(kind: str, is_array: bool) -> None:
    """A file of numbers is an array. numpy warns of some names of text types, so it is not asked about them."""
    file = io.BytesIO()
    np.save(file, np.zeros((2, 3), np.float32))
    data = file.getvalue().replace(b"<f4", kind.encode())
    assert (spec_of("x.npy", data, len(data)).name == "x") is is_array
