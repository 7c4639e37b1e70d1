"""A training process that trains a real network by smb.torch.join(overlap=). Requests as in perf.training.worker:

{"do": "join", "name": "NAME", "model": "cnn", "scheme": "asp", "overlap": "both"}    -> parameters
    model: "transformer", "cnn" or "sleeping", whose layers sleep in place of computing
{"do": "train", "steps": K, "start": T}    K steps from time.monotonic() T on
    -> seconds: of each step; computing: seconds until its optimizer stepped; plan: None, or what it was, what was
    predicted with it and without overlap, the bound, and what the plan was made from
"""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import smb.torch
from perf.scaling.worker import answer_requests
from perf.training.worker import TrainingProcess
from smb.overlap.plan import ExchangePlan
from smb.train.partition import bound_s

TOKENS, LENGTH = 1000, 32


class Transformer(nn.Module):
    """A language model: embeddings, three layers, a head of its own."""

    def __init__(self, width: int = 160) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))  # type: ignore[no-any-return]


def cnn() -> nn.Module:
    """Return convolutions, and then a large linear layer: computing first, parameters last."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


SLEEPING = tuple((100_000, seconds) for seconds in (0.01, 0.02, 0.02, 0.04, 0.04, 0.07))
"""Parameters of each layer, and seconds of its forward pass; backward takes twice as long."""


class _Sleep(torch.autograd.Function):
    """Passes on what it is given; its weights' gradient is zeros."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weights: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.count, ctx.seconds = weights.numel(), seconds
        time.sleep(seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, torch.zeros(ctx.count), None


class SleepingLayer(nn.Module):
    """Parameters, and a sleep in both passes."""

    def __init__(self, parameters: int, forward_s: float) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(parameters))
        self._forward_s = forward_s

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs."""
        return _Sleep.apply(inputs, self.weights, self._forward_s)  # type: ignore[no-any-return, no-untyped-call]


def made(model: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a network, inputs and goals."""
    torch.manual_seed(0)
    if model == "sleeping":
        inputs = torch.randn(4, 10, requires_grad=True)
        return nn.Sequential(*(SleepingLayer(*each) for each in SLEEPING)), inputs, torch.randint(10, (4,))
    if model == "cnn":
        return cnn(), torch.randn(24, 3, 32, 32), torch.randint(10, (24,))
    tokens = torch.randint(TOKENS, (16, LENGTH + 1))
    return Transformer(), tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


def step(network: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, goals: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(network(inputs).flatten(0, -2), goals)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def closing_s(plan: ExchangePlan) -> float:
    """Return the seconds from a round's last push to its first pull that a plan was made with; 0 without rounds."""
    if plan.without.schedule != "none":
        return 0.0
    nbytes, channel = sum(layer.nbytes for layer in plan.layers), plan.channel
    moving_s = 2 * channel.start_s + nbytes / channel.push_per_s + nbytes / channel.pull_per_s
    return max(0.0, plan.without.exposed_s - moving_s)


class OverlappedProcess(TrainingProcess):
    """One member."""

    def join(self, name: str, model: str, scheme: str, overlap: str) -> dict[str, Any]:
        self._name = name
        self._network, self._inputs, self._goals = made(model)
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=0.01, momentum=0.9)
        self._computed: list[float] = []
        self._optimizer.register_step_pre_hook(lambda *_: self._computed.append(time.perf_counter()))
        self._shared = smb.torch.join(
            self._network, self._optimizer, name, scheme=scheme, client=self._client, overlap=overlap
        )
        return {"parameters": sum(each.numel() for each in self._network.parameters())}

    def train(self, steps: int, start: float) -> dict[str, Any]:
        time.sleep(max(0.0, start - time.monotonic()))
        ends = [time.perf_counter()]
        for _ in range(steps):
            step(self._network, self._optimizer, self._inputs, self._goals)
            ends.append(time.perf_counter())
        self._shared.wait()
        return {
            "seconds": [after - before for before, after in itertools.pairwise(ends)],
            "computing": [after - before for before, after in zip(ends, self._computed, strict=False)],
            "plan": self._plan(),
        }

    def _plan(self) -> dict[str, Any] | None:
        plan = self._shared.plan
        if plan is None:
            return None
        return {
            "text": str(plan),
            "schedule": plan.chosen.schedule,
            "overlap": plan.chosen.overlap,
            "predicted": plan.chosen.iteration_s,
            "without": plan.without.iteration_s,
            "bound": bound_s(plan.layers, plan.channel, self._shared.scheme.traits.way),
            "passes": plan.chosen.iteration_s - plan.chosen.exposed_s,
            "chosen": asdict(plan.chosen),
            "layers": [asdict(layer) for layer in plan.layers],
            "channel": asdict(plan.channel),
            "closing": closing_s(plan),
        }

    def leave(self) -> dict[str, Any]:
        self._shared.close()
        return {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer_requests(OverlappedProcess())
