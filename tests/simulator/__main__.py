"""Simulates clusters, one after the other, until something is found: tests/simulator/README.md.

    python -m tests.simulator [--seconds 30] [--seed N] [--plant NAME]      seeds from N on
    python -m tests.simulator --seed N --trace [--keep 1,4] [--servers 2] [--clients 1]     one run, as a log

Ends with 1 if something was found: then it is made smaller, and the command for that run is printed.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from tests.simulator import plants
from tests.simulator.shrink import command, shrink
from tests.simulator.world import Outcome, Plan, run

SHOWN = 30  # lines of what came before a finding


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="how long new runs are begun (30)")
    parser.add_argument("--seed", type=int, help="of the first run; each one after it has the next (a random one)")
    parser.add_argument("--trace", action="store_true", help="one run, each line of it")
    parser.add_argument("--plant", choices=sorted(plants.PLANTS), help="put this fault into the product")
    parser.add_argument("--keep", help="of the run's faults these numbers alone, or none")
    parser.add_argument("--servers", type=int, help="memory servers")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--whole", action="store_true", help="make no finding smaller")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else secrets.randbits(31)
    with plants.planted(options.plant):
        if options.trace:
            return _report(run(_plan(seed, options), print), options.plant, shown=0)
        print(f"seed {seed}", flush=True)
        return _search(seed, options)


def _plan(seed: int, options: argparse.Namespace) -> Plan:
    plan = Plan.of(seed)
    if options.keep is not None:
        kept = {int(at) for at in options.keep.split(",") if at.isdigit()}
        plan = replace(plan, steps=tuple(step for at, step in enumerate(plan.steps) if at in kept))
    plan = replace(plan, servers=options.servers or plan.servers)
    return replace(plan, clients=options.clients or plan.clients)


def _search(seed: int, options: argparse.Namespace) -> int:
    began, used, events, rounds = time.monotonic(), time.process_time(), 0, 0
    while time.monotonic() - began < options.seconds:
        outcome = run(_plan(seed + rounds, options))
        events, rounds = events + outcome.events, rounds + 1
        if outcome.finding is not None:
            spent_s = time.process_time() - used
            print(f"round {rounds}, after {spent_s:.1f} s of processor time: seed {outcome.plan.seed}", flush=True)
            return _report(outcome if options.whole else shrink(outcome), options.plant, shown=SHOWN)
    spent_s = max(time.process_time() - used, 1e-9)
    print(
        f"nothing found: {rounds} rounds, {events} events in {spent_s:.1f} s of processor time, "
        f"{rounds / spent_s:.1f} rounds/s, {events / spent_s:.0f} events/s"
    )
    return 0


def _report(outcome: Outcome, plant: str | None, shown: int) -> int:
    if outcome.finding is None:
        print(f"nothing found: {outcome.events} events, {outcome.seconds:.1f} s simulated, sum {outcome.checksum:08x}")
        return 0
    plan, finding = outcome.plan, outcome.finding
    print("\n".join(outcome.trace[-shown:] if shown else ()))
    print(f"\n{finding.invariant}: {finding.text}")
    store = "etcd" if plan.etcd else "SQLite"
    print(f"at {finding.at:.3f} s; {plan.servers} servers, {plan.clients} clients, {store}:")
    for step in plan.steps:
        print(f"    {step}")
    print(command(plan, plant))
    return 1


if __name__ == "__main__":
    sys.exit(main())
