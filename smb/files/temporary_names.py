"""Private names of buffers that are being made or were replaced: in a folder PRIVATE, which is not shown.

The folder lies in the namespace of the file in question, so the same clients may use both, and one quota counts both.
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
_SPACE_DIGITS = 16  # digits of the digest that identifies a boot and a PID namespace; short, since names are limited

_log = logging.getLogger("smb")


def private_name(name: str, rest: str = "") -> str:
    """Return a private name for a buffer that will be, or was, called `name`.

    Its last part is `rest`; by default a unique one that names its process (left_by_dead).
    """
    return f"{private_of(name)}/{rest or f'{_process_start()}{os.getpid()}-{secrets.token_hex(8)}'}"


def create(client: Client, name: str, spec: FileSpec, replicas: int = 1) -> Buffer:
    """Create the buffer that a file becomes, under a name that nobody else uses.

    While servers are away this waits for them, as calls on buffers do, for the client's timeout. Raises as
    Client.create.
    """
    end = time.monotonic() + client.timeout
    backoff = Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S, lambda: end - time.monotonic())
    metadata = spec.metadata or None
    asked = False  # set before the call: it may have been made, and the answer lost
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
    """Delete a buffer that is not needed any more. A failure is only logged, since the caller's own result matters
    more.
    """
    try:
        client.delete(buffer, missing_ok=True)
    except Error as error:
        name = buffer if isinstance(buffer, str) else buffer.name
        _log.warning("buffer %r is left over and should be deleted: %s", name, error)


def left_by_dead(name: str) -> bool:
    """Return True for a private name that was made by a dead process of this machine, boot and PID namespace.

    Of other names nothing is known here: their files may still be in progress.
    """
    _, private, rest = name.rpartition(f"{PRIVATE}/")
    owner = rest.removeprefix(_process_start()).split("-")[0]
    if not private or not boot_id() or not rest.startswith(_process_start()) or not owner.isdigit():
        return False
    try:
        os.kill(int(owner), 0)  # a pid of this process's PID namespace; /proc may show another one
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _process_start() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname())
    # Process ids count within their PID namespace, and two containers of one host may have the same host name. The
    # initial namespace has the same number on every host, and hosts may share a name; a boot's id is unique.
    space = f"{boot_id()} {Path('/proc/self/ns/pid').stat().st_ino}"
    return f"{host}-{hashlib.sha256(space.encode()).hexdigest()[:_SPACE_DIGITS]}-"
