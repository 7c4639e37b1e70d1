"""Measure us, the physical limits and the peers side by side: `make perf`, or `python -m perf.run --help`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from perf import netlab, ranges
from perf.contender import (
    ASIDE,
    FETCH_ADD,
    KINDS,
    LIMIT,
    OPERATIONS,
    OURS,
    REMOTE,
    SHM,
    TCP,
    TRANSPORTS,
    Case,
    Contender,
    Sample,
)
from perf.remote import Hosts
from perf.results import ROOT, Results, new_results
from perf.tables import describe, markdown
from perf.turns import Turn, discover
from smb.config.parse import parse_bytes
from smb.tools.cli.signals import interrupted_once

SIZES = "8,4KiB,256KiB,4MiB,64MiB"
RAW = ROOT / "build" / "perf" / "results"  # every sample; git ignores it
PUBLISHED = ROOT / "perf" / "results"
CHARTS = ("bandwidth-shm.svg", "bandwidth-remote.svg", "latency.svg")
_VARIANTS_KEPT = 4  # of each kind of limit, after the first round
_AND_MORE = ", and more parts with --add"


# ---- what is measured


def cases_of(options: argparse.Namespace) -> list[Case]:
    """All cases asked for, those of one transport and size beside each other. fetch_add is of 8 bytes, always."""
    cases = []
    for transport in options.transports:
        for nbytes in [8, *(size for size in options.sizes if size != 8)]:
            for clients in options.clients:
                for operation in options.operations:
                    if nbytes in options.sizes if operation != FETCH_ADD else nbytes == 8:
                        cases.append(Case(transport, operation, nbytes, clients, options.seconds))
    return cases


Step = Callable[[str, Case], None]


def measure(
    results: Results, contenders: Sequence[Contender], cases: Sequence[Case], step: Step, hosts: Hosts | None = None
) -> None:
    """Fill `results`. In a round all take turns case by case, so that a drift of the machine hits them alike. Remote
    cases need the lab."""
    results.kinds |= {contender.name: contender.kind for contender in contenders}
    for number in range(results.rounds):
        _measure_round(results, contenders, cases, number, step, hosts)


def _measure_round(
    results: Results,
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    number: int,
    step: Step,
    hosts: Hosts | None,
) -> None:
    turns = [Turn(contender) for contender in contenders]
    try:
        for index, case in enumerate(cases):
            dropped = slow_variants(results, case) if number > 0 else set()
            shift = (number + index) % max(1, len(turns))
            for turn in turns[shift:] + turns[:shift]:
                name = turn.contender.name
                if not turn.contender.takes(case):
                    continue
                step(name, case)
                if name in dropped:
                    continue
                if case.remote:
                    assert hosts is not None
                    found = hosts.measure(name, case)
                else:
                    found = turn.measure(case)
                _take_down(results, name, case, found)
    finally:
        for turn in turns:
            turn.close()
        if hosts is not None:
            hosts.end_round()


def _take_down(results: Results, name: str, case: Case, found: Sample | str) -> None:
    cell = results.cell(name, case)
    if isinstance(found, str):
        cell.failed = cell.failed or found.replace(f"{ROOT}/", "")  # results are kept: of no one machine
    else:
        cell.samples.append(found)


def slow_variants(results: Results, case: Case) -> set[str]:
    """The limits' variants that are not worth another round for this case: all but the best few."""
    dropped: set[str] = set()
    for kind in (LIMIT, ASIDE):
        ranked = sorted(
            results.of(case, kind), key=lambda cell: -cell.samples[0].bytes_per_second if cell.samples else 0
        )
        dropped |= {cell.contender for cell in ranked[_VARIANTS_KEPT:]}
    return dropped


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 0, 1 where one of our cells or a limit's failed, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    contenders, missing = discover()
    contenders = [contender for contender in contenders if _chosen(contender, options.contenders)]
    results = new_results(" ".join(["python -m perf.run", *words]), options.rounds)
    results.missing = missing
    console = Console(stderr=True)
    whole = _begun(results, options)
    if isinstance(whole, str):
        console.print(whole)
        return 2
    cases = _possible(cases_of(options), contenders, missing, console)
    interrupted = False
    try:
        with (
            interrupted_once(),
            _hosts(cases) as hosts,
            _progress(console, contenders, cases, options.rounds) as step,
        ):
            measure(results, contenders, cases, step, hosts)
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: what was measured so far follows")
    whole.add(results)
    write(whole, options.output, console)
    if options.publish:
        publish(whole, options.output, PUBLISHED)
        console.print(f"the table, the ratios and the charts are in {PUBLISHED}, too")
    if options.quick:
        sys.stdout.write(ranges.report(results, ranges.load()))
    failed = [cell for cell in results.cells.values() if cell.failed and results.kinds[cell.contender] in (OURS, LIMIT)]
    return 130 if interrupted else 1 if failed else 0


