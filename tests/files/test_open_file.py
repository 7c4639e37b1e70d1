"""smb.open_file and the fsspec filesystem: files over buffers, without a mount."""

from __future__ import annotations

import errno
import io
import itertools
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save

import smb
from smb.files import open_file as opened
from smb.files import staged_file as staged
from smb.files.attributes import FileKind
from smb.files.contents import BufferBytes, Octets
from smb.files.handles import OpenFile
from smb.files.namespace import NameTree
from smb.files.open_file import BufferFile
from smb.files.softmem import SoftmemFileSystem
from tests.conftest import Connect
from tests.fault.long import times


def test_a_buffer_is_a_raw_file(client: smb.Client) -> None:
    """It has all that io.RawIOBase has, and reads and writes what the native API does."""
    buffer = client.create("w", (3, 1000), "float32")
    values = np.arange(3000, dtype=np.float32).reshape(3, 1000)
    buffer.write(values)
    with smb.open_file("w", "r+b", client=client) as file:
        assert isinstance(file, io.RawIOBase)
        assert (file.readable(), file.writable(), file.seekable(), file.nbytes) == (True, True, True, 12_000)
        assert file.readall() == values.tobytes()
        assert file.seek(-5, os.SEEK_END) == 11_995
        assert file.write(b"abcde") == 5
        assert file.seek(11_990) == file.tell() == 11_990
        out = bytearray(100)
        assert file.readinto(out) == 10
        values.view(np.uint8).reshape(-1)[11_995:] = np.frombuffer(b"abcde", np.uint8)
        assert out[:10] == values.tobytes()[11_990:]
        assert file.read(1) == b""
    assert np.array_equal(buffer.read(), values)
    with pytest.raises(ValueError, match="closed"):
        file.read()
    with smb.open_file("w.npy", client=client) as file:
        assert np.array_equal(np.load(io.BytesIO(file.readall())), values)
        with pytest.raises(io.UnsupportedOperation):
            file.write(b"x")


def test_a_written_file_is_a_buffer_at_its_end(client: smb.Client) -> None:
    """Nobody sees a part of it; a .npy becomes an array; one that is closed by an error is not there."""
    data = io.BytesIO()
    np.save(data, np.arange(12.0).reshape(3, 4))
    with smb.open_file("d/w.npy", "w", client=client) as file:
        file.write(data.getvalue()[:50])
        assert client.list() == []
        file.write(data.getvalue()[50:])
    assert np.array_equal(client.open("d/w").read(), np.arange(12.0).reshape(3, 4))
    with pytest.raises(FileExistsError):
        smb.open_file("d/w.npy", "x", client=client)
    with smb.open_file("d/w.npy", "r+", client=client) as file, pytest.raises(OSError, match="dtype and shape"):
        file.write(b"\x93NUMPX")
    with smb.open_file("empty", "w", client=client):
        pass
    with smb.open_file("empty", client=client) as file:
        assert file.readall() == b""
    lost = smb.open_file("lost", "w", client=client)
    lost.write(b"x")
    lost.discard()
    assert [info.name for info in client.list()] == ["d/w", "empty"]


def test_a_file_that_grows_or_is_cut_takes_the_old_ones_place(client: smb.Client) -> None:
    """Append, truncate and overwrite: of the same size in place, of another size a new buffer of bytes."""
    buffer = client.create("w", 4, "float32")
    with smb.open_file("w", "wb", client=client) as file:
        file.write(np.full(4, 2, np.float32).tobytes())
    assert (buffer.read() == 2).all()
    with smb.open_file("w", "ab", client=client) as file:
        file.write(b"tail")
    with pytest.raises(smb.NotFoundError):
        buffer.read()
    assert client.open("w").read().tobytes() == np.full(4, 2, np.float32).tobytes() + b"tail"
    with smb.open_file("w", "r+b", client=client) as file:
        assert file.truncate(3) == 3
    assert client.open("w").nbytes == 3


