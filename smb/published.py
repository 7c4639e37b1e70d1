"""The names of a published state: its buffer, and those that lie beside it. smb/torch/publish.py makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

ABOUT = "smb.publish"  # in the buffer's metadata: how it is published
DELTAS = ".deltas"  # after its name: the ring of bytes
GENERATIONS = ".generations"  # after its name: version g says what generation g is
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
    return buffer.versions > 1 and isinstance(about, dict) and bool(about.get("deltas"))


def beside(buffer: Described) -> tuple[str, ...]:
    """Return the names of the buffers that a state takes beside its own: the ring, and what describes generations."""
    return (f"{buffer.name}{DELTAS}", f"{buffer.name}{GENERATIONS}") if has_deltas(buffer) else ()


def state_of(name: str) -> str:
    """Return the state beside which a buffer of that name would lie; "" if none."""
    return next((name.removesuffix(end) for end in (DELTAS, GENERATIONS) if name.endswith(end)), "")
