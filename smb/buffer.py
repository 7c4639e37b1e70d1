"""A buffer: one named array over the memory of several servers, read and changed by any number of processes at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from smb.arrays import memory as arrays
from smb.arrays import sparse
from smb.arrays.dtypes import SPARSE_WIRE
from smb.arrays.indexing import Indexed
from smb.buffer_info import BufferInfo
from smb.call.dispatcher import Dispatcher, dispatcher_of
from smb.call.interrupts import accounted, accounted_later
from smb.call.operands import check_beside, check_step, each_of
from smb.call.optimizer_rules import hyper_of, rule_of
from smb.call.session import FenceAsMade, Session
from smb.call.settling import leave_to_settle, settle
from smb.call.versions import Versions
from smb.config.limits import SPARSE_BYTES_MAX
from smb.config.pickling import refuse_pickle
from smb.engine import (
    SOURCES_MAX,
    Direct,
    EngineError,
    Opcode,
    Request,
    Status,
    Window,
    direct,
    memory_of,
)
from smb.errors import (
    Error,
    InvalidArgumentError,
    TransportError,
)
from smb.feedback import ErrorFeedback, SparseSending
from smb.html_tables import buffer_row, described
from smb.layout import Layout
from smb.lock import Lock
from smb.pins import PIN_S_MAX, Pin
from smb.rpc import metadata
from smb.tensors import Tensor, TensorTable, tensor_of
from smb.transport.base import Deadline

Array = np.ndarray[Any, np.dtype[Any]]
Result = TypeVar("Result")
Number = TypeVar("Number", int, float)

# Short names, since these are used often.
_READ, _WRITE, _ACCUMULATE = Opcode.READ, Opcode.WRITE, Opcode.ACCUMULATE
_PUBLISH_TTL_S = 10.0
_PUBLISH_WAIT_MAX_S = 86400.0


class Buffer(Indexed, Direct):
    """A named array of `shape` and `dtype` in the memory of servers. Made by Client.create and Client.open.

    **Exactly once.** A call that returns was applied exactly once, even if connections broke and servers were killed
    and restarted meanwhile: within the client's timeout the call is finished over a new connection (docs/promises.md).

    **Ranges.** Offsets and counts are elements of the flattened array. A call over 0 elements changes and returns
    nothing and asks no server.

    **Blocking and threads.** Every call blocks until all servers involved have answered, at most for the client's
    timeout. The servers work at the same time. Calls may come from any thread, and release the GIL except where they
    take no longer than releasing it.

    **Atomicity.** A call is atomic for each chunk (`layout.chunk_bytes`: 256 KiB, or less if the stripe is smaller). An
    accumulate or write of a chunk happens as a whole, and a read never sees half of one. Calls that overlap in time are
    otherwise unordered.

    **Errors.** Every call may raise UnavailableError (a server was lost; the message says whether the call was
    applied), TimeoutError (the outcome is unknown), NotFoundError (the buffer was deleted) and InvalidArgumentError
    (nothing was done). If the outcome is unknown, settle(error) finds out.

    **Locks.** With fence=lock, a lock taken from this buffer's lock(), a change is made only while that lock is held.
    Else LockLostError is raised, and nothing is changed. Such changes pass through the servers, also on the same host.
    The lock may be another buffer's if each segment of this one is, and stays, on the server of the segment of the same
    index there: create one of the two with like= the other, or with state_of= if they have two copies. Other locks are
    an InvalidArgumentError. From then on the segments of two buffers with one copy that a change has touched stay on
    their servers, as with a rule and its state; those that moved elsewhere before can't be fenced so.

    **Wire encodings.** The elements of a float32 buffer may travel in fewer bits: wire="bfloat16", "float16", "int8" or
    "int4" in a call, or in create() for all calls that do not say. "exact" sends them as they are. The client rounds
    the values, and the server combines them in float32. Values are rounded over shared memory too, so that a result
    does not depend on the path.

    - bfloat16 and float16 round to nearest, ties to even. The error is at most `2**-8 |x|` and `2**-11 |x|` (float16:
      at most `2**-25` for `|x|` below `2**-14`, and infinity from 65520 on).
    - int8 sends blocks of 256 elements, counted from the start of each chunk or of the range: `s = max|x|/127` and the
      integers nearest to `x/s`. The error is at most `max|x|/254` of the block, and a little more by the rounding of s.
      A block with an infinity or NaN arrives as NaN.
    - int4 does so with blocks of 64 elements and `s = max|x|/7`: the error is at most `max|x|/14`. Use it with
      ErrorFeedback.

    **As an array.** `np.asarray(buffer)` reads everything. `buffer[index]` reads, and `buffer[index] = values` writes,
    elements that lie side by side: integers for the first dimensions, then at most one slice without a step. Each of
    them is one call, so `buffer[0] += 1` is a read and a write, and not atomic: use accumulate().

    ```python
    buffer = client.create("counts", 3, dtype="int64")
    buffer.write(np.array([1, 2, 3]))
    buffer.accumulate(np.array([10, 10, 10]))
    buffer.read()  # array([11, 12, 13])
    buffer[1:]  # array([12, 13])
    ```
    """

    __slots__ = ("__dict__", "__weakref__")

    def __init__(self, session: Session, info: BufferInfo) -> None:
        self._session = session
        self._dispatcher = dispatcher_of(session, info)
        self._arguments = self._dispatcher.arguments
        self._target = self._dispatcher.target  # where direct methods look
        self._versions = Versions(self._dispatcher)
        self._table: TensorTable | None = None  # made at the first use

    # ---- description

    @property
    def name(self) -> str:
        """The buffer's name, unique in the cluster. After a rename by another client it may be the former name."""
        return self._arguments.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape; () for a single element."""
        return self._arguments.info.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type (bfloat16 is ml_dtypes')."""
        return self._arguments.info.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._arguments.size

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._arguments.info.nbytes

    @property
    def versions(self) -> int:
        """The number of slots for versions: 2 to 16 if a read never mixes two publications, else 1."""
        return self._arguments.info.versions

    @property
    def wire(self) -> str:
        """How elements travel if a call does not say: "exact", "bfloat16", "float16", "int8" or "int4"."""
        return self._arguments.info.wire

    @property
    def info(self) -> BufferInfo:
        """The coordinator's latest description of the buffer that this client has received."""
        return self._arguments.info

    @property
    def metadata(self) -> dict[str, Any]:
        """The JSON object that the buffer was created with, as a new dict each time. It never changes.

        ```python
        buffer = client.create("tagged", 1000, metadata={"step": 7})
        buffer.metadata  # {'step': 7}
        ```
        """
        return metadata.decode(self._arguments.info.metadata_json)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The named tensors in the buffer, in their order. Empty unless the buffer was created with tensors=."""
        return {name: Tensor(self, name, info) for name, info in self.table.items()}

    def tensor(self, name: str) -> Tensor:
        """Return the named tensor, to be read, written and accumulated by itself. Raises NotFoundError.

        ```python
        model = client.create("model", tensors={"weight": ((10, 20), "float32"), "bias": ((10,), "float32")})
        model.tensor("bias").shape  # (10,)
        ```
        """
        return tensor_of(self, self.table, name)

    @property
    def table(self) -> TensorTable:
        """The positions of the named tensors; empty if there are none. Raises Error if the metadata is invalid."""
        if self._table is None:
            try:
                self._table = TensorTable.from_metadata(self.metadata, self.dtype, self.nbytes)
            except Error as error:
                raise Error(f"buffer {self.name!r}: {error}") from error
        return self._table

    @property
    def layout(self) -> Layout:
        """Which bytes live on which server."""
        return self._arguments.info.layout

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports in use, sorted: ("shm",), ("tcp",) or ("shm", "tcp"). Blocks until each segment has a path."""
        self._dispatcher.paths.ensure(Deadline(self._session.timeout))
        return tuple(sorted({path.transport for path in self._dispatcher.paths.found}))

    def __repr__(self) -> str:
        servers = len({segment.server for segment in self.layout.segments})
        return f"<smb.Buffer {self.name!r} {self.dtype.name}{list(self.shape)} on {servers} server{'s'[: servers > 1]}>"

    def _repr_html_(self) -> str:
        return described("Buffer", buffer_row(self.info))

    def __reduce__(self) -> NoReturn:
        refuse_pickle(repr(self), f"call smb.connect({self._session.coordinator.address!r}).open({self.name!r})")

    # ---- reading and writing

    @direct(_READ)
    def read(
        self,
        offset: int = 0,
        count: int | None = None,
        *,
        out: Any = None,
        wire: str | None = None,
        version: int | None = None,
        timeout: float = 0.0,
    ) -> Array:
        """Return `count` elements from element `offset`, or the whole array.

        ```python
        everything = buffer.read()
        part = buffer.read(offset=10, count=3)
        buffer.read(out=everything)
        ```

        The result is a new array of the buffer's dtype: of its shape if all is read, else flat. With `out` the elements
        go straight into that array or CPU tensor, which is returned. `out` is contiguous, writable, of the buffer's
        dtype and of `count` elements. If all of a buffer with two or more dimensions is read, `out` is flat or of the
        buffer's shape.

        With a `wire` other than "exact" the result is the servers' values rounded that way.

        In a buffer with versions the result is one whole version: the latest one, or `version=`. Raises NotFoundError
        if that version was overwritten or is not published yet, or if none was published yet. With `timeout` (seconds)
        it waits for it that long first.
        """
        number = self._arguments.wire(wire, "read")
        offset, count, result, memory = self._arguments.sink(offset, count, out)
        if version is not None:
            self._versions.check_number("read", version)
        if timeout != 0.0:
            self._versions.check_kept("read with timeout=")
            self._versions.await_published(version, timeout)
        if self._arguments.info.versions == 1:
            itemsize = self._arguments.itemsize
            self._dispatcher.call(Request(_READ, offset * itemsize, count * itemsize, sink=memory.pointer, wire=number))
        elif self._versions.read(offset, count, memory.pointer, number, version) == 0:
            raise self._versions.none_yet("read")
        if memory.deliver is not None:
            memory.deliver()
        return cast(Array, result)

    def read_version(self, out: Any, *, wire: str | None = None) -> int:
        """Read the latest version of a buffer with versions into `out`, as read() does, and return its number.

        Raises NotFoundError before the first publication.

        ```python
        latest = np.empty(1000, np.float32)
        published.read_version(latest)  # 1: the version that was read
        ```
        """
        self._versions.check_kept("read_version")
        number = self._arguments.wire(wire, "read_version")
        memory = self._arguments.writable(out, self.size, "read_version")
        version = self._versions.read(0, self.size, memory.pointer, number)
        if version == 0:
            raise self._versions.none_yet("read_version")
        if memory.deliver is not None:
            memory.deliver()
        return version

    def read_sparse(self, indices: Any, *, rows: bool = False, out: Any = None) -> Array:
        """Return the elements of the flattened buffer at `indices`, in their order, as a new array or in `out`.

        ```python
        buffer.read_sparse([3, 17, 3])  # elements 3, 17 and 3
        ```

        `indices` are int64, in any order, and may occur several times; then the element is read once. The result has
        one element for each, and at most 1 GiB. With rows=True index i stands for `buffer[i]`, and the result has the
        shape `(len(indices), *buffer.shape[1:])`: rows of an embedding table, for example. `out` has the result's
        shape or is flat, else as in read().

        Elements that lie side by side in a chunk are read at one instant, others may be of different instants. Each
        such run takes a request of its own, of which up to 64 are on their way over a connection; on the server's
        host the call uses the mapped memory. The values are exact whatever the buffer's wire is.
        """
        asked = self._arguments.asked("read_sparse")
        if self.versions > 1:
            raise InvalidArgumentError(
                f"{asked}: the buffer keeps several versions; use read(), or pin() and its read(offset, count)"
            )
        where, width = self._arguments.indices(indices, "read_sparse", rows=rows)
        count, itemsize = where.size * width, self._arguments.itemsize
        if count * itemsize > SPARSE_BYTES_MAX:
            raise InvalidArgumentError(
                f"{asked}: {count * itemsize} bytes are more than the {SPARSE_BYTES_MAX} of one call; read them in "
                "parts"
            )
        shape = (where.size, *self.shape[1:]) if rows else (where.size,)
        result = np.empty(shape, self.dtype) if out is None else out
        memory = self._arguments.writable(result, count, "read_sparse", shape)
        once, sink, back = where, memory.pointer, None
        if not sparse.ascends(where):
            once, back = np.unique(where, return_inverse=True)
            read = np.empty((once.size, width), self.dtype)
            sink = memory_of(read)
        once = sparse.elements_of(once, width)
        first, span = (int(once[0]), int(once[-1]) - int(once[0]) + 1) if once.size else (0, 0)
        self._dispatcher.call(
            Request(_READ, first * itemsize, span * itemsize, sink=sink, wire=SPARSE_WIRE, indices=once)
        )
        if back is not None:
            arrays.as_flat(memory, self._arguments.dtype).reshape(where.size, width)[:] = read[back]
        if memory.deliver is not None:
            memory.deliver()
        return cast(Array, result)

    @direct(_WRITE)
    @accounted
    def write(
        self, array: Any, offset: int | None = None, *, fence: Lock | None = None, wire: str | None = None
    ) -> None:
        """Replace all elements by the array's, or with `offset` the elements from there on.

        ```python
        buffer.write(array)
        buffer.write(array[:10], offset=0)
        ```

        Without `offset` the array has as many elements as the buffer; with two or more dimensions it has the buffer's
        shape. With `offset` a flat array may have any number of elements that fits. Everything else is an
        InvalidArgumentError. The elements are rounded as `wire` says. If two writes overlap, the last one wins, element
        by element.
        """
        number = self._arguments.wire(wire, "write")
        pointer, offset, count, _owner = self._arguments.source(array, offset, "write")
        itemsize = self._arguments.itemsize
        self._dispatcher.call(Request(_WRITE, offset * itemsize, count * itemsize, pointer, wire=number), fence=fence)

    @accounted
    def fill(self, value: float, *, fence: Lock | None = None) -> None:
        """Set every element to `value`, converted to the buffer's dtype.

        ```python
        buffer.fill(0.5)
        buffer.read(count=2)  # array([0.5, 0.5], dtype=float32)
        ```
        """
        element = arrays.scalar(value, self._arguments.dtype)
        if element is None:
            raise InvalidArgumentError(
                f"{self._arguments.asked('fill')}: value must be a number that {self._arguments.dtype.name} can hold, "
                f"not {value!r}"
            )
        argument = int.from_bytes(element.tobytes(), "little")
        self._dispatcher.call(Request(Opcode.FILL, 0, self.nbytes, argument=argument), fence=fence)

    def view(self) -> Array:
        """Return the buffer's own memory as an array of its shape, without a copy. Works on the server's host only.

        Accesses through the view are not ordered against other processes, and only single elements are atomic: an
        element that another call stores is always whole (over RDMA as the network card does it). The stripes of several
        servers are mapped side by side, so the view is contiguous. It stays valid until it is garbage collected, and
        holds zeros once the buffer is deleted. A call on the buffer may take a part of its view as its array or as
        out=; such a call works on a copy of that part.

        Raises TransportError if a segment is not on this host or not reached over shared memory, and
        InvalidArgumentError for buffers that have several versions or may move.

        ```python
        view = buffer.view()
        view[:10] = 1.0
        buffer.read(count=2)  # array([1., 1.], dtype=float32)
        ```
        """
        if self.info.movable:
            raise InvalidArgumentError(
                f"{self._arguments.asked('view')}: a buffer that has two copies (replicas=2) or has moved to "
                f"another server is changed by its servers alone and cannot be mapped; use read()"
            )
        if self._arguments.info.versions > 1:
            raise InvalidArgumentError(
                f"{self._arguments.asked('view')}: a buffer with several versions cannot be mapped; use read()"
            )
        handle = self._dispatcher.paths.ensure(Deadline(self._session.timeout))
        for segment, path in zip(self.layout.segments, self._dispatcher.paths.found, strict=True):
            if path.segment is None:
                raise TransportError(
                    f"{self._arguments.asked('view')}: the part on server {segment.server} is reached over "
                    f"{path.transport} ({path.why}) but a view needs shared memory; use read()"
                )
        try:
            address, nbytes = handle.map()
        except EngineError as error:
            if error.status is Status.BUSY:
                raise InvalidArgumentError(
                    f"{self._arguments.asked('view')}: its server is or was being drained, so the buffer may move; use "
                    "read()"
                ) from error
            raise TransportError(
                f"{self._arguments.asked('view')}: the memory cannot be mapped: {error}; use read()"
            ) from error
        return arrays.mapped_array(address, nbytes, self.shape, self.dtype)

    # ---- changing in place

    @direct(_ACCUMULATE)
    @accounted
    def accumulate(
        self,
        array: Any,
        offset: int | None = None,
        *,
        op: str = "sum",
        scale: float = 1.0,
        fetch: bool = False,
        out: Any = None,
        fence: Lock | None = None,
        wire: str | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> Array | None:
        """Combine all elements with the array's, or with `offset` the elements from there on, where the memory is.

        ```python
        buffer.accumulate(gradient, scale=-0.01)
        latest = buffer.accumulate(gradient, scale=-0.01, fetch=True)
        ```

        Atomic for each chunk. The array fits as in write(). With b the buffer's element, a the array's and s = scale,
        each step rounded to the dtype as numpy does:

        | op | new value |
        | --- | --- |
        | "sum" | `b + s*a` |
        | "min" | `minimum(b, s*a)` |
        | "max" | `maximum(b, s*a)` |
        | "prod" | `b * (s*a)` |
        | "replace" | `s*a` |
        | "elastic" | `b + s*(a - b)`, the master's half of elastic averaging (Zhang et al. 2015) |
        | "band", "bor", "bxor" | bitwise `b & a`, `b \\| a`, `b ^ a`; integers and bool, scale=1 |

        Integers wrap around, and their scale is an integer. There is no arithmetic on the dtypes for storage
        (Client.create): they take "replace" with scale=1, and integers and bool also the bitwise ones.

        With fetch=True the new values come back in the same round trip, in the array's shape or in `out` (as in read();
        it shares no memory with the array). They contain this contribution and may contain later ones of others; after
        a lost connection they are read anew, at least as new as this contribution. Without fetch=True None is returned.

        With `wire` the array is rounded before it is scaled and combined; fetched values are exact. With op="sum" and
        feedback=, an ErrorFeedback of this buffer, the array is scaled first, and the rounding error is added to the
        next call's array.
        """
        if feedback is None:
            request, result, _owner, deliver = self._arguments.addition(array, offset, op, scale, fetch, out, wire)
            self._dispatcher.call(request, fence=fence)
            if deliver is not None:
                deliver()
            return cast("Array | None", result)
        number = self._arguments.op(op, scale, "accumulate")
        wires = self._arguments.wire(wire, "accumulate")
        self._check_feedback(feedback, op, "accumulate")
        owner = self._arguments.readable(array, "accumulate")
        offset, count = self._arguments.part(owner.shape, owner.count, offset, "accumulate")
        result, sink, deliver = self._arguments.fetched(owner.shape, count, fetch, out)
        start, nbytes = offset * self._arguments.itemsize, count * self._arguments.itemsize
        if count == 0:
            self._dispatcher.call(Request(_ACCUMULATE, start, nbytes, sink=sink, op=number), fence=fence)
            return cast("Array | None", result)
        # Take the turn before the lock: an earlier async call with this residual needs the lock, too.
        deadline = Deadline(self._session.timeout)
        self._dispatcher.wait_turn(Request(_ACCUMULATE, start, nbytes), deadline)
        with feedback.lock:
            sending = feedback.take(arrays.as_float32(owner), offset, scale, wires)
            request = Request(_ACCUMULATE, start, nbytes, memory_of(sending.values), sink, op=number, wire=wires)
            try:
                self._dispatcher.call(request, fence=fence, until=deadline.end, in_turn=True)
            except BaseException as error:
                if not leave_to_settle(error, self._session, self._dispatcher, sending):
                    sending.undo()
                raise
        if deliver is not None:
            deliver()
        return cast("Array | None", result)

    @accounted
    def accumulate_sparse(
        self,
        indices: Any,
        values: Any,
        *,
        rows: bool = False,
        op: str = "sum",
        scale: float = 1.0,
        fence: Lock | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        """Combine the elements of the flattened buffer at `indices` with `values`, as accumulate() does.

        ```python
        buffer.accumulate_sparse(np.array([3, 17]), np.array([0.5, -1.0], np.float32))
        ```

        `indices` are int64, in any order. `values` are as many, of the buffer's dtype; they travel exact, with 4 more
        bytes each. Other elements stay as they are. Atomic for each chunk, unless a chunk gets more than 1 MiB of
        entries.

        An index may occur several times, except with op="elastic". The client multiplies the values by the scale, and
        combines those of one index with each other by `op`, in the order in which they were given and each step rounded
        to the dtype ("replace": it keeps the last one). The result is combined with the element once. So values of one
        index add up, as with numpy.add.at and in torch's sparse tensors.

        With rows=True index i stands for `buffer[i]`, and `values` has the shape `(len(indices), *buffer.shape[1:])`:
        gradients of an embedding table, for example.

        With feedback=, an ErrorFeedback, `values` come from its top_k(). If they are not applied, or settle() finds
        that some of them were not, they go back into the residual. Refused arguments (InvalidArgumentError) leave the
        residual alone.
        """
        asked = self._arguments.asked("accumulate_sparse")
        where, width = self._arguments.indices(indices, "accumulate_sparse", rows=rows)
        memory = self._arguments.readable(values, "accumulate_sparse")
        if feedback is not None:
            self._check_feedback(feedback, op, "accumulate_sparse")
            if scale != 1.0:
                raise InvalidArgumentError(
                    f"{asked}: scale={scale!r} cannot be passed with feedback=; pass it to top_k(), which applies it"
                )
        number = self._arguments.op(op, scale, "accumulate_sparse")
        fits = memory.shape == (where.size, *self.shape[1:]) if rows else len(memory.shape) < 2
        if not fits or where.size * width != memory.count:
            raise InvalidArgumentError(
                f"{asked}: indices of shape {[where.size]} do not fit values of shape {list(memory.shape)}; pass "
                + (f"values of shape {[where.size, *self.shape[1:]]}" if rows else "flat arrays of equal size")
            )
        given, pointer = arrays.as_flat(memory, self._arguments.dtype), memory.pointer
        if not sparse.ascends(where):
            if op not in sparse.FOLDED and np.unique(where).size != where.size:
                raise InvalidArgumentError(
                    f"{asked}: an index occurs several times, which op={op!r} does not allow; allowed are "
                    f"{', '.join(sparse.FOLDED)}"
                )
            if op in sparse.FOLDED:
                where, given = sparse.fold(op, where, given.reshape(where.size, width), scale)
                scale = 1.0
            else:
                order = np.argsort(where)
                where, given = where[order], given.reshape(where.size, width)[order]
            pointer = memory_of(given)
        where = sparse.elements_of(where, width)
        first, count = (int(where[0]), int(where[-1]) - int(where[0]) + 1) if where.size else (0, 0)
        itemsize = self._arguments.itemsize
        request = Request(
            _ACCUMULATE, first * itemsize, count * itemsize, pointer, op=number, scale=scale, wire=SPARSE_WIRE,
            indices=where,
        )  # fmt: skip
        try:
            self._dispatcher.call(request, fence=fence)
        except BaseException as error:
            if feedback is not None and not isinstance(error, InvalidArgumentError):
                taken = SparseSending(feedback, where, given.reshape(-1).copy())
                if not leave_to_settle(error, self._session, self._dispatcher, taken):
                    taken.put_back([range(self.size)])
                    if (account := getattr(error, "smb_account", None)) is not None:
                        account.settled = True
            raise

    @accounted
    def accumulate_from(
        self,
        other: Buffer | Sequence[Buffer],
        *,
        op: str = "sum",
        scale: float | Sequence[float] = 1.0,
        offset: int = 0,
        count: int | None = None,
        fence: Lock | None = None,
        wire: str | Sequence[str] = "exact",
    ) -> None:
        """Combine this buffer with another one as accumulate() does. The servers do it, and no elements travel.

        ```python
        weights.accumulate_from(gradients, scale=-0.01)
        ```

        Takes `count` elements from `offset` on (default: all that follow) of both. `other` has the same placement:
        create one of the two with like= the other. Segments of buffers with two copies (replicas=2) move between
        servers; where the two lie apart the client reads `other`, at most 32 MiB of each at a time, and sends the
        elements.

        With a `wire` other than "exact" the values of `other` are rounded first, to what other.read(offset, count,
        wire=wire) returns.

        With op="replace" `other` may be a sequence of 2 to 5 buffers, this buffer among them. The elements become the
        sum of each buffer's times its scale, added in their order, each step rounded to the dtype. `scale` and `wire`
        are one value for all, or one for each.

        Each chunk changes once, as a whole. Changes that others make to `other` between the read of a chunk and the
        change are not seen, and as with write() their changes to this buffer in between may be lost: hold a lock
        against that.
        """
        asked = self._arguments.asked("accumulate_from")
        others = tuple(other) if isinstance(other, Sequence) else (other,)
        scales, wires = each_of(scale, len(others)), each_of(wire, len(others))
        if not len(scales) == len(wires) == len(others):
            raise InvalidArgumentError(
                f"{asked}: {len(others)} buffers, {len(scales)} scales and {len(wires)} wires were passed; pass one "
                f"for each buffer, or one for all"
            )
        offset, count = self._arguments.range(offset, count, "accumulate_from")
        numbers = [
            self._arguments.op("sum" if index else op, each, "accumulate_from") for index, each in enumerate(scales)
        ]
        if len(others) != 1 and (op != "replace" or not 2 <= len(others) <= SOURCES_MAX):
            raise InvalidArgumentError(
                f"{asked}: only op='replace' takes several buffers, 2 to {SOURCES_MAX} of them; op={op!r} with "
                f"{len(others)} was asked"
            )
        encodings = [self._arguments.wire(each, "accumulate_from") for each in wires]
        dispatchers = self._operands("accumulate_from", *others)
        for each in others:
            check_beside(asked, self, each)
            if each.info.versions > 1:
                raise InvalidArgumentError(f"{asked}: {each!r} keeps several versions; read() it and use accumulate()")
        itemsize = self._arguments.itemsize
        request = Request(Opcode.ACCUMULATE_FROM, offset * itemsize, count * itemsize, op=numbers[0])
        if len(others) > 1:
            request = request._replace(sources=tuple(zip(scales, encodings, strict=True)))
        else:
            request = request._replace(scale=scales[0], wire=encodings[0])
        self._dispatcher.call(request, fence=fence, others=dispatchers)

    @accounted
    def apply(
        self,
        rule: str,
        gradient: Buffer,
        *state: Buffer,
        offset: int = 0,
        count: int | None = None,
        fence: Lock | None = None,
        **hyper: float,
    ) -> None:
        """Do one step of an optimizer where the memory is. This buffer, the weights, and `state` change; no elements
        travel.

        ```python
        m, v = (client.create(f"weights.{name}", state_of=weights) for name in "mv")
        weights.apply("adam", gradients, m, v, lr=1e-3, step=1)
        ```

        Takes `count` elements from `offset` on (default: all that follow) of each buffer. All are float32 with the same
        placement: create the gradient with like= the weights and each state with state_of= them. The state starts as
        zeros. With b an element of the weights, g of the gradient and `g' = scale*g + weight_decay*b` (scale=1,
        weight_decay=0; a decay of 0 adds no term), each step rounded to float32, from left to right:

        - "sgd" (lr): `b - lr*g'`.
        - "momentum" (lr, mu; state m): `m = mu*m + g'`, then `b - lr*m`.
        - "nesterov" (lr, mu; state m): the same m, then `b - lr*(g' + mu*m)`.
        - "adam" (lr, step, beta1=0.9, beta2=0.999, eps=1e-8; state m, v): `m = beta1*m + (1 - beta1)*g'`, `v = beta2*v
          + (1 - beta2)*(g'*g')`, then `b - (lr/(1 - beta1**step)) * (m / (sqrt(v)*(1/sqrt(1 - beta2**step)) + eps))`.
          `step` is 1 in the first call.
        - "adamw": as adam with `g' = scale*g`, after b is multiplied by `1 - lr*weight_decay` (weight_decay=0.01).
        - "elastic" (alpha): `b + alpha*(g - b)`.

        Terms without an element are computed in float64 and rounded once. These are torch.optim's rules (with
        dampening=0): Kingma and Ba 2015 for Adam, Loshchilov and Hutter 2019 for the decoupled decay, Zhang et al. 2015
        for elastic.

        Weights with two copies (replicas=2) need a state that was created with state_of= them. A gradient that lies
        apart from the weights is sent by the client, as in accumulate_from().

        The servers do the step, also on the same host: a chunk of weights and state changes together and once, even if
        a server is killed meanwhile. Blocks, and raises, as accumulate_from() does.
        """
        asked = self._arguments.asked("apply")
        known = rule_of(rule, asked)
        numbers = hyper_of(known, hyper, asked)
        if len(state) != len(known.states):
            wanted = f"{len(known.states)} ({', '.join(known.states)})" if known.states else "none"
            raise InvalidArgumentError(
                f"{asked}: rule {rule!r} takes {wanted} as its state, but {len(state)} were passed"
            )
        if self._arguments.dtype.name != "float32":
            raise InvalidArgumentError(
                f"{asked}: rules are for float32 buffers, and this one is {self._arguments.dtype.name}"
            )
        if not self._dispatcher.unversioned:
            raise InvalidArgumentError(
                f"{asked}: rules cannot change a buffer that keeps several versions; use one with versions=1"
            )
        others = self._operands("apply", gradient, *state)
        check_step(asked, known, self, gradient, state)
        offset, count = self._arguments.range(offset, count, "apply")
        itemsize = self._arguments.itemsize
        request = Request(Opcode.APPLY, offset * itemsize, count * itemsize, op=known.number, hyper=numbers)
        self._dispatcher.call(request, fence=fence, others=others)

    @direct(Opcode.FETCH_ADD)
    @accounted
    def fetch_add(self, index: int, value: Number) -> Number:
        """Add `value` to element `index` and return the element's former value. Atomic.

        ```python
        counters = client.create("counters", 8, dtype="int64")
        counters.fetch_add(0, 5)  # 0: the value before
        counters.fetch_add(0, 1)  # 5
        ```

        The dtype is int32, int64, uint32, uint64, float32 or float64. Whole numbers wrap around; `value` is one that
        the dtype can hold. Floats are added in the dtype, after `value` is rounded to it; a buffer of floats returns a
        float.
        """
        index, bits = self._arguments.atomic("fetch_add", index, value)
        itemsize = self._arguments.itemsize
        request = Request(Opcode.FETCH_ADD, itemsize * index, itemsize, argument=bits)
        return cast(Number, self._arguments.number(self._dispatcher.call(request)))

    @direct(Opcode.COMPARE_SWAP)
    @accounted
    def compare_swap(self, index: int, expected: Number, new: Number) -> Number:
        """Set element `index` to `new` if it is `expected`; return its former value. Atomic.

        ```python
        states = client.create("states", 8, dtype="int64")
        states.compare_swap(0, expected=0, new=7)  # 0: the element was 0 and is now 7
        states.compare_swap(0, expected=0, new=9)  # 7: the element was 7 and stays 7
        ```

        The element was set if and only if the result equals `expected`. The dtype is one of fetch_add's. Floats are
        rounded to the dtype, and then their bits are compared: 0.0 is not -0.0, and a NaN equals itself.
        """
        index, old, fresh = self._arguments.atomic("compare_swap", index, expected, new)
        itemsize = self._arguments.itemsize
        request = Request(Opcode.COMPARE_SWAP, itemsize * index, itemsize, argument=fresh, expected=old)
        return cast(Number, self._arguments.number(self._dispatcher.call(request)))

    # ---- locks and versions

    def lock(self, *, ttl: float = 10.0, timeout: float | None = None, shared: bool = False) -> Lock:
        """Return this buffer's lock. It is taken by acquire() or at the start of a `with` block.

        ```python
        with buffer.lock() as lock:
            buffer.write(buffer.read() * 2, fence=lock)
        ```

        Arguments as in Client.lock. Changes with fence=lock are refused once the lock is lost; several buffers may be
        changed under one lock (see Buffer, Locks). The lock does not keep
        others from changing the buffer without it. With shared=True several clients hold it at once, and add with
        fence=lock; whoever takes it without finds no addition under way.
        """
        paths = self._dispatcher.paths
        return Lock(paths.homes(), self._session.renewals, ttl, timeout, self._dispatcher, shared=shared)

    @property
    def version(self) -> int:
        """The number of the latest published version, 0 before the first. Asks the home server, unless it is on this
        host.
        """
        return self._versions.find()[0]

    def pin(self, version: int | None = None, *, ttl: float = 5.0) -> Pin:
        """Hold a version (default: the latest) so that it can be read piece by piece. Returns a Pin.

        ```python
        with published.pin() as pin:
            first = pin.read(offset=0, count=10)
        ```

        Publishers that have no other copy wait for it, for at most `ttl` seconds (at most 30). Entering the block
        raises NotFoundError if that version is not there, or none is published yet.
        """
        self._versions.check_kept("pin")
        if version is not None:
            self._versions.check_number("pin", version)
        return Pin(self.name, self._dispatcher.paths.homes()[0], self._read_slot, ttl, version)

    def publish(
        self, array: Any, *, timeout: float | None = None, ttl: float | None = None, readers: float | None = None
    ) -> int:
        """Replace all elements by the array's, wake readers that wait, and return the new version's number.

        ```python
        version = published.publish(array)
        ```

        The array fits as in write() without `offset`, and travels exact whatever the wire is. With versions=2 or more
        readers see the new version at once and as a whole, and the old one until then; a publisher that dies meanwhile
        leaves the old one. The new version overwrites the oldest one that no reader has pinned. With versions=1 it is a
        write() with a number.

        Blocks while another publisher has its turn, and while readers have pinned all slots but the latest version's.

        - `timeout`, in seconds (default: the client's), bounds this; then TimeoutError, and if the server answered,
          nothing was done.
        - `readers`, in seconds (default: a second less than `timeout`, at least 30), bounds how long readers may delay
          it, counted from when the first publisher had to wait for them. Then it goes on, and they read the next
          version. A pin whose reader makes no progress lasts 30 s.
        - `ttl`, in seconds (default: 10, or the client's timeout if that is longer): a publisher that is killed keeps
          the next one waiting for that long. A publisher that takes longer gets LockLostError, and has published
          nothing.
        """
        memory = self._arguments.readable(array, "publish")
        self._arguments.part(memory.shape, memory.count, None, "publish")
        if not self._dispatcher.turns.quiet.open:
            self._dispatcher.wait_turn(Request(_WRITE, 0, self.nbytes), Deadline(self._session.timeout))
        asked = self._arguments.asked("publish")
        timeout = self._session.timeout if timeout is None else timeout
        if not 0 <= timeout <= _PUBLISH_WAIT_MAX_S:  # NaN fails this test, too
            raise InvalidArgumentError(
                f"{asked}: timeout must be between 0 and {_PUBLISH_WAIT_MAX_S:g} s, not {timeout!r}"
            )
        if ttl is None:
            ttl = max(self._session.timeout, _PUBLISH_TTL_S)  # all steps below end within the client's timeouts
        if readers is None:
            readers = max(PIN_S_MAX, timeout - 1.0)
        if not 0.001 <= readers <= _PUBLISH_WAIT_MAX_S:
            raise InvalidArgumentError(
                f"{asked}: readers must be between 0.001 and {_PUBLISH_WAIT_MAX_S:g} s, not {readers!r}"
            )
        if not 0.001 <= ttl <= _PUBLISH_WAIT_MAX_S:
            raise InvalidArgumentError(f"{asked}: ttl must be between 0.001 and {_PUBLISH_WAIT_MAX_S:g} s, not {ttl!r}")
        if mirrored := self._arguments.info.mirror_of:
            raise InvalidArgumentError(f"{asked}: a mirror cannot be published to; publish to {mirrored!r}")
        return self._versions.publish(memory.pointer, timeout, ttl, readers)

    def wait(self, version: int, *, timeout: float | None = None) -> int:
        """Wait until `version` or a later one is published, and return the latest. TimeoutError after `timeout`
        seconds.

        ```python
        published.publish(array)
        published.wait(2, timeout=60)  # 2: the latest version
        ```
        """
        return self._versions.wait(version, timeout)

    def settle(self, error: BaseException, *, timeout: float | None = None) -> list[range]:
        """Find out what became of a call of this buffer that raised `error`. Afterwards `error.outcome` says it.

        ```python
        try:
            buffer.accumulate(gradient)
        except smb.Error as error:
            for part in buffer.settle(error):
                buffer.accumulate(gradient[part.start : part.stop], offset=part.start)
        ```

        Returns the ranges of elements, sorted, to which the call was not and never will be applied: [] if all of it
        counts, the whole range if nothing does. Repeat the call for these ranges, and it counts exactly once. Repeat a
        read likewise. For a call with feedback= these elements go back into the residual for the next call, and [] is
        returned.

        Blocks up to `timeout` seconds (default: the client's) until every server concerned has answered; then
        TimeoutError, and settle() may be called again. Raises UnavailableError if it can no longer be known, because
        the server has forgotten this session's record or lost the memory. Raises InvalidArgumentError if the error is
        not from a call of this object, or from one with refused arguments, which did nothing.
        """
        deadline = Deadline(self._session.timeout if timeout is None else timeout)
        return settle(error, self._session, self._dispatcher, deadline)

    # ---- asynchronously

    def read_async(
        self, offset: int = 0, count: int | None = None, *, out: Any = None, wire: str | None = None
    ) -> Future[Array]:
        """Start a read() and return a future of its result. Does not block; asyncio.wrap_future() makes it awaitable.

        ```python
        future = buffer.read_async()
        values = future.result()
        ```

        Calls of one client on overlapping elements of a buffer take effect in the order in which they were made: this
        read sees the changes of earlier async calls, and blocking calls wait for earlier async ones. Calls that do not
        overlap, and reads, run side by side. Calls of other threads, and calls in a future's callback, are unordered.
        Do not use `out` until the future is done.
        """
        return self._read_later(offset, count, out=out, wire=wire)

    def write_async(
        self, array: Any, offset: int | None = None, *, fence: Lock | None = None, wire: str | None = None
    ) -> Future[None]:
        """Start a write() and return a future. Ordered as in read_async(). Do not change the array until it is done.

        ```python
        future = buffer.write_async(array)
        future.result()  # None: the write is done
        ```
        """
        return self._write_later(array, offset, fence=fence, wire=wire)

    def accumulate_async(
        self,
        array: Any,
        offset: int | None = None,
        *,
        op: str = "sum",
        scale: float = 1.0,
        fetch: bool = False,
        out: Any = None,
        fence: Lock | None = None,
        wire: str | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> Future[Array | None]:
        """Start an accumulate() and return a future. Ordered as in read_async(). Do not change the array until it is
        done.

        ```python
        future = buffer.accumulate_async(gradient, scale=-0.5, fetch=True)
        latest = future.result()
        ```
        """
        return self._accumulate_later(
            array, offset, op=op, scale=scale, fetch=fetch, out=out, fence=fence, wire=wire, feedback=feedback
        )

    @accounted_later
    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run a function that may change any element of this buffer on one of the client's threads; return a future.

        It is ordered as in read_async(). Calls inside the function do not wait for other async calls.

        ```python
        future = buffer.submit(lambda: buffer.write(buffer.read() * 2))
        future.result()  # None: the function's result
        ```
        """
        return self._submit(call, 0, None)

    # ---- inside

    @accounted_later
    def _read_later(
        self, offset: int, count: int | None, *, out: Any, wire: str | None = None, **when: Any
    ) -> Future[Array]:
        def call() -> Array:
            return self.read(offset, count, out=out, wire=wire)

        try:
            number = self._arguments.wire(wire, "read")
            start, elements, result, memory = self._arguments.sink(offset, count, out)
        except InvalidArgumentError:
            return self._submit(call, offset, count, changes=False, **when)  # the call raises the error
        if memory.deliver is not None:
            return self._submit(call, offset, count, changes=False, **when)
        itemsize = self._arguments.itemsize
        request = Request(_READ, start * itemsize, elements * itemsize, sink=memory.pointer, wire=number)
        return self._dispatcher.later(request, call, result=result, keeps=memory, **when)

    @accounted_later
    def _write_later(
        self, array: Any, offset: int | None, *, fence: Lock | None, wire: str | None, **when: Any
    ) -> Future[None]:
        fence = _as_made(fence)

        def call() -> None:
            self.write(array, offset, fence=fence, wire=wire)

        try:
            number = self._arguments.wire(wire, "write")
            pointer, start, count, owner = self._arguments.source(array, offset, "write")
            itemsize = self._arguments.itemsize
            request = Request(_WRITE, start * itemsize, count * itemsize, pointer, wire=number)
            return self._dispatcher.later(request, call, result=None, keeps=owner, fence=fence, **when)
        except InvalidArgumentError:
            return self._submit(call, offset, _elements(array), **when)

    @accounted_later
    def _accumulate_later(
        self,
        array: Any,
        offset: int | None,
        *,
        op: str,
        scale: float,
        fetch: bool,
        out: Any,
        fence: Lock | None,
        wire: str | None,
        feedback: ErrorFeedback | None = None,
        **when: Any,
    ) -> Future[Array | None]:
        fence = _as_made(fence)

        def call() -> Array | None:
            return self.accumulate(
                array, offset, op=op, scale=scale, fetch=fetch, out=out, fence=fence, wire=wire, feedback=feedback
            )

        if feedback is not None:
            return self._submit(call, offset, _elements(array), **when)
        try:
            request, result, owner, deliver = self._arguments.addition(array, offset, op, scale, fetch, out, wire)
            if deliver is None:
                return self._dispatcher.later(request, call, result=result, keeps=owner, fence=fence, **when)
        except InvalidArgumentError:
            pass  # the call below raises the error
        return self._submit(call, offset, _elements(array), **when)

    def _submit(
        self,
        call: Callable[[], Result],
        offset: int | None,
        count: int | None,
        *,
        changes: bool = True,
        priority: int = 0,
        window: Window | None = None,
    ) -> Future[Result]:
        self._session.check_open()
        try:
            start, elements = self._arguments.range(0 if offset is None else offset, count, "")
        except InvalidArgumentError:
            start = elements = 0  # the call raises the error, and changes nothing
        return self._session.calls.submit(
            call, self._dispatcher.turns, start, start + elements, changes=changes, priority=priority, window=window
        )

    def _renamed(self, name: str) -> None:
        """Store the name that this client has given the buffer, for messages. Makes no request."""
        self._arguments.info = replace(self._arguments.info, name=name)

    def _operands(self, call: str, *others: Buffer) -> tuple[Dispatcher, ...]:
        for each in others:
            if not isinstance(each, Buffer) or each._session is not self._session:
                raise InvalidArgumentError(
                    f"{self._arguments.asked(call)}: the other buffer must be one opened by the same client, not "
                    f"{each!r}"
                )
        return tuple(each._dispatcher for each in others)

    def _check_feedback(self, feedback: ErrorFeedback, op: str, call: str) -> None:
        if op != "sum" or not isinstance(feedback, ErrorFeedback):
            raise InvalidArgumentError(
                f"{self._arguments.asked(call)}: feedback= takes an ErrorFeedback of this buffer, and op='sum'"
            )
        if feedback.buffer.info.id != self.info.id:  # the name may be another buffer's by now
            raise InvalidArgumentError(
                f"{self._arguments.asked(call)}: feedback= belongs to another buffer, which had the name "
                f"{feedback.buffer.name!r}; make an ErrorFeedback of this buffer"
            )

    def _read_slot(self, version: int, offset: int, count: int | None, out: Any, wire: str | None) -> Array | None:
        """Read that version; None if a publisher has begun to overwrite it."""
        number = self._arguments.wire(wire, "read")
        offset, count, result, memory = self._arguments.sink(offset, count, out)
        if not self._versions.read_slot(version, offset, count, memory.pointer, number):
            return None
        if memory.deliver is not None:
            memory.deliver()
        return cast(Array, result)


def _as_made(fence: Lock | None) -> Lock | None:
    """Return the lock of an async call with the token that it has when the call is made."""
    return None if fence is None else cast(Lock, FenceAsMade(fence))


def _elements(array: Any) -> int | None:
    """Return how many elements an array has, if that is known without converting it; else None."""
    size = getattr(array, "size", None)
    if callable(size):  # torch's size is a method
        size = array.numel() if hasattr(array, "numel") else None
    return size if isinstance(size, int) else None
