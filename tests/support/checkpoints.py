"""A rank of a checkpoint's test: `python -m tests.support.checkpoints WHAT RANK WORLD STORE COORDINATOR NAME SEED`.

save      builds the model of that seed, sharded over WORLD ranks, and saves it with its optimizer
kill      the same, but the last rank is killed with SIGKILL after some of its tensors were written
async     saves by async_save, and spoils the model as soon as the call has returned
load      builds one of other values, loads, and compares all with the model of that seed, to the last bit
refused   saves what can't be loaded safely, and says what each rank was told
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import smb.torch.checkpoint

_STEPS = 3


def model_of(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model that some steps were made with: extents that no number of ranks divides, a dtype of two bytes, and a
    tensor of 10 MB, more than what is packed."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(37, 13), torch.nn.Linear(13, 5), torch.nn.Linear(1601, 1603))
    model[1].to(torch.bfloat16)
    model.register_buffer("count", torch.tensor(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + seed % 7), foreach=False)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    for _ in range(_STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    return model, optimizer


def state_of(seed: int, mesh: DeviceMesh) -> tuple[dict[str, Any], torch.nn.Module, torch.optim.Optimizer]:
    """The same as DTensors: rows of the one, columns of the other over the ranks."""
    model, optimizer = model_of(seed)
    for name, parameter in list(model.named_parameters()):
        place = [Shard(1 if name == "0.weight" else 0)]
        sharded = torch.nn.Parameter(distribute_tensor(parameter.data, mesh, place))
        module = model.get_submodule(name.rpartition(".")[0])
        setattr(module, name.rpartition(".")[2], sharded)
        state = optimizer.state.pop(parameter)
        optimizer.state[sharded] = {
            key: distribute_tensor(value, mesh, place) if value.dim() else value for key, value in state.items()
        }
        group = optimizer.param_groups[0]["params"]
        group[next(at for at, known in enumerate(group) if known is parameter)] = sharded
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": seed, "note": "näher"}, model, optimizer


class _Killed(DefaultSavePlanner):  # type: ignore[misc] # torch's decorator hides its type
    """Kills its process at the fifth tensor."""

    left = 5

    def resolve_data(self, write_item: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def main() -> None:
    """See above."""
    what, rank, world, store, coordinator, name, seed = sys.argv[1:]
    last = int(rank) == int(world) - 1
    dist.init_process_group("gloo", f"file://{store}", rank=int(rank), world_size=int(world))
    mesh = init_device_mesh("cpu", (int(world),))
    with smb.connect(coordinator, timeout=30) as client:
        writer = smb.torch.checkpoint.Writer(client, name)
        if what == "load":
            _load(client, mesh, name, int(seed))
        elif what == "refused":
            try:
                dcp.save({"file": _Foreign()}, storage_writer=writer)
            except dcp.CheckpointException as error:
                print(type(error.failures[int(world) - 1][0]).__name__, error)
        elif what == "async":
            state = state_of(int(seed), mesh)[0]
            saved = dcp.async_save(state, storage_writer=writer)
            for tensor in [*state["model"].values(), *_tensors_of(state["optimizer"])]:
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
            saved.result()
        else:
            state = state_of(int(seed), mesh)[0]
            dcp.save(state, storage_writer=writer, planner=_Killed() if what == "kill" and last else None)
    dist.destroy_process_group()


class _Foreign:
    """Nothing that the restricted loader knows."""


def _tensors_of(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for part in parts for tensor in _tensors_of(part)]


def _load(client: smb.Client, mesh: DeviceMesh, name: str, seed: int) -> None:
    state, model, optimizer = state_of(seed + 1, mesh)
    dcp.load(state, storage_reader=smb.torch.checkpoint.Reader(client, name))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    wanted, _, _ = state_of(seed, mesh)
    compared = 0
    pairs = zip(_tensors_of(list(get_state_dict(model, optimizer))), _tensors_of(list(wanted.values())), strict=False)
    for found, expected in pairs:
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in (found, expected)]
        assert torch.equal(*whole), (found, expected)
        compared += found.numel()
    assert state["step"] == seed
    assert state["note"] == "näher"
    assert optimizer.param_groups[0]["lr"] == 0.01 * (1 + seed % 7)
    print("same", compared)


if __name__ == "__main__":
    main()
