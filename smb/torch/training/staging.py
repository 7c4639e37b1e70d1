"""Blocks of tensors between a device and host memory: two rooms of a fixed size that are used in turn.

If the device has streams, copies use a stream of their own, from and to pinned memory: one block is copied while
another one is computed with. An event says when a room's copies are done; the device's own work waits for the stream
before it uses what was copied to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from smb.torch.tensor_values import lasting
from smb.train.parameters import BLOCK_ELEMENTS

_ITEM_BYTES = 4  # space for an element, whatever its type


class Staging:
    """The two rooms, and a stream for each device. `elements` is the largest number that a room must hold. One thread
    at a time.
    """

    def __init__(self, elements: int) -> None:
        self._elements = min(elements, BLOCK_ELEMENTS)
        self._rooms: list[torch.Tensor] = []  # bytes; made on first use
        self._streams: dict[torch.device, torch.Stream | None] = {}
        self._done: list[dict[torch.device, torch.Event]] = [{}, {}]

    def room(self, turn: int, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory for `count` elements of a type, from element `at` on."""
        if not self._rooms:
            self._rooms = [_pinned(_ITEM_BYTES * self._elements) for _ in range(2)]
        begin = _ITEM_BYTES * at
        return self._rooms[turn % 2][begin : begin + count * dtype.itemsize].view(dtype)

    def begin(self, devices: Iterable[torch.device]) -> None:
        """Make later copies wait for all work queued on these devices so far."""
        for device in devices:
            if (stream := self._stream(device)) is not None:
                stream.wait_stream(torch.accelerator.current_stream(device))

    @contextlib.contextmanager
    def on(self, device: torch.device, turn: int) -> Iterator[None]:
        """Run the block on the device's own stream: copies from and to a room of that turn, and operations on them.
        Memory that the block allocates on the device belongs to the stream.
        """
        stream = self._stream(device)
        if stream is None:
            yield
            return
        try:
            with stream:
                yield
        finally:  # after an error, earlier copies may still be running
            self._done[turn % 2].setdefault(device, torch.Event(device)).record(stream)

    def wait(self, turn: int) -> None:
        """Wait until the room's copies are done."""
        for event in self._done[turn % 2].values():
            event.synchronize()
        self._done[turn % 2].clear()

    def end(self, devices: Iterable[torch.device]) -> None:
        """Make later work on these devices wait for the copies made so far."""
        for device in devices:
            if (stream := self._stream(device)) is not None:
                torch.accelerator.current_stream(device).wait_stream(stream)

    def _stream(self, device: torch.device) -> torch.Stream | None:
        if device not in self._streams:
            try:
                self._streams[device] = torch.Stream(device)
            except (RuntimeError, NotImplementedError):
                self._streams[device] = None  # the device has no streams: copies wait
        return self._streams[device]


@lasting
def _pinned(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError):
        # The device can't copy from this memory directly: slower, with the same result.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
