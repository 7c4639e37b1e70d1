"""HSGD beside SEASGD: what two hosts with several workers each send over their links, and how long an iteration takes.

HSGD (ShmCaffe, 2018) averages inside a host and lets one worker of it run SEASGD with the shared model. So a host sends
what one worker sends, whatever their number; SEASGD sends that for each. The shared model is on a third host.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from perf.lab_daemons import LabDaemons
from perf.netlab import Host, Lab
from perf.scaling.fleet import ROOT, Process, ask_all, started_together
from perf.scaling.report import Answer, Column

CONTROL, FAR, HOSTS = "control", "far", ("host0", "host1")
RATE = "50mbit"
WORKERS = (2, 4)  # of each host
ELEMENTS, STEPS = 1_000_000, 10
COMPUTING_S = 0.05
ALPHA = 0.2
SCHEMES = ("seasgd", "hsgd")


def bytes_and_time(
    quick: bool,
    rate: str = RATE,
    elements: int = ELEMENTS,
    steps: int = STEPS,
    workers: tuple[int, ...] = WORKERS,
    computing_s: float = COMPUTING_S,
) -> Answer:
    """Both schemes, two and four workers on each of two hosts."""
    rows: list[dict[str, Any]] = []
    for count in workers[:1] if quick else workers:
        rows += _measure(count, rate, elements, steps, computing_s)
    for row in rows:
        base = next(r for r in rows if (r["per_host"], r["scheme"]) == (row["per_host"], "seasgd"))
        row["bytes_share"], row["time_share"] = (row[key] / base[key] for key in ("link_mb", "iteration_ms"))
    found = [row for row in rows if row["scheme"] == "hsgd"]
    told = "; ".join(
        f"with {row['per_host']} workers on a host HSGD sends {row['bytes_share']:.2f} of SEASGD's bytes, and takes "
        f"{row['time_share']:.2f} of its time"
        for row in found
    )
    return Answer(
        name="hsgd",
        title="HSGD beside SEASGD: bytes over the hosts' links, and time of an iteration",
        setup=f"Two hosts, each with a memory server and behind a link of its own (tc tbf, {rate}, both directions, "
        f"headers counted); the shared model on a third host without a limit; all on this one machine. "
        f"{4 * elements / 1e6:.1f} MB of parameters, alpha={ALPHA}, an exchange after every step, {steps} steps; "
        f"computing is a sleep of {1e3 * computing_s:.0f} ms. Bytes are those of the hosts' network devices, in both "
        "directions.",
        columns=(
            Column("per_host", "workers of a host"),
            Column("scheme", "scheme"),
            Column("link_mb", "MB over both links, an iteration", "{:.1f}"),
            Column("iteration_ms", "iteration, ms", "{:.0f}"),
            Column("bytes_share", "bytes, by SEASGD's", "{:.3f}"),
            Column("time_share", "time, by SEASGD's", "{:.2f}"),
        ),
        rows=rows,
        limit=told[:1].upper() + told[1:] + ".",
    )


def _measure(per_host: int, rate: str, elements: int, steps: int, computing_s: float) -> list[dict[str, Any]]:
    """Train by one scheme after the other, on a lab of their own."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab([Host(CONTROL), Host(FAR), *(Host(name, rate) for name in HOSTS)]))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="smb-hsgd-")))
        daemons, memory = LabDaemons(lab, directory), directory / "memory"
        memory.mkdir()
        address = daemons.coordinator(CONTROL)
        servers = {}
        for name in (FAR, *HOSTS):
            line = ["memserver", "--coordinator", address, "--capacity", "256MiB", "--name", name, "--loops", "1"]
            servers[name] = daemons.start(name, [*line, "--memory-dir", str(memory)], memory=memory)
        for name, server in servers.items():
            daemons.address(name, server)
        workers = []
        for name in HOSTS:
            for _ in range(per_host):
                workers.append(_worker(lab, name, servers[name].pid))
                stack.callback(workers[-1].end)
        ask_all(workers, do="connect", coordinator=address, transport="auto")
        rows = []
        for scheme in SCHEMES:
            for worker in workers:  # one after the other: the first one makes the group
                _join(worker, elements, scheme)
            started_together(workers, do="train", steps=2, compute_s=computing_s)
            before = _carried(lab)
            answers = started_together(workers, do="train", steps=steps, compute_s=computing_s)
            carried = _carried(lab) - before
            ask_all(workers, do="leave")
            workers[0].ask(do="delete")
            took = max(each["end"] for each in answers) - min(each["start"] for each in answers)
            row = {
                "per_host": per_host,
                "scheme": scheme,
                "link_mb": carried / steps / 1e6,
                "iteration_ms": 1e3 * took / steps,
            }
            print(row, flush=True)
            rows.append(row)
    return rows


def _join(worker: Process, elements: int, scheme: str) -> None:
    settings = {"alpha": ALPHA, "every": 1}
    joined = worker.ask(
        do="join", name="run", elements=elements, scheme=scheme, settings=settings, servers=[FAR], lease=60
    )
    if joined["transports"] != ["tcp"]:
        raise RuntimeError(f"the shared model is not reached over the links: {joined}")


def _worker(lab: Lab, host: str, server_pid: int) -> Process:
    """Start one on a host of the lab, with that host's server in reach of its shared memory."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
    environment |= {"SMB_TRAIN_HOST": host, "PYTHONPATH": str(ROOT)}
    line = [
        "nsenter",
        f"--mount=/proc/{server_pid}/ns/mnt",
        f"--wd={ROOT}",
        sys.executable,
        "-m",
        "perf.training.worker",
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return Process(lab.popen(host, line, env=environment, **pipes), f"a worker on {host}")


def _carried(lab: Lab) -> int:
    """Return the bytes that the hosts' links have carried so far, in both directions."""
    total = 0
    for name in HOSTS:
        shown = lab.run(name, ["ip", "-s", "-j", "link", "show", "eth0"], capture_output=True, text=True).stdout
        counts = json.loads(shown)[0]["stats64"]
        total += counts["rx"]["bytes"] + counts["tx"]["bytes"]
    return total
