"""A run's results as Markdown, ratios first."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from perf.contender import ASIDE, FETCH_ADD, LIMIT, OPERATIONS, OURS, PEER, TRANSPORTS, Case
from perf.results import Cell, Results

_LATENCY_BYTES = 8
_CPU_BYTES = (256 << 10, 4 << 20, 64 << 20)  # where CPU seconds are shown
_NONE = ""

Row = tuple[str, str, int]  # transport, operation, clients


def markdown(results: Results) -> str:
    """Return the whole report."""
    parts = [
        "# Measured beside its limits and its peers",
        _about(results),
        "## Ours / limit",
        "How fast we are as a part of the limit: the best variant of the C programs of `limits.c`, in the same rounds. "
        "1 is as fast as it. fetch_add stands in the column of 8 B.",
        _ratios(results, lambda case: results.best(case)),
        *_beside_one_connection(results),
        "## Latency of 8 bytes",
        "Median of a call, in µs, and times the shortest of all variants of the limit.",
        _latencies(results),
        *_beside_peers(results),
        *_beside_unix(results),
        "## CPU seconds for 1e9 bytes",
        "Clients + servers, user and kernel. Whoever polls uses his core all the time.",
        _cpu(results),
        *_failures(results),
        "## All cells",
        "GB/s (1e9 bytes): median of the rounds, lowest and highest in brackets.",
        _all_cells(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _peers(results: Results) -> list[str]:
    """Those of which there are cells."""
    seen = {name for name, _ in results.cells}
    return [name for name, kind in results.kinds.items() if kind == PEER and name in seen]


def size_name(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def row_of(case: Case) -> Row:
    return case.transport, case.operation, case.clients


def _about(results: Results) -> str:
    m = results.machine
    lines = [
        f"- `{results.command}`, {results.when}, commit {results.commit}",
        f"- {m['cpu']}, {m['cores']} cores, {(m['memory_bytes'] or 0) >> 30} GiB, Linux {m['kernel']}, governor "
        f"{m['governor'] or 'not known'}, load {m['load_average_before']:.1f} before",
        f"- medians of {results.rounds} rounds" if results.rounds > 1 else "- one round: no spread is known",
    ]
    if any(case.remote for case in results.cases()):
        lines.append(
            "- remote: TCP between two hosts, network namespaces with a veth pair between, unshaped or with the rate "
            "named; tcp: over loopback, from one address to itself, which no two hosts have"
        )
    lines += [f"- not here: {name}: {why}" for name, why in sorted(results.missing.items())]
    return "\n".join(lines)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head, rows = list(head), list(rows)
    if not rows:
        return "Nothing was measured."
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _grid(results: Results, text: Callable[[Case], str]) -> str:
    """A row for every transport, operation and number of clients, a column for every size."""
    sizes = sorted({case.nbytes for case in results.cases()})
    rows: dict[Row, dict[int, str]] = {}
    for case in results.cases():
        said = text(case)
        if said:
            rows.setdefault(row_of(case), {})[case.nbytes] = said
    if not rows:
        return "Nothing was measured."
    head = ["transport", "operation", "clients", *map(size_name, sizes)]
    lines = (
        [t, o, str(n), *(row.get(size, _NONE) for size in sizes)] for (t, o, n), row in sorted(rows.items(), key=_order)
    )
    return _table(head, lines)


def _order(item: tuple[Row, object]) -> tuple[int, int, int]:
    transport, operation, clients = item[0]
    return TRANSPORTS.index(transport), OPERATIONS.index(operation), clients


def _ratios(results: Results, other: Callable[[Case], Cell | None]) -> str:
    def text(case: Case) -> str:
        beside = other(case)
        if beside is None:
            return _NONE
        ratio = results.ratio(case, beside)
        return "failed" if ratio is None else _ratio(ratio)

    return _grid(results, text)


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}"


def _latencies(results: Results) -> str:
    peers = _peers(results)
    lines = []
    for case in results.cases():
        ours = results.ours(case)
        if case.nbytes != _LATENCY_BYTES or ours is None:
            continue
        mine = ours.median("p50_seconds")
        known = [cell.median("p50_seconds") for cell in results.of(case, LIMIT)]
        limit = min((p50 for p50 in known if p50 is not None), default=None)
        beside = [results.cells.get((name, case)) for name in peers]
        lines.append(
            [
                *(case.transport, case.operation, str(case.clients), _micros(mine)),
                _micros(limit) if known else _NONE,
                f"{mine / limit:.1f}" if mine and limit else _NONE,
                *(_micros(cell.median("p50_seconds")) if cell else _NONE for cell in beside),
            ]
        )
    return _table(["transport", "operation", "clients", "ours", "limit", "ours / limit", *peers], lines)


def _micros(seconds: float | None) -> str:
    if seconds is None:
        return "failed"
    micros = seconds * 1e6
    return f"{micros:.3f}" if micros < 0.1 else f"{micros:.2f}" if micros < 10 else f"{micros:.0f}"


def _beside_peers(results: Results) -> list[str]:
    peers = _peers(results)
    if not peers:
        return []
    parts = ["## Ours / each peer", "Where a peer is faster the cell is bold."]
    faster = []
    for name in peers:

        def text(case: Case, name: str = name) -> str:
            cell = results.cells.get((name, case))
            if cell is None:
                return _NONE
            ratio = results.ratio(case, cell)
            if ratio is None:
                return "failed"
            return f"**{_ratio(ratio)}**" if ratio < 1 else _ratio(ratio)

        parts += [f"### {name}", _grid(results, text)]
        faster += [line for case in results.cases() if (line := _faster(results, name, case))]
    parts += ["### Cells where a peer is faster", "\n".join(faster) or "None."]
    return parts


def _faster(results: Results, name: str, case: Case) -> str:
    cell = results.cells.get((name, case))
    ratio = results.ratio(case, cell)
    ours = results.ours(case)
    if cell is None or ours is None or ratio is None or ratio >= 1:
        return _NONE
    apart = 1 / ratio - 1 > max(cell.spread(), ours.spread())
    within = "" if apart or results.rounds == 1 else " (within the rounds' spread)"
    return f"- {describe(case)}: {name} {_speed(cell.speed)}, ours {_speed(ours.speed)}: {ratio:.2f}{within}"


def describe(case: Case) -> str:
    return f"{case.transport} {case.operation} {size_name(case.nbytes)}, {case.clients} client{'s'[: case.clients > 1]}"


def _beside_one_connection(results: Results) -> list[str]:
    """Over TCP the limit may cut the array in two, a connection and a thread for each half; we have one to a server."""

    def limit(case: Case) -> Cell | None:
        return results.best(case, without="connections") if case.carried and case.nbytes > 8 else None

    if not any(map(limit, results.cases())):
        return []
    text = "The same over TCP, without the variants that cut an array in two, over two connections with a thread each."
    return ["### Ours / limit with one connection", text, _ratios(results, limit)]


def _beside_unix(results: Results) -> list[str]:
    if not any(results.of(case, ASIDE) for case in results.cases()):
        return []
    text = (
        "Another way between processes of one host; no limit of TCP, and not ours, where shm is there "
        "instead. For those who compare."
    )
    return ["## TCP of ours / bare Unix sockets", text, _ratios(results, lambda case: results.best(case, ASIDE))]


def _cpu(results: Results) -> str:
    peers = _peers(results)
    lines = []
    for case in results.cases():
        if case.nbytes not in _CPU_BYTES or case.operation == FETCH_ADD:
            continue
        beside = [results.ours(case), results.best(case), *(results.cells.get((name, case)) for name in peers)]
        if any(beside):
            lines.append(
                [case.transport, case.operation, size_name(case.nbytes), str(case.clients), *map(_used, beside)]
            )
    return _table(["transport", "operation", "size", "clients", "ours", "limit", *peers], lines)


def _used(cell: Cell | None) -> str:
    if cell is None:
        return _NONE
    client, server = cell.median("client_cpu"), cell.median("server_cpu")
    if client is None:
        return "failed"
    return f"{client:.2f}" if server is None else f"{client:.2f} + {server:.2f}"


def _failures(results: Results) -> list[str]:
    failed = [cell for cell in results.cells.values() if cell.failed]
    if not failed:
        return []
    lines = [f"- {cell.contender}, {describe(cell.case)}: {cell.failed}" for cell in failed]
    return ["## Failed", "\n".join(lines)]


def _all_cells(results: Results) -> str:
    kinds = {OURS: 0, LIMIT: 1, ASIDE: 2, PEER: 3}
    lines = []
    for case in results.cases():
        limit = results.best(case)
        cells = [cell for (_, of), cell in results.cells.items() if of == case]
        for cell in sorted(cells, key=lambda cell: (kinds[results.kinds[cell.contender]], -cell.speed)):
            about = [case.transport, case.operation, size_name(case.nbytes), str(case.clients), cell.contender]
            marked = "limit" if cell is limit else _NONE
            lines.append([*about, _spread(cell), _micros(cell.median("p50_seconds")), marked])
    return _table(["transport", "operation", "size", "clients", "who", "GB/s", "median call, µs", ""], lines)


def _spread(cell: Cell) -> str:
    if cell.failed or not cell.samples:
        return "failed"
    speeds = [sample.bytes_per_second / 1e9 for sample in cell.samples]
    return f"{_number(cell.speed / 1e9)} [{_number(min(speeds))}, {_number(max(speeds))}]"


def _speed(bytes_per_second: float) -> str:
    return f"{_number(bytes_per_second / 1e9)} GB/s"


def _number(value: float) -> str:
    return f"{value:.3g}"
