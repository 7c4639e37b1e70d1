"""Running statistics that are trained together: each process keeps its own, and mixes them into the group's average."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.errors import Error
from smb.torch.training.model_tensors import Statistics
from smb.train.steps import there

if TYPE_CHECKING:
    import smb
    import smb.train

STATE = "state"  # NAME/state


class MixedStatistics:
    """This process's statistics, and the average in NAME/state: `state += (own - state) / members`, at the servers."""

    def __init__(self, own: Statistics) -> None:
        self.own = own
        self.buffer: smb.Buffer | None = None  # the average, once it exists
        self._worker: smb.train.Worker
        self._mixing: Future[Any] | None = None
        self._unmixed = False  # whether there was a step since the statistics were mixed last
        self._contributions = 0  # the worker's contributions when the statistics were mixed last

    def join(
        self,
        client: smb.Client,
        worker: smb.train.Worker,
        metadata: dict[str, Any],
        compare: Callable[[smb.Buffer], None],
    ) -> None:
        """Take the statistics from the group, or be the first to store them. The caller holds the lock of the join.
        `compare` raises an error if the group has other statistics.
        """
        self._worker = worker
        if not self.own.entries:
            return
        self.own.collect()
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
        else:  # the process that made the buffer may have died before writing it
            state.publish(self.own.values)

    def joined(self) -> None:
        """Take note of the number of contributions so far."""
        self._contributions = self._worker.contributions

    def stepped(self) -> None:
        """After a step: mix the statistics if the worker has exchanged."""
        self._unmixed = True
        if self.buffer is not None and self._worker.contributions != self._contributions:
            self._mix(self.buffer)

    def mix_rest(self) -> None:
        """Mix the statistics of steps since the last time, and wait until that is done: at the end of the batches, and
        before leaving.

        This does not depend on the number of contributions. The outcome of the last contribution may become known only
        after others have loaded the average.
        """
        self.wait()
        if self.buffer is not None and self._unmixed:
            self._mix(self.buffer)
            self.wait()

    def wait(self) -> None:
        """Wait until no statistics are being mixed."""
        if self._mixing is not None:
            mixing, self._mixing = self._mixing, None
            with there(self._worker.group):
                mixing.result()

    def _mix(self, state: smb.Buffer) -> None:
        """After an exchange, begin to add the running statistics to the average, unless the last
        time is still running.
        """
        if self._mixing is not None and not self._mixing.done():
            return
        self.wait()
        self._contributions, self._unmixed = self._worker.contributions, False
        self.own.collect()
        if not np.isfinite(self.own.values).all():
            raise Error(
                "a floating-point buffer of the model (running statistics?) is not finite: it is not shared, but the "
                "model computes with it; look at the batches and the step size"
            )
        self._mixing = state.accumulate_async(self.own.values, op="elastic", scale=1.0 / self._worker.members)
