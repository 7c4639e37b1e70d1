"""The training of examples/gpt.py by DistributedDataParallel over gloo: a rank of perf/training/gpt.py. It takes the
options of examples/gpt.py, and torchrun's environment variables.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from torch.distributed import destroy_process_group, get_rank, get_world_size, init_process_group
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Learn each rank's share of the batches."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    gpt = importlib.import_module("gpt")
    options, rows, unseen, model, optimizer, schedule = gpt.prepare()
    init_process_group("gloo")
    parallel = DistributedDataParallel(model)
    batches = torch.split(torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)), gpt.BATCH)
    for step, batch in enumerate(batches[get_rank() :: get_world_size()], 1):
        gpt.learn(parallel, optimizer, rows[batch], parallel.no_sync())
        schedule.step()
        gpt.look(model, optimizer, schedule, step, unseen, options)
    print(f"loss {gpt.loss_of(model, unseen):.4f}", flush=True)
    destroy_process_group()


if __name__ == "__main__":
    main()
