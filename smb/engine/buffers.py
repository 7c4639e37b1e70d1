"""A buffer's segments as the engine reaches them, and the direct methods, which call the engine without Python code."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, cast

from smb._direct import DirectTarget, Method, Switch, forked, look_address, set_up
from smb._engine import ffi, lib
from smb.engine.arithmetic import layout_of
from smb.engine.calls import Attempt, Outcome, Request, memory_of, outcome_of, raw_request
from smb.engine.enums import Opcode, check
from smb.engine.links import EngineClient, Link, Segment

lib.smb_set_look(ffi.cast("int (*)(void)", look_address()))
os.register_at_fork(after_in_child=forked)

Function = TypeVar("Function", bound=Callable[..., object])


@cache
def _set_up() -> None:
    import numpy as np  # imported here: daemons do not need numpy, and loading it takes a third of their start

    set_up(
        int(ffi.cast("uintptr_t", ffi.addressof(lib, "smb_transfer"))),
        int(ffi.cast("uintptr_t", ffi.addressof(lib, "smb_transfer_at_once"))),
        np.ndarray,
    )


def direct(opcode: Opcode) -> Callable[[Function], Function]:
    """Put the direct path (csrc/python/direct.c) before a method of a subclass of Direct, whose `_target`
    is a DirectTarget.

    READ: (offset, count, *, out, wire); WRITE: (array, offset, *, wire); ACCUMULATE: (array, offset, *, scale, wire);
    FETCH_ADD: (index, value); COMPARE_SWAP: (index, expected, new). For other arguments, or unusual values of these,
    the method itself is called.
    """

    _set_up()

    def put_in_front(function: Function) -> Function:
        return cast(Function, Method(opcode, function))

    return put_in_front


def _add_others(raw: Any, request: Request, others: Sequence[BufferHandle]) -> None:
    """Store a call's other buffers in its struct: several sources, or one source and an optimizer's states; and the
    optimizer's parameters.
    """
    states = others
    if request.sources:
        raw.source_count, states = len(request.sources), ()
        for index, (scale, wire) in enumerate(request.sources):
            raw.sources[index] = others[index].pointer
            raw.scales[index], raw.wires[index] = scale, wire
    elif request.source == ffi.NULL:
        raw.other, states = others[0].pointer, others[1:]
    for index, state in enumerate(states):
        raw.states[index] = state.pointer
    for name, value in (request.hyper or {}).items():
        setattr(raw.hyper, name, value)


class BufferHandle:
    """A buffer's segments as one client reaches them. Complete once every segment is set; after that, any thread may
    call it.
    """

    def __init__(
        self, client: EngineClient, nbytes: int, stripe_bytes: int, chunk_bytes: int, segment_count: int, dtype: int
    ) -> None:
        made = ffi.new("struct smb_buffer **")
        layout = layout_of(nbytes, stripe_bytes, chunk_bytes, segment_count)
        check(lib.smb_buffer_create(client.pointer, layout, dtype, made))
        self._client = client
        self.pointer = ffi.gc(made[0], lib.smb_buffer_destroy)

    def set_link(self, index: int, segment_id: int, epoch: int, link: Link) -> None:
        """Reach segment `index` over a link."""
        check(lib.smb_buffer_set_link(self.pointer, index, segment_id, epoch, link.pointer))

    def set_links(self, index: int, segment_id: int, epoch: int, links: Sequence[Link]) -> None:
        """Reach segment `index` over several links to its server; chunks use the links that have room."""
        self.set_link(index, segment_id, epoch, links[0])
        for link in links[1:]:
            check(lib.smb_buffer_add_lane(self.pointer, index, link.pointer))

    def set_local(self, index: int, segment: Segment) -> None:
        """Reach segment `index` through its mapping."""
        check(lib.smb_buffer_set_local(self.pointer, index, segment.pointer))

    def transfer(
        self,
        request: Request,
        timeout_ms: int,
        others: Sequence[BufferHandle] = (),
        attempt: Attempt | None = None,
        warden: BufferHandle | None = None,
    ) -> Outcome | int:
        """Make one call, with other buffers as its source (if it has no other one) and state. Blocks up to timeout_ms.
        `warden`: the buffer whose lock the request's token is of, if that is another one.

        Returns the old value of FETCH_ADD and COMPARE_SWAP (unsigned; 0 for other opcodes), or the Outcome of a call
        that failed. `attempt` has both, too, even if a signal handler raises in here.
        """
        attempt = attempt or Attempt()
        outcome = attempt.raw
        raw = raw_request(request, timeout_ms)
        if request.indices is not None:
            raw.indices, raw.count = ffi.cast("int64_t *", memory_of(request.indices)), request.indices.size
        if others or request.hyper:
            _add_others(raw, request, others)
        if warden is not None:
            raw.warden = warden.pointer
        status = lib.smb_transfer(self.pointer, raw, outcome)
        return int(outcome.result) if status == 0 else outcome_of(outcome, outcome)

    def arm(
        self,
        target: DirectTarget,
        client: Switch,
        quiet: Switch,
        shape: tuple[int, ...],
        itemsize: int,
        code: str,
        timeout_ms: int,
    ) -> None:
        """Let the target's direct methods use this handle, for elements of the buffer protocol's format `code`."""
        buffer, size = int(ffi.cast("uintptr_t", self.pointer)), math.prod(shape)
        target.arm(self, client, quiet, buffer, shape, size, itemsize, code, timeout_ms)

    def map(self) -> tuple[int, int]:
        """Map the whole buffer contiguously; return (address, bytes). EngineError INVALID if a segment is not local."""
        address, nbytes = ffi.new("void **"), ffi.new("uint64_t *")
        check(lib.smb_buffer_map(self.pointer, address, nbytes))
        return int(ffi.cast("uintptr_t", address[0])), int(nbytes[0])


def unmap(address: int, nbytes: int) -> None:
    """Undo BufferHandle.map."""
    lib.smb_buffer_unmap(ffi.cast("void *", address), nbytes)
