"""A buffer: one named array over the memory of several servers, read and changed by any number of processes at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np

from smb.arrays import memory as arrays
from smb.arrays.dtypes import DTYPES, SPARSE_WIRE
from smb.buffer_info import BufferInfo
from smb.call.dispatcher import Dispatcher, signed
from smb.call.interrupts import accounted, accounted_later
from smb.call.operands import check_beside, check_step, each_of
from smb.call.optimizer_rules import hyper_of, rule_of
from smb.call.session import FenceAsMade, Session
from smb.call.settling import leave_to_settle, settle
from smb.call.sync_requests import wait_ms
from smb.call.versions import Versions
from smb.engine import (
    NOWHERE,
    SOURCES_MAX,
    AskOpcode,
    EngineError,
    Opcode,
    Request,
    Status,
    Window,
    address_of,
    direct,
    memory_of,
)
from smb.errors import (
    DeadlineError,
    Error,
    InvalidArgumentError,
    NotFoundError,
    TransportError,
)
from smb.feedback import ErrorFeedback, SparseSending
from smb.layout import Layout
from smb.lock import Lock
from smb.pins import PIN_S_MAX, Pin
from smb.rpc import metadata
from smb.tensors import Tensor, TensorTable, tensor_of
from smb.transport.base import Deadline

Array = np.ndarray[Any, np.dtype[Any]]
Result = TypeVar("Result")

# Short, for these are all over.
_READ, _WRITE, _ACCUMULATE = Opcode.READ, Opcode.WRITE, Opcode.ACCUMULATE
_PUBLISH_TTL_S = 10.0
_PUBLISH_WAIT_MAX_S = 86400.0


class Buffer:
    """A named array of `shape` and `dtype` in the memory servers. Made by Client.create and Client.open.

    An acknowledged call counts exactly once, also when connections break and servers are killed and restarted
    meanwhile: within the client's timeout it is finished over a new connection (docs/promises.md).

    Offsets and counts are in elements of the flattened array, and 0 elements are a count like others: such a call
    changes and returns nothing, and asks no server. Every call blocks until all servers involved have answered, at most
    the client's timeout; the servers work at the same time, and the GIL is released (but for what takes no longer than
    handing it over). Calls may come from any thread.

    A call is atomic chunk by chunk (a chunk is `layout.chunk_bytes`, 256 KiB unless the stripe is smaller): an
    accumulate and a write of a chunk happen whole, and a read never sees half of one. Calls that overlap in time are
    otherwise unordered.

    Every call may raise UnavailableError (a server was lost; the message says whether the call was applied),
    TimeoutError (outcome unknown), NotFoundError (the buffer was deleted) and InvalidArgumentError (nothing was done).
    If the outcome is unknown, settle(error) finds out.

    With fence=lock, a lock taken with this buffer's lock(), a change is made only if that lock is still held:
    LockLostError otherwise, and nothing is changed. Such changes pass through the servers, also on the same host.

    A float32 buffer's elements may travel in fewer bits: wire="bfloat16", "float16", "int8" or "int4", of a call or,
    from create, of all calls that don't say ("exact": as they are). Values are rounded at the client and combined in
    float32 where the memory is. Values are rounded over shared memory too, so that a result does not depend on the
    path. Types bfloat16 and float16 round to nearest, ties to even: the error is at most 2**-8 |x| and 2**-11 |x|
    (float16: at most 2**-25 below 2**-14, and infinity from 65520 on). Type int8 sends blocks of 256 elements, counted
    from the start of each chunk or of the range: s = max|x|/127 and the integers nearest to x/s. The error is at most
    max|x|/254 of the block, and a little more by the rounding of s. A block with an infinity or NaN arrives as NaN.
    Type int4 does so with blocks of 64 and s = max|x|/7: the error is at most max|x|/14. It wants an ErrorFeedback.
    """

    __slots__ = ("__dict__", "__weakref__", "_target")  # `_target` is where direct methods look

    def __init__(self, session: Session, info: BufferInfo) -> None:
        self._session = session
        self._dispatcher = Dispatcher(session, info)
        self._arguments = self._dispatcher.arguments
        self._target = self._dispatcher.target
        self._versions = Versions(self._dispatcher)
        self._table: TensorTable | None = None  # once somebody asks

    # ---- what it is

    @property
    def name(self) -> str:
        """Its name, unique in the cluster; as last heard, where somebody renames it."""
        return self._dispatcher.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape; () for a single element."""
        return self._dispatcher.info.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type (bfloat16 is ml_dtypes')."""
        return self._dispatcher.info.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._arguments.size

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._dispatcher.info.nbytes

    @property
    def versions(self) -> int:
        """Copies: 2 to 16 where a read never mixes what publish() replaces, else 1."""
        return self._dispatcher.info.versions

    @property
    def wire(self) -> str:
        """How its elements travel unless a call says: "exact", "bfloat16", "float16", "int8" or "int4"."""
        return self._dispatcher.info.wire

    @property
    def info(self) -> BufferInfo:
        """The coordinator's description of the buffer, as last heard."""
        return self._dispatcher.info

    @property
    def metadata(self) -> dict[str, Any]:
        """The JSON object that the buffer was created with beside its elements. It never changes. The dict is made anew
        at each look; to change it changes nothing here.
        """
        return metadata.decode(self._dispatcher.info.metadata_json)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The named tensors inside it, in their order; none unless it was created with tensors=."""
        return {name: Tensor(self, name, info) for name, info in self.table.items()}

    def tensor(self, name: str) -> Tensor:
        """Return the named tensor inside it, to be read, written and accumulated by itself. Raises NotFoundError."""
        return tensor_of(self, self.table, name)

    @property
    def table(self) -> TensorTable:
        """Which elements the named tensors are; empty if there are none. Raises Error if it makes no sense."""
        if self._table is None:
            try:
                self._table = TensorTable.from_metadata(self.metadata, self.dtype, self.nbytes)
            except Error as error:
                raise Error(f"buffer {self.name!r}: {error}") from error
        return self._table

    @property
    def layout(self) -> Layout:
        """Which bytes live where."""
        return self._dispatcher.info.layout

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports in use, each once, sorted: ("shm",), ("tcp",) or ("shm", "tcp")."""
        self._dispatcher.paths.ensure(Deadline(self._session.timeout))
        return tuple(sorted({path.transport for path in self._dispatcher.paths.found}))

    def __repr__(self) -> str:
        servers = len({segment.server for segment in self.layout.segments})
        return f"<smb.Buffer {self.name!r} {self.dtype.name}{list(self.shape)} on {servers} server{'s'[: servers > 1]}>"

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
        """Return `count` elements from element `offset`, or all.

        The result is a new array of `dtype`: of the buffer's shape when all is read, else flat. With `out` the bytes go
        straight there and `out` is returned: a contiguous, writable array or CPU tensor of the buffer's dtype and of
        `count` elements. All of a buffer with two or more dimensions goes into one of its shape, or a flat one. With
        `wire` other than "exact" it is what the servers' values are when rounded so.

        Of a buffer with versions it is all of one version: the latest published, or the one given as `version=`.
        NotFoundError if that is overwritten or not published yet, or if none was published yet: with `timeout` only
        after waiting so many seconds for it.
        """
        number = self._arguments.wire(wire, "read")
        offset, count, result, memory = self._sink(offset, count, out)
        if version is not None:
            self._check_version("read", version)
        if timeout != 0.0:
            self._check_versions("read with timeout=")
            self._await_published(version, timeout)
        if self._dispatcher.info.versions == 1:
            itemsize = self._arguments.itemsize
            self._dispatcher.call(Request(_READ, offset * itemsize, count * itemsize, sink=memory.pointer, wire=number))
        elif self._versions.read(offset, count, memory.pointer, number, version) == 0:
            raise self._nothing_yet("read")
        if memory.deliver is not None:
            memory.deliver()
        return cast(Array, result)

    def read_version(self, out: Any, *, wire: str | None = None) -> int:
        """Read all of a buffer with versions into `out`, as read() does; return the number of the version that it is.
        Raises NotFoundError before the first.
        """
        self._check_versions("read_version")
        number = self._arguments.wire(wire, "read_version")
        memory = self._arguments.writable(out, self.size, "read_version")
        version = self._versions.read(0, self.size, memory.pointer, number)
        if version == 0:
            raise self._nothing_yet("read_version")
        if memory.deliver is not None:
            memory.deliver()
        return version

    @direct(_WRITE)
    @accounted
    def write(
        self, array: Any, offset: int | None = None, *, fence: Lock | None = None, wire: str | None = None
    ) -> None:
        """Replace all elements by the array's, or with `offset` those from there on, rounded as `wire` says.

        An array of two or more dimensions has the buffer's shape. Without `offset` the array has as many elements as
        the buffer; with it a flat array has any number that fits. Anything else is an InvalidArgumentError: as flat
        elements the rows of another shape would lie elsewhere. If two writes overlap, the last one wins, element by
        element.
        """
        number = self._arguments.wire(wire, "write")
        pointer, offset, count, _owner = self._arguments.source(array, offset, "write")
        itemsize = self._arguments.itemsize
        self._dispatcher.call(Request(_WRITE, offset * itemsize, count * itemsize, pointer, wire=number), fence=fence)

    @accounted
    def fill(self, value: float, *, fence: Lock | None = None) -> None:
        """Set every element to `value` (converted to the buffer's dtype)."""
        element = arrays.scalar(value, self._arguments.dtype)
        if element is None:
            raise InvalidArgumentError(f"{self._arguments.asked('fill')}: {value!r} is no {self._arguments.dtype.name}")
        argument = int.from_bytes(element.tobytes(), "little")
        self._dispatcher.call(Request(Opcode.FILL, 0, self.nbytes, argument=argument), fence=fence)

    def view(self) -> Array:
        """Return the buffer's own memory as one array of its shape: no copy, same host only.

        Reads and writes through the view are not ordered against other processes. No more is atomic than one element:
        what calls of others store there is always whole (over RDMA as the card does it). A call on the buffer
        may get a part of its view as its array or as out=. Such a call works on a copy of that part. The stripes of
        several servers are mapped side by side, so the view is contiguous; it stays valid until it is garbage
        collected; once the buffer is deleted it holds zeros. Raises TransportError if a segment is not on this host,
        or not reached over shm.
        """
        if self.info.movable:
            raise InvalidArgumentError(
                f"{self._arguments.asked('view')}: it has two copies (replicas=2), or has moved from one server to "
                f"another, so its servers alone change it, and it has no view; use read()"
            )
        if self._dispatcher.info.versions > 1:
            raise InvalidArgumentError(f"{self._arguments.asked('view')}: it keeps several versions; use read()")
        handle = self._dispatcher.paths.ensure(Deadline(self._session.timeout))
        for segment, path in zip(self.layout.segments, self._dispatcher.paths.found, strict=True):
            if path.segment is None:
                raise TransportError(
                    f"{self._arguments.asked('view')}: its part on server {segment.server} is reached over "
                    f"{path.transport} ({path.why}), and a view needs shared memory; use read()"
                )
        try:
            address, nbytes = handle.map()
        except EngineError as error:
            if error.status is Status.BUSY:
                raise InvalidArgumentError(
                    f"{self._arguments.asked('view')}: its server is or was being drained, so it may move; use read()"
                ) from error
            raise TransportError(
                f"{self._arguments.asked('view')}: the memory can't be mapped: {error}; use read()"
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
        """Combine all elements with the array's, or with `offset` those from there on, where the memory is. Atomic per
        chunk. Which arrays fit is as for write().

        With b the buffer's element, a the array's and s = scale, each step rounded to the dtype as numpy does: "sum" b
        + s*a; "min" minimum(b, s*a); "max" maximum(b, s*a); "prod" b * (s*a); "replace" s*a; "elastic" b + s*(a - b)
        (the master's half of elastic averaging, Zhang et al. 2015). Integers wrap around, and their scale is an
        integer.

        With fetch=True the new values come back in the same round trip, in the array's shape; they contain this
        contribution and may contain later ones of others (after a lost connection they are read anew: at least as new
        as this contribution). With `out`, as read() takes it, they go straight there and `out` is returned; it shares
        no memory with the array. Otherwise None is returned.

        With `wire` the array is rounded before it is scaled and combined; the values that fetch=True brings back are
        exact. With op="sum" and feedback=, an ErrorFeedback of this buffer, the array is scaled first. The rounding
        error is kept and added to the next call's array: ErrorFeedback says exactly how.
        """
        if feedback is None:
            request, result, _owner, deliver = self._addition(array, offset, op, scale, fetch, out, wire)
            self._dispatcher.call(request, fence=fence)
            if deliver is not None:
                deliver()
            return cast("Array | None", result)
        number = self._arguments.op(op, scale, "accumulate")
        wires = self._arguments.wire(wire, "accumulate")
        self._check_feedback(feedback, op, "accumulate")
        owner = self._arguments.readable(array, "accumulate")
        offset, count = self._arguments.part(owner.shape, owner.count, offset, "accumulate")
        result, sink, deliver = self._fetched(owner.shape, count, fetch, out)
        start, nbytes = offset * self._arguments.itemsize, count * self._arguments.itemsize
        if count == 0:
            self._dispatcher.call(Request(_ACCUMULATE, start, nbytes, sink=sink, op=number), fence=fence)
            return cast("Array | None", result)
        # Before the lock: an earlier async call with this residual takes that, too.
        deadline = Deadline(self._session.timeout)
        self._dispatcher.wait_turn(Request(_ACCUMULATE, start, nbytes), deadline)
        with feedback.lock:
            sending = feedback.take(arrays.as_float32(owner), offset, scale, wires)
            request = Request(_ACCUMULATE, start, nbytes, memory_of(sending.values), sink, op=number, wire=wires)
            try:
                self._dispatcher.call(request, fence=fence, deadline=deadline, in_turn=True)
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
        op: str = "sum",
        scale: float = 1.0,
        fence: Lock | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        """As accumulate, of some elements: those of the flattened buffer at `indices`, combined with `values`.

        `indices` are int64, strictly ascending; `values` are as many, of the buffer's dtype, and travel exact: 4 bytes
        more each. Atomic per chunk, unless a chunk has more than 1 MiB of them. All other elements stay as they are.
        With feedback=, `values` are of its top_k(): if they are not applied, or settle() finds some of them not to be,
        they go back into the residual. Arguments that are refused (InvalidArgumentError) leave the residual alone.
        """
        asked = self._arguments.asked("accumulate_sparse")
        try:
            positions = arrays.readable(indices, DTYPES["int64"])
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{asked}: indices: {error}; pass int64") from error.__cause__
        where, memory = (
            arrays.as_flat(positions, DTYPES["int64"]),
            self._arguments.readable(values, "accumulate_sparse"),
        )
        if feedback is not None:
            self._check_feedback(feedback, op, "accumulate_sparse")
            if scale != 1.0:
                raise InvalidArgumentError(f"{asked}: scale={scale!r} with feedback=: give it to top_k, which scales")
        number = self._arguments.op(op, scale, "accumulate_sparse")
        if len(positions.shape) != 1 or len(memory.shape) > 1 or where.size != memory.count:
            raise InvalidArgumentError(
                f"{asked}: int64{list(positions.shape)} indices for values of shape {memory.shape}; pass flat ones"
            )
        first, count = (int(where[0]), int(where[-1]) - int(where[0]) + 1) if where.size else (0, 0)
        if first < 0 or first + count > self.size or not (where[1:] > where[:-1]).all():
            raise InvalidArgumentError(f"{asked}: indices must ascend strictly, from 0 to {self.size - 1}")
        itemsize = self._arguments.itemsize
        request = Request(
            _ACCUMULATE, first * itemsize, count * itemsize, memory.pointer, op=number, scale=scale, wire=SPARSE_WIRE,
            indices=where,
        )  # fmt: skip
        try:
            self._dispatcher.call(request, fence=fence)
        except BaseException as error:
            if feedback is not None and not isinstance(error, InvalidArgumentError):
                taken = SparseSending(feedback, where, arrays.as_float32(memory).copy())
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
        """As accumulate, with another buffer as the array: the servers combine the two, no bytes travel.

        `other` has the same placement: create one of the two with like= the other. Of both, the `count` elements from
        `offset` on (default: all that follow). A buffer with two copies (replicas=2) moves between servers: where the
        two lie apart the client reads `other`, at most 32 MiB of each at a time, and sends that along.

        With `wire` other than "exact" the values of `other` are rounded first: to those that
        other.read(offset, count, wire=wire) brings.

        With op="replace" `other` may be 2 to 5 buffers. The elements become the sum of each one's times its scale. They
        are added in their order, each step rounded to the dtype. `scale` and `wire` are one for all, or one for each.
        This buffer may be among them. Each chunk changes once, as a whole. As with write(), changes of others between
        the reading of a chunk and its change are lost: hold a lock where there may be any.
        """
        asked = self._arguments.asked("accumulate_from")
        others = tuple(other) if isinstance(other, Sequence) else (other,)
        scales, wires = each_of(scale, len(others)), each_of(wire, len(others))
        if not len(scales) == len(wires) == len(others):
            raise InvalidArgumentError(
                f"{asked}: {len(others)} buffers with {len(scales)} scales and {len(wires)} wires; give one for each "
                f"buffer, or one for all"
            )
        offset, count = self._arguments.range(offset, count, "accumulate_from")
        numbers = [
            self._arguments.op("sum" if index else op, each, "accumulate_from") for index, each in enumerate(scales)
        ]
        if len(others) != 1 and (op != "replace" or not 2 <= len(others) <= SOURCES_MAX):
            raise InvalidArgumentError(
                f"{asked}: op='replace' sums 2 to {SOURCES_MAX} buffers, and asked is op={op!r} of {len(others)}"
            )
        encodings = [self._arguments.wire(each, "accumulate_from") for each in wires]
        dispatchers = self._operands("accumulate_from", *others)
        for each in others:
            check_beside(asked, self, each)
            if each.info.versions > 1:
                raise InvalidArgumentError(f"{asked}: {each!r} keeps several versions; read() it and accumulate")
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
        """Do an optimizer's step where the memory is: this buffer, the weights, and `state` change, no bytes travel.
        Of each, the `count` elements from `offset` on (default: all that follow).

        All are float32 and have the same placement: create the gradient with like= the weights, and `state` with
        state_of= them. `state` starts as zeros, and is the optimizer's from then on. With b an element of the weights,
        g of the gradient, g' = scale*g + weight_decay*b (scale=1, weight_decay=0; a decay of 0 is no term), each step
        rounded to float32, from left to right:

        "sgd" (lr): b - lr*g'.
        "momentum" (lr, mu; state m): m = mu*m + g', then b - lr*m. "nesterov": the same m, then b - lr*(g' + mu*m).
        "adam" (lr, step, beta1=0.9, beta2=0.999, eps=1e-8; state m, v): m = beta1*m + (1 - beta1)*g', v = beta2*v +
        (1 - beta2)*(g'*g'), then b - (lr/(1 - beta1**step)) * (m / (sqrt(v)*(1/sqrt(1 - beta2**step)) + eps)); `step`
        is 1 in the first call.
        "adamw": as adam with g' = scale*g, after b is multiplied by 1 - lr*weight_decay (weight_decay=0.01).
        "elastic" (alpha): b + alpha*(g - b).

        Numbers without an element in them are computed in float64 and rounded once. These are torch.optim's rules (with
        dampening=0): Kingma and Ba 2015 for Adam, Loshchilov and Hutter 2019 for the decoupled decay, Zhang et al. 2015
        for elastic.

        Weights with two copies (replicas=2) take a state that was created with state_of= them: it has two copies, too,
        and moves together with them. A gradient that lies apart from the weights is brought, as by accumulate_from.

        The servers do it, on the same host too: a chunk of weights and state changes as one, and once, also if a
        server is killed in the middle. Blocks, and raises, as accumulate_from does.
        """
        asked = self._arguments.asked("apply")
        known = rule_of(rule, asked)
        numbers = hyper_of(known, hyper, asked)
        if len(state) != len(known.states):
            wanted = f"{len(known.states)} ({', '.join(known.states)})" if known.states else "none"
            raise InvalidArgumentError(f"{asked}: rule {rule!r} has {wanted} as its state, but {len(state)} were given")
        if self._arguments.dtype.name != "float32":
            raise InvalidArgumentError(f"{asked}: it is {self._arguments.dtype.name}; rules are for float32 buffers")
        if not self._dispatcher.unversioned:
            raise InvalidArgumentError(f"{asked}: it keeps several versions (versions); use others")
        others = self._operands("apply", gradient, *state)
        check_step(asked, known, self, gradient, state)
        offset, count = self._arguments.range(offset, count, "apply")
        itemsize = self._arguments.itemsize
        request = Request(Opcode.APPLY, offset * itemsize, count * itemsize, op=known.number, hyper=numbers)
        self._dispatcher.call(request, fence=fence, others=others)

    @direct(Opcode.FETCH_ADD)
    @accounted
    def fetch_add(self, index: int, value: int) -> int:
        """Add `value` to element `index` of an int64 buffer and return what it was before. Atomic; wraps around."""
        index, value = self._arguments.counter("fetch_add", index, value)
        return signed(self._dispatcher.call(Request(Opcode.FETCH_ADD, 8 * index, 8, argument=value & _MASK)))

    @direct(Opcode.COMPARE_SWAP)
    @accounted
    def compare_swap(self, index: int, expected: int, new: int) -> int:
        """Set element `index` of an int64 buffer to `new` if it is `expected`; return what it was before. Atomic.

        It was done if and only if the result equals `expected`.
        """
        index, expected, new = self._arguments.counter("compare_swap", index, expected, new)
        request = Request(Opcode.COMPARE_SWAP, 8 * index, 8, argument=new & _MASK, expected=expected & _MASK)
        return signed(self._dispatcher.call(request))

    # ---- locks and versions

    def lock(self, *, ttl: float = 10.0, timeout: float | None = None) -> Lock:
        """Return this buffer's lock, not taken yet: `with buffer.lock() as lock: buffer.write(x, fence=lock)`.

        As Client.lock; and its changes with fence= are refused once it is lost. It keeps nobody from changing the
        buffer without it.
        """
        return Lock(self._dispatcher.paths.homes(), self._session.renewals, ttl, timeout, self._dispatcher)

    @property
    def version(self) -> int:
        """The version published last, 0 before the first. Asks the home server, unless it is on this host."""
        return self._versions.find()[0]

    def pin(self, version: int | None = None, *, ttl: float = 5.0) -> Pin:
        """Hold a version of a buffer with versions, by default the one published last, to read it piece by piece: `with
        buffer.pin() as pin: pin.read(...)`. Publishers wait for it where they have no other copy, `ttl` seconds (at
        most 30) and no longer. See Pin. Entering raises NotFoundError if that version is not there, or none is yet.
        """
        self._check_versions("pin")
        if version is not None:
            self._check_version("pin", version)
        return Pin(self.name, self._dispatcher.paths.homes()[0], self._read_slot, ttl, version)

    def publish(
        self, array: Any, *, timeout: float | None = None, ttl: float | None = None, readers: float | None = None
    ) -> int:
        """Replace all elements by the array's and return the new version's number; wakes those who wait for it.

        `array` is as for write() without `offset`. With versions=2 or more readers see the new version at once and as a
        whole, and until then the old one; a publisher that dies in the middle leaves the old one. It writes over the
        oldest version that no reader has pinned. With versions=1 it is write() and a number. Publishers take turns.
        Blocks while another one is at it, and while readers have all copies but the latest pinned: for `timeout`
        seconds (default: the client's), then TimeoutError, and nothing was done, if the server answered. Readers delay
        it by `readers` seconds at most (default: a second less than `timeout`, at least 30), counted from when the
        first publisher had to wait for them: then it goes on, and they read the next version. A pin whose reader makes
        no progress lasts 30 s. The array travels exact, whatever the wire is.

        A publisher that is killed in the middle keeps the next one waiting for `ttl` seconds (default: 10, or the
        client's timeout if that is longer). One that itself takes longer gets LockLostError, and has published nothing.
        """
        memory = self._arguments.readable(array, "publish")
        self._arguments.part(memory.shape, memory.count, None, "publish")
        if not self._dispatcher.turns.quiet.open:
            self._dispatcher.wait_turn(Request(_WRITE, 0, self.nbytes), Deadline(self._session.timeout))
        asked = self._arguments.asked("publish")
        timeout = self._session.timeout if timeout is None else timeout
        if not 0 <= timeout <= _PUBLISH_WAIT_MAX_S:  # NaN is neither
            raise InvalidArgumentError(f"{asked}: timeout={timeout!r} is not between 0 and {_PUBLISH_WAIT_MAX_S:g} s")
        if ttl is None:
            ttl = max(self._session.timeout, _PUBLISH_TTL_S)  # all below ends within the client's timeouts
        if readers is None:
            readers = max(PIN_S_MAX, timeout - 1.0)
        if not 0.001 <= readers <= _PUBLISH_WAIT_MAX_S:
            raise InvalidArgumentError(
                f"{asked}: readers={readers!r} is not between 0.001 and {_PUBLISH_WAIT_MAX_S:g} s"
            )
        if not 0.001 <= ttl <= _PUBLISH_WAIT_MAX_S:
            raise InvalidArgumentError(f"{asked}: ttl={ttl!r} is not between 0.001 and {_PUBLISH_WAIT_MAX_S:g} s")
        if self.info.mirror_of:
            raise InvalidArgumentError(f"{asked}: it is a mirror; publish to {self.info.mirror_of!r}")
        return self._versions.publish(memory.pointer, timeout, ttl, readers)

    def wait(self, version: int, *, timeout: float | None = None) -> int:
        """Wait until `version` or a later one is published; return the latest. TimeoutError after `timeout` seconds."""
        asked = self._arguments.asked(f"wait for version {version}")
        if not 0 <= operator.index(version) < 2**63 or (timeout is not None and timeout < 0):
            raise InvalidArgumentError(f"{asked}: version and timeout={timeout!r} must not be negative")
        home = self._dispatcher.paths.homes()[0]
        return home.ask(asked, AskOpcode.AWAIT_VERSION, 0, (version, wait_ms(timeout)), wait=timeout).a

    def settle(self, error: BaseException, *, timeout: float | None = None) -> list[range]:
        """Find out what became of a call of this buffer that raised `error`; see `error.outcome`.

        Returns the ranges of elements, sorted, to which the call was not applied, and never will be: [] means that all
        of it counts, the call's whole range that nothing does (of a read: that it is to be repeated). Do those again,
        and the call counts exactly once. Afterwards error.outcome says what was found. Of a call with feedback= they go
        back into the residual, for the next call to send, and [] is returned: there is nothing to be done again. Blocks
        up to `timeout` seconds (default: the client's) until every server concerned has answered; TimeoutError then,
        and it may be called again. UnavailableError if it can't be known any more, as the server has forgotten this
        session's record, or has lost the memory. InvalidArgumentError if the error is of no call of this object, or of
        one whose arguments were refused: there is nothing to be done again then.
        """
        deadline = Deadline(self._session.timeout if timeout is None else timeout)
        return settle(error, self._session, self._dispatcher, deadline)

    # ---- asynchronously

    def read_async(
        self, offset: int = 0, count: int | None = None, *, out: Any = None, wire: str | None = None
    ) -> Future[Array]:
        """As read, at once: a future of the result (awaitable through asyncio.wrap_future).

        Calls of one client on overlapping elements of a buffer take effect in the order in which they were made: this
        one sees what the async calls before it change, and blocking calls wait for the async ones before them. Calls
        that do not overlap, and reads, run side by side. Calls of other threads, and calls in a future's callback, are
        unordered. Leave `out` alone until the future is done.
        """
        return self._read_later(offset, count, out=out, wire=wire)

    def write_async(
        self, array: Any, offset: int | None = None, *, fence: Lock | None = None, wire: str | None = None
    ) -> Future[None]:
        """As write, at once, in its turn (read_async). Don't change the array until the future is done."""
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
        """As accumulate, at once, in its turn (read_async). Don't change the array until the future is done."""
        return self._accumulate_later(
            array, offset, op=op, scale=scale, fetch=fetch, out=out, fence=fence, wire=wire, feedback=feedback
        )

    @accounted_later
    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run what may change any of this buffer's elements on a thread of the client's, in its turn (read_async).
        Calls inside `call` do not wait for turns.
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
            start, elements, result, memory = self._sink(offset, count, out)
        except InvalidArgumentError:
            return self._submit(call, offset, count, changes=False, **when)  # which says why
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
            request, result, owner, deliver = self._addition(array, offset, op, scale, fetch, out, wire)
            if deliver is None:
                return self._dispatcher.later(request, call, result=result, keeps=owner, fence=fence, **when)
        except InvalidArgumentError:
            pass  # the call itself says why
        return self._submit(call, offset, _elements(array), **when)

    def _addition(
        self, array: Any, offset: int | None, op: str, scale: float, fetch: bool, out: Any, wire: str | None
    ) -> tuple[Request, Any, Any, Callable[[], object] | None]:
        """Return (request, array to return, what keeps the array alive, what to do when it is done)."""
        number = self._arguments.op(op, scale, "accumulate")
        wires = self._arguments.wire(wire, "accumulate")
        pointer, offset, count, owner = self._arguments.source(array, offset, "accumulate")
        result, sink, deliver = self._fetched(owner.shape, count, fetch, out)
        start, nbytes = offset * self._arguments.itemsize, count * self._arguments.itemsize
        if out is not None and abs(address_of(sink) - address_of(pointer)) < nbytes:
            # After a broken connection the answer would be sent in place of the array.
            raise InvalidArgumentError(f"{self._arguments.asked('accumulate')}: out= shares memory with the array")
        request = Request(_ACCUMULATE, start, nbytes, pointer, sink, op=number, scale=scale, wire=wires)
        return request, result, owner, deliver

    def _fetched(
        self, shape: tuple[int, ...], count: int, fetch: bool, out: Any
    ) -> tuple[Any, Any, Callable[[], object] | None]:
        """Return (array to return, its pointer, its `deliver`) for the values that fetch=True brings back."""
        if out is not None and not fetch:
            raise InvalidArgumentError(f"{self._arguments.asked('accumulate')}: out= is for fetch=True")
        if not fetch:
            return None, NOWHERE, None
        result = np.empty(shape, self.dtype) if out is None else out
        memory = self._arguments.writable(result, count, "accumulate")
        return result, memory.pointer, memory.deliver

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
            start = elements = 0  # the call itself says why, and changes nothing
        return self._session.calls.submit(
            call, self._dispatcher.turns, start, start + elements, changes=changes, priority=priority, window=window
        )

    def _renamed(self, name: str) -> None:
        """Take note of the name that this client has given it, for those who are shown it; nobody is asked."""
        self._arguments.info = replace(self._arguments.info, name=name)

    def _operands(self, call: str, *others: Buffer) -> tuple[Dispatcher, ...]:
        for each in others:
            if not isinstance(each, Buffer) or each._session is not self._session:
                raise InvalidArgumentError(
                    f"{self._arguments.asked(call)}: the other must be a buffer opened by the same client, not {each!r}"
                )
        return tuple(each._dispatcher for each in others)

    def _check_feedback(self, feedback: ErrorFeedback, op: str, call: str) -> None:
        if op != "sum" or not isinstance(feedback, ErrorFeedback):
            raise InvalidArgumentError(
                f"{self._arguments.asked(call)}: feedback= takes an ErrorFeedback of this buffer, and op='sum'"
            )
        if feedback.buffer.info.id != self.info.id:  # the name may be another buffer's by now
            raise InvalidArgumentError(
                f"{self._arguments.asked(call)}: feedback= is of another buffer, which had the name "
                f"{feedback.buffer.name!r}; make an ErrorFeedback of this buffer"
            )

    def _check_versions(self, call: str) -> None:
        if self._dispatcher.info.versions == 1:
            raise InvalidArgumentError(
                f"{self._arguments.asked(call)}: it keeps one version; create it with versions=2"
            )

    def _check_version(self, call: str, version: int) -> None:
        self._check_versions(call)
        if not 0 <= operator.index(version) < 2**56:
            raise InvalidArgumentError(f"{self._arguments.asked(call)}: there is no version {version}")

    def _nothing_yet(self, call: str) -> NotFoundError:
        return NotFoundError(
            f"{self._arguments.asked(call)}: nothing was published yet; wait(1) waits for the first version, "
            f"and so does read(timeout=)"
        )

    def _await_published(self, version: int | None, timeout: float) -> None:
        """Wait until there is a version, or the one that is wanted; not longer: the read says that it is not there."""
        with suppress(DeadlineError):
            self.wait(max(1, version or 1), timeout=timeout)

    def _sink(self, offset: int, count: int | None, out: Any) -> tuple[int, int, Any, arrays.Memory]:
        """Return (offset, count, array to return, its memory) of a read."""
        whole = offset == 0 and count is None
        offset, count = self._arguments.range(offset, self.size if whole else count, "read")
        result = np.empty(self.shape if whole else (count,), self.dtype) if out is None else out
        return offset, count, result, self._arguments.writable(result, count, "read")

    def _read_slot(self, version: int, offset: int, count: int | None, out: Any, wire: str | None) -> Array | None:
        """Read that version; None if a publisher has begun to overwrite it."""
        number = self._arguments.wire(wire, "read")
        offset, count, result, memory = self._sink(offset, count, out)
        if not self._versions.read_slot(version, offset, count, memory.pointer, number):
            return None
        if memory.deliver is not None:
            memory.deliver()
        return cast(Array, result)


_MASK = 2**64 - 1


def _as_made(fence: Lock | None) -> Lock | None:
    """Return the lock of an async call as it is now, when the call is made."""
    return None if fence is None else cast(Lock, FenceAsMade(fence))


def _elements(array: Any) -> int | None:
    """Return how many elements an array has, if that is known without converting it; else None."""
    size = getattr(array, "size", None)
    if callable(size):  # torch's
        size = array.numel() if hasattr(array, "numel") else None
    return size if isinstance(size, int) else None
