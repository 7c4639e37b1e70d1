"""Cases of models on a device. tests/train/test_torch_devices.py runs them on a fake one, in a process of their own.

On a machine with a GPU: SMB_TEST_DEVICE=cuda python -m pytest tests/support/device_cases.py
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.overlap import planner
from smb.torch import page_lock
from smb.torch.publishing import state_bytes
from smb.torch.training import model_parameters, staging
from smb.train import parameters
from tests.support import devices
from tests.support.overlapped_workers import plan_by

if devices.ON_HOST:
    from tests.support import fake_device

    DEVICE, copies = fake_device.NAME, fake_device.copies
else:
    DEVICE, copies = devices.DEVICE, []  # nobody counts a real one's

Connect = Callable[..., smb.Client]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCHEMES = ["asyncdiloco", "easgd", "seasgd", "streaming"]
FAKE = pytest.mark.skipif(not devices.ON_HOST, reason="of the fake device: its copies can be late, and are counted")
LONG = pytest.mark.skipif(not os.environ.get("SMB_LONG"), reason="every scheme with every type; SMB_LONG=1 runs them")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces of a small model: tensors end and begin in the middle of them."""
    for module in (parameters, model_parameters, staging):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 48)
    monkeypatch.setattr(model_parameters, "_BLOCK", 16)
    copies.clear()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """The caller's, where it has one."""
    if address := os.environ.get("SMB_TEST_CLUSTER"):
        yield SimpleNamespace(address=address)
    else:
        with smb.LocalCluster(servers=3, capacity="64MiB") as running:
            yield running


@pytest.fixture
def client(connect: Connect) -> smb.Client:
    """One: what a device does has nothing to do with how clients reach servers."""
    return connect()


def network(dtype: torch.dtype, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device("cpu"):
        layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 7), nn.Linear(7, 4))
    layers[2].weight.data = layers[2].weight.data.t().contiguous().t()  # not contiguous
    return layers.to(device, dtype)


