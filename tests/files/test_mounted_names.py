"""Names in a mount: each that a call makes is there for the next call, once, whatever bytes it is made of."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import smb
from tests.fault.long import LIMIT_S, seed, times
from tests.support.daemons import tidy, wait_for
from tests.support.mounts import names, needs_fuse, run, shown, two_mounts
from tests.support.transports import SLOWNESS

pytestmark = [needs_fuse, pytest.mark.timeout(LIMIT_S)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=1, capacity="96MiB") as running:
        yield running


@pytest.fixture
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with tidy(cluster, timeout=60) as connected:
        yield connected


@pytest.fixture(scope="module")
def mounts(cluster: smb.LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    with two_mounts(cluster, tmp_path_factory) as directories:
        yield directories


@pytest.fixture
def files(mounts: list[Path], client: smb.Client) -> Path:
    """The first mount, with nothing in it."""
    assert client.list() == []
    wait_for(lambda: all(left.is_dir() for left in mounts[0].iterdir()), "end of the last test's files")
    for left in mounts[0].iterdir():  # directories are the mount's own
        shutil.rmtree(left)
    assert names(mounts[0]) == []
    return mounts[0]


# ---- one name for one buffer


def test_a_buffer_is_listed_by_one_name(files: Path, client: smb.Client, tmp_path: Path) -> None:
    """rm -r, find -delete and rmtree take all of a directory, and a copy of it holds each buffer once; the other forms
    open by their names.
    """
    values = np.arange(100.0)

    def fill() -> Path:
        folder = files / "d"
        folder.mkdir()
        np.save(folder / "a.npy", values)
        save_file({"x": values}, tmp_path / "t")
        shutil.copyfile(tmp_path / "t", folder / "t.safetensors")
        (folder / "plain").write_bytes(b"bytes")
        client.create("d/v", 100, "float64", versions=2).publish(values)
        shown(folder / "v.npy")
        return folder

    folder = fill()
    assert names(folder) == ["a.npy", "plain", "t.safetensors", "v.npy"]
    assert (
        (folder / "a").read_bytes() == (folder / "v").read_bytes() == (folder / "v@1").read_bytes() == values.tobytes()
    )
    assert np.array_equal(np.load(folder / "t.npy").view(np.float64), values)
    assert run("cp", "-r", folder, tmp_path / "copy").returncode == 0
    assert names(tmp_path / "copy") == names(folder)
    assert np.array_equal(np.load(tmp_path / "copy/a.npy"), values)
    shutil.rmtree(folder)
    for command in (["find", fill(), "-delete"], ["rm", "-r", folder]):
        if command[0] == "rm":
            fill()
        done = run(*command)
        assert (done.returncode, done.stderr) == (0, "")
        assert not folder.exists()
        assert client.list() == []


def test_two_files_of_one_stem_are_two_files(files: Path, client: smb.Client) -> None:
    """`w` and `w.npy` beside each other: what is saved as one leaves the other as it is, whichever comes first."""
    (files / "w").write_bytes(b"notes")
    np.save(files / "w.npy", np.arange(5.0))
    assert names(files) == ["w", "w.npy"]
    assert (files / "w").read_bytes() == b"notes"
    assert np.array_equal(np.load(files / "w.npy"), np.arange(5.0))
    np.save(files / "next.npy", np.arange(7.0))
    (files / "next.npy").rename(files / "w.npy")
    assert names(files) == ["w", "w.npy"]
    assert (files / "w").read_bytes() == b"notes"
    assert np.array_equal(np.load(files / "w.npy"), np.arange(7.0))
    (files / "w").unlink()
    np.save(files / "w.npy", np.arange(3.0))
    assert np.array_equal(client.open("w").read(), np.arange(3.0))
    np.save(files / "w.npy", np.asfortranarray(np.ones((2, 3))))  # stays bytes, and is the one file of that name
    assert names(files) == ["w.npy"]
    assert [info.name for info in client.list()] == ["w.npy"]
    (files / "w").mkdir()
    (files / "w/x").write_bytes(b"x")
    np.save(files / "w.npy", np.arange(3.0))
    assert names(files) == ["w", "w.npy"]
    assert np.array_equal(np.load(files / "w.npy"), np.arange(3.0))


# ---- what a call made is there


def test_a_tree_is_removed_right_after_it_was_made(files: Path) -> None:
    """Each file is in a listing from its creation to its end, also while it is closed: rm finds all of it, and after
    rmdir the directory is gone."""
    script = "mkdir d && touch d/f && rm -rf d && [ ! -e d ]"
    git = "git init -q g && rm -rf g && [ ! -e g ]" if shutil.which("git") else "true"
    for turn in range(times(2, 300)):
        done = subprocess.run(
            ["sh", "-c", f"{script} && {git}"], cwd=files, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), f"turn {turn}"
    assert names(files) == []


_MAKES = """
import os, sys
folder, count = sys.argv[1], int(sys.argv[2])
for number in range(count):
    path = f"{folder}/{number}"
    open(path, "wb").close() if number % 2 else open(path, "wb").write(b"x")
    print(number, flush=True)
