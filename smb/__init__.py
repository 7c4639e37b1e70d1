"""Soft Memory Box: named arrays in the memory of several servers, read, written and added to by many processes at once.

```python
import numpy as np
import smb

with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as client:
    weights = client.create("weights", (1000, 1000), "float32")
    weights.accumulate(np.ones((1000, 1000), np.float32), scale=-0.1)
    latest = weights.read()
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from smb.errors import (
    AlreadyExistsError,
    BrokenBarrierError,
    Error,
    InvalidArgumentError,
    LockLostError,
    NotFoundError,
    OutOfMemoryError,
    PermissionDeniedError,
    TimeoutError,  # noqa: A004 - the contract's name
    TransportError,
    UnavailableError,
)

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.buffer_info import BufferInfo
    from smb.client import Client, connect
    from smb.cluster import LocalCluster
    from smb.config.cancellation import to_thread
    from smb.feedback import ErrorFeedback
    from smb.files.open_file import open_file
    from smb.layout import Layout
    from smb.lock import Lock
    from smb.queue import Queue
    from smb.server_info import ServerInfo
    from smb.tensors import Tensor

__all__ = [
    "AlreadyExistsError",
    "BrokenBarrierError",
    "Buffer",
    "BufferInfo",
    "Client",
    "Error",
    "ErrorFeedback",
    "InvalidArgumentError",
    "Layout",
    "LocalCluster",
    "Lock",
    "LockLostError",
    "NotFoundError",
    "OutOfMemoryError",
    "PermissionDeniedError",
    "Queue",
    "ServerInfo",
    "Tensor",
    "TimeoutError",
    "TransportError",
    "UnavailableError",
    "connect",
    "open_file",
    "to_thread",
]
__version__ = "0.1.0"

# A daemon and most commands need no client, so its modules are imported when one of these names is first used.
_MODULES = {
    "Buffer": "smb.buffer",
    "BufferInfo": "smb.buffer_info",
    "Client": "smb.client",
    "ErrorFeedback": "smb.feedback",
    "Layout": "smb.layout",
    "LocalCluster": "smb.cluster",
    "Lock": "smb.lock",
    "Queue": "smb.queue",
    "ServerInfo": "smb.server_info",
    "Tensor": "smb.tensors",
    "connect": "smb.client",
    "open_file": "smb.files.open_file",
    "to_thread": "smb.config.cancellation",
}
# Imported by `import smb.torch`, or when they are first used. A notebook completes their names.
_PACKAGES = ("metrics", "ray", "torch", "train")

if not TYPE_CHECKING:  # otherwise mypy would accept every misspelt name

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            try:
                return import_module(f"smb.{name}")
            except (ImportError, Error) as error:  # what it needs is not installed; help() and hasattr() go on
                raise AttributeError(str(error)) from error
        if name not in _MODULES:
            raise AttributeError(f"module 'smb' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