def train(client: smb.Client, name: str, device: str, dtype: torch.dtype, scheme: str, every: int) -> list[Any]:
    """Two members in turn in one process; return both models' parameters and the group's."""
    models = [network(dtype, device) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(0.5)  # what a joiner brings does not count
    optimizers = [torch.optim.SGD(model.parameters(), lr=2.0**-4, foreach=False) for model in models]
    settings: dict[str, Any] = {"quorum": 1} if scheme == "asyncdiloco" else {}
    steps = 3 * every
    if scheme == "streaming":
        settings = {"fragments": 3, "delay": 1, "mix": 0.5}
        scheme, every, steps = "diloco", 4, 13  # nothing is on its way after the last one
    joined = [
        smb.torch.join(model, optimizer, name, scheme=scheme, every=every, client=client, **settings)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    for number in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            # No backward pass, and a rate that rounds nothing: kernels round as their operands lie in memory.
            for parameter in model.parameters():
                goal = torch.linspace(-1, 1 + number % 2, parameter.numel(), device="cpu").to(dtype)
                parameter.grad = parameter.detach() - goal.reshape(parameter.shape).to(device)
            optimizer.step()
    found = [[parameter.detach().cpu().clone() for parameter in model.parameters()] for model in models]
    for shared in joined:
        shared.close()
    ends = [[parameter.detach().cpu().clone() for parameter in model.parameters()] for model in models]
    return [*found, *ends, list(smb.torch.shared_state_dict(client, name).values())]


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("asyncdiloco", torch.bfloat16),
        ("easgd", torch.float16),
        ("seasgd", torch.float32),
        ("streaming", torch.bfloat16),
        *(pytest.param(scheme, dtype, marks=LONG) for scheme in SCHEMES for dtype in DTYPES),
    ],
)
def test_a_device_trains_as_the_host(client: smb.Client, dtype: torch.dtype, scheme: str) -> None:
    """The same training with models in the host's memory and on a device whose copies come late: equal to the bit."""
    here = train(client, "here", "cpu", dtype, scheme, 2)
    there = train(client, "there", DEVICE, dtype, scheme, 2)
    for ours, theirs in zip(here, there, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert all(torch.isfinite(tensor).all() for tensor in here[-1])


def test_in_a_program_whose_tensors_are_there_by_default(client: smb.Client) -> None:
    """Tensors that smb makes for itself are in the host's memory all the same. As above, equal to the bit."""
    here = train(client, "here", "cpu", torch.bfloat16, "easgd", 2)
    with torch.device(DEVICE):
        there = train(client, "there", DEVICE, torch.bfloat16, "easgd", 2)
        model, theirs = network(torch.bfloat16, DEVICE), network(torch.bfloat16, DEVICE)
        with torch.no_grad():
            theirs[0].weight.zero_()
        publisher = smb.torch.Publisher(client, "policy", model)
        follower = smb.torch.follow(client, "policy")
        for number in (1, 2):
            assert publisher.publish() == number
            assert follower.load(theirs) == number
    found = [*zip(here, there, strict=True), ([*model.parameters()], [*theirs.parameters()])]
    assert all(torch.equal(one, other) for ours, their in found for one, other in zip(ours, their, strict=True))


@FAKE
@pytest.mark.parametrize("left_out", ["wait", "begin", "end"])
def test_what_is_not_waited_for_shows(client: smb.Client, monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    """The tests above fail where one of the waits is left out."""
    here = train(client, "here", "cpu", torch.float32, "easgd", 1)
    monkeypatch.setattr(staging.Staging, left_out, lambda *_: None)
    try:
        there = train(client, "there", DEVICE, torch.float32, "easgd", 1)
    except (AssertionError, smb.Error):
        return
    assert any(not torch.equal(one, other) for one, other in zip(here[0], there[0], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_deltas_made_on_the_device(client: smb.Client, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """They are those made on the host, to the bit; the base goes up, and float32 comes down."""
    here = train(client, "here", "cpu", dtype, "asyncdiloco", 1)
    monkeypatch.setattr(model_parameters.ModelParameters, "_device_is_faster", lambda *_: True)
    copies.clear()
    there = train(client, "there", DEVICE, dtype, "asyncdiloco", 1)
    for ours, theirs in zip(here, there, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    if not devices.ON_HOST:
        return
    down = sum(size for way, size, non_blocking in copies if way == "fake->cpu" and non_blocking)
    nbytes = 4 * sum(parameter.numel() for parameter in network(dtype, "cpu").parameters())
    first = nbytes * dtype.itemsize // 4  # the first member's values, when it makes the group
    assert down == first + 6 * nbytes  # two members, three rounds


@pytest.mark.parametrize("scheme", ["asyncdiloco", "easgd"])
def test_memory_that_is_locked_is_copied_from_as_it_is(
    client: smb.Client, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Equal to the bit: nobody changes it while a copy from it is under way. In the end it is let go of."""
    here = train(client, "here", "cpu", torch.float32, scheme, 1)
    locked: list[int] = []

    def lock(memory: Any) -> Callable[[], None]:
        unlock = page_lock.page_lock(memory)  # None without CUDA
        assert (unlock is None) == devices.ON_HOST
        locked.append(memory.ctypes.data)

        def let_go(address: int) -> None:
            locked.remove(address)
            if unlock is not None:
                unlock()

        return functools.partial(let_go, memory.ctypes.data)

    monkeypatch.setattr(model_parameters, "page_lock", lock)
    monkeypatch.setattr(model_parameters.ModelParameters, "_device_is_faster", lambda *_: False)
    there = train(client, "there", DEVICE, torch.float32, scheme, 1)
    for ours, theirs in zip(here, there, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    gc.collect()
    assert not locked


def test_the_faster_way_is_measured(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first exchange, once."""
    now = [0.0]
    monkeypatch.setattr(model_parameters.time, "perf_counter", lambda: now[0])
    made = model_parameters.ModelParameters({("weight",): torch.zeros(100).to(DEVICE)})
    deltas = made._deltas

    def slowly(base: Any, *, on_device: bool, **plan: Any) -> Any:
        for block in deltas(base, on_device=on_device, **plan):
            now[0] += 1.0 if on_device else 2.0
            yield block

    monkeypatch.setattr(made, "_deltas", slowly)
    for _ in range(2):
        assert [begin for begin, _ in made.deltas(np.ones(made.size, np.float32))] == [0, 48, 96]
        assert made._on_device
    assert now[0] == 2 * 2 * 3.0 + 2 * 3  # two pieces by each way, twice; then all of them, twice


@FAKE
def test_what_moves_and_when(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves while nothing is due; an exchange moves each trained parameter once down and once up, in its own
    type and without waiting; what is frozen never does. The Parameters stay, and their memory."""
    monkeypatch.setattr(model_parameters.ModelParameters, "_device_is_faster", lambda *_: False)
    model = network(torch.bfloat16, DEVICE)
    model[0].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, foreach=False)
    before = [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]
    shared = smb.torch.join(model, optimizer, "run", scheme="diloco", every=3, client=client)
    for number in range(1, 7):
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        copies.clear()
        optimizer.step()
        if number % 3:
            assert not copies
        else:
            nbytes = 2 * sum(parameter.numel() for parameter in trained)
            for way in ("fake->cpu", "cpu->fake"):
                assert sum(size for each, size, _ in copies if each == way) == nbytes
            assert all(non_blocking for *_, non_blocking in copies)
    assert [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()] == before
    assert client.open("run").size < 16 * 7 + 7 + 7 * 4 + 4 + 64
    shared.close()


def test_a_join_that_fails_leaves_the_device_alone(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure at the last moment, the read of the shared model, leaves values, hooks and group as they were, also
    where the first one was tried again.
    """
    model = network(torch.float16, DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    before = [parameter.detach().cpu() for parameter in model.parameters()]

    failures = iter((smb.UnavailableError("for now"), smb.Error("for good")))

    def away(*_: object, **__: object) -> None:
        raise next(failures)

    with monkeypatch.context() as context:
        context.setattr(smb.train.group.Group, "read_by", away)  # type: ignore[attr-defined]
        with pytest.raises(smb.Error, match="for good"):
            smb.torch.join(model, optimizer, "run", scheme="diloco", client=client)
    assert all(torch.equal(one, other.cpu()) for one, other in zip(before, model.parameters(), strict=True))
    assert not optimizer._optimizer_step_post_hooks
    assert not client.list()
    with smb.torch.join(model, optimizer, "run", scheme="diloco", client=client):
        pass


def test_who_joins_on_a_device_and_who_on_the_host(connect: Connect) -> None:
    """They share one model, of several types."""
    first, second = network(torch.float32, "cpu"), network(torch.bfloat16, DEVICE)
    one = torch.optim.SGD(first.parameters(), lr=0.1)
    two = torch.optim.SGD(second.parameters(), lr=0.1, foreach=False)
    with smb.torch.join(first, one, "run", scheme="asp", client=connect()):
        with smb.torch.join(second, two, "run", client=connect()) as other:
            for parameter in second.parameters():
                parameter.grad = torch.ones_like(parameter)
            two.step()
            assert other.state_dict()["0.weight"].device.type == DEVICE
        for parameter in first.parameters():
            parameter.grad = torch.zeros_like(parameter)
        one.step()
        for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
            assert np.allclose(ours.detach().numpy(), theirs.detach().cpu().float().numpy(), rtol=2.0**-7)


@pytest.mark.parametrize(
    ("overlap", "dtype", "scheme"), [("both", torch.float32, "asp"), ("forward", torch.bfloat16, "bsp")]
)
def test_exchanges_behind_the_passes(
    client: smb.Client, monkeypatch: pytest.MonkeyPatch, overlap: str, dtype: torch.dtype, scheme: str
) -> None:
    """With overlap= a device comes to what it does without, to the bit, by parts that end in the middle of tensors; and
    exchanges only copy beside the device's work.
    """
    monkeypatch.setattr(planner, "LEARNING_STEPS", 2)
    monkeypatch.setattr(planner, "plan_of", plan_by("slices", 100))
    ends = []
    for name in ("none", overlap):
        model = network(dtype, DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, foreach=False)
        with smb.torch.join(model, optimizer, name, scheme=scheme, client=client, overlap=name) as shared:
            for number in range(6):
                batch = torch.linspace(-1, 1 + number, 18).reshape(3, 6).to(DEVICE, dtype)
                optimizer.zero_grad()
                model(batch).square().sum().backward()
                optimizer.step()
            shared.wait()
            ends.append([parameter.detach().cpu().clone() for parameter in model.parameters()])
            assert shared.worker.contributions == 6
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    assert any(not torch.equal(one, other.cpu()) for one, other in
               zip(ends[0], network(dtype, "cpu").parameters(), strict=True))  # fmt: skip
    assert bool(copies) == devices.ON_HOST


def test_publishing_from_a_device_and_to_one(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each generation is what the model was when it was published, to the bit, whatever is done to it meanwhile. Memory
    that is copied from or to a second time is locked then."""
    locked: list[int] = []

    def lock(memory: Any) -> Any:
        locked.append(memory.ctypes.data)
        return page_lock.page_lock(memory)

    monkeypatch.setattr(state_bytes, "page_lock", lock)
    model, theirs = network(torch.bfloat16, DEVICE), network(torch.bfloat16, DEVICE)
    publisher = smb.torch.Publisher(client, "policy", model)
    follower = smb.torch.follow(client, "policy")
    for number in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)
        published = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        future = publisher.publish_async()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.25)
        assert future.result(30) == number + 1
        assert follower.load(theirs) == number + 1
        with torch.no_grad():
            for name, tensor in theirs.state_dict().items():
                assert torch.equal(tensor.cpu(), published[name])
                tensor.zero_()
        assert len(set(locked)) == len(locked) == (2 if number else 0)
    other = smb.torch.Publisher(client, "on-the-host", network(torch.float32, "cpu"))
    assert [other.publish() for _ in range(3)] == [1, 2, 3]
    assert len(locked) == 2


def test_a_buffers_memory_and_a_device(client: smb.Client) -> None:
    """A copy that nobody waits for is made when the block ends, also where another block has locked the memory."""
    buffer = client.create("memory", 1000)
    values = torch.arange(1000, dtype=torch.float32).to(DEVICE)
    with smb.torch.mapped(buffer) as memory:
        with smb.torch.mapped(buffer) as again:
            again.copy_(values, non_blocking=True)
        assert np.array_equal(buffer.read(), np.arange(1000))
        back = memory.to(DEVICE, non_blocking=True)
    assert torch.equal(back.cpu(), values.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_deltas_at_the_ends_of_a_type(dtype: torch.dtype) -> None:
    """Infinite, too large for the type, denormal, and halfway between two: on the device as on the host, to the bit."""
    most = float(np.finfo(np.float32).max)
    some = [
        0.0,
        -0.0,
        1.0,
        most,
        -most,
        torch.inf,
        65520.0,
        65519.0,
        2.0**-24,
        2.0**-25,
        3 * 2.0**-25,
        1e-40,
        1.00390625,
    ]
    values, base = (
        torch.tensor(each, dtype=torch.float32) for each in zip(*itertools.product(some, some), strict=True)
    )
    made = model_parameters.ModelParameters({("weight",): values.to(dtype).to(DEVICE)})
    found = []
    for on_device in (False, True):
        whole = np.empty(made.size, np.float32)
        room = np.zeros(made.size, np.float32)
        room[: len(base)] = base
        for begin, block in made._deltas(room, on_device=on_device):
            whole[begin : begin + block.size] = block
        found.append(whole)
    assert not np.isnan(found[0]).all()
    finite = ~np.isnan(found[0])  # NaNs are not alike on all processors, and guards refuse them
    assert np.array_equal(finite, ~np.isnan(found[1]))
    assert np.array_equal(found[0][finite].view(np.uint32), found[1][finite].view(np.uint32))


def test_what_a_walk_and_a_change_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A room is filled once what was done before with it has ended, on whatever device; what rounding leaves out has
    its memory before copies are ordered behind the device's work."""
    made = model_parameters.ModelParameters({("weight",): torch.ones(200, dtype=torch.bfloat16).to(DEVICE)})
    made.keep_exact()
    told: list[tuple[str, int]] = []
    real = staging.Staging

    class Told(real):  # type: ignore[misc,valid-type]
        def room(self, turn: int, *rest: Any) -> torch.Tensor:
            told.append(("room", turn % 2))
            return real.room(self, turn, *rest)

        def wait(self, turn: int) -> None:
            told.append(("wait", turn % 2))
            real.wait(self, turn)

        def begin(self, devices: Any) -> None:
            told.append(("begin", len(made._residuals)))
            real.begin(self, devices)

    made._staging.__class__ = Told
    base = np.ones(made.size, np.float32)
    for walk in (lambda: list(made.blocks()), lambda: list(made.deltas(base)), lambda: made.subtract(base)):
        told.clear()
        walk()
        for index, event in enumerate(told):
            if event[0] == "room" and event != told[index - 1]:  # a second time for the same part, maybe
                before = [what for what, turn in told[:index] if turn == event[1] and what != "begin"]
                assert before[-1:] == ["wait"]
    assert ("begin", 1) in told
