"""Coordinators and servers go and come back in every order, at most one of them without its memory: rounds from a seed.

SMB_LONG=1 SMB_ROUNDS=60 .venv/bin/pytest -n 4 -rP tests/fault/test_returning_servers.py is 240 rounds, in four clusters
side by side. SMB_SEED=N repeats a run, SMB_ROUND=FIRST or FIRST:LAST some of its rounds; a failure prints the command.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

import smb
from tests.fault.long import LIMIT_S, LONG, seed, times
from tests.support.daemons import running_daemons
from tests.support.etcd import needs_etcd, running_etcd
from tests.support.returning import Cluster
from tests.support.returning_plans import Plan, draw

pytestmark = pytest.mark.timeout(LIMIT_S)

ROUNDS = int(os.environ.get("SMB_ROUNDS") or times(1, 30))
LIVES = 8  # rounds of one cluster
WORLDS = [
    pytest.param(2, False, id="sqlite-2"),
    pytest.param(3, True, id="etcd-3", marks=needs_etcd),
    *([pytest.param(3, False, id="sqlite-3"), pytest.param(2, True, id="etcd-2", marks=needs_etcd)] if LONG else []),
]


def rounds() -> range:
    """Return which rounds are to be played."""
    first, _, last = os.environ.get("SMB_ROUND", "").partition(":")
    return range(int(first), int(last or first) + 1) if first else range(ROUNDS)


def played(tmp_path: Path, servers: int, with_etcd: bool, plans: list[tuple[int, Plan]], number: int) -> list[str]:
    """Play rounds, in a new cluster after each that found something; return what was found."""
    found: list[str] = []
    kinds: Counter[str] = Counter()
    began = time.monotonic()
    with contextlib.ExitStack() as left:
        etcd = left.enter_context(running_etcd()) if with_etcd else None
        if etcd is not None:
            etcd.wait_ready()
        daemons = left.enter_context(running_daemons(tmp_path))
        cluster: Cluster | None = None
        life = contextlib.ExitStack()
        left.callback(lambda: life.close())
        for count, (at, plan) in enumerate(plans):
            if cluster is None:
                cluster = life.enter_context(
                    Cluster(tmp_path / f"life-{count}", daemons, servers, etcd, random.Random(f"{number} {at}"))
                )
            since, calls = time.monotonic(), sum(worker.calls for worker in cluster.workers)
            try:
                cluster.play(plan)
                cluster.judge()
            except (smb.Error, AssertionError) as error:
                cluster.find("error", f"{type(error).__name__}: {error}")
            calls = sum(worker.calls for worker in cluster.workers) - calls
            what = ", ".join(sorted({finding.kind for finding in cluster.findings})) or "held"
            kept = f", {cluster.quarantined} quarantined" if cluster.quarantined else ""
            print(f"round {at}: {plan}: {what}; {time.monotonic() - since:.1f} s, {calls} calls{kept}", flush=True)
            for finding in cluster.findings:
                print(f"    {finding.kind}: {finding.text}", flush=True)
                found.append(f"round {at} ({plan}): {finding.kind}: {finding.text}")
            kinds.update({finding.kind for finding in cluster.findings})
            if cluster.broken or (count + 1) % LIVES == 0:
                life.close()
                cluster = None
    print(f"{len(plans)} rounds in {time.monotonic() - began:.0f} s; rounds with findings, by kind: {dict(kinds)}")
    return found


@pytest.mark.parametrize(("servers", "etcd"), WORLDS)
def test_rounds(tmp_path: Path, servers: int, etcd: bool) -> None:
    """After each round every acknowledged change is there, copies are equal, nothing is called lost that is there,
    deleted buffers stay deleted, and all memory is a buffer's or quarantined.
    """
    number = seed()
    plans = [(at, draw(random.Random(f"{number} {servers} {etcd} {at}"), servers, etcd)) for at in rounds()]
    found = played(tmp_path, servers, etcd, plans, number)
    assert not found, "\n".join([f"{len(found)} findings; one round again: SMB_ROUND=N and the command above", *found])


# Each was once how data were lost, or what is near to that.
KNOWN = {
    "lost-while-away": Plan("away", 0.0, 4.0, "lose", 0, 0.2, 0.3),
    "lost-while-away-and-late": Plan("away", 0.0, 4.0, "lose", 1, 0.2, 0.3, "late", 6.5),
    "lost-while-away-and-unheard": Plan("away", 0.0, 2.0, "lose", 0, 0.2, 0.0, "unheard", 5.0),
    "lost-before-away": Plan("away", 0.3, 3.0, "lose", 1, 0.0, 0.5, "unheard", 6.0),
    "old-memory": Plan("away", 0.0, 1.0, "old", 0, 0.5, 0.5),
    "one-lost-one-killed": Plan("away", 0.5, 2.0, "lose", 0, 0.0, 1.0, second=1),
}


@pytest.mark.parametrize("known", [*KNOWN] if LONG else ["lost-while-away-and-unheard"])
@pytest.mark.parametrize("servers", [2, 3] if LONG else [2])
def test_known(tmp_path: Path, servers: int, known: str) -> None:
    """The same after faults in a known order."""
    number = seed()
    found = played(tmp_path, servers, False, [(0, KNOWN[known])], number)
    assert not found, "\n".join(found)
