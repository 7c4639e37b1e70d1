from __future__ import annotations

import contextlib
import io
import time
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console

from smb.tools.cli import clients, output
from smb.tools.cli.create import _parse_shape
from smb.tools.cli.output import format_ago, format_duration, print_error


def test_tables_outside_a_terminal_keep_long_names_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """A name far longer than 80 characters arrives in a pipe as it is, on one line."""
    name = "team/" + "x" * 250
    rows = output.table("NAME", "SIZE", right=("SIZE",))
    rows.add_row(name, "1 B")
    rows.add_row("short", "")
    output.console().print(rows)
    lines = capsys.readouterr().out.splitlines()
    assert any(name in line and "1 B" in line for line in lines)
    assert "short" in lines


def test_counts_have_their_plural() -> None:
    """One buffer, two buffers, no buffers."""
    assert [output.counted(number, "buffer") for number in (0, 1, 2)] == ["0 buffers", "1 buffer", "2 buffers"]


def test_tables_on_a_terminal_fold_long_names() -> None:
    """On a narrow terminal no character of a name is lost either: it goes on in the next line."""
    rows = output.table("NAME")
    rows.add_row("abcdefghij" * 5)
    terminal = io.StringIO()
    Console(file=terminal, force_terminal=True, width=20, color_system=None).print(rows)
    assert "".join(terminal.getvalue().split()[1:]) == "abcdefghij" * 5


def test_brackets_in_names_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """What looks like rich's markup is shown as it stands."""
    rows = output.table("NAME")
    rows.add_row("[bold]weights[/bold]")
    output.console().print(rows)
    assert "[bold]weights[/bold]" in capsys.readouterr().out


def test_errors_take_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """An error's message of several lines becomes one line on stderr."""
    print_error("first\n  second\n")
    assert capsys.readouterr().err == "smb: first second\n"


def test_errors_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """What an error tells of others, such as their names, is escaped; letters of all scripts stay."""
    print_error("held by \x1b]0;ü\x07\x9b2J\u202e")
    assert capsys.readouterr().err == "smb: held by \\x1b]0;ü\\x07\\x9b2J\\u202e\n"


def test_clients_names_steer_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`smb clients` and its kick escape each text, whatever a coordinator of another version lets through."""
    bad = "\x1b[2J"
    row = {
        "name": bad, "certificate": bad, "role": "client", "namespaces": [bad], "since": 0.0, "silent_s": 0.0,
        "connections": 0, "holds": 1, "held": [bad],
    }  # fmt: skip
    reply = SimpleNamespace(clients=[bad], session_count=1)
    cluster = SimpleNamespace(clients=lambda _: [row], kick_clients=lambda *_: reply)
    monkeypatch.setattr(clients, "coordinator_at", lambda _: contextlib.nullcontext(cluster))
    clients.clients(typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None))))
    clients.kick(bad)
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert out.count("\\x1b[2J") == 5
    assert err == "ended: \\x1b[2J\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.24e-6, "3.24 us"), (0.041, "41 ms"), (1.5, "1.5 s"), (119.0, "119 s"), (180.0, "3 min"), (7200.0, "2 h")],
)
def test_durations_have_the_unit_that_fits(seconds: float, text: str) -> None:
    """Durations from microseconds to hours are short and carry their unit."""
    assert format_duration(seconds) == text


def test_ago_counts_from_now() -> None:
    """A time ten minutes back reads so, and a server never seen reads `never`."""
    assert format_ago(time.time() - 600) == "10 min ago"
    assert format_ago(0.0) == "never"


@pytest.mark.parametrize(("text", "shape"), [("7", (7,)), ("1000,20", (1000, 20)), ("3x4x5", (3, 4, 5))])
def test_shapes_are_read(text: str, shape: tuple[int, ...]) -> None:
    """--shape takes extents with commas or crosses between them."""
    assert _parse_shape(text) == shape


@pytest.mark.parametrize("text", ["", "a,b", "1,,2", "1.5"])
def test_what_is_no_shape_is_wrong_usage(text: str) -> None:
    """Anything else is refused with an example of what would work."""
    with pytest.raises(typer.BadParameter, match="--shape 1000,1000"):
        _parse_shape(text)
