"""Deltas from the ranks of a mesh against whole generations: bytes of each rank, and of readers with other shards.

    python -m perf.shard_deltas --mbytes 64 --ranks 4 --density 0.02 --generations 8

A cluster on this machine, a process for each rank (gloo), and two readers: one of the whole state, one of the rows that
one of the ranks has. The state is bfloat16, sharded by rows or, with --columns, by columns; in each step that share of
its elements changes. Generations are published first by deltas, then whole.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import smb
import smb.torch
from perf.deltas import step

TENSORS = 8
WIDTH = 1024
NAMES = {64: "deltas", 0: "whole"}


def rank(given: dict[str, Any], number: int, store: str, address: str, said: Any, go: Any) -> None:
    """Publish generations; tell the bytes and seconds of each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=given["ranks"])
    mesh = init_device_mesh("cpu", (given["ranks"],))
    random = np.random.default_rng(number)
    elements = (given["mbytes"] << 19) // given["ranks"]
    bits = random.integers(0, 65536, elements, np.uint16)
    rows = elements // TENSORS // WIDTH
    shape = (WIDTH, rows) if given["columns"] else (rows, WIDTH)
    local = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    state = {
        f"w{index}": DTensor.from_local(part.view(shape), mesh, [Shard(int(given["columns"]))], run_check=False)
        for index, part in enumerate(local[: TENSORS * rows * WIDTH].view(TENSORS, -1))
    }
    with smb.connect(address, timeout=120) as client:
        for deltas in NAMES:
            publisher = smb.torch.Publisher(client, NAMES[deltas], state, deltas=deltas)
            for _ in range(given["generations"]):
                go.get()
                began = time.monotonic()
                publisher.publish()
                said.put((number, publisher.sent_bytes, time.monotonic() - began))
                step(random, bits, given["density"])


def main() -> None:
    """Run all of it, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbytes", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--density", type=float, default=0.02)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--columns", action="store_true")
    given = vars(parser.parse_args())
    ranks, nbytes = given["ranks"], given["mbytes"] << 20
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as directory,
        smb.LocalCluster(servers=1, capacity=f"{9 * given['mbytes'] + 64}MiB") as cluster,
        smb.connect(cluster.address, transport="tcp", timeout=120) as client,
    ):
        said, go = context.Queue(), [context.Queue() for _ in range(ranks)]
        arguments = (given, str(Path(directory) / "store"), cluster.address)
        processes = [
            context.Process(target=rank, args=(arguments[0], each, *arguments[1:], said, go[each]), daemon=True)
            for each in range(ranks)
        ]
        for process in processes:
            process.start()
        for deltas in NAMES:
            sent, seconds, received = [], [], ([], [])  # type: ignore[var-annotated]
            followers: list[smb.torch.Follower] = []
            for generation in range(given["generations"]):
                for each in go:
                    each.put(None)
                told = [said.get(timeout=300) for _ in range(ranks)]
                if not followers:
                    whole = smb.torch.follow(client, NAMES[deltas], timeout=60)
                    share = {
                        name: (slice(0, info.shape[0] // ranks), slice(None))
                        for name, info in whole.buffer.table.items()
                    }
                    followers = [whole, smb.torch.follow(client, NAMES[deltas], placements=share)]
                for follower, found in zip(followers, received, strict=True):
                    follower.views()
                    found.append(follower.received_bytes)
                if generation:  # the first one is whole in any case
                    sent += [each for _, each, _ in told]
                    seconds.append(max(each for _, _, each in told))
            print(
                f"{NAMES[deltas]}: a rank sends {statistics.mean(sent) * ranks / nbytes:.2%} of its "
                f"shards (at most {max(sent) * ranks / nbytes:.2%}), a whole reader receives "
                f"{statistics.mean(received[0][1:]) / nbytes:.2%} of the state, a reader of 1/{ranks} of the rows "
                f"{statistics.mean(received[1][1:]) / nbytes:.2%}; publish() {statistics.median(seconds) * 1e3:.0f} ms"
            )
        for process in processes:
            process.join(60)


if __name__ == "__main__":
    main()
