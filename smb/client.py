"""A process's membership in a cluster: its session, its links, the buffers it opens."""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import numbers
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from smb.arrays.dtypes import WIRES, dtype_of
from smb.arrays.memory import whole_pages
from smb.buffer import Buffer
from smb.buffer_info import BufferInfo, check_replicas
from smb.call.cluster_session import REPLACED, ClusterSession
from smb.call.sync_requests import SESSION_ENDED, Home, wait_ms
from smb.call.turns import Turns
from smb.config import log
from smb.config.limits import VERSIONS_MAX
from smb.config.parse import parse_addresses, parse_bytes
from smb.config.pickling import refuse_pickle
from smb.config.settings import DEFAULT_COORDINATOR, switch_of, text_of, variables_of
from smb.config.transports import check_choice
from smb.engine import AskOpcode
from smb.errors import (
    AlreadyExistsError,
    Error,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    TransportError,
    UnavailableError,
)
from smb.html_tables import BufferList, ServerList, described
from smb.lock import Lock, check_times
from smb.published import MIRROR, beside, state_of
from smb.queue import Queue
from smb.rpc import control_pb2 as pb
from smb.rpc.metadata import JSON, encode
from smb.security.credentials import Credentials, find
from smb.server_info import QuarantinedInfo, ServerInfo
from smb.spi import note_name
from smb.tensors import METADATA_KEY, TensorTable
from smb.transport.base import SegmentLocation
from smb.transport.choose import MakesRdma, rdma_with

if TYPE_CHECKING:
    from smb.daemon.process import Pages

Result = TypeVar("Result")

_CLOSE_S = 1.0
_FIND_S = 2.0  # limit of the search for a lock's server: it does not delay a caller with a short timeout for longer
_NAME_MAX = 64
_TIMEOUT_MAX_S = 10**6  # eleven days; in milliseconds this still fits into the engine's 32 bits

_log = logging.getLogger("smb")


def connect(
    address: str | None = None,
    *,
    name: str | None = None,
    transport: str = "auto",
    timeout: float = 10.0,
    checksum: bool | None = None,
    credentials: str | Path | None = None,
) -> Client:
    """Join a cluster and return the client. Use it as a context manager, or call close().

    ```python
    with smb.connect("127.0.0.1:7070", name="trainer") as client:
        print([buffer.name for buffer in client.list()])
    ```

    A client that is still open when the interpreter exits is closed then. Arguments that are left out come from the
    environment, else from the file that $SMB_CONFIG names.

    - `address` is the coordinator's "host:port", or "host:port,host:port" if several stand by for each other. Default:
      $SMB_COORDINATOR, else 127.0.0.1:7070, where `smb up` listens.
    - `name` is shown before the host and process id on the dashboard, in `smb top` and in messages.
    - `transport` is "auto", "shm", "verbs" (RDMA) or "tcp"; $SMB_TRANSPORT overrides it. "auto" uses shared memory if
      the segment's server runs on this host, else RDMA if both ends have a device, else TCP.
    - `timeout`, in seconds, bounds this call and each later call.
    - `checksum=True` sends a CRC-32C with every frame, in both directions. A damaged frame breaks its connection, is
      sent again and counts once. Shared memory needs no checksum. Default: $SMB_CHECKSUM, else the coordinator's
      setting.
    - `credentials` is a directory with ca.pem, cert.pem and key.pem, as `smb certs` makes them. Default:
      $SMB_CREDENTIALS, or the files in $SMB_TLS_CA, $SMB_TLS_CERT and $SMB_TLS_KEY. Without credentials only clusters
      that ask for none accept the client.

    Raises UnavailableError if no coordinator answers, PermissionDeniedError if the certificate's role may not join, and
    InvalidArgumentError.
    """
    log.start()
    address = address or text_of("cluster.coordinator") or DEFAULT_COORDINATOR
    parse_addresses(address)
    if name is not None and not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= _NAME_MAX):
        raise InvalidArgumentError(f"connect: name must have 1 to {_NAME_MAX} printable characters, not {name!r}")
    if not isinstance(timeout, numbers.Real) or not 0 < timeout <= _TIMEOUT_MAX_S:
        raise InvalidArgumentError(
            f"connect: timeout must be a number of seconds above 0 and at most {_TIMEOUT_MAX_S}, not {timeout!r}"
        )
    checksum = switch_of("client.checksum") if checksum is None else bool(checksum)
    choice = check_choice(text_of("client.transport") or transport)
    make_rdma = rdma_with(variables_of("verbs"))
    client = Client(address, choice, timeout, checksum, find(credentials), make_rdma, name=name)
    metrics = text_of("client.client_metrics")
    if metrics:
        client.serve_metrics(metrics)
    return client


