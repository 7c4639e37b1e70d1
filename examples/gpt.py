"""A GPT of 6.4 million parameters learns Python's own library, byte by byte: a plain script of one process.

Run it: python examples/gpt.py

Warmup and cosine, accumulation, clipping, autocast, evaluation, checkpoints (a second call goes on from the last one).
gpt_shared.py is the same training, shared by all processes that run it. Their main() differ in these lines:

+import smb.torch
     done = load(options.checkpoint, model, optimizer, schedule)
-    batches = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).split(BATCH)[done:]
+    shared = smb.torch.join(model, optimizer, options.name, scheme="diloco", every=options.every)
+    shared.catch_up(schedule)
+    batches = shared.batches(len(rows), BATCH, epochs=1)
     for step, batch in enumerate(batches, done + 1):
         learn(model, optimizer, rows[batch])
         schedule.step()
         look(model, optimizer, schedule, step, unseen, options)
+    shared.close()
     print(f"loss {loss_of(model, unseen):.4f}", flush=True)
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

WIDTH, LAYERS, HEADS, SYMBOLS = 256, 8, 4, 256
CONTEXT = 64  # bytes
BATCH, PART = 16, 8  # rows of a step, and of each of its passes, whose gradients are accumulated
RATE, WARMUP, CLIP = 1e-3, 0.1, 1.0  # the largest rate, the fraction of the steps until it, the largest gradient norm
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_began = time.monotonic()


class GPT(nn.Module):
    """Tells the next byte by those before."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of each row's bytes but the first; text: int64 (rows, CONTEXT + 1)."""
        inside = self.layers(self.symbols(text[:, :-1]) + self.places, mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(inside).flatten(0, 1), text[:, 1:].flatten())


def read_rows(count: int, unseen: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `count` rows of CONTEXT + 1 bytes of Python's library to learn from, and others, of its last files."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.from_numpy(np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int64))
    learnt, tested = text[: -len(text) // 20], text[-len(text) // 20 :]

    def rows_of(part: torch.Tensor, count: int) -> torch.Tensor:
        places = torch.linspace(0, len(part) - CONTEXT - 1, count).long()
        return part[places[:, None] + torch.arange(CONTEXT + 1)]

    return rows_of(learnt, count).to(DEVICE), rows_of(tested, unseen).to(DEVICE)


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: warmup, then half a cosine down to a tenth."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))


def learn(
    model: nn.Module, optimizer: Any, rows: torch.Tensor, accumulating: AbstractContextManager[Any] | None = None
) -> None:
    """Take one step: passes of PART rows each. All passes but the last one are inside `accumulating`."""
    optimizer.zero_grad()
    parts = rows.split(PART)
    with accumulating or nullcontext():
        for part in parts[:-1]:
            _pass(model, part, len(rows))
    _pass(model, parts[-1], len(rows))
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()


def _pass(model: nn.Module, part: torch.Tensor, rows: int) -> None:
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(part) * (len(part) / rows)
    loss.backward()


def loss_of(model: nn.Module, unseen: torch.Tensor) -> float:
    """Return the mean loss of the unseen rows, in nats a byte."""
    model.eval()
    with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16):
        loss = float(torch.stack([model(part) for part in unseen.split(PART)]).mean())
    model.train()
    return loss


def look(model: nn.Module, optimizer: Any, schedule: Any, step: int, unseen: torch.Tensor, options: Any) -> None:
    """Evaluate, and save a checkpoint, every so many steps."""
    if step % options.evaluate == 0:
        seconds = time.monotonic() - _began
        print(f"step {step} seconds {seconds:.1f} loss {loss_of(model, unseen):.4f}", flush=True)
    if options.checkpoint and step % options.save == 0:
        states = {"model": model, "optimizer": optimizer, "schedule": schedule}
        staged = options.checkpoint.with_suffix(".tmp")
        torch.save({"step": step} | {name: each.state_dict() for name, each in states.items()}, staged)
        staged.replace(options.checkpoint)  # a kill leaves the former one whole


def load(checkpoint: Path | None, model: nn.Module, optimizer: Any, schedule: Any) -> int:
    """Go on from a checkpoint, if there is one; return the number of its steps."""
    if checkpoint is None or not checkpoint.exists():
        return 0
    states = torch.load(checkpoint, map_location=DEVICE, weights_only=True)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    schedule.load_state_dict(states["schedule"])
    return int(states["step"])


def prepare() -> tuple[Any, ...]:
    """Return the options, the rows to learn from, the unseen ones, the model, its optimizer and its schedule."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=300, help=f"to learn, of {BATCH} rows; default 300")
    parser.add_argument("--steps", type=int, help="of the schedule; default: the batches. Fewer if they are shared")
    parser.add_argument("--evaluate", type=int, default=10, metavar="STEPS", help="from one evaluation to the next")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="to save to, and to go on from; default: none")
    parser.add_argument("--save", type=int, default=50, metavar="STEPS", help="from one checkpoint to the next")
    parser.add_argument("--name", default="gpt", help="of the shared training")
    parser.add_argument("--every", type=int, default=10, metavar="STEPS", help="from one exchange to the next")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    rows, unseen = read_rows(options.batches * BATCH)
    model = GPT().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    steps = options.steps or options.batches
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    return options, rows, unseen, model, optimizer, schedule


def main() -> None:
    """Learn all batches once; evaluate at the end."""
    options, rows, unseen, model, optimizer, schedule = prepare()
    done = load(options.checkpoint, model, optimizer, schedule)
    batches = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).split(BATCH)[done:]
    for step, batch in enumerate(batches, done + 1):
        learn(model, optimizer, rows[batch])
        schedule.step()
        look(model, optimizer, schedule, step, unseen, options)
    print(f"loss {loss_of(model, unseen):.4f}", flush=True)


if __name__ == "__main__":
    main()
