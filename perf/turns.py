"""The list of contenders, and one's turn: with a time limit, and a check of what the network device has carried.

`python -m perf.turns` is a measuring process: perf.remote starts one on the host of the clients.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from perf import limits, ours, remote
from perf.clients import end_with_parent
from perf.contender import ASIDE, Case, Contender, Sample

PEERS = Path(__file__).with_name("peers")
_CELL_S = 120.0  # for a case with all that goes with it, for a start, and for an end: longer means that it hangs
_FAILURES_MAX = 3  # in a row, before a contender is given up for the round


class HangError(Exception):
    """A contender took longer than anything here takes."""


# ---- who takes part


def discover() -> tuple[list[Contender], dict[str, str]]:
    """Return all contenders that can run here, and of the others why not."""
    missing: dict[str, str] = {}
    found: list[Contender] = [*ours.CONTENDERS, *limits.CONTENDERS, *_peers(missing)]
    there: list[Contender] = []
    for contender in found:
        why = contender.missing()
        if why is None:
            there.append(contender)
        else:
            missing[contender.name] = why
    return there, missing


def _peers(missing: dict[str, str]) -> Iterator[Contender]:
    for path in sorted(PEERS.glob("[!_]*.py")):
        try:
            module = importlib.import_module(f"perf.peers.{path.stem}")
            yield from getattr(module, "CONTENDERS", [])
        except Exception as error:  # noqa: BLE001 - an optional package's own troubles
            missing[path.stem] = f"its module can't be used: {type(error).__name__}: {error}"


# ---- a turn


class Turn:
    """A contender in one round: entered when it is first needed, and anew after a failure."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._entered = False
        self._failures = 0
        self._why = ""

    def measure(self, case: Case) -> Sample | str:
        """Return the sample, or why there is none."""
        if self._failures >= _FAILURES_MAX:
            return f"given up after {self._failures} failures in a row; the last: {self._why}"
        try:
            with _time_limit(_CELL_S + 3 * case.seconds):
                if not self._entered:
                    self.contender.__enter__()
                    self._entered = True
                before = remote.carried_bytes()
                sample = self.contender.measure(case)
                if case.carried and self.contender.kind != ASIDE:
                    check_tcp(case, sample, remote.carried_bytes() - before)
        except Exception as error:  # noqa: BLE001 - whatever a peer's library raises is shown in its cell
            self._failures += 1
            self._why = f"{type(error).__name__}: {error}" if type(error) is not RuntimeError else str(error)
            self.close()
            return self._why
        self._failures = 0
        return sample

    def close(self) -> None:
        """End what it started."""
        if self._entered:
            self._entered = False
            try:
                with _time_limit(_CELL_S):
                    self.contender.__exit__(None, None, None)
            except Exception as error:  # noqa: BLE001 - as above; the run goes on
                sys.stderr.write(f"{self.contender.name} did not end well: {error}\n")


def check_tcp(case: Case, sample: Sample, carried_bytes: int) -> None:
    """RuntimeError where the network device has not carried what was moved: some libraries find another way."""
    if carried_bytes < sample.calls * case.nbytes:
        raise RuntimeError(
            f"not over TCP: {sample.calls} calls of {case.nbytes} bytes, {carried_bytes} bytes on the device "
            f"{remote.device()}"
        )


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise HangError in the block after so many seconds. Main thread only."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise HangError(f"nothing came back within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- a process that measures where it is


def main() -> int:
    """A request a line (JSON) on stdin, its answer on stdout: a contender's name and a case, or nothing, which ends the
    round. Ends with its stdin."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries say is no answer
    contenders = {contender.name: contender for contender in discover()[0]}
    turns: dict[str, Turn] = {}
    try:
        for line in sys.stdin:
            answers.write(json.dumps(_answer(json.loads(line), contenders, turns)) + "\n")
            answers.flush()
    finally:
        _close(turns)
    return 0


def _answer(request: dict[str, Any], contenders: dict[str, Contender], turns: dict[str, Turn]) -> dict[str, Any]:
    if not request:
        _close(turns)
        return {}
    name = request["contender"]
    if name not in contenders:
        return {"failed": f"{name} can't be used on the client's host"}
    found = turns.setdefault(name, Turn(contenders[name])).measure(Case(**request["case"]))
    return {"failed": found} if isinstance(found, str) else {"sample": found.to_json()}


def _close(turns: dict[str, Turn]) -> None:
    while turns:
        turns.popitem()[1].close()


if __name__ == "__main__":
    sys.exit(main())
