"""What is stored with a buffer beside its elements: a JSON object, as text. Pure; clients and coordinator share it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from smb.config.parse import format_bytes
from smb.errors import InvalidArgumentError

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

BYTES_MAX = 1 << 20  # of one buffer's, as text: each open carries it
NESTING_MAX = 64  # whoever opens the buffer must be able to parse it, however deep its own stack is


def encode(asked: str, metadata: Mapping[str, JSON]) -> str:
    """Return the text that `decode` turns back into an equal dict (tuples into lists); "" for no entries.

    Raises InvalidArgumentError for what is no JSON (a key that is no str, NaN, an array, ...), naming where it is, and
    for too much of it. `asked` begins the message.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidArgumentError(f"{asked}: metadata={type(metadata).__name__} is no mapping of names to JSON values")
    if not metadata:
        return ""
    plain = _plain(asked, "metadata", metadata, 0)
    try:
        text = json.dumps(plain, separators=(",", ":"))
    except ValueError as error:  # an integer too long to be written
        raise InvalidArgumentError(f"{asked}: metadata: {error}") from error
    _check_size(asked, len(text))
    return text


def check(asked: str, text: str) -> None:
    """Raise InvalidArgumentError unless `decode` gives a dict for the text, in any process, and it is short enough."""
    _check_size(asked, len(text.encode()))
    if not text:
        return
    try:
        metadata = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise _too_deep(asked, "metadata") from None
    except ValueError as error:
        raise InvalidArgumentError(f"{asked}: metadata is no JSON: {error}") from None
    if not isinstance(metadata, dict):
        raise InvalidArgumentError(f"{asked}: metadata is no JSON object")
    _plain(asked, "metadata", metadata, 0)


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


def _check_size(asked: str, nbytes: int) -> None:
    if nbytes > BYTES_MAX:
        raise InvalidArgumentError(
            f"{asked}: {format_bytes(nbytes)} of metadata as JSON; there is room for {format_bytes(BYTES_MAX)}: keep "
            f"more than that in a buffer of its own"
        )
