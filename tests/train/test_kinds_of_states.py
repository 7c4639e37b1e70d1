"""docs/arrays.md: a PyTorch user's odd states through Publisher, Follower, checkpoints, files and join."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

import smb
import smb.torch
import smb.torch.checkpoint
from tests.support.doc_tables import table_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*MaskedTensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:.*ComplexHalf"),
]

State = dict[str, torch.Tensor]
PAGE = table_of("arrays.md", "state")
_Z = torch.complex(torch.arange(12.0).reshape(3, 4), 1 - torch.arange(12.0).reshape(3, 4))
_X = torch.arange(12.0).reshape(3, 4) - 5


def _averaged() -> State:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    return average.state_dict()


def _in_inference_mode(make: Callable[[], State]) -> State:
    with torch.inference_mode():
        return make()


KINDS: dict[str, Callable[[], State]] = {
    "made in inference mode": lambda: _in_inference_mode(lambda: {"x": _X.clone(), "y": torch.ones(2)}),
    "conjugate bit": lambda: {"x": _Z.conj()},
    "negative bit": lambda: {"x": _Z.conj().imag, "y": torch._neg_view(_X)},
    "a tensor and its conjugate": lambda: {"x": _Z, "y": _Z.conj()},
    "complex numbers, and parts of them": lambda: {"x": _Z, "y": _Z.real, "z": _Z.imag},
    "float8": lambda: {"x": _X.to(torch.float8_e4m3fn), "y": _X.to(torch.float8_e5m2)},
    "bfloat16 and float16": lambda: {"x": _X.bfloat16(), "y": _X.half()},
    "bool and small integers": lambda: {"x": _X > 0, "y": _X.to(torch.int16), "z": _X.abs().to(torch.uint16)},
    "complex32": lambda: {"x": _Z.to(torch.complex32)},
    "tied": lambda: {"x": _X, "y": _X, "z": _X[:2]},
    "no dimension": lambda: {"x": torch.tensor(2.5), "y": torch.tensor(7)},
    "no element": lambda: {"x": torch.zeros(0, 3), "y": torch.ones(2)},
    "transposed": lambda: {"x": _X.T},
    "channels last": lambda: {"x": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)},
    "expanded": lambda: {"x": _X[:, :1].expand(3, 4)},
    "parameters": lambda: {"x": torch.nn.Parameter(_X.clone())},
    "infinities and NaN": lambda: {"x": torch.full((4, 4), -torch.inf).triu(1), "y": torch.tensor([torch.nan, 1])},
    "an EMA copy (AveragedModel)": _averaged,
    "meta device": lambda: {"x": torch.empty(3, device="meta")},
    "sparse": lambda: {"x": torch.eye(3).to_sparse()},
    "masked": lambda: {"x": torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))},
}


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    dense: Any = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    dense = dense.resolve_conj().resolve_neg().contiguous().clone()
    return dense.dtype, tuple(dense.shape), dense.reshape(-1).view(torch.uint8).tolist() if dense.numel() else []


def _all_bits(state: Any) -> dict[str, tuple[Any, ...]]:
    return {name: _bits(state[name]) for name in state}


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor of the same kind, to be filled."""
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.is_inference():
        with torch.inference_mode():
            return zeros.clone()
    return zeros.conj() if tensor.is_conj() else torch._neg_view(zeros) if tensor.is_neg() else zeros


@pytest.fixture(scope="module")
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with smb.connect(cluster.address) as one:
        yield one


def _delete(client: smb.Client, name: str) -> None:
    """Delete a published state and what lies beside it, or a training."""
    for buffer in client.list():
        if buffer.name == name or buffer.name.startswith((name + ".", name + "/")):
            client.delete(buffer.name, missing_ok=True)


def test_the_page_has_them() -> None:
    """Every state of the page is tried, and no other."""
    assert PAGE.keys() == KINDS.keys()


