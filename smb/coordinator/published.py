"""How a state is published, from the metadata of its buffer."""

from __future__ import annotations

import json
from functools import lru_cache

from smb.published import ABOUT
from smb.rpc.metadata import unpack


@lru_cache(maxsize=64)  # the keys are metadata of at most 1 MiB each
def published_as(packed: bytes) -> dict[str, object] | None:
    """Return the metadata of a published state (smb/torch/publishing/publish.py); None for other buffers. Each text is
    parsed once, because the event loop asks and metadata may be megabytes.
    """
    text = unpack(packed)
    about = json.loads(text).get(ABOUT) if f'"{ABOUT}"' in text else None
    return about if isinstance(about, dict) else None
