"""`smb stat NAME`: one buffer in detail."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from smb.cli.connection import connect
from smb.cli.options import Coordinator, Json
from smb.cli.output import console, print_json, table

if TYPE_CHECKING:
    from smb import Buffer

_SHOWN_MAX = 200  # characters of one entry of the metadata


def stat(
    name: Annotated[str, typer.Argument(help="The buffer's name.")],
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Show one buffer in detail.

    Shape, layout, metadata, and where each segment lies.
    """
    from smb.cli.describe import buffer_json

    with connect(coordinator) as client:
        buffer = client.open(name)  # looks for no way to its bytes yet: its servers may be down
        addresses = {server.name: (server.address, server.alive) for server in client.servers()}
    if as_json:
        print_json({**buffer_json(buffer), "metadata": buffer.metadata})
        return
    _show(buffer, addresses)


def _show(buffer: Buffer, addresses: dict[str, tuple[str, bool]]) -> None:
    from smb.cli.describe import format_shape
    from smb.config import format_bytes

    layout = buffer.layout
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
    ):
        facts.add_row(key, value)
    for key, item in buffer.metadata.items():
        text = json.dumps(item, ensure_ascii=False)
        facts.add_row(f"metadata {key}", text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + " ...  (all: --json)")
    out.print(facts)
    out.print()
    rows = table("SEGMENT", "SERVER", "STATE", "ADDRESS", "SIZE", "ID", right=("SEGMENT", "SIZE"))
    for index, segment in enumerate(layout.segments):
        address, alive = addresses.get(segment.server, ("unknown", False))
        state = "alive" if alive else "gone"
        rows.add_row(
            str(index), segment.server, state, address, format_bytes(segment.nbytes), f"{segment.id:016x}",
            style=None if alive else "red",
        )  # fmt: skip
    out.print(rows)
