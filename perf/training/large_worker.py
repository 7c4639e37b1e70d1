"""A process of perf/training/large.py: a GPT of 100 million parameters that trains with another one. It takes a request
a line on stdin, as perf/training/worker.py does.

{"do": "connect", "coordinator": "HOST:PORT", "count": 1}
{"do": "join", "settings": {...}, "rank": 0 or 1}    those of smb.torch.join -> parameters, seconds of the join
{"do": "train", "start": T, "steps": K}              from time.monotonic() T on -> steps: the seconds of computing and
                                                     in the optimizer of each, and whether it exchanged; bytes; ...
{"do": "end", "delete": true}                        leaves; deletes the group
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from perf.scaling.worker import answer_requests
from perf.training.race_worker import CONTEXT, TIMEOUT_S, read_text

WIDTH, LAYERS, HEADS, SYMBOLS = 768, 14, 12, 256
BATCH = 4


class Large(nn.Module):
    """A transformer that tells the next byte."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.told = nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the rows' bytes but the first."""
        return nn.functional.cross_entropy(
            self.told(self.layers(self.symbols(text[:, :-1]))).flatten(0, 1), text[:, 1:].flatten()
        )


class Trainer:
    """One of the two."""

    def connect(self, coordinator: str, count: int = 1) -> dict[str, Any]:
        assert count == 1
        torch.set_num_threads(1)
        self._client = smb.connect(coordinator, transport="tcp", timeout=TIMEOUT_S)
        self._text = read_text()
        return {}

    def join(self, settings: dict[str, Any], rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        self._model = Large()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._random = np.random.default_rng(rank)
        began = time.monotonic()
        self._shared = smb.torch.join(self._model, self._optimizer, "large", client=self._client, **settings)
        joined = time.monotonic() - began
        self._events: list[smb.train.ExchangeEvent] = []
        self._shared.on_exchange(self._events.append)
        return {"parameters": sum(each.numel() for each in self._model.parameters()), "seconds": joined}

    def train(self, start: float, steps: int) -> dict[str, Any]:
        self._events.clear()
        time.sleep(max(0.0, start - time.monotonic()))
        told: list[dict[str, Any]] = []
        for _ in range(steps):
            before, began = len(self._events), time.monotonic()
            places = self._random.integers(len(self._text) - CONTEXT - 1, size=BATCH)
            rows = torch.stack([self._text[place : place + CONTEXT + 1] for place in places.tolist()])
            self._optimizer.zero_grad()
            self._model(rows).backward()
            computed = time.monotonic()
            self._optimizer.step()
            told.append(
                {
                    "computing": computed - began,
                    "optimizer": time.monotonic() - computed,
                    "exchanged": len(self._events) > before,
                }
            )
        found = re.search(r"^VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)
        assert found
        return {
            "steps": told,
            "bytes": sum(event.bytes for event in self._events),
            "resident": 1024 * int(found[1]),
        }

    def end(self, *, delete: bool) -> dict[str, Any]:
        self._shared.close(load=False)
        if delete:
            smb.train.delete(self._client, "large")
        return {}


if __name__ == "__main__":
    answer_requests(Trainer())
