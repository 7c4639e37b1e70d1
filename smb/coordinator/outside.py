"""The coordinator's clocks, random numbers, threads and connections. They are passed in and obtained nowhere else, so
that a simulator can decide all of them (tests/simulator).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc.aio

from smb.config.backoff import own_random
from smb.config.parse import parse_address
from smb.coordinator.events import Instant
from smb.security.credentials import CHANNEL_OPTIONS, Credentials, aio_channel


def read_clocks() -> Instant:
    return Instant(time.monotonic(), time.time())


def boot_seconds() -> float:
    """Seconds on a clock that runs while the host sleeps and that nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def new_id() -> int:
    """Return a random non-zero 64-bit id."""
    return secrets.randbits(64) or 1


class Connections(Protocol):
    """Ways to reach other daemons."""

    def channel(self, address: str, peer: str, credentials: Credentials | None) -> grpc.aio.Channel:
        """Return a channel to the daemon whose certificate has the name `peer`."""

    def etcd_channel(self, address: str, credentials: Credentials | None) -> grpc.aio.Channel:
        """Return a channel to a member of etcd."""

    async def knock(self, address: str) -> None:
        """Connect there and hang up. Raises ConnectionRefusedError if the port is closed, else OSError."""


class GrpcConnections:
    """Connections over this host's network."""

    def channel(self, address: str, peer: str, credentials: Credentials | None) -> grpc.aio.Channel:
        return aio_channel(address, peer, credentials)

    def etcd_channel(self, address: str, credentials: Credentials | None) -> grpc.aio.Channel:
        options = (*CHANNEL_OPTIONS, ("grpc.max_reconnect_backoff_ms", 500))
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        secured = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.certificate)
        return grpc.aio.secure_channel(address, secured, options=options)

    async def knock(self, address: str) -> None:
        host, port = parse_address(address)
        _, writer = await asyncio.open_connection(host, port)
        writer.close()


@dataclass(frozen=True, slots=True)
class Outside:
    """The clocks and the other parts. `end_process` ends this process at once with the given status."""

    now: Callable[[], Instant] = read_clocks
    boot_s: Callable[[], float] = boot_seconds
    new_id: Callable[[], int] = new_id
    uniform: Callable[[float, float], float] = own_random.uniform
    in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread
    connections: Connections = field(default_factory=GrpcConnections)
    end_process: Callable[[int], object] = os._exit

    def draw(self) -> float:
        """Return a random number from 0 to 1, as Backoff asks for."""
        return self.uniform(0.0, 1.0)
