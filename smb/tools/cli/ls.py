"""`smb ls`: the buffers of a cluster."""

from __future__ import annotations

from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator, Json
from smb.tools.cli.output import console, print_json, table


def ls(coordinator: Coordinator = None, as_json: Json = False) -> None:
    """List the buffers.

    With shape, dtype, size, and the servers they lie on.

    Example: smb ls --json
    """
    from smb.config.parse import format_bytes
    from smb.tools.cli.describe import buffer_json, format_shape, server_names

    with connect(coordinator) as client:
        buffers = sorted(client.list(), key=lambda buffer: buffer.name)
    if as_json:
        print_json([buffer_json(buffer) for buffer in buffers])
        return
    rows = table("NAME", "SHAPE", "DTYPE", "SIZE", "STRIPE", "SERVERS", right=("SIZE", "STRIPE"))
    for buffer in buffers:
        rows.add_row(
            buffer.name,
            format_shape(buffer.shape),
            str(buffer.dtype),
            format_bytes(buffer.nbytes),
            format_bytes(buffer.layout.stripe_bytes),
            ", ".join(server_names(buffer)),
        )
    console().print(rows)
