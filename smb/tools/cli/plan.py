"""`smb plan`: predicts the time of a training before it is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smb.errors import Error, InvalidArgumentError
from smb.tools.cli.options import Coordinator, Json, usage_errors
from smb.tools.cli.output import console, counted, format_duration, print_json, table

if TYPE_CHECKING:
    from rich.table import Table

    from smb.tools.plan.model import Advice, Question, Row

_WORKERS_MAX = 100_000
_RTT = "0.2ms"  # between hosts in one room
_OVER = "!"  # marks a row with more workers than a training takes
_EACH = "workers"  # a value of --servers: one server beside each worker


def plan(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="SCRIPT_OR_SPEC",
            help="A Python file with model(), batch(size) and loss(model, batch), which is measured here; or a .toml "
            "or .json file with the bytes and times of a model.",
        ),
    ],
    workers: Annotated[
        str,
        typer.Option(
            "--workers",
            metavar="N,...",
            help="Numbers of workers; a training has at most 512 at a time, with r2sp 128.",
        ),
    ] = "1,4,16",
    link: Annotated[
        str | None,
        typer.Option(
            "--link", metavar="RATE", help="Bandwidth of a worker in each direction, e.g. 10Gbit. Default: measured."
        ),
    ] = None,
    server_link: Annotated[
        str | None,
        typer.Option("--server-link", metavar="RATE", help="Bandwidth of a memory server. [default: --link]"),
    ] = None,
    rtt: Annotated[
        str | None,
        typer.Option("--rtt", metavar="TIME", help="Round trip between a worker and a server. [default: 0.2ms]"),
    ] = None,
    client_limit: Annotated[
        str | None,
        typer.Option(
            "--client-limit",
            metavar="RATE",
            help="What one worker's process moves in each direction at most, however fast its link. [default: 32Gbit]",
        ),
    ] = None,
    servers: Annotated[
        str,
        typer.Option("--servers", metavar="N", help=f"Memory servers; '{_EACH}': one on each worker's host."),
    ] = "1",
    schemes: Annotated[
        str | None, typer.Option("--schemes", metavar="NAME,...", help="Schemes to compare. [default: all]")
    ] = None,
    every: Annotated[
        int,
        typer.Option(
            "--every", min=1, metavar="STEPS", help="Local steps between exchanges, for schemes that have this setting."
        ),
    ] = 50,
    wire: Annotated[
        str,
        typer.Option("--wire", metavar="NAME", help="Encoding of contributions: exact, bfloat16, float16, int8, int4."),
    ] = "exact",
    fragments: Annotated[
        int,
        typer.Option("--fragments", min=1, metavar="N", help="DiLoCo: number of parts that are exchanged separately."),
    ] = 1,
    delay: Annotated[
        int,
        typer.Option("--delay", min=0, metavar="STEPS", help="DiLoCo: steps until a worker takes the result over."),
    ] = 0,
    step_wire: Annotated[
        str, typer.Option("--step-wire", metavar="NAME", help="DiLoCo: encoding of the servers' step, as --wire.")
    ] = "exact",
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, metavar="N", help="Samples in a worker's step. [default: the spec's, else 32]"),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch", min=1, metavar="N", help="Samples in a step of all workers together, instead of --batch."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write a picture of the speed-up (png, svg, pdf).")
    ] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Predict the time of a step by scheme.

    Also predicts the speed-up and what limits it, from a cost model; nothing is trained. The network is given by
    --link, --rtt and --servers; without --link the path to the cluster at --coordinator is measured. docs/plan.md has
    the formulas and their errors.

    Example: smb plan model.toml --workers 1,8,72,128 --link 10Gbit --rtt 0.2ms --servers 4
    """
    with usage_errors():
        counts = _numbers(workers)
    if plot:
        from smb.tools.plan.plot import check_plotting

        check_plotting()  # fail before anything is measured
    settings: dict[str, Any] = {"batch": batch, "global_batch": global_batch, "every": every, "wire": wire}
    settings |= {"fragments": fragments, "delay": delay, "step_wire": step_wire}
    question = _question(what, (link, server_link, rtt, client_limit), servers, coordinator, settings)
    from smb.tools.plan.model import SCHEMES, advice, rows

    chosen = tuple(dict.fromkeys(schemes.split(","))) if schemes else SCHEMES
    if foreign := [name for name in chosen if name not in SCHEMES]:
        raise typer.BadParameter(f"unknown scheme {foreign[0]!r}; known are {', '.join(SCHEMES)}")
    if (fragments, delay, step_wire) != (1, 0, "exact") and "diloco" not in chosen:
        raise typer.BadParameter(
            "--fragments, --delay and --step-wire are settings of diloco, which --schemes does not include"
        )
    found = [row for count in counts for row in rows(question, count, chosen)]
    advised = [advice(question, count, chosen) for count in counts]
    if plot:
        _draw(question, max(counts), chosen, plot)
    if as_json:
        print_json(_to_json(question, found, advised))
    else:
        _show(question, found, advised)
        if plot:
            console().print(f"plot: {plot}", soft_wrap=True)


