"""smb.config.parse: sizes and addresses as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from smb.config.parse import format_address, format_bytes, parse_address, parse_bytes
from smb.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("17 B", 17),
        ("4K", 4096),
        ("256KiB", 256 << 10),
        ("256kib", 256 << 10),
        (" 1.5 GiB ", 3 << 29),
        ("10MB", 10**7),
        ("2TiB", 2 << 40),
        (1 << 56, 1 << 56),
    ],
)
def test_sizes(text: int | str, count: int) -> None:
    """Numbers, binary and decimal units, fractions, spaces and any case are sizes in bytes."""
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "KiB", "-1", -1, "1e9", "1,5GiB", "3 apples", "1 MiB x", (1 << 56) + 1, "99999TiB", 1.5, None, True],
)
def test_what_is_no_size(text: Any) -> None:
    """Anything else, negative or absurd, is refused and named."""
    with pytest.raises(InvalidArgumentError, match="a size must be"):
        parse_bytes(text)


def test_sizes_are_shown_in_the_unit_that_fits() -> None:
    """One decimal where it is not whole, and the largest unit stays TiB."""
    shown = [format_bytes(count) for count in (0, 17, 1024, 1536, 256 << 20, 3 << 50)]
    assert shown == ["0 B", "17 B", "1 KiB", "1.5 KiB", "256 MiB", "3072 TiB"]


@pytest.mark.parametrize(
    ("text", "pair"),
    [("127.0.0.1:7070", ("127.0.0.1", 7070)), ("node-a:0", ("node-a", 0)), ("[::1]:65535", ("::1", 65535))],
)
def test_addresses_go_both_ways(text: str, pair: tuple[str, int]) -> None:
    """What is parsed is formatted to the same text, IPv6 in its brackets."""
    assert parse_address(text) == pair
    assert format_address(*pair) == text


@pytest.mark.parametrize("text", ["", "host", ":7070", "host:", "host:http", "::1:7070", "host:-1", "[]:1", "host:٣"])
def test_what_is_no_address(text: str) -> None:
    """A part missing, a port that is no number, IPv6 without brackets: refused with an example of what would do."""
    with pytest.raises(InvalidArgumentError, match=r"127\.0\.0\.1:7070"):
        parse_address(text)


def test_ports_have_an_end() -> None:
    """65536 is refused, and the message names the port and the range."""
    with pytest.raises(InvalidArgumentError, match="must be from 0 to 65535, not 65536"):
        parse_address("host:65536")
