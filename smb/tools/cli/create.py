"""`smb create NAME`: a new buffer."""

from __future__ import annotations

from typing import Annotated

import typer

from smb.errors import AlreadyExistsError
from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator, Json, parse_size
from smb.tools.cli.output import console, print_json


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The buffer's name, e.g. experiment-7/weights.")],
    shape: Annotated[str | None, typer.Option("--shape", metavar="N,N,...", help="Extents, e.g. 1000,1000.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="TYPE",
            help="float16, float32, float64, bfloat16, int32, int64 or uint8; for storage alone also int8, int16, "
            "uint16, uint32, uint64, complex64, bool, float8_e4m3fn or float8_e5m2. [default: float32]",
        ),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option("--servers", metavar="N", min=1, help="Number of servers. Default: as many as pay off."),
    ] = None,
    stripe: Annotated[
        str | None,
        typer.Option("--stripe", metavar="SIZE", help="Bytes on one server before the next one follows, e.g. 1MiB."),
    ] = None,
    wire: Annotated[
        str | None,
        typer.Option("--wire", metavar="FORM", help="How elements travel: exact, bfloat16, float16, int8 or int4."),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option("--replicas", metavar="N", min=1, max=2, help="Copies, on different servers. [default: 1]"),
    ] = None,
    versions: Annotated[
        int,
        typer.Option(
            "--versions",
            metavar="N",
            min=1,
            max=16,
            help="Versions that are kept; with 2 or more the buffer changes only by publish().",
        ),
    ] = 1,
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="NAME", help="Shape, type, servers, stripe and replicas of another buffer."),
    ] = None,
    state_of: Annotated[
        str | None,
        typer.Option(
            "--state-of",
            metavar="NAME",
            help="Create an optimizer's state for these weights: like them, and on the same servers.",
        ),
    ] = None,
    exist_ok: Annotated[
        bool, typer.Option("--exist-ok", help="Succeed if a buffer with this name, shape and dtype exists.")
    ] = False,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Create a buffer, filled with zeros.

    Example: smb create weights --shape 1000,1000 --dtype bfloat16
    """
    from smb.config.parse import format_bytes
    from smb.tools.cli.describe import buffer_json, format_shape, server_names

    if shape is None and like is None and state_of is None:
        raise typer.BadParameter("pass --shape, e.g. 1000,1000, or --like another buffer")
    extents = _parse_shape(shape) if shape is not None else None
    stripe_bytes = None if stripe is None else parse_size(stripe)
    with connect(coordinator) as client:
        try:
            buffer = client.create(
                name, extents, dtype, servers=servers, stripe=stripe_bytes, replicas=replicas, versions=versions,
                like=like, state_of=state_of, wire=wire, exist_ok=exist_ok,
            )  # fmt: skip
        except AlreadyExistsError as error:  # the error's advice is in Python's terms
            raise AlreadyExistsError(str(error).replace("exist_ok=True", "--exist-ok")) from None
        if as_json:
            print_json(buffer_json(buffer))
            return
        console().print(
            f"{buffer.name}: {format_shape(buffer.shape)} {buffer.dtype}, {format_bytes(buffer.nbytes)} on "
            f"{', '.join(server_names(buffer))}",
            soft_wrap=True,
        )


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(extent) for extent in text.replace("x", ",").split(","))
    except ValueError:
        raise typer.BadParameter(f"--shape takes extents, as in --shape 1000,1000, not {text!r}") from None
