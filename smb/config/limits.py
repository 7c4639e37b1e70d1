"""Limits that several parts of the program use, each defined once."""

from __future__ import annotations

BYTES_MAX = 1 << 56  # of a size, a buffer, an extent: the same limit as in the engine's layouts
DIMENSIONS_MAX = 32  # numpy 1's limit: a client could not return an array with more
STRIPE_BYTES_MULTIPLE = 4096  # a page: stripes are mapped side by side
NAME_CHARACTERS_MAX = 255  # of a buffer, lock or barrier
RENEWALS_PER_LEASE = 3  # of a server or a session, so that two may get lost
SPARSE_BYTES_MAX = 1 << 30  # of the result of one sparse read; an element's index takes 8 more in the client's memory
VERSIONS_MAX = 16  # slots of a buffer: csrc/sync/sync_words.h, SYNC_SLOTS_MAX
FILE_ATTRIBUTES_BYTES_MAX = 4096  # of one buffer: rights, times and extended attributes of its file

# Limits for data that others may have written: see untrusted.py.
TEXT_FILE_BYTES_MAX = 1 << 20  # of a certificate, for example: a system's bundle of authorities has 250 KiB
SETTINGS_BYTES_MAX = 256 << 10  # of a configuration, or of a model for a plan, which has at most 1000 layers
KEY_PARTS_MAX = 32  # of a dotted key in TOML: the parser's time grows with the square of their number
TOKEN_FILE_BYTES_MAX = 4096  # of a file with one word, or one line
CHECKSUMS_BYTES_MAX = 16 << 20  # of a FILE.crc32c: it has 9 bytes for each 16 MiB, so this allows a file of 28 TiB
METADATA_TEXT_BYTES_MAX = 4 << 20  # of the JSON of one buffer: the coordinator parses it once
METADATA_PARTS_MAX = 1 << 18  # brackets and commas in it: more would take the coordinator long to parse
# The header of a .safetensors file whose tensors become named ones. Their table is stored in the buffer's metadata and
# has at least 40 characters per tensor, to which the header adds at most 26. A file with a longer header is kept as
# plain bytes.
HEADER_BYTES_MAX = 2 * METADATA_TEXT_BYTES_MAX
HEADER_PARTS_MAX = 2 * METADATA_PARTS_MAX  # the header has 7 per tensor, the table 5
# A saved training has two tables (weights, running statistics), and in __metadata__ the quoted table of two buffers.
TRAINING_HEADER_BYTES_MAX = 2 * HEADER_BYTES_MAX + 4 * METADATA_TEXT_BYTES_MAX
TRAINING_HEADER_PARTS_MAX = 2 * HEADER_PARTS_MAX + 2 * METADATA_PARTS_MAX
# A checkpoint's index: half a million pieces of tensors, each with about 40 characters and 8 brackets and commas.
CHECKPOINT_INDEX_BYTES_MAX = 64 << 20
CHECKPOINT_INDEX_PARTS_MAX = 1 << 22
# What a backup has: 100 000 buffers with about 600 characters and 20 brackets and commas each, and their metadata.
BACKUP_MANIFEST_BYTES_MAX = 256 << 20
BACKUP_MANIFEST_PARTS_MAX = 1 << 24
DIGITS_MAX = 4300  # of a whole number in JSON: Python's own default limit
QUOTED_CHARACTERS_MAX = 60  # of an untrusted value in an error
ERROR_CHARACTERS_MAX = 300  # of an error about such values in another error
