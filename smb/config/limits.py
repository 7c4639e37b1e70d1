"""Limits that several parts hold, each once."""

from __future__ import annotations

BYTES_MAX = 1 << 56  # of a size, a buffer, an extent: as the engine's layouts
DIMENSIONS_MAX = 32  # numpy 1's limit; a client could not show more
STRIPE_BYTES_MULTIPLE = 4096  # a page: stripes are mapped side by side
NAME_CHARACTERS_MAX = 255  # of a buffer, lock or barrier
RENEWALS_PER_LEASE = 3  # of a server or a session: two of them may get lost
VERSIONS_MAX = 16  # copies of a buffer: csrc/memory/sync_words.h, SYNC_COPIES_MAX
