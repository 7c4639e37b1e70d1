"""TLS on a client's side: the current certificates in the engine's form."""

from __future__ import annotations

from smb.engine import Tls
from smb.errors import UnavailableError
from smb.security.credentials import Credentials, Current, tls_of


class ClientTls:
    """The credentials of connections to memory servers. Changed files take effect at the next connection."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._current = Current(credentials) if credentials is not None else None

    def now(self, server: str) -> Tls:
        """Return the TLS settings for a connection to that server. Raises UnavailableError if there are no
        credentials.
        """
        if self._current is None:
            raise UnavailableError(f"memory server {server} requires TLS, but this client has no credentials")
        return tls_of(self._current.now())
