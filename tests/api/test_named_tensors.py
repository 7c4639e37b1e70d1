"""Named tensors inside a buffer: each opened by its name, from anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import smb
from smb.tensors import ELEMENTS
from tests.conftest import Connect
from tests.support.clients import add_ones, run_together
from tests.support.transports import FAR

MODEL = {"layer1.weight": ((300, 200), "float32"), "layer1.bias": ((300,), "float32"), "scale": ((), "float32")}


def bytes_of(seed: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Any bits at all, NaNs of all kinds among them; bools are 0 and 1."""
    generator = np.random.default_rng(seed)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    bits = generator.integers(0, 2 if dtype == np.bool_ else 256, size, dtype=np.uint8)
    return bits.view(dtype).reshape(shape)


def test_a_tensor_is_found_by_its_name(client: smb.Client, connect: Connect) -> None:
    """Whoever opens the buffer reads, writes and adds to one tensor; its neighbours stay as they are."""
    model = client.create("model", tensors=MODEL, stripe="16KiB", metadata={"epoch": 3})
    assert list(model.tensors) == list(MODEL)
    assert (model.dtype, model.shape) == (np.float32, (60_305,))
    assert model.metadata["epoch"] == 3
    other = connect(FAR).open("model")
    weight, bias, scale = other.tensors.values()
    assert (weight.shape, weight.dtype, weight.nbytes, weight.offset) == ((300, 200), np.float32, 240_000, 0)
    assert (bias.size, bias.offset, scale.shape, scale.offset) == (300, 60_000, (), 60_304)
    values = np.arange(60_000, dtype=np.float32).reshape(300, 200)
    weight.write(values)
    scale.write(torch.tensor(2.5))
    assert bias.accumulate(np.ones(300, np.float32), scale=3) is None
    fetched = bias.accumulate(torch.ones(300), op="max", fetch=True)
    assert fetched is not None
    assert fetched.tolist() == [3.0] * 300
    mine = model.tensor("layer1.weight")
    assert (mine.read() == values).all()
    out = torch.empty(300, 200)
    assert mine.read(out=out) is out
    assert (out.numpy() == values).all()
    assert model.tensor("scale").read() == np.float32(2.5)
    assert (model.read(60_000, 300) == 3).all()
    assert model.read(60_300, 4).tolist() == [0, 0, 0, 0]
    assert repr(bias) == "<smb.Tensor 'layer1.bias' float32[300] of buffer 'model'>"


def test_processes_add_to_one_tensor(cluster: smb.LocalCluster, client: smb.Client) -> None:
    """Nothing is lost, and nothing goes beside it: four processes over both transports."""
    model = client.create("model", tensors=MODEL)
    tasks = [(add_ones, cluster.address, transport, 50) for transport in ("shm", FAR) * 2]
    assert run_together(*tasks) == [300] * 4
    assert (model.tensor("layer1.bias").read() == 200).all()
    assert model.read().sum() == 300 * 200


