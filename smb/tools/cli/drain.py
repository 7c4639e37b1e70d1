"""`smb drain SERVER`, `smb undrain SERVER`, `smb rebalance`: move segments between servers while clients work. `smb
maintenance`: hold re-copying during planned work. `smb forget SERVER`: free memory that belongs to no buffer.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from smb.config.parse import format_bytes, parse_seconds
from smb.errors import Error, InvalidArgumentError
from smb.tools.cli.connection import coordinator_at
from smb.tools.cli.options import Coordinator
from smb.tools.cli.output import console, counted, table

if TYPE_CHECKING:
    from smb.rpc import control_pb2 as pb

_CALL_S = 10.0
_LOOK_S = 0.5
_SAY_S = 2.0

Server = Annotated[str, typer.Argument(metavar="SERVER", help="The memory server's name.")]


def drain(
    server: Server,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the server is empty, and show the progress.")
    ] = False,
    coordinator: Coordinator = None,
) -> None:
    """Empty a memory server while its clients work.

    The server gets no new segments, and its segments move to other servers. Some buffers cannot move: those in use by a
    view, by a rule with a state, under one lock with others, over RDMA or with transport="shm". They are named, and
    --wait then ends with an error. The drain goes on after a restart of the server.

    Example: smb drain storage-2 --wait
    """
    with coordinator_at(coordinator) as cluster:
        reply = cluster.drain_server(server, _CALL_S)
        if not wait:
            console().print(_state(server, reply))
            _say_what_stays(reply)
            return
        said_at = 0.0
        while reply.moving or reply.copying:
            if time.monotonic() - said_at >= _SAY_S:
                said_at = time.monotonic()
                console(stderr=True).print(_state(server, reply))
            time.sleep(_LOOK_S)
            reply = cluster.drain_server(server, _CALL_S)
        if reply.segment_count:
            _say_what_stays(reply)
            raise Error(f"{server} is not empty: the buffers that stay there are listed above")
        console().print(f"{server} is empty: it can be stopped")


def undrain(server: Server, coordinator: Coordinator = None) -> None:
    """End a drain: the memory server gets new segments again.

    Segments that have moved away stay there; smb rebalance moves some back.

    Example: smb undrain storage-2
    """
    with coordinator_at(coordinator) as cluster:
        cluster.drain_server(server, _CALL_S, undo=True)
    console().print(f"{server} gets new segments again")


def maintenance(
    server: Annotated[str | None, typer.Argument(metavar="SERVER", help="The memory server's name.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All memory servers, instead of one.")] = False,
    lasts: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="How long: 90s, 30m, 2h, at most 7d. It ends by itself.")
    ] = "1h",
    end: Annotated[bool, typer.Option("--end", help="End it now.")] = False,
    coordinator: Coordinator = None,
) -> None:
    """Hold re-copying during planned work, such as a server's restart.

    Until its end, lost copies are not made anew: while SERVER is away, or with --all in any case. The other copies go
    on. As long as a buffer has one copy, the loss of that copy's server loses data. The maintenance survives a restart
    of the coordinator; smb status shows it.

    Example: smb maintenance storage-2 --for 30m
    """
    if everything == bool(server):
        raise InvalidArgumentError("name one memory server, or say --all")
    title = server or "all memory servers"
    with coordinator_at(coordinator) as cluster:
        until = cluster.maintain(server or "", parse_seconds(lasts), _CALL_S, end=end)
    if end:
        console().print(f"maintenance of {title} has ended: lost copies are made anew")
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(until))
    whose = f"while {server} is away" if server else "whichever server is away"
    console().print(f"maintenance of {title} until {at}: until then lost copies are not made anew {whose}")


def forget(
    server: Server,
    segments: Annotated[
        list[str] | None, typer.Argument(metavar="SEGMENT", help="Segment ids as in smb status: 16 hexadecimal digits.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Free everything that is quarantined on the server.")
    ] = False,
    coordinator: Coordinator = None,
) -> None:
    """Free memory that a server keeps in quarantine.

    The contents are lost. A server quarantines segments that the coordinator's records do not contain, for example
    after the restore of an old backup. smb status lists them with the reason. If records that contain them are
    restored, they are used again.

    Example: smb forget storage-2 1f00aa94e21b07d3
    """
    if bool(segments) == everything:
        raise InvalidArgumentError("pass segment ids, or --all; smb status lists the quarantined segments")
    try:
        numbers = [int(each, 16) for each in segments or ()]
    except ValueError:
        raise InvalidArgumentError(f"a segment id has 16 hexadecimal digits, not {' '.join(segments or ())}") from None
    with coordinator_at(coordinator) as cluster:
        reply = cluster.forget_segments(server, numbers, _CALL_S)
    freed = format_bytes(reply.nbytes)
    console().print(f"{server} frees {counted(reply.segment_count, 'quarantined segment')}, {freed}")


def rebalance(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would move, and move nothing.")] = False,
    single_copies: Annotated[
        bool,
        typer.Option("--single-copies", help="Move buffers with one copy, too: their local clients stop mapping them."),
    ] = False,
    coordinator: Coordinator = None,
) -> None:
    """Balance memory servers by traffic, hosts, zones and memory.

    For buffers with replicas=2, while clients use them: two copies switch their roles, which moves no data, so that all
    servers answer about as much; copies that share a host or a zone are taken apart; the stripes of a buffer are spread
    over more servers; and copies move until the servers are about equally full. All of it goes on in the background.

    Buffers with one copy move only with --single-copies. Clients on the server's host cannot map them afterwards, which
    makes their calls slower.

    Example: smb rebalance --dry-run
    """
    from smb.config.parse import format_bytes

    with coordinator_at(coordinator) as cluster:
        reply = cluster.rebalance(_CALL_S, dry_run=dry_run, single_copies=single_copies)
    moves = reply.moves
    if not moves:
        console().print(
            "Nothing to move: traffic, stripes and memory (to 5 %) are spread evenly, or no move makes them more so"
        )
        _say_what_else(reply)
        return
    rows = table("BUFFER", "SIZE", "FROM", "TO", right=("SIZE",))
    for move in moves:
        size = "role only" if move.switches else format_bytes(move.nbytes)
        rows.add_row(move.title, size, move.leaving, move.target)
    console().print(rows)
    copies = [move.nbytes for move in moves if not move.switches]
    total = f"{counted(len(copies), 'segment')}, {format_bytes(sum(copies))}"
    console().print(f"\n{total} {'would move' if dry_run else 'move from now on'}")
    if switches := len(moves) - len(copies):
        now = "would switch" if dry_run else "switch"
        console().print(f"{counted(switches, 'pair')} of copies {now} roles, which moves no data")
    _say_what_else(reply)


def _say_what_else(reply: pb.RebalanceReply) -> None:
    if reply.single_left:
        console().print(
            f"{counted(reply.single_left, 'segment')} with one copy could move, too: smb rebalance --single-copies "
            f"(clients on their host reach them through the server afterwards, and do not map them)"
        )


def _state(server: str, reply: pb.DrainServerReply) -> str:
    from smb.config.parse import format_bytes

    held = f"{counted(reply.segment_count, 'segment')}, {format_bytes(reply.nbytes)}"
    copying = f"; {counted(reply.copying, 'segment')} with one copy get another" if reply.copying else ""
    return f"{server} is being drained: {held} left, of which {reply.moving} are to leave{copying}"


def _say_what_stays(reply: pb.DrainServerReply) -> None:
    from smb.config.parse import format_bytes

    for each in reply.stays:
        sys.stderr.write(f'stays: buffer "{each.name}", {format_bytes(each.nbytes)}: {each.why}\n')
    if reply.stays_left_out:
        sys.stderr.write(f"and {reply.stays_left_out} more\n")
