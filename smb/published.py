"""The names of a published state: its buffer, and the log beside it. smb/torch/publishing/publish.py creates both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

ABOUT = "smb.publish"  # in the buffer's metadata: how the state is published
LOG = ".log"  # suffix of the log of a state with deltas (smb/relay/publication_log.py)
LOG_FORMAT = 2  # in the metadata of a state with deltas, under "log"
MIRROR = ".mirror."  # between the name of a buffer and of a server: the name of a mirror


class Described(Protocol):
    """A buffer's description of itself."""

    @property
    def name(self) -> str:
        """The buffer's name."""

    @property
    def versions(self) -> int:
        """The number of versions that it keeps."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that it was created with."""


def has_deltas(buffer: Described) -> bool:
    """Return True if the buffer is a state published with deltas=: its versions are whole states only.

    A copy of such a buffer is not one.
    """
    about = buffer.metadata.get(ABOUT)
    return buffer.versions > 1 and isinstance(about, dict) and about.get("log") == LOG_FORMAT


def beside(buffer: Described) -> tuple[str, ...]:
    """Return the names of the buffers that belong to a state beside its own: the log of a state with deltas."""
    return (f"{buffer.name}{LOG}",) if has_deltas(buffer) else ()


def state_of(name: str) -> str:
    """Return the name of the state to which a buffer of that name would belong; "" if there is none."""
    return name.removesuffix(LOG) if name.endswith(LOG) else ""
