"""Each generation from one process, and whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from smb.engine import memory_at
from smb.pins import PIN_S_MAX
from smb.spi import versions_of
from smb.torch.publishing.state_bytes import StateBytes

if TYPE_CHECKING:
    import torch

    from smb.buffer import Buffer
    from smb.torch.publishing.shard_writer import Late

_TURN_S = 10.0  # the next publisher waits so long for one that was killed; a living one renews its turn


class WholeWriter:
    """Publishes each generation whole. One thread at a time."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.sent_bytes = buffer.nbytes

    @cached_property
    def memory(self) -> StateBytes:
        """Memory of the state's size, which publish_pairs does not need."""
        return StateBytes(self._buffer)

    @property
    def generation(self) -> int:
        """The generation that was published last."""
        return self._buffer.version

    def take(self, given: Mapping[str, torch.Tensor]) -> int:
        """Copy a state for publish(). It was checked, and has stored tensors only. Return the number of bytes."""
        return self.memory.take(given)

    def take_pairs(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As take, one tensor after the other."""
        for name, tensor in pairs:
            self.memory.take({name: tensor})
            del tensor  # before the next one is made

    def publish(self, _asked: str, timeout: float) -> int:
        """Publish the state that was taken last. Return its generation."""
        return self._buffer.publish(self.memory.elements, timeout=timeout)

    def publish_whole(self, asked: str, timeout: float, _late: Late) -> int:
        """As publish. There is no other rank that may be late."""
        return self.publish(asked, timeout)

    def publish_pairs(self, _asked: str, pairs: Iterable[tuple[str, torch.Tensor]], timeout: float) -> int:
        """Publish a state of which each tensor is sent before the next one is made. Return its generation."""
        turn = versions_of(self._buffer).begin(timeout, _TURN_S, max(PIN_S_MAX, timeout - 1.0))
        with turn.kept():
            try:
                for name, tensor in pairs:
                    if tensor.nbytes:
                        turn.write(self._buffer.table[name].offset, tensor.nbytes, memory_at(tensor.data_ptr()))
                    del tensor  # before the next one is made
            except BaseException:
                turn.give_up()
                raise
            return turn.commit()
