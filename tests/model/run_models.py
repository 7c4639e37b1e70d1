"""Runs the Spin models of this folder, exhaustively: each must be clean, and each planted fault must be found.

python tests/model/run_models.py [--quick]. Needs `spin` and a C compiler (`make model` installs it). The
full form allows more crashes, cuts and lapses than the quick one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
DEPTH = 1_000_000


@dataclass(frozen=True, slots=True)
class Model:
    """A model, its bounds in both forms, and the faults that can be planted in it."""

    name: str
    quick: tuple[str, ...]
    full: tuple[str, ...]
    faults: tuple[str, ...]


MODELS = (
    Model(
        "exactly_once",
        ("CRASHES=1", "CUTS=1"),
        ("CRASHES=2", "CUTS=2"),
        (
            "TWO_WORDS",
            "EARLY_WATERMARK",
            "MARK_IGNORED",
            "LATE_UNDO",
            "NO_FENCE",
            "EVICTED_IS_NEW",
            "SEQUENCES_RESTART",
        ),
    ),
    Model(
        "lock",
        ("LAPSES=1", "CRASHES=1"),
        ("LAPSES=2", "CRASHES=2"),
        ("FENCE_NOT_RAISED", "CHECK_THEN_WRITE", "REPEATED_IS_LOST", "TOKEN_FORGOTTEN"),
    ),
    Model("barrier", ("CRASHES=1",), ("CRASHES=3",), ("SEATS_FORGOTTEN", "LEAVES_EARLY", "NOT_BROKEN")),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What a run came to: errors, states, seconds; `complete`: every state was visited."""

    errors: int
    states: int
    seconds: float
    complete: bool


def explore(model: Model, bounds: tuple[str, ...], fault: str | None) -> Found:
    """Generate, compile and run the verifier."""
    defines = [f"-D{each}" for each in (*bounds, *((fault,) if fault else ()))]
    with tempfile.TemporaryDirectory() as directory:
        run = {"cwd": directory, "check": True, "capture_output": True, "text": True, "timeout": 1800}
        subprocess.run(["spin", "-a", *defines, str(HERE / f"{model.name}.pml")], **run)  # type: ignore[call-overload]
        subprocess.run(["gcc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"], **run)  # type: ignore[call-overload]
        said = subprocess.run(["./pan", f"-m{DEPTH}"], **{**run, "check": False}).stdout  # type: ignore[call-overload]
    errors = re.search(r"errors: (\d+)", said)
    states = re.search(r"([\d.e+]+) states, stored", said)
    seconds = re.search(r"elapsed time ([\d.]+)", said)
    assert errors, said
    assert states, said
    cut = "max search depth too small" in said or "out of memory" in said
    return Found(int(errors[1]), int(float(states[1])), float(seconds[1]) if seconds else 0.0, not cut)


def main() -> int:
    """Run all of them; 0 if every model is clean and every fault was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    bad = 0
    print(f"{'model':14} {'planted':18} {'result':12} {'states':>10} {'seconds':>8}")
    for model in MODELS:
        for fault in (None, *model.faults):
            # A planted fault needs no more than the quick bounds to show.
            found = explore(model, model.quick if quick or fault else model.full, fault)
            good = found.errors > 0 if fault else found.errors == 0 and found.complete
            result = ("found" if fault else "clean") if good else ("NOT FOUND" if fault else "NOT CLEAN")
            bad += not good
            print(f"{model.name:14} {fault or '-':18} {result:12} {found.states:>10} {found.seconds:>8.2f}", flush=True)
    print("all models clean, all planted faults found" if not bad else f"{bad} of them are not as they should be")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
