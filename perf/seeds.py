"""The claims of the published systems beside this project's figures: `python -m perf.seeds [NAME ...]`.

Each name is one experiment of perf/ in a quick form. Links of 20 to 100 Mbit/s bound what is measured, so that other
programs on the processors move it little; all of it takes at most 10 minutes. docs/seeds.md has a row for each claim.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perf import published, simulated
from perf.contender import ACCUMULATE, REMOTE, WRITE, Case
from perf.netlab import LabError
from perf.remote import Hosts
from perf.results import Cell, commit, machine, new_results
from perf.run import measure
from perf.scaling import servers
from perf.scaling.fleet import Fleet
from perf.scaling.report import RESULTS
from perf.training import hsgd, r2sp, seasgd, staging
from perf.training.staging_worker import STAGED
from perf.turns import discover
from smb.config.parse import format_bytes
from smb.tools.cli.output import counted

MEASURED, MODELLED = "measured", "modelled"
NOT_HERE = "not here"


@dataclass(frozen=True)
class Row:
    """A claim: its system, what is claimed, the published figure and ours; how ours came about; what differs."""

    system: str
    claim: str
    published: str
    ours: str
    how: str
    differs: str = ""


def bandwidth() -> list[Row]:
    """Bandwidth by the number of servers, and how much of a link a server uses."""
    rows = servers.how_many(True, "40mbit").rows
    times = [row["times_one"] for row in rows if row["servers"] == servers.SERVERS]
    shares = [row["share"] for row in rows]
    differs = "links of 40 Mbit/s, one client; it is InfiniBand there"
    return [
        Row("Soft Memory Box II", "8 servers carry N times what one does", "6.3", _range(times), MEASURED, differs),
        Row(
            "Soft Memory Box I",
            "share of the network",
            "0.96",
            _range(shares),
            MEASURED,
            f"of bare sockets'; {differs}",
        ),
        Row("iRDMA", "share of the network", "0.95", _range(shares), MEASURED, f"of bare sockets'; {differs}"),
    ]


def one_call() -> list[Row]:
    """Soft Memory Box I's update through a staging buffer beside one call."""
    found = staging.beside_one_call(True, "100mbit", 1 << 19).rows
    return [
        Row(
            "Soft Memory Box I",
            f"its update by a staging buffer takes N times one call's time, {counted(row['workers'], 'worker')}",
            "-",
            f"{row['times_fused']:.2f}",
            MEASURED,
            "its steps, done with our buffers over 100 Mbit/s",
        )
        for row in found
        if row["way"] == STAGED
    ]


def elastic() -> list[Row]:
    """SEASGD on 8 servers beside one: the curve over the length of computing, and a network trained to a loss."""
    rate, small = "40mbit", seasgd.Network("ResNet-50", 500_000, "a fiftieth of it")
    rows = []
    with Fleet([rate] * 8) as fleet:
        workers = [fleet.worker(module="perf.training.worker") for _ in range(seasgd.WORKERS)]
        link = seasgd.link_of(fleet, rate)
        for count in (1, 8):
            rows += seasgd.curve(fleet, workers, count, small, seasgd.RATIOS, rate, link, 2.0)
        assert fleet.lab
        for name in fleet.names:
            fleet.lab.set_rate(name, "100mbit")  # a loss takes more steps
        (one_s, loss), (eight_s, _) = seasgd.to_a_loss(fleet, "100mbit", (1, 8), 0.71, 20)
    seasgd.add_times(rows)
    told = [
        Row(
            "Soft Memory Box II",
            f"SEASGD on 8 servers is N times as fast as on one, computing {row['ratio']:g} of one server's accumulates",
            "up to 2.4",
            f"{row['times_one']:.2f}",
            MEASURED,
            "2 MB over 40 Mbit/s; computing is a sleep",
        )
        for row in rows
        if row["servers"] == 8
    ]
    return [
        *told,
        Row(
            "Soft Memory Box II",
            f"the same to a training loss of {loss:.2f}, computing 0.71",
            "up to 2.4",
            f"{one_s / eight_s:.2f}",
            MEASURED,
            "a network of 1.2 MB that learns digits, over 100 Mbit/s: 19 stripes, so that 8 servers have 6.1 links",
        ),
    ]


