"""The transports that one may ask for."""

from __future__ import annotations

from smb.errors import InvalidArgumentError

CHOICES = ("auto", "shm", "verbs", "tcp")


def check_choice(transport: str) -> str:
    """Return a transport option that exists. Raises InvalidArgumentError."""
    if transport not in CHOICES:
        raise InvalidArgumentError(f"there is no transport {transport!r}; there are {', '.join(CHOICES)}")
    return transport
