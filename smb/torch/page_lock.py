"""Memory that a GPU copies from and to by itself: page locks of CUDA's (cudaHostRegister) on memory that torch has not
made, a segment's mapping above all.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from smb.buffer import Buffer

_log = logging.getLogger("smb")


def page_lock(memory: np.ndarray[Any, np.dtype[Any]]) -> Callable[[], object] | None:
    """Lock an array's pages for CUDA; return what unlocks them, before the memory goes. None if there is no CUDA, or
    it does not: then copies pass through memory of its own, which is slower, and no less right.

    A lock is good for all GPUs. It is asked for by one that the process uses: by another one CUDA would make a context
    there, of some hundred MB.
    """
    if not memory.nbytes or not torch.cuda.is_available():
        return None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, nbytes = int(memory.ctypes.data), memory.nbytes  # not the memory: what unlocks it would keep it
    device = next(iter(_used()), torch.cuda.current_device())
    with torch.cuda.device(device):
        if failure := int(runtime.cudaHostRegister(address, nbytes, 0)):
            _log.info("CUDA does not lock %d bytes in memory (error %d): copies take longer", nbytes, failure)
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # CUDA reports the error at the next launch: this one
            return None

    def unlock() -> None:
        with torch.cuda.device(device):
            if failure := int(runtime.cudaHostUnregister(address)):
                _log.warning("CUDA keeps %d bytes in memory locked (error %d)", nbytes, failure)

    return unlock


def _used() -> list[int]:
    """The GPUs on which this process has tensors."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [number for number in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(number)]


def _wait_for_copies() -> None:
    """Wait until no copy is under way on any GPU that this process uses."""
    for number in _used():
        torch.cuda.synchronize(number)


@contextlib.contextmanager
def mapped(buffer: Buffer) -> Iterator[torch.Tensor]:
    """Yield the buffer's own memory as a tensor of its shape. Works on the server's host only.

    ```python
    with smb.torch.mapped(buffer) as memory:
        tensor.copy_(memory)
    ```

    With CUDA, copies between this memory and a GPU go directly, also with non_blocking=True. The end of the block waits
    for them; do not use the tensor after it. As with Buffer.view, such writes are neither atomic nor ordered against
    others, and no call acknowledges them: tell other processes when the block has ended. Raises TransportError if a
    segment is on another host.
    """
    memory = buffer.view()
    unlock = page_lock(memory)
    with contextlib.ExitStack() as last:
        if unlock is not None:
            last.callback(unlock)
        last.callback(_wait_for_copies)  # also where another block has locked it
        yield torch.from_numpy(memory)
