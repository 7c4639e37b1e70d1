"""The JSON object stored with a buffer beside its elements. Pure; shared by clients and coordinator.

It is sent and stored packed with zlib, because tables of tensors shrink to a tenth. Unpacking stops at the limit of the
text, however much more would come.
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
PACKED_BYTES_MAX = 1 << 20  # for one buffer, because each open carries it
NESTING_MAX = 64  # each client that opens the buffer must be able to parse it, however deep its own stack is


def encode(asked: str, metadata: Mapping[str, JSON]) -> bytes:
    """Return the packed text that `decode` turns back into an equal dict (tuples become lists); b"" for no entries.

    Raises InvalidArgumentError for a value that JSON does not have (a key that is not a str, NaN, an array, ...), with
    its place, and for metadata that is too large. `asked` begins the message.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidArgumentError(
            f"{asked}: metadata must be a mapping of names to JSON values, not {type(metadata).__name__}"
        )
    if not metadata:
        return b""
    plain = _plain(asked, "metadata", metadata, 0)
    try:
        text = json.dumps(plain, separators=(",", ":"))
    except ValueError as error:  # an integer with too many digits
        raise InvalidArgumentError(f"{asked}: metadata: {error}") from error
    _check_size(asked, len(text), "as JSON", TEXT_BYTES_MAX)
    _check_parts(asked, text)
    packed = pack(text)
    _check_size(asked, len(packed), "packed", PACKED_BYTES_MAX)
    return packed


def pack(text: str) -> bytes:
    """Return the packed text, which `unpack` reverses; b"" for an empty text."""
    return zlib.compress(text.encode()) if text else b""


def unpack(packed: bytes) -> str:
    """Return the text. Raises ValueError for data that is not packed text, is followed by more data, or is too long."""
    if not packed:
        return ""
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(packed, TEXT_BYTES_MAX + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(text) > TEXT_BYTES_MAX:
        raise ValueError(f"it has more than {format_bytes(TEXT_BYTES_MAX)}")
    if not stream.eof or stream.unused_data:
        raise ValueError("it is cut off, or more data follows it")
    return text.decode()


def check(asked: str, packed: bytes) -> None:
    """Raise InvalidArgumentError unless `decode` gives a dict for the text, in any process, and it is short enough."""
    _check_size(asked, len(packed), "packed", PACKED_BYTES_MAX)
    if not packed:
        return
    try:
        text = unpack(packed)
    except ValueError as error:
        raise InvalidArgumentError(f"{asked}: metadata cannot be unpacked: {error}") from None
    _check_parts(asked, text)
    try:
        metadata = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise _too_deep(asked, "metadata") from None
    except ValueError as error:
        raise InvalidArgumentError(f"{asked}: metadata is not JSON: {error}") from None
    if not isinstance(metadata, dict):
        raise InvalidArgumentError(f"{asked}: metadata must be a JSON object")
    level: list[Any] = [metadata]  # all values of one depth: one by one, they would take the coordinator seconds
    for _ in range(NESTING_MAX + 1):
        if math.inf in level or -math.inf in level:  # Python reads 1e999 as infinity
            raise InvalidArgumentError(f"{asked}: metadata has an infinite number, which JSON cannot express")
        level = [each for each in level if isinstance(each, (dict, list))]
        if not level:
            return
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    raise _too_deep(asked, "metadata")


def decode(text: str) -> dict[str, Any]:
    """Return a new object from the text."""
    metadata: dict[str, Any] = json.loads(text) if text else {}
    return metadata


def _plain(asked: str, where: str, value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise InvalidArgumentError(f"{asked}: {where} is {value}, which JSON cannot express")
    if depth == NESTING_MAX:
        raise _too_deep(asked, where[:40] + "...")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidArgumentError(f"{asked}: {where} has the key {key!r}; keys must be str")
        return {key: _plain(asked, f"{where}[{key!r}]", item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(asked, f"{where}[{index}]", item, depth + 1) for index, item in enumerate(value)]
    raise InvalidArgumentError(
        f"{asked}: {where} is of type {type(value).__name__}, which JSON does not have; use str, int, float, bool, "
        f"None, and lists and mappings of these"
    )


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _too_deep(asked: str, where: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{asked}: {where} is nested deeper than {NESTING_MAX} levels")


def _check_parts(asked: str, text: str) -> None:
    if (count := text.count("[") + text.count("{") + text.count(",")) > PARTS_MAX:
        raise InvalidArgumentError(
            f"{asked}: metadata has {count} commas and opening brackets as JSON, but may have at most {PARTS_MAX}: "
            f"keep larger data in a buffer of its own"
        )


def _check_size(asked: str, nbytes: int, form: str, most: int) -> None:
    if nbytes > most:
        raise InvalidArgumentError(
            f"{asked}: metadata ({form}) may have at most {format_bytes(most)}, not {format_bytes(nbytes)}: keep "
            f"larger data in a buffer of its own"
        )
