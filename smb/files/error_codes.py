"""Translates smb's errors into OSError: the best matching number, with the same message."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from smb import errors

# The first match counts; subclasses come before smb.Error itself.
_NUMBERS: tuple[tuple[type[errors.Error], int], ...] = (
    (errors.NotFoundError, errno.ENOENT),
    (errors.AlreadyExistsError, errno.EEXIST),
    (errors.OutOfMemoryError, errno.ENOSPC),
    (errors.PermissionDeniedError, errno.EACCES),
    (errors.UnavailableError, errno.EHOSTUNREACH),
    (errors.TimeoutError, errno.ETIMEDOUT),
    (errors.InvalidArgumentError, errno.EINVAL),
    (errors.LockLostError, errno.ESTALE),
    (errors.Error, errno.EIO),
)


def errno_of(error: errors.Error) -> int:
    """Return the errno for the error's class."""
    return next(number for kind, number in _NUMBERS if isinstance(error, kind))


def os_error(error: errors.Error, *, gone: int) -> OSError:
    """Return the OSError for an error of smb. `gone` is the errno for a missing buffer."""
    return OSError(gone if isinstance(error, errors.NotFoundError) else errno_of(error), str(error))


@contextmanager
def as_os_errors(*, gone: int = errno.ENOENT) -> Iterator[None]:
    """Translate smb's errors into OSError (FileNotFoundError and the like, by their errno).

    For a missing buffer the errno is `gone`: ENOENT if a path is looked up, ESTALE if the buffer was open already.
    """
    try:
        yield
    except errors.Error as error:
        raise os_error(error, gone=gone) from error


def refuse(number: int, why: str) -> OSError:
    """Return the OSError to raise."""
    return OSError(number, why)
