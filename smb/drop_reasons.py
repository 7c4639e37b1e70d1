"""The reasons for which memory may be dropped: a coordinator states one, and a memory server checks it. Pure."""

from __future__ import annotations

from enum import IntEnum


class Ground(IntEnum):
    """A reason to destroy a segment. control.proto has the numbers and their meanings."""

    UNKNOWN = 0
    DELETED = 1
    NEVER_MADE = 2
    SUPERSEDED = 3
    FORGOTTEN = 4

    @classmethod
    def _missing_(cls, _: object) -> Ground:
        return cls.UNKNOWN  # a reason of a later version
