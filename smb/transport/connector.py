"""Makes TCP connections to servers, with TLS where servers use it. Tries all addresses of a host name."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from smb.config.host_address import addresses_of
from smb.config.parse import parse_address
from smb.engine import EngineClient, EngineError, Link, Status
from smb.errors import UnavailableError
from smb.security.credentials import server_name
from smb.transport.base import Deadline
from smb.transport.tls import ClientTls

ATTEMPT_MS = 1000

_log = logging.getLogger("smb")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The present location of a server, as the coordinator knows it."""

    address: str
    unix_path: str
    instance_id: int
    control_address: str = ""
    tls: bool = False


class Connector:
    """Connects links over TCP. Thread-safe."""

    def __init__(self, client: EngineClient, tls: ClientTls) -> None:
        self._client = client
        self._tls = tls
        # by a server's address, whose host may be a name: the numeric address that answered last
        self._answered: dict[str, str] = {}

    def connect(self, server: str, where: ServerAddress, lane: int, deadline: Deadline) -> tuple[Link, int]:
        """Connect to a server, at whichever of its numeric addresses answers.

        Other addresses of the name may be unused or another server's. If none answers as the expected run, returns the
        first answer, or raises the first failure.
        """
        found = self._addresses(server, where.address)
        other: tuple[Link, int] | None = None
        failure: EngineError | None = None
        for number, (host, port) in enumerate(found, 1):
            # An address that does not answer may use only a share of the time.
            left_ms = deadline.left_ms() if number == len(found) else min(deadline.left_ms(), ATTEMPT_MS)
            try:
                if where.tls:
                    tls, expected = self._tls.now(server), server_name(server)
                    answer = self._client.connect_tls(host, port, tls, expected, lane, left_ms)
                else:
                    answer = self._client.connect_tcp(host, port, lane, left_ms)
            except EngineError as error:
                _log.debug("memory server %s at %s: %s", server, host, error)
                failure = failure or error
                continue
            if answer[1] == where.instance_id:
                self._answered[where.address] = host
                return answer
            other = other or answer
        if other is not None:
            return other
        assert failure is not None
        raise failure

    def resume(self, link: Link, server: str, address: str, secured: bool, accept_instance: int) -> int:
        """Give the link a new connection, and return the server's instance. Raises EngineError, UnavailableError."""
        failure: EngineError | None = None
        for host, port in self._addresses(server, address):
            try:
                if secured:
                    tls, expected = self._tls.now(server), server_name(server)
                    instance_id = link.resume_tls(host, port, tls, expected, accept_instance, ATTEMPT_MS)
                else:
                    instance_id = link.resume_tcp(host, port, accept_instance, ATTEMPT_MS)
            except EngineError as error:
                if error.status is Status.SESSION_ENDED:  # the server itself says so
                    raise
                failure = failure or error
            else:
                self._answered[address] = host
                return instance_id
        assert failure is not None
        raise failure

    def _addresses(self, server: str, address: str) -> list[tuple[str, int]]:
        """Return a server's numeric addresses, beginning with the one that answered last. Raises UnavailableError."""
        host, port = parse_address(address)
        try:
            found = [str(where[0]) for _, where in addresses_of(host, port)]
        except OSError as error:
            raise UnavailableError(f"memory server {server}: cannot resolve {host!r}: {error.strerror}") from error
        before = self._answered.get(address)
        return [(each, port) for each in sorted(found, key=lambda each: each != before)]
