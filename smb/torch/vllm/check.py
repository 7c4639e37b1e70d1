"""Does a vLLM model take the published tensors? Tried on the meta device, before any value of the model is changed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smb.errors import InvalidArgumentError

_log = logging.getLogger("smb")


def check_fits(name: str, model: Any, tensors: Mapping[str, torch.Tensor], model_config: Any, whole: bool) -> None:
    """Have the model's own load_weights take tensors of these names and shapes that have no values, into parameters
    that have none either. Raises InvalidArgumentError if it does not take them, if tensors are missing (of a `whole`
    state), or if only a part of a fused parameter came.

    The last two are judged as vLLM judges a checkpoint: of models that are not quantized. A model that can't be tried
    in this way is not judged.
    """
    asked = f"{name!r}: this engine's {type(model).__name__} does not take the published tensors"
    counted = _ElementCounts()
    with _on_meta(model) as can_be_tried:
        if not can_be_tried:
            return
        parameters = dict(model.named_parameters())
        try:
            with torch.no_grad(), counted:
                loaded = model.load_weights(
                    (each, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
                    for each, tensor in tensors.items()
                )
        except Exception as error:
            if "meta" in str(error):  # it needs values
                _log.debug("%s: the names and shapes of %r were not tried: %s", type(model).__name__, name, error)
                return
            raise InvalidArgumentError(f"{asked}: {error!r}; publish the names of its checkpoint") from error
        if getattr(model_config, "quantization", None) is not None:
            return
        if whole and loaded is not None and (missing := sorted(parameters.keys() - loaded)):
            raise InvalidArgumentError(
                f"{asked}: nothing was published for {len(missing)} of its parameters, {missing[0]!r} among them; "
                f"publish them too, or only some on purpose (names=)"
            )
        for each, parameter in parameters.items():
            came, wanted = counted.of(parameter), getattr(parameter, "weight_loader_numel", parameter.numel())
            if 0 < came < wanted:
                raise InvalidArgumentError(
                    f"{asked}: only {came:,} of the {wanted:,} elements of {each!r} were published; publish all "
                    f"tensors that it is made of, or none"
                )


class _ElementCounts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements that were set in each tensor's memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts: dict[int, int] = {}

    def of(self, tensor: torch.Tensor) -> int:
        return self._counts.get(tensor.untyped_storage()._cdata, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.fill_, torch.ops.aten.zero_):
            place = args[0].untyped_storage()._cdata
            self._counts[place] = self._counts.get(place, 0) + args[0].numel()
        return func(*args, **(kwargs or {}))


@contextmanager
def _on_meta(model: torch.nn.Module) -> Iterator[bool]:
    """Give the model the parameters and buffers with which it loads a checkpoint, on the meta device, while the block
    runs. Yields False if this vLLM, or this model, has no record of them.
    """
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor
    except ImportError:
        yield False
        return
    layers = list(model.modules())
    kept = [(dict(vars(layer)), [own.copy() for own in _tensors_of(layer)]) for layer in layers]
    try:
        for layer in layers:
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for own in _tensors_of(layer)[:2]:
                for name, tensor in own.items():
                    if tensor is not None:
                        own[name] = twin = to_meta_tensor(tensor)  # the restored one is vLLM's record
                        _unwrap(twin)
        yield any(True for _ in model.parameters())
    finally:
        for layer, (attributes, before) in zip(layers, kept, strict=True):
            for own, entries in zip(_tensors_of(layer), before, strict=True):
                own.clear()  # the same object as before, since others may hold it
                own.update(entries)
            vars(layer).update(attributes)


def _tensors_of(layer: torch.nn.Module) -> list[Any]:
    """Return PyTorch's own records of a module's parameters, buffers, and names of buffers that are not saved."""
    return [vars(layer)[each] for each in ("_parameters", "_buffers", "_non_persistent_buffers_set")]


def _unwrap(tensor: Any) -> None:
    """Give a tensor its own loader, in place of the one that an earlier update put around it."""
    loader: Any = getattr(tensor, "weight_loader", None)
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
        tensor.weight_loader = loader