"""


def test_a_name_is_listed_from_its_creation_on(files: Path, mounts: list[Path]) -> None:
    """By each process of the mount, all the time from when the call that made it returned; by another mount in 2 s."""
    (files / "d").mkdir()
    count = times(60, 3000)
    with subprocess.Popen(
        [sys.executable, "-c", _MAKES, files / "d", str(count)], stdout=subprocess.PIPE, text=True
    ) as making:
        assert making.stdout is not None
        for line in making.stdout:
            number = int(line)
            there = set(names(files / "d"))
            missing = {str(known) for known in range(number + 1)} - there
            assert not missing, f"after {number}: {missing}"
    assert making.returncode == 0
    wait_for(lambda: len(names(mounts[1] / "d")) == count, "all files in the other mount", 2 * SLOWNESS)
    shutil.rmtree(files / "d")
    wait_for(lambda: not (mounts[1] / "d").exists(), "their end in the other mount", 2 * SLOWNESS)


def test_an_open_file_that_was_removed_leaves_no_directory(files: Path, client: smb.Client) -> None:
    """rmdir is right after the unlink of a file that somebody has open: the directory is gone at once."""
    (files / "d").mkdir()
    (files / "d/f").write_bytes(b"x")
    with (files / "d/f").open("rb", buffering=0) as file:
        (files / "d/f").unlink()
        (files / "d").rmdir()
        assert not (files / "d").exists()
        assert file.read() == b"x"
    client.create("far/away/w", 3, "uint8")
    shown(files / "far/away/w").unlink()
    assert run("rm", "-r", files / "far").returncode == 0


# ---- rights, and the final name


def test_a_directory_has_the_rights_that_were_asked(files: Path) -> None:
    """mkdtemp's is nobody else's; they go with a rename, and end with the directory."""
    private = Path(tempfile.mkdtemp(dir=files))
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    (files / "usual").mkdir()
    assert stat.S_IMODE((files / "usual").stat().st_mode) == 0o755
    (private / "inside").mkdir(0o750)
    private.rename(files / "moved")
    assert stat.S_IMODE((files / "moved").stat().st_mode) == 0o700
    assert stat.S_IMODE((files / "moved/inside").stat().st_mode) == 0o750
    (files / "moved/inside").rmdir()
    (files / "moved").rmdir()
    (files / "moved").mkdir()
    assert stat.S_IMODE((files / "moved").stat().st_mode) == 0o755
    for name in ("moved", "usual"):
        (files / name).rmdir()


def test_a_file_becomes_typed_by_its_final_name(files: Path, client: smb.Client, mounts: list[Path]) -> None:
    """A temporary file that is renamed to NAME.npy or NAME.safetensors: what the library reads back is what it wrote,
    and clients find an array or tensors; a reader of the final name finds the old file or the new one.
    """
    tensors = {"a": np.arange(2000.0).reshape(20, 100), "b": np.ones(7, np.float16)}
    for turn in range(8):
        tensors["b"] += 1
        save_file(tensors, files / "m.safetensors", metadata={"turn": str(turn)})
        assert names(files) == ["m.safetensors"]
        assert [info.name for info in client.list()] == ["m"]
        assert np.array_equal(client.open("m").tensor("a").read(), tensors["a"])
        assert np.array_equal(load_file(files / "m.safetensors")["b"], tensors["b"])
    stop, seen = threading.Event(), []

    def read_on() -> None:
        while not stop.is_set():
            with smb.open_file("w.npy", client=client) as file:
                seen.append(len(file.readall()))

    np.save(files / "w.npy", np.arange(10.0))
    reader = threading.Thread(target=read_on)
    reader.start()
    try:
        for turn in range(times(20, 300)):
            with (files / "w.tmp").open("wb") as file:
                np.save(file, np.full(10, turn, np.float64))
                os.fsync(file.fileno())
                (files / "w.tmp").rename(files / "w.npy")  # while it is open
            assert np.array_equal(np.load(files / "w.npy"), np.full(10, turn))
            assert client.open("w").read()[0] == turn
    finally:
        stop.set()
        reader.join()
    assert set(seen) == {128 + 80}
    (files / "n.tmp").write_bytes(b"no array at all")
    (files / "n.tmp").rename(files / "n.npy")
    assert (files / "n.npy").read_bytes() == b"no array at all"
    assert client.open("n.npy").dtype == np.uint8


def test_a_file_without_room_to_become_typed_stays_bytes(files: Path, client: smb.Client) -> None:
    """The rename is done all the same, and nothing is left of the try."""
    with (files / "big.tmp").open("wb") as file:
        np.save(file, np.zeros(60 << 20, np.uint8).view(np.float64))
    size = (files / "big.tmp").stat().st_size
    (files / "big.tmp").rename(files / "big.npy")
    assert [(info.name, info.nbytes) for info in client.list()] == [("big.npy", size)]
    assert np.load(files / "big.npy", mmap_mode="r").size == 60 << 17


# ---- any bytes

STRANGE = [
    "part=1",
    "c=x",
    "air temp",
    "1716.M5P6.host:2,S",
    "a~",
    "ünïcode 文件",
    "a\\b\n\t'\"*?[x]",
    "x@7",
    "a@b",
    "_.a_7e",
    "-rf",
    "\udcff\udc80",
    "#f#",
]


@pytest.mark.parametrize("name", STRANGE, ids=ascii)
def test_any_name_is_a_file_and_a_directory(files: Path, client: smb.Client, name: str) -> None:
    """It is made, listed, read, renamed, an array's, a directory's, and deleted; the buffer's name is an attribute."""
    (files / name).write_bytes(b"some")
    assert names(files) == [name]
    assert (files / name).read_bytes() == b"some"
    attribute = os.getxattr(files / name, "user.smb.name").decode()
    assert [info.name for info in client.list()] == [attribute]
    assert client.open(attribute).read().tobytes() == b"some"
    with smb.open_file(name, client=client) as file:
        assert file.read() == b"some"
    (files / name).rename(files / "plain")
    (files / "plain").rename(files / (name + "2"))
    (files / name).mkdir()
    np.save(files / name / f"{name}.npy", np.arange(4.0))
    assert names(files) == sorted([name, name + "2"])
    assert names(files / name) == [f"{name}.npy"]
    (files / name).rename(files / "folder")
    (files / "folder").rename(files / (name + "3"))
    assert np.array_equal(np.load(files / (name + "3") / f"{name}.npy"), np.arange(4.0))
    shutil.rmtree(files / (name + "3"))
    (files / (name + "2")).unlink()
    assert names(files) == []


