"""How a state is published, from the metadata of its buffer."""

from __future__ import annotations

import json
from functools import lru_cache

from smb.published import ABOUT
from smb.rpc.metadata import unpack


@lru_cache(maxsize=64)  # its keys are metadata, at most 1 MiB each
def published_as(packed: bytes) -> dict[str, object] | None:
    """Return how a state is published (smb/torch/publish.py), from its metadata; None if it is no published state. The
    event loop asks, and metadata may be megabytes: each is parsed once.
    """
    text = unpack(packed)
    about = json.loads(text).get(ABOUT) if f'"{ABOUT}"' in text else None
    return about if isinstance(about, dict) else None
