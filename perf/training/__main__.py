"""The command: `python -m perf.training [--quick] [EXPERIMENT ...]`."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable

from perf.netlab import LabError
from perf.scaling.report import Answer, save
from perf.training import (
    device,
    diloco,
    distant,
    divided,
    gpt,
    hsgd,
    large,
    overlap,
    peers,
    placed,
    predicted,
    r2sp,
    race,
    seasgd,
    sharing,
    staging,
    streaming,
    together,
)

EXPERIMENTS: dict[str, Callable[[bool], Answer]] = {
    "diloco": diloco.bytes_versus_accuracy,
    "r2sp": r2sp.how_even,
    "seasgd": seasgd.how_many_servers,
    "hsgd": hsgd.bytes_and_time,
    "staging": staging.beside_one_call,
    "race": race.bytes_and_loss,
    "gpt": gpt.loss_bytes_seconds,
    "large": large.memory_bytes_seconds,
    "streaming": streaming.how_hidden,
    "distant": distant.rate_lost,
    "predicted": predicted.how_near,
    "overlap": overlap.behind_the_passes,
    "simulated": sharing.how_near,
    "together": together.how_much_better,
    "divided": divided.how_much_sooner,
    "placed": placed.beside_one_call,
    "device": device.beside_bare_copies,
    "peers": peers.bytes_to_a_loss,  # last: from then on this process has a network of its own
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.training", description=__doc__)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"{', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer points; nothing is saved")
    parser.add_argument("--steps", type=int, default=race.STEPS, help=f"of race; default {race.STEPS}")
    asked = parser.parse_args()
    unknown = set(asked.experiments) - EXPERIMENTS.keys()
    if unknown:
        parser.error(f"there is no experiment {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}")
    for name in asked.experiments or EXPERIMENTS:
        start = time.monotonic()
        experiment = EXPERIMENTS[name]
        if name == "race":
            experiment = functools.partial(race.bytes_and_loss, steps=asked.steps)
        try:
            answer = experiment(asked.quick)
        except LabError as error:
            print(f"{name}: not run: {error}", file=sys.stderr)
            continue
        print(f"\n## {answer.title}\n\n{answer.setup}\n\n{answer.table()}\n\n{answer.limit}")
        print(f"({time.monotonic() - start:.0f} s)", flush=True)
        if not asked.quick:
            save(answer, f"python -m perf.training {name}", group="training")
    return 0


if __name__ == "__main__":
    os.environ.pop("SMB_COORDINATOR", None)
    sys.exit(main())
