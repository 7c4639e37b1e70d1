"""Zero elements were once refused: a sparse step in which nothing was chosen, a rank without a part, an empty bias."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import smb
from smb.files import copying
from tests.conftest import Connect

NOTHING = np.zeros(0, np.float32)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_calls_without_elements(connect: Connect, transport: str) -> None:
    """Each does nothing and returns what numpy returns for it: in the middle, at the end, of every kind of array."""
    client = connect(transport)
    buffer = client.create("w", 10)
    buffer.fill(7)
    for nothing in (NOTHING, [], torch.zeros(0), np.zeros(4, np.float32)[2:2]):
        for offset in (0, 3, 10):
            buffer.write(nothing, offset)
            buffer.accumulate(nothing, offset)
    assert buffer.read(3, 0).shape == (0,)
    assert buffer.read(10).shape == (0,)
    out = np.zeros((0, 5), np.float32)
    assert buffer.read(3, 0, out=out) is out
    fetched = buffer.accumulate(NOTHING, 3, fetch=True)
    assert fetched is not None
    assert fetched.shape == (0,)
    buffer.accumulate_sparse(np.zeros(0, np.int64), NOTHING)
    buffer.accumulate_sparse([], [])
    buffer.accumulate(NOTHING, 0, feedback=smb.ErrorFeedback(buffer), wire="int8")
    buffer.write_async(NOTHING, 0).result()
    with buffer.lock() as lock:
        buffer.write(NOTHING, 0, fence=lock)
    assert (buffer.read() == 7).all()
    with pytest.raises(smb.InvalidArgumentError, match="float64"):
        buffer.write(np.zeros(0), 0)  # it is still no float32
    with pytest.raises(smb.InvalidArgumentError, match="unknown op"):
        buffer.accumulate(NOTHING, 0, op="none")
    with pytest.raises(smb.InvalidArgumentError, match="the array has 0 elements but the buffer has 10"):
        buffer.write(NOTHING)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 0)])
def test_buffers_without_elements(connect: Connect, transport: str, shape: tuple[int, ...]) -> None:
    """They are made, listed, opened, read, written, locked, published and deleted as others are."""
    client = connect(transport)
    made = client.create("none", shape, servers=2)
    assert (made.shape, made.size, made.nbytes) == (shape, 0, 0)
    other = client.create("like", like=made)
    for buffer in (made, client.open("none"), client.create("none", shape, exist_ok=True)):
        assert buffer.read().shape == shape
        buffer.write(np.zeros(shape, np.float32))
        buffer.fill(3)
        buffer.accumulate_from(other)
        buffer.apply("sgd", other, lr=0.1)
        with buffer.lock() as lock:
            buffer.write(NOTHING, fence=lock)
        version = buffer.publish(NOTHING)
        assert buffer.version == version
    assert [(info.name, info.nbytes, info.shape) for info in client.list()] == [("like", 0, shape), ("none", 0, shape)]
    with pytest.raises(smb.InvalidArgumentError, match="the array has 1 elements but the buffer has 0"):
        made.write([1.0])
    if transport == "shm":
        assert made.view().shape == shape
    twice = client.create("twice", shape, versions=2)
    assert twice.publish(NOTHING) == 1
    assert twice.read().shape == shape
    client.delete("none")
    with pytest.raises(smb.NotFoundError):
        client.open("none")


def test_tensors_without_elements(connect: Connect) -> None:
    """Some, or all of those that a buffer is made for."""
    client = connect()
    some = client.create("some", tensors={"a": ((2,), "float32"), "b": ((0, 3), "float32"), "c": ((0,), "float32")})
    for name, shape in (("b", (0, 3)), ("c", (0,))):
        some.tensor(name).write(np.zeros(shape, np.float32))
        some.tensor(name).accumulate(np.zeros(shape, np.float32))
        assert some.tensor(name).read().shape == shape
    none = client.create("none", tensors={"a": ((0, 3), "float32"), "b": ((0,), "int64")})
    assert none.tensor("a").read().shape == (0, 3)
    assert client.open("none").tensor("b").read().dtype == np.int64


def test_files_without_elements(connect: Connect, tmp_path: Path) -> None:
    """Such a buffer is a .npy file that numpy reads, goes into a snapshot and comes back from it; so does a safetensors
    file all of whose tensors are empty."""
    client = connect()
    client.create("none", (0, 3), "int64")
    with smb.open_file("none.npy", client=client) as file:
        array = np.load(file)
    assert (array.shape, array.dtype) == ((0, 3), np.int64)
    copying.snapshot(client, "none", tmp_path / "none.npy")
    assert np.load(tmp_path / "none.npy").shape == (0, 3)
    assert copying.restore(client, tmp_path / "none.npy", "again").nbytes >= 0
    with smb.open_file("again.npy" if client.open("again").nbytes == 0 else "again", client=client) as file:
        assert file.read() == (tmp_path / "none.npy").read_bytes()
    save_file({"a": np.zeros((0, 3), np.float32), "b": np.zeros(0, np.float32)}, tmp_path / "t.safetensors")
    content = (tmp_path / "t.safetensors").read_bytes()
    with smb.open_file("t.safetensors", "wb", client=client) as file:
        file.write(content)
    with smb.open_file("t.safetensors", client=client) as file:
        assert file.read() == content
