"""Which transport for which segment: the first that leads there, and why the ones before it did not."""

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

TRY_AUTO = "; transport='auto' takes what works"  # the end of an error where one transport was asked for


def rdma_with(variables: Mapping[str, str]) -> MakesRdma:
    """Return what makes a client's transport over RDMA with these settings (SMB_VERBS_...). Raises
    InvalidArgumentError. The room of RDMA has no other entry in a client.
    """
    settings = Settings.of(variables)
    return lambda engine, links, session_id, credentials: Verbs(engine, links, session_id, settings, credentials)


def make_transports(choice: str, client: EngineClient, links: Links, verbs: Rdma) -> tuple[Transport, ...]:
    """Return the transports to be tried, in this order."""
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
    """Return what `ask` gives for each location, in order; if the first is `far`, the others are asked at one time.

    On this host a path is found sooner than a thread; over a network it takes round trips, which should not add up.
    Raises what the first location in order does that fails, once all that were asked have answered.
    """
    first = ask(locations[0])
    rest = locations[1:]
    if not rest or not far(first):
        return (first, *map(ask, rest))
    return (first, *at_once(ask, rest))


def choose(transports: Sequence[Transport], location: SegmentLocation, epoch: int, deadline: Deadline) -> SegmentPath:
    """Return the path to a segment.

    Raises TransportError if none of the transports leads there, UnavailableError if that may be because the server is
    down, and what reach raises.
    """
    path, refusals = _first(transports, location, lambda transport: transport.reach(location, epoch, deadline))
    if refusals:
        path = SegmentPath(path.transport, f"{path.why} ({'; '.join(refusals)})", path.links, path.segment)
    return path


def choose_gated(transports: Sequence[Transport], location: SegmentLocation, deadline: Deadline) -> tuple[Link, ...]:
    """Return the links on which changes of the segment go through its server. Raises as choose does."""
    return _first(transports, location, lambda transport: transport.gated(location, deadline))[0]


def choose_waits(transports: Sequence[Transport], location: SegmentLocation, deadline: Deadline) -> Link:
    """Return the link for what waits at the segment's server. Raises as choose does."""
    return _first(transports, location, lambda transport: transport.waits(location, deadline))[0]


def _first(
    transports: Sequence[Transport], location: SegmentLocation, ask: Callable[[Transport], Found]
) -> tuple[Found, list[str]]:
    """Return what the first transport that leads there gives, and why those before it do not."""
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
    """Return "shm to a, b (same host); tcp to c (10.0.0.2:7071 ...)": what was chosen and why, each server once."""
    servers_by_path: dict[tuple[str, str], list[str]] = {}
    for location, path in paths:
        servers = servers_by_path.setdefault((path.transport, path.why), [])
        if location.server not in servers:
            servers.append(location.server)
    return "; ".join(
        f"{transport} to {', '.join(servers)}: {why}" for (transport, why), servers in servers_by_path.items()
    )