def test_names_of_all_bytes_and_lengths(files: Path, mounts: list[Path]) -> None:
    """Random ones, and 255 bytes of any kind: as on any file system, also for another mount."""
    rng = random.Random(seed())
    octets = [byte for byte in range(1, 256) if byte != ord("/")]
    parts = {os.fsdecode(bytes(rng.choices(octets, k=rng.choice((1, 2, 9, 255))))) for _ in range(times(16, 40))}
    parts = (parts | {"ü" * 127, "x" * 255, "=" * 255}) - {".", ".."}
    for part in parts:
        with (files / part).open("xb") as file:
            file.write(os.fsencode(part))
    assert set(names(files)) == parts
    wait_for(lambda: set(names(mounts[1])) == parts, "all of them in the other mount")
    for part in parts:
        assert (mounts[1] / part).read_bytes() == os.fsencode(part)
        (files / part).rename(files / "renamed")
        (files / "renamed").rename(files / part)
        (files / part).unlink()
    assert names(files) == []


def test_long_paths(files: Path, mounts: list[Path], client: smb.Client) -> None:
    """Deep ones, that no name of a buffer holds: their files are made, read, typed, renamed, found by another mount and
    copied where a directory's rename can't be one step."""
    folder, name = files, "p=" + "x" * 200
    while len(os.fsencode(folder)) < 3500:
        folder = folder / ("d" * 200)
        folder.mkdir()
    np.save(folder / f"{name}.npy", np.arange(9.0))
    (folder / "empty").touch()
    with (folder / "tmp").open("wb") as file:
        file.write(b"1")
        file.flush()
        (folder / "tmp").rename(folder / "two")
        file.write(b"2")
    save_file({"a": np.arange(5.0)}, folder / "m.safetensors")
    wanted = sorted([f"{name}.npy", "empty", "m.safetensors", "two"])
    assert names(folder) == wanted
    assert all(len(info.name) <= 255 for info in client.list())
    there = mounts[1] / folder.relative_to(files)
    wait_for(lambda: there.exists() and names(there) == wanted, "the files in the other mount")

    def check(directory: Path) -> None:
        assert (directory / "two").read_bytes() == b"12"
        assert (directory / "empty").read_bytes() == b""
        assert np.array_equal(np.load(directory / f"{name}.npy"), np.arange(9.0))
        assert np.array_equal(load_file(directory / "m.safetensors")["a"], np.arange(5.0))

    check(folder)
    check(there)
    assert any(info.dtype == np.float64 for info in client.list())
    with pytest.raises(OSError, match="cross-device") as caught:
        (files / ("d" * 200)).rename(files / "short")
    assert caught.value.errno == errno.EXDEV
    done = run("mv", files / ("d" * 200), files / "short")
    assert (done.returncode, done.stderr) == (0, "")
    assert names(files) == ["short"]
    check(files / "short" / folder.relative_to(files / ("d" * 200)))
    (files / "short" / folder.relative_to(files / ("d" * 200)) / "two").rename(files / "two")
    assert (files / "two").read_bytes() == b"12"
    for path in (files / ("y" * 256), files / "short" / ("ü" * 128)):
        with pytest.raises(OSError, match="too long") as caught:
            path.write_bytes(b"x")
        assert caught.value.errno == errno.ENAMETOOLONG
    shutil.rmtree(files / "short")
    (files / "two").unlink()
    wait_for(lambda: client.list() == [], "nothing left")
