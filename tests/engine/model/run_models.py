"""Runs the Spin models of this folder, exhaustively: each must be clean, and each planted fault must be found.

python tests/engine/model/run_models.py [--quick]. Needs `spin` and a C compiler (`make model` installs it). The
full form allows more crashes, cuts and lapses than the quick one, which plants one fault in each model.
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
TIMEOUT_S = 1800
_QUICK_FAULTS = 1  # of each model; to compile a planted fault takes as long as to explore a clean model


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
        ("CRASHES=2", "CUTS=1"),
        ("CRASHES=3", "CUTS=2"),
        (
            "TWO_WORDS",
            "EARLY_WATERMARK",
            "MARK_IGNORED",
            "LATE_UNDO",
            "NO_FENCE",
            "EVICTED_IS_NEW",
            "SEQUENCES_RESTART",
            "DOUBLES_APPLIED",
        ),
    ),
    Model(
        "lock",
        ("LAPSES=1", "CRASHES=1"),
        ("LAPSES=2", "CRASHES=2"),
        (
            "FENCE_NOT_RAISED",
            "CHECK_THEN_WRITE",
            "REPEATED_IS_LOST",
            "TOKEN_FORGOTTEN",
            "AGE_FORGOTTEN",
            "NO_GRACE",
        ),
    ),
    Model("lock", ("CLIENTS=2", "TURNS=2"), ("CLIENTS=2", "TURNS=3", "LAPSES=2", "CRASHES=2"), ()),  # who comes again
    Model("barrier", ("CRASHES=1",), ("CRASHES=3",), ("SEATS_FORGOTTEN", "LEAVES_EARLY", "NOT_BROKEN")),
    Model(
        "mirror",
        ("VERSIONS=3", "COPIES=2"),
        ("VERSIONS=4",),
        ("SOURCE_NOT_LOOKED_AT", "PIN_IGNORED", "READER_LOOKS_ONCE", "COMMITTED_EARLY"),
    ),
    Model(
        "mirror",
        ("FORWARD", "VERSIONS=3"),
        ("FORWARD", "VERSIONS=4", "CRASHES=2"),
        ("WORDS_LATE", "NOT_LOOKED_AT", "BIT_EARLY"),
    ),
    Model(
        "log",
        ("LAST=6",),
        ("LAST=7", "CRASHES=2"),
        ("GAP_UNSAID", "GAP_FORGOTTEN", "LITTLE_SLACK", "NOT_LOOKED_AT", "SOURCE_NOT_LOOKED_AT", "COMMITTED_EARLY"),
    ),
    Model(
        "copies",
        ("CLIENTS=1", "DRAWS=2", "READS=0"),
        ("DRAWS=1", "READS=0"),
        ("ANSWER_EARLY", "RECORD_NOT_FORWARDED", "RESULT_NOT_FORWARDED", "GOES_ALONE", "BY_PORT"),
    ),
    Model(
        "copies",
        ("CLIENTS=1", "DRAWS=1", "READS=2", "CUTS=0", "SILENCES=0"),
        ("CLIENTS=1", "DRAWS=1", "READS=2", "CUTS=0"),
        ("DIRTY_READ",),
    ),
    Model(
        "copies",
        ("CLIENTS=1", "DRAWS=1", "READS=1", "CUTS=0", "DEATHS=0"),
        ("CLIENTS=1", "DRAWS=1", "READS=1"),
        ("NO_WAIT",),
    ),
    Model(
        "quarantine",
        ("CHANGES=1", "DEATHS=1", "EPOCHS=4"),
        ("CHANGES=2", "DEATHS=2", "EPOCHS=5"),
        ("DROPS_UNKNOWN", "BY_PORT", "NUMBERS_ALONE", "EPOCHS_ALONE", "RECORD_COUNTS"),
    ),
    Model(
        "gated",
        ("DRAWS=1", "READS=2"),
        ("DRAWS=2", "READS=2"),
        (
            "NO_LOOK",
            "NO_LOOK_OF_FRAMES",
            "COPIED_UNLOCKED",
            "NOT_FORWARDED",
            "RECORD_IN_USE",
            "PAST_FORGOTTEN",
            "LOOKS_ONCE",
            "MOVED_EARLY",
        ),
    ),
    Model(
        "log",
        ("FORWARD", "LAST=6", "DEATHS=0", "CRASHES=0"),
        ("FORWARD", "LAST=6"),
        ("NOT_LOOKED_AT", "WORDS_LATE"),
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What a run came to. `complete`: every state was visited; `violated`: the claim that does not hold, if one."""

    states: int
    depth: int
    seconds: float
    complete: bool
    violated: str
    stuck: bool


def explore(model: Model, bounds: tuple[str, ...], fault: str | None) -> Found:
    """Generate, compile and run the verifier."""
    defines = [f"-D{each}" for each in (*bounds, *((fault,) if fault else ()))]
    with tempfile.TemporaryDirectory() as directory:
        _run(["spin", "-a", *defines, str(HERE / f"{model.name}.pml")], directory)
        # A planted fault is found after few states: compiling takes longer than running.
        _run(["gcc", "-O0" if fault else "-O1", "-w", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"], directory)
        said = _run(["./pan", f"-m{DEPTH}"], directory)
    numbers = {
        name: re.search(pattern, said)
        for name, pattern in {
            "states": r"([\d.e+]+) states, stored",
            "depth": r"depth reached (\d+)",
            "seconds": r"elapsed time ([\d.]+)",
            "errors": r"errors: (\d+)",
        }.items()
    }
    value = {name: float(found[1]) if found else 0.0 for name, found in numbers.items()}
    assert numbers["errors"], said
    assert numbers["states"], said
    claim = re.search(r"assertion violated (?!- invalid array index)(.*) \(at depth", said)
    complete = "max search depth too small" not in said and "out of memory" not in said
    stuck = value["errors"] > 0 and not claim
    return Found(
        int(value["states"]), int(value["depth"]), value["seconds"], complete, claim[1].strip() if claim else "", stuck
    )


def main() -> int:
    """Run all of them; 0 if every model is clean and every fault was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    bad = 0
    print(
        f"{'model':13} {'planted':20} {'result':10} {'states':>10} {'depth':>6} {'seconds':>8}  claim that is violated"
    )
    for model in MODELS:
        for fault in (None, *model.faults[: _QUICK_FAULTS if quick else None]):
            # A planted fault needs no more than the quick bounds to show.
            found = explore(model, model.quick if quick or fault else model.full, fault)
            clean = found.complete and not found.violated and not found.stuck
            good = bool(found.violated) if fault else clean
            result = ("found" if fault else "clean") if good else ("NOT FOUND" if fault else "NOT CLEAN")
            bad += not good
            numbers = f"{found.states:>10} {found.depth:>6} {found.seconds:>8.2f}"
            print(f"{model.name:13} {fault or '-':20} {result:10} {numbers}  {found.violated}", flush=True)
    print("all models clean, all planted faults found" if not bad else f"{bad} of them are not as they should be")
    return 1 if bad else 0


def _run(command: list[str], directory: str) -> str:
    """Run it there and return what it says; pan ends with 0 whatever it finds."""
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
