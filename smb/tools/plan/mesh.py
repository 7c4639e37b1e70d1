"""The ranks of a mesh as one member, as the plan sees them: fully connected layers divided by their outputs. Pure.

Das et al. (2016) call this a hybrid. G ranks form a member, and each trains on its own samples in all layers but the
fully connected ones (`kind = "fc"` in a spec). Of those it has one G-th of the outputs, for the samples of all G ranks:
it computes as much as before, and exchanges a G-th of their parameters. For that it needs the inputs of the other
ranks' samples, and gives back the gradients of these.

    parameters   with the servers, in each direction: n/G of every layer. Of other layers the ranks add up their
                 gradients first, each for one G-th, and hand round the values: (1 - 1/G) n between ranks, twice
    activations  (G - 1) b i values into a layer of i inputs, and as many gradients back, for b samples of each rank.
                 The first layer of the network gives none back. Nothing hides them: a layer's computing waits for them

The outputs of the last layer are not counted: they are few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from smb.tools.plan.spec import Spec
from smb.train.partition import Layer

_VALUE_BYTES = 4  # of an activation


@dataclass(frozen=True)
class Rank:
    """One rank's part of a step. Bytes in one direction; as many go in the other.

    server_bytes: parameters from and to the servers. summed_bytes: parameters between ranks, before the push and again
    after the pull. forward_bytes, backward_bytes: activations of each layer, and their gradients.
    """

    server_bytes: float
    summed_bytes: float
    forward_bytes: tuple[float, ...]
    backward_bytes: tuple[float, ...]

    @property
    def activation_bytes(self) -> float:
        """Return the activations and gradients of all layers."""
        return sum(self.forward_bytes) + sum(self.backward_bytes)

    @property
    def exchanges(self) -> int:
        """Return how often activations are exchanged in a step."""
        return sum(map(bool, (*self.forward_bytes, *self.backward_bytes)))


def rank_of(spec: Spec, batch: float, ranks: int) -> Rank:
    """Return what one of `ranks` ranks moves in a step of `batch` samples."""
    inputs = spec.inputs or (0,) * len(spec.layers)
    others = sum(layer.nbytes for layer, count in zip(spec.layers, inputs, strict=True) if not count)
    values = tuple((ranks - 1) * batch * count * _VALUE_BYTES for count in inputs)
    return Rank(
        server_bytes=spec.nbytes / ranks,
        summed_bytes=(1 - 1 / ranks) * others,
        forward_bytes=values,
        backward_bytes=(0.0, *values[1:]),
    )


def layers_of_rank(
    spec: Spec, batch: float, ranks: int, server_per_s: float, link_per_s: float, call_s: float
) -> tuple[Layer, ...]:
    """Return the layers as one rank exchanges and computes them.

    server_per_s, link_per_s: the rates at which it moves bytes of the servers and of other ranks. Bytes between ranks
    stand for as many as move at server_per_s meanwhile.
    """
    rank = rank_of(spec, batch, ranks)
    found = []
    for at, layer in enumerate(spec.layers_at(batch)):
        forward, backward = rank.forward_bytes[at], rank.backward_bytes[at]
        nbytes = layer.nbytes / ranks
        if not forward:
            nbytes += (1 - 1 / ranks) * layer.nbytes * server_per_s / link_per_s
        found.append(
            replace(
                layer,
                nbytes=round(nbytes),
                forward_s=layer.forward_s + (forward / link_per_s + call_s if forward else 0.0),
                backward_s=layer.backward_s + (backward / link_per_s + call_s if backward else 0.0),
            )
        )
    return tuple(found)


def sizes(workers: int) -> list[int]:
    """Return the numbers of ranks, from two on, into which so many workers divide without a remainder."""
    return [ranks for ranks in range(2, workers + 1) if workers % ranks == 0]
