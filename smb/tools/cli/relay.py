"""`smb relay NAME`: mirrors of a published buffer on further memory servers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smb.errors import InvalidArgumentError, UnavailableError
from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator, Json
from smb.tools.cli.output import console, print_json, table

if TYPE_CHECKING:
    from smb import Buffer, Client


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

    Each byte crosses a link once; readers that follow it take what is nearest. Without options it lists the mirrors.
    How far each is behind is counted from what is published now; it is unknown while the source can't be reached.

    Example: smb relay policy --to rack-7 --to rack-8
    """
    from smb.tools.cli.describe import version_of

    if auto and (to or stop):
        raise InvalidArgumentError("smb relay: --auto goes with neither --to nor --stop")
    with connect(coordinator) as client:
        if stop:
            client.stop_relays(name, to)
        elif to or auto:
            made = client.relay(name, "auto" if auto else to or ())
            if not made:
                raise UnavailableError(f"relay of {name!r}: no mirror was made: {_why_none(client, name)}")
        buffer = client.open(name)
        published = version_of(buffer, client.servers()) if buffer.info.mirrors else None
    if as_json:
        print_json(mirrors_json(buffer, published))
    else:
        show_mirrors(buffer, published)


def _why_none(client: Client, name: str) -> str:
    """Return why --auto found no memory server."""
    parts = {segment.server for segment in client.open(name).layout.segments}
    why = Counter(
        "with a part of it" if server.name in parts else "being drained" if server.alive else "not alive"
        for server in client.servers()
    )
    told = ", ".join(f"{count} {each}" for each, count in why.items())
    return f"no memory server is free for one: {told}. Start another, or publish on fewer (servers=)"


def mirrors_json(buffer: Buffer, published: int | None) -> list[dict[str, Any]]:
    """Return its mirrors for --json, with the version published last, None if nobody knows."""
    return [
        {
            "name": mirror.name,
            "server": mirror.server,
            "zone": mirror.zone,
            "alive": mirror.alive,
            "version": mirror.version,
            "arrived_bytes": mirror.arrived_bytes,
            "published": published,
            "feeds": dict(mirror.feeds),
        }
        for mirror in buffer.info.mirrors
    ]


def show_mirrors(buffer: Buffer, published: int | None) -> None:
    """Print its mirrors, who feeds whom how fast, and how far each is behind the version published last."""
    from smb.config.parse import format_bytes

    if not buffer.info.mirrors:
        console().print(f"{buffer.name} has no mirrors")
        return
    short = {mirror.name: mirror.server for mirror in buffer.info.mirrors} | {buffer.name: "the source"}
    rows = table("MIRROR ON", "ZONE", "STATE", "VERSION", "ARRIVING", "FED BY", right=("VERSION", "ARRIVING"))
    for mirror in buffer.info.mirrors:
        behind = None if published is None else published - mirror.version
        lag = ", lag unknown" if behind is None else f", {behind} behind" if behind > 0 else ""
        feeds = sorted(mirror.feeds.items(), key=lambda feed: -feed[1])
        rows.add_row(
            mirror.server,
            mirror.zone or "-",
            "alive" if mirror.alive else "gone",
            (str(mirror.version) if mirror.version else "none yet") + lag,
            f"{100 * mirror.arrived_bytes // max(1, buffer.nbytes)} %" if mirror.arrived_bytes else "-",
            ", ".join(f"{short.get(name, name)} {format_bytes(int(rate))}/s" for name, rate in feeds) or "-",
            style=None if mirror.alive else "red",
        )
    console().print(rows)
