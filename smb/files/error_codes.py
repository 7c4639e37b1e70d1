"""smb's errors as the operating system's: the number that fits best, the message unchanged."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from smb import errors

# The first that fits; subclasses come before smb.Error itself.
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
    """Return the errno that stands for the error's class."""
    return next(number for kind, number in _NUMBERS if isinstance(error, kind))


def os_error(error: errors.Error, *, gone: int) -> OSError:
    """Return the OSError that stands for an error of smb's, `gone` for a buffer that is not there."""
    return OSError(gone if isinstance(error, errors.NotFoundError) else errno_of(error), str(error))


@contextmanager
def as_os_errors(*, gone: int = errno.ENOENT) -> Iterator[None]:
    """Turn smb's errors into OSError (FileNotFoundError and the like, by their errno). A buffer that is not there is
    `gone`: ENOENT if a path is looked up, ESTALE if it was open already.
    """
    try:
        yield
    except errors.Error as error:
        raise os_error(error, gone=gone) from error


def refuse(number: int, why: str) -> OSError:
    """Return the OSError to be raised."""
    return OSError(number, why)
