"""Ranks of meshes, each a process: a small FSDP2 model on gloo that trains with others."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import smb
import smb.torch
import smb.train


def network() -> nn.Sequential:
    """On two ranks the last layer of FSDP2 is one rank's alone: the other has an empty shard."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, member: int, number: int) -> None:
    """The same on every rank of a member: its mean over ranks is what one process would compute."""
    generator = torch.Generator().manual_seed(100 * member + number)
    optimizer.zero_grad()
    model(torch.randn(8, 6, generator=generator)).square().mean().backward()
    optimizer.step()


def run_rank(
    inbox: Any, outbox: Any, address: str, store: str, member: int, rank: int, ranks: int, options: dict[str, Any]
) -> None:
    """One rank of a member. Tells "joined"; then for each number that it gets does so many steps, and tells how many
    it has done or how it failed. On None it closes, and rank 0 tells the model's sum.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    model = network()
    if options.pop("columns", False):  # tensor parallel: shards that do not follow each other in memory
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with smb.connect(address) as client:
        try:
            shared = smb.torch.join(model, optimizer, "run", client=client, mesh=mesh, **options)
        except smb.Error as error:
            outbox.put(f"{type(error).__name__}: {error}")
            return
        outbox.put("joined")
        done = 0
        while (steps := inbox.get()) is not None:
            try:
                for _ in range(steps):
                    local_step(model, optimizer, member, done)
                    done += 1
            except Exception as error:  # noqa: BLE001 - whatever ends a rank is told
                outbox.put(f"{type(error).__name__}: {error}")
                outbox.close()
                outbox.join_thread()  # it is told before we are gone
                os._exit(1)
            outbox.put(done)
        shared.close()
        outbox.put([tensor.full_tensor().detach().numpy() for tensor in map(_whole, model.parameters())])
    dist.destroy_process_group()


def _whole(tensor: Any) -> Any:
    return tensor if hasattr(tensor, "full_tensor") else _Plain(tensor)


class _Plain:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def full_tensor(self) -> torch.Tensor:
        """What a DTensor has."""
        return self._tensor


class Member:
    """A member of so many ranks. Its processes are forks of one that has PyTorch."""

    def __init__(self, context: Any, address: str, store: str, member: int, ranks: int, **options: Any) -> None:
        self._queues = [(context.Queue(), context.Queue()) for _ in range(ranks)]
        self.processes = [
            context.Process(
                target=run_rank,
                args=(inbox, outbox, address, f"{store}-{member}", member, rank, ranks, dict(options)),
                daemon=True,
            )
            for rank, (inbox, outbox) in enumerate(self._queues)
        ]
        for process in self.processes:
            process.start()

    def tell(self, what: int | None, *ranks: int) -> None:
        """Have ranks (all) do so many steps, or close."""
        for rank in ranks or range(len(self._queues)):
            self._queues[rank][0].put(what)

    def heard(self, rank: int = 0) -> Any:
        """What a rank tells next."""
        return self._queues[rank][1].get(timeout=90)

    def all_heard(self) -> list[Any]:
        """What each rank tells next."""
        return [self.heard(rank) for rank in range(len(self._queues))]
