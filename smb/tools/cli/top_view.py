"""How `smb top` draws the coordinator's overview (smb/coordinator/dashboard/overview.py). Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from smb.config.parse import format_bytes
from smb.config.printable import printable
from smb.tools.cli.describe import format_shape
from smb.tools.cli.output import counted, format_duration, table

Json = dict[str, Any]

_PROBLEMS_MAX = 3  # shown at most; each takes a line
_WORD = 16  # characters
_NAME = 30  # width of a row's name before other columns are dropped
_GAP = 2  # between columns
_SPARKS = 40  # steps of 2 s
_RAMP, _PLAIN_RAMP = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_STYLES = {"critical": "red", "warning": "yellow", "note": "dim"}
_STATES = {"left": "stopped", "gone": "gone", "lost": "memory lost", "unheard": "not heard of yet"}
_STAGES = {"trains": "trains", "idle": "nobody trains", "away": "server gone", "lost": "memory lost"}
_PARTS = {"ok": "ok", "gone": "server gone", "unheard": "not heard of yet"}


def render(shown: Json, encoding: str, height: int = 0, lost: str = "", width: int = 0) -> list[RenderableType]:
    """Return what to print, at most `height` lines of `width` columns (0: no limit).

    `lost` is the reason why the data is not new. The busiest rows come first. A training's own buffers and locks are
    left out. Published states are shown if there are any. If there is no room for a row of each list, the last lists
    are left out.
    """
    problems = shown["problems"][: _PROBLEMS_MAX if height else None]
    parts: list[RenderableType] = [_head(shown, width), *_throughput(shown, encoding)]
    if lost:
        parts.append(_whole(f"The coordinator is lost, this is from before: {lost}", "bold red"))
    parts += [_problem(problem) for problem in problems] or [_line(_fine(shown), "green")]
    sections = [
        ("trainings", _trainings), ("states", _states), ("servers", _servers), ("buffers", _buffers),
        ("clients", _clients), ("waits", _waits),
    ]  # fmt: skip
    own = [buffer for buffer in shown["buffers"] if not buffer["training"]]
    by_activity = {
        "trainings": sorted(shown["trainings"], key=lambda row: (-row["workers"], -(row["samples_per_s"] or 0))),
        "states": sorted(shown.get("states", ()), key=lambda row: (-row["readers"], row["name"])),
        "servers": sorted(shown["servers"], key=lambda row: -(row["rates"] or {"operations": 0})["operations"]),
        "buffers": sorted(own, key=lambda row: -row["rates"]["bytes"]),
        "clients": sorted(shown["clients"], key=lambda row: (-row["rates"]["bytes"], -row["holds"])),
        "waits": [wait for wait in shown["waits"] if not wait.get("training")],
    }
    if not by_activity["states"]:
        sections = [section for section in sections if section[0] != "states"]
    lines = sum(_lines(part, width) for part in parts)
    left_out_lists: list[str] = []
    while True:
        lists = [by_activity[name] for name, _ in sections]
        room = height - lines - 2 * len(sections) - 2 if height else sum(map(len, lists))
        if room >= sum(1 for rows in lists if rows) or len(sections) == 1:
            break
        left_out_lists.insert(0, sections.pop()[0])
    for (name, draw), rows, some in zip(sections, lists, share([len(rows) for rows in lists], room), strict=True):
        parts.append(Text(""))
        parts.append(
            draw(rows[:some], shown).table(width)
            if rows
            else _line(
                (_FOLDED if shown["of_trainings"].get(name) else _EMPTY)[name].format(**shown["coordinator"]), "dim"
            )
        )
        left_out = len(rows) - some + shown["left_out"].get(name, 0)
        if left_out and some:
            parts[-2] = _line(f"({left_out} more of the {name} not shown)", "dim")
    if height:
        higher = f"; a higher window shows {', '.join(left_out_lists)}" if left_out_lists else ""
        parts += [Text(""), _line(f"q quits{higher}", "dim")]
    return parts


def _lines(part: RenderableType, width: int) -> int:
    """Return an upper bound for the lines of a text: if it is wrapped, no word is longer than 16 characters."""
    folded = width > 2 * _WORD and isinstance(part, Text) and not part.no_wrap
    return part.cell_len // (width - _WORD) + 1 if folded and isinstance(part, Text) else 1


_EMPTY = {
    "trainings": 'No training: smb.torch.join(model, optimizer, "my-model", scheme="diloco")',
    "servers": "No memory server: smb-memserver --coordinator {address} --capacity 1GiB",
    "buffers": "No buffer: smb create weights --shape 1000,1000 -c {address}",
    "clients": 'No client: smb.connect("{address}")',
    "waits": "No lock is held, and nobody waits, outside of trainings.",
}


_FOLDED = {
    "buffers": "No buffer but those of trainings: smb ls --all",
    "waits": "No lock but those of trainings is held, and nobody waits for another one.",
}


def share(wanted: Sequence[int], room: int) -> list[int]:
    """Divide `room` lines among lists that want `wanted` lines: none gets more than it wants, and none gets nothing."""
    given = [0] * len(wanted)
    left = max(0, room)
    while left and any(g < w for g, w in zip(given, wanted, strict=True)):
        for i, most in enumerate(wanted):
            if left and given[i] < most:
                given[i] += 1
                left -= 1
    return given


def sparks(values: Sequence[float], encoding: str) -> str:
    """Return a plot in one line; the highest step stands for the highest value."""
    ramp = _RAMP if "utf" in encoding.lower() else _PLAIN_RAMP
    top = max(values, default=0) or 1
    return "".join(ramp[min(len(ramp) - 1, int(value / top * len(ramp)))] for value in values)


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _head(shown: Json, width: int) -> Text:
    totals, now = shown["totals"], shown["now"]
    used = f"{totals['used'] / totals['capacity']:.0%}" if totals["capacity"] else "-"
    parts = [
        f"{shown['coordinator']['address']} up {_age(now - shown['coordinator']['started'])}",
        f"{totals['alive']}/{totals['servers']} servers",
        f"{used} of {format_bytes(totals['capacity'])}",
        _counted_buffers(shown),
        f"{totals['clients']} clients",
        time.strftime("%H:%M:%S", time.localtime(now)),
    ]
    while width and len("  ".join(parts)) > width and len(parts) > 1:
        parts.pop()
    return _line("  ".join(parts), "bold")


def _counted_buffers(shown: Json) -> str:
    inside = shown["of_trainings"]["buffers"]
    return counted(shown["totals"]["buffers"], "buffer") + (f" ({inside} of trainings)" if inside else "")


def _throughput(shown: Json, encoding: str) -> list[RenderableType]:
    history, rates = shown["history"], shown["totals"]["rates"]
    lines = (("in", _rate(rates["in"])), ("out", _rate(rates["out"])), ("operations", _each(rates["operations"])))
    return [_line(f"{name:<10} {now:>12}  {sparks(history[name][-_SPARKS:], encoding)}") for name, now in lines]


def _fine(shown: Json) -> str:
    return "Nothing is wrong." if shown["totals"]["servers"] else "Nothing is wrong, but there is no memory server yet."


def _problem(problem: Json) -> Text:
    action = f" What to do: {problem['action']}" if problem["action"] else ""
    return _whole(f"{problem['severity'].upper()} {problem['title']}.{action}", _STYLES[problem["severity"]])


def _whole(text: str, style: str) -> Text:
    """Return a sentence that may take several lines, since it ends with the advice."""
    return Text(printable(text), style=style)


def _trainings(rows: Sequence[Json], _shown: Json) -> _Rows:
    numbers = ("ROUND", "WORKERS", "SAMPLES", "STALENESS", "REFUSED", "SIZE")
    spare = ("TIME", "REFUSED", "STALENESS", "SIZE", "SCHEME", "ROUND")
    made = _Rows("TRAINING", "STATE", "SCHEME", *numbers, "TIME", right=numbers, spare=spare)
    for row in rows:
        ok, working = row["stage"] in ("trains", "idle"), row["workers"]
        made.add_row(
            row["name"],
            _STAGES[row["stage"]],
            row["scheme"],
            f"{row['round']:,}" if row["round"] else "-",
            str(working),
            _each(row["samples_per_s"]),
            str(row["staleness"]) if working else "-",
            str(row["refused"]) if working else "-",
            format_bytes(row["size"]),
            printable(row.get("why") or "-"),
            style=None if ok else "red",
        )
    return made


def _states(rows: Sequence[Json], _shown: Json) -> _Rows:
    numbers = ("GENERATION", "READERS", "BEHIND", "SIZE")
    made = _Rows("PUBLISHED STATE", "STATE", "PUBLISHER", *numbers, right=numbers, spare=("SIZE", "PUBLISHER", "STATE"))
    for row in rows:
        made.add_row(
            row["name"],
            _PARTS.get(row["state"], "memory lost"),
            printable(row["published_by"]) or "nobody publishes",
            f"{row['generation']:,}" if row["generation"] else "-",
            str(row["readers"]),
            "-" if row["behind"] is None else f"{row['behind']:,}",
            format_bytes(row["size"]),
            style=None if row["state"] == "ok" else "red",
        )
    return made


def _servers(rows: Sequence[Json], shown: Json) -> _Rows:
    numbers = ("MEMORY", "OPS", "IN", "OUT", "CONN", "WAIT", "ERR")
    made = _Rows("SERVER", "STATE", *numbers, right=numbers, spare=("CONN", "OPS", "WAIT", "ERR", "MEMORY"))
    for row in rows:
        state, rates = str(row["state"]), row["rates"] or {}
        alive = row["alive"]
        waiting = row["deferred"] + row["waiting"]
        made.add_row(
            row["name"],
            _STATES.get(state, state)
            + ("" if alive else f" {_age(shown['now'] - row['last_seen'])}")
            + (", draining" if row.get("draining") else ""),
            f"{row['used'] / row['capacity']:.0%} of {format_bytes(row['capacity'])}",
            _each(rates.get("operations")),
            _rate(rates.get("in")),
            _rate(rates.get("out")),
            *(str(number) if alive else "-" for number in (row["connections"], waiting, row["errors_recently"])),
            style="red" if not alive else "yellow" if state == "late" else None,
        )
    return made


def _buffers(rows: Sequence[Json], shown: Json) -> _Rows:
    right = ("SIZE", "SERVERS", "MOVED", "OPS")
    spare = ("MADE", "OPS", "SERVERS", "DTYPE", "SHAPE")
    columns = ("STATE", "SHAPE", "DTYPE", "SIZE", "SERVERS", "MOVED", "OPS", "MADE")
    made = _Rows("BUFFER", *columns, right=right, spare=spare)
    for row in rows:
        made.add_row(
            row["name"],
            _PARTS.get(row["state"], "memory lost"),
            format_shape(tuple(row["shape"])),
            row["dtype"],
            format_bytes(row["size"]) + (f" x {row['versions']}" if row["versions"] > 1 else ""),
            str(row["servers"]),
            _rate(row["rates"]["bytes"]),
            _each(row["rates"]["operations"]),
            f"{_age(shown['now'] - row['created'])} ago",
            style=None if row["state"] == "ok" else "red",
        )
    return made


def _clients(rows: Sequence[Json], _shown: Json) -> _Rows:
    right = ("MOVED", "OPS", "LEASE LEFT", "LOCKS")
    spare = ("LAST HEARD", "CONNECTED", "OPS", "LEASE LEFT")
    made = _Rows("CLIENT", "MOVED", "OPS", "CONNECTED", "LAST HEARD", "LEASE LEFT", "LOCKS", right=right, spare=spare)
    for row in rows:
        made.add_row(
            printable(row["name"]),
            _rate(row["rates"]["bytes"]),
            _each(row["rates"]["operations"]),
            ("" if row["since"] else "over ") + _age(row["connected_s"]),
            f"{_age(row['silent_s'])} ago",
            _age(row["lease_left_s"]),
            str(row["holds"]),
        )
    return made


def _waits(rows: Sequence[Json], _shown: Json) -> _Rows:
    right = ("FOR", "LEASE LEFT", "WAITING")
    made = _Rows(
        "LOCKS", "HELD BY", "FOR", "LEASE LEFT", "WAITING", "AT", right=right, spare=("AT", "LEASE LEFT", "FOR")
    )
    for row in rows:
        held = row["holder"] is not None
        made.add_row(
            row["title"],
            printable(row["holder"]) if held else "nobody",
            _age(row["for_s"]) if held else "-",
            _age(row["left_s"]) if held else "-",
            str(row["waiting"]),
            row["server"],
        )
    return made


class _Rows:
    """Rows of one line each. On a narrow terminal the columns of `spare` are dropped in that order, then cells are
    cut.
    """

    def __init__(self, *columns: str, right: tuple[str, ...], spare: tuple[str, ...]) -> None:
        self._columns, self._right, self._spare = columns, right, spare
        self._rows: list[tuple[tuple[str, ...], str | None]] = []

    def add_row(self, *cells: str, style: str | None = None) -> None:
        self._rows.append((cells, style))

    def table(self, width: int) -> Table:
        """Return a table that fits into `width` columns (0: any)."""
        needs = {
            name: max(cell_len(text) for text in (name, *(cells[i] for cells, _ in self._rows))) + _GAP
            for i, name in enumerate(self._columns)
        }
        needs[self._columns[0]] = min(needs[self._columns[0]], _NAME)
        left_out: set[str] = set()
        for name in self._spare:
            if width and sum(need for column, need in needs.items() if column not in left_out) - _GAP > width:
                left_out.add(name)
        kept = [i for i, name in enumerate(self._columns) if name not in left_out]
        made = table(*(self._columns[i] for i in kept), right=self._right)
        for column in made.columns:
            column.no_wrap, column.overflow = True, "ellipsis"
        for cells, style in self._rows:
            made.add_row(*(cells[i] for i in kept), style=style)
        return made


def _age(seconds: float) -> str:
    return format_duration(max(1.0, round(seconds))) if seconds >= 0.5 else "0 s"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{format_bytes(round(value))}/s"


def _each(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}/s" if value >= 10 or value == 0 else f"{value:.1f}/s"
