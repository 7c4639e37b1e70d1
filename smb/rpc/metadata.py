"""The JSON object stored with a buffer beside its elements. Pure; clients and coordinator share it.

It travels, and is kept, packed: its text through zlib, as tables of tensors shrink to a tenth. Unpacking stops at the
bound of the text, however much would come out.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from smb.config.limits import METADATA_PARTS_MAX, METADATA_TEXT_BYTES_MAX
from smb.config.parse import format_bytes
from smb.errors import InvalidArgumentError

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

TEXT_BYTES_MAX = METADATA_TEXT_BYTES_MAX
PARTS_MAX = METADATA_PARTS_MAX
PACKED_BYTES_MAX = 1 << 20  # of one buffer's: each open carries it
NESTING_MAX = 64  # every client that opens the buffer must be able to parse it, however deep its own stack is


def encode(asked: str, metadata: Mapping[str, JSON]) -> bytes:
    """Return, packed, the text that `decode` turns back into an equal dict (tuples into lists); b"" for no entries.

    Raises InvalidArgumentError for a value that is no JSON (a key that is no str, NaN, an array, ...), and says where
    it is. Too much JSON is refused likewise. `asked` begins the message.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidArgumentError(f"{asked}: metadata={type(metadata).__name__} is no mapping of names to JSON values")
    if not metadata:
        return b""
    plain = _plain(asked, "metadata", metadata, 0)
    try:
        text = json.dumps(plain, separators=(",", ":"))
    except ValueError as error:  # an integer too long to be written
        raise InvalidArgumentError(f"{asked}: metadata: {error}") from error
    _check_size(asked, len(text), "as JSON", TEXT_BYTES_MAX)
    _check_parts(asked, text)
    packed = pack(text)
    _check_size(asked, len(packed), "packed", PACKED_BYTES_MAX)
    return packed


def pack(text: str) -> bytes:
    """Return what `unpack` turns back; b"" for no text."""
    return zlib.compress(text.encode()) if text else b""


def unpack(packed: bytes) -> str:
    """Return the text. Raises ValueError for what is none, or is followed by anything, or has more than its bound."""
    if not packed:
        return ""
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(packed, TEXT_BYTES_MAX + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(text) > TEXT_BYTES_MAX:
        raise ValueError(f"more than {format_bytes(TEXT_BYTES_MAX)}")
    if not stream.eof or stream.unused_data:
        raise ValueError("cut off, or something follows it")
    return text.decode()


def check(asked: str, packed: bytes) -> None:
    """Raise InvalidArgumentError unless `decode` gives a dict for its text, in any process, and it is short enough."""
    _check_size(asked, len(packed), "packed", PACKED_BYTES_MAX)
    if not packed:
        return
    try:
        text = unpack(packed)
    except ValueError as error:
        raise InvalidArgumentError(f"{asked}: metadata can't be unpacked: {error}") from None
    _check_parts(asked, text)
    try:
        metadata = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise _too_deep(asked, "metadata") from None
    except ValueError as error:
        raise InvalidArgumentError(f"{asked}: metadata is no JSON: {error}") from None
    if not isinstance(metadata, dict):
        raise InvalidArgumentError(f"{asked}: metadata is no JSON object")
    level: list[Any] = [metadata]  # all values so deep: one after the other would take the coordinator seconds
    for _ in range(NESTING_MAX + 1):
        if math.inf in level or -math.inf in level:  # as 1e999 is read
            raise InvalidArgumentError(f"{asked}: metadata has a number that is infinite, for which JSON has none")
        level = [each for each in level if isinstance(each, (dict, list))]
        if not level:
            return
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    raise _too_deep(asked, "metadata")


def decode(text: str) -> dict[str, Any]:
    """Return the object, made anew."""
    metadata: dict[str, Any] = json.loads(text) if text else {}
    return metadata


def _plain(asked: str, where: str, value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise InvalidArgumentError(f"{asked}: {where} is {value}, for which JSON has no number")
    if depth == NESTING_MAX:
        raise _too_deep(asked, where[:40] + "...")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidArgumentError(f"{asked}: {where} has the key {key!r}; keys are str")
        return {key: _plain(asked, f"{where}[{key!r}]", item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(asked, f"{where}[{index}]", item, depth + 1) for index, item in enumerate(value)]
    raise InvalidArgumentError(
        f"{asked}: {where} is of type {type(value).__name__}, which is no JSON; use str, int, float, bool, None, and "
        f"lists and mappings of these"
    )


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _too_deep(asked: str, where: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{asked}: {where} nests deeper than {NESTING_MAX} levels")


def _check_parts(asked: str, text: str) -> None:
    if (count := text.count("[") + text.count("{") + text.count(",")) > PARTS_MAX:
        raise InvalidArgumentError(
            f"{asked}: metadata with {count} commas and opening brackets as JSON; there is room for {PARTS_MAX}: keep "
            f"what has more parts in a buffer of its own"
        )


def _check_size(asked: str, nbytes: int, form: str, most: int) -> None:
    if nbytes > most:
        raise InvalidArgumentError(
            f"{asked}: {format_bytes(nbytes)} of metadata {form}; there is room for {format_bytes(most)}: keep more "
            f"than that in a buffer of its own"
        )
