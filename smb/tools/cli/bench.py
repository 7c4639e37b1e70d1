"""`smb bench`: speed beside the physical limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from smb.tools.cli.options import Coordinator, Json, parse_size, usage_errors
from smb.tools.cli.output import console, format_duration, print_json, table
from smb.tools.cli.signals import interrupted_once

if TYPE_CHECKING:
    from rich.table import Table

    from smb.tools.bench import BenchConfig, Measurement

TRANSPORTS = ("auto", "shm", "verbs", "tcp")


def bench(
    transport: Annotated[
        list[str] | None,
        typer.Option(
            "--transport",
            metavar="NAME",
            help="auto, shm, verbs (RDMA) or tcp; may be repeated. Default: shm and tcp; where --coordinator or "
            "SMB_COORDINATOR names a cluster: auto, the path that clients take by themselves.",
            show_default=False,
        ),
    ] = None,
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="SIZE,...", help="Sizes of the arrays, multiples of 4 bytes.")
    ] = "8,4KiB,256KiB,4MiB,64MiB",
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.01, metavar="SECONDS", help="Time for each line of the table.")
    ] = 0.4,
    servers: Annotated[
        int, typer.Option("--servers", min=1, metavar="N", help="Memory servers of the benchmark's own cluster.")
    ] = 2,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Measure the speed beside its physical limit.

    Measures write, read, accumulate and fetch_add, and checks the bytes. The limit is measured in turns with them: for
    shm one copy by the processor (or one in-place addition), for tcp a bare socket that moves the same bytes between
    two processes. For verbs see docs/rdma.md. RATIO is the limit's median over ours: 1.00 is as fast as the limit.
    Starts a cluster of its own unless --coordinator or SMB_COORDINATOR names one.

    Example: smb bench --transport tcp --sizes 4KiB,4MiB
    """
    from smb.tools.bench import BenchConfig, run_bench

    with usage_errors():
        config = BenchConfig(
            transports=_check_transports(transport or (["auto"] if coordinator else ["shm", "tcp"])),
            sizes=tuple(parse_size(size) for size in sizes.split(",")),
            seconds=seconds,
            servers=servers,
            coordinator=coordinator,
        )
    if coordinator:
        console(stderr=True).print(f"measuring the cluster at {coordinator}, transport {', '.join(config.transports)}")
    with interrupted_once():
        if as_json:
            print_json([line.to_json() for line in run_bench(config)])
        else:
            _run_and_show(config)


def _check_transports(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in TRANSPORTS:
            raise typer.BadParameter(f"unknown transport {name!r}; known are {', '.join(TRANSPORTS)}")
    return tuple(dict.fromkeys(names))


def _run_and_show(config: BenchConfig) -> None:
    from smb.tools.bench import run_bench

    # Shown on a terminal only. The table comes at the end, with its columns aligned over all lines.
    with console(stderr=True).status("starting the cluster") as waiting:

        def show(line: Measurement) -> None:
            waiting.update(f"{line.transport}: measured {line.operation} of {line.nbytes} bytes")

        lines = run_bench(config, show)
    console().print(_table(lines))


def _table(lines: Sequence[Measurement]) -> Table:
    from smb.config.parse import format_bytes

    numbers = ("RATIO", "SIZE", "P50", "P99", "GB/S", "LIMIT P50", "ROUNDS")
    rows = table(
        "RATIO", "TRANSPORT", "OPERATION", "SIZE", "P50", "P99", "GB/S", "LIMIT P50", "LIMIT", "ROUNDS", right=numbers
    )
    for line in lines:
        rows.add_row(
            "-" if line.ratio is None else f"{line.ratio:.2f}",
            line.transport,
            line.operation,
            format_bytes(line.nbytes),
            format_duration(line.p50_seconds),
            format_duration(line.p99_seconds),
            f"{line.bytes_per_second / 1e9:.3g}",
            "-" if line.limit_p50_seconds is None else format_duration(line.limit_p50_seconds),
            line.limit or "-",
            str(line.rounds),
        )
    return rows
