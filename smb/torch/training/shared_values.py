"""A training's shared values as a model's state_dict() has them: under its names, in its dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

import smb
import smb.train
from smb.errors import NotFoundError
from smb.torch.tensor_values import lasting
from smb.torch.training.admission import TIED, table_of
from smb.torch.training.mixed_statistics import STATE
from smb.torch.training.model_parameters import TensorEntry
from smb.torch.training.model_tensors import plain_name


@lasting
def shared_state_dict(client: smb.Client, name: str) -> dict[str, torch.Tensor]:
    """Return a group's shared values by name, without taking part: float32 tensors on the CPU, exact.

    ```python
    model.load_state_dict(smb.torch.shared_state_dict(client, "digits"), strict=False)
    ```

    Frozen parameters, and integer and float64 buffers, belong to each process and are not in the result; pass
    strict=False if the model has some. (PyTorch accepts a state without batch normalisation's num_batches_tracked.)
    Blocks for two reads. Raises NotFoundError, and InvalidArgumentError for a group that was not made by
    smb.torch.join.
    """
    pairs = [(client.open(name), smb.train.shared(client, name))]
    with contextlib.suppress(NotFoundError):
        state = client.open(f"{name}/{STATE}")
        pairs.append((state, state.read(wire="exact")))
    found: dict[str, torch.Tensor] = {}
    for buffer, values in pairs:
        metadata = buffer.metadata
        table = table_of(buffer)
        found |= {key: torch.from_numpy(array) for key, array in table.views(values).items()}
        found |= {other: found[key] for other, key in metadata.get(TIED, {}).items()}
    return found


def state_with(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the model's state_dict() in new memory, with these values in place of its own where given."""
    own: dict[str, Any] = model.state_dict()
    for key, value in own.items():
        if isinstance(value, torch.Tensor):
            # Tensors that are not shared (integers) are copied too, so that no returned tensor shares memory with the
            # model.
            shared = values.get(plain_name(model, key))
            own[key] = value.detach().clone() if shared is None else shared.to(value.device)
    return own


def values_of(entries: Iterable[TensorEntry], vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a vector under all their names, in the model's dtypes; tied names get the same tensor."""
    found: dict[str, torch.Tensor] = {}
    for entry in entries:
        value = entry.of(vector).to(entry.tensor.dtype)
        found |= dict.fromkeys(entry.names, value)
    return found