def test_every_element_type_side_by_side(client: smb.Client, connect: Connect) -> None:
    """A buffer of bytes keeps each type's bits exactly, from numpy and from torch, and is not added to."""
    shapes = {name: ((3, 5), name) for name in ELEMENTS} | {"one": ((), "int64"), "none": ((0, 4), "float32")}
    mixed = client.create("mixed", tensors=shapes)
    assert mixed.dtype == np.uint8
    wanted = {name: bytes_of(7, tensor.shape, tensor.dtype) for name, tensor in mixed.tensors.items()}
    for name, tensor in mixed.tensors.items():
        tensor.write(wanted[name])
    for name, tensor in connect(FAR).open("mixed").tensors.items():
        read = tensor.read()
        assert (read.shape, read.dtype) == (wanted[name].shape, wanted[name].dtype)
        assert read.tobytes() == wanted[name].tobytes(), name
        assert tensor.read(out=np.empty(tensor.size, tensor.dtype)).tobytes() == wanted[name].tobytes()
        if name != "uint8":
            with pytest.raises(smb.InvalidArgumentError, match=r"accumulate of tensor .* can only be read and written"):
                tensor.accumulate(wanted[name])
    for dtype in (torch.bool, torch.int16, torch.complex64, torch.bfloat16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        given = (torch.arange(15).reshape(5, 3) % 2).to(dtype).T  # not contiguous: copied on the way
        mixed.tensor(name).write(given)
        out = torch.empty(3, 5, dtype=dtype)
        assert torch.equal(mixed.tensor(name).read(out=out), given)


def test_what_does_not_fit_a_tensor_is_refused(client: smb.Client) -> None:
    """Another number of elements or dtype changes nothing; a name that is not there says which are."""
    model = client.create("model", tensors=MODEL)
    mixed = client.create("mixed", tensors=MODEL | {"n": ((), "int64")})
    for buffer in (model, mixed):
        bias = buffer.tensor("layer1.bias")
        for wrong in (np.zeros(299, np.float32), np.zeros(300), torch.zeros(300, dtype=torch.bfloat16)):
            with pytest.raises(smb.InvalidArgumentError, match=r"write of tensor 'layer1.bias' of buffer"):
                bias.write(wrong)
        for out in (np.zeros(301, np.float32), np.zeros(300, np.int32), np.zeros(600, np.float32)[::2]):
            with pytest.raises(smb.InvalidArgumentError):
                bias.read(out=out)
        with pytest.raises(smb.NotFoundError, match=r"no tensor 'layer1.wait'; it has .*'layer1.weight'"):
            buffer.tensor("layer1.wait")
        assert not buffer.read().any()
    with pytest.raises(smb.InvalidArgumentError, match=r"accumulate of tensor .*60000 elements but the tensor has 300"):
        model.tensor("layer1.bias").accumulate(np.zeros(60_000, np.float32))
    plain = client.create("plain", 3)
    assert plain.tensors == {}
    with pytest.raises(smb.NotFoundError, match="created without tensors="):
        plain.tensor("a")


def test_creation_says_tensors_or_shape(client: smb.Client, connect: Connect) -> None:
    """Not both; with exist_ok only the same tensors are opened; metadata's own place for them is not given away."""
    model = client.create("model", tensors=MODEL)
    for others in ({"shape": 3}, {"dtype": "float32"}, {"like": model}):
        with pytest.raises(smb.InvalidArgumentError, match="tensors= gives shape and dtype"):
            client.create("w", tensors=MODEL, **others)
    with pytest.raises(smb.InvalidArgumentError, match=r"smb\.tensors"):
        client.create("w", tensors=MODEL, metadata={"smb.tensors": {}})
    with pytest.raises(smb.InvalidArgumentError, match=r"metadata \(as JSON\) may have at most 4 MiB"):
        client.create("w", tensors={f"layer{number:900}": (1, "float32") for number in range(5_000)})
    again = connect().create("model", tensors=MODEL, exist_ok=True)
    again.tensor("scale").write(np.float32(1))
    assert model.tensor("scale").read() == 1
    swapped = dict(reversed(MODEL.items()))
    with pytest.raises(smb.AlreadyExistsError, match=r"exists, but with"):
        client.create("model", tensors=swapped, exist_ok=True)
    same_size = {"other" if name == "scale" else name: form for name, form in MODEL.items()}
    with pytest.raises(smb.AlreadyExistsError, match=r"with other tensors \(2 differ\): other: .*scale"):
        client.create("model", tensors=same_size, exist_ok=True)
    assert {info.name for info in client.list()} == {"model"}
    client.create("bad", 3, metadata={"smb.tensors": {"a": {"dtype": "float32", "shape": [4], "offset": 0}}})
    with pytest.raises(smb.Error, match="buffer 'bad': its table of tensors is invalid"):
        connect().open("bad").tensor("a")


def test_tensors_of_a_buffer_with_versions(client: smb.Client) -> None:
    """One tensor of the version published last is read by itself; it changes by publish alone."""
    model = client.create("model", tensors=MODEL, versions=2)
    for number in (1, 2, 3):
        model.publish(np.full(model.size, number, np.float32))
        assert (model.tensor("layer1.bias").read() == number).all()
    with pytest.raises(smb.InvalidArgumentError, match="publish"):
        model.tensor("scale").write(np.float32(1))
