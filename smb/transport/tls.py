"""TCP with TLS: a connection whose peer's certificate is that of the memory server asked for."""

from __future__ import annotations

import socket
import ssl

from smb import pump
from smb.config import parse_address
from smb.credentials import Credentials, server_name
from smb.errors import UnavailableError


def connect(credentials: Credentials | None, server: str, address: str, timeout: float) -> int:
    """Return a descriptor that leads to a memory server's TLS port. Blocks up to `timeout` seconds.

    Raises UnavailableError where nobody answers, or somebody whose certificate is not that server's.
    """
    where = f"memory server {server} at {address}"
    if credentials is None:
        raise UnavailableError(f"{where} speaks TLS, and this client has no credentials")
    try:
        plain = socket.create_connection(parse_address(address), timeout)
    except OSError as error:
        raise UnavailableError(f"{where} can't be reached: {error.strerror or error}") from error
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.getpeername()  # of a connection that is reset already ssl would leave a socket unclosed
        secured = credentials.client_context().wrap_socket(plain, server_hostname=server_name(server))
    except ssl.SSLError as error:
        plain.close()
        reason = getattr(error, "verify_message", "") or error.reason or "the handshake failed"
        raise UnavailableError(f"{where} is not whom it should be, or does not know us: {reason}") from error
    except OSError as error:
        plain.close()
        raise UnavailableError(f"{where}: the TLS handshake failed: {error.strerror or error}") from error
    return pump.start(secured, "smb-tls")
