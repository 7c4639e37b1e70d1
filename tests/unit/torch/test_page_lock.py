"""Page locks, with a stand-in for CUDA's runtime: no GPU is needed, and none has run them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import smb
import smb.torch
from smb.torch.page_lock import page_lock


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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.asked.append("synchronize"))


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
        assert runtime.asked[1:] == ["synchronize", ("unregister", address)]
        assert (buffer.read() == 2).all()
        with pytest.raises(ZeroDivisionError), smb.torch.mapped(buffer):
            raise ZeroDivisionError
        assert [each[0] for each in runtime.asked[3:] if each != "synchronize"] == ["register", "unregister"]


def test_what_cuda_refuses_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is unlocked then; nothing is asked where there is no CUDA, or no memory."""
    runtime, memory = Runtime(failure=712), np.zeros(10)
    assert page_lock(memory) is None
    _cuda(monkeypatch, runtime)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: runtime.asked.append("a launch that takes the error"))
    assert page_lock(np.empty(0)) is None
    assert page_lock(memory) is None
    assert runtime.asked == [("register", memory.ctypes.data, 80, 0), "a launch that takes the error"]
