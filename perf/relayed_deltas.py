"""Deltas by way of a mirror: bytes over the trainer's uplink, and the time until the last reader has a generation.

    python -m perf.relayed_deltas --mbytes 8 --rate 20mbit --density 0.02 --generations 12

The trainer, with a memory server, is on one host, and readers beside another memory server are on a second one
(perf/relays.py; needs root). Both links out are shaped. Runs with one reader and with several, and each with the whole
states mirrored alone and with the deltas mirrored, too. Bytes are those that the trainer's interface sent, with all
frames, headers and waits. The first generation, which is whole, is left out, and so are later whole states (one in 64).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any
from zlib import crc32

import numpy as np
import torch

import smb
import smb.torch
from perf.deltas import step
from perf.relays import READY_S, Case, Cluster, line
from smb.published import LOG, MIRROR

NAME, RELAY = "m", "h0"
MODULE = "perf.relayed_deltas"


def train(address: str, mbytes: int, density: float, whole: bool) -> None:
    """Publish whenever a line comes; print when that began."""
    torch.set_num_threads(1)
    random = np.random.default_rng(1)
    bits = random.integers(0, 65536, mbytes << 19, np.uint16)
    state = {"w": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)}
    with smb.connect(address, timeout=600) as client:
        publisher = smb.torch.Publisher(client, NAME, state, deltas=64, versions=3, servers=["trainer"], relays=[RELAY])
        if whole:
            client.delete(f"{NAME}{LOG}{MIRROR}{RELAY}")
        print(json.dumps({"ready": True}), flush=True)
        for _ in sys.stdin:
            step(random, bits, density)
            began = time.monotonic()
            publisher.publish()
            print(json.dumps({"at": began, "bytes": publisher.sent_bytes, "sum": crc32(bits.tobytes())}), flush=True)


def read(address: str) -> None:
    """Follow; print a line of JSON for each generation."""
    torch.set_num_threads(1)
    with smb.connect(address, timeout=600) as client:
        follower = smb.torch.follow(client, NAME, timeout=READY_S)
        print(json.dumps({"ready": True}), flush=True)
        while True:
            follower.wait()
            state = follower.views()["w"]
            told = {"generation": follower.generation, "at": time.monotonic()}
            print(json.dumps(told | {"sum": crc32(state.view(torch.int16).numpy().tobytes())}), flush=True)


def run(options: argparse.Namespace, readers: int, whole: bool) -> dict[str, float]:
    """Return means of one run."""
    case = Case("", 1, [1])
    found: list[tuple[int, int, float]] = []
    with Cluster(case, options.rate, options.mbytes) as cluster:
        given = ("train", cluster.address, str(options.mbytes), str(options.density), str(int(whole)))
        trainer = cluster.beside("trainer", *given, module=MODULE)
        line(trainer)
        processes = [cluster.beside(RELAY, "read", cluster.address, module=MODULE) for _ in range(readers)]
        for process in processes:
            line(process)
        time.sleep(3)  # the relay begins, and the next renewals bring the plan
        for number in range(1, options.generations + 1):
            before = sent_bytes(cluster)
            assert trainer.stdin is not None
            trainer.stdin.write("\n")
            trainer.stdin.flush()
            sent, last = line(trainer), 0.0
            for process in processes:
                told = line(process)
                assert (told["generation"], told["sum"]) == (number, sent["sum"]), (told, sent)
                last = max(last, told["at"])
            if number > 2:  # readers that came late may still take the whole state
                found.append((sent_bytes(cluster) - before, sent["bytes"], last - sent["at"]))
    uplink, published, seconds = zip(*found, strict=True)
    return {
        "uplink": statistics.mean(uplink),
        "published": statistics.mean(published),
        "s": statistics.median(seconds),
    }


def sent_bytes(cluster: Cluster) -> int:
    """Return what has left the trainer's host so far."""
    command = ["ip", "-s", "-j", "link", "show", "eth0"]
    (link,) = json.loads(cluster.lab.run("trainer", command, capture_output=True, text=True).stdout)
    return int(link["stats64"]["tx"]["bytes"])


def main() -> None:
    """Run all of it, or one process's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*")
    parser.add_argument("--mbytes", type=int, default=8)
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--density", type=float, default=0.02)
    parser.add_argument("--generations", type=int, default=12)
    parser.add_argument("--readers", default="1,4")
    options = parser.parse_args()
    if options.part:
        part, address, *rest = options.part
        if part == "train":
            train(address, int(rest[0]), float(rest[1]), bool(int(rest[2])))
        else:
            read(address)
        os._exit(0)
    for count in map(int, options.readers.split(",")):
        both: dict[bool, Any] = {whole: run(options, count, whole) for whole in (True, False)}
        for whole, told in both.items():
            print(
                f"{count} readers, {'whole states mirrored alone' if whole else 'deltas mirrored, too'}: "
                f"{told['uplink'] / 1e6:.2f} MB over the uplink for a delta of {told['published'] / 1e6:.2f} MB, "
                f"{told['uplink'] / told['published']:.2f} of it; {1e3 * told['s']:.0f} ms until the last has it",
                flush=True,
            )
        ratio = both[True]["uplink"] / both[False]["uplink"]
        print(f"{count} readers: {ratio:.2f} times fewer bytes, {both[True]['s'] / both[False]['s']:.2f} times as fast")


if __name__ == "__main__":
    main()
