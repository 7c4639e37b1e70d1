"""smb snapshot, restore and cp: buffers into files and back, and between clusters."""

from __future__ import annotations

import errno
import io
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import smb
from smb.files import checksums as sums
from smb.files import copying
from tests.conftest import Connect
from tests.support.clients import copy_as_far_as, in_process
from tests.support.commands import run_smb
from tests.support.transports import SLOWNESS


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(sums, "BLOCK_BYTES", 1 << 16)


def test_snapshot_and_restore(client: smb.Client, tmp_path: Path) -> None:
    """Arrays, tensors and bytes come back as they were, through files that numpy and safetensors read."""
    values = np.random.default_rng(1).random((300, 321), dtype=np.float32)
    client.create("w", values.shape).write(values)
    client.create("t", tensors={"a": ((7,), "int64"), "b": ((100, 100), "float32")}, metadata={"k": 1})
    client.open("t").tensor("b").write(np.ones((100, 100), np.float32))
    published = client.create("v", 1000, versions=2)
    published.publish(np.full(1000, 3, np.float32))
    assert copying.snapshot(client, "w", tmp_path / "w.npy") == 0
    assert copying.snapshot(client, "t", tmp_path / "t.safetensors") == 0
    assert copying.snapshot(client, "v", tmp_path / "v.bin") == 1
    assert np.array_equal(np.load(tmp_path / "w.npy"), values)
    assert (load_file(tmp_path / "t.safetensors")["b"] == 1).all()
    assert (tmp_path / "v.bin").read_bytes() == np.full(1000, 3, np.float32).tobytes()
    assert {info.name for info in client.list()} == {"w", "t", "v"}, "the servers' copies are gone"
    assert np.array_equal(copying.restore(client, tmp_path / "w.npy", "w2").read(), values)
    assert (copying.restore(client, tmp_path / "t.safetensors", "d/t").tensor("b").read() == 1).all()
    with pytest.raises(smb.AlreadyExistsError):
        copying.restore(client, tmp_path / "w.npy", "t")
    assert copying.restore(client, tmp_path / "v.bin", "t", replace=True).nbytes == 4000


def test_a_snapshot_goes_on_where_it_was_interrupted(client: smb.Client, tmp_path: Path) -> None:
    """The blocks that are there and right are not written again, one that is wrong is; what the buffer became since is
    in no part of it.
    """
    values = np.arange(200_000, dtype=np.float32)
    buffer = client.create("w", values.size)
    buffer.write(values)
    path, done = tmp_path / "w.npy", []

    def stop(so_far: int, _total: int) -> None:
        done.append(so_far)
        if so_far > 6 << 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copying.snapshot(client, "w", path, progress=stop)
    assert not path.exists()
    buffer.fill(0)
    part = tmp_path / "w.npy.part"
    spoilt = bytearray(part.read_bytes())
    spoilt[4 * (1 << 16) + 5] ^= 1
    part.write_bytes(spoilt)
    first: list[int] = []
    copying.snapshot(client, "w", path, progress=lambda so_far, _: first.append(so_far))
    assert first[0] == 4 << 16
    assert np.array_equal(np.load(path), values)
    assert [info.name for info in client.list()] == ["w"]


def kill(what: str, client: smb.Client, path: Path, name: str, last: int) -> None:
    """SIGKILL to a process that snapshots or restores, after so many blocks."""
    with in_process(copy_as_far_as, what, client.address, path, name, last) as (_, messages):
        assert messages.get(timeout=60) == "here"


def beginnings(call: Callable[[copying.Progress], object]) -> int:
    """The number of blocks that a call finds done."""
    seen: list[int] = []
    call(lambda done, _: seen.append(done))
    return seen[0] >> 16


