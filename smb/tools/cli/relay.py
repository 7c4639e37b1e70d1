"""`smb relay NAME`: mirrors of a published buffer on further memory servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smb.errors import InvalidArgumentError, UnavailableError
from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator, Json
from smb.tools.cli.output import console, print_json, table

if TYPE_CHECKING:
    from smb import Buffer, Client, ServerInfo


def relay(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The published buffer's name.")],
    to: Annotated[
        list[str] | None, typer.Option("--to", metavar="SERVER", help="A memory server; may be given several times.")
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="All memory servers that have no part of it.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Delete its mirrors: those of --to, or all.")] = False,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Mirror a published buffer on memory servers near its readers.

    Each byte crosses a link once; readers that follow the buffer use the nearest mirror. Without options the mirrors
    are listed. How far each mirror is behind is counted from the latest publication; it is unknown while the source
    cannot be reached. For a state published with deltas=, whole states and deltas are mirrored.

    Example: smb relay policy --to rack-7 --to rack-8
    """
    if auto and (to or stop):
        raise InvalidArgumentError("smb relay: --auto cannot be combined with --to or --stop")
    with connect(coordinator) as client:
        if stop:
            client.stop_relays(name, to)
        elif to or auto:
            made = client.relay(name, "auto" if auto else to or ())
            if not made:
                raise UnavailableError(f"relay of {name!r}: no mirror was made: {_why_none(client, name)}")
        buffer = client.open(name)
        shown = mirrored(client, buffer, client.servers())
    if as_json:
        print_json(mirrors_json(shown))
    else:
        show_mirrors(name, shown)


def _why_none(client: Client, name: str) -> str:
    parts = Counter(segment.server for segment in client.open(name).layout.segments)

    def why_not(server: ServerInfo) -> str:
        if server.name in parts:
            return "with a part of it"
        return "being drained" if server.may_live else "not alive"

    why = Counter(map(why_not, client.servers()))
    reasons = ", ".join(f"{count} {each}" for each, count in why.items())
    there = ", or name one that has a part of the buffer (--to)" if len(parts) > 1 else ""
    return f"no memory server is free for a mirror: {reasons}. Start another one, publish on fewer (servers=){there}"


@dataclass(frozen=True)
class Mirrored:
    """A published buffer with its mirrors. `published` is the latest version, None if it is unknown."""

    buffer: Buffer
    published: int | None
    lost: frozenset[str] = frozenset()  # servers that came back without their mirror's memory


def mirrored(client: Client, buffer: Buffer, servers: Sequence[ServerInfo]) -> tuple[Mirrored, ...]:
    """Return a published buffer, and for a state with deltas also its log."""
    from smb.errors import NotFoundError
    from smb.published import beside
    from smb.tools.cli.describe import version_of

    if not buffer.info.mirrors:
        return ()
    lost: set[str] = set()
    for mirror in buffer.info.mirrors:
        with suppress(NotFoundError):  # the mirror was stopped in the meantime
            if client.open(mirror.name).info.lost:
                lost.add(mirror.server)
    found = [Mirrored(buffer, version_of(buffer, servers), frozenset(lost))]
    for name in beside(buffer):
        with suppress(NotFoundError):  # that part of the state is gone
            log = client.open(name)
            found.append(Mirrored(log, version_of(log, servers)))
    return tuple(found)


def mirrors_json(all_mirrored: Sequence[Mirrored]) -> list[dict[str, Any]]:
    """Return the mirrors for --json; for a state with deltas, each with its generation and the sources of its
    deltas.
    """
    if not all_mirrored:
        return []
    states, *deltas = all_mirrored
    found: list[dict[str, Any]] = [
        {
            "name": mirror.name,
            "server": mirror.server,
            "zone": mirror.zone,
            "alive": mirror.alive,
            "version": mirror.version,
            "arrived_bytes": mirror.arrived_bytes,
            "published": states.published,
            "feeds": dict(mirror.feeds),
        }
        for mirror in states.buffer.info.mirrors
    ]
    for each in deltas:
        there = {mirror.server: mirror for mirror in each.buffer.info.mirrors}
        for mirror in found:
            log = there.get(mirror["server"])
            mirror["generation"] = log.version if log is not None else None
            mirror["delta_feeds"] = dict(log.feeds) if log is not None else {}
    return found


def show_mirrors(name: str, all_mirrored: Sequence[Mirrored]) -> None:
    """Print the mirrors, which source feeds each at which rate, and how far each is behind the latest publication."""
    if not all_mirrored:
        console().print(f"{name} has no mirrors")
        return
    states, *deltas = all_mirrored
    _show(states, "MIRROR ON", "VERSION")
    for each in deltas:
        if each.buffer.info.mirrors:
            console().print()
            _show(each, "DELTAS ON", "GENERATION")


def _show(shown: Mirrored, title: str, number: str) -> None:
    from smb.config.parse import format_bytes

    buffer = shown.buffer
    servers = [mirror.server for mirror in buffer.info.mirrors]
    rows = table(title, "ZONE", "STATE", number, "ARRIVING", "FED BY", right=(number, "ARRIVING"))
    for mirror in buffer.info.mirrors:
        behind = None if shown.published is None else shown.published - mirror.version
        lag = ", lag unknown" if behind is None else f", {behind} behind" if behind > 0 else ""
        feeds = sorted(mirror.feeds.items(), key=lambda feed: -feed[1])
        rows.add_row(
            mirror.server,
            mirror.zone or "-",
            "lost" if mirror.server in shown.lost else "alive" if mirror.alive else "gone",
            (str(mirror.version) if mirror.version else "none yet") + lag,
            f"{100 * mirror.arrived_bytes // max(1, buffer.nbytes)} %" if mirror.arrived_bytes else "-",
            ", ".join(f"{_short(name, servers)} {format_bytes(int(rate))}/s" for name, rate in feeds) or "-",
            style=None if mirror.alive else "red",
        )
    console().print(rows)
    if shown.lost:
        again = " ".join(f"--to {server}" for server in sorted(shown.lost))
        console().print(
            f"lost: the server came back without its memory. Create the mirror again: smb relay {buffer.name} {again}"
        )


def _short(name: str, servers: Sequence[str]) -> str:
    """Return the server of a mirror; "the source" for a buffer that is not a mirror."""
    from smb.published import MIRROR

    server = name.partition(MIRROR)[2]
    return server if server in servers else "the source"
