"""Deltas against whole generations: bytes and time from a trainer to a reader over a shaped link.

    python -m perf.deltas --mbytes 64 --rate 1gbit --density 0.02 --generations 32

Three hosts in network namespaces (perf/netlab.py, needs root): the trainer, a memory server, a reader; each behind a
link of the given rate. The state is bfloat16; in each step that share of its elements changes. A generation's time is
from the trainer's call until the reader has all of it in its own memory. Beside it the kernel, against one pass over
both arrays (memcmp), on one core and on all.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import smb
import smb.torch
from perf.lab_daemons import LabDaemons
from perf.netlab import Host, Lab
from smb.engine import delta_encode

SLICE = 1 << 20


def step(random: np.random.Generator, bits: np.ndarray[Any, Any], density: float) -> None:
    """Change that share of the elements, anywhere."""
    hit = random.integers(0, len(bits), int(len(bits) * density))
    bits[hit] += np.uint16(1)


def train(address: str, mbytes: int, density: float, generations: int, deltas: int) -> None:
    """Publish, wait for the reader, again; print one line of JSON for each generation."""
    random = np.random.default_rng(1)
    bits = random.integers(0, 65536, mbytes << 19, np.uint16)
    state = {"w": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)}
    with smb.connect(address, transport="tcp", timeout=120) as client:
        publisher = smb.torch.Publisher(client, "w", state, deltas=deltas, versions=2)
        done = client.create("done", 1, "int64", exist_ok=True)
        for _ in range(generations):
            began = time.monotonic()
            number = publisher.publish()
            called = time.monotonic() - began
            done.wait(number, timeout=120)  # published by the reader
            seconds = time.monotonic() - began
            print(json.dumps({"bytes": publisher.sent_bytes, "s": seconds, "call_s": called}), flush=True)
            step(random, bits, density)


def read(address: str, generations: int) -> None:
    """Follow, and tell of each generation that it is there."""
    with smb.connect(address, transport="tcp", timeout=120) as client:
        follower = smb.torch.follow(client, "w", timeout=120)
        done = client.open("done", timeout=120)
        while follower.generation < generations:
            follower.wait(timeout=120)
            follower._read("perf")  # into its memory, without a copy for the caller
            print(json.dumps({"bytes": follower.received_bytes}), flush=True)
            done.publish(np.ones(1, np.int64))


def over_a_link(mbytes: int, rate: str, density: float, generations: int, deltas: int) -> dict[str, float]:
    """Return medians and means of one run."""
    python = [sys.executable, "-m"]
    hosts = [Host(name, rate=rate) for name in ("trainer", "server", "reader")]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, Lab(hosts) as lab:
        daemons = LabDaemons(lab, Path(directory))
        at = daemons.coordinator("server")
        capacity = f"{6 * mbytes}MiB"
        daemons.serve("server", ["memserver", "--coordinator", at, "--capacity", capacity, "--memory-dir", directory])
        common = [str(value) for value in (at, mbytes, density, generations, deltas)]
        trainer = lab.popen("trainer", [*python, "perf.deltas", "train", *common], stdout=-1, text=True)
        reader = lab.popen("reader", [*python, "perf.deltas", "read", *common], stdout=-1, text=True)
        sent = [json.loads(line) for line in trainer.communicate()[0].splitlines()]
        received = [json.loads(line) for line in reader.communicate()[0].splitlines()]
    sent, received = sent[1:], received[1:]  # the first is whole in both
    return {
        "s": statistics.median(each["s"] for each in sent),
        "mean_s": statistics.mean(each["call_s"] for each in sent),
        "sent": statistics.mean(each["bytes"] for each in sent),
        "received": statistics.mean(each["bytes"] for each in received),
    }


def kernel(mbytes: int, density: float) -> str:
    """Compare the kernel with one pass over both arrays."""
    random = np.random.default_rng(1)
    old = random.integers(0, 65536, mbytes << 19, np.uint16)
    fresh = old.copy()
    step(random, fresh, density)
    starts = range(0, len(old), SLICE)
    compare = ctypes.CDLL(None).memcmp

    def passing(at: int) -> None:
        size = min(SLICE, len(same) - at)
        compare(*(ctypes.c_void_p(each.ctypes.data + 2 * at) for each in (same, old)), ctypes.c_size_t(2 * size))

    def encoding(at: int) -> None:
        size = min(SLICE, len(old) - at)
        runs = np.array([[at, at, size]])
        delta_encode(2, mine.ctypes.data, fresh.ctypes.data, runs, np.empty(size, np.uint8))

    found = []
    same = old.copy()
    for threads in (1, os.cpu_count() or 1):
        with ThreadPoolExecutor(threads) as pool:
            best = {passing: 1e9, encoding: 1e9}
            for _ in range(5):
                mine = old.copy()
                for work in best:
                    began = time.perf_counter()
                    list(pool.map(work, starts))
                    best[work] = min(best[work], time.perf_counter() - began)
        found.append(f"{best[passing] / best[encoding]:.2f} with {threads} threads ({best[encoding] * 1e3:.0f} ms)")
    return ", ".join(found)


def main() -> None:
    """Run all of it, or one process's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*")
    parser.add_argument("--mbytes", type=int, default=64)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--density", type=float, default=0.02)
    parser.add_argument("--generations", type=int, default=33)
    options = parser.parse_args()
    if options.part:
        torch.set_num_threads(1)
        part, address, mbytes, density, generations, deltas = options.part
        if part == "train":
            train(address, int(mbytes), float(density), int(generations), int(deltas))
        else:
            read(address, int(generations))
        return
    print(f"kernel, of one pass over both arrays: {kernel(options.mbytes, options.density)}", flush=True)
    given = (options.mbytes, options.rate, options.density)
    whole = over_a_link(*given, 4, 0)
    deltas = over_a_link(*given, options.generations, 16)
    for name, run in (("whole", whole), ("deltas", deltas)):
        print(
            f"{name}: {run['s'] * 1e3:.0f} ms a generation until it is read (median), trainer's call "
            f"{run['mean_s'] * 1e3:.0f} ms (mean), sent {run['sent'] / 1e6:.2f} MB, received "
            f"{run['received'] / 1e6:.2f} MB (means)"
        )
    print(
        f"{whole['s'] / deltas['s']:.1f} times as fast; {whole['received'] / deltas['received']:.1f} times fewer bytes "
        f"received, {whole['sent'] / deltas['sent']:.1f} times fewer sent, whole states included"
    )


if __name__ == "__main__":
    main()
