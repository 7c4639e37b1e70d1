"""A model on a real device beside bare copies from and to pinned memory, and steps with and without join."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import smb
import smb.torch
from perf.netlab import LabError
from perf.scaling.report import Answer, Column
from smb.torch.training.model_parameters import ModelParameters
from smb.train.parameters import BLOCK_ELEMENTS, Values

ELEMENTS = 1 << 28  # a float32 model of 1 GiB
LAYERS = 16
TURNS = 5
GOAL_COPY, GOAL_STEP = 0.8, 1.005
WIDTH, HEADS, DEPTH, CONTEXT, BATCH = 1024, 16, 8, 256, 32  # 100 million parameters
STEPS, WARM = 100, 5


def beside_bare_copies(quick: bool) -> Answer:
    """Moves of a model, exchanges, steps at which nothing is due, and memory."""
    if not torch.accelerator.is_available():
        raise LabError("PyTorch sees no accelerator")
    device = torch.accelerator.current_accelerator()
    assert device is not None
    elements = ELEMENTS // (4 if quick else 1)
    rows = []
    for measured in (_moves, _mapped, _exchanges, _publishing):
        for row in measured(device, elements):
            print(row, flush=True)
            rows.append(row)
    for row in _steps(device, quick):
        print(row, flush=True)
        rows.append(row)
    slower = "deltas, device"  # in float32: an exchange takes the faster one
    ratios = {
        row["what"]: row["ratio"]
        for row in rows
        if "ratio" in row and row["what"].startswith("float32") and slower not in row["what"]
    }
    step = max(row["beside"] for row in rows if "beside" in row)
    slowest = min(ratios, key=lambda what: ratios[what])
    name = torch.cuda.get_device_name() if device.type == "cuda" else str(device)
    return Answer(
        name="device",
        title=f"A model on a device ({name})",
        setup=" ".join(
            (
                f"{elements:,} parameters of {LAYERS} tensors, one member, a local cluster of one server over shared",
                f"memory. Bare copies are of the same bytes, by pieces of {4 * BLOCK_ELEMENTS >> 20} MiB, between the",
                f"device and two pinned rooms. Medians of {TURNS} turns. Steps: a transformer of 100 million",
                "parameters in bfloat16, AdamW,",
                f"{STEPS} steps of each of two alike in turns, before one joins and after.",
            )
        ),
        columns=(
            Column("what", "what"),
            Column("ms", "ms", "{:.2f}"),
            Column("gbps", "GB/s of the device's copies", "{:.1f}"),
            Column("ratio", "beside bare copies", "{:.2f}"),
            Column("beside", "beside no join", "{:.4f}"),
            Column("memory", "device memory, MiB", "{:.1f}"),
        ),
        rows=rows,
        limit=(
            f"The goals are {GOAL_COPY} of bare copies and {GOAL_STEP} of a step. The least is {slowest}, "
            f"with {ratios[slowest]:.2f}; a step at which nothing is due takes {step:.4f} of one without join at most. "
            "An exchange has the faster deltas; those on the device bring the base up, too. In bfloat16 the host's "
            "side is float32, twice the bytes, and its memory is what bounds. The rest of an exchange is passes over "
            "the host's memory, each by one core."
        ),
    )


def _seconds(what: Callable[[], object]) -> float:
    """Return how long it takes until the device has done it: a median, after one turn for the memory that it takes."""
    what()
    found = []
    for _ in range(TURNS):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        what()
        torch.accelerator.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _allocated(device: torch.device, *, peak: bool = False) -> int:
    """Return the bytes that tensors have on the device; `peak`: the most since the last question without it."""
    if device.type != "cuda":
        return 0
    if not peak:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def _model(device: torch.device, dtype: torch.dtype, elements: int) -> dict[tuple[str, ...], torch.Tensor]:
    each = elements // LAYERS
    return {(f"layer{number}",): torch.randn(each, device=device).to(dtype) for number in range(LAYERS)}


def _bare(tensors: dict[tuple[str, ...], torch.Tensor], *, down: bool) -> None:
    """Copy all, by pieces, in two pinned rooms that take turns; it waits at the end alone."""
    turns = itertools.cycle(_rooms(next(iter(tensors.values())).dtype))
    for tensor in tensors.values():
        for block in torch.split(tensor, BLOCK_ELEMENTS):
            room = next(turns)[: block.numel()]
            if down:
                room.copy_(block, non_blocking=True)
            else:
                block.copy_(room, non_blocking=True)
    torch.accelerator.synchronize()


@functools.cache
def _rooms(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(BLOCK_ELEMENTS, dtype=dtype, pin_memory=True) for _ in range(2)]


def _drain(blocks: Iterator[tuple[int, Values]]) -> None:
    for _ in blocks:
        pass


def _moves(device: torch.device, elements: int) -> Iterator[dict[str, Any]]:
    """Moves between the device and the host that exchanges make, without the servers."""
    for dtype in (torch.float32, torch.bfloat16):
        tensors = _model(device, dtype, elements)
        nbytes = elements * dtype.itemsize
        base = np.full(elements, 0.5, np.float32)  # zeros would be one page of the kernel's, in the cache
        short = str(dtype).removeprefix("torch.")
        bare = {down: _seconds(functools.partial(_bare, tensors, down=down)) for down in (True, False)}
        for down, seconds in bare.items():
            yield {
                "what": f"{short}, bare {'down' if down else 'up'}",
                "ms": 1e3 * seconds,
                "gbps": nbytes / seconds / 1e9,
            }
        for held in (False, True):
            made = ModelParameters(tensors)
            if held:
                made.hold(base)
            moves = _moves_of(made, base)
            for name, (move, down) in moves.items():
                if held and name == "blocks":
                    continue
                seconds = _seconds(move)
                yield {
                    "what": f"{short}, {name}{', page-locked' if held else ''}",
                    "ms": 1e3 * seconds,
                    "gbps": nbytes / seconds / 1e9,
                    "ratio": bare[down] / seconds,
                }


def _moves_of(made: ModelParameters, base: Values) -> dict[str, tuple[Callable[[], object], bool]]:
    """Return what moves a model, and whether down."""
    return {
        "blocks": (lambda: _drain(made.blocks()), True),
        "deltas, host": (lambda: _drain(made._deltas(base, on_device=False)), True),
        "deltas, device": (lambda: _drain(made._deltas(base, on_device=True)), True),
        "fill": (lambda: made.fill(base), False),
        "subtract": (lambda: made.subtract(base), False),
    }


def _exchanges(device: torch.device, elements: int) -> Iterator[dict[str, Any]]:
    """Whole exchanges of one member, by shared memory: the engine's own work on the host counts, too."""
    capacity = f"{32 * elements + (64 << 20)}"
    with smb.LocalCluster(servers=1, capacity=capacity) as cluster, smb.connect(cluster.address, timeout=120) as client:
        for dtype in (torch.float32, torch.bfloat16):
            for scheme in ("diloco", "easgd", "asp"):
                yield _exchange(client, device, elements, dtype, scheme)


