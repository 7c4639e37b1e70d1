"""The names of a published state: its buffer, and those that lie beside it. smb/torch/publish.py makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ABOUT = "smb.publish"  # in the buffer's metadata: how it is published
DELTAS = ".deltas"  # after its name: the ring of bytes
GENERATIONS = ".generations"  # after its name: version g says what generation g is
MIRROR = ".mirror."  # after its name, before a server's: a mirror


def has_deltas(metadata: Mapping[str, Any]) -> bool:
    """Whether a buffer with this metadata is a state published with deltas=: its versions are whole states only."""
    about = metadata.get(ABOUT)
    return isinstance(about, dict) and bool(about.get("deltas"))


def beside(name: str, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the buffers that a state of that name and metadata takes beside its own."""
    return (f"{name}{DELTAS}", f"{name}{GENERATIONS}") if has_deltas(metadata) else ()


def state_of(name: str) -> str:
    """Return the state beside which a buffer of that name would lie; "" if none."""
    return next((name.removesuffix(end) for end in (DELTAS, GENERATIONS) if name.endswith(end)), "")
