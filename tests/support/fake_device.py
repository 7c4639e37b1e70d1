"""A fake accelerator, "fake", on PyTorch's PrivateUse1: its memory is the host's, its copies come late.

A non_blocking copy on one of its streams is made late: when an event after it is waited for, when another stream waits
for that stream, or when something else runs on it. It reads its source only then. So a synchronisation that is left out
shows in the values. A stream that reads what the main stream has computed, without having waited for it, raises.

To register a device changes a whole process: import this in processes that have nothing else to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fake"
copies: list[tuple[str, int, bool]] = []
"""(way, bytes, non_blocking) of each copy across the border, "fake->cpu" or "cpu->fake"."""

_setup_privateuseone_for_python_backend(NAME)
_hosts: dict[int, torch.Tensor] = {}  # by storage: autograd copies the C++ part of a tensor alone
_current: list[Stream] = []
_computed = [0]  # operations of the main stream so far


class FakeTensor(torch.Tensor):
    """A tensor on the device; `host` has its elements."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> FakeTensor:
        made = torch._C._acc.create_empty_tensor(tuple(host.shape), host.dtype)
        made.__class__ = FakeTensor
        return made  # type: ignore[no-any-return]

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host
        _hosts[self.untyped_storage()._cdata] = host

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def stride(self, *dim: int) -> Any:
        return self.host.stride(*dim)

    def is_contiguous(self, **options: Any) -> bool:
        return self.host.is_contiguous(**options)

    def reshape(self, *shape: Any) -> FakeTensor:
        return FakeTensor(self.host.reshape(*shape))


class Stream:
    """This device's torch.Stream."""

    def __init__(self, device: object = None) -> None:
        self.late: list[Callable[[], object]] = []
        self.made = 0  # of the late ones so far
        self.saw = -1  # operations of the main stream that it has waited for

    def run(self, until: int | None = None) -> None:
        """Make the late copies, up to the until-th of all."""
        while self.late and (until is None or self.made < until):
            self.late.pop(0)()
            self.made += 1

    def wait_stream(self, other: Stream) -> None:
        other.run()
        self.saw = _computed[0]

    def __enter__(self) -> Stream:
        _current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.pop()


class Event:
    """This device's torch.Event."""

    def __init__(self, device: object = None) -> None:
        self._stream: Stream | None = None
        self._until = 0

    def record(self, stream: Stream) -> None:
        self._stream, self._until = stream, stream.made + len(stream.late)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.run(self._until)


_main = Stream()
torch.Stream = Stream  # type: ignore[assignment,misc]
torch.Event = Event  # type: ignore[assignment,misc]
torch.accelerator.current_stream = lambda device=None: _main  # type: ignore[assignment,return-value]


def _is_fake(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _host(value: Any) -> Any:
    if not _is_fake(value):
        return value
    return value.host if isinstance(value, FakeTensor) else _hosts[value.untyped_storage()._cdata]


def _operate(op: Any, *args: Any, **options: Any) -> Any:
    """Any other operation: on the host's elements, at once; before it what is late on its stream."""
    if _current:
        _current[-1].run()
    else:
        _computed[0] += 1
    given: dict[int, Any] = {}

    def down(value: Any) -> Any:
        if _is_fake(value):
            host = _host(value)
            given[id(host)] = value
            return host
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value

    def up(value: Any) -> Any:  # an operation in place returns its own argument
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        return given[id(value)] if id(value) in given else FakeTensor(value)

    options = {key: down(value) for key, value in tree_map(down, options).items() if key != "pin_memory"}
    return tree_map(up, op(*tree_map(down, args), **options))


_all = torch.library.Library("_", "IMPL")
_all.fallback(_operate, "PrivateUse1")
_aten = torch.library.Library("aten", "IMPL")


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    way = f"{source.device.type}->{target.device.type}"
    given, taken = _host(source), _host(target)
    stream = _current[-1] if _current else None
    if source.device != target.device:
        copies.append((way, given.numel() * given.element_size(), non_blocking))
        if stream is not None and _is_fake(source) and stream.saw < _computed[0]:
            raise AssertionError("a stream copies what the main stream has computed without having waited for it")
    if stream is not None and non_blocking:
        stream.late.append(functools.partial(taken.copy_, given))
    else:
        if stream is not None:
            stream.run()
        elif _is_fake(target):
            _computed[0] += 1
        taken.copy_(given)
    return target


def _view(op: Any) -> Callable[..., FakeTensor]:
    return lambda tensor, *args, **options: FakeTensor(op(_host(tensor), *args, **options))


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> FakeTensor:
    return FakeTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> FakeTensor:
    return FakeTensor(torch.empty_strided(size, stride, dtype=dtype))


_aten.impl("empty.memory_format", _empty, "PrivateUse1")
_aten.impl("empty_strided", _empty_strided, "PrivateUse1")
_aten.impl("_copy_from", _copy, "PrivateUse1")
_aten.impl("_local_scalar_dense", lambda tensor: _host(tensor).item(), "PrivateUse1")
# Views share the host's memory. C++'s own would go by the device's strides, which a tensor made in Python has not.
for _name in (
    "view", "as_strided", "detach", "t", "transpose.int", "permute", "expand", "select.int", "slice.Tensor",
    "unsqueeze", "squeeze.dim", "diagonal", "alias", "unfold", "_reshape_alias", "_unsafe_view",
):  # fmt: skip
    _packet, _, _overload = _name.partition(".")
    _aten.impl(_name, _view(getattr(getattr(torch.ops.aten, _packet), _overload or "default")), "PrivateUse1")