def _exchange(
    client: smb.Client, device: torch.device, elements: int, dtype: torch.dtype, scheme: str
) -> dict[str, Any]:
    tensors = _model(device, dtype, elements)
    model = nn.ParameterDict({names[0]: nn.Parameter(tensor) for names, tensor in tensors.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings: dict[str, Any] = {} if scheme == "asp" else {"every": 1}
    before = _allocated(device)
    with smb.torch.join(model, optimizer, "run", scheme=scheme, client=client, **settings) as shared:
        seconds = _seconds(lambda: shared.worker.step(samples=1))
        peak = _allocated(device, peak=True)
    smb.train.delete(client, "run")
    return {
        "what": f"{str(dtype).removeprefix('torch.')}, an exchange of {scheme}",
        "ms": 1e3 * seconds,
        "gbps": 2 * elements * dtype.itemsize / seconds / 1e9,
        "memory": (peak - before) / 2**20,
    }


def _publishing(device: torch.device, elements: int) -> Iterator[dict[str, Any]]:
    """A model's way from the device into a buffer with versions, and back."""
    capacity = 2 * 2 * elements + (64 << 20)
    with smb.LocalCluster(servers=1, capacity=f"{capacity}") as cluster, smb.connect(cluster.address) as client:
        tensors = _model(device, torch.bfloat16, elements)
        model = nn.ParameterDict({names[0]: nn.Parameter(tensor) for names, tensor in tensors.items()})
        publisher, follower = smb.torch.Publisher(client, "policy", model), smb.torch.follow(client, "policy")
        calls: dict[str, Callable[[], object]] = {
            "publish, from the device to its readers": publisher.publish,
            "load, from the publisher to the device": functools.partial(follower.load, model),
        }
        for what, call in calls.items():
            seconds = _seconds(call)
            yield {"what": f"bfloat16, {what}", "ms": 1e3 * seconds, "gbps": 2 * elements / seconds / 1e9}


def _mapped(device: torch.device, elements: int) -> Iterator[dict[str, Any]]:
    """Copies from and to a buffer's own memory, which is locked before."""
    capacity = f"{4 * elements + (64 << 20)}"
    there = torch.randn(elements, device=device)
    with (
        smb.LocalCluster(servers=1, capacity=capacity) as cluster,
        smb.connect(cluster.address) as client,
        smb.torch.mapped(client.create("mapped", elements)) as memory,
    ):
        copies: dict[str, Callable[[], object]] = {
            "down, to": lambda: memory.copy_(there, non_blocking=True),
            "up, from": lambda: there.copy_(memory, non_blocking=True),
        }
        for what, copy in copies.items():
            seconds = _seconds(copy)
            yield {
                "what": f"float32, {what} a buffer's own memory",
                "ms": 1e3 * seconds,
                "gbps": 4 * elements / seconds / 1e9,
            }


class Language(nn.Module):
    """A transformer whose step takes a device some milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        out: torch.Tensor = self.layers(images).square().mean()
        return out


def _steps(device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """Two models that take turns, one of them joined, at steps at which nothing is due; and what each holds."""
    with smb.LocalCluster(servers=1, capacity="4GiB") as cluster, smb.connect(cluster.address, timeout=120) as client:
        for scheme in ("diloco", "easgd"):
            torch.manual_seed(0)
            images = torch.randn(BATCH, CONTEXT, WIDTH, device=device, dtype=torch.bfloat16)

            def made() -> tuple[nn.Module, torch.optim.Optimizer]:
                model = Language().to(device, torch.bfloat16)
                return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

            def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
                optimizer.zero_grad()
                model(images).backward()  # noqa: B023 - called in this turn alone
                optimizer.step()

            plain, joined = made(), made()
            for each in (plain, joined):
                for _ in range(WARM):
                    step(*each)
            torch.accelerator.synchronize()
            before = _allocated(device)
            pairs = STEPS // (4 if quick else 1)
            alike = _in_turns(step, plain, joined, pairs)
            with smb.torch.join(*joined, "run", scheme=scheme, every=1_000_000, client=client):
                after = _allocated(device)
                beside = _in_turns(step, plain, joined, pairs)
            smb.train.delete(client, "run")
            yield {
                "what": f"a step with join ({scheme}), nothing due",
                "ms": 1e3 * beside[1],
                "beside": beside[1] / beside[0] / (alike[1] / alike[0]),
                "memory": (after - before) / 2**20,
            }


def _in_turns(step: Callable[..., None], one: Any, other: Any, pairs: int) -> tuple[float, float]:
    """Return the medians of a step of each, in seconds."""
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * pairs):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        step(*(one, other)[turn % 2])
        torch.accelerator.synchronize()
        found[turn % 2].append(time.perf_counter() - began)
    return statistics.median(found[0]), statistics.median(found[1])
