"""A memory server's engine as a model: what csrc/server does with segments, roles and copies, on numbers.

A segment's data are cells, one for each client: the number of its last write. Cells lie in chunks, which are copied one
after the other. What is in `Memory` outlives the process; roles, connections and what waits do not. The comments at
csrc/smb/server.h and csrc/server/replica.c, bundle.c, roles.c, copy.c are the reference; docs/decisions/0025 says why.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from memserver.engine import FoundSegment, SegmentForm
from memserver.engine_copies import CopyStep, ReplicaStatus
from smb.engine import Status, segment_file_bytes, status_name
from smb.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    OutOfMemoryError,
    UnavailableError,
)
from tests.simulator.loop import Loop, Process
from tests.simulator.network import Network, Pipe

NONE, PRIMARY, BACKUP = 0, 1, 2
CHUNKS = 3
QUEUED_MAX = 8  # forwarded changes that wait, before a copy goes on
LOCK_LEASE_S = 10.0
HAND_OVER_S = 1.0
LOCK_OF_NOBODY = (0, 0, 0.0)  # the session that holds it, its token, until when
OK, STALE, NOT_FOUND, BUSY = "ok", "stale", "not found", "busy"


@dataclass
class Memory:
    """A segment's file."""

    form: SegmentForm
    file_bytes: int
    epoch: int
    bundle: int = 0  # of one that has, or had, a role; 0: it has one copy, and everybody may use it
    whole: bool | None = None  # as Held.whole
    cells: dict[int, int] = field(default_factory=dict)
    lock: tuple[int, int, float] = LOCK_OF_NOBODY
    token: int = 0  # the lock's last one
    used_at: float = 0.0
    bound: bool = False
    movable: bool = False
    retired: bool = False


@dataclass
class Host:
    """What a host keeps as long as its memory lasts: segments, marks of quarantine, stamps."""

    name: str
    segments: dict[int, Memory] = field(default_factory=dict)
    quarantined: set[int] = field(default_factory=set)
    stamps: tuple[Any, ...] = ()


@dataclass
class _Copying:
    epoch: int
    chunks: int = 0
    order: int = 0
    sequence: int = 0
    counted: bool = False
    whole: bool = False
    given_up: bool = False


@dataclass
class _Bundle:
    """The segments that have one role, and the connection between the two servers."""

    number: int
    epoch: int = 0
    role: int = NONE
    paired: bool = False
    yields: bool = False
    unrecorded: bool = False
    hands_over_until: float = 0.0  # no change begins before
    strays: bool = False  # it was the primary, and may have what the present one lacks
    uneven: bool = False  # it was the primary, and its backup may lack what is here
    peer: str = ""
    members: list[int] = field(default_factory=list)
    order: int = 0
    confirmed: int = 0
    queue: deque[tuple[int, tuple[Any, ...]]] = field(default_factory=deque)  # order, frame: not confirmed yet
    waiting: list[tuple[int, asyncio.Future[str]]] = field(default_factory=list)
    pipe: Pipe | None = None
    dialled: bool = False
    broken_at: float | None = 0.0
    refused: str = ""  # the status with which the backup ended the last connection
    copying: _Copying | None = None
    copied: int = 0  # at the backup: the last part of a copy


