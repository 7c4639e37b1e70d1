"""The measurements of a training for its plans: computing by layer, exchanges, whole steps, and the link."""

from __future__ import annotations

import contextlib
import statistics
import time

from smb.buffer import Buffer
from smb.errors import Error
from smb.overlap.model_layers import ModelLayers
from smb.overlap.parts import PartFlow
from smb.overlap.pass_clock import PassClock
from smb.overlap.plan import Measured
from smb.queue import Queue

_PROBES, _PROBES_AT_ONCE = 5, 16  # small reads that measure the cost of a message


class StepMeter:
    """Measures one worker's steps. For the computing thread."""

    def __init__(self, clock: PassClock, layers: ModelLayers, flow: PartFlow) -> None:
        self.measured: Measured | None = None  # None until the layers are found and the link is measured
        self.exchanges = 0  # number of exchanges of this worker
        self._clock = clock
        self._layers = layers
        self._flow = flow
        self._stepped_at = 0.0  # when the last step ended (time.perf_counter)

    def exchange_done(self) -> None:
        """Count an exchange, and record how long its messages took."""
        self.exchanges += 1
        flow, measured = self._flow, self.measured
        if measured is None:
            return
        measured.moved(flow.pushed.nbytes, flow.pushed.busy_s, pull=False)
        measured.moved(flow.pulled.nbytes, flow.pulled.busy_s, pull=True)
        if flow.pulled.messages and flow.pushed.messages:
            measured.closed(max(0.0, flow.pulled.first - flow.pushed.last))

    def step_done(self, weights: Buffer, *, overlapped: bool, learning: bool) -> Measured | None:
        """Record a step. `overlapped` says whether its exchange was overlapped, `learning` that there is no plan yet.

        Returns None for steps before the first measurement. The first step after an exchange finds the layers and
        measures the link by a few small reads; if these fail, a later step tries again.
        """
        now, before = time.perf_counter(), self._stepped_at
        self._stepped_at = now
        measured = self.measured
        if measured is None:
            if self.exchanges:
                if not self._layers.layer_runs:
                    self._layers.find()
                # The optimizer has stepped, so optimizer.step() must not be called again.
                with contextlib.suppress(Error):
                    self.measured = Measured(self._layers.layer_runs, *_probe(self._flow.queue(), weights))
            return None
        measured.stepped(now - before, overlapped=overlapped)
        if self._clock.tells(learning=learning):
            layers = self._layers
            measured.computed(*self._clock.by_layer(layers.by_parameter, layers.by_module, len(layers.layer_runs)))
        return measured


def _probe(queue: Queue, weights: Buffer) -> tuple[float, float]:
    """Return the seconds that a message of a few bytes takes alone, and the seconds for each of many sent at once."""
    alone = []
    for _ in range(_PROBES):
        began = time.perf_counter()
        queue.read(weights, 0, 1, wire="exact").result()
        alone.append(time.perf_counter() - began)
    began = time.perf_counter()
    for future in [queue.read(weights, 0, 1, wire="exact") for _ in range(_PROBES_AT_ONCE)]:
        future.result()
    return statistics.median(alone), (time.perf_counter() - began) / _PROBES_AT_ONCE
