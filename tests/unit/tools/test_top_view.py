"""smb.tools.cli.top_view: what `smb top` draws."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console, Group

from smb.config.printable import printable
from smb.tools.cli.top_view import render, share, sparks


def shown(**changes: Any) -> dict[str, Any]:
    base = {
        "now": 1000.0,
        "coordinator": {"address": "h:7070", "started": 900.0},
        "totals": {
            "servers": 0, "alive": 0, "capacity": 0, "used": 0, "buffers": 0, "clients": 0,
            "rates": {"operations": 0, "in": 0, "out": 0, "within": 0},
        },
        "problems": [],
        "trainings": [],
        "servers": [],
        "buffers": [],
        "clients": [],
        "waits": [],
        "history": {"operations": [0.0] * 150, "in": [0] * 150, "out": [0] * 150},
        "left_out": {"buffers": 0, "clients": 0, "waits": 0},
        "of_trainings": {"buffers": 0, "waits": 0},
    }  # fmt: skip
    return {**base, **changes}


def clients(count: int, name: str = "host") -> list[dict[str, Any]]:
    common = {"since": 990.0, "silent_s": 1.0, "connected_s": 10.0, "lease_left_s": 29.0, "holds": 0}
    return [{"name": f"{name}:{i}", "rates": {"operations": 0, "bytes": i}, **common} for i in range(count)]


def text_of(parts: list[Any], width: int = 120) -> str:
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(Group(*parts))  # one by one, texts would lose that they are not folded
    return capture.get()


@pytest.mark.parametrize(
    ("wanted", "room", "given"),
    [([3, 3], 10, [3, 3]), ([100, 2, 0, 100], 10, [4, 2, 0, 4]), ([5], 0, [0]), ([5, 5], -3, [0, 0]), ([], 5, [])],
)
def test_lines_are_shared_out(wanted: list[int], room: int, given: list[int]) -> None:
    """A short list is shown whole, long ones share what is left."""
    assert share(wanted, room) == given


@pytest.mark.parametrize("height", [10, 16, 24, 60])
def test_never_higher_than_the_screen(height: int) -> None:
    """With more rows than lines, what is left out is counted."""
    many = shown(clients=clients(300), left_out={"buffers": 0, "clients": 700, "waits": 0})
    text = text_of(render(many, "utf-8", height), width=80)
    assert text.count("\n") <= height
    if height > 18:
        assert "more of the clients not shown" in text
    assert text_of(render(many, "utf-8")).count("host:") == 300


def test_problems_leave_room_for_the_first_lists() -> None:
    """On a small window the last lists go, and are named, before any list has no row."""
    title, action = (
        "worker alice of training vision/digits has told nothing for 12 s",
        "look at its host, and at its log",
    )
    problem = {"severity": "warning", "title": title, "detail": "", "action": action, "about": ["", ""]}
    row = {
        "name": "vision/digits",
        "stage": "trains",
        "workers": 2,
        "scheme": "diloco",
        "round": 7,
        "samples_per_s": 100.0,
    }
    row |= {"staleness": 0, "refused": 0, "size": 200_000}
    full = shown(clients=clients(3), problems=[problem] * 3, trainings=[row])
    small = text_of(render(full, "utf-8", 20, width=60), width=60)
    assert "vision/digits  trains" in small
    assert small.count("\n") <= 20
    assert "q quits; a higher window shows" in small
    assert "q quits\n" in text_of(render(full, "utf-8", 40, width=60), width=60)


def test_plots_by_their_highest_value() -> None:
    """Also where the terminal has no blocks; nothing at all is a flat line."""
    assert sparks([0, 1, 2, 4], "utf-8") == "▁▃▅█"
    assert sparks([0, 4], "ascii") == "_#"
    assert sparks([0, 0], "UTF-8") == "▁▁"
    assert sparks([], "UTF-8") == ""


def test_a_name_that_would_move_the_cursor_is_spelled_out() -> None:
    """Clients name themselves, and a terminal obeys escapes."""
    assert printable("a\x1b[2Jb") == "a\\x1b[2Jb"
    problem = {"severity": "note", "title": "lost \x1b]0;x\x07", "detail": "", "action": "", "about": ["", ""]}
    text = text_of(render(shown(clients=clients(1, "evil\x1b[2J\r\n[bold]"), problems=[problem]), "utf-8"))
    assert "\x1b]0" not in text
    assert "\x1b[2J" not in text
    assert "\\x1b[2J" in text
    assert "[bold]" in text


def test_an_empty_cluster_is_told_what_to_do_first() -> None:
    """Each section says how to get what is missing there."""
    text = text_of(render(shown(), "utf-8"))
    assert "smb-memserver --coordinator h:7070" in text
    assert "smb create weights" in text
    assert 'smb.connect("h:7070")' in text


def test_says_that_the_coordinator_is_lost() -> None:
    """What is on the screen stays, and is said to be old."""
    assert "this is from before: no answer" in text_of(render(shown(), "utf-8", 40, "no answer"))


def test_the_busiest_come_first_and_sentences_are_whole() -> None:
    """Rows by what they move; a training's own buffers and locks are its; what to do is not cut on a narrow
    terminal.
    """
    buffer = {
        "state": "ok", "shape": [10], "dtype": "float32", "size": 40, "versions": 1, "servers": 1, "created": 900.0,
    }  # fmt: skip
    rates = {"operations": 1.0, "bytes": 10}
    buffers = [
        {"name": "calm", "rates": {"operations": 0.0, "bytes": 0}, "training": None, **buffer},
        {"name": "busy", "rates": rates, "training": None, **buffer},
        {"name": "run/tick", "rates": rates, "training": "run", **buffer},
    ]
    training = {
        "name": "run", "stage": "trains", "scheme": "diloco", "round": 58, "workers": 2, "samples_per_s": None,
        "staleness": 0, "refused": 0, "size": 40,
    }  # fmt: skip
    advice = "Start it again with the same --name and the same --memory-dir, or drop what was on it for good"
    problem = {"severity": "warning", "title": "gone", "detail": "", "action": advice, "about": ["", ""]}
    lock = {
        "what": "lock", "kind": "lock", "server": "a", "holder": "alice", "for_s": 1.0, "left_s": 9.0, "waiting": 0,
    }  # fmt: skip
    waits = [{"title": "lock mine", "training": None, **lock}, {"title": "lock run/turn", "training": "run", **lock}]
    many = shown(buffers=buffers, trainings=[training], problems=[problem], clients=clients(3), waits=waits)
    text = text_of(render(many, "utf-8", 40, width=100), width=100)
    assert text.index("busy") < text.index("calm")
    assert "run/tick" not in text
    assert "lock mine" in text
    assert "run/turn" not in text
    inside = {"buffers": 1, "waits": 1}
    folded = shown(buffers=buffers[2:], trainings=[training], waits=waits[1:], of_trainings=inside)
    folded["totals"]["buffers"] = 1
    said = text_of(render(folded, "utf-8", width=100), width=100)
    assert "1 buffer (1 of trainings)" in said
    assert "No buffer but those of trainings" in said
    assert "No lock but those of trainings" in said
    assert text.index("host:2") < text.index("host:0")
    assert " ".join(advice.split()) in " ".join(text.split())
    (row,) = [line for line in text.splitlines() if line.startswith("run ")]
    assert row.split()[:6] == ["run", "trains", "diloco", "58", "2", "-"]
    narrow = text_of(render(many, "utf-8", 40, width=50), width=50)
    assert "WORKERS" in narrow  # what matters less is left out, before anything is cut
    assert "STALENESS" not in narrow
    assert "STALENESS" in text_of(render(many, "utf-8"), width=120)


def test_published_states_say_who_publishes_and_how_far_readers_are() -> None:
    """A row for each state; without any there is no such list, also of a coordinator that tells of none."""
    common = {"state": "ok", "size": 1 << 20, "created": 0.0}
    states = [
        {"name": "quiet", "generation": 0, "published_by": "", "readers": 0, "behind": None, **common},
        {"name": "policy", "generation": 1200, "published_by": "a + 1", "readers": 3, "behind": 8, **common},
    ]
    said = text_of(render(shown(states=states), "utf-8"))
    rows = [line.split() for line in said.splitlines() if "policy" in line or "quiet" in line]
    assert rows[0] == ["policy", "ok", "a", "+", "1", "1,200", "3", "8", "1", "MiB"]
    assert rows[1] == ["quiet", "ok", "nobody", "publishes", "-", "0", "-", "1", "MiB"]
    assert "PUBLISHED" not in text_of(render(shown(states=[]), "utf-8"))
    assert "PUBLISHED" not in text_of(render(shown(), "utf-8"))