class Engine:
    """As memserver.engine.Engine, as far as the daemon's deciding parts use it; and the data plane."""

    def __init__(
        self,
        loop: Loop,
        network: Network,
        process: Process,
        host: Host,
        instance_id: int,
        capacity_bytes: int,
        on_delete: Callable[[Host, int], None],
    ) -> None:
        """`on_delete` is called before memory is destroyed."""
        self._loop, self._network, self._process, self._host = loop, network, process, host
        self.instance_id, self._capacity_bytes, self._on_delete = instance_id, capacity_bytes, on_delete
        self.copies = self.figures = self  # the parts of a real one
        self._bundles: dict[int, _Bundle] = {}
        self._ended: set[int] = set()
        self._serving_until = 0.0
        self._dialled: dict[int, Pipe] = {}
        self._fed: dict[Pipe, _Bundle] = {}
        self._dials = 0
        self.changed = asyncio.Event()
        self.writes = 0

    # ---- segments

    def used_bytes(self) -> int:
        """See memserver.engine."""
        return sum(memory.file_bytes for memory in self._host.segments.values())

    def counters(self) -> Any:
        """How much is used."""
        return _Counters(self.used_bytes())

    def segment_shares(self) -> dict[int, Any]:
        """Nobody is counted."""
        return {}

    session_shares = segment_shares

    def create_segment(self, path: object, form: SegmentForm, *, bundle_id: int | None = None) -> None:
        """See memserver.engine."""
        file_bytes = segment_file_bytes(form.nbytes, form.chunk_bytes)
        if form.id in self._host.segments:
            raise AlreadyExistsError(f"segment {form.id:016x} is there")
        if self.used_bytes() + file_bytes > self._capacity_bytes:
            raise OutOfMemoryError("no room")
        memory = Memory(form, file_bytes, form.epoch, used_at=self._loop.time())
        if bundle_id is not None:
            memory.bundle = bundle_id or form.id
            self._join(form.id, memory)
        else:
            memory.whole = True
        self._host.segments[form.id] = memory

    def adopt_segment(self, segment_id: int) -> SegmentForm:
        """Serve a segment of an earlier run."""
        memory = self._host.segments[segment_id]
        if memory.bundle:
            self._join(segment_id, memory)
        return memory.form

    def _join(self, segment_id: int, memory: Memory) -> None:
        bundle = self._bundles.setdefault(memory.bundle, _Bundle(memory.bundle))
        bundle.members.append(segment_id)
        if bundle.role == NONE:
            bundle.epoch = max(bundle.epoch, memory.epoch)

    def delete_segment(self, segment_id: int) -> None:
        """See memserver.engine."""
        memory = self._memory(segment_id)
        self._on_delete(self._host, segment_id)
        del self._host.segments[segment_id]
        bundle = self._bundle(memory)
        if bundle is not None:
            bundle.members.remove(segment_id)
            if not bundle.members:
                bundle.role = NONE
                self._stop_forwarding(bundle, STALE)
                del self._bundles[bundle.number]

    def retire_segment(self, segment_id: int, idle_ms: int) -> int | None:
        """See memserver.engine."""
        memory = self._memory(segment_id)
        if self._holder(memory) or self._loop.time() - memory.used_at < idle_ms / 1000:
            return None
        bundle = self._bundle(memory)
        if bundle is not None and bundle.role != PRIMARY:
            return None
        memory.retired = True
        return memory.token

    def raise_token(self, segment_id: int, token: int) -> None:
        """See memserver.engine."""
        memory = self._memory(segment_id)
        memory.token = max(memory.token, token)

    def held(self) -> dict[int, FoundSegment]:
        """See memserver.engine."""
        return {number: self._held(number, memory) for number, memory in self._host.segments.items()}

    def holds(self, segment_id: int) -> FoundSegment | None:
        """See memserver.engine."""
        memory = self._host.segments.get(segment_id)
        return None if memory is None else self._held(segment_id, memory)

    def _held(self, number: int, memory: Memory) -> FoundSegment:
        bundle = self._bundle(memory)
        role = bundle.role if bundle is not None and bundle.epoch == memory.epoch else NONE
        return FoundSegment(number, memory.file_bytes, memory.epoch, memory.whole, role, not memory.cells)

    def _memory(self, segment_id: int) -> Memory:
        memory = self._host.segments.get(segment_id)
        if memory is None:
            raise NotFoundError(f"segment {segment_id:016x} is not here")
        return memory

    def _bundle(self, memory: Memory) -> _Bundle | None:
        return self._bundles.get(memory.bundle) if memory.bundle else None

    def end_session(self, session_id: int) -> None:
        """See memserver.engine."""
        self._ended.add(session_id)
        for number, memory in self._host.segments.items():
            if memory.lock[0] == session_id:
                self._set_lock(number, memory, LOCK_OF_NOBODY)

    def know_ended(self, all_of_them: bool) -> None:
        """Records of lanes are not modelled."""

    # ---- roles

    def set_replica(self, segment_id: int, epoch: int, role: int, peer: str, *, copying: bool = False) -> None:
        """See memserver.engine."""
        memory = self._memory(segment_id)
        if not memory.bundle:
            if role != PRIMARY or memory.bound:
                raise InvalidArgumentError("it has one copy")
            memory.bundle, memory.movable = segment_id, True
            self._join(segment_id, memory)
        bundle = self._bundles[memory.bundle]
        newest = max(self._host.segments[member].epoch for member in bundle.members)
        if bundle.role != NONE and newest < epoch < bundle.epoch:  # all that had this role were deleted
            self._take_role(bundle, newest, NONE, "", copying=False)
        ends = role == NONE and bundle.role == PRIMARY
        if epoch > bundle.epoch or (epoch == bundle.epoch and (bundle.role == NONE or ends)):
            whole = bundle.copying is not None and bundle.copying.whole
            next_ = bundle.role == BACKUP and epoch == bundle.epoch + 1 and peer == bundle.peer
            fresh = bundle.role == NONE and not bundle.uneven
            if role == PRIMARY and peer and not copying and not fresh and not whole and not next_:
                raise InvalidArgumentError("it cannot have a backup without being copied")
            if role == BACKUP and not copying and bundle.strays:
                raise InvalidArgumentError("it must be copied to")
            if role == BACKUP and bundle.role == PRIMARY and not copying and not self._is_even(bundle):
                self._take_role(bundle, epoch, NONE, peer, copying=False)
                raise InvalidArgumentError("the present primary may lack changes that are here")
            self._take_role(bundle, epoch, role, peer, copying)
        if role != NONE and bundle.epoch == epoch and bundle.role == role:
            memory.epoch, memory.whole = epoch, role == PRIMARY or not copying

    def forget_ends(self) -> None:
        """See memserver.engine."""
        for bundle in self._bundles.values():
            if bundle.role == NONE and bundle.members:
                bundle.epoch = max(self._host.segments[member].epoch for member in bundle.members)

    def _take_role(self, bundle: _Bundle, epoch: int, role: int, peer: str, copying: bool) -> None:
        paired = role == PRIMARY and bool(peer)
        if role == PRIMARY or copying:
            bundle.strays = bundle.uneven = False
        elif role == NONE and bundle.role == PRIMARY:
            bundle.strays, bundle.uneven = True, not self._is_even(bundle)
        if paired and not copying and bundle.copying is not None and bundle.copying.whole:
            bundle.copying = None  # the new backup still has to get all that is queued, in this epoch
            self._hang_up(bundle)
        else:
            self._stop_forwarding(bundle, OK if role == PRIMARY else STALE)
        bundle.copied, bundle.paired, bundle.peer = 0, paired, peer
        bundle.yields = bundle.unrecorded = False
        bundle.hands_over_until, bundle.refused = 0.0, ""
        bundle.epoch, bundle.role = epoch, role
        if copying and role == PRIMARY:
            bundle.copying = _Copying(epoch)
        bundle.broken_at = self._loop.time()
        self.changed.set()

    def _stop_forwarding(self, bundle: _Bundle, status: str) -> None:
        self._hang_up(bundle)
        bundle.queue.clear()
        bundle.copying = None
        bundle.paired = False
        if status == OK:
            bundle.confirmed = bundle.order
        self._answer_waiting(bundle, bundle.order, status)

    def _hang_up(self, bundle: _Bundle) -> None:
        pipe, bundle.pipe, bundle.dialled = bundle.pipe, None, False
        if pipe is not None:
            self._fed.pop(pipe, None)
            pipe.close(self._process)

    def _answer_waiting(self, bundle: _Bundle, order: int, status: str) -> None:
        ready = [future for at, future in bundle.waiting if at <= order]
        bundle.waiting = [each for each in bundle.waiting if each[0] > order]
        for future in ready:
            if not future.done():
                future.set_result(status)

    def yield_role(self, segment_id: int, epoch: int) -> None:
        """See memserver.engine."""
        bundle = self._bundle(self._memory(segment_id))
        if bundle is None or bundle.role != PRIMARY or not bundle.paired or bundle.epoch != epoch:
            raise UnavailableError("it is not the primary of a pair in that epoch")
        bundle.yields = True

    def note_unrecorded(self, segment_id: int, unrecorded: bool) -> None:
        """See memserver.engine."""
        with suppress(NotFoundError):
            bundle = self._bundle(self._memory(segment_id))
            if bundle is not None:
                bundle.unrecorded = unrecorded

    def hand_over(self, segment_id: int, epoch: int) -> bool:
        """See memserver.engine."""
        self.yield_role(segment_id, epoch)
        bundle = self._bundles[self._memory(segment_id).bundle]
        bundle.hands_over_until = self._loop.time() + HAND_OVER_S
        return self._is_even(bundle)

    def _is_even(self, bundle: _Bundle) -> bool:
        return bundle.paired and bundle.copying is None and bundle.confirmed >= bundle.order

    async def _begin(self, bundle: _Bundle | None) -> None:
        """Wait until a change may begin."""
        while bundle is not None and self._loop.time() < bundle.hands_over_until:
            await asyncio.sleep(0.01)

    def let_move(self, segment_id: int) -> bool:
        """See memserver.engine."""
        memory = self._memory(segment_id)
        memory.movable = not memory.bound
        return memory.movable

    def bind(self, segment_id: int) -> bool:
        """See memserver.engine."""
        memory = self._memory(segment_id)
        memory.bound = not memory.movable
        return memory.bound

    def answers(self, now_s: float) -> Iterator[tuple[int, int]]:
        """Yield the segments, with their epochs, whose reads it answers as the primary without asking the backup."""
        for bundle in self._bundles.values() if now_s < self._serving_until else ():
            asks = bundle.yields or (bundle.unrecorded and bundle.paired)
            if bundle.role == PRIMARY and not asks and bundle.confirmed >= bundle.order:
                yield from ((number, bundle.epoch) for number in bundle.members)

    def copying(self) -> Iterator[tuple[int, int, int]]:
        """Yield the bundles that it copies to a backup that has confirmed all so far: number, epoch, chunks. Those of
        which all members that the records had were deleted have nothing left to copy.
        """
        for bundle in self._bundles.values():
            copying = bundle.copying
            if copying is None or not self._with_role(bundle, copying.epoch):
                continue
            if not copying.whole and bundle.broken_at is None and not bundle.queue:
                yield bundle.number, bundle.epoch, copying.chunks

    def leads(self, segment_id: int, epoch: int) -> bool:
        """Whether it is the segment's primary in that epoch."""
        memory = self._host.segments.get(segment_id)
        bundle = self._bundle(memory) if memory is not None else None
        return bundle is not None and bundle.role == PRIMARY and bundle.epoch == epoch

    def serve_until(self, boot_s: float) -> None:
        """See memserver.engine."""
        self._serving_until = boot_s

    def replicas(self) -> list[ReplicaStatus]:
        """See memserver.engine."""
        now = self._loop.time()
        return [
            ReplicaStatus(
                number, bundle.number, bundle.epoch, bundle.role, bundle.paired, bundle.dialled,
                0 if bundle.broken_at is None else 1 + int((now - bundle.broken_at) * 1000),
                bundle.order - bundle.confirmed, 0, bundle.refused,
            )
            for number, memory in self._host.segments.items()
            if (bundle := self._bundle(memory)) is not None
        ]  # fmt: skip

    def wake_replicas(self) -> None:
        """See memserver.engine."""
        self.changed.set()

    def suspend(self, segment_id: int) -> None:
        """See memserver.engine."""
        bundle = self._bundle(self._memory(segment_id))
        if bundle is not None:
            self._answer_waiting(bundle, bundle.order, STALE)

    # ---- the connection to the backup

    def dial(self, address: str) -> int:
        """As memserver.replication.connect."""
        found, host = self._network.listener(address), address.rpartition(":")[0]
        if self._network.is_cut(self._process.host, host) or self._network.is_cut(host, self._process.host):
            raise TimeoutError("no route")
        if found is None:
            raise ConnectionRefusedError("nobody listens")
        far: Engine = found[1].engine  # type: ignore[attr-defined]
        self._dials += 1
        ends = {self._process: self, far._process: far}

        def receive(end: Process, message: Any) -> None:
            ends[end]._receive(pipe, message)

        def broken(end: Process) -> None:
            ends[end]._is_broken(pipe)

        pipe = Pipe(self._network, self._process, far._process, receive, broken)
        self._dialled[self._dials] = pipe
        return self._dials

    def feed(self, segment_id: int, epoch: int, fd: int, instance_id: int, tls: object = None, name: str = "") -> None:
        """See memserver.engine."""
        pipe = self._dialled.pop(fd)
        bundle = self._bundle(self._memory(segment_id))
        if bundle is None or not bundle.paired or bundle.epoch != epoch:
            pipe.close(self._process)
            raise UnavailableError("not that epoch")
        self._hang_up(bundle)
        bundle.pipe, bundle.dialled = pipe, True
        self._fed[pipe] = bundle
        pipe.send(self._process, ("hello", bundle.number, epoch, instance_id))

    def _is_broken(self, pipe: Pipe) -> None:
        bundle = self._fed.pop(pipe, None)
        if bundle is not None and bundle.pipe is pipe:
            bundle.pipe, bundle.dialled = None, False
            if bundle.broken_at is None:  # a backup that refuses each connection has been away since the first of them
                bundle.broken_at = self._loop.time()
            self.changed.set()

    def _receive(self, pipe: Pipe, message: tuple[Any, ...]) -> None:
        if pipe.far is self._process:
            self._receive_as_backup(pipe, message)
            return
        bundle = self._fed.get(pipe)
        if bundle is None:
            return
        if message[0] == "refused":
            bundle.refused = message[1]
            self._is_broken(pipe)
            pipe.close(self._process)
        elif message[0] == "hello":
            bundle.broken_at, bundle.refused = None, ""
            self.changed.set()
            for order, frame in bundle.queue:
                pipe.send(self._process, ("frame", bundle.number, bundle.epoch, order, frame))
        elif message[0] == "done":
            while bundle.queue and bundle.queue[0][0] <= message[1]:
                bundle.queue.popleft()
            bundle.confirmed = max(bundle.confirmed, message[1])
            self._answer_waiting(bundle, bundle.confirmed, OK)

    def _receive_as_backup(self, pipe: Pipe, message: tuple[Any, ...]) -> None:
        number, epoch = message[1], message[2]
        bundle = self._bundles.get(number)
        if bundle is None or bundle.role != BACKUP or bundle.epoch != epoch:
            self._fed.pop(pipe, None)
            pipe.send(self._process, ("refused", status_name(Status.STALE_EPOCH)))  # and the primary hangs up
            return
        if message[0] == "hello":
            if message[3] != self.instance_id:
                pipe.close(self._process)
                return
            if bundle.pipe is not None and bundle.pipe is not pipe:
                self._hang_up(bundle)
            bundle.pipe, bundle.broken_at = pipe, None
            self._fed[pipe] = bundle
            self.changed.set()
            pipe.send(self._process, ("hello",))
            return
        if bundle.pipe is not pipe:
            return
        self._apply(bundle, message[4])
        pipe.send(self._process, ("done", message[3]))

    def _apply(self, bundle: _Bundle, frame: tuple[Any, ...]) -> None:
        kind, number = frame[0], frame[1]
        memory = self._host.segments.get(number)
        if memory is None:
            return
        if kind == "write":
            memory.cells[frame[2]] = max(memory.cells.get(frame[2], 0), frame[3])
        elif kind == "lock":
            memory.lock, memory.token = frame[2], max(memory.token, frame[3])
        elif kind == "chunk" and frame[2] > bundle.copied:
            bundle.copied = frame[2]
            memory.cells |= dict(frame[3])

    def _forward(self, bundle: _Bundle, frame: tuple[Any, ...]) -> int:
        bundle.order += 1
        bundle.queue.append((bundle.order, frame))
        if bundle.pipe is not None and bundle.broken_at is None:
            bundle.pipe.send(self._process, ("frame", bundle.number, bundle.epoch, bundle.order, frame))
        return bundle.order

    # ---- new copies

    def copy(self, segment_id: int, epoch: int, nbytes: int) -> tuple[CopyStep, int, int]:
        """See memserver.engine."""
        memory = self._host.segments.get(segment_id)
        bundle = self._bundle(memory) if memory is not None else None
        if memory is None or bundle is None or bundle.role != PRIMARY or bundle.epoch != epoch:
            return CopyStep.GONE, 0, 0
        copying = bundle.copying
        if copying is None or copying.given_up:
            return CopyStep.GONE, 0, 0
        total = memory.form.nbytes
        copied = total * copying.chunks // CHUNKS
        if copying.whole:
            return CopyStep.WHOLE, total, total
        with_role = self._with_role(bundle, epoch)
        if with_role[:1] != [segment_id] or len(bundle.queue) > QUEUED_MAX:
            return CopyStep.BUSY, copied, total
        if copying.chunks < CHUNKS:
            for member in with_role:
                cells = self._host.segments[member].cells
                part = tuple(each for each in cells.items() if each[0] % CHUNKS == copying.chunks)
                copying.sequence += 1
                copying.order = self._forward(bundle, ("chunk", member, copying.sequence, part))
                if copying.chunks == 0:
                    self._show_lock(bundle, member)
            copying.chunks += 1
            return CopyStep.MORE, total * copying.chunks // CHUNKS, total
        if bundle.confirmed < copying.order:
            return CopyStep.BUSY, copied, total
        copying.whole = True
        return CopyStep.WHOLE, total, total

    def _with_role(self, bundle: _Bundle, epoch: int) -> list[int]:
        """Return the members that were given a role in that epoch: the records have them."""
        return [member for member in bundle.members if self._host.segments[member].epoch == epoch]

    def abandon_copy(self, segment_id: int, epoch: int) -> bool:
        """See memserver.engine."""
        memory = self._host.segments.get(segment_id)
        bundle = self._bundle(memory) if memory is not None else None
        if bundle is None or bundle.role != PRIMARY or bundle.epoch != epoch or bundle.copying is None:
            return False
        if bundle.copying.whole and not bundle.copying.given_up:
            return False
        self._stop_forwarding(bundle, OK)
        bundle.copying = _Copying(epoch, given_up=True)
        return True

    # ---- what clients ask

    def _primary(self, segment_id: int, epoch: int) -> tuple[str, Memory | None, _Bundle | None]:
        memory = self._host.segments.get(segment_id)
        if memory is None or memory.retired:
            return NOT_FOUND, None, None
        bundle = self._bundle(memory)
        if memory.bundle and (bundle is None or bundle.role != PRIMARY or bundle.epoch != epoch):
            return STALE, None, None
        return OK, memory, bundle

    async def write(self, segment_id: int, epoch: int, client: int, number: int) -> str:
        """Make a client's write."""
        status, memory, bundle = self._primary(segment_id, epoch)
        await self._begin(bundle)
        status, memory, bundle = self._primary(segment_id, epoch)
        if memory is None:
            return status
        memory.cells[client] = max(memory.cells.get(client, 0), number)
        memory.used_at = self._loop.time()
        if bundle is None or not bundle.paired:
            return OK
        copying, frame = bundle.copying, ("write", segment_id, client, number)
        if copying is not None and client % CHUNKS >= copying.chunks:
            frame = ("note", segment_id, client, number)  # the chunk's bytes will have it
        return await self._confirmed(bundle, self._forward(bundle, frame))

    async def _confirmed(self, bundle: _Bundle, order: int) -> str:
        if bundle.confirmed >= order:
            return OK
        waits = self._loop.create_future()
        bundle.waiting.append((order, waits))
        return str(await waits)

    async def read(self, segment_id: int, epoch: int) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Return all cells."""
        status, memory, bundle = self._primary(segment_id, epoch)
        if memory is None:
            return status, ()
        cells = tuple(memory.cells.items())
        if bundle is not None and bundle.paired:
            status = await self._confirmed(bundle, bundle.order)
            if status == OK and not await self._may_tell(bundle, epoch):
                status = STALE
        return (OK, cells) if status == OK else (status, ())

    async def _may_tell(self, bundle: _Bundle, epoch: int) -> bool:
        """Whether nobody else is the primary since a read began."""
        lease_runs = not bundle.yields and not bundle.unrecorded and self._loop.time() < self._serving_until
        asks = bundle.paired and not lease_runs
        if asks and await self._confirmed(bundle, self._forward(bundle, ("ask", 0))) != OK:
            return False
        return bundle.role == PRIMARY

    # ---- locks

    def _holder(self, memory: Memory) -> int:
        session, _, until = memory.lock
        return session if session and session not in self._ended and self._loop.time() < until else 0

    def _set_lock(self, number: int, memory: Memory, lock: tuple[int, int, float]) -> None:
        memory.lock, memory.token = lock, max(memory.token, lock[1])
        bundle = self._bundle(memory)
        if bundle is not None and bundle.role == PRIMARY and bundle.paired:
            self._show_lock(bundle, number)

    def _show_lock(self, bundle: _Bundle, number: int) -> int:
        memory = self._host.segments[number]
        return self._forward(bundle, ("lock", number, memory.lock, memory.token))

    async def lock(self, segment_id: int, epoch: int, session: int) -> tuple[str, int]:
        """Give a session the lock; return its token."""
        status, memory, bundle = self._primary(segment_id, epoch)
        await self._begin(bundle)
        status, memory, bundle = self._primary(segment_id, epoch)
        if memory is None:
            return status, 0
        memory.used_at = self._loop.time()
        holder = self._holder(memory)
        if session in self._ended:
            return NOT_FOUND, 0
        if holder not in (0, session):
            return BUSY, 0
        token = memory.lock[1] if holder == session else memory.token + 2
        self._set_lock(segment_id, memory, (session, token, self._loop.time() + LOCK_LEASE_S))
        return await self._told(bundle, epoch), token

    async def unlock(self, segment_id: int, epoch: int, session: int, token: int) -> str:
        """Free it, if the session holds it by that token."""
        status, memory, bundle = self._primary(segment_id, epoch)
        await self._begin(bundle)
        status, memory, bundle = self._primary(segment_id, epoch)
        if memory is None:
            return status
        if memory.lock[:2] == (session, token):
            self._set_lock(segment_id, memory, LOCK_OF_NOBODY)
        return await self._told(bundle, epoch)

    async def _told(self, bundle: _Bundle | None, epoch: int) -> str:
        if bundle is None or not bundle.paired:
            return OK
        status = await self._confirmed(bundle, bundle.order)
        return status if status != OK or await self._may_tell(bundle, epoch) else STALE


@dataclass(frozen=True)
class _Counters:
    segment_bytes: int
