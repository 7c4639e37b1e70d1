"""`smb ls`: the buffers of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator, Json
from smb.tools.cli.output import console, counted, print_json, table

if TYPE_CHECKING:
    from smb import BufferInfo


def ls(
    everything: Annotated[
        bool, typer.Option("--all", help="Include what trainings and published states keep beside their weights.")
    ] = False,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """List the buffers.

    Shows shape, dtype, size and servers. A published state has one row, without its mirrors and logs; --json lists all
    buffers.

    Example: smb ls --all
    """
    from smb.config.parse import format_bytes
    from smb.tools.cli.describe import buffer_json, format_shape, server_names
    from smb.tools.cli.train import groups_in

    with connect(coordinator) as client:
        buffers = sorted(client.list(), key=lambda buffer: buffer.name)
    if as_json:
        print_json([buffer_json(buffer) for buffer in buffers])
        return
    trainings = () if everything else groups_in(buffer.name for buffer in buffers)
    inside = {buffer.name for buffer in buffers if any(buffer.name.startswith(f"{name}/") for name in trainings)}
    beside = set() if everything else _beside_states(buffers) - inside
    rows = table("NAME", "SHAPE", "DTYPE", "SIZE", "STRIPE", "SERVERS", right=("SIZE", "STRIPE"))
    for buffer in buffers:
        if buffer.name in inside or buffer.name in beside:
            continue
        rows.add_row(
            buffer.name,
            format_shape(buffer.shape),
            buffer.dtype_name,
            format_bytes(buffer.nbytes),
            format_bytes(buffer.layout.stripe_bytes),
            ", ".join(server_names(buffer)),
        )
    console().print(rows)
    if inside:
        console().print(f"\nand {counted(len(inside), 'buffer')} of trainings: smb ls --all, smb train ls")
    if beside:
        console().print(f"\nand {counted(len(beside), 'buffer')} of published states: smb ls --all, smb stat NAME")


def _beside_states(buffers: list[BufferInfo]) -> set[str]:
    """Return the names of the buffers that belong to published states."""
    from smb.published import LOG
    from smb.relay.arrived import SUFFIX
    from smb.relay.publication_log import PublicationLog

    names = {buffer.name for buffer in buffers}
    found = {buffer.name for buffer in buffers if buffer.mirror_of}
    found |= {mirror + SUFFIX for mirror in found if mirror + SUFFIX in names}
    plain = {buffer.name: buffer for buffer in buffers if buffer.versions == 1 and buffer.dtype.name == "uint8"}
    for buffer in buffers:
        log = plain.get(buffer.name + LOG)
        if buffer.versions > 1 and log is not None and PublicationLog.may_be(log.nbytes, buffer.nbytes):
            found.add(log.name)
    return found
