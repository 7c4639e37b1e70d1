"""smb.files.attributes: the text of a file's attributes, also where another program has stored it."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from smb.config.limits import FILE_ATTRIBUTES_BYTES_MAX as BYTES_MAX
from smb.files.attributes import NONE, Attributes, decode, merged


@pytest.mark.parametrize(
    "attributes",
    [
        NONE,
        Attributes(mode=0),
        Attributes(0o4755, (0, 4_294_967_294), -1, 0, 1_764_459_296_123_456_789),
        Attributes(link=True),
        Attributes(extended={"a": b"", "ü\udcff b": bytes(range(256))}),
    ],
)
def test_what_was_stored_is_read(attributes: Attributes) -> None:
    assert decode(attributes.encode()) == attributes


def test_a_file_with_usual_attributes_stores_nothing() -> None:
    assert NONE.encode() == b""


def test_too_many_are_refused() -> None:
    most = Attributes(extended={"a": bytes(3 * (BYTES_MAX - 25) // 4)})
    assert len(most.encode()) <= BYTES_MAX
    with pytest.raises(OSError, match="4096 bytes of attributes") as caught:
        Attributes(extended={"a": bytes(BYTES_MAX)}).encode()
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="4096 bytes of attributes"):
        most.check()  # no room for times


def test_what_is_taken_has_room_for_all_else() -> None:
    taken = Attributes(extended={"a": bytes(2800)})
    taken.check()
    replace(taken, mode=0o4755, owner=(1 << 31, 7), modified=-(1 << 63), accessed=1 << 63, changed=1 << 63).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"\xff", b"[]", b"7", b"{", b"[" * BYTES_MAX, b'{"mode": 4096}', b'{"mode": -1}', b'{"mode": true}',
        b'{"owner": [1]}', b'{"owner": [1, 4294967295]}', b'{"owner": 7}', b'{"modified": 1e9}', b'{"link": 1}',
        b'{"modified": 9223372036854775809}', b'{"extended": {"a": "!"}}', b'{"extended": [1]}',
        b'{"extended": {"a": 1}}', b'{"extended": {"": "AA=="}}',
        b'{"extended": {"a\\u0000b": "AA=="}}', b'{"extended": {"a\\ud800b": "AA=="}}',
        b'{"extended": {"smb.dtype": "AA=="}}', b'{"extended": {"' + b"a" * 251 + b'": "AA=="}}',
        b'{"mode": 420' + b" " * BYTES_MAX + b"}",
    ],
)  # fmt: skip
def test_anything_else_counts_as_missing(text: bytes) -> None:
    assert decode(text) == NONE


def test_changes_are_merged_into_what_is_stored_now() -> None:
    """Only what was changed here is taken; the rest, also what others removed, is as stored. Times stay the stored."""
    before = Attributes(0o644, (1, 2), 10, 11, 12, extended={"a": b"1", "b": b"1", "c": b"1", "d": b"1"})
    stored = Attributes(0o600, None, 20, 21, 22, extended={"a": b"2", "b": b"1", "c": b"2", "e": b"1"})
    assert merged(stored, before, before) == stored
    wanted = Attributes(0o640, (1, 2), 30, 31, 32, extended={"a": b"1", "b": b"3", "d": b"1", "f": b"1"})
    assert merged(stored, before, wanted) == Attributes(
        0o640, None, 20, 31, 22, extended={"a": b"2", "b": b"3", "e": b"1", "f": b"1"}
    )
