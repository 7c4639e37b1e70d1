"""Limits that several parts hold, each once."""

from __future__ import annotations

BYTES_MAX = 1 << 56  # of a size, a buffer, an extent: as the engine's layouts
DIMENSIONS_MAX = 32  # numpy 1's limit; a client could not show more
STRIPE_BYTES_MULTIPLE = 4096  # a page: stripes are mapped side by side
NAME_CHARACTERS_MAX = 255  # of a buffer, lock or barrier
RENEWALS_PER_LEASE = 3  # of a server or a session: two of them may get lost
VERSIONS_MAX = 16  # copies of a buffer: csrc/memory/sync_words.h, SYNC_COPIES_MAX

# Of what somebody else may have written: see untrusted.py.
TEXT_FILE_BYTES_MAX = 1 << 20  # of a certificate, say: a system's bundle of authorities has 250 KiB
SETTINGS_BYTES_MAX = 256 << 10  # of a configuration, or a model for a plan, which has at most 1000 layers
KEY_PARTS_MAX = 32  # of a dotted key in TOML: the parser's time grows with the square of their number
TOKEN_FILE_BYTES_MAX = 4096  # of a file with one word, or one line
CHECKSUMS_BYTES_MAX = 16 << 20  # of a FILE.crc32c: 9 bytes for each 16 MiB, so it is of a file of 28 TiB
METADATA_TEXT_BYTES_MAX = 4 << 20  # of the JSON of one buffer: the coordinator parses it once
METADATA_PARTS_MAX = 1 << 18  # brackets and commas in it: to parse more takes the coordinator long
# Of the header of a .safetensors that becomes named tensors. Their table is in the buffer's metadata, and says each in
# at least 40 characters where the header takes at most 26 more. With a longer header the file is kept as bytes.
HEADER_BYTES_MAX = 2 * METADATA_TEXT_BYTES_MAX
HEADER_PARTS_MAX = 2 * METADATA_PARTS_MAX  # 7 of each tensor, where the table has 5
# Of a saved training: two tables (weights, running statistics), and in __metadata__ that of two buffers, quoted.
TRAINING_HEADER_BYTES_MAX = 2 * HEADER_BYTES_MAX + 4 * METADATA_TEXT_BYTES_MAX
TRAINING_HEADER_PARTS_MAX = 2 * HEADER_PARTS_MAX + 2 * METADATA_PARTS_MAX
# Of a checkpoint's index: half a million pieces of tensors, each of some 40 characters and 8 brackets and commas.
CHECKPOINT_INDEX_BYTES_MAX = 64 << 20
CHECKPOINT_INDEX_PARTS_MAX = 1 << 22
DIGITS_MAX = 4300  # of a whole number in JSON: what Python writes and reads without being told otherwise
QUOTED_CHARACTERS_MAX = 60  # of a foreign value in an error
ERROR_CHARACTERS_MAX = 300  # of an error about such values in another error
