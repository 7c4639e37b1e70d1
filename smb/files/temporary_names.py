"""Names of buffers on their way to a name, or without one: in a folder PRIVATE, which is not shown.

It is in the namespace of the file in question: who may use the one may use the other, and its quota counts both.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import socket
import time
from pathlib import Path

from smb.buffer import Buffer
from smb.client import Client
from smb.config.backoff import Backoff
from smb.config.boot import boot_id
from smb.errors import Error, UnavailableError
from smb.files.formats import FileSpec
from smb.files.names import PRIVATE, private_of

_AGAIN_FIRST_S, _AGAIN_MAX_S = 0.1, 0.5
_SPACE_DIGITS = 16  # of the digest that names a boot and a PID namespace: names have to be short

_log = logging.getLogger("smb")


def private_name(name: str, rest: str = "") -> str:
    """Return a private name for what is to be, or was, called `name`: with that `rest`, by default one that nobody else
    uses and that says whose it is (left_by_dead).
    """
    return f"{private_of(name)}/{rest or f'{_process_start()}{os.getpid()}-{secrets.token_hex(8)}'}"


def create(client: Client, name: str, spec: FileSpec, replicas: int = 1) -> Buffer:
    """Make the buffer that a file becomes, under a name that nobody else uses. If servers are away, it waits for them
    as calls on buffers do, for the client's timeout. Raises as Client.create.
    """
    end = time.monotonic() + client.timeout
    backoff = Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S, lambda: end - time.monotonic())
    metadata = spec.metadata or None
    asked = False  # before: it may have been made, and the answer lost
    while True:
        try:
            if spec.tensors is not None:
                return client.create(name, tensors=spec.tensors, metadata=metadata, replicas=replicas, exist_ok=asked)
            return client.create(name, spec.shape, spec.dtype, metadata=metadata, replicas=replicas, exist_ok=asked)
        except UnavailableError:
            if time.monotonic() > end:
                raise
            asked = True
            time.sleep(backoff.next_s())


def sweep(client: Client, buffer: str | Buffer) -> None:
    """Delete what is not needed any more. If that fails it is logged: what was done, or failed before, is told."""
    try:
        client.delete(buffer, missing_ok=True)
    except Error as error:
        name = buffer if isinstance(buffer, str) else buffer.name
        _log.warning("buffer %r is left over; delete it: %s", name, error)


def left_by_dead(name: str) -> bool:
    """Whether it is a private name that a process of this machine, this boot and this PID namespace made, which is
    dead. Of all others nobody here knows: their files may be on their way.
    """
    _, private, rest = name.rpartition(f"{PRIVATE}/")
    owner = rest.removeprefix(_process_start()).split("-")[0]
    if not private or not boot_id() or not rest.startswith(_process_start()) or not owner.isdigit():
        return False
    try:
        os.kill(int(owner), 0)  # of our namespace; /proc may be of another one
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _process_start() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname())
    # Process ids count within their namespace; two containers of one host may have the same host's name. The first
    # namespace has one number on every host, and hosts may have one name: a boot's id is of one host alone.
    space = f"{boot_id()} {Path('/proc/self/ns/pid').stat().st_ino}"
    return f"{host}-{hashlib.sha256(space.encode()).hexdigest()[:_SPACE_DIGITS]}-"