def test_a_version_that_was_opened_stays(client: smb.Client) -> None:
    """What a file of a versioned buffer shows never changes; writing the file publishes the next one."""
    buffer = client.create("w", 1000, "float32", versions=2)
    buffer.publish(np.full(1000, 1, np.float32))
    with smb.open_file("w", client=client) as latest, smb.open_file("w@1.npy", client=client) as first:
        for value in (2, 3, 4):
            buffer.publish(np.full(1000, value, np.float32))
        assert (np.frombuffer(latest.readall(), np.float32) == 1).all()
        assert (np.load(io.BytesIO(first.readall())) == 1).all()
    with pytest.raises(FileNotFoundError, match="version 1 was overwritten or is not published yet"):
        smb.open_file("w@1", client=client)
    with pytest.raises(PermissionError):
        smb.open_file("w@4", "r+", client=client)
    with smb.open_file("w", "wb", client=client) as file:
        file.write(np.full(1000, 9, np.float32).tobytes())
    assert (buffer.version, buffer.read()[0]) == (5, 9)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8"])
def test_any_range_of_bytes(client: smb.Client, dtype: str) -> None:
    """Ranges that cut elements read and write exactly their bytes, as a plain array of bytes would."""
    buffer = client.create("w", 5000, dtype, stripe=4096)
    model = np.random.default_rng(1).integers(0, 255, buffer.nbytes, dtype=np.uint8)
    whole, rng = BufferBytes(buffer), random.Random(2)
    whole.write(0, model.copy())
    for _ in range(200):
        start = rng.randrange(model.size)
        length = min(rng.choice([1, 2, 3, 9, 4096, 6000]), model.size - start)
        if rng.random() < 0.5:
            data = np.frombuffer(rng.randbytes(length), np.uint8)
            whole.write(start, data)
            model[start : start + length] = data
        out = np.empty(length, np.uint8)
        whole.read_into(start, out)
        assert np.array_equal(out, model[start : start + length]), (start, length)
    assert np.array_equal(buffer.read().reshape(-1).view(np.uint8), model)


def test_a_write_leaves_its_neighbours_alone(client: smb.Client) -> None:
    """Others add to all elements beside the written bytes meanwhile: none of that is lost."""
    buffer = client.create("w", 300, "int64")
    adds = [buffer.accumulate_async(np.ones(300, np.int64)) for _ in range(50)]
    for _ in range(50):
        BufferBytes(buffer).write(100 * 8 + 3, np.zeros(5, np.uint8))
    for add in adds:
        add.result()
    values = buffer.read()
    assert (values[:100] == 50).all()
    assert (values[101:] == 50).all()


def test_refusals(client: smb.Client) -> None:
    """A bad path, mode or name has the error of a file; a deleted buffer is a stale file; a full cluster is full."""
    with pytest.raises(FileNotFoundError):
        smb.open_file("nobody", client=client)
    with pytest.raises(smb.InvalidArgumentError, match="mode must be one of"):
        smb.open_file("w", "q", client=client)
    with pytest.raises(OSError, match="no part of a path may be empty") as caught:
        smb.open_file("a/../b", "w", client=client)
    assert caught.value.errno == errno.EINVAL
    client.create("w", 10)
    with smb.open_file("w", client=client) as file:
        client.delete("w")
        with pytest.raises(OSError, match="deleted") as caught:
            file.read(1)
    assert caught.value.errno == errno.ESTALE
    full = smb.open_file("full", "w", client=client)
    with pytest.raises(OSError, match="no room") as caught:
        full.truncate(1 << 40)
    assert caught.value.errno == errno.ENOSPC
    full.discard()
    assert client.list() == []


def _renamed_over(client: smb.Client, name: str, data: bytes) -> None:
    client.create("next", len(data), "uint8").write(np.frombuffer(data, np.uint8))
    client.rename("next", name, replace=True)


