"""Soft Memory Box: named arrays in the memory of several servers, read, written and added to by many processes at once.

>>> import smb
>>> with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as client:
...     weights = client.create("weights", (1000, 1000), "float32")
...     weights.accumulate(gradient, scale=-0.1)
...     latest = weights.read()
"""

from smb.buffer import Buffer
from smb.buffer_info import BufferInfo
from smb.client import Client, ServerInfo, connect
from smb.cluster import LocalCluster
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
from smb.feedback import ErrorFeedback
from smb.files.open_file import open_file
from smb.layout import Layout
from smb.lock import Lock
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
    "ServerInfo",
    "Tensor",
    "TimeoutError",
    "TransportError",
    "UnavailableError",
    "connect",
    "open_file",
]
__version__ = "0.1.0"
