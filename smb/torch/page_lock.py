"""Memory that a GPU copies from and to directly: CUDA page locks (cudaHostRegister) on memory that torch has not made,
most of all on the mapping of a segment.
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
    """Lock an array's pages for CUDA. Returns a function that unlocks them, to be called before the memory goes.
    Returns None if there is no CUDA, or if CUDA refuses; then copies pass through CUDA's own memory, which is slower
    and gives the same result.

    A lock holds for all GPUs. It is requested on a GPU that the process already uses; on another one CUDA would make a
    context of several hundred MB.
    """
    if not memory.nbytes or not torch.cuda.is_available():
        return None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    # `unlock` must not refer to the memory, which it would keep alive.
    address, nbytes = int(memory.ctypes.data), memory.nbytes
    device = next(iter(_used()), torch.cuda.current_device())
    with torch.cuda.device(device):
        if failure := int(runtime.cudaHostRegister(address, nbytes, 0)):
            _log.info("CUDA does not lock %d bytes in memory (error %d): copies take longer", nbytes, failure)
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # CUDA reports the error at the next launch, which is this one
            return None

    def unlock() -> None:
        with torch.cuda.device(device):
            if failure := int(runtime.cudaHostUnregister(address)):
                _log.warning("CUDA could not unlock %d bytes of memory, which stay locked (error %d)", nbytes, failure)

    return unlock


def _used() -> list[int]:
    """Return the GPUs on which this process has tensors."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [number for number in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(number)]


def _wait_for_copies() -> None:
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
        last.callback(_wait_for_copies)  # also if another block has locked the memory
        yield torch.from_numpy(memory)
