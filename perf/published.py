"""Published scaling results beside `smb plan`'s predictions of them: `python -m perf.published [--client-limit RATE]`.

A model of other systems on other machines. Their inputs are not all published: those assumed here are stated, and none
is fitted. perf/results/training-published.md has the table, which tests/unit/perf/test_published.py compares with this.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from smb.tools.plan.model import Question, Row, rows
from smb.tools.plan.network import given
from smb.tools.plan.spec import Spec, make_spec
from smb.train.partition import Channel, Layer, predict
from smb.train.traits import ROUNDS

LayerCost = tuple[int, int, int]  # bytes, operations of an image's forward pass, inputs if fully connected or 0


def convolution(taken: int, given_back: int, kernel: int, width: int) -> LayerCost:
    """Return the cost of a convolution: its channels in and out, its kernel's width and its output's."""
    weights = kernel * kernel * taken * given_back
    return 4 * (weights + given_back), 2 * weights * width * width, 0


def product(taken: int, given_back: int) -> LayerCost:
    """Return the cost of a fully connected layer."""
    return 4 * (taken * given_back + given_back), 2 * taken * given_back, taken


_VGG_A = ((3, 64, 224), (64, 128, 112), (128, 256, 56), (256, 256, 56), (256, 512, 28), (512, 512, 28), (512, 512, 14))
VGG_A = (
    *(convolution(taken, given_back, 3, width) for taken, given_back, width in (*_VGG_A, _VGG_A[-1])),
    *(product(*pair) for pair in ((25088, 4096), (4096, 4096), (4096, 1000))),
)
OVERFEAT_FAST = (
    *(
        convolution(*each)
        for each in ((3, 96, 11, 56), (96, 256, 5, 24), (256, 512, 3, 12), (512, 1024, 3, 12), (1024, 1024, 3, 12))
    ),
    *(product(*pair) for pair in ((36864, 3072), (3072, 4096), (4096, 1000))),
)
CD_DNN = (product(440, 2048), *(product(2048, 2048) for _ in range(6)), product(2048, 9304))
"""Seven hidden layers, of speech recognition."""

# Assumed of the nodes: operations a second that training reaches, a link's rate in each direction, a round trip. Cori's
# have two Xeon E5-2698 v3 and Aries; Amazon's c4.8xlarge have 18 cores and Ethernet.
CORI, AMAZON = (1.7e12, "54Gbit", "20us"), (1.0e12, "10Gbit", "50us")
UNLIMITED = "200Gbit"  # of a worker's process: more than any of these links

# iPart's networks, nodes and link are not in its abstract: an even network at the balance of computing and sending,
# where overlap gives most. Backward as long as forward, both a second; start-up as a share of that second.
IPART_LAYERS, IPART_NODES, IPART_START_S = 60, 72, (0.0001, 0.001, 0.005, 0.012)


@dataclass(frozen=True)
class Figure:
    """A published speed-up, and on what."""

    network: str
    layers: Sequence[LayerCost]
    nodes: int
    batch: int
    machines: tuple[float, str, str]
    published: float

    def spec(self) -> Spec:
        """Return the network as `smb plan` takes it; backward takes twice as long as forward."""
        flops = self.machines[0]
        return make_spec(
            {
                "name": self.network,
                "layers": [
                    {"bytes": nbytes, "forward_ms": 1e3 * work / flops, "backward_ms": 2e3 * work / flops}
                    | ({"kind": "fc", "inputs": inputs} if inputs else {})
                    for nbytes, work, inputs in self.layers
                ],
            },
            self.network,
        )

    def predicted(self, client_limit: str | None) -> list[Row]:
        """Return the rows of BSP, a memory server on each node; client_limit: as of `smb plan`."""
        _, link, round_trip = self.machines
        network = given(link, None, round_trip, client_limit)
        return rows(Question(self.spec(), network, servers=None, global_batch=self.batch), self.nodes, ("bsp",))


FIGURES = (
    Figure("VGG-A", VGG_A, 128, 512, CORI, 90.0),
    Figure("VGG-A", VGG_A, 64, 256, CORI, 53.0),
    Figure("OverFeat-FAST", OVERFEAT_FAST, 64, 256, CORI, 42.0),
    Figure("CD-DNN", CD_DNN, 16, 1024, CORI, 6.5),
    Figure("VGG-A, Ethernet", VGG_A, 16, 256, AMAZON, 14.0),
)
"""Das et al. (2016), with their batches: the global batch is divided over the nodes."""


@dataclass(frozen=True)
class Beside:
    """One figure, beside one of the planner's rows."""

    figure: Figure
    way: str
    row: Row

    @property
    def error(self) -> float:
        """Model over published, less one."""
        return self.row.speedup / self.figure.published - 1


