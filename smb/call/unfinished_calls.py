"""Calls done in parts: the parts of a change that its servers did not accept, and sources that the client has to bring.

Each part is a call of its own. The error of a part becomes the error of the whole call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from smb import engine
from smb.arrays.dtypes import OPS
from smb.call.accounts import CallingDispatcher, account_part, here
from smb.engine import NOWHERE, Opcode, Request

BROUGHT_BYTES = 32 << 20  # bytes of brought sources held at a time


class Source(Protocol):
    def call(self, request: Request, *, until: float) -> int: ...


def part_of(request: Request, part: range, itemsize: int) -> Request | None:
    """Return the change of some of the request's elements alone; None if it changes none of them."""
    begin, end = part.start, part.stop
    skip = begin * itemsize - request.offset  # bytes of the source and the sink
    indices = request.indices
    if indices is not None:
        first, last = (int(at) for at in np.searchsorted(indices, (part.start, part.stop)))
        if first == last:
            return None
        begin, end, indices = int(indices[first]), int(indices[last - 1]) + 1, indices[first:last]
        skip = first * itemsize
    source, sink = (
        engine.memory_at(address + skip) if (address := engine.address_of(memory)) else NOWHERE
        for memory in (request.source, request.sink)
    )
    return request._replace(
        offset=begin * itemsize, nbytes=(end - begin) * itemsize, source=source, sink=sink, indices=indices
    )


def cut(part: range, most: int) -> Iterator[range]:
    """Split `part` at multiples of `most` elements. These are ends of chunks, so each chunk stays whole."""
    start = part.start
    while start < part.stop:
        stop = min(part.stop, (start // most + 1) * most)
        yield range(start, stop)
        start = stop


def do_rest(calls: CallingDispatcher, request: Request, left: list[range], call: Callable[[Request], int]) -> int:
    """Do the rest of a change that its servers did not accept: they, or other servers, have to be reached in another
    way by now. `call` does one part.
    """
    done = 0
    change: Request | None = None
    try:
        while left:
            if (change := part_of(request, left[0], calls.arguments.itemsize)) is not None:
                done = call(change)
            del left[0]
        here.finished = request
    except BaseException as error:
        account_part(calls, error, request, left, change, "in part sent to other servers")
        raise
    return done


def bring(
    calls: CallingDispatcher,
    request: Request,
    sources: Sequence[Source],
    parts: list[range],
    call: Callable[[Request], int],
    until: float,
) -> int:
    """Do the unfinished `parts` of a call whose sources lie on other servers than its buffer.

    Reads the sources and sends the values along; of several sources, their sum. Each chunk is read at one instant and
    used later, as servers do it. `call` does one part. Reads block up to `until`, a time of time.monotonic().
    """
    itemsize, chunk_bytes = calls.arguments.itemsize, calls.arguments.info.layout.chunk_bytes
    most = max(1, BROUGHT_BYTES // chunk_bytes) * chunk_bytes // itemsize
    left = [piece for part in parts for piece in cut(part, most)]
    begun: Request | None = None
    try:
        while left:
            piece, begun = left[0], None
            offset, nbytes = piece.start * itemsize, len(piece) * itemsize
            read = Request(Opcode.READ, offset, nbytes)
            change = request._replace(offset=offset, nbytes=nbytes, token=0, sources=())
            if request.sources:
                memory = _sum_of(calls, request, sources, read, until)
                change = change._replace(opcode=Opcode.WRITE, op=0)
            else:
                memory = _read_for(sources[0], read, until)
            if request.opcode is Opcode.ACCUMULATE_FROM and not request.sources:
                change = change._replace(opcode=Opcode.ACCUMULATE)
            begun = change._replace(source=memory)
            call(begun)
            del left[0]
        here.finished = request
    except BaseException as error:
        account_part(calls, error, request, left, begun, "with a source that lies on other servers")
        raise
    return 0


def _read_for(source: Source, read: Request, until: float) -> Any:
    values = np.empty(read.nbytes, np.uint8)
    memory = engine.memory_of(values)
    source.call(read._replace(sink=memory), until=until)
    return memory


def _sum_of(calls: CallingDispatcher, request: Request, sources: Sequence[Source], read: Request, until: float) -> Any:
    """Return memory that holds the sum of several sources, computed as servers compute it."""
    number, count = calls.arguments.dtype.number, read.nbytes // calls.arguments.itemsize
    total = engine.memory_of(np.empty(read.nbytes, np.uint8))
    for index, (source, (scale, wire)) in enumerate(zip(sources, request.sources, strict=True)):
        values = _read_for(source, read._replace(wire=wire), until)
        engine.apply_op(number, OPS["sum" if index else "replace"], total, values, count, scale)
    return total
