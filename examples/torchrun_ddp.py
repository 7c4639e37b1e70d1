"""Digits on several processes of each host: PyTorch's DDP inside a host, DiLoCo between hosts.

    torchrun --standalone --nproc-per-node=2 examples/torchrun_ddp.py     # on each host, whenever it is there

The processes that one torchrun starts are one member of the training. They exchange gradients at each step, and only
the changes of their common model are sent between hosts. A host may join late and leave early. Inside a job of Slurm:

    sbatch --nodes=4 deploy/slurm/smb.sbatch torchrun --standalone --nproc-per-node=8 examples/torchrun_ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import smb.torch


def main() -> None:
    """Train. The first process prints the share of digits that the model recognises."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images = (images / 16).float()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with smb.torch.join(model, optimizer, "digits", mesh=mesh, scheme="diloco", every=20) as shared:
        for batch in shared.batches(len(images), 32, epochs=10):  # this process's part of the member's batch
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.inference_mode():
        known = (model.module(images).argmax(1) == labels).float().mean().item()
    if dist.get_rank() == 0:
        print(f"knows {known:.3f} of the digits")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
