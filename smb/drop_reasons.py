"""Why memory may be given up: the reasons that a coordinator states and a memory server checks. Pure."""

from __future__ import annotations

from enum import IntEnum


class Ground(IntEnum):
    """A reason to destroy a segment. control.proto has the numbers, and what each says."""

    UNKNOWN = 0
    DELETED = 1
    NEVER_MADE = 2
    SUPERSEDED = 3
    FORGOTTEN = 4

    @classmethod
    def _missing_(cls, _: object) -> Ground:
        return cls.UNKNOWN  # of a later version
