"""Parses and formats sizes and addresses."""

from __future__ import annotations

import re

from smb.config.limits import BYTES_MAX
from smb.errors import InvalidArgumentError

TRAIN_HOST_VARIABLE = "SMB_TRAIN_HOST"
# Set by LocalCluster for its daemons, which end with that process however it ends.
OWNER_VARIABLE = "SMB_OWNER_PID"

_UNITS = {
    "": 1, "B": 1,
    "K": 1 << 10, "KIB": 1 << 10, "KB": 10**3,
    "M": 1 << 20, "MIB": 1 << 20, "MB": 10**6,
    "G": 1 << 30, "GIB": 1 << 30, "GB": 10**9,
    "T": 1 << 40, "TIB": 1 << 40, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
WEIGHT_MIN, WEIGHT_MAX = 1e-6, 1e12  # bits per second fit too; sums and ratios stay far from the limits of a float


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes from 1048576, "1MiB", "1.5 GiB", "10MB" (1e6), "4K" (4096).

    Raises InvalidArgumentError for an invalid size, and for one that is negative or beyond 2**56.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise InvalidArgumentError(f"a size must be a number of bytes, or text such as '256KiB', not {size!r}")
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise InvalidArgumentError(
                f"a size must be a number and a unit, such as '256KiB' or '1.5GiB', not {size!r}"
            )
        number = match[1]
        size = int(float(number) * unit) if "." in number else int(number) * unit
    if not 0 <= size <= BYTES_MAX:
        raise InvalidArgumentError(f"a size must be from 0 to 2**56 bytes, not {size}")
    return size


def format_bytes(count: int) -> str:
    """Return "256 KiB", "1.5 GiB", "17 B"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def parse_seconds(duration: str) -> float:
    """Return seconds from "90", "90s", "30m", "1.5h" or "2d". Raises InvalidArgumentError for anything else."""
    match = _SIZE.fullmatch(duration)
    unit = _SECONDS.get(match[2]) if match else None
    if match is None or unit is None:
        raise InvalidArgumentError(f"a duration must be a number and a unit, such as '30m' or '2h', not {duration!r}")
    return float(match[1]) * unit


def check_weight(what: str, weight: float) -> None:
    """Raise InvalidArgumentError for an invalid weight: a server's share of the traffic, relative to others."""
    if not WEIGHT_MIN <= weight <= WEIGHT_MAX:  # NaN is neither
        raise InvalidArgumentError(f"{what} {weight:g}: use a number from {WEIGHT_MIN:g} to {WEIGHT_MAX:g}")


def parse_address(address: str) -> tuple[str, int]:
    """Return (host, port) of "host:port" or "[ipv6]:port". Raises InvalidArgumentError."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host and not bracketed) or not port.isascii() or not port.isdigit():
        raise InvalidArgumentError(
            f"an address must be HOST:PORT, such as 127.0.0.1:7070 or [::1]:7070, not {address!r}"
        )
    if int(port) > 65535:
        raise InvalidArgumentError(f"the port of {address!r} must be from 0 to 65535, not {port}")
    return host, int(port)


def parse_addresses(addresses: str) -> tuple[str, ...]:
    """Return the parts of "host:port,host:port", without repetitions. Raises InvalidArgumentError."""
    found = tuple(dict.fromkeys(part.strip() for part in addresses.split(",")))
    for address in found:
        parse_address(address)
    return found


def format_address(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
