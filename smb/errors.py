"""The errors that users see. Every message says what was asked, of whom, and what to do next."""

from __future__ import annotations

import builtins
from typing import Any, Literal, TypeAlias

CallOutcome: TypeAlias = Literal["not applied", "applied", "unknown"]
NOT_APPLIED: CallOutcome = "not applied"
APPLIED: CallOutcome = "applied"
UNKNOWN: CallOutcome = "unknown"


class Error(Exception):
    """Base of all errors that smb raises on purpose.

    `outcome` says what became of the failed call:

    - "not applied": nothing was changed, nor will be.
    - "applied": all of it counts; only its answer is missing.
    - "unknown": some of it may have been applied. Buffer.settle finds out which elements of a buffer's call were not.
    """

    smb_account: Any = None  # what Buffer.settle needs, in an error of a buffer's call: smb.call.outcomes.Failed

    def __init__(self, *arguments: Any, outcome: CallOutcome = NOT_APPLIED) -> None:
        super().__init__(*arguments)
        self.outcome = outcome

    def __str__(self) -> str:
        """Return the message itself (KeyError would show its repr)."""
        return str(self.args[0]) if self.args else ""


class NotFoundError(Error, KeyError):
    """There is no buffer of that name: it was never created, or somebody deleted it."""


class AlreadyExistsError(Error):
    """The name is taken. Choose another name, delete the buffer, or pass exist_ok=True."""


class OutOfMemoryError(Error, MemoryError):
    """The memory servers, their file system, or the coordinator's disk have too little space left.

    The message says what is free and where. A create() that raises it has created nothing.
    """


class PermissionDeniedError(Error):
    """Your credentials do not allow this call."""


class UnavailableError(Error, ConnectionError):
    """A daemon could not be reached or was lost. The message says which one, and what became of the call."""


class TimeoutError(Error, builtins.TimeoutError):  # noqa: A001 - the contract's name
    """The call did not finish in time. The message says what is known of the outcome."""

    holder: str = ""  # of a lock that was not acquired: the client that holds it, "host:pid", or "another client"


DeadlineError = TimeoutError  # the same class for modules of this package, since its public name hides the builtin one


class InvalidArgumentError(Error, ValueError):
    """An argument makes no sense: a shape, dtype, range, op or option. Nothing was done."""


class LockLostError(Error):
    """The lock's lease ended while you held it; another client may hold it now."""


class BrokenBarrierError(Error):
    """A party of the barrier died or timed out, so nobody passes."""


class TransportError(Error):
    """The path to the memory does not allow this, for example a view of memory on another host."""
