"""What an exchange of ASP costs this process beside one call from and to the client's memory, placed and not.

A question of processor time, not of seconds: a worker that exchanges does not compute. The call adds an array of the
model's size to the shared weights and brings the sums back. An exchange also finds what the optimizer has changed,
checks it, and keeps what the next one is compared with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import smb
import smb.torch
from perf.scaling.report import Answer, Column

TRANSPORTS = ("shm", "tcp")
WIDTH, DEPTH = 1024, 12
TURNS = 25


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def beside_one_call(quick: bool) -> Answer:
    """Processor time of exchanges of a placed model and of one that is not, in turns with the call."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for transport in TRANSPORTS:
        rows += _rows(transport, 5 if quick else TURNS)
        print(rows[-2:], flush=True)
    size = sum(parameter.numel() for parameter in network().parameters())
    return Answer(
        name="placed",
        title="Placed parameters: the processor time of an exchange beside that of one call",
        setup=f"One worker of ASP, {4 * size / 1e6:.0f} MB of parameters, one memory server on the same host over "
        f"shared memory and over TCP on loopback. Processor time of the worker's process, medians of "
        f"{5 if quick else TURNS} turns in which all ways take part; the optimizer's own work is not in it.",
        columns=(
            Column("transport", "transport"),
            Column("way", "way"),
            Column("cpu_ms", "processor time, ms", "{:.1f}"),
            Column("times_call", "times one call", "{:.2f}"),
        ),
        rows=rows,
        limit="An exchange takes three passes more than the call: the changes are computed in the place of the values "
        "that they are compared with, their norm is taken, and the new values are copied. A model that is not placed "
        "takes as many, tensor by tensor, in memory without large pages.",
    )


def _rows(transport: str, turns: int) -> list[dict[str, Any]]:
    with (
        smb.LocalCluster(servers=1, capacity="1GiB") as cluster,
        smb.connect(cluster.address, transport=transport) as client,
    ):
        ways: dict[str, Callable[[], object]] = {}
        shared = []
        for way in ("placed", "not placed"):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            if way == "placed":
                size = smb.torch.place(model, optimizer, client).values.size
            shared.append(smb.torch.join(model, optimizer, way.replace(" ", "-"), client=client, scheme="asp"))
            ways[way] = shared[-1].worker.step
        buffer, sent, out = client.create("weights", size), client.empty(size), client.empty(size)
        ways["one call"] = lambda: buffer.accumulate(sent, fetch=True, out=out)
        took: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(turns + 2):
            for way, make in ways.items():
                began = time.process_time()
                make()
                if turn > 1:
                    took[way].append(time.process_time() - began)
        for each in shared:
            each.close()
    call = statistics.median(took["one call"])
    return [
        {
            "transport": transport,
            "way": way,
            "cpu_ms": 1e3 * statistics.median(found),
            "times_call": statistics.median(found) / call,
        }
        for way, found in took.items()
    ]
