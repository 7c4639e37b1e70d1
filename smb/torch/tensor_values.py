"""A tensor's values, whatever its bits and the mode in which it was made: for all that copies from or to tensors.

A tensor's memory holds the negative of its values where its negative bit is set, and their conjugates where its
conjugate bit is. PyTorch's own copies heed that; who takes a tensor's address has to. A tensor that was made in
torch.inference_mode() can be read anywhere, and changed only in that mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from smb.errors import InvalidArgumentError

Function = TypeVar("Function", bound=Callable[..., object])

EXTRA_STATE = "_extra_state"  # torch.nn.Module: the last part of a name of what get_extra_state() gives


def check_dense(asked: str, name: str, tensor: torch.Tensor, *, with_values: bool = True) -> None:
    """Raise InvalidArgumentError for a tensor that is not one dense piece of memory, or has no values."""
    if hasattr(tensor, "get_mask"):  # torch.masked's
        raise InvalidArgumentError(f"{asked}: {name!r} has a mask, which is not stored; pass tensor.to_tensor(0), say")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise InvalidArgumentError(f"{asked}: {name!r} is sparse, nested or quantized; pass a dense tensor")
    if with_values and tensor.is_meta:
        raise InvalidArgumentError(
            f"{asked}: {name!r} is on the meta device, which holds no values; pass one with some"
        )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values in the host's memory, contiguous and without bits: itself where it is so.

    Raises InvalidArgumentError for one that wraps others, whose address leads nowhere.
    """
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    try:
        held = host.data_ptr() != 0 or host.numel() == 0
    except RuntimeError:
        held = False
    if not held:
        raise InvalidArgumentError(
            f"a {type(tensor).__name__} wraps others, and has no memory of its own; pass a plain tensor"
        )
    return host


def has_bits(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are others than its memory holds."""
    return tensor.is_conj() or tensor.is_neg()


def lasting(make: Function) -> Function:
    """Decorate what makes tensors that are kept: they can be changed later, whatever mode they are made in."""
    return torch.inference_mode(False)(make)  # type: ignore[no-any-return, unused-ignore]


def changing(tensors: Iterable[torch.Tensor]) -> torch.inference_mode:
    """Return the context in which these tensors can be changed."""
    return torch.inference_mode(any(tensor.is_inference() for tensor in tensors))


def is_extra_state(name: str) -> bool:
    """Whether it is the name of what a module's get_extra_state() gives, which may be anything."""
    return name.rpartition(".")[2] == EXTRA_STATE


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements of a dense tensor are one in memory, along some dimension."""
    if tensor.layout != torch.strided:
        return False
    return any(stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))
