"""A model's tensors, by names that are the same in all processes of a training, whatever wraps the model in each.

torch.compile puts `_orig_mod.` into names, DistributedDataParallel and DataParallel put `module.`; both are removed. A
tensor with several names (tied parameters) counts once.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from smb.errors import Error, InvalidArgumentError
from smb.torch.tensor_slices import is_sharded, local_of
from smb.torch.tensor_values import changing, is_extra_state, lasting, plain
from smb.torch.training.model_parameters import TensorEntry, check, check_apart, lay_out
from smb.train.parameters import Values

STATISTICS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COMPILED = "_orig_mod"
_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
_SAMPLES = 16  # number of samples of a frozen parameter that its digest contains

Named: TypeAlias = dict[tuple[str, ...], torch.Tensor]


@dataclass(frozen=True)
class ModelTensors:
    """A model's tensors, each with all its names. `trained`: parameters that the optimizer has or that require
    gradients; `frozen`: the other parameters; `statistics`: floating-point buffers. Integer and float64 buffers belong
    to each process, and so do buffers with infinities, which are masks and have no mean.
    """

    trained: Named
    frozen: Named
    statistics: Named


def plain_name(model: torch.nn.Module, name: str) -> str:
    """Return a name of the model's state_dict without the parts that wrappers of the model or of its modules add."""
    kept: list[str] = []
    module: torch.nn.Module | None = model
    for step in name.split("."):
        wrapped = step == _COMPILED or (step == "module" and isinstance(module, _WRAPPERS))
        if not wrapped:
            kept.append(step)
        module = module._modules.get(step) if module is not None else None
    return ".".join(kept)


def plain_state(model: torch.nn.Module, **options: Any) -> dict[str, Any]:
    """Return model.state_dict(...) by plain names."""
    return {plain_name(model, name): value for name, value in model.state_dict(**options).items()}


def parts_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool = False) -> ModelTensors:
    """Divide the tensors of model.state_dict(). Raises InvalidArgumentError if the model can't be shared. With
    `sharded`, trained tensors may be sharded, and are not checked here.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise InvalidArgumentError(
            "the model is wrapped by FullyShardedDataParallel (FSDP1), which keeps parameters as parts of flat "
            "tensors: shard it by fully_shard (FSDP2), and join with mesh="
        )
    named: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in plain_state(model, keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and not is_extra_state(name):  # extra state is made anew each time
            named.setdefault(id(tensor), ([], tensor))[0].append(name)
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if strangers := len(optimized - {id(parameter) for parameter in model.parameters()}):
        raise InvalidArgumentError(
            f"the optimizer trains {strangers} tensors that are not parameters of the model, so they would not be "
            f"shared. Join with a module that contains all of them (torch.nn.ModuleList)"
        )
    parts = ModelTensors({}, {}, {})
    for identity, (names, tensor) in named.items():
        if isinstance(tensor, torch.nn.Parameter) and (tensor.requires_grad or identity in optimized):
            parts.trained[tuple(names)] = tensor
        elif isinstance(tensor, torch.nn.Parameter):
            parts.frozen[tuple(names)] = tensor
        elif tensor.dtype in STATISTICS_DTYPES and not tensor.is_meta and tensor.numel() and not _is_mask(tensor):
            parts.statistics[tuple(names)] = tensor
    kept = {id(parameter) for parameter in parts.trained.values()}
    for name, parameter in model.named_parameters():
        if (parameter.requires_grad or id(parameter) in optimized) and id(parameter) not in kept:
            raise InvalidArgumentError(
                f"parameter {name!r} is trained, but is not in the model's state_dict() (does a hook remove or copy "
                f"it?), so it would not be shared. Freeze it, or join with the inner module that has it"
            )
    if not parts.trained:
        raise InvalidArgumentError("the model has no parameter that requires gradients, so there is nothing to share")
    if not sharded:
        for every, tensor in parts.trained.items():
            check(every[0], tensor)
        check_apart(parts.trained)
    return parts


def _is_mask(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has infinities, as a causal mask has. NaN does not count, since statistics become NaN
    by mistake.
    """
    here = local_of(tensor.detach())
    return bool(here.isinf().any()) and not bool(here.isnan().any())


class Statistics:
    """Floating-point buffers, as one vector of copies in host memory."""

    @lasting
    def __init__(self, tensors: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        self.table, self.entries = lay_out(tensors)
        self.vector = torch.zeros(self.table.size, dtype=torch.float32, device="cpu")
        self.values: Values = self.vector.numpy()

    def collect(self) -> None:
        """Copy the model's values into the vector."""
        for entry in self.entries:
            entry.of(self.vector).copy_(entry.tensor.detach())

    def spread(self) -> None:
        """Copy the vector into the model."""
        for entry in self.entries:
            with torch.no_grad(), changing([entry.tensor]):
                entry.tensor.detach().copy_(entry.of(self.vector))


class ModelCheck:
    """Checks the conditions that a joined model must meet at each exchange. The time grows with the number of tensors,
    not of elements.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, entries: tuple[TensorEntry, ...], frozen: Named
    ) -> None:
        self._model = model
        self._optimizer = weakref.ref(optimizer)  # the optimizer's hook keeps the membership: see Shared
        self._entries = entries
        self._frozen = frozen

    def __call__(self) -> None:
        """Raise Error if a parameter is trained but not shared, or shared but no longer in the model."""
        self.model()
        ours = {id(entry.tensor) for entry in self._entries}
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        given = {id(each) for group in groups for each in group["params"]}
        if strangers := len(given - ours):
            raise Error(
                f"the optimizer was given {strangers} further parameters after smb.torch.join (by add_param_group), "
                f"and they would not be shared. Give all parameters to the optimizer before joining"
            )
        for names, tensor in self._frozen.items():
            if tensor.requires_grad:
                raise Error(
                    f"parameter {names[0]!r} was frozen at smb.torch.join and requires gradients now, but is not "
                    f"shared. Give it to the optimizer before joining; then it is shared"
                )

    def model(self) -> None:
        """Raise Error if parameters of the model were replaced."""
        now = {id(tensor) for tensor in self._model.parameters()}
        if gone := [entry.names[0] for entry in self._entries if id(entry.tensor) not in now]:
            raise Error(
                f"{', '.join(gone[:3])} of the model were replaced after smb.torch.join (by another module, or "
                f"load_state_dict(assign=True)); replace parameters before joining"
            )


def mark_of(frozen: Named) -> dict[str, str]:
    """Return digests of the frozen parameters: of their types, and of some of their values. Reads a few elements of
    each.
    """
    types, values = hashlib.sha256(), hashlib.sha256()
    for names, tensor in sorted(frozen.items()):
        types.update(f"{names[0]} {tuple(tensor.shape)} {tensor.dtype};".encode())
        if tensor.numel() == 0 or tensor.device.type == "meta" or is_sharded(tensor):
            continue
        # The samples are spread over the first dimension, and over the elements of each row.
        rows = tensor.detach()
        rows = rows[:: max(1, len(rows) // _SAMPLES)][:_SAMPLES] if rows.dim() else rows
        some = rows.reshape(-1)[:: max(1, rows.numel() // _SAMPLES)][:_SAMPLES]
        values.update(plain(some).view(torch.uint8).numpy().tobytes())
    return {"types": types.hexdigest(), "values": values.hexdigest()}
