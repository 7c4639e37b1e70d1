"""Addresses of hosts: the addresses of a name, and the address by which other hosts reach this one."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import Any

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def addresses_of(
    host: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM
) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Return (family, socket address) for each address of a host, without repetitions, in the order in which to try
    them.

    A name may have several addresses (IPv6 and IPv4, or several networks of a host), and some may not answer. Blocks
    while the name is looked up. Raises OSError.
    """
    found = socket.getaddrinfo(host, port, type=kind)
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def bindable(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Return (family, numeric address) of the first of a host's addresses on which we can listen now. Port 0 picks any.

    Raises OSError, with the reason of the first address.
    """
    refusals: list[OSError] = []
    for family, where in addresses_of(host, port):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                probe.listen()
                return family, str(where[0])
        except OSError as error:
            refusals.append(error)
    raise refusals[0]


def reachable(host: str) -> str:
    """Return the host; for 0.0.0.0 or :: the address by which other hosts reach this one, or loopback without one.

    The address is that of the default route, or else of the first interface that has one. Sends nothing.
    """
    try:
        asked = ipaddress.ip_address(host)
    except ValueError:  # a host name
        return host
    if not asked.is_unspecified:
        return host
    # Addresses for documentation (RFC 5737, RFC 3849): connecting a datagram socket only picks the route.
    family, far = (socket.AF_INET, "192.0.2.1") if asked.version == 4 else (socket.AF_INET6, "2001:db8::1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
        if asked.version == 4:
            return next(_interface_addresses(probe), "127.0.0.1")
    return "::1"


def _interface_addresses(any_socket: socket.socket) -> Iterator[str]:
    """Yield the IPv4 addresses of this host's interfaces, without loopback."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # the interface has no address
            found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            address = ipaddress.IPv4Address(found[20:24])
            if not address.is_loopback:
                yield str(address)
