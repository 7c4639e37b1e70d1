"""Chooses the transport for each segment: the first one that leads there, with the reasons against those before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from smb.engine import EngineClient, Link
from smb.errors import TransportError, UnavailableError
from smb.security.credentials import Credentials
from smb.transport.base import (
    Deadline,
    NoAnswerError,
    NoPathError,
    Rdma,
    SegmentLocation,
    SegmentPath,
    Transport,
    at_once,
)
from smb.transport.reconnect import Links
from smb.transport.shm import SharedMemory
from smb.transport.tcp import Tcp
from smb.transport.verbs.queue_pair import Settings
from smb.transport.verbs.transport import Verbs

Found = TypeVar("Found")
# (engine, links, session's id, credentials)
MakesRdma: TypeAlias = Callable[[EngineClient, Links, int, "Credentials | None"], Rdma]

TRY_AUTO = "; transport='auto' takes what works"  # ends the error of a client that asked for one transport


def rdma_with(variables: Mapping[str, str]) -> MakesRdma:
    """Return a function that makes a client's RDMA transport with these settings (SMB_VERBS_...).

    Raises InvalidArgumentError. This is the only entry of a client to the RDMA room.
    """
    settings = Settings.of(variables)
    return lambda engine, links, session_id, credentials: Verbs(engine, links, session_id, settings, credentials)


def make_transports(choice: str, client: EngineClient, links: Links, verbs: Rdma) -> tuple[Transport, ...]:
    """Return the transports to try, in this order."""
    if choice == "shm":
        return (SharedMemory(client, links, alone=True),)
    if choice == "verbs":
        return (verbs,)
    if choice == "tcp":
        return (Tcp(links),)
    return (SharedMemory(client, links), verbs, Tcp(links))


def for_each(
    locations: Sequence[SegmentLocation], ask: Callable[[SegmentLocation], Found], far: Callable[[Found], bool]
) -> tuple[Found, ...]:
    """Return `ask` of each location, in order. If the first result is `far`, the other locations are asked
    concurrently.

    On this host a path is found faster than a thread is started; over a network each takes round trips, which must not
    add up. Waits for all answers, then raises the error of the first location that failed.
    """
    first = ask(locations[0])
    rest = locations[1:]
    if not rest or not far(first):
        return (first, *map(ask, rest))
    return (first, *at_once(ask, rest))


def choose(transports: Sequence[Transport], location: SegmentLocation, epoch: int, deadline: Deadline) -> SegmentPath:
    """Return the path to a segment.

    Raises TransportError if no transport leads there, UnavailableError if the reason may be that the server is down,
    and the errors of Transport.reach.
    """
    path, refusals = _first(transports, location, lambda transport: transport.reach(location, epoch, deadline))
    if refusals:
        path = SegmentPath(path.transport, f"{path.why} ({'; '.join(refusals)})", path.links, path.segment)
    return path


def choose_gated(transports: Sequence[Transport], location: SegmentLocation, deadline: Deadline) -> tuple[Link, ...]:
    """Return the links on which changes of the segment go through its server. Raises as choose does."""
    return _first(transports, location, lambda transport: transport.gated(location, deadline))[0]


def choose_waits(transports: Sequence[Transport], location: SegmentLocation, deadline: Deadline) -> Link:
    """Return the link for requests that wait at the segment's server. Raises as choose does."""
    return _first(transports, location, lambda transport: transport.waits(location, deadline))[0]


def _first(
    transports: Sequence[Transport], location: SegmentLocation, ask: Callable[[Transport], Found]
) -> tuple[Found, list[str]]:
    """Return the result of the first transport that leads there, and the reasons against those before it."""
    refusals: list[str] = []
    may_come_back = False
    for transport in transports:
        try:
            return ask(transport), refusals
        except NoPathError as error:
            refusals.append(str(error))
            may_come_back |= isinstance(error, NoAnswerError)
    names = " or ".join(transport.name for transport in transports)
    text = f"server {location.server} can't be reached over {names}: {'; '.join(refusals)}"
    if may_come_back:
        raise UnavailableError(f"memory {text}")
    raise TransportError(f"{text}{TRY_AUTO}")


def describe(paths: Sequence[tuple[SegmentLocation, SegmentPath]]) -> str:
    """Return the chosen paths as text, each server once: "shm to a, b (same host); tcp to c (10.0.0.2:7071 ...)"."""
    servers_by_path: dict[tuple[str, str], list[str]] = {}
    for location, path in paths:
        servers = servers_by_path.setdefault((path.transport, path.why), [])
        if location.server not in servers:
            servers.append(location.server)
    return "; ".join(
        f"{transport} to {', '.join(servers)}: {why}" for (transport, why), servers in servers_by_path.items()
    )
