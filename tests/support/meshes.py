"""Ranks of meshes, each a process: small models on gloo that train with others."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import smb
import smb.torch
import smb.train

NAME = "run"
PRELOADED = ["torch.distributed.fsdp", "torch._dynamo", "torch.profiler", "smb.torch.mesh"]  # what forks shall find


def network() -> nn.Sequential:
    """On two ranks the last layer of FSDP2 is one rank's alone: the other has an empty shard."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(member: int, number: int) -> torch.Tensor:
    """A member's local change at its number-th step."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * member + number))


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, member: int, number: int) -> None:
    """The same on every rank of a member: its mean over ranks is what one process would compute."""
    optimizer.zero_grad()
    model(batch(member, number)).square().mean().backward()
    optimizer.step()


class Rank:
    """One rank of a mesh: does what it is told, and tells what came of it."""

    def __init__(self, address: str, rank: int, ranks: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
        self._client = smb.connect(address)
        self._rank = rank
        self._shared: Any = None

    def join(self, member: int = 0, kind: str = "fsdp", lr: float = 0.1, norm: bool = False, **options: Any) -> str:
        """Make a model and join. `kind`: "fsdp", "ddp", or "columns": tensor parallel, whose shards do not follow each
        other in memory."""
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        model: nn.Module = network()
        if norm:
            model.append(nn.BatchNorm1d(1))  # type: ignore[operator]
        if kind == "columns":
            parallelize_module(model, self._mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        elif kind == "fsdp":
            fully_shard(model, mesh=self._mesh)
        else:
            model = nn.parallel.DistributedDataParallel(model)
        self._model, self._member, self._done = model, member, 0
        self._optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        name = options.pop("name", NAME)
        if options.pop("mesh", True):
            options["mesh"] = self._mesh
        self._shared = smb.torch.join(model, self._optimizer, name, client=self._client, **options)
        return "joined"

    def step(self, count: int) -> int:
        """Do so many steps; return how many it has done."""
        for _ in range(count):
            local_step(self._model, self._optimizer, self._member, self._done)
            self._done += 1
        return self._done

    def idle(self, count: int) -> None:
        """Do so many steps that change nothing."""
        for _ in range(count):
            for parameter in self._model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self._optimizer.step()

    def flush(self) -> None:
        """Have nothing under way."""
        with self._shared._mesh.together():
            if self._rank == 0:
                self._shared.worker.flush()

    def values(self) -> list[Any]:
        """Return the parameters, whole."""
        return [_whole(parameter.detach()).numpy().copy() for parameter in self._model.parameters()]

    def state(self) -> dict[str, Any]:
        """Return Shared.state_dict(), with what is sharded as it is on this rank, and whole."""
        found = self._shared.state_dict()
        return {key: (hasattr(value, "to_local"), _whole(value).numpy().copy()) for key, value in found.items()}

    def checkpoint(self, name: str) -> None:
        """Save Shared.state_dict() by torch.distributed.checkpoint."""
        from torch.distributed import checkpoint

        from smb.torch.checkpoint import Writer

        checkpoint.save(self._shared.state_dict(), storage_writer=Writer(self._client, name))

    def batches(self, rows: int, size: int, **options: Any) -> list[list[int]]:
        """Return the rows that this rank is given, batch by batch, and train each."""
        found = []
        for rows_of_one in self._shared.batches(rows, size, **options):
            found.append(rows_of_one.tolist())
            self.step(1)
        return found

    def statistics(self) -> list[float]:
        """Return the model's running mean."""
        return [float(value.sum()) for key, value in self._model.state_dict().items() if "running_mean" in key]

    def close(self) -> list[Any]:
        """Leave; return the parameters, whole."""
        self._shared.close()
        return self.values()


def run_rank(inbox: Any, outbox: Any, address: str, store: str, rank: int, ranks: int) -> None:
    """One rank's process: each message is a method of Rank and its arguments. On None it ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    done = Rank(address, rank, ranks)
    while (message := inbox.get()) is not None:
        method, arguments, options = message
        try:
            told = getattr(done, method)(*arguments, **options)
        except smb.Error as error:
            told = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - what ends a rank is told, in words
            told = f"{type(error).__name__}: {error}"
        outbox.put(told)
    with contextlib.suppress(Exception):
        done._client.close()
    outbox.close()
    outbox.join_thread()
    os._exit(0)  # gloo's group need not be there any more


def _whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


class Mesh:
    """So many ranks, as processes. They are forks of one that has PyTorch."""

    def __init__(self, context: Any, address: str, directory: Path, ranks: int = 2) -> None:
        self._queues = [(context.Queue(), context.Queue()) for _ in range(ranks)]
        self.processes = [
            context.Process(
                target=run_rank, args=(inbox, outbox, address, str(directory / "store"), rank, ranks), daemon=True
            )
            for rank, (inbox, outbox) in enumerate(self._queues)
        ]
        for process in self.processes:
            process.start()

    def tell(self, method: str, *arguments: Any, ranks: tuple[int, ...] = (), **options: Any) -> None:
        """Have ranks (all) do something."""
        for rank in ranks or range(len(self._queues)):
            self._queues[rank][0].put((method, arguments, options))

    def heard(self, rank: int = 0) -> Any:
        """The next message of a rank."""
        return self._queues[rank][1].get(timeout=90)

    def all_heard(self) -> list[Any]:
        """The next message of each rank."""
        return [self.heard(rank) for rank in range(len(self._queues))]

    def ask(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """Have all ranks do something, and return what each tells."""
        self.tell(method, *arguments, **options)
        return self.all_heard()

    def end(self) -> None:
        """End the processes."""
        for inbox, _ in self._queues:
            inbox.put(None)
        for process in self.processes:
            process.join(10)
            process.kill()
            process.join(10)
