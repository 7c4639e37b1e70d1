"""A process of perf/training/race.py: a small language model in PyTorch that learns with another one. It takes a
request a line on stdin, as perf/training/worker.py does.

{"do": "connect", "coordinator": "HOST:PORT", "count": 1}
{"do": "begin", "rule": RULE, "rank": 0 or 1, "seed": N, "address": "HOST:PORT"}
    RULE: {"kind": "ddp"}, {"kind": "averager", "every": H}, or {"kind": "ours", ...} with smb.torch.join's settings;
    the address is gloo's
{"do": "train", "start": T, "steps": K}                from time.monotonic() T on -> seconds
{"do": "loss"}                                         -> loss: of text that no one has trained; parameters
{"do": "end"}                                          leaves; rank 0 deletes the group
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from perf.scaling.worker import answer_requests

WIDTH, LAYERS, HEADS, SYMBOLS = 384, 6, 6, 256  # 10,843,648 parameters
CONTEXT, BATCH = 32, 4
LR = 5e-4
TEXT_BYTES, TESTS = 4 << 20, 256
TIMEOUT_S = 300.0
INTERFACE = "eth0"  # a lab's host has one


class Language(nn.Module):
    """A transformer that tells the next byte."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.told = nn.Linear(WIDTH, SYMBOLS, bias=False)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the loss of each row's bytes but the first, by those before."""
        inside = self.layers(self.symbols(text[:, :-1]) + self.places, mask=self.mask)
        return nn.functional.cross_entropy(self.told(inside).flatten(0, 1), text[:, 1:].flatten())


def read_text() -> torch.Tensor:
    """Python's own library, which is wherever this runs: bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:TEXT_BYTES]
    return torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))


class Racer:
    """One of the two."""

    def connect(self, coordinator: str, count: int = 1) -> dict[str, Any]:
        assert count == 1
        torch.set_num_threads(1)
        self._client = smb.connect(coordinator, transport="tcp", timeout=TIMEOUT_S)
        text = read_text()
        self._text, self._tests = text[: -len(text) // 20], text[-len(text) // 20 :]
        return {}

    def begin(self, rule: dict[str, Any], rank: int, seed: int, address: str) -> dict[str, Any]:
        torch.manual_seed(seed)
        self._model = Language()
        self._called: nn.Module = self._model
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, fused=True)
        self._random = np.random.default_rng([seed, rank])
        self._after: Callable[[], object] = lambda: None
        self._leave = contextlib.ExitStack()
        self._rank = rank
        settings = dict(rule)
        kind = settings.pop("kind")
        if kind == "ours":
            shared = smb.torch.join(self._model, self._optimizer, "race", client=self._client, **settings)
            self._leave.callback(shared.close)
        else:
            self._begin_gloo(kind, address, **settings)
        return {}

    def _begin_gloo(self, kind: str, address: str, every: int = 1) -> None:
        from torch.distributed import destroy_process_group, init_process_group

        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        init_process_group("gloo", init_method=f"tcp://{address}", rank=self._rank, world_size=2)
        self._leave.callback(destroy_process_group)
        if kind == "ddp":
            self._called = nn.parallel.DistributedDataParallel(self._model)
            return
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
        self._after = lambda: averager.average_parameters(self._model.parameters())

    def train(self, start: float, steps: int) -> dict[str, Any]:
        time.sleep(max(0.0, start - time.monotonic()))
        for _ in range(steps):
            rows = self._rows(self._random.integers(len(self._text) - CONTEXT - 1, size=BATCH), self._text)
            self._optimizer.zero_grad()
            self._called(rows).backward()
            self._optimizer.step()
            self._after()
        return {"seconds": time.monotonic() - start}

    def loss(self) -> dict[str, Any]:
        rows = self._rows(np.linspace(0, len(self._tests) - CONTEXT - 1, TESTS).astype(int), self._tests)
        with torch.no_grad():
            losses = [float(self._model(part)) for part in torch.split(rows, 32)]
        return {"loss": sum(losses) / len(losses), "parameters": sum(each.numel() for each in self._model.parameters())}

    def end(self) -> dict[str, Any]:
        self._leave.close()
        return {}

    def delete(self) -> dict[str, Any]:
        smb.train.delete(self._client, "race")
        return {}

    def _rows(self, places: Any, text: torch.Tensor) -> torch.Tensor:
        return torch.stack([text[place : place + CONTEXT + 1] for place in places.tolist()])


if __name__ == "__main__":
    answer_requests(Racer())
