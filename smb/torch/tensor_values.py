"""A tensor's values, whatever its bits and the mode in which it was made, for all code that copies from or to tensors.

If a tensor's negative bit is set, its memory holds the negative of its values; if its conjugate bit is set, their
conjugates. PyTorch's own copies take care of this; code that uses a tensor's address has to do so itself. A tensor that
was made in torch.inference_mode() can be read anywhere, but changed only in that mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from smb.errors import InvalidArgumentError

Function = TypeVar("Function", bound=Callable[..., object])

EXTRA_STATE = "_extra_state"  # last part of the name under which torch.nn.Module stores the result of get_extra_state()


def check_dense(asked: str, name: str, tensor: torch.Tensor, *, with_values: bool = True) -> None:
    """Raise InvalidArgumentError for a tensor that is not one dense piece of memory, or has no values."""
    if hasattr(tensor, "get_mask"):  # a tensor of torch.masked
        raise InvalidArgumentError(
            f"{asked}: {name!r} has a mask, which can't be stored; pass a plain tensor, such as tensor.to_tensor(0)"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise InvalidArgumentError(f"{asked}: {name!r} is sparse, nested or quantized; pass a dense tensor")
    if with_values and tensor.is_meta:
        raise InvalidArgumentError(
            f"{asked}: {name!r} is on the meta device, which holds no values; pass a tensor with values"
        )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values in host memory, contiguous and with no bit set; the tensor itself if it is like this.

    Raises InvalidArgumentError for a tensor that wraps others, because its address is not that of its values.
    """
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    try:
        held = host.data_ptr() != 0 or host.numel() == 0
    except RuntimeError:
        held = False
    if not held:
        raise InvalidArgumentError(
            f"a {type(tensor).__name__} wraps other tensors and has no memory of its own; pass a plain tensor"
        )
    return host


def has_bits(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's memory holds the negative or the conjugate of its values."""
    return tensor.is_conj() or tensor.is_neg()


def lasting(make: Function) -> Function:
    """Decorate a function whose tensors are kept, so that they can be changed later in any mode."""
    return torch.inference_mode(False)(make)  # type: ignore[no-any-return, unused-ignore]


def changing(tensors: Iterable[torch.Tensor]) -> torch.inference_mode:
    """Return the context in which these tensors can be changed."""
    return torch.inference_mode(any(tensor.is_inference() for tensor in tensors))


def is_extra_state(name: str) -> bool:
    """Return True if this is a name of a module's get_extra_state(), which may return anything."""
    return name.rpartition(".")[2] == EXTRA_STATE


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return True if several elements of a dense tensor share one place in memory, along some dimension."""
    if tensor.layout != torch.strided:
        return False
    return any(stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))