class Client:
    """A process's membership in a cluster. Made by smb.connect. Thread-safe; a child process after fork cannot use it.

    Each call blocks for at most `timeout` seconds unless it says otherwise. It raises UnavailableError if the
    coordinator or a memory server cannot be reached, TimeoutError if the time is over, PermissionDeniedError if the
    credentials do not allow the call, and InvalidArgumentError for arguments that make no sense.
    """

    def __init__(
        self,
        address: str,
        transport: str,
        timeout: float,
        checksum: bool | None,
        credentials: Credentials | None,
        make_rdma: MakesRdma,
        name: str | None = None,
    ) -> None:
        self.pages: Pages | None = None  # set by serve_metrics
        self._join = functools.partial(
            ClusterSession, address, transport, timeout, checksum, credentials, make_rdma, name
        )
        self._session = self._join()
        self._coordinator = self._session.coordinator
        self._buffers: weakref.WeakSet[Buffer] = weakref.WeakSet()  # those that this client has opened
        self._lock = threading.Lock()
        self._reconnecting = threading.Lock()
        self._homes: dict[tuple[pb.Kind, str], Home] = {}
        self._copies: dict[str, int] = {}  # number of copies of locks, if more than one was asked for

    @property
    def name(self) -> str:
        """The cluster's name for this client: "host:pid", after the name that connect() was given."""
        return self._session.name

    @property
    def address(self) -> str:
        """The coordinator's "host:port"."""
        return self._coordinator.address

    @property
    def timeout(self) -> float:
        """Seconds that each call may take."""
        return self._session.timeout

    # ---- buffers

    def create(
        self,
        name: str,
        shape: int | Sequence[int] | None = None,
        dtype: Any = None,
        *,
        servers: int | Sequence[str] | None = None,
        stripe: int | str | None = None,
        replicas: int | None = None,
        versions: int = 1,
        like: Buffer | str | None = None,
        state_of: Buffer | str | None = None,
        exist_ok: bool = False,
        wire: str | None = None,
        metadata: Mapping[str, JSON] | None = None,
        tensors: Mapping[str, Any] | None = None,
    ) -> Buffer:
        """Create a buffer of zeros and return it. Blocks until all servers have its memory.

        ```python
        weights = client.create("weights", (1000, 1000), dtype="float32", servers=2)
        moments = client.create("moments", like=weights)
        ```

        - `shape` is a tuple of extents, or one number. () is a single element. An extent of 0 makes a buffer without
          elements, which takes the memory of one.
        - `dtype` is float16, float32 (default), float64, bfloat16, int32, int64 or uint8. For storage it may also be
          int8, int16, uint16, uint32, uint64, complex64, bool, float8_e4m3fn or float8_e5m2: accumulate takes
          op="replace" alone there, and for whole numbers and bool also "band", "bor" and "bxor".
        - `servers` is the number of servers (default: as many as pay off), or their names.
        - `stripe` is the number of bytes ("256KiB") on one server before the next server follows: a multiple of 4096.
          Default: 256 KiB, and 1 MiB for buffers over 8 GiB.
        - `like=` takes shape, dtype, servers and stripe from another buffer, so that servers can combine the two.
          Replicas and wire come from it, too, unless they are given. Metadata does not.
        - `exist_ok=True` opens an existing buffer of the same shape and dtype instead. It keeps its own metadata.
        - `versions=K` (1 to 16) makes K slots, so that a read never mixes two publications. The buffer changes only by
          publish() and takes K times the memory. K - 1 versions can be read. With 2, a reader that holds a version
          delays the publication after the next one; with 3, one reader delays none.
        - `replicas=2` keeps a copy of each segment on another server. Any one server and its memory may be lost without
          the loss of an acknowledged change. It takes twice the memory, and each change takes one more round trip.
          Everything goes through the servers, also on the same host, so the buffer has no view().
        - `state_of=weights` creates the state of an optimizer for weights.apply(): as like=, with the weights'
          replicas. With two copies it moves together with the weights, so that a step is in both or in neither.
        - `wire` is how elements travel if a call does not say: "exact" (default), or for float32 an encoding of Buffer.
        - `metadata` is a JSON object, at most 4 MiB as text (1 MiB after zlib). It never changes; every client reads it
          as Buffer.metadata.
        - `tensors`, instead of shape and dtype, makes a flat buffer for named tensors: a mapping of names to pairs
          (shape, dtype), or to arrays and torch tensors, of which only these two are used. Buffer.tensor(name) returns
          one of them at every client. If all have one of the dtypes above, the buffer has it, too. Otherwise it is
          uint8, and cannot be added to.

        Raises AlreadyExistsError, OutOfMemoryError (which says what is free where), UnavailableError (no server) and
        InvalidArgumentError; nothing is left behind then. If the coordinator was lost and somebody renamed the buffer
        before the answer came, the buffer returned has that name. If somebody deleted it, NotFoundError has the outcome
        "applied".
        """
        _check_name("create", name)
        check_replicas(f"create {name!r}", replicas)
        if not isinstance(versions, int) or not 1 <= versions <= VERSIONS_MAX:
            raise InvalidArgumentError(
                f"create {name!r}: versions must be an integer from 1 to {VERSIONS_MAX}, not {versions!r}"
            )
        if state_of is not None:
            _check_state(name, like, tensors, versions)
            like = state_of
        table = _table(name, tensors, shape, dtype, like) if tensors is not None else None
        if table is not None:
            shape, dtype = table.size, table.dtype
            metadata = _with_table(name, metadata, table)
        if shape is None and like is None:
            raise InvalidArgumentError(f"create {name!r}: pass shape=, or like= another buffer")
        model = (like if isinstance(like, Buffer) else self.open(like)) if like is not None else None
        if state_of is not None and model is not None:
            replicas = _copies_of(name, model, replicas)
        elif replicas is None and model is not None:
            replicas = model.info.replicas
        extents = _extents(name, shape) if shape is not None else model.shape if model is not None else ()
        if replicas == 2 and self._session.transport not in ("auto", "tcp"):
            raise InvalidArgumentError(
                f"create {name!r}: a buffer with two copies is reached over TCP or its servers' Unix sockets, not over "
                f"{self._session.transport}; connect with transport='auto', or pass replicas=1"
            )
        element = dtype_of(dtype if dtype is not None else model.dtype if model is not None else "float32")
        if model is not None and (extents != model.shape or element.numpy != model.dtype):
            raise InvalidArgumentError(
                f"create {name!r}: {element.name}{list(extents)} differs from {model!r} in like=; leave out shape and "
                "dtype"
            )
        if wire is not None and wire not in WIRES:
            raise InvalidArgumentError(f"create {name!r}: unknown wire {wire!r}; known are {', '.join(WIRES)}")
        request = pb.CreateBufferRequest(
            name=name,
            shape=extents,
            dtype=element.name,
            stripe_bytes=parse_bytes(stripe) if stripe is not None else 0,
            replicas=replicas or 1,
            versions=versions,
            like=model.name if model is not None else "",
            model_id=model.info.id if model is not None else 0,
            joins=state_of is not None,
            exist_ok=exist_ok,
            wire=wire or "",
            packed_metadata=encode(f"create {name!r}", metadata) if metadata is not None else b"",
        )
        if stripe is not None and request.stripe_bytes == 0:
            raise InvalidArgumentError(
                f"create {name!r}: stripe must be a multiple of 4096 bytes, at least 4096, not {stripe!r}"
            )
        if isinstance(servers, (str, Iterable)):
            request.server_names.extend(_server_names(name, servers))
        elif servers is not None:
            request.server_count = _server_count(name, servers)
        self._session.check_open()
        try:
            buffer = self._opened(self._coordinator.create_buffer(request, self.timeout))
        except AlreadyExistsError:
            # An error about tensors says more than one about bytes. If the buffer was deleted in the meantime, open()
            # says that.
            if table is not None and exist_ok and (existing := self.open(name)).table:
                _check_tensors(name, table, existing)
            raise
        if table is not None:
            _check_tensors(name, table, buffer)
        if state_of is not None and model is not None:
            _check_together(name, model, buffer)
        return buffer

    def open(self, name: str, *, timeout: float = 0.0) -> Buffer:
        """Return the buffer of that name. With timeout > 0 (seconds) wait until somebody creates it.

        Raises NotFoundError.

        ```python
        buffer = client.open("buffer", timeout=60)
        buffer.shape  # (1000,)
        ```
        """
        self._session.check_open()
        _check_name("open", name)
        if not isinstance(timeout, numbers.Real) or not 0 <= timeout <= _TIMEOUT_MAX_S:
            raise InvalidArgumentError(
                f"open {name!r}: timeout must be a number of seconds from 0 to {_TIMEOUT_MAX_S}, not {timeout!r}"
            )
        return self._opened(self._coordinator.open_buffer(name, timeout, self.timeout))

    def _opened(self, found: pb.Buffer) -> Buffer:
        buffer = Buffer(self._session, BufferInfo.of(found))
        with self._lock:  # reconnect() may be going through them
            self._buffers.add(buffer)
        return buffer

    def list(self) -> builtins.list[BufferInfo]:
        """Return all buffers of the cluster, sorted by name.

        A buffer whose dtype only a newer release knows is listed with its name in `unknown_dtype`; open() refuses it.

        ```python
        for info in client.list():
            print(info.name, info.shape, info.dtype)
        ```
        """
        self._session.check_open()
        infos = [BufferInfo.listed(buffer) for buffer in self._coordinator.list_buffers(self.timeout)]
        return BufferList(sorted(infos, key=lambda info: info.name))

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray[Any, Any]:
        """Return an array of zeros in memory that is fast to send from and receive into. Reuse it for many calls.

        Over RDMA its memory is registered, so the network card moves it without a copy; a child of fork shares it then.
        Otherwise it has pages of its own, large ones if the system has them: up to 13 % faster than an ordinary array
        over TCP, 3 % over shared memory.

        With transport="verbs" raises TransportError if RDMA cannot be used, or so much memory cannot be locked.

        ```python
        array = client.empty(1000)
        buffer.read(out=array)
        ```
        """
        self._session.check_open()
        extents, element = _extents("empty", shape), dtype_of(dtype)
        if self._session.transport in ("auto", "verbs") and 0 not in extents:
            try:
                return self._session.verbs.memory().empty(extents, element.numpy)
            except TransportError as error:
                if self._session.transport == "verbs":
                    raise TransportError(str(error)) from None
                _log.debug("%s", error)
        return whole_pages(extents, element.numpy)

    def delete(self, name: str | Buffer | BufferInfo, *, missing_ok: bool = False) -> None:
        """Delete a buffer. Its name and memory are free at once; clients that still use the buffer get NotFoundError.

        A name deletes the buffer that has this name now. A Buffer, or an item of list(), deletes only that buffer: if
        it was renamed or deleted meanwhile, another buffer of the same name stays. Raises NotFoundError unless
        missing_ok.

        ```python
        client.delete("buffer")
        client.delete("buffer", missing_ok=True)  # there is none now: does nothing
        ```
        """
        self._session.check_open()
        name, known_id = _named("delete", name)
        self._coordinator.delete_buffer(name, missing_ok, self.timeout, known_id)

    def rename(self, name: str | Buffer | BufferInfo, new_name: str, *, replace: bool = False) -> None:
        """Give a buffer another name. Its memory stays in place, and clients that have it open go on.

        A Buffer, or an item of list(), renames only that buffer, as with delete(). With replace=True a buffer of the
        new name is deleted in the same step: open() finds one of the two at any time. Raises NotFoundError, and
        AlreadyExistsError without replace=True.

        ```python
        client.rename("buffer", "weights")
        client.open("weights").shape  # (1000,)
        ```
        """
        self._rename(name, new_name, replace=replace)

    def rename_folder(self, folder: str, new_folder: str) -> None:
        """Rename all buffers FOLDER/x to NEW_FOLDER/x in one step.

        Raises NotFoundError if there are none, and AlreadyExistsError if a buffer at the new place exists.

        ```python
        client.create("run1/weights", 1000)
        client.rename_folder("run1", "run2")
        client.open("run2/weights").name  # 'run2/weights'
        ```
        """
        self._rename(folder, new_folder, folder=True)

    def displace(self, name: str | Buffer | BufferInfo, new_name: str, displaced_name: str) -> None:
        """Rename as with replace=True, but keep the buffer that had the new name, as `displaced_name`, in the same
        step.

        ```python
        client.displace("other", "buffer", "former")
        client.open("buffer")  # the buffer that was "other"
        client.open("former")  # the buffer that was "buffer"
        ```
        """
        self._rename(name, new_name, replace=True, displaced_name=displaced_name)

    def _rename(self, buffer: str | Buffer | BufferInfo, new_name: str, **how: Any) -> None:
        self._session.check_open()
        name, known_id = _named("rename", buffer)
        _check_name("rename", new_name)
        request = pb.RenameBufferRequest(name=name, new_name=new_name, id=known_id, **how)
        self._coordinator.rename_buffer(request, self.timeout)
        if isinstance(buffer, Buffer):
            note_name(buffer, new_name)

    def relay(self, name: str, to: Iterable[str] | str = "auto") -> builtins.list[str]:
        """Mirror a published buffer on these memory servers, and return the names of all servers that have a mirror
        now.

        `to` is a list of names, or "auto": every server that is alive, is not being drained, and has no part of the
        buffer. Each server's relay fills its mirror from the buffer and from other mirrors, so that a byte crosses a
        link once. Readers that follow the buffer read from a mirror near them. A mirror takes as much memory as the
        buffer. Servers that have a mirror keep it; a mirror is made anew if its server came back without its memory.

        If the buffer was published with deltas=, its log is mirrored, too, except on servers that have a part of the
        log. The log takes one and a half times the memory of one state.

        Raises NotFoundError, InvalidArgumentError if the buffer has no versions (versions=2 or more), and
        OutOfMemoryError if a server has no room. After an error no mirror was added.

        ```python
        client.relay("published", to="auto")  # for example ['server-1']
        ```
        """
        source = self.open(name)
        with contextlib.suppress(NotFoundError, PermissionDeniedError):
            if (state := state_of(name)) and name in beside(self.open(state)):
                raise InvalidArgumentError(
                    f"relay of {name!r}: this buffer belongs to the published state {state!r}; mirror that state"
                )
        if to == "auto":
            parts = {segment.server for segment in source.layout.segments}
            open_to = [server.name for server in self.servers() if server.may_live and not server.draining]
            servers = [name for name in open_to if name not in parts]
        else:
            servers = builtins.list(_server_names(name, to))
        made: builtins.list[pb.Buffer] = []
        try:
            self._add_mirrors(source, servers, made)
            # after the state: a later call finds through the state what a failed one has left
            others = self._beside(source)
            apart = {segment.server for other in others for segment in other.layout.segments}
            for other in others:
                self._add_mirrors(other, [server for server in servers if server not in apart], made)
        except BaseException:
            for mirror in made:
                with contextlib.suppress(Error):  # the first error says more
                    self._coordinator.delete_buffer(mirror.name, True, self.timeout, mirror.id)
            raise
        return sorted(mirror.server for mirror in self.open(name).info.mirrors)

    def _beside(self, state: Buffer) -> builtins.list[Buffer]:
        """Return the log of a state with deltas; an empty list if the log is gone."""
        try:
            return [self.open(name) for name in beside(state)]
        except NotFoundError:
            return []

    def _add_mirrors(self, source: Buffer, servers: Iterable[str], made: builtins.list[pb.Buffer]) -> None:
        has = {mirror.server for mirror in source.info.mirrors}
        for server in dict.fromkeys(servers):
            mirror = f"{source.name}{MIRROR}{server}"
            if server in has and not self._is_whole(mirror):
                has.remove(server)
            if server not in has:
                request = pb.CreateBufferRequest(
                    name=mirror, mirror_of=source.name, model_id=source.info.id, server_names=[server]
                )
                made.append(self._coordinator.create_buffer(request, self.timeout))

    def _is_whole(self, mirror: str) -> bool:
        """Return True if a mirror is still there. A mirror whose server came back without its memory is deleted."""
        with contextlib.suppress(NotFoundError):  # the mirror was stopped just now
            buffer = self.open(mirror)
            if not buffer.info.lost:
                return True
            self.delete(buffer, missing_ok=True)
        return False

    def stop_relays(self, name: str, to: Iterable[str] | None = None) -> builtins.list[str]:
        """Delete a buffer's mirrors on these servers (default: all), and return the servers' names.

        Readers go on with the remaining mirrors and the buffer. Raises NotFoundError if a server has no mirror of it.

        ```python
        client.relay("published")  # for example ['server-1']
        client.stop_relays("published")  # the same servers: the mirrors are deleted
        ```
        """
        source = self.open(name)
        mirrors = {mirror.server: mirror.name for mirror in source.info.mirrors}
        servers = sorted(mirrors) if to is None else builtins.list(_server_names(name, to))
        for server in servers:
            if server not in mirrors:
                raise NotFoundError(f"stop relays of {name!r}: the buffer has no mirror on {server!r}")
        for server in servers:
            for other in reversed(beside(source)):  # the state's own mirror last
                self.delete(f"{other}{MIRROR}{server}", missing_ok=True)
            self.delete(mirrors[server], missing_ok=True)
        return servers

    def servers(self) -> builtins.list[ServerInfo]:
        """Return all memory servers that the coordinator knows, dead ones too, sorted by name.

        ```python
        [server.name for server in client.servers() if server.alive]  # ['server-0', 'server-1']
        ```
        """
        self._session.check_open()
        infos = [
            ServerInfo(
                name=server.name,
                address=server.data_address,
                alive=server.alive,
                capacity=server.capacity_bytes,
                used=server.used_bytes,
                segments=server.segment_count,
                last_seen=server.last_seen_at,
                metrics=server.metrics_address,
                weight=server.weight or 1.0,  # an older coordinator does not send weights
                zone=server.zone,
                draining=server.draining,
                unheard=server.unheard,
                overdue=server.overdue,
                maintenance_until=server.maintenance_until,
                quarantined=tuple(
                    QuarantinedInfo(each.segment_id, each.name, each.nbytes, each.reason) for each in server.quarantined
                ),
                host_name=server.host_name,
            )
            for server in self._coordinator.list_servers(self.timeout)
        ]
        return ServerList(sorted(infos, key=lambda info: info.name))

    # ---- locks and barriers

    def lock(
        self, name: str, *, ttl: float = 10.0, timeout: float | None = None, replicas: int = 1, shared: bool = False
    ) -> Lock:
        """Return the lock of that name. It is taken by acquire() or at the start of a `with` block.

        ```python
        with client.lock("checkpoint", timeout=60) as lock:
            lock.check()
        ```

        The same name is the same lock for every client of the cluster; the first use creates it. Waiters get it in the
        order in which they asked.

        - `ttl`, in seconds: how long after the last sign of life of its holder the next waiter gets it.
        - `timeout`, in seconds, bounds the waiting (None: no bound); then TimeoutError.
        - `replicas=2` at the first use keeps the lock on two servers, so that it survives the loss of either.
        - `shared=True` takes the lock together with others who share it, as a reader beside readers; see Lock.

        Blocks to find the lock's server. Raises UnavailableError if the coordinator is away when this client uses the
        name for the first time, or after the lock was freed because nobody used it.
        """
        check_times(f"lock {name!r}", ttl, timeout)
        check_replicas(f"lock {name!r}", replicas)
        patience = self.timeout if timeout is None else min(self.timeout, max(timeout, _FIND_S))
        home = self._home(pb.LOCK, name, patience, replicas or 1)
        return Lock((home,), self._session.renewals, ttl, timeout, shared=shared)

    def _knows_lock(self, name: str) -> bool:
        """Return True if the lock of that name is found without the coordinator. Makes no call."""
        with self._lock:
            return (pb.LOCK, name) in self._homes

    def barrier(self, name: str, parties: int, *, timeout: float | None = None) -> int:
        """Wait until `parties` calls have arrived at the barrier of that name. Return this call's index, 0 for the
        first.

        ```python
        index = client.barrier("epoch", parties=1, timeout=60)
        ```

        The next `parties` arrivals are the next round. All parties pass the same `parties`, else InvalidArgumentError.
        If a party dies, loses its connection for longer than 3 s, waits longer than its `timeout` (seconds; None: no
        end), or is interrupted (by Ctrl-C, or in smb.to_thread by a cancelled task), all parties of the round get
        BrokenBarrierError, and the next round starts clean.
        """
        home = self._home(pb.BARRIER, name, self.timeout)
        if isinstance(parties, bool) or not isinstance(parties, int) or parties < 1:
            raise InvalidArgumentError(f"barrier {name!r}: parties must be a positive integer, not {parties!r}")
        if timeout is not None and timeout < 0:
            raise InvalidArgumentError(f"barrier {name!r}: timeout must be at least 0, not {timeout!r}")
        asked = f"barrier {name!r} of {parties} parties"
        seat = home.ask(asked, AskOpcode.ARRIVE, 0, (parties,))
        try:
            home.ask(asked, AskOpcode.AWAIT_BARRIER, 0, (seat.a, wait_ms(timeout)), wait=timeout)
        except Error:
            raise
        except BaseException:  # Ctrl-C, or a cancelled task: this party does not come, although it has a seat
            home.tell(AskOpcode.AWAIT_BARRIER, (seat.a, 0))
            raise
        return seat.b

    def _home(self, kind: pb.Kind, name: str, patience: float, replicas: int = 1) -> Home:
        word = pb.Kind.Name(kind).lower()
        _check_name(word, name)
        self._session.check_open()
        with self._lock:
            if replicas > 1:
                self._copies[name] = replicas
            home = self._homes.get((kind, name))
        if home is None:

            def locate() -> SegmentLocation:
                copies = self._copies.get(name, 1) if kind == pb.LOCK else 1
                bound = min(self.timeout, _FIND_S)
                return BufferInfo.of(self._coordinator.place(kind, name, bound, copies)).layout.segments[0]

            try:
                placed = self._coordinator.place(kind, name, patience, replicas)
            except Error as error:
                if name in str(error):
                    raise
                raise type(error)(f"{word} {name!r}: {error}", outcome=error.outcome) from error
            info = BufferInfo.of(placed)
            home = Home(
                self._session,
                f"{word} {name!r}" if kind != pb.LOCK else repr(name),
                info.layout.segments[0],
                info.layout.epoch,
                locate,
                name=name,
                named=True,
            )
            with self._lock:
                home = self._homes.setdefault((kind, name), home)
        return home

    def reconnect(self) -> None:
        """Go on after the session has ended, as when the computer slept for longer than the lease. Does nothing if the
        session goes on.

        The buffers that this client has opened can be used again, except those that were deleted meanwhile. Locks,
        pins and places at barriers were given up when the session ended, and views are lost: take them anew. Trainings
        must be joined again. A change whose outcome was unknown can no longer be settled.

        Blocks for the coordinator. Raises UnavailableError if it cannot be reached, or the client was closed. After an
        error nothing has changed: call it again.

        ```python
        client.reconnect()
        buffer.read()
        ```
        """
        self._session.check_ours()
        with self._reconnecting:
            if not self._session.has_ended():
                return
            former, session = self._session, self._join()
            try:
                found: dict[Buffer, BufferInfo] = {}
                with self._lock:
                    buffers = list(self._buffers)
                for buffer in buffers:
                    with contextlib.suppress(NotFoundError):
                        reply = session.coordinator.open_buffer(buffer.name, 0.0, self.timeout, buffer.info.id)
                        found[buffer] = BufferInfo.of(reply)
                session.published = former.published
                for buffer, info in found.items():
                    Buffer.__init__(buffer, session, info)  # as new, for all who have it
            except BaseException:
                session.close(SESSION_ENDED)
                raise
            with self._lock:
                self._session, self._coordinator = session, session.coordinator
                self._homes.clear()
            if not former.close(REPLACED):  # another thread has closed the client meanwhile
                session.close()
                session.check_ours()

    def close(self) -> None:
        """Leave the cluster. Views stay valid; calls in progress over TCP fail. A second call does nothing.

        Waits at most 2 s for a stopped coordinator, at most 10 s for a thread that looks up a host name, and not at all
        for a stopped memory server. Calls in other threads that are connecting to a server fail within 0.1 s.

        ```python
        client = smb.connect("127.0.0.1:7070")
        client.close()
        ```
        """
        closed, session = False, None
        while session is not self._session:  # reconnect() may have put another one in its place meanwhile
            session = self._session
            closed = session.close() or closed
        if closed and self.pages is not None:
            self.pages.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<smb.Client {self.name!r} of {self.address}{', closed' if self._session.closed else ''}>"

    def _repr_html_(self) -> str:
        state = "closed" if self._session.closed else "session ended" if self._session.session_ended else "open"
        return described("Client", {"name": self.name, "coordinator": self.address, "state": state})

    def __reduce__(self) -> NoReturn:
        refuse_pickle(repr(self), f"call smb.connect({self.address!r})")

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run a function on one of the client's threads and return a future. Does not block.

        Functions run in any order. Use Buffer.submit if a function must keep the order of a buffer's calls.

        ```python
        future = client.submit(lambda: float(buffer.read().sum()))
        future.result()  # 0.0: the function's result
        ```
        """
        self._session.check_open()
        return self._session.calls.submit(call, Turns(), 0, 0, changes=False)

    def queue(self, credit: int | None = None) -> Queue:
        """Return a queue for async operations with priorities, of which at most `credit` bytes are in flight. Does not
        block.

        None: about twice what the path holds (bandwidth times delay), measured while it runs, within bounds.

        ```python
        with client.queue(credit=8 << 20) as queue:
            future = queue.read(buffer, priority=1)
        values = future.result()
        ```
        """
        self._session.check_open()
        return Queue(self._session, credit)

    def serve_metrics(self, address: str) -> None:
        """Serve this client's metrics at /metrics of "host:port" until close().

        If the address cannot be used, a warning is logged and nothing is raised.

        ```python
        client.serve_metrics("127.0.0.1:0")  # port 0: any free port
        ```
        """
        from smb.metrics import serve

        try:
            self.pages = serve(self, address)
        except Error as error:
            _log.warning("this client's metrics are not served: %s", error)


def _check_tensors(name: str, wanted: TensorTable, existing: Buffer) -> None:
    if differ := wanted.differences(existing.table):
        raise AlreadyExistsError(
            f"create {name!r}: the buffer exists, but with other tensors ({len(differ)} differ): "
            f"{'; '.join(differ[:3])}; delete it (smb rm {name}), or choose another name"
        )


def _check_state(name: str, like: object, tensors: object, versions: int) -> None:
    if like is not None or tensors is not None:
        other = "like=" if like is not None else "tensors="
        raise InvalidArgumentError(f"create {name!r}: state_of= gives shape and dtype; leave out {other}")
    if versions != 1:
        raise InvalidArgumentError(
            f"create {name!r}: an optimizer's state (state_of=) has versions=1; leave out versions="
        )


def _copies_of(name: str, weights: Buffer, replicas: int | None) -> int:
    """Return how many copies the state of these weights has."""
    if replicas not in (None, weights.info.replicas):
        raise InvalidArgumentError(
            f"create {name!r}: replicas={replicas} but the weights {weights.name!r} have "
            f"replicas={weights.info.replicas}; their state must have as many; leave out replicas="
        )
    return weights.info.replicas


def _check_together(name: str, weights: Buffer, buffer: Buffer) -> None:
    if weights.info.replicas == 1 or buffer.info.moves_with(weights.info):
        return
    if all(segment.group for segment in buffer.layout.segments):
        raise AlreadyExistsError(
            f"create {name!r}: {weights.name!r} was deleted and created again during this call, and {name!r} moves "
            f"together with the new one; open the weights again"
        )
    raise UnavailableError(
        f"create {name!r}: the coordinator is too old for state_of=, and has made a buffer that does not move together "
        f"with {weights.name!r}; delete it (smb rm {name}), and upgrade the coordinator and the memory servers"
    )


def _check_name(call: str, name: str) -> None:
    """Refuse names that could not even be sent. The coordinator checks the rest."""
    if not isinstance(name, str) or not name.isprintable():
        raise InvalidArgumentError(f"{call}: a name must be a str of printable characters, not {name!r}")


def _named(call: str, buffer: str | Buffer | BufferInfo) -> tuple[str, int]:
    """Return a buffer's name, and its id; 0 stands for whichever buffer has that name."""
    info = buffer.info if isinstance(buffer, Buffer) else buffer
    name, known_id = (info.name, info.id) if isinstance(info, BufferInfo) else (info, 0)
    _check_name(call, name)
    return name, known_id


