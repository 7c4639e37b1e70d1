"""`smb demo`: a real network trained through one shared buffer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smb.errors import InvalidArgumentError
from smb.tools.cli.options import Json, usage_errors
from smb.tools.cli.output import console, print_error, print_json, table
from smb.tools.cli.signals import interrupted_once

if TYPE_CHECKING:
    from rich.table import Table

    from smb.tools.demo import DemoConfig, DemoResult

_INTERRUPTED = 130  # exit code of a command that SIGINT ended


def demo(
    scheme: Annotated[
        str,
        typer.Option(
            "--scheme",
            metavar="NAME",
            help="How the workers exchange parameters: bsp, asp, ssp, r2sp, easgd, eamsgd, seasgd, hsgd, localsgd, "
            "diloco or asyncdiloco.",
        ),
    ] = "seasgd",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of the scheme (every=50); may be repeated."),
    ] = None,
    transport: Annotated[str, typer.Option("--transport", metavar="NAME", help="auto, shm or tcp.")] = "auto",
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", help="Training processes; one is killed, one more comes late.")
    ] = 4,
    servers: Annotated[int, typer.Option("--servers", metavar="N", help="Memory servers.")] = 2,
    digits: Annotated[
        int, typer.Option("--digits", metavar="N", help="Digits that each worker trains with, and no other one.")
    ] = 40,
    epochs: Annotated[
        float, typer.Option("--epochs", metavar="NUMBER", help="Passes over the workers' digits, all together.")
    ] = 200.0,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Seed of the initial network and of the order of the digits.")
    ] = 0,
    target: Annotated[
        float,
        typer.Option("--target", metavar="SHARE", help="Test accuracy to reach, 0 to 1; below it the exit code is 1."),
    ] = 0.85,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Picture to write. [default: demo-SCHEME.png]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a real network through one shared buffer.

    Several processes learn to read handwritten digits; one is killed, and one joins late. Each has digits that no other
    one has. The demo starts a coordinator and memory servers, then the training processes. One process alone then
    trains the same number of samples with its own digits, for comparison. At last a process with everybody's digits
    publishes its model, and another process reads it, generation by generation.

    Example: smb demo --scheme diloco --set every=50
    """
    from smb.tools.demo import DemoConfig

    with usage_errors():
        config = DemoConfig(
            scheme=scheme,
            transport=transport,
            workers=workers,
            servers=servers,
            digits=digits,
            epochs=epochs,
            seed=seed,
            target=target,
            plot=plot or Path(f"demo-{scheme}.png"),
            options=dict(map(_setting, settings or ())),
        )
    with interrupted_once():
        try:
            result = _run(config, quiet=as_json)
        except KeyboardInterrupt:  # before there was a result to show
            console(stderr=as_json).print("stopped")
            raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        print_json(result.to_json())
    else:
        _show(result)
    if result.stopped:
        console(stderr=as_json).print("stopped")
        raise typer.Exit(_INTERRUPTED)
    if not result.passed:
        print_error(f"the shared model reached {result.accuracy:.2%}, below the target of {config.target:.2%}")
        raise typer.Exit(1)


def _setting(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE; the value is JSON."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError as error:
        raise InvalidArgumentError(f"--set takes NAME=VALUE with a number, true, false or null, not {text}") from error


def _run(config: DemoConfig, *, quiet: bool) -> DemoResult:
    from smb.tools.demo.display import open_display
    from smb.tools.demo.extras import check_extras

    check_extras(plot=config.plot is not None)
    from smb.tools.demo import run_demo

    # With --json, stdout is for the result only.
    with open_display(console(stderr=quiet)) as display:
        return run_demo(config, display)


def _show(result: DemoResult) -> None:
    from smb.config.parse import format_bytes

    out = console()
    out.print(_comparison(result))
    if result.conclusion:
        out.print(f"\n{result.conclusion}", highlight=False)
    out.print()
    out.print(_workers(result))
    servers = ", ".join(f"{format_bytes(nbytes)} on {name}" for name, nbytes in result.bytes_by_server.items())
    transports = " and ".join(result.transports)
    out.print(f"\nshared buffer: {result.parameters:,} float32 parameters, {servers}; reached over {transports}")
    if result.published:
        read = len(result.pooled_curve)
        out.print(f"the reader loaded {read:,} of {result.published:,} generations, the last one among them")
    if result.plot:
        out.print(f"plot: {result.plot}", soft_wrap=True)
    if result.passed:
        out.print(f"the shared model reached {result.accuracy:.2%}; the target was {result.config.target:.2%}")


def _comparison(result: DemoResult) -> Table:
    shared, alone, pooled = f"{result.config.workers} workers sharing", "1 process alone", "1 with all digits"
    rows = table("", shared, alone, pooled, right=(shared, alone, pooled))

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    def row(name: str, form: str, *values: float | None, style: str | None = None) -> None:
        rows.add_row(name, *(number(value, form) for value in values), style=style)

    accuracies = (result.accuracy, result.alone_accuracy, result.pooled_accuracy)
    rates = (result.samples_per_second, result.alone_samples_per_second, result.pooled_samples_per_second)
    row("test accuracy", ".2%", *accuracies, style="bold")
    row("samples trained", ",", result.samples, result.alone_samples, result.pooled_samples)
    row("seconds", ".1f", result.seconds, result.alone_seconds, result.pooled_seconds)
    row("samples/s", ",.0f", *rates)
    rows.add_row("moved through the buffer", f"{result.bytes_moved / 1e6:,.0f} MB", "-", "-")
    row("time in communication", ".1%", result.communication_share, None, None)
    return rows


def _workers(result: DemoResult) -> Table:
    numbers = ("STEPS", "SAMPLES", "EXCHANGES", "MOVED", "COMMUNICATION")
    rows = table("WORKER", "STATUS", *numbers, right=numbers)
    for worker in result.workers:
        share = worker.communication_seconds / worker.training_seconds if worker.training_seconds else 0.0
        rows.add_row(
            worker.name,
            worker.status,
            f"{worker.steps:,}",
            f"{worker.samples:,}",
            f"{worker.exchanges:,}",
            f"{worker.bytes_moved / 1e6:,.0f} MB",
            f"{share:.1%}",
            style="red" if worker.status in ("killed", "failed") else None,
        )
    return rows
