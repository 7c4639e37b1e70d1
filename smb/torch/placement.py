"""Parameters placed in one array of the client's memory.

Placed parameters are views of one array that has the layout of the group's buffer. An exchange of exact values in one
call receives into it, without an array between, and over RDMA the network card writes into the parameters. Any exchange
computes and copies over the whole array, not tensor by tensor. The array has large pages if the system has them.

Nothing else depends on a placement: each exchange looks where the tensors are (model_parameters.py), and copies those
that were moved since, as by model.to(), like those of any other model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import smb
from smb.errors import InvalidArgumentError
from smb.tensors import TensorTable
from smb.torch.tensor_values import lasting
from smb.torch.training.model_parameters import address_of, lay_out, note_placement
from smb.torch.training.model_tensors import parts_of
from smb.train.parameters import Values


@dataclass(frozen=True, slots=True)
class Placement:
    """The arrays in which smb.torch.place has put a model's parameters and gradients, float32 (n,).

    `table` says where each tensor lies, by its name; the elements between two tensors are zero. `gradients` is None
    unless gradients=True.
    """

    values: Values
    gradients: Values | None
    table: TensorTable

    def __repr__(self) -> str:
        also = "" if self.gradients is None else ", gradients too"
        return f"<smb.torch.Placement of {len(self.table)} tensors, {self.values.nbytes:,} bytes{also}>"


@lasting
def place(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, client: smb.Client, *, gradients: bool = False
) -> Placement:
    """Make the trained parameters views of one array of the client's memory (Client.empty), in the layout of a
    training's buffer. Call it before smb.torch.join, with the same client.

    ```python
    smb.torch.place(model, optimizer, client)
    with smb.torch.join(model, optimizer, "digits", client=client, scheme="asp") as shared:
        optimizer.step()
    ```

    The model, its optimizer's state and their values stay what they are, and training gives the same bits. An exchange
    of ASP, SSP and R2SP with wire="exact" then receives straight into the parameters (docs/training.md says what that
    saves). Tied parameters have one place. Frozen parameters and buffers stay where they are.

    A placement lasts as long as the tensors stay in the array. load_state_dict(), an optimizer's step and zero_grad()
    leave them there. `model.to(...)` to another device or dtype, and load_state_dict(assign=True), take them out: then
    they are copied at each exchange as before, which `Shared.explain()` shows. A copy of the model (copy.deepcopy) has
    memory of its own. torch.save of one tensor alone saves the whole array; save tensor.clone() instead. Over RDMA a
    child of fork shares the array: what it writes into the parameters is in the parent's, too. Let it train a copy.

    With gradients=True the gradients become views of a second array, zero at first, for calls of your own, such as
    `buffer.apply("sgd", placement.gradients, lr=0.1)`; schemes send no gradients. They stay there only with
    `optimizer.zero_grad(set_to_none=False)`, and a parameter that a step does not use then has the gradient zero, not
    None, which some optimizers treat differently.

    Takes as much memory as the parameters, once more while they are copied. Makes no call. Raises InvalidArgumentError
    if a trained parameter is not contiguous float32 in host memory, or if the model can't be shared, and
    OutOfMemoryError or TransportError as Client.empty does; the model is unchanged then.
    """
    trained = parts_of(model, optimizer).trained
    for names, tensor in trained.items():
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
            raise InvalidArgumentError(
                f"smb.torch.place: parameter {names[0]!r} is {tensor.dtype} on {tensor.device}; only float32 in host "
                f"memory can be placed. smb.torch.join trains it where it is, through pinned memory for a GPU"
            )
        if not tensor.is_contiguous():  # an optimizer's state has its strides, and fused steps rely on that
            raise InvalidArgumentError(
                f"smb.torch.place: parameter {names[0]!r} is not contiguous: its strides are {tensor.stride()}, as "
                f"with memory_format=torch.channels_last. Make it contiguous before its optimizer, or do not place it: "
                f"smb.torch.join trains it where it is"
            )
    table, entries = lay_out(trained)
    values: Values = client.empty(table.size)
    slopes: Values | None = client.empty(table.size) if gradients else None
    note_placement(values)
    with torch.no_grad():
        here = torch.from_numpy(values)
        for entry in entries:
            entry.of(here).copy_(entry.tensor)
        if slopes is not None:
            there = torch.from_numpy(slopes)
            for entry in entries:
                if entry.tensor.grad is not None:
                    entry.of(there).copy_(entry.tensor.grad)
        for entry in entries:  # from here on nothing fails
            entry.tensor.data = entry.of(here)
            if slopes is not None:
                entry.tensor.grad = entry.of(there)
    assert address_of(entries) == values.ctypes.data
    return Placement(values, slopes, table)
