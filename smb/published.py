"""The names of a published state: its buffer, and the log beside it. smb/torch/publish.py makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

ABOUT = "smb.publish"  # in the buffer's metadata: how it is published
LOG = ".log"  # after its name: the log of a state with deltas (smb/relay/publication_log.py)
LOG_FORMAT = 1  # in the metadata of a state with deltas, under "log"
MIRROR = ".mirror."  # after its name, before a server's: a mirror


class Described(Protocol):
    """A buffer, as far as it says what it is."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def versions(self) -> int:
        """How many copies it has."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """As its maker gave it."""


def has_deltas(buffer: Described) -> bool:
    """Whether it is a state published with deltas=: its versions are whole states only. A copy of one is none."""
    about = buffer.metadata.get(ABOUT)
    return buffer.versions > 1 and isinstance(about, dict) and about.get("log") == LOG_FORMAT


def beside(buffer: Described) -> tuple[str, ...]:
    """Return the names of the buffers that a state takes beside its own: the log of one with deltas."""
    return (f"{buffer.name}{LOG}",) if has_deltas(buffer) else ()


def state_of(name: str) -> str:
    """Return the state beside which a buffer of that name would lie; "" if none."""
    return name.removesuffix(LOG) if name.endswith(LOG) else ""
