"""Published scaling results beside the planner's model of them: `python -m perf.published`.

A model of other systems on other machines. Their inputs are not all published: those assumed here are stated, and none
is fitted but where it says so. perf/results/training-published.md has the table, which
tests/unit/perf/test_published.py compares with this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smb.train.partition import Channel, Layer, pick, predict
from smb.train.traits import ROUNDS

# VGG-A at 224 x 224: channels in and out and width of its convolutions; inputs and outputs of its products.
_CONVOLUTIONS = ((3, 64, 224), (64, 128, 112), (128, 256, 56), (256, 256, 56), (256, 512, 28), (512, 512, 28),
                 (512, 512, 14), (512, 512, 14))  # fmt: skip
_PRODUCTS = ((25088, 4096), (4096, 4096), (4096, 1000))
VGG_A = (
    *((4 * 9 * i * o, 2 * 9 * i * o * width * width) for i, o, width in _CONVOLUTIONS),
    *((4 * i * o, 2 * i * o) for i, o in _PRODUCTS),
)
"""Bytes and floating-point operations of an image's forward pass, of each layer."""

# Assumed of Das et al.'s nodes (two Xeon E5-2698 v3, Aries): operations a second that training reaches, bytes a second
# in each direction, seconds to start a message.
DAS_FLOPS, DAS_LINK, DAS_START_S = 1.7e12, 6.5e9, 20e-6
DAS_FITTED_FLOPS = 1.2e12  # with which the point of 64 nodes comes out as published

# iPart's networks, nodes and link are not in its abstract: an even network at the balance of computing and sending,
# where overlap gives most. Backward as long as forward, both a second; start-up as a share of that second.
IPART_LAYERS, IPART_NODES, IPART_START_S = 60, 72, (0.0001, 0.001, 0.005, 0.012)


@dataclass(frozen=True)
class Beside:
    """One figure."""

    what: str
    published: float
    model: float

    @property
    def error(self) -> float:
        """Model over published, less one."""
        return self.model / self.published - 1


def das(nodes: int, batch: int, flops: float = DAS_FLOPS, link: float = DAS_LINK) -> float:
    """Return the speed-up of synchronous SGD on VGG-A, the batch divided over the nodes.

    Each node has its share of the parameters: it sums up the others' gradients of that, and sends the values back. Data
    parallel in all layers; the paper divides the products by outputs where that moves less.
    """
    images = batch / nodes
    layers = [Layer(nbytes, work * images / flops, 2 * work * images / flops) for nbytes, work in VGG_A]
    crossing = 1 - 1 / nodes
    channel = Channel(link / crossing, link / crossing, DAS_START_S)
    alone_s = 3 * batch * sum(work for _, work in VGG_A) / flops
    return alone_s / pick(predict(layers, channel, ROUNDS)).iteration_s


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


def scaling() -> Sequence[Beside]:
    """Return Das et al.'s speed-ups beside the model's."""
    points = ((64, 256, 53.0), (128, 512, 90.0))
    told = [
        Beside(f"VGG-A, {nodes} nodes, batch {batch}", published, das(nodes, batch))
        for nodes, batch, published in points
    ]
    return told + [
        Beside(f"the same, {DAS_FITTED_FLOPS / 1e12:g} TFLOP/s", published, das(nodes, batch, DAS_FITTED_FLOPS))
        for nodes, batch, published in points
    ]


def main() -> None:
    """Print both as tables."""
    print("| result | published | model | error |\n| --- | --- | --- | --- |")
    for row in scaling():
        print(f"| {row.what} | {row.published:.0f} | {row.model:.0f} | {100 * row.error:+.0f} % |")
    print("\n| start-up | planned beside none | beside layer by layer |\n| --- | --- | --- |")
    for start_s in IPART_START_S:
        none, layerwise = ipart(start_s)
        print(f"| {1e3 * start_s:g} ms | {100 * none:+.0f} % | {100 * max(0.0, layerwise):+.0f} % |")
    print(f"\nbackward twice forward, {1e3 * IPART_START_S[0]:g} ms: {100 * ipart(IPART_START_S[0], 2.0)[0]:+.0f} %")


if __name__ == "__main__":
    main()