def test_killed_tools_go_on(client: smb.Client, tmp_path: Path) -> None:
    """SIGKILL in the middle of a snapshot, and of a restore: called again they go on after the blocks that are done,
    and nothing of them is left; nobody sees the buffer before it is whole.
    """
    values = np.random.default_rng(2).random(200_000, dtype=np.float32)
    client.create("w", values.size).write(values)
    path = tmp_path / "w.npy"
    kill("snapshot", client, path, "w", 5)
    assert not path.exists()
    assert beginnings(lambda progress: copying.snapshot(client, "w", path, progress=progress)) == 5
    kill("restore", client, path, "again", 7)
    with pytest.raises(smb.NotFoundError):
        client.open("again")
    assert beginnings(lambda progress: copying.restore(client, path, "again", progress=progress)) == 7
    assert np.array_equal(client.open("again").read(), values)
    assert [info.name for info in client.list()] == ["again", "w"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["w.npy", "w.npy.crc32c"]


@pytest.mark.parametrize("change", ["a byte of what is done", "its length", "its dtype", "the buffer"])
def test_a_restore_of_something_else_begins_anew(client: smb.Client, tmp_path: Path, change: str) -> None:
    """A file that changed since the kill is noticed, and so is a buffer that is gone; what is made is the file as it is
    now. A byte behind what is done is simply read.
    """
    path = tmp_path / "w.npy"
    values = np.arange(100_000, dtype=np.float32)
    np.save(path, values)
    kill("restore", client, path, "w", 3)
    if change == "a byte of what is done":
        values[100] = -1
    elif change == "its length":
        values = values[:-1]
    elif change == "its dtype":
        values = values.view(np.int32)
    else:
        (left,) = client.list()
        client.delete(left.name)
    np.save(path, values)
    assert beginnings(lambda progress: copying.restore(client, path, "w", progress=progress)) == 0
    assert np.array_equal(client.open("w").read(), values)
    np.save(path, values)
    kill("restore", client, path, "w2", 3)
    values[-1] = 5
    np.save(path, values)
    assert beginnings(lambda progress: copying.restore(client, path, "w2", progress=progress)) == 3
    assert np.array_equal(client.open("w2").read(), values)
    assert [info.name for info in client.list()] == ["w", "w2"]


def test_a_restore_is_one_processes(client: smb.Client, tmp_path: Path) -> None:
    """A second one of the same file to the same name is refused while one is under way; a state that can't be read is
    none; one that is refused, or fails, leaves nothing.
    """
    path = tmp_path / "w.bin"
    path.write_bytes(os.urandom(300_000))
    again: list[str] = []

    def second(_done: int, _total: int) -> None:
        if not again:
            with pytest.raises(smb.Error, match="another process is restoring it") as caught:
                copying.restore(client, path, "w")
            again.append(str(caught.value))

    copying.restore(client, path, "w", progress=second)
    assert again
    with pytest.raises(smb.AlreadyExistsError):
        copying.restore(client, path, "w")
    assert list(tmp_path.iterdir()) == [path]
    kill("restore", client, path, "w2", 2)
    (state,) = tmp_path.glob("*.restore")
    state.write_text("nonsense\n")
    assert beginnings(lambda progress: copying.restore(client, path, "w2", progress=progress)) == 0
    assert client.open("w2").read().tobytes() == path.read_bytes()
    assert [info.name for info in client.list()] == ["w", "w2"]


def killed_at_its_very_end(client: smb.Client, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the file to "w", up to where only the state is still to be taken away."""

    def stop(_self: sums.RestoreProgress) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sums.RestoreProgress, "end", stop)
        with pytest.raises(KeyboardInterrupt):
            copying.restore(client, path, "w")


def test_a_restore_that_was_killed_at_its_very_end(
    client: smb.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the buffer has its name already: called again it says so by returning it, and takes the state away."""
    path = tmp_path / "w.bin"
    path.write_bytes(os.urandom(300_000))

    killed_at_its_very_end(client, path, monkeypatch)
    made = client.open("w").info.id
    assert copying.restore(client, path, "w").info.id == made
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("change", ["the file", "the buffer"])
def test_a_restore_after_one_that_was_killed_at_its_very_end(
    client: smb.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """What has changed since then counts: a file that is another one now is refused, as the name is taken, and made
    with replace=True; with that, what others wrote into the buffer meanwhile is the file's again.
    """
    path = tmp_path / "w.bin"
    path.write_bytes(os.urandom(300_000))

    killed_at_its_very_end(client, path, monkeypatch)
    if change == "the file":
        path.write_bytes(os.urandom(300_000))
        with pytest.raises(smb.AlreadyExistsError):
            copying.restore(client, path, "w")
    else:
        client.open("w").fill(0)
    assert copying.restore(client, path, "w", replace=True).read().tobytes() == path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


def interrupt(client: smb.Client, path: Path, name: str, after: int) -> None:
    """Ctrl-C to a restore, after so many blocks."""

    def stop(done: int, _total: int) -> None:
        if done >> 16 == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copying.restore(client, path, name, progress=stop)


def test_a_restore_from_a_full_disk(client: smb.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its state finds no room the restore itself goes on; if that is interrupted, from the last block told."""
    path = tmp_path / "w.bin"
    path.write_bytes(os.urandom(600_000))
    room = 0

    class Full(io.FileIO):
        def write(self, data: object, /) -> int:
            assert isinstance(data, bytes)
            if (left := room - os.fstat(self.fileno()).st_size) <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[:left])

    monkeypatch.setattr(sums.io, "FileIO", Full)
    assert copying.restore(client, path, "w").read().tobytes() == path.read_bytes()
    room = 130
    interrupt(client, path, "w2", 8)
    (state,) = tmp_path.glob("*.restore")
    told = state.read_text().count("\n") - 1
    assert 0 < told < 8
    assert beginnings(lambda progress: copying.restore(client, path, "w2", progress=progress)) == told
    assert client.open("w2").read().tobytes() == path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]
    assert [info.name for info in client.list()] == ["w", "w2"]


def test_a_restore_whose_creation_was_not_answered(
    client: smb.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that goes away right after it made the buffer is asked again, and gives that one."""
    path = tmp_path / "w.npy"
    np.save(path, np.arange(1000))
    create, asked = smb.Client.create, []

    def lose_the_first_answer(self: smb.Client, *args: Any, **options: Any) -> smb.Buffer:
        made = create(self, *args, **options)
        asked.append(made.info.id)
        if len(asked) == 1:
            raise smb.UnavailableError("the coordinator went away")
        return made

    monkeypatch.setattr(smb.Client, "create", lose_the_first_answer)
    assert copying.restore(client, path, "w").info.id == asked[0] == asked[1]
    assert [info.name for info in client.list()] == ["w"]


def test_a_file_that_was_spoilt_since_the_interruption(client: smb.Client, tmp_path: Path) -> None:
    """A wrong checksum in what is done already ends the restore for good, as one in the rest does: nothing is left."""
    client.create("w", 100_000).fill(1)
    path = tmp_path / "w.bin"
    copying.snapshot(client, "w", path)
    interrupt(client, path, "again", 3)
    with path.open("r+b") as file:
        file.write(b"x")
    with pytest.raises(smb.Error, match="CRC-32C"):
        copying.restore(client, path, "again")
    assert [info.name for info in client.list()] == ["w"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["w.bin", "w.bin.crc32c"]


def test_a_restore_whose_server_lost_its_memory(tmp_path: Path) -> None:
    """It can't go on, and says so once; called again it begins anew."""
    path = tmp_path / "w.bin"
    path.write_bytes(os.urandom(300_000))
    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=2 * SLOWNESS) as client,
    ):
        interrupt(client, path, "w", 2)
        cluster.servers[0].kill()
        for segment in cluster.memory_directory.glob("*.segment"):
            segment.unlink()
        cluster.servers[0].start()
        with smb.connect(cluster.address, timeout=2 * SLOWNESS) as later:  # the first has the old memory mapped still
            with pytest.raises(smb.UnavailableError, match="memory was lost"):
                copying.restore(later, path, "w")
            assert copying.restore(later, path, "w").read().tobytes() == path.read_bytes()
            assert [info.name for info in later.list()] == ["w"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_spoilt_file_is_not_restored(client: smb.Client, tmp_path: Path) -> None:
    """A bit that flipped is found by its block's checksum, and no buffer is left behind; so is a file that was cut."""
    client.create("w", 100_000).fill(1)
    path = tmp_path / "w.bin"
    copying.snapshot(client, "w", path)
    good = path.read_bytes()
    for bad in (good[:-1], good[:99_999] + b"x" + good[100_000:]):
        path.write_bytes(bad)
        with pytest.raises(smb.Error, match=r"w\.bin"):
            copying.restore(client, path, "again")
        assert [info.name for info in client.list()] == ["w"]
    path.write_bytes(good)
    checksums = copying.sums_path(path)
    checksums.write_text(checksums.read_text()[:-9])
    with pytest.raises(smb.Error, match="6 checksums"):
        copying.restore(client, path, "again")


def test_a_snapshot_of_versions_never_mixes_them(client: smb.Client, connect: Connect, tmp_path: Path) -> None:
    """With a publisher at full rate every snapshot is all of one version; one under the lock is of one moment."""
    buffer = client.create("v", 100_000, "int64", versions=2)
    client.create("l", 100_000, "int64")
    stop = threading.Event()

    def publish() -> None:
        theirs, number = connect("tcp"), 0
        theirs_v, theirs_l = theirs.open("v"), theirs.open("l")
        while not stop.is_set():
            number += 1
            theirs_v.publish(np.full(100_000, number))
            with theirs_l.lock() as lock:
                theirs_l.write(np.full(100_000, number), fence=lock)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        buffer.wait(1, timeout=30)
        for _ in range(4):
            version = copying.snapshot(client, "v", tmp_path / "v.npy")
            assert set(np.load(tmp_path / "v.npy")) == {version}
            copying.snapshot(client, "l", tmp_path / "l.npy", lock=True)
            assert len(set(np.load(tmp_path / "l.npy"))) == 1
    finally:
        stop.set()
        publisher.join()


def test_copies_between_clusters(client: smb.Client) -> None:
    """A buffer is copied with dtype, shape, tensors and metadata: by the servers, or through here."""
    source = client.create("t", tensors={"a": ((50, 50), "float32"), "b": ((3,), "uint8")}, metadata={"k": 1})
    source.tensor("a").write(np.ones((50, 50), np.float32))
    with smb.LocalCluster(servers=1, capacity="16MiB") as other, smb.connect(other.address) as there:
        for target in (client, there):
            copy = copying.copy_buffer(client, "t", target, "d/copy")
            assert (copy.metadata, copy.dtype) == (source.metadata, source.dtype)
            assert (copy.tensor("a").read() == 1).all()
            with pytest.raises(smb.AlreadyExistsError):
                copying.copy_buffer(client, "t", target, "d/copy")
            copying.copy_buffer(client, "t", target, "d/copy", replace=True)
        client.create("large", 5 << 20, "float32")
        with pytest.raises(smb.OutOfMemoryError):
            copying.copy_buffer(client, "large", there, "large")
        assert [info.name for info in there.list()] == ["d/copy"]


# More than 5 s: a dozen commands, and a cluster beside the shared one.
def test_the_commands(
    cluster: smb.LocalCluster, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """smb snapshot, restore and cp as a user types them, between clusters too: the bytes, a progress bar unless told
    not to, and one line that says what is wrong.
    """
    client = connect()
    values = np.random.default_rng(3).random(50_000, dtype=np.float32)
    client.create("w", values.size).write(values)

    def command(*words: object, fails: bool = False) -> str:
        done = run_smb(*words, "-c", cluster.address)
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr

    with smb.LocalCluster(servers=1, capacity="16MiB") as other, smb.connect(other.address) as there:
        assert "200.1/200.1 kB" in command("snapshot", "w", tmp_path / "w.npy")
        assert command("restore", tmp_path / "w.npy", "r", "--quiet") == ""
        command("cp", "r", f"softmem://{other.address}/d/w")
        command("cp", f"softmem://{other.address}/d/w", tmp_path / "back.npy")
        assert np.array_equal(np.load(tmp_path / "back.npy"), values)
        assert np.array_equal(there.open("d/w").read(), values)
    assert np.array_equal(client.open("r").read(), values)
    for words, said in (
        (("restore", tmp_path / "w.npy", "r"), "exists"),
        (("restore", tmp_path / "nobody", "x"), "does not exist"),
        (("cp", "nobody", "x"), "nobody"),
        (("cp", "r", tmp_path / "w.npy"), "--replace"),
    ):
        told = command(*words, fails=True)
        assert said in told
        assert told.count("\n") == 1, "no progress bar of what was refused"
    monkeypatch.chdir(tmp_path)
    assert "for the file of that name write ./w.npy" in command("cp", "w.npy", "x", fails=True)


def holders(client: smb.Client) -> list[str]:
    return [info.name for info in client.list()]


def test_a_snapshot_of_two_copies(tmp_path: Path) -> None:
    """A buffer with replicas=2 has snapshots. A copy of it has two copies, too, and so has what takes its place, unless
    another number is given."""
    values = np.random.default_rng(4).random(100_000, dtype=np.float32)
    with smb.LocalCluster(servers=2, capacity="8MiB") as cluster, smb.connect(cluster.address) as client:
        client.create("w", values.size, replicas=2).write(values)
        copying.snapshot(client, "w", tmp_path / "w.npy")
        assert np.array_equal(np.load(tmp_path / "w.npy"), values)
        for copied in (
            lambda: copying.copy_buffer(client, "w", client, "w2"),
            lambda: copying.copy_buffer(client, "w", client, "w", replace=True),
            lambda: copying.restore(client, tmp_path / "w.npy", "w2", replace=True),
            lambda: copying.copy_buffer(client, "w", client, "w1", replicas=1),
            lambda: copying.copy_buffer(client, "w1", client, "w2", replace=True),
            lambda: copying.restore(client, tmp_path / "w.npy", "w3"),
            lambda: copying.restore(client, tmp_path / "w.npy", "w4", replicas=2),
        ):
            assert np.array_equal(copied().read(), values)

        def stop(done: int, _total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            copying.restore(client, tmp_path / "w.npy", "w5", progress=stop)
        copying.restore(client, tmp_path / "w.npy", "w5", replicas=2)
        copies = {info.name: info.replicas for info in client.list()}
        assert copies == {"w": 2, "w1": 1, "w2": 2, "w3": 1, "w4": 2, "w5": 2}


def test_where_only_one_server_is_one_copy_is_enough() -> None:
    """What has two copies by nobody's word says how to have one."""
    with smb.LocalCluster(servers=2, capacity="8MiB") as cluster, smb.connect(cluster.address) as client:
        client.create("w", 1000, replicas=2).fill(1)
        with smb.LocalCluster(servers=1, capacity="8MiB") as other, smb.connect(other.address, timeout=1) as there:
            with pytest.raises(smb.UnavailableError, match="for one copy pass --replicas 1"):
                copying.copy_buffer(client, "w", there, "w")
            assert copying.copy_buffer(client, "w", there, "w", replicas=1).read().sum() == 1000
            assert holders(there) == ["w"]


@pytest.mark.parametrize("why", ["a drained server", "no room"])
def test_a_snapshot_where_the_servers_make_no_copy(
    why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the buffer itself, says so, leaves nothing, and begins anew after an interruption; cp copies it to where
    there is room, and says how much is free where there is none.
    """
    values = np.random.default_rng(3).random(500_000, dtype=np.float32)
    with smb.LocalCluster(servers=2, capacity="8MiB") as cluster, smb.connect(cluster.address) as client:
        buffer = client.create("w", values.size, servers=["server-0"])
        buffer.write(values)
        if why == "a drained server":
            buffer.view()  # else it would move to the other server, which could make a copy of it
            client._session.coordinator.drain_server("server-0", 10.0)
        else:
            client.create("x", 1_400_000, servers=["server-0"])
        monkeypatch.setattr(logging.getLogger("smb"), "propagate", True)

        def stop(done: int, _total: int) -> None:
            if done:
                raise KeyboardInterrupt

        path, before = tmp_path / "w.npy", holders(client)
        with pytest.raises(KeyboardInterrupt):
            copying.snapshot(client, "w", path, progress=stop)
        client.open("w").write(-values)
        assert beginnings(lambda progress: copying.snapshot(client, "w", path, progress=progress)) == 0
        assert np.array_equal(np.load(path), -values)
        assert "snapshot of 'w': the servers cannot copy it" in caplog.text
        assert holders(client) == before
        assert np.array_equal(copying.copy_buffer(client, "w", client, "w2").read(), -values)
        copying.snapshot(client, "w", path, lock=True)
        assert np.array_equal(np.load(path), -values)
        if why == "a drained server":
            moved = copying.copy_buffer(client, "w", client, "w", replace=True)
            assert [segment.server for segment in moved.layout.segments] == ["server-1"]
            assert np.array_equal(moved.read(), -values)
            client.delete("w2")
        client.create("y", 1_200_000, servers=["server-1"])
        with pytest.raises(smb.OutOfMemoryError, match="free: "):
            copying.copy_buffer(client, "w", client, "w3")


def test_a_snapshot_whose_lock_is_lost_makes_no_file(client: smb.Client, tmp_path: Path) -> None:
    """Where the buffer itself is read under its lock, a lock lost meanwhile is an error, and there is no FILE."""
    buffer = client.create("w", 100_000)
    view = copying.view_of(copying.Form.RAW, buffer.dtype, buffer.shape, None, {})
    assert view is not None
    path = tmp_path / "w"

    def lose(_done: int, _total: int) -> None:
        for _, _, reference in client._session.renewals._due.values():
            lock = reference()
            assert isinstance(lock, smb.Lock)
            lock.lose(lock.token)

    with pytest.raises(smb.LockLostError):
        copying._read_into_file(buffer, view, tmp_path / "w.part", path, lose, lock=True)
    assert not path.exists()
