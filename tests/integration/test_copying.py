"""smb snapshot, restore and cp: buffers into files and back, and between clusters."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import smb
from smb.files import copying
from tests.conftest import Connect

BLOCK = copying.BLOCK_BYTES


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BLOCK_BYTES", 1 << 16)


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
