"""The engine's server, as engine.py, engine_copies.py and engine_figures.py call it, and the errors of these calls."""

from __future__ import annotations

import os
from typing import Any

from smb._engine import ffi, lib
from smb.engine import status_name
from smb.errors import (
    AlreadyExistsError,
    Error,
    InvalidArgumentError,
    NotFoundError,
    OutOfMemoryError,
    PermissionDeniedError,
    UnavailableError,
)

_ERRORS: dict[int, type[Error]] = {
    lib.SMB_NOT_FOUND: NotFoundError,
    lib.SMB_INVALID: InvalidArgumentError,
    lib.SMB_OUT_OF_MEMORY: OutOfMemoryError,
    lib.SMB_EXISTS: AlreadyExistsError,
    lib.SMB_UNTRUSTED: PermissionDeniedError,
}


class ServerHandle:
    """A struct smb_server; NULL after its end."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer


def check(status: int, what: str) -> None:
    """Raise the error of a status: "cannot" do `what`."""
    if status == lib.SMB_OK:
        return
    if status == lib.SMB_SYSTEM:
        raise UnavailableError(f"cannot {what}: {os.strerror(ffi.errno)}")
    raise _ERRORS.get(status, UnavailableError)(f"cannot {what}: {status_name(status) or status}")