def _question(
    what: Path,
    rates: tuple[str | None, str | None, str | None, str | None],
    servers: str,
    coordinator: str | None,
    settings: dict[str, Any],
) -> Question:
    from smb.tools.plan import network
    from smb.tools.plan.model import Question, check_settings
    from smb.tools.plan.spec import read_spec

    link, server_link, rtt, client_limit = rates
    with usage_errors():
        if link is None and not coordinator:
            raise InvalidArgumentError("pass --link, such as 10Gbit, or --coordinator to measure a network")
        if servers != _EACH and not (servers.isascii() and servers.isdigit() and int(servers)):
            raise InvalidArgumentError(f"--servers must be a positive integer or '{_EACH}', not {servers}")
        if link is None and (server_link or rtt or client_limit):
            raise InvalidArgumentError(
                "--server-link, --rtt and --client-limit need --link; without --link the network is measured"
            )
        given = network.given(link, server_link, rtt or _RTT, client_limit) if link is not None else None
        settings["servers"] = None if servers == _EACH else int(servers)
        check_settings(**settings)  # fail before anything is measured
        spec = None
        if what.suffix in (".toml", ".json"):
            spec = read_spec(what)
        elif what.suffix != ".py":
            raise InvalidArgumentError(f"{what} must be a script (.py) or a spec (.toml, .json)")
    if spec is None:
        from smb.tools.plan.script import measure_script

        with usage_errors():
            spec = measure_script(what, settings["batch"] or 32)
    if given is None:
        assert coordinator
        given = network.measured(coordinator)
    return Question(spec, given, **settings)


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= _WORKERS_MAX for part in parts):
        raise InvalidArgumentError(
            f"--workers must be integers from 1 to {_WORKERS_MAX}, separated by commas, not {text}"
        )
    return sorted({int(part) for part in parts})


def _draw(question: Question, most: int, schemes: Sequence[str], path: Path) -> None:
    from smb.tools.plan.plot import draw

    try:
        draw(question, most, schemes, path)
    except (OSError, ValueError) as error:
        raise Error(f"cannot write the plot {path}: {error}") from error


def _to_json(question: Question, found: Sequence[Row], advised: Sequence[Advice]) -> dict[str, Any]:
    import dataclasses

    compute = question.spec.compute
    return {
        "spec": question.spec.to_json(),
        "parameters_bytes": question.spec.nbytes,
        "compute": dataclasses.asdict(compute),
        "network": dataclasses.asdict(question.network),
        "servers": question.servers or _EACH,
        "wire": question.wire,
        "fragments": question.fragments,
        "delay": question.delay,
        "step_wire": question.step_wire,
        "predictions": [dataclasses.asdict(row) for row in found],
        "advice": [each.to_json() for each in advised],
    }


