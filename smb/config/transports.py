"""The transports that a user may choose, and those that a worker reports."""

from __future__ import annotations

from smb.errors import InvalidArgumentError

CHOICES = ("auto", "shm", "verbs", "tcp")
REPORTED = {"shm": 1, "tcp": 2, "verbs": 4, "unix": 8}  # bits of TrainingReport.transports


def check_choice(transport: str) -> str:
    """Return the transport option if it exists. Raises InvalidArgumentError."""
    if transport not in CHOICES:
        raise InvalidArgumentError(f"transport must be one of {', '.join(CHOICES)}, not {transport!r}")
    return transport
