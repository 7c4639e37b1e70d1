"""The way of a call through the product's rooms, in figures: `python -m tests.support.walk`.

It makes one accumulate, one publish and one step of a training over TCP, and records which functions of ours run on
the calling thread, in their order. A room is a folder; the compiled modules are the room "csrc". For each call it
tells how many functions run, in how many files and rooms, and

- stays: how often the way enters a room. Functions of one room that run one after the other are one stay.
- returns: how often the way enters the dispatcher's file again, after it has left it.
- names: how many functions a reader meets. A comprehension is a part of the function around it.

`python -m tests.support.walk accumulate` shows the way of one call, a function a line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import smb
import smb.train

DISPATCHER = "smb/call/dispatcher.py"
ENGINE = "csrc"  # the room and the file of compiled functions
_ROOT = f"{Path(smb.__file__).resolve().parents[1]}/"
_PARTS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
_SIZE = 1000


@dataclass(frozen=True)
class Visit:
    """A function that has run."""

    file: str
    line: int
    name: str

    @property
    def room(self) -> str:
        """The folder."""
        return self.file.rpartition("/")[0] or ENGINE


@dataclass(frozen=True)
class Walk:
    """The functions of one call, in the order in which they began."""

    visits: tuple[Visit, ...]

    @property
    def files(self) -> int:
        return len({each.file for each in self.visits})

    @property
    def rooms(self) -> int:
        return len({each.room for each in self.visits})

    @property
    def stays(self) -> tuple[str, ...]:
        """The rooms, in the order in which the way enters them."""
        return tuple(room for room, _ in groupby(self.visits, lambda each: each.room))

    @property
    def returns(self) -> int:
        files = [file for file, _ in groupby(self.visits, lambda each: each.file)]
        return max(0, files.count(DISPATCHER) - 1)

    @property
    def names(self) -> int:
        return len(set(self.visits))

    def __str__(self) -> str:
        return (
            f"{len(self.visits)} functions run in {self.files} files of {self.rooms} rooms: {len(self.stays)} stays, "
            f"{self.returns} returns, {self.names} names"
        )


def walk_of(call: Callable[[], object]) -> Walk:
    """Make a call, and return its way on this thread."""
    visits: list[Visit] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOT) and code.co_name not in _PARTS:
            file = code.co_filename.removeprefix(_ROOT)
            if file.startswith("smb/"):
                visits.append(Visit(file, code.co_firstlineno, getattr(code, "co_qualname", code.co_name)))
        elif event == "c_call" and str(getattr(argument, "__module__", "")).startswith("smb._"):
            visits.append(Visit(ENGINE, 0, argument.__name__))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(tuple(visits))


def walks() -> Iterator[tuple[str, Walk]]:
    """Yield the name and the way of each call, made over TCP on a cluster of two memory servers."""
    column = np.ones((_SIZE, 2), np.float32)[:, 0]  # its elements don't lie side by side: not for the direct path
    with smb.LocalCluster() as cluster, smb.connect(cluster.address, transport="tcp") as client:
        buffer = client.create("walk", _SIZE)
        yield "first accumulate", walk_of(lambda: buffer.accumulate(column))
        yield "accumulate", walk_of(lambda: buffer.accumulate(column))
        published = client.create("walk-published", _SIZE, versions=2)
        published.publish(column)
        yield "publish", walk_of(lambda: published.publish(column))
        values = np.zeros(_SIZE, np.float32)
        with smb.train.join(client, "walk-elastic", values, smb.train.EASGD(alpha=0.5, every=1)) as worker:
            worker.step()
            yield "step of EASGD", walk_of(worker.step)
        with smb.train.join(client, "walk-rounds", values, smb.train.DiLoCo(every=1)) as worker:
            worker.step()
            yield "step of DiLoCo", walk_of(worker.step)


def _show(wanted: str) -> None:
    for name, walk in walks():
        if not wanted:
            print(f"{name}: {walk}")
        elif name == wanted:
            print(walk, *(f"  {each.file:30} {each.name}" for each in walk.visits), sep="\n")


if __name__ == "__main__":
    _show(" ".join(sys.argv[1:]))