def _table(name: str, tensors: Mapping[str, Any], *others: object) -> TensorTable:
    if any(other is not None for other in others):
        raise InvalidArgumentError(f"create {name!r}: tensors= gives shape and dtype; leave out shape, dtype and like=")
    return TensorTable.of(tensors, f"create {name!r}")


def _with_table(name: str, metadata: Mapping[str, JSON] | None, table: TensorTable) -> dict[str, JSON]:
    if metadata is not None and METADATA_KEY in metadata:
        raise InvalidArgumentError(f"create {name!r}: metadata[{METADATA_KEY!r}] is reserved for tensors=")
    return {**(metadata or {}), **table.to_metadata()}


def _server_count(name: str, servers: int) -> int:
    if isinstance(servers, bool) or not isinstance(servers, int) or not 0 < servers < 2**32:
        raise InvalidArgumentError(f"create {name!r}: servers must be a positive integer, not {servers!r}")
    return servers


def _server_names(name: str, servers: str | Iterable[str]) -> builtins.list[str]:
    names = [servers] if isinstance(servers, str) else list(servers)
    if not names:
        raise InvalidArgumentError(f"create {name!r}: servers=[] names no server; pass at least one")
    for server in names:
        _check_name(f"create {name!r} on servers", server)
    return names


def _extents(name: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        extents = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"create {name!r}: shape must be an integer or a sequence of integers, not {shape!r}"
        ) from error
    if any(not 0 <= extent < 2**56 for extent in extents):
        raise InvalidArgumentError(
            f"create {name!r}: each extent of shape {extents} must be at least 0 and less than 2**56"
        )
    return extents
