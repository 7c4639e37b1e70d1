"""Page locks, with a stand-in for CUDA's runtime: no GPU is needed. tests/support/device_cases.py has them on one."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import smb
import smb.torch
from smb.torch.page_lock import page_lock
from smb.torch.publishing.state_bytes import StateBytes


class Runtime:
    """Writes down what is asked of it."""

    def __init__(self, failure: int = 0) -> None:
        self.asked: list[Any] = []
        self._failure = failure

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.asked.append(("register", address, nbytes, flags))
        return self._failure

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self.asked.append(("unregister", address))
        return 0


def _cuda(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    """Two GPUs, of which this process uses the second one."""

    @contextlib.contextmanager
    def device(number: int) -> Iterator[None]:
        assert number == 1
        yield

    for name, stand_in in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "memory_reserved": lambda number: number << 20,
        "current_device": lambda: 0,
        "device": device,
        "cudart": lambda: runtime,
        "synchronize": lambda number: runtime.asked.append(f"synchronize {number}"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)


def test_a_buffers_memory_is_locked_while_the_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locked first; copies are waited for before it is unlocked, also where the block raises."""
    runtime = Runtime()
    with smb.LocalCluster(servers=2, capacity="8MiB") as cluster, smb.connect(cluster.address) as client:
        buffer = client.create("b", (3, 1000))
        _cuda(monkeypatch, runtime)
        with smb.torch.mapped(buffer) as memory:
            ((_, address, nbytes, flags),) = runtime.asked
            assert (address, nbytes, flags) == (memory.data_ptr(), 12_000, 0)
            memory.copy_(torch.full((3, 1000), 2.0))
        assert runtime.asked[1:] == ["synchronize 1", ("unregister", address)]
        assert (buffer.read() == 2).all()
        with pytest.raises(ZeroDivisionError), smb.torch.mapped(buffer):
            raise ZeroDivisionError
        assert [each[0] for each in runtime.asked[3:] if each != "synchronize 1"] == ["register", "unregister"]


def test_copies_are_waited_for_where_another_block_has_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses to lock memory a second time; copies from and to it go on beside the host all the same."""
    runtime = Runtime(failure=712)
    with smb.LocalCluster(servers=1, capacity="8MiB") as cluster, smb.connect(cluster.address) as client:
        buffer = client.create("b", 1000)
        _cuda(monkeypatch, runtime)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
        with smb.torch.mapped(buffer):
            pass
    assert runtime.asked[1:] == ["synchronize 1"]


def test_what_cuda_refuses_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is unlocked then; nothing is asked where there is no CUDA, or no memory."""
    runtime, memory = Runtime(failure=712), np.zeros(10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert page_lock(memory) is None
    _cuda(monkeypatch, runtime)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: runtime.asked.append("a launch that takes the error"))
    assert page_lock(np.empty(0)) is None
    assert page_lock(memory) is None
    assert runtime.asked == [("register", memory.ctypes.data, 80, 0), "a launch that takes the error"]


def test_a_states_memory_is_locked_once_it_goes_to_a_gpu_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for tensors of the host's; once, and for as long as anything of the memory is in use."""
    runtime = Runtime()
    with smb.LocalCluster(servers=1, capacity="8MiB") as cluster, smb.connect(cluster.address) as client:
        state = StateBytes(client.create("b", tensors={"weight": ((100,), "float32")}))
        _cuda(monkeypatch, runtime)
        address, there = state.bytes.ctypes.data, [torch.ones(1), torch.ones(1, device="meta")]
        for _ in range(3):
            state.take({"weight": torch.ones(100)})
        state.hold(there)
        assert not runtime.asked
        for _ in range(2):
            state.hold(there)
        assert runtime.asked == [("register", address, 400, 0)]
        kept = state.tensors["weight"]
        del state
        gc.collect()
        assert len(runtime.asked) == 1
        assert kept.sum() == 100
        del kept
        gc.collect()
        assert runtime.asked[1:] == [("unregister", address)]
