"""The command: `python -m perf.scaling [--quick] [EXPERIMENT ...]`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

from perf.netlab import LabError
from perf.scaling import clients, coordinator, load, servers, size
from perf.scaling.report import Answer, save

EXPERIMENTS: dict[str, Callable[[bool], Answer]] = {
    "servers": servers.how_many,
    "stripes": servers.how_cut,
    "unequal": servers.how_unequal,
    "clients": clients.how_many,
    "connections": clients.how_many_connections,
    "costs": clients.what_each_costs,
    "coordinator": coordinator.how_many_sessions,
    "size": size.how_large,
    "load": load.how_loaded,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.scaling", description=__doc__)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"{', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer points, under a minute; nothing is saved")
    parser.add_argument("--weights", metavar="HOST:PORT", help="only measure a running cluster's servers from here")
    asked = parser.parse_args()
    unknown = set(asked.experiments) - EXPERIMENTS.keys()
    if unknown:
        parser.error(f"there is no experiment {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}")
    if asked.weights:
        for name, rate in servers.weights_of(asked.weights).items():
            print(f"{name}: {rate / 1e6:.1f} MB/s: smb-memserver --name {name} --weight {rate / 1e6:.1f} ...")
        return 0
    failed = False
    for name in asked.experiments or EXPERIMENTS:
        start = time.monotonic()
        try:
            answer = EXPERIMENTS[name](asked.quick)
        except LabError as error:
            print(f"{name}: not run: {error}", file=sys.stderr)
            failed = True
            continue
        print(f"\n## {answer.title}\n\n{answer.setup}\n\n{answer.table()}\n\n{answer.limit}")
        print(f"({time.monotonic() - start:.0f} s)", flush=True)
        if not asked.quick:
            save(answer, f"python -m perf.scaling {name}")
    return int(failed)


if __name__ == "__main__":
    os.environ.pop("SMB_COORDINATOR", None)
    sys.exit(main())
