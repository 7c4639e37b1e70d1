"""Running statistics that are trained together: each process keeps its own, and mixes them into the group's average."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.errors import Error
from smb.torch.model_tensors import Statistics
from smb.train.steps import there

if TYPE_CHECKING:
    import smb
    import smb.train

STATE = "state"  # behind the group's name


class MixedStatistics:
    """This process's statistics, and the average in NAME/state: `state += (own - state) / members`, at the servers."""

    def __init__(self, own: Statistics, collect: Callable[[], None]) -> None:
        """`collect` brings the model's statistics into `own`."""
        self.own = own
        self.buffer: smb.Buffer | None = None  # the average, once there is one
        self._collect = collect
        self._worker: smb.train.Worker
        self._mixing: Future[Any] | None = None
        self._unmixed = False  # whether there was a step since the statistics were mixed last
        self._contributions = 0  # of the worker by then

    def join(
        self,
        client: smb.Client,
        worker: smb.train.Worker,
        metadata: dict[str, Any],
        compare: Callable[[smb.Buffer], None],
    ) -> None:
        """Take them from the group, or be the first to store them. Under the lock of the join. `compare` raises where
        the group has others.
        """
        self._worker = worker
        if not self.own.entries:
            return
        self._collect()
        with worker.group.setting_up():
            self.buffer = state = client.create(
                f"{worker.name}/{STATE}",
                self.own.values.size,
                metadata=metadata,
                replicas=worker.weights.info.replicas,
                exist_ok=True,
            )
        compare(state)
        if state.version:
            state.read(out=self.own.values)
        else:  # who made it may have died before it was written
            state.publish(self.own.values)

    def joined(self) -> None:
        """Take note of what the worker has sent so far."""
        self._contributions = self._worker.contributions

    def stepped(self) -> None:
        """After a step: mix them if it has exchanged."""
        self._unmixed = True
        if self.buffer is not None and self._worker.contributions != self._contributions:
            self._mix(self.buffer)

    def mix_rest(self) -> None:
        """Mix what is of steps since the last time, and wait for it: at the end of the batches, and of taking part.

        Not by the count of contributions: what becomes of the last one may be known later, by when others have loaded
        the average.
        """
        self.wait()
        if self.buffer is not None and self._unmixed:
            self._mix(self.buffer)
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being mixed."""
        if self._mixing is not None:
            mixing, self._mixing = self._mixing, None
            with there(self._worker.group):
                mixing.result()

    def _mix(self, state: smb.Buffer) -> None:
        """After an exchange, begin to add our running statistics to the average; the last time may be under way yet."""
        if self._mixing is not None and not self._mixing.done():
            return
        self.wait()
        self._contributions, self._unmixed = self._worker.contributions, False
        self._collect()
        if not np.isfinite(self.own.values).all():
            raise Error(
                "a floating-point buffer of the model (running statistics?) is not finite: it is not shared, and the "
                "model computes with it; look at the batches and the step size"
            )
        self._mixing = state.accumulate_async(self.own.values, op="elastic", scale=1.0 / self._worker.members)
