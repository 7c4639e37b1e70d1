"""The address by which other hosts reach this one."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def reachable(host: str) -> str:
    """Return the host; for 0.0.0.0 or :: the address by which other hosts reach this one, loopback if it has no other.

    The address is that of the default route, else of the first interface that has one. Sends nothing.
    """
    try:
        asked = ipaddress.ip_address(host)
    except ValueError:  # a name
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
    """The IPv4 addresses of this host's interfaces, loopback left out."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # one without an address
            found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            address = ipaddress.IPv4Address(found[20:24])
            if not address.is_loopback:
                yield str(address)