def _made_anew(client: smb.Client, name: str, data: bytes) -> None:
    client.delete(name)
    client.create(name, len(data), "uint8").write(np.frombuffer(data, np.uint8))


Replace = Callable[[smb.Client, str, bytes], None]
replacing = pytest.mark.parametrize("replace", [_renamed_over, _made_anew])
OLD, SHORTER, LONGER = b"old" * 10_000, b"new" * 100, b"new" * 30_000  # over several servers and one


def _bytes_of(file: BufferFile, how: str) -> bytes:
    if how == "readall":
        return file.readall()
    data = bytearray(len(LONGER) + 1)
    return bytes(data[: file.readinto(data) if how == "readinto" else file.pread_into(data, 0)])


@replacing
@pytest.mark.parametrize("new", [SHORTER, LONGER], ids=["shorter", "longer"])
@pytest.mark.parametrize("how", ["readall", "readinto", "pread_into"])
def test_a_file_replaced_before_its_first_read(client: smb.Client, replace: Replace, new: bytes, how: str) -> None:
    """The first read opens the path again, and all that is read is the new file's: nothing was known of the old one."""
    _renamed_over(client, "w", OLD)
    with smb.open_file("w", client=client) as file:
        replace(client, "w", new)
        assert _bytes_of(file, how) == new
        assert file.nbytes == len(new)
        file.seek(1)
        assert file.read(4) == new[1:5]


@replacing
@pytest.mark.parametrize("form", ["w", "w.npy"])
def test_a_file_replaced_while_it_is_read(client: smb.Client, connect: Connect, replace: Replace, form: str) -> None:
    """Once a byte of it was read all else is its bytes, or ESTALE, which says what to do: never the new file's."""
    other = connect("tcp")
    client.create("w", 30_000, "float32").fill(1)
    with smb.open_file(form, client=client) as file:
        begin = file.read(6)
        assert begin == (b"\x93NUMPY" if form == "w.npy" else np.ones(2, np.float32).tobytes()[:6])
        replace(other, "w", LONGER)
        for _ in range(2):
            with pytest.raises(
                OSError, match="buffer 'w' was deleted and created again, or replaced; open it again"
            ) as caught:
                file.readall()
            assert caught.value.errno == errno.ESTALE
        assert file.tell() == 6
    with smb.open_file("w", client=client) as file:
        assert file.readall() == LONGER


@replacing
@pytest.mark.parametrize("told", ["nbytes", "seek", "write"])
def test_a_file_whose_size_was_told_is_no_other_one(client: smb.Client, replace: Replace, told: str) -> None:
    """Who knows the size of the old file, or may write to it, gets ESTALE at the first read: the new one has another
    size; so does a writer, whose bytes would get lost in a file that is gone, or change one that it did not open.
    """
    _renamed_over(client, "w", OLD)
    with smb.open_file("w", "r+" if told == "write" else "r", client=client) as file:
        if told != "write":
            assert (file.nbytes if told == "nbytes" else file.seek(0, os.SEEK_END)) == len(OLD)
        file.seek(0)
        replace(client, "w", SHORTER)
        calls = [lambda: file.read(3), file.readall, *([lambda: file.write(b"mine")] if told == "write" else [])]
        for call in calls:
            with pytest.raises(OSError, match="open it again") as caught:
                call()
            assert caught.value.errno == errno.ESTALE
    assert client.open("w").read().tobytes() == SHORTER


@pytest.mark.parametrize("begun", [False, True], ids=["before", "middle"])
def test_a_file_deleted_while_it_is_open(client: smb.Client, begun: bool) -> None:
    """ESTALE, whether something of it was read or not: its memory is other buffers' now. One that was renamed is read
    on.
    """
    _renamed_over(client, "w", OLD)
    with smb.open_file("w", client=client) as file:
        data = file.read(6) if begun else b""
        client.rename("w", "moved")
        assert data + file.read(7) == OLD[: 7 + len(data)]
    with smb.open_file("moved", client=client) as file:
        assert not begun or file.read(6) == OLD[:6]
        client.delete("moved")
        with pytest.raises(OSError, match="buffer 'moved' was deleted") as caught:
            file.readall()
        assert caught.value.errno == errno.ESTALE