def hybrid() -> list[Row]:
    """HSGD's bytes and time beside SEASGD's."""
    row = next(row for row in hsgd.bytes_and_time(True, "20mbit", 250_000, 5).rows if row["scheme"] == "hsgd")
    differs = "2 hosts of 2 workers, 1 MB over 20 Mbit/s"
    return [
        Row("ShmCaffe", "HSGD's bytes between hosts, by SEASGD's", "-", f"{row['bytes_share']:.2f}", MEASURED, differs),
        Row("ShmCaffe", "HSGD's time, by SEASGD's", "-", f"{row['time_share']:.2f}", MEASURED, differs),
    ]


def rotation() -> list[Row]:
    """R2SP's time to a loss by BSP's: equal workers, jitter, unequal workers; its gaps and staleness."""
    chosen = [case for case in r2sp.CASES if case.point in (r2sp.BALANCE, "jitter") and case.scheme in ("bsp", "r2sp")]
    chosen += [case for case in r2sp.CASES if case.point == "unequal" and case.title in ("BSP", r2sp.ADAPTIVE)]
    rows = r2sp.how_even(True, "100mbit", chosen, steps=48).rows  # a quarter of it
    told = []
    for row in rows:
        if row["scheme"] != "BSP":
            claim = f"{row['scheme']}: time to a loss of {row['loss']:.2g} by BSP's, {row['point']}"
            at_least = "0.75" if row["point"] == r2sp.BALANCE else "-"
            told.append(Row("R2SP", claim, at_least, f"{row['times_bsp']:.2f}", MEASURED, "12 steps over 100 Mbit/s"))
    even = next(row for row in rows if (row["point"], row["scheme"]) == (r2sp.BALANCE, "R2SP"))
    ours = f"{even['staleness']:g}, at most {even['staleness_max']}"
    return [*told, Row("R2SP", "staleness with 4 workers", "3", ours, MEASURED, "")]


def overlap(workers: int = simulated.NODES) -> list[Row]:
    """iPart's two figures, simulated with and without jitter."""
    told = []
    for jitter in (0.0, 0.02):
        none, layerwise = simulated.rounds_of(0.0038, jitter, workers=workers)
        ours = f"+{100 * none:.0f} %, +{100 * layerwise:.0f} %"
        claim = f"planned overlap beside none, and beside layer by layer, {workers} nodes, jitter {jitter:g}"
        differs = "ResNet-50 by tensors; passes and transfers a second each, start-up 3.8 ms"
        told.append(Row("iPart", claim, "+94 %, +52 %", ours, MODELLED, differs))
    return told


def scaling() -> list[Row]:
    """Das et al.'s speed-ups."""
    return [
        Row(
            "Das et al.",
            f"speed-up, {each.figure.network}, {each.figure.nodes} nodes, {each.way}",
            f"{each.figure.published:g}",
            f"{each.row.speedup:.1f}",
            MODELLED,
            f"bound by {each.row.bound_by}",
        )
        for each in published.scaling()
    ]


def mpi() -> list[Row]:
    """Accumulates beside MPICH's, between two hosts."""
    cases = [Case(REMOTE, ACCUMULATE, nbytes, 1, 0.3) for nbytes in (256 << 10, 4 << 20)]
    found = _beside(("smb", "MPICH 5"), cases)["MPICH 5"]
    claim = f"accumulates, times MPICH's speed: {_sizes(cases)}"
    return [
        Row("Soft Memory Box I", claim, "2 to 7", found.speeds, MEASURED, f"the median call; {_UNSHAPED}"),
        Row(
            "Soft Memory Box I", "the same, MPICH's processor time by ours", "-", found.processors, MEASURED, _UNSHAPED
        ),
    ]


def grpc() -> list[Row]:
    """Writes beside gRPC's, 8 B to 64 MiB, and beside a client of gRPC that copies nothing."""
    cases = [Case(REMOTE, WRITE, nbytes, 1, 0.3) for nbytes in (8, 4 << 10, 256 << 10, 4 << 20, 64 << 20)]
    told = []
    for name, found in _beside(("smb", "gRPC, unary", "gRPC, unary, no copies"), cases).items():
        claim = f"writes, times the speed of {name}: {_sizes(cases)}"
        differs = f"TCP on both sides, where it is RDMA there; {_UNSHAPED}"
        told.append(Row("Xue et al.", claim, "25", found.speeds, MEASURED, f"the median call; {differs}"))
        told.append(Row("Xue et al.", "the same, its processor time by ours", "-", found.processors, MEASURED, differs))
    return told


