"""One rank's part of a mesh: its shards, its mover, and its lock. Calls of the speaker run these
methods at each rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.errors import Error, NotFoundError
from smb.torch.meshes.shards import ShardParameters
from smb.torch.ranks import Ranks
from smb.torch.training.model_tensors import Statistics
from smb.train.exchange.mover import ArrayMover
from smb.train.members import rank_lock
from smb.train.parameters import Values

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.client import Client
    from smb.lock import Lock


class MeshRank:
    """One rank's part of a mesh's parameters. Calls pass buffers by name, because each rank has a client of its own."""

    def __init__(self, client: Client, ranks: Ranks, own: ShardParameters, statistics: Statistics) -> None:
        self.seen: Values | None = None  # this rank's part of the shared model, read by `look`
        self.arrived: Callable[[], object] | None = None  # called once a difference of this rank's mover has arrived
        self._client = client
        self._ranks = ranks
        self._own = own
        self._statistics = statistics
        self._mover: ArrayMover | None = None
        self._opened: dict[str, Buffer] = {}
        self._lock: Lock | None = None

    def store(self, weights: str) -> None:
        """Write this rank's parameters into the shared weights."""
        self._own.refresh()
        self._own.store(self._client.open(weights))

    def keep_exact(self) -> None:
        """See Parameters.keep_exact."""
        self._own.keep_exact()

    def seat(self, member: str, lease: float, replicas: int) -> None:
        """Take this rank's lock, by which others see that it is alive. The speaker has the member's own lock."""
        if self._ranks.speaks:
            return
        self.release()
        # If a group of this name was deleted and made again, a rank that was killed may still hold this lock until its
        # lease ends.
        rank = self._ranks.rank
        self._lock = rank_lock(self._client, member, rank, lease, replicas, 3 * lease).acquire()

    def release(self) -> None:
        """Release this rank's lock, without the other ranks."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(Error):
                lock.release()

    def make_mover(self, way: str, weights: str) -> None:
        """Make the mover of this rank's values."""
        self._mover = None  # frees its memory first
        self._opened.clear()
        self._mover = ArrayMover(self._client.open(weights), self._own, way, arrived=self.arrived)

    def move(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of this rank's mover."""
        self._own.refresh()
        return method(self._mover, *arguments)

    def move_buffer(self, method: Callable[..., Any], name: str) -> Any:
        """Call a method of this rank's mover that takes a buffer."""
        self._own.refresh()
        try:
            return method(self._mover, self._buffer(name))
        except NotFoundError:
            self._opened.pop(name, None)
            raise

    def _buffer(self, name: str) -> Buffer:
        """Return the buffer. It is opened only once, because a step must not need the coordinator."""
        if name not in self._opened:
            self._opened[name] = self._client.open(name)
        return self._opened[name]

    def spread_fetched(self) -> None:
        """If several ranks have the same values, exchange the fetched values with the other ranks."""
        assert self._mover is not None
        self._own.spread(self._ranks, self._mover.fetched)

    def spread_seen(self) -> None:
        """If several ranks have the same values, exchange the values that `look` has read with the other ranks."""
        assert self.seen is not None
        self._own.spread(self._ranks, self.seen)

    def look(self, weights: str) -> None:
        """Read this rank's part of the shared weights into `seen`."""
        if self.seen is None:
            self.seen = np.zeros(self._own.size, np.float32)
        self._own.read(self._buffer(weights), self.seen)

    def collect_statistics(self) -> Values:
        """Return this rank's running statistics."""
        self._statistics.collect()
        return self._statistics.values