def test_a_file_replaced_at_each_opening(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is opened again a few times, not for ever: then ESTALE, and nothing of it stays open."""
    _renamed_over(client, "w", OLD)
    read_into, replaced = OpenFile.read_into, []

    def replaced_first(file: OpenFile, offset: int, out: Octets) -> int:
        _renamed_over(client, "w", OLD)
        replaced.append(file)
        return read_into(file, offset, out)

    with smb.open_file("w", client=client) as file:
        with monkeypatch.context() as busy:
            busy.setattr(OpenFile, "read_into", replaced_first)
            with pytest.raises(OSError, match="open it again"):
                file.readall()
        assert len(replaced) == opened._OPENINGS_MAX
        assert file.readall() == OLD


def test_first_reads_of_many_threads_are_of_one_file(client: smb.Client, connect: Connect) -> None:
    """While the path is replaced all the time: what the threads of one open file read is of one of the files."""
    other, stop = connect("tcp"), threading.Event()
    _renamed_over(client, "w", bytes(20_000))

    def replace_on() -> None:
        for number in itertools.count(1):
            if stop.is_set():
                return
            _renamed_over(other, "w", bytes([number % 256]) * 20_000)

    def part(file: BufferFile, offset: int) -> set[int]:
        data = bytearray(5000)
        try:
            return set(data[: file.pread_into(data, offset)])
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return set()

    seen: list[set[int]] = []
    with ThreadPoolExecutor(5) as threads:
        replacing = threads.submit(replace_on)
        try:
            for _ in range(times(100, 3000)):
                with smb.open_file("w", client=client) as file:
                    seen.append(set().union(*threads.map(part, [file] * 4, range(0, 20_000, 5000))))
        finally:
            stop.set()
        replacing.result()
    assert max(map(len, seen)) == 1, "parts of two files"
    assert len(set().union(*seen)) > 1, "it was replaced too seldom: nothing was tested"


def test_a_draft_without_room_on_this_host(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC at the write and at the flush, as not all is there that was written: what had the name before stays, and
    so it does where the staged file was to begin with a copy of it.
    """
    client.create("w", 10, "uint8").fill(1)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(staged._regions, "claim", lambda _: False)
    with smb.open_file("w", "w", client=client) as file:
        file.write(b"22")
        with monkeypatch.context() as full:
            full.setattr(staged.os, "pwrite", refuse)
            with pytest.raises(OSError, match="No space"):
                file.write(b"333")
        file.write(b"44")
        with pytest.raises(OSError, match="is incomplete: some of the written data") as caught:
            file.flush()
        assert caught.value.errno == errno.ENOSPC
        file.discard()
    with smb.open_file("w", "r+", client=client) as file:
        with monkeypatch.context() as full:
            full.setattr(staged.os, "pwrite", refuse)
            with pytest.raises(OSError, match="No space"):
                file.truncate(5)
        assert file.read() == b"\1" * 10
    assert client.open("w").read().tolist() == [1] * 10


def test_names_change_in_one_step(client: smb.Client, connect: Connect) -> None:
    """A file that is renamed over another one replaces it; who had that open reads on; folders move as a whole."""
    tree, other = NameTree(client, make_folders=True), NameTree(connect("tcp"))
    for name, text in (("run/old", b"old"), ("run/new", b"newer")):
        file = tree.open(name, os.O_WRONLY | os.O_CREAT)
        file.write(0, np.frombuffer(text, np.uint8))
        file.flush()
        file.close()
    reader = tree.open("run/old", os.O_RDONLY)
    tree.rename("run/new", "run/old")
    out = np.empty(3, np.uint8)
    assert (reader.read_into(0, out), out.tobytes()) == (3, b"old")
    assert other.status("run/old").nbytes == 5
    reader.close()
    assert [info.name for info in client.list()] == ["run/old"]
    tree.rename("run", "done/run")
    assert other.list("") == [("done", FileKind.FOLDER)]
    with pytest.raises(FileExistsError):
        tree.make_folder("done")
    tree.remove("done/run/old")
    assert tree.list("done/run") == []
    tree.remove_folder("done/run")
    with pytest.raises(FileNotFoundError):
        tree.list("done/run")


def test_what_is_written_while_a_rename_copies_is_kept(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that becomes an array by its new path is copied while its writers go on; nothing of theirs is lost."""
    tree = NameTree(client)
    data = io.BytesIO()
    np.save(data, np.zeros(1000))
    file = tree.open("w.tmp", os.O_RDWR | os.O_CREAT)
    file.write(0, np.frombuffer(data.getvalue(), np.uint8))
    file.flush()
    filled, copies = tree._maker.filled, []

    def filled_too_soon(*arguments: Any) -> str:
        copies.append(filled(*arguments))
        if len(copies) == 1:
            file.write(128 + 8 * 7, np.ones(1).view(np.uint8))
        return copies[-1]

    monkeypatch.setattr(tree._maker, "filled", filled_too_soon)
    tree.rename("w.tmp", "w.npy")
    assert len(copies) == 2
    file.write(128 + 8 * 9, np.ones(1).view(np.uint8))
    file.close()
    assert np.flatnonzero(client.open("w").read()).tolist() == [7, 9]
    assert tree.list("") == [("w.npy", FileKind.FILE)]
    assert [info.name for info in client.list()] == ["w"]


@pytest.fixture
def files(cluster: smb.LocalCluster) -> Iterator[SoftmemFileSystem]:
    found = fsspec.filesystem("softmem", coordinator=cluster.address, skip_instance_cache=True)
    yield found
    with smb.connect(cluster.address) as last:
        for info in last.list():
            last.delete(info.name)
    found.namespace.client.close()


def test_fsspec_files(files: SoftmemFileSystem, cluster: smb.LocalCluster, tmp_path: Path) -> None:
    """Under the name softmem: URLs, text, directories, copies, moves, ranges, transactions, up and down."""
    assert isinstance(files, SoftmemFileSystem)
    with fsspec.open(f"softmem://{cluster.address}/a/hello.txt", "w") as file:
        file.write("hello\n")
    assert files.cat("a/hello.txt") == b"hello\n"
    assert files.cat_file("a/hello.txt", 1, -1) == b"ello"
    assert files.ls("a", detail=False) == ["a/hello.txt"]
    assert files.info("a")["type"] == "directory"
    files.cp("a/hello.txt", "b/again.txt")
    files.mv("b/again.txt", "b/moved.txt")
    assert files.find("") == ["a/hello.txt", "b/moved.txt"]
    with files.transaction:
        with files.open("t", "wb") as file:
            file.write(b"1")
        assert not files.exists("t")
    assert files.cat("t") == b"1"
    (tmp_path / "x").write_bytes(b"up")
    files.put(str(tmp_path / "x"), "x")
    files.get("x", str(tmp_path / "y"))
    assert (tmp_path / "y").read_bytes() == b"up"
    files.rm(["a", "b"], recursive=True)
    assert files.find("") == ["t", "x"]
    with pytest.raises(FileNotFoundError):
        files.cat_file("nobody")


def test_an_fsspec_file_that_is_replaced(files: SoftmemFileSystem, client: smb.Client) -> None:
    """As with open_file: the new one as long as nothing was read, ESTALE after that; a reader beside it has its own."""
    _renamed_over(client, "w", OLD)
    with files.open("w") as first, files.open("w", block_size=100) as second:
        assert second.read(3) == OLD[:3]
        _renamed_over(client, "w", LONGER)
        assert first.read() == LONGER
        with pytest.raises(OSError, match="open it again") as caught:
            second.read()
        assert caught.value.errno == errno.ESTALE
    assert files.cat_file("w") == LONGER


def test_libraries_use_it(files: SoftmemFileSystem) -> None:
    """numpy, torch and safetensors write and read through it; their arrays are typed buffers."""
    values = np.arange(1000, dtype=np.float32).reshape(10, 100)
    with files.open("m/w.npy", "wb") as file:
        np.save(file, values)
    with files.open("m/w.npy") as file:
        assert np.array_equal(np.load(file), values)
    assert np.array_equal(files.namespace.client.open("m/w").read(), values)
    with files.open("m/t.pt", "wb") as file:
        torch.save({"x": torch.arange(1000)}, file)
    with files.open("m/t.pt") as file:
        assert torch.equal(torch.load(file)["x"], torch.arange(1000))
    data = save({"b": np.ones((3, 5), np.float32), "a": np.arange(7)}, metadata={"format": "pt"})
    files.pipe_file("m/model.safetensors", data)
    assert files.cat_file("m/model.safetensors") == data
    assert np.array_equal(files.namespace.client.open("m/model").tensor("a").read(), np.arange(7))


def test_torch_checkpoints_through_it(files: SoftmemFileSystem, cluster: smb.LocalCluster) -> None:
    """torch.distributed.checkpoint's own fsspec writer and reader: a model comes back, and is overwritten."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    url = f"softmem://{cluster.address}/run/step-1"
    model, other = torch.nn.Linear(50, 20), torch.nn.Linear(50, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process, and that a checkpoint is overwritten
        for _ in range(2):
            checkpoint.save({"model": model.state_dict()}, storage_writer=FsspecWriter(url))
        loaded = {"model": other.state_dict()}
        checkpoint.load(loaded, storage_reader=FsspecReader(url))
    other.load_state_dict(loaded["model"])
    assert torch.equal(other.weight, model.weight)
    assert files.exists("run/step-1/.metadata")
    fsspec.filesystem("softmem", coordinator=cluster.address).namespace.client.close()


def test_data_libraries_use_it(
    files: SoftmemFileSystem, cluster: smb.LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pandas, zarr and datasets write and read files by their URL, as in any other filesystem of fsspec."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # read at the first import
    monkeypatch.setenv("SMB_COORDINATOR", cluster.address)  # load_dataset gives filesystems no address
    SoftmemFileSystem.clear_instance_cache()  # another test closed those
    import datasets
    import pandas
    import zarr

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # another test may have had it set at the import
    url = f"softmem://{cluster.address}/data"
    frame = pandas.DataFrame({"step": range(100), "loss": np.linspace(1, 0, 100)})
    frame.to_csv(f"{url}/run.csv", index=False)
    pandas.testing.assert_frame_equal(pandas.read_csv(f"{url}/run.csv"), frame)
    frame.to_parquet(f"{url}/run.parquet")
    pandas.testing.assert_frame_equal(pandas.read_parquet(f"{url}/run.parquet"), frame)

    values = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    written = zarr.open(f"{url}/w.zarr", mode="w", shape=values.shape, chunks=(30, 100), dtype="f4")
    written[:] = values
    assert np.array_equal(zarr.open(f"{url}/w.zarr", mode="r")[:], values)

    made = datasets.Dataset.from_dict({"x": list(range(50))})
    made.save_to_disk(f"{url}/set")
    assert datasets.load_from_disk(f"{url}/set")["x"][:] == list(range(50))
    loaded = datasets.load_dataset("csv", data_files="softmem://data/run.csv", split="train", cache_dir=str(tmp_path))
    assert loaded["step"][:] == list(range(100))
    assert "data/set" in files.ls("data", detail=False)
    for known in (fsspec.filesystem("softmem", coordinator=cluster.address), fsspec.filesystem("softmem")):
        known.namespace.client.close()
    SoftmemFileSystem.clear_instance_cache()