SEEDS: dict[str, Callable[[], list[Row]]] = {
    "bandwidth": bandwidth,
    "one-call": one_call,
    "elastic": elastic,
    "hybrid": hybrid,
    "rotation": rotation,
    "overlap": overlap,
    "scaling": scaling,
    "mpi": mpi,
    "grpc": grpc,
}


_UNSHAPED = "no link bounds it, so it moves with the load"


@dataclass(frozen=True)
class _Ratios:
    """Another's by ours, case by case: the time of the median call, and the processor time for a byte."""

    speeds: str
    processors: str


def _beside(names: Sequence[str], cases: Sequence[Case]) -> dict[str, _Ratios]:
    """Return the first name's ratios to each of the others, measured between two hosts in one round."""
    there, missing = discover()
    chosen = [contender for contender in there if contender.name in names]
    results = new_results("python -m perf.seeds", 1)
    with Hosts() as hosts:
        measure(results, chosen, cases, lambda *_: None, hosts)
    for cell in results.cells.values():
        if cell.failed:
            print(f"{cell.contender}, {cell.case}: {cell.failed}", file=sys.stderr)
    for name in names:
        if name in missing:
            print(f"{name}: {missing[name]}", file=sys.stderr)
    ratios = {}
    for name in names[1:]:
        pairs = [(results.cell(names[0], case), results.cell(name, case)) for case in cases]
        ratios[name] = _Ratios(
            ", ".join(_ratio(_call(theirs), _call(ours)) for ours, theirs in pairs),
            ", ".join(_ratio(_cpu(theirs), _cpu(ours)) for ours, theirs in pairs),
        )
    return ratios


def _call(cell: Cell) -> float:
    """Return the seconds of the median call, which other programs move less than the mean; 0 if the cell failed."""
    return cell.median("p50_seconds") or 0.0


def _cpu(cell: Cell) -> float:
    """Return both ends' processor seconds for 1e9 bytes; 0 if the cell failed."""
    return (cell.median("client_cpu") or 0.0) + (cell.median("server_cpu") or 0.0)


def _ratio(above: float, below: float) -> str:
    return (
        NOT_HERE if not (above and below) else f"{above / below:.1f}" if above < 10 * below else f"{above / below:.0f}"
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _sizes(cases: Sequence[Case]) -> str:
    return ", ".join(format_bytes(case.nbytes) for case in cases)


def table(rows: Sequence[tuple[str, Row]]) -> str:
    """Return the rows as markdown, each with the command that measures it."""
    lines = ["| system | claim | published | ours | how | command | what differs |", "| --- " * 7 + "|"]
    for name, row in rows:
        command = f"`python -m perf.seeds {name}`"
        cells = (row.system, row.claim, row.published, row.ours, row.how, command, row.differs)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Run the command. Returns its exit status: 1 if an experiment could not be run."""
    parser = argparse.ArgumentParser(prog="python -m perf.seeds", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(SEEDS)}; default: all")
    parser.add_argument("--save", action="store_true", help="write perf/results/seeds.md, too")
    asked = parser.parse_args()
    if unknown := set(asked.names) - SEEDS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(SEEDS)}")
    rows: list[tuple[str, Row]] = []
    failed = False
    began = time.monotonic()
    for name in asked.names or SEEDS:
        start = time.monotonic()
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what experiments tell as they go
                found = SEEDS[name]()
        except (LabError, RuntimeError) as error:
            print(f"{name}: not run: {error}", file=sys.stderr)
            failed = True
            continue
        rows += [(name, row) for row in found]
        print(f"\n{table([(name, row) for row in found])}\n({name}: {time.monotonic() - start:.0f} s)", flush=True)
    if asked.save:
        here, load = machine(), os.getloadavg()[1]
        (RESULTS / "seeds.md").write_text(
            f"# The claims of the published systems, quick forms\n\n{table(rows)}\n\n"
            f"`python -m perf.seeds --save` at {commit()}, on {here['cpu']}, {here['cores']} cores, Linux "
            f"{here['kernel']}, in {time.monotonic() - began:.0f} s with a load of {load:.1f} (5 minutes). Only ratios "
            "within one run travel.\n"
        )
    return int(failed)


if __name__ == "__main__":
    os.environ.pop("SMB_COORDINATOR", None)
    sys.exit(main())
