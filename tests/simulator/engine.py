"""A memory server's engine as a model: what csrc/server does with segments, roles and copies, on numbers.

A segment's data are cells, one for each client: the number of its last write. Cells lie in chunks, which are copied one
after the other. What is in `Memory` outlives the process; roles, connections and what waits do not. The comments at
csrc/smb/server.h and csrc/server/replica.c, group.c, roles.c, copy.c are the reference; docs/decisions/0025 says why.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memserver.engine import CopyState, FoundSegment, ReplicaStatus, SegmentForm
from smb.engine import segment_file_bytes
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
LOCK_OF_NOBODY = (0, 0, 0.0)  # the session that holds it, its token, until when
OK, STALE, NOT_FOUND, BUSY = "ok", "stale", "not found", "busy"


@dataclass
class Memory:
    """A segment's file."""

    form: SegmentForm
    file_bytes: int
    epoch: int
    group: int = 0  # of one that has, or had, a role; 0: it has one copy, and everybody may use it
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
class _Group:
    """The segments that have one role, and the connection between the two servers."""

    number: int
    epoch: int = 0
    role: int = NONE
    paired: bool = False
    yields: bool = False
    peer: str = ""
    members: list[int] = field(default_factory=list)
    order: int = 0
    confirmed: int = 0
    queue: deque[tuple[int, tuple[Any, ...]]] = field(default_factory=deque)  # order, frame: not confirmed yet
    waiting: list[tuple[int, asyncio.Future[str]]] = field(default_factory=list)
    pipe: Pipe | None = None
    dialled: bool = False
    broken_at: float | None = 0.0
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
        self._groups: dict[int, _Group] = {}
        self._ended: set[int] = set()
        self._serving_until = 0.0
        self._dialled: dict[int, Pipe] = {}
        self._fed: dict[Pipe, _Group] = {}
        self._dials = 0
        self.changed = asyncio.Event()
        self.writes = 0

    # ---- segments

    def counters(self) -> Any:
        """How much is used."""
        return _Counters(sum(memory.file_bytes for memory in self._host.segments.values()))

    def segment_shares(self) -> dict[int, Any]:
        """Nobody is counted."""
        return {}

    session_shares = segment_shares

    def create_segment(self, path: object, form: SegmentForm, *, group_id: int | None = None) -> None:
        """See memserver.engine."""
        file_bytes = segment_file_bytes(form.nbytes, form.chunk_bytes)
        if form.id in self._host.segments:
            raise AlreadyExistsError(f"segment {form.id:016x} is there")
        if self.counters().segment_bytes + file_bytes > self._capacity_bytes:
            raise OutOfMemoryError("no room")
        memory = Memory(form, file_bytes, form.epoch, used_at=self._loop.time())
        if group_id is not None:
            memory.group = group_id or form.id
            self._join(form.id, memory)
        else:
            memory.whole = True
        self._host.segments[form.id] = memory

    def adopt_segment(self, segment_id: int) -> SegmentForm:
        """Serve a segment of an earlier run."""
        memory = self._host.segments[segment_id]
        if memory.group:
            self._join(segment_id, memory)
        return memory.form

    def _join(self, segment_id: int, memory: Memory) -> None:
        group = self._groups.setdefault(memory.group, _Group(memory.group))
        group.members.append(segment_id)
        if group.role == NONE:
            group.epoch = max(group.epoch, memory.epoch)

    def delete_segment(self, segment_id: int) -> None:
        """See memserver.engine."""
        memory = self._memory(segment_id)
        self._on_delete(self._host, segment_id)
        del self._host.segments[segment_id]
        group = self._group(memory)
        if group is not None:
            group.members.remove(segment_id)
            if not group.members:
                group.role = NONE
                self._stop_forwarding(group, STALE)
                del self._groups[group.number]

    def retire_segment(self, segment_id: int, idle_ms: int) -> int | None:
        """See memserver.engine."""
        memory = self._memory(segment_id)
        if self._holder(memory) or self._loop.time() - memory.used_at < idle_ms / 1000:
            return None
        group = self._group(memory)
        if group is not None and group.role != PRIMARY:
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
        group = self._group(memory)
        return FoundSegment(number, memory.file_bytes, memory.epoch, memory.whole, group.role if group else NONE)

    def _memory(self, segment_id: int) -> Memory:
        memory = self._host.segments.get(segment_id)
        if memory is None:
            raise NotFoundError(f"segment {segment_id:016x} is not here")
        return memory

    def _group(self, memory: Memory) -> _Group | None:
        return self._groups.get(memory.group) if memory.group else None

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
        if not memory.group:
            if role != PRIMARY or memory.bound:
                raise InvalidArgumentError("it has one copy")
            memory.group, memory.movable = segment_id, True
            self._join(segment_id, memory)
        group = self._groups[memory.group]
        ends = role == NONE and group.role == PRIMARY
        if epoch > group.epoch or (epoch == group.epoch and (group.role == NONE or ends)):
            whole = group.copying is not None and group.copying.whole
            if role == PRIMARY and peer and not copying and group.role != NONE and not whole:
                raise InvalidArgumentError("it cannot have a backup without being copied")
            self._take_role(group, epoch, role, peer, copying)
        if role != NONE and group.epoch == epoch and group.role == role:
            memory.epoch, memory.whole = epoch, role == PRIMARY or not copying

    def _take_role(self, group: _Group, epoch: int, role: int, peer: str, copying: bool) -> None:
        paired = role == PRIMARY and bool(peer)
        if paired and not copying and group.copying is not None and group.copying.whole:
            group.copying = None  # the new backup still has to get all that is queued, in this epoch
            self._hang_up(group)
        else:
            self._stop_forwarding(group, OK if role == PRIMARY else STALE)
        group.copied, group.paired, group.yields, group.peer = 0, paired, False, peer
        group.epoch, group.role = epoch, role
        if copying and role == PRIMARY:
            group.copying = _Copying(epoch)
        group.broken_at = self._loop.time()
        self.changed.set()

    def _stop_forwarding(self, group: _Group, status: str) -> None:
        self._hang_up(group)
        group.queue.clear()
        group.copying = None
        group.paired = False
        if status == OK:
            group.confirmed = group.order
        self._answer_waiting(group, group.order, status)

    def _hang_up(self, group: _Group) -> None:
        pipe, group.pipe, group.dialled = group.pipe, None, False
        if pipe is not None:
            self._fed.pop(pipe, None)
            pipe.close(self._process)

    def _answer_waiting(self, group: _Group, order: int, status: str) -> None:
        ready = [future for at, future in group.waiting if at <= order]
        group.waiting = [each for each in group.waiting if each[0] > order]
        for future in ready:
            if not future.done():
                future.set_result(status)

    def yield_role(self, segment_id: int, epoch: int) -> None:
        """See memserver.engine."""
        group = self._group(self._memory(segment_id))
        if group is None or group.role != PRIMARY or not group.paired or group.epoch != epoch:
            raise UnavailableError("it is not the primary of a pair in that epoch")
        group.yields = True

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

    def serve_until(self, boot_s: float) -> None:
        """See memserver.engine."""
        self._serving_until = boot_s

    def replicas(self) -> list[ReplicaStatus]:
        """See memserver.engine."""
        now = self._loop.time()
        return [
            ReplicaStatus(
                number, group.number, group.epoch, group.role, group.paired, group.dialled,
                0 if group.broken_at is None else 1 + int((now - group.broken_at) * 1000),
                group.order - group.confirmed, 0, "",
            )
            for number, memory in self._host.segments.items()
            if (group := self._group(memory)) is not None
        ]  # fmt: skip

    def wake_replicas(self) -> None:
        """See memserver.engine."""
        self.changed.set()

    def suspend(self, segment_id: int) -> None:
        """See memserver.engine."""
        group = self._group(self._memory(segment_id))
        if group is not None:
            self._answer_waiting(group, group.order, STALE)

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
        group = self._group(self._memory(segment_id))
        if group is None or not group.paired or group.epoch != epoch:
            pipe.close(self._process)
            raise UnavailableError("not that epoch")
        self._hang_up(group)
        group.pipe, group.dialled = pipe, True
        self._fed[pipe] = group
        pipe.send(self._process, ("hello", group.number, epoch, instance_id))

    def _is_broken(self, pipe: Pipe) -> None:
        group = self._fed.pop(pipe, None)
        if group is not None and group.pipe is pipe:
            group.pipe, group.dialled, group.broken_at = None, False, self._loop.time()
            self.changed.set()

    def _receive(self, pipe: Pipe, message: tuple[Any, ...]) -> None:
        if pipe.far is self._process:
            self._receive_as_backup(pipe, message)
            return
        group = self._fed.get(pipe)
        if group is None:
            return
        if message[0] == "hello":
            group.broken_at = None
            self.changed.set()
            for order, frame in group.queue:
                pipe.send(self._process, ("frame", group.number, group.epoch, order, frame))
        elif message[0] == "done":
            while group.queue and group.queue[0][0] <= message[1]:
                group.queue.popleft()
            group.confirmed = max(group.confirmed, message[1])
            self._answer_waiting(group, group.confirmed, OK)

    def _receive_as_backup(self, pipe: Pipe, message: tuple[Any, ...]) -> None:
        number, epoch = message[1], message[2]
        group = self._groups.get(number)
        if group is None or group.role != BACKUP or group.epoch != epoch:
            self._fed.pop(pipe, None)
            pipe.close(self._process)
            return
        if message[0] == "hello":
            if message[3] != self.instance_id:
                pipe.close(self._process)
                return
            if group.pipe is not None and group.pipe is not pipe:
                self._hang_up(group)
            group.pipe, group.broken_at = pipe, None
            self._fed[pipe] = group
            self.changed.set()
            pipe.send(self._process, ("hello",))
            return
        if group.pipe is not pipe:
            return
        self._apply(group, message[4])
        pipe.send(self._process, ("done", message[3]))

    def _apply(self, group: _Group, frame: tuple[Any, ...]) -> None:
        kind, number = frame[0], frame[1]
        memory = self._host.segments.get(number)
        if memory is None:
            return
        if kind == "write":
            memory.cells[frame[2]] = max(memory.cells.get(frame[2], 0), frame[3])
        elif kind == "lock":
            memory.lock, memory.token = frame[2], max(memory.token, frame[3])
        elif kind == "chunk" and frame[2] > group.copied:
            group.copied = frame[2]
            memory.cells |= dict(frame[3])

    def _forward(self, group: _Group, frame: tuple[Any, ...]) -> int:
        group.order += 1
        group.queue.append((group.order, frame))
        if group.pipe is not None and group.broken_at is None:
            group.pipe.send(self._process, ("frame", group.number, group.epoch, group.order, frame))
        return group.order

    # ---- new copies

    def copy(self, segment_id: int, epoch: int, nbytes: int) -> tuple[CopyState, int, int]:
        """See memserver.engine."""
        memory = self._host.segments.get(segment_id)
        group = self._group(memory) if memory is not None else None
        if memory is None or group is None or group.role != PRIMARY or group.epoch != epoch:
            return CopyState.GONE, 0, 0
        copying = group.copying
        if copying is None or copying.given_up:
            return CopyState.GONE, 0, 0
        total = memory.form.nbytes
        copied = total * copying.chunks // CHUNKS
        if copying.whole:
            return CopyState.WHOLE, total, total
        told = [member for member in group.members if self._host.segments[member].epoch == epoch]
        if told[:1] != [segment_id] or len(group.queue) > QUEUED_MAX:
            return CopyState.BUSY, copied, total
        if copying.chunks < CHUNKS:
            for member in told:
                cells = self._host.segments[member].cells
                part = tuple(each for each in cells.items() if each[0] % CHUNKS == copying.chunks)
                copying.sequence += 1
                copying.order = self._forward(group, ("chunk", member, copying.sequence, part))
                if copying.chunks == 0:
                    self._show_lock(group, member)
            copying.chunks += 1
            return CopyState.MORE, total * copying.chunks // CHUNKS, total
        if group.confirmed < copying.order:
            return CopyState.BUSY, copied, total
        copying.whole = True
        return CopyState.WHOLE, total, total

    def abandon_copy(self, segment_id: int, epoch: int) -> bool:
        """See memserver.engine."""
        memory = self._host.segments.get(segment_id)
        group = self._group(memory) if memory is not None else None
        if group is None or group.role != PRIMARY or group.epoch != epoch or group.copying is None:
            return False
        if group.copying.whole and not group.copying.given_up:
            return False
        self._stop_forwarding(group, OK)
        group.copying = _Copying(epoch, given_up=True)
        return True

    # ---- what clients ask

    def _primary(self, segment_id: int, epoch: int) -> tuple[str, Memory | None, _Group | None]:
        memory = self._host.segments.get(segment_id)
        if memory is None or memory.retired:
            return NOT_FOUND, None, None
        group = self._group(memory)
        if memory.group and (group is None or group.role != PRIMARY or group.epoch != epoch):
            return STALE, None, None
        return OK, memory, group

    async def write(self, segment_id: int, epoch: int, client: int, number: int) -> str:
        """Make a client's write."""
        status, memory, group = self._primary(segment_id, epoch)
        if memory is None:
            return status
        memory.cells[client] = max(memory.cells.get(client, 0), number)
        memory.used_at = self._loop.time()
        if group is None or not group.paired:
            return OK
        copying, frame = group.copying, ("write", segment_id, client, number)
        if copying is not None and client % CHUNKS >= copying.chunks:
            frame = ("note", segment_id, client, number)  # the chunk's bytes will have it
        return await self._confirmed(group, self._forward(group, frame))

    async def _confirmed(self, group: _Group, order: int) -> str:
        if group.confirmed >= order:
            return OK
        waits = self._loop.create_future()
        group.waiting.append((order, waits))
        return str(await waits)

    async def read(self, segment_id: int, epoch: int) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Return all cells."""
        status, memory, group = self._primary(segment_id, epoch)
        if memory is None:
            return status, ()
        cells = tuple(memory.cells.items())
        if group is not None and group.paired:
            status = await self._confirmed(group, group.order)
            if status == OK and not await self._may_tell(group, epoch):
                status = STALE
        return (OK, cells) if status == OK else (status, ())

    async def _may_tell(self, group: _Group, epoch: int) -> bool:
        """Whether nobody else is the primary since a read began."""
        asks = group.paired and (group.yields or self._loop.time() >= self._serving_until)
        if asks and await self._confirmed(group, self._forward(group, ("ask", 0))) != OK:
            return False
        return group.role == PRIMARY

    # ---- locks

    def _holder(self, memory: Memory) -> int:
        session, _, until = memory.lock
        return session if session and session not in self._ended and self._loop.time() < until else 0

    def _set_lock(self, number: int, memory: Memory, lock: tuple[int, int, float]) -> None:
        memory.lock, memory.token = lock, max(memory.token, lock[1])
        group = self._group(memory)
        if group is not None and group.role == PRIMARY and group.paired:
            self._show_lock(group, number)

    def _show_lock(self, group: _Group, number: int) -> int:
        memory = self._host.segments[number]
        return self._forward(group, ("lock", number, memory.lock, memory.token))

    async def lock(self, segment_id: int, epoch: int, session: int) -> tuple[str, int]:
        """Give a session the lock; return its token."""
        status, memory, group = self._primary(segment_id, epoch)
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
        return await self._told(group, epoch), token

    async def unlock(self, segment_id: int, epoch: int, session: int, token: int) -> str:
        """Free it, if the session holds it by that token."""
        status, memory, group = self._primary(segment_id, epoch)
        if memory is None:
            return status
        if memory.lock[:2] == (session, token):
            self._set_lock(segment_id, memory, LOCK_OF_NOBODY)
        return await self._told(group, epoch)

    async def _told(self, group: _Group | None, epoch: int) -> str:
        if group is None or not group.paired:
            return OK
        status = await self._confirmed(group, group.order)
        return status if status != OK or await self._may_tell(group, epoch) else STALE


@dataclass(frozen=True)
class _Counters:
    segment_bytes: int