def _possible(
    cases: Sequence[Case], contenders: Sequence[Contender], missing: dict[str, str], console: Console
) -> list[Case]:
    """Return the cases that this machine can do. Says what it can't, and who is not between two hosts, in `missing`."""
    if not any(case.remote for case in cases):
        return list(cases)
    why = netlab.missing()
    if why is not None:
        missing["remote"] = why
        console.print(f"nothing is measured between two hosts: {why}")
        return [case for case in cases if not case.remote]
    for contender in contenders:
        if any(map(contender.takes, (replace(case, transport=TCP) for case in cases))):
            reason = getattr(contender, "not_remote", None)
            if reason is not None:
                missing[f"{contender.name}, remote"] = reason
    return list(cases)


@contextmanager
def _hosts(cases: Sequence[Case]) -> Iterator[Hosts | None]:
    """The remote lab, where a case needs it."""
    if not any(case.remote for case in cases):
        yield None
        return
    with Hosts() as hosts:
        yield hosts


def _begun(results: Results, options: argparse.Namespace) -> Results | str:
    """Return what this run adds to, itself if to nothing; or why it can't."""
    path = options.output / "results.json"
    if not options.add or not path.exists():
        return results
    whole = Results.load(path)
    try:
        whole.add(results)
    except ValueError as error:
        return f"--add to {path}: {error}"
    if not whole.command.endswith(_AND_MORE):
        whole.command += _AND_MORE
    return whole


def _chosen(contender: Contender, names: Sequence[str] | None) -> bool:
    words = (contender.kind, f"{contender.kind}s")
    return names is None or any(name in words or name in contender.name.lower() for name in names)


@contextmanager
def _progress(console: Console, contenders: Sequence[Contender], cases: Sequence[Case], rounds: int) -> Iterator[Step]:
    """Show where we are. Drawn between cells only: a bar that draws itself takes time from what is measured."""
    total = rounds * sum(contender.takes(case) for contender in contenders for case in cases)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=total)

        def step(name: str, case: Case) -> None:
            progress.update(task, description=f"{describe(case)}: {name}")
            progress.refresh()
            progress.advance(task)

        yield step


def write(results: Results, folder: Path, console: Console) -> None:
    """Write results.json, table.md and the plots; say where."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results.to_json(), indent=1) + "\n")
    table = markdown(results)
    (folder / "table.md").write_text(table)
    sys.stdout.write(table.partition("## All cells")[0])
    sys.stdout.flush()
    try:
        from perf.plots import draw
    except ImportError as error:
        console.print(f"no plots: {error} (pip install -r perf/requirements.txt)")
    else:
        draw(results, folder)
    console.print(f"results.json, table.md and plots are in {folder}")


def publish(results: Results, raw: Path, folder: Path) -> None:
    """Write what is kept in the repository: the table without its samples, the ratios, and three charts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(markdown(results).partition("## All cells")[0])
    ratios = {name: value for name, value in results.to_json().items() if name != "cells"}
    (folder / "ratios.json").write_text(json.dumps(ratios, indent=None).replace("}, {", "},\n {") + "\n")
    for name in CHARTS:
        if (raw / name).exists():
            shutil.copy(raw / name, folder / name)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Exits with a message where it makes no sense."""
    parser = argparse.ArgumentParser("python -m perf.run", description=__doc__)
    one_of: Callable[[Sequence[str]], Callable[[str], list[str]]] = lambda known: lambda text: _choices(text, known)  # noqa: E731
    parser.add_argument("--sizes", type=_sizes, help=f"bytes of the array; default {SIZES}")
    parser.add_argument("--operations", type=one_of(OPERATIONS), default=list(OPERATIONS), help=", ".join(OPERATIONS))
    parser.add_argument("--transports", type=one_of(TRANSPORTS), default=[SHM, REMOTE, TCP], help=", ".join(TRANSPORTS))
    parser.add_argument("--clients", type=_counts, help="processes on one array; default 1,2")
    parser.add_argument("--contenders", type=lambda text: text.lower().split(","), help=f"{', '.join(KINDS)}, or names")
    parser.add_argument("--rounds", type=int, help="default 2; the tables show medians over them")
    parser.add_argument("--seconds", type=float, help="for each case of a round; default 0.2")
    parser.add_argument(
        "--output", type=Path, help="folder; default build/perf/results, and what is published in perf/results"
    )
    parser.add_argument("--add", action="store_true", help="keep the cells that --output has, of the same commit")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a look: few sizes, one short round; says of each cell whether it is where published runs were",
    )
    options = parser.parse_args(words)
    quick = options.quick
    defaults: dict[str, Any] = {
        "sizes": _sizes("8,256KiB,4MiB" if quick else SIZES),
        "clients": [1, 2],
        "rounds": 1 if quick else 2,
        "seconds": 0.05 if quick else 0.2,
        "output": RAW,
    }
    options.publish = options.output is None and not quick
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.rounds < 1 or not 0 < options.seconds <= 10 or min(options.clients) < 1:
        parser.error("--rounds and --clients are at least 1, --seconds above 0 and at most 10")
    return options


def _choices(text: str, known: Sequence[str]) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(known):
        raise argparse.ArgumentTypeError(f"{text!r}: there are {', '.join(known)}")
    return chosen


def _sizes(text: str) -> list[int]:
    sizes = sorted({parse_bytes(word) for word in text.split(",")})
    if any(size <= 0 or size % 8 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: sizes are multiples of 8 bytes")
    return sizes


def _counts(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
