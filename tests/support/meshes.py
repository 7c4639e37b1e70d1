"""Ranks of meshes, each a process: small models on gloo that train with others."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import smb
import smb.torch
import smb.train
from tests.support.devices import BACKEND, DEVICE, ON_HOST
from tests.support.exact_steps import goal_of, shaped
from tests.support.sparse_states import shards_of, state_of

NAME = "run"
NOWHERE = torch.device("meta")  # a program's default device, which is not for what smb makes


def network() -> nn.Sequential:
    """On two ranks the last layer of FSDP2 is one rank's alone: the other has an empty shard."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def published(seed: int) -> nn.Sequential:
    """A model that ranks publish: its dimensions are no multiples of theirs, and it has counters and statistics."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3), nn.LayerNorm(3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) if tensor.is_floating_point() else torch.tensor(seed))
    return model


def batch(member: int, number: int) -> torch.Tensor:
    """A member's local change at its number-th step."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * member + number))


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, member: int, number: int) -> None:
    """The same on every rank of a member: its mean over ranks is what one process would compute."""
    optimizer.zero_grad()
    device = next(model.parameters()).device
    model(batch(member, number).to(device)).square().mean().backward()
    optimizer.step()


class Rank:
    """One rank of a mesh: does what it is told, and tells what came of it."""

    def __init__(self, address: str, rank: int, ranks: int) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        # Of the group that there is: PyTorch would make one of NCCL, which refuses several ranks on one device.
        self._mesh = DeviceMesh.from_group(dist.group.WORLD, DEVICE, mesh_dim_names=("data",))
        self._client = smb.connect(address)
        self._rank = rank
        self._warnings: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self._warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("smb").addHandler(handler)
        self._shared: Any = None
        self._follower: Any = None
        self._grid: Any = None

    def sharded(self, kind: str, seed: int = 0) -> nn.Module:
        """Return a model with values of that seed, sharded over the mesh. `kind`: as of join; or "grid", tensor
        parallel along one dimension of a mesh of two rows, and FSDP2 along the other.
        """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        model = published(seed).to(DEVICE)
        if kind == "fsdp":
            fully_shard(model, mesh=self._mesh)
        elif kind == "columns":
            parallelize_module(model, self._mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        else:
            self._shard_on_grid(model)
        self._model = model
        return model

    def _shard_on_grid(self, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if self._grid is None:
            self._grid = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("data", "model"))
        parallelize_module(model, self._grid["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=self._grid["data"])

    def publisher(self, name: str, kind: str, seed: int = 0, **options: Any) -> int:
        """Make a model and its Publisher, mesh= found by itself; return the generation so far."""
        if options.pop("given", False):
            options["mesh"] = self._mesh
        model = self.sharded(kind, seed)
        with NOWHERE:
            self._publisher = smb.torch.Publisher(self._client, name, model, **options)
        return self._publisher.generation

    def publish(self, seed: int, wrong: tuple[int, ...] = ()) -> tuple[int, int, bool]:
        """Publish values of a seed; return the generation, bytes sent by this rank, and whether the values were those.
        Ranks in `wrong` have another state.
        """
        values = published(seed).state_dict()
        with torch.no_grad():
            for name, tensor in self._model.state_dict().items():
                tensor.copy_(_like(tensor, values[name]))
        same = all(_whole(tensor).cpu().equal(values[name]) for name, tensor in self._model.state_dict().items())
        if self._rank in wrong:
            self._publisher.publish({})
        if seed % 2:
            generation = self._publisher.publish()
        else:  # in the background, over what is overwritten at once
            future = self._publisher.publish_async()
            with torch.no_grad():
                for tensor in self._model.state_dict().values():
                    tensor.zero_()
            generation = future.result(60)
        return generation, self._publisher.sent_bytes, same

    def sparse_publisher(self, name: str, kind: str, turn_s: float = 10.0, **options: Any) -> int:
        """Make a Publisher of a state of tests.support.sparse_states; return the generation so far. `turn_s`: how long
        the next trainer waits where this one is killed.
        """
        from smb.torch.publishing import shard_writer

        shard_writer._TURN_S = turn_s
        self._kind = kind
        self._publisher = smb.torch.Publisher(self._client, name, shards_of(state_of(0), self._mesh, kind), **options)
        return self._publisher.generation

    def sparse_publish(self, number: int, wrong: tuple[int, ...] = ()) -> tuple[int, int]:
        """Publish the state of that number; return the generation, and the bytes that this rank sent. Ranks in `wrong`
        have another state.
        """
        state = shards_of(state_of(number), self._mesh, self._kind)
        generation = self._publisher.publish({} if self._rank in wrong else state)
        return generation, self._publisher.sent_bytes

    def publish_flipped(self, name: str, deltas: int) -> tuple[int, str]:
        """Publish a state by rows, and again with the ranks in the opposite order: as large shards, of other rows.
        Return the first generation, and what came of the second.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        ranks = dist.get_world_size()
        whole = torch.arange(12.0 * ranks).reshape(2 * ranks, 6).to(DEVICE)
        flipped = DeviceMesh(DEVICE, list(reversed(range(ranks))))
        first, second = ({"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}
                         for mesh in (self._mesh, flipped))  # fmt: skip
        publisher = smb.torch.Publisher(self._client, name, first, deltas=deltas)
        generation = publisher.publish()
        try:
            return generation, str(publisher.publish(second))
        except smb.InvalidArgumentError as error:
            return generation, str(error)

    def sparse_read(self, name: str, kind: str, generation: int) -> tuple[bool, int, int]:
        """Read a generation of that state with shards of this mesh. Return whether its bits are right, the bytes that
        came, and the bytes of this rank's shards.
        """
        if self._follower is None:
            like = shards_of(state_of(0), self._mesh, kind)
            self._follower = smb.torch.follow(self._client, name, placements=like, timeout=60)
        self._follower.wait(generation=generation, timeout=60)
        found = self._follower.state_dict(generation=generation)
        wanted = shards_of(state_of(generation), self._mesh, kind)
        wanted = {key: getattr(each, "to_local", lambda each=each: each)().cpu() for key, each in wanted.items()}
        same = all(each.view(-1).view(torch.uint8).equal(wanted[key].contiguous().view(-1).view(torch.uint8))
                   for key, each in found.items())  # fmt: skip
        return same, self._follower.received_bytes, sum(each.nbytes for each in wanted.values())

    def die_at(self, step: str, rank: int) -> None:
        """Have a rank kill itself at a step of its next publication, before what the step names ("write", "commit"), or
        before its second such step ("write some", "commit some").
        """
        if rank != self._rank:
            return
        from smb.call.versions import Publication

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        name = step.removesuffix(" some")
        first = getattr(Publication, name)
        left = iter((True, False))  # one such step is done

        def some(*arguments: Any) -> Any:
            return first(*arguments) if next(left) else die()

        setattr(Publication, name, some if step.endswith(" some") else die)

    def stop_at_write(self, rank: int, late_s: float) -> None:
        """Have a rank stop itself (SIGSTOP) before the first write of its next publication; others wait for so long."""
        from smb.call.versions import Publication
        from smb.torch.publishing import shard_writer

        shard_writer._LATE_S = late_s
        if rank == self._rank:
            write = Publication.write

            def stop(*arguments: Any) -> None:
                Publication.write = write  # type: ignore[method-assign]
                os.kill(os.getpid(), signal.SIGSTOP)
                write(*arguments)

            Publication.write = stop  # type: ignore[method-assign]

    def follow(self, name: str, kind: str, generation: int) -> tuple[int, int, dict[str, Any], list[int]]:
        """Follow a state with this rank's own shards, and load it; return the generation, bytes that came, what there
        is now, and how many elements of each tensor this rank has."""
        model = self.sharded(kind, 99)
        follower = smb.torch.follow(self._client, name, placements=model, timeout=60)
        follower.wait(timeout=60)
        loaded = follower.load(model, generation=generation)
        local = [tensor.to_local().numel() if hasattr(tensor, "to_local") else tensor.numel()
                 for tensor in model.state_dict().values()]  # fmt: skip
        found = {key: _whole(value).cpu().numpy().copy() for key, value in model.state_dict().items()}
        return loaded, follower.received_bytes, found, local

    def warnings(self) -> list[str]:
        """Return what was warned of so far."""
        return self._warnings

    def join(self, member: int = 0, kind: str = "fsdp", lr: float = 0.1, norm: bool = False, **options: Any) -> str:
        """Make a model and join. `kind`: "fsdp", "ddp"; "columns": tensor parallel, whose shards do not follow each
        other in memory; "grid": that along one dimension of a mesh, and FSDP2 along the other; "one tensor": DDP of a
        model that has one; or "alone": a model that nothing keeps alike."""
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        model: nn.Module = (nn.Linear(6, 1, bias=False) if kind == "one tensor" else network()).to(DEVICE)
        if norm:
            model.append(nn.BatchNorm1d(1).to(DEVICE))  # type: ignore[operator]
        if kind == "columns":
            parallelize_module(model, self._mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        elif kind == "fsdp":
            fully_shard(model, mesh=self._mesh)
        elif kind == "grid":
            self._shard_on_grid(model)
        elif kind != "alone":
            model = nn.parallel.DistributedDataParallel(model)
        self._model, self._member, self._done = model, member, 0
        self._optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        name = options.pop("name", NAME)
        if options.pop("mesh", True):
            options["mesh"] = self._mesh
        with NOWHERE:
            self._shared = smb.torch.join(model, self._optimizer, name, client=self._client, **options)
        return "joined"

    def fail_at_write(self, rank: int) -> None:
        """Have a rank's next write of a contribution fail."""
        if rank != self._rank:
            return
        write = smb.Buffer.write_async

        def fail(*_: Any) -> Any:
            smb.Buffer.write_async = write  # type: ignore[method-assign]
            raise smb.UnavailableError("away, says the test")

        smb.Buffer.write_async = fail  # type: ignore[assignment,method-assign]

    def step(self, count: int) -> int:
        """Do so many steps; return how many it has done."""
        for _ in range(count):
            local_step(self._model, self._optimizer, self._member, self._done)
            self._done += 1
        return self._done

    def exact_step(self) -> int:
        """Do one step of tests.support.exact_steps; return how many it has done."""
        for parameter, goal in zip(self._model.parameters(), shaped(goal_of(self._member, self._done)), strict=True):
            parameter.grad = parameter.detach() - _like(parameter, goal.to(DEVICE))
        self._optimizer.step()
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
        with self._shared._calls.together():
            if self._rank == 0:
                self._shared.worker.flush()

    def values(self) -> list[Any]:
        """Return the parameters, whole."""
        return [_whole(parameter.detach()).cpu().numpy().copy() for parameter in self._model.parameters()]

    def state(self) -> dict[str, Any]:
        """Return Shared.state_dict(), with what is sharded as it is on this rank, and whole."""
        found = self._shared.state_dict()
        return {key: (hasattr(value, "to_local"), _whole(value).cpu().numpy().copy()) for key, value in found.items()}

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

    def copy(self, name: str) -> bool:
        """Share a host's copy of a published state with the other ranks. Return whether this one reads."""
        from smb.torch.publishing.host_copy import HostCopy
        from smb.torch.ranks import Ranks

        self._copy = HostCopy(self._client, name, 30.0, None, Ranks(self._mesh, "copy"))
        return self._copy._reads

    def hold(self, generation: int, timeout: float = 30.0, fails: int = -1) -> tuple[dict[str, Any], str]:
        """Return that generation of the copy, and the inode of the memory that it is in. One rank may fail there."""
        with self._copy.held(generation, timeout) as tensors:
            if fails == self._rank:
                raise smb.Error("no room on the device")
            maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
            places = {line[4] for line in maps if line[5:6] == [f"/memfd:smb-{self._copy.name}"]}
            return {name: tensor.tolist() for name, tensor in tensors.items()}, ",".join(places)

    def uncopy(self) -> None:
        """Stop following it."""
        self._copy.close()

    def close(self) -> list[Any]:
        """Leave; return the parameters, whole."""
        self._shared.close()
        return self.values()


def run_rank(inbox: Any, outbox: Any, address: str, store: str, rank: int, ranks: int) -> None:
    """One rank's process: each message is a method of Rank and its arguments. On None it ends."""
    torch.set_num_threads(1)
    backend = BACKEND if ranks == 1 else "gloo"  # NCCL refuses several ranks on one device
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
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


def _like(tensor: Any, values: torch.Tensor) -> torch.Tensor:
    """Return values sharded as a tensor is."""
    from torch.distributed.tensor import distribute_tensor

    if not hasattr(tensor, "to_local"):
        return values
    return distribute_tensor(values.to(DEVICE), tensor.device_mesh, tensor.placements, src_data_rank=None)


def _on_host(tensor: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    group = dist.new_group(backend="gloo")
    mesh = DeviceMesh.from_group(group, "cpu")
    return DTensor.from_local(
        tensor.to_local().cpu(), mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _whole(tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "full_tensor") and not ON_HOST:  # with tensors on a GPU this ends gloo's ranks by SIGSEGV
        tensor = _on_host(tensor)
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
