"""`smb stat NAME`: one buffer in detail."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator, Json
from smb.tools.cli.output import console, print_json, table
from smb.tools.cli.relay import mirrored, mirrors_json, show_mirrors
from smb.tools.cli.train import show_workers

if TYPE_CHECKING:
    from smb import Buffer, Client, ServerInfo
    from smb.train import GroupStatus
    from smb.transport.base import SegmentLocation

_SHOWN_MAX = 200  # characters of one metadata entry


def stat(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The buffer's name.")],
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Show one buffer in detail.

    Shape, layout, metadata, the version published last, and where each segment lies; of a training, its scheme, round
    and workers. A segment is alive, gone (its server is) or lost (its server came back without its memory). A figure
    that only a server knows is shown as unknown while the server is down, in JSON as null. Of a state published with
    deltas= it is the generation that was published last; versions are whole states.

    Example: smb stat weights
    """
    import dataclasses

    from smb.published import has_deltas
    from smb.tools.cli.describe import buffer_json, version_of

    with connect(coordinator) as client:
        buffer = client.open(name)  # does not look for paths to its bytes: its servers may be down
        servers = client.servers()
        version = version_of(buffer, servers)
        generation = _generation(client, buffer, servers) if has_deltas(buffer) else None
        mirrors = mirrored(client, buffer, servers)
        together = _moving_with(client, buffer)
        is_training, training = _training(client, buffer, version is not None)
    if as_json:
        described = {**buffer_json(buffer), "versions": buffer.versions, "version": version}
        if has_deltas(buffer):
            described["generation"] = generation
        if mirrors:
            described["mirrors"] = mirrors_json(mirrors)
        if together:
            described["moves_with"] = together
        if is_training:
            described["training"] = dataclasses.asdict(training) if training is not None else None
        print_json({**described, "metadata": buffer.metadata})
        return
    _show(buffer, servers, _published(buffer, version, generation), together)
    if mirrors:
        console().print()
        show_mirrors(name, mirrors)
    if training is not None:
        _show_training(training)
    elif is_training:
        console().print("\nA training; its round and workers are unknown while its servers can't be reached.")


def _moving_with(client: Client, buffer: Buffer) -> list[str]:
    if not any(segment.group for segment in buffer.layout.segments):
        return []
    return [info.name for info in client.list() if info.name != buffer.name and info.moves_with(buffer.info)]


def _generation(client: Client, state: Buffer, servers: list[ServerInfo]) -> int | None:
    """Return the latest generation of a state with deltas, None if it is unknown."""
    from smb.errors import Error
    from smb.published import LOG
    from smb.tools.cli.describe import version_of

    try:
        log = client.open(state.name + LOG)
    except Error:
        return None
    return version_of(log, servers)


def _published(buffer: Buffer, version: int | None, generation: int | None) -> str:
    """Return the latest publication as text; "" for a buffer that is not published to, or whose memory is lost."""
    from smb.published import has_deltas

    if buffer.info.lost:
        return ""
    if has_deltas(buffer):
        if not generation:
            return "nothing yet" if generation == 0 else "generation unknown"
        whole = "" if version is None else f", last whole state in {_shown_version(version)}"
        return f"generation {generation}{whole}"
    return "" if buffer.info.replicas > 1 or (version == 0 and buffer.versions == 1) else _shown_version(version)


def _shown_version(version: int | None) -> str:
    return "unknown" if version is None else f"version {version}" if version else "nothing yet"


def _training(client: Client, buffer: Buffer, reached: bool) -> tuple[bool, GroupStatus | None]:
    """Return whether the buffer has the weights of a training, and the training's status, if known."""
    if not buffer.metadata:
        return False, None
    from smb.errors import Error
    from smb.train.group import METADATA
    from smb.train.status import status

    if METADATA not in buffer.metadata:
        return False, None
    try:
        return True, status(client, buffer.name) if reached else None
    except Error:
        return True, None


def _show_training(training: GroupStatus) -> None:
    alive = sum(worker.alive for worker in training.workers)
    out = console()
    out.print(
        f"\ntraining by {training.scheme}, round {training.round}, {alive} of {len(training.workers)} workers alive"
    )
    show_workers(training)


def _show(buffer: Buffer, servers: list[ServerInfo], published: str, together: list[str]) -> None:
    from smb.call.sync_requests import LOST
    from smb.config.parse import format_bytes
    from smb.tools.cli.describe import copies_state, format_shape, server_state

    layout = buffer.layout
    addresses = {server.name: (server.address, server_state(server)) for server in servers}
    out = console()
    facts = table("", "")
    facts.show_header = False
    for key, value in (
        ("name", buffer.name),
        ("shape", format_shape(buffer.shape)),
        ("dtype", str(buffer.dtype)),
        ("wire", buffer.wire),
        ("size", f"{format_bytes(buffer.nbytes)} ({buffer.nbytes} bytes)"),
        ("stripe", format_bytes(layout.stripe_bytes)),
        ("chunk", format_bytes(layout.chunk_bytes)),
        ("epoch", str(layout.epoch)),
        ("versions", str(buffer.versions)),
        ("copies", copies_state(buffer)),
    ):
        facts.add_row(key, value)
    if together:
        facts.add_row("moves with", ", ".join(together))
    if published:
        facts.add_row("published", published)
    for key, item in buffer.metadata.items():
        text = json.dumps(item, ensure_ascii=False)
        facts.add_row(f"metadata {key}", text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + " ...  (all: --json)")
    out.print(facts)
    out.print()
    copied = buffer.info.replicas > 1 or any(segment.copying_to for segment in layout.segments)
    copies = ("COPY ON",) if copied else ()
    rows = table("SEGMENT", "SERVER", *copies, "STATE", "ADDRESS", "SIZE", "ID", right=("SEGMENT", "SIZE"))
    for index, segment in enumerate(layout.segments):
        address, state = addresses.get(segment.server, ("unknown", "gone"))
        state = "lost" if segment.lost else state
        rows.add_row(
            str(index), segment.server, *([_copy_on(segment)] if copied else []), state, address,
            format_bytes(segment.nbytes), f"{segment.id:016x}",
            style=None if state == "alive" else "red",
        )  # fmt: skip
    out.print(rows)
    if buffer.info.lost:
        out.print(f"\nlost: {LOST}", style="red", highlight=False)


def _copy_on(segment: SegmentLocation) -> str:
    return segment.backup or (f"{segment.copying_to}, {segment.copied:.0%}" if segment.copying_to else "none")