def scaling(client_limit: str = UNLIMITED) -> Iterator[Beside]:
    """Yield Das et al.'s speed-ups beside the fastest row of three kinds: data parallel with this project's client,
    with a client of that limit, and then as meshes that divide the fully connected layers.
    """
    for figure in FIGURES:
        lifted = figure.predicted(client_limit)
        row = _fastest(row for row in figure.predicted(None) if row.mesh == 1)
        yield Beside(figure, "data parallel", row)
        row = _fastest(row for row in lifted if row.mesh == 1)
        yield Beside(figure, f"data parallel, {client_limit} a client", row)
        row = _fastest(row for row in lifted if row.mesh > 1)
        yield Beside(figure, f"as a mesh of {row.mesh}, {client_limit} a client", row)


def _fastest(found: Iterable[Row]) -> Row:
    return min(found, key=lambda row: row.iteration_s)


def ipart(start_s: float, backward: float = 1.0) -> tuple[float, float]:
    """Return how much faster planned messages are than no overlap, and than layer by layer: 0.5 is 50 %.

    `backward`: its time by forward's, a second. Sending takes as long as forward.
    """
    count = IPART_LAYERS
    layers = [Layer(1 << 20, 1 / count, backward / count) for _ in range(count)]
    rate = count * float(1 << 20)
    found = {
        (each.overlap, each.schedule): each.iteration_s
        for each in predict(layers, Channel(rate, rate, start_s), ROUNDS)
    }
    planned = found["both", "planned"]
    return found["none", "none"] / planned - 1, found["both", "layer by layer"] / planned - 1


def tables(client_limit: str = UNLIMITED) -> str:
    """Return both tables."""
    lines = ["| result | as | published | model | error | bound by |", "| --- | --- | --- | --- | --- | --- |"]
    for each in scaling(client_limit):
        figure = each.figure
        lines.append(
            f"| {figure.network}, {figure.nodes} nodes, batch {figure.batch} | {each.way} | {figure.published:g} "
            f"| {each.row.speedup:.1f} | {100 * each.error:+.0f} % | {each.row.bound_by} |"
        )
    lines += ["", "| start-up | planned beside none | beside layer by layer |", "| --- | --- | --- |"]
    for start_s in IPART_START_S:
        none, layerwise = ipart(start_s)
        lines.append(f"| {1e3 * start_s:g} ms | {100 * none:+.0f} % | {100 * max(0.0, layerwise):+.0f} % |")
    return "\n".join(lines)


def main() -> None:
    """Print both as tables."""
    parser = argparse.ArgumentParser(prog="python -m perf.published", description=__doc__)
    parser.add_argument("--client-limit", default=UNLIMITED, help=f"of the rows that say so; default {UNLIMITED}")
    print(tables(parser.parse_args().client_limit))
    print(f"\nbackward twice forward, {1e3 * IPART_START_S[0]:g} ms: {100 * ipart(IPART_START_S[0], 2.0)[0]:+.0f} %")


if __name__ == "__main__":
    main()