def _show(question: Question, found: Sequence[Row], advised: Sequence[Advice]) -> None:
    from smb.config.parse import format_bytes

    out, spec, compute = console(), question.spec, question.spec.compute
    layers = f"{len(spec.layers)} layers, " if spec.by_layer else ""
    out.print(
        f"{spec.name}: {layers}{format_bytes(spec.nbytes)} of parameters; a step of b samples computes "
        f"{format_duration(compute.fixed_s)} + {format_duration(compute.sample_s)} * b",
        soft_wrap=True,
    )
    if compute.sample_s == 0:
        out.print(
            "a step takes equally long with more samples; if that is unexpected, measure again on an idle machine",
            soft_wrap=True,
        )
    servers = (
        "a memory server on each worker's host" if question.servers is None else f"memory servers: {question.servers}"
    )
    out.print(f"network: {question.network.source}; {servers}; contributions {question.wire}", soft_wrap=True)
    if (question.fragments, question.delay, question.step_wire) != (1, 0, "exact"):
        out.print(
            f"DiLoCo in {counted(question.fragments, 'fragment')}, taken over {counted(question.delay, 'step')} later; "
            f"its step {question.step_wire}",
            soft_wrap=True,
        )
    out.print()
    out.print(_predictions(found))
    out.print()
    out.print(_advice(advised))
    if limits := {row.members_max for row in found if row.over_limit}:
        most = "; ".join(
            f"{members} with {', '.join(sorted({row.scheme for row in found if row.members_max == members}))}"
            for members in sorted(limits)
        )
        out.print(
            f"\n{_OVER} a training refuses that many workers: it has at most so many members at a time: {most} (the "
            "ranks of one mesh= are one member)",
            soft_wrap=True,
        )
    if any(row.overlap != "none" for row in found):
        out.print("\n* an exchange behind the passes of a step: overlap= of smb.torch.join", soft_wrap=True)
    if any(row.mesh > 1 for row in found):
        out.print(
            "as a mesh of G: each G workers are the ranks of one member, which divide the fully connected layers; "
            "smb.torch.join(mesh=) does not take overlap= yet",
            soft_wrap=True,
        )
    out.print("predicted by a model, see docs/plan.md; schemes differ in what a step is worth, too", soft_wrap=True)


def _predictions(found: Sequence[Row]) -> Table:
    from smb.config.parse import format_bytes

    numbers = ("WORKERS", "EVERY", "STEP", "SPEED-UP", "EFFICIENCY", "BYTES/STEP", "BYTES/HOUR", "SERVER MEMORY")
    rows = table("WORKERS", "SCHEME", "OVERLAP", *numbers[1:4], "EFFICIENCY", "BOUND BY", *numbers[5:], right=numbers)
    for row in found:
        rows.add_row(
            f"{row.workers}{_OVER if row.over_limit else ''}",
            row.scheme if row.mesh == 1 else f"{row.scheme}, as a mesh of {row.mesh}",
            "none" if row.overlap == "none" else f"{row.overlap}*: {row.schedule}",
            str(row.every),
            format_duration(row.iteration_s),
            f"{row.speedup:.1f}",
            f"{row.efficiency:.0%}",
            row.bound_by,
            format_bytes(round(row.sent_bytes + row.received_bytes)),
            format_bytes(round(row.bytes_per_hour)),
            format_bytes(row.server_bytes),
        )
    return rows


def _advice(advised: Sequence[Advice]) -> Table:
    columns = ("WORKERS", "DILOCO 95 % FROM EVERY", "CONNECTIONS OF A SERVER", "TO FILL A LINK")
    rows = table(*columns, "SERVERS THAT ARE ENOUGH", right=columns)
    for each in advised:
        enough = each.servers_enough
        rows.add_row(
            str(each.workers),
            str(each.diloco_every),
            str(each.connections),
            str(each.connections_to_fill),
            ", ".join(f"{scheme} {count}" for scheme, count in enough.items()) if enough else "-",
        )
    return rows