@pytest.mark.parametrize("deltas", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_published(client: smb.Client, kind: str, deltas: int) -> None:
    """A Follower has every bit, by state_dict, views and pin, of a first generation and of one that follows it."""
    state, name = KINDS[kind](), "state"
    if PAGE[kind][0] == "refused":
        with pytest.raises(smb.InvalidArgumentError):
            smb.torch.Publisher(client, name, state, deltas=deltas).publish()
        _delete(client, name)
        return
    publisher = smb.torch.Publisher(client, name, state, deltas=deltas)
    publisher.publish()
    wanted, follower = _all_bits(state), smb.torch.follow(client, name)
    assert _all_bits(follower.state_dict()) == wanted
    publisher.publish()
    assert _all_bits(follower.views()) == wanted
    with follower.pin() as generation:
        assert _all_bits(generation) == wanted
    assert follower.generation == 2
    _delete(client, name)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint(client: smb.Client, kind: str) -> None:
    """A checkpoint has every bit, and fills tensors of the same kind."""
    state, name = KINDS[kind](), "run/ckpt"
    if PAGE[kind][1] == "refused":
        with pytest.raises(dcp.api.CheckpointException):
            dcp.save(state, storage_writer=smb.torch.checkpoint.Writer(client, name))
        smb.torch.checkpoint.delete(client, name, missing_ok=True)
        return
    dcp.save(state, storage_writer=smb.torch.checkpoint.Writer(client, name))
    for into in (
        {each: torch.zeros(tensor.shape, dtype=tensor.dtype) for each, tensor in state.items()},
        {each: _empty_like(tensor) for each, tensor in state.items()},
    ):
        dcp.load(into, storage_reader=smb.torch.checkpoint.Reader(client, name))
        assert _all_bits(into) == _all_bits(state)
    smb.torch.checkpoint.delete(client, name)


@pytest.mark.parametrize("kind", [kind for kind, told in PAGE.items() if told[2] == "exact"])
def test_file(cluster: smb.LocalCluster, kind: str) -> None:
    """torch.save and torch.load through softmem:// keep every bit."""
    files = fsspec.filesystem("softmem", coordinator=cluster.address)
    state = {name: tensor.clone() if kind == "a tensor and its conjugate" or "parts" in kind else tensor
             for name, tensor in KINDS[kind]().items()}  # fmt: skip
    with files.open("state.pt", "wb") as file:
        torch.save(state, file)
    with files.open("state.pt") as file:
        assert _all_bits(torch.load(file)) == _all_bits(state)
    files.rm("state.pt")


# ---- models


class _Odd(torch.nn.Module):
    """Tied parameters, frozen ones of odd types, a mask, complex and inference-mode buffers, and extra state."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.frozen = torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
        self.frozen_conjugate = torch.nn.Parameter(_Z.conj(), requires_grad=False)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("rotary", _Z.conj())
        with torch.inference_mode():
            self.register_buffer("constant", torch.full((3,), 0.25))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.second(torch.relu(self.first(x))))
        return torch.softmax(y @ y.T + self.mask, dim=-1) @ y


def _trained(model: torch.nn.Module, steps: int, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).square().sum().backward()
        optimizer.step()


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.01)


@pytest.mark.parametrize("extra", [{"scale": 3}, torch.tensor([1.0, 2.0]), None])
def test_join(client: smb.Client, extra: Any) -> None:
    """A model of odd tensors trains together; what is each process's own stays to the bit, and a second one joins."""
    models = _Odd(extra), _Odd(extra)
    own = ("mask", "rotary", "constant", "frozen", "frozen_conjugate")
    before = [{name: _bits(model.state_dict()[name]) for name in own} for model in models]
    joined = []
    for model in models:
        optimizer = _optimizer(model)
        joined.append(smb.torch.join(model, optimizer, "odd", scheme="asp", client=client, fresh=model is models[0]))
        _trained(model, 2, optimizer)
    state = joined[1].state_dict()
    assert torch.equal(state["first.weight"], state["second.weight"])
    for shared in reversed(joined):
        shared.close()
    for model, wanted in zip(models, before, strict=True):
        assert {name: _bits(model.state_dict()[name]) for name in own} == wanted
        assert model.second.weight is model.first.weight
        assert torch.equal(model.extra, extra) if isinstance(extra, torch.Tensor) else model.extra == extra
    assert torch.equal(models[0].first.weight, smb.torch.shared_state_dict(client, "odd")["first.weight"])
    _delete(client, "odd")


def test_join_inside_inference_mode(client: smb.Client) -> None:
    """What is joined, looked at and closed in inference mode trains outside of it."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).bfloat16()
    optimizer = _optimizer(model)
    with torch.inference_mode():
        shared = smb.torch.join(model, optimizer, "inference", scheme="easgd", every=1, client=client)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        with torch.inference_mode():
            state = shared.state_dict()
    assert not any(tensor.is_inference() for tensor in state.values())
    with torch.inference_mode():
        shared.close()
    model(torch.randn(4, 4, dtype=torch.bfloat16)).sum().backward()
    _delete(client, "inference")
    with torch.inference_mode():
        made = torch.nn.Linear(2, 2)
    with pytest.raises(smb.InvalidArgumentError, match="so it can't be trained"):
        smb.torch.join(made, torch.optim.SGD(made.parameters(), lr=0.1), "never", scheme="asp", client=client)


def test_not_finite_statistics_are_still_told(client: smb.Client) -> None:
    """NaN in running statistics is no mask: the exchange says so."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model[1].running_mean[0] = torch.nan
    optimizer = _optimizer(model)
    with (
        pytest.raises(smb.Error, match="not finite"),
        smb.torch.join(model, optimizer, "nan", scheme="asp", client=client),
    ):
        _trained(model, 2, optimizer)
    _delete(client, "nan")


@pytest.mark.parametrize("overlap", ["none", "forward", "both"])
def test_copies_of_a_joined_model(client: smb.Client, overlap: str) -> None:
    """Copies and pickles of a joined model compute what it does, train by themselves, and exchange nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = f"copies-{overlap}"
    with smb.torch.join(model, optimizer, name, scheme="asp", overlap=overlap, client=client) as shared:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        shared.wait()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        average = torch.optim.swa_utils.AveragedModel(model)
        copies = [copy.deepcopy(model), average.module, torch.load(file, weights_only=False)]
        copies.append(copy.deepcopy(copies[0]))
        x, contributions = torch.randn(2, 3), shared.worker.contributions
        wanted = model(x).detach()
        for each in copies:
            assert torch.equal(each(x), wanted)
            _trained_alone(each)
            assert not torch.equal(each(x), wanted)
        assert torch.equal(model(x), wanted)
        assert shared.worker.contributions == contributions
        average.update_parameters(model)
    _delete(client, name)


def _trained_alone(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("deltas", [0, 2])
@pytest.mark.parametrize("inside", ["made", "used"])
def test_readers_and_publishers_in_inference_mode(client: smb.Client, deltas: int, inside: str) -> None:
    """Made in inference mode they work outside of it; made outside, inside. What they return can be trained with."""
    model, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    name = f"inference-{inside}"
    with torch.inference_mode(inside == "made"):
        publisher = smb.torch.Publisher(client, name, model, deltas=deltas)
        publisher.publish()
        follower = smb.torch.follow(client, name)
        follower.load(other)
    with torch.inference_mode(inside == "used"):
        assert publisher.publish() == 2
        follower.load(other)
        state = follower.state_dict()
    assert torch.equal(other.weight, model.weight)
    assert not any(tensor.is_inference() for tensor in state.values())
    other(torch.ones(1, 3)).sum().backward()
    with torch.inference_mode():
        frozen = torch.nn.Linear(3, 3)
    follower.load(frozen)
    assert torch.equal(frozen.weight, model.weight)
    _delete(client, name)


def test_extra_state_is_published_where_it_is_a_tensor(client: smb.Client) -> None:
    """A tensor of get_extra_state() arrives as the reader's own; what is no tensor is left out by names=, and stays."""
    model, reader = _Odd(torch.tensor([1.0, 2.0])), _Odd(torch.tensor([0.0, 0.0]))
    publisher = smb.torch.Publisher(client, "extra", model)
    publisher.publish()
    follower = smb.torch.follow(client, "extra")
    follower.load(reader)
    assert reader.extra.tolist() == [1, 2]
    kept = reader.extra
    model.extra = torch.tensor([5.0, 6.0])
    publisher.publish()
    follower.load(reader)
    assert (kept.tolist(), reader.extra.tolist()) == ([1, 2], [5, 6])
    client.delete("extra")
    model.extra, reader.extra = {"scale": 1}, {"scale": 2}
    with pytest.raises(smb.InvalidArgumentError, match="names="):
        smb.torch.Publisher(client, "extra", model)
    for names in (lambda name: name != "_extra_state", {"first.weight", "first.bias"}):
        smb.torch.Publisher(client, "extra", model, names=names).publish()
        smb.torch.follow(client, "extra").load(reader)
        assert torch.equal(reader.first.weight, model.first.weight)
        assert reader.extra == {"scale": 2}
        client.delete("extra")


def test_a_mesh_of_one_rank_publishes(client: smb.Client) -> None:
    """DTensors of which this process has all are published, with deltas, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        state = {"x": DTensor.from_local(_X.clone(), mesh, [Shard(0)])}
        for deltas in (0, 2):
            smb.torch.Publisher(client, f"mesh-{deltas}", state, deltas=deltas).publish()
            assert torch.equal(smb.torch.follow(client, f"mesh-{deltas}").state_dict()["x"], _X)
        buffer = client.create("sharded", (3, 4))
        for call in (lambda: buffer.write(state["x"]), lambda: buffer.read(out=state["x"])):
            with pytest.raises(smb.InvalidArgumentError, match="no memory of its own"):
                call()
    finally:
        torch.distributed.destroy_process_group()


def test_an_expanded_statistic_is_refused_at_the_join(client: smb.Client) -> None:
    """It failed at the first exchange: its elements are one in memory."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(1).expand(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(smb.InvalidArgumentError, match=r"'seen' is expanded.*contiguous"):
        smb.torch.join(model, optimizer, "expanded", scheme="localsgd", every=1, client=client)
    assert not [info for info in client.list() if info.name.startswith("expanded")]


def test_tied_values_that_are_not_numbers_stay_tied(client: smb.Client) -> None:
    """Given as two tensors with the same values they were said to differ, as a NaN is not equal to itself."""
    value = torch.tensor([1.0, torch.nan])
    publisher = smb.torch.Publisher(client, "nans", {"x": value, "y": value})
    publisher.publish({"x": value.clone(), "y": value.clone()})
    with pytest.raises(smb.InvalidArgumentError, match="now they differ"):
        publisher.publish({"x": value.clone(), "y": torch.tensor([2.0, torch.nan])})
    _delete(client, "nans")
