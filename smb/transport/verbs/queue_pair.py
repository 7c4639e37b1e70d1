"""RDMA queue pairs on pyverbs, for clients and for the daemon. No other file uses pyverbs.

pyverbs is imported when a device is opened, not before. Its calls do not release the GIL, so no call that may wait is
made: waiting is polling the descriptor of the completion channel. Version 44 does not free work requests when they are
collected, so one scatter-gather element is used again and again, and receive requests are kept.

A queue pair completes its work in order. Only some work is signalled: its completion says that all earlier work is
complete, too. A failed queue pair completes nothing any more, and the peer's card stops with it.

Threads: `Device` and `Domain` may be used by any thread. A queue pair belongs to one thread, except for its creation.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import ipaddress
import logging
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from smb.errors import InvalidArgumentError, TransportError
from smb.transport.verbs import devices

FRAME_BYTES = 64  # csrc/base/frame.h
MESSAGE_BYTES = 1920  # limit of a SEND: ten records, or thirty answers
MESSAGES = 128  # receives posted on each side, and so the limit of messages in flight
WORKS_MAX = 1024  # length of the send queue
_SIGNAL_EVERY = 64
_POLLED = 32
_READS_MAX = 16
_RECEIVED = 1 << 62  # added to a work's number: it is the receive with this index
# The timeout is 4.096 us x 2^14 = 67 ms, tried 6 more times: a lost peer is noticed after half a second (cards round
# up), and a lost packet costs 67 ms. Not 7 tries: soft RoCE takes 7 for "for ever", and a request to a lost peer would
# never end.
_TIMEOUT, _RETRIES, _NOT_READY_RETRIES, _NOT_READY_TIMER = 14, 6, 7, 12
_MTUS = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}

_CHANNEL_TRIES = 100
_LAST_USER_S = 30.0  # every wait of a domain's user ends sooner than this

_fd_lock = threading.Lock()
_log = logging.getLogger("smb")


class NoDeviceError(TransportError):
    """This process cannot use RDMA; the message says what is missing."""


class BrokenQueueError(TransportError):
    """The queue pair failed: the peer is gone, or has refused an access."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Which device to use, and how. Empty, 0 and None stand for an automatic choice. `mtu` is in bytes; service_level
    is 0 to 15.
    """

    device: str = ""
    port: int = 0
    gid_index: int | None = None
    mtu: int = 0
    service_level: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """Return the settings of SMB_VERBS_DEVICE, _PORT, _GID_INDEX, _MTU and _SERVICE_LEVEL. Raises
        InvalidArgumentError.
        """

        def number(name: str, allowed: Sequence[int] | range) -> int | None:
            text = environment.get(f"SMB_VERBS_{name}", "")
            if not text:
                return None
            if not text.isascii() or not text.isdigit() or int(text) not in allowed:
                raise InvalidArgumentError(
                    f"SMB_VERBS_{name} must be "
                    + (f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else f"one of {list(allowed)}")
                    + f", not {text}"
                )
            return int(text)

        return cls(
            environment.get("SMB_VERBS_DEVICE", ""),
            number("PORT", range(1, 256)) or 0,
            number("GID_INDEX", range(256)),
            number("MTU", tuple(_MTUS)) or 0,
            number("SERVICE_LEVEL", range(16)) or 0,
        )


@dataclass(frozen=True, slots=True)
class End:
    """What a peer needs to know of a queue pair to connect to it. `mtu` is in bytes."""

    number: int
    gid: bytes
    lid: int
    packet_sequence: int
    mtu: int
    reads: int

    def check(self) -> End:
        """Return this object. Raises InvalidArgumentError for values that no device can have."""
        sound = (
            0 < self.number < 1 << 24
            and len(self.gid) == 16
            and 0 <= self.lid < 1 << 16
            and 0 <= self.packet_sequence < 1 << 24
            and self.mtu in _MTUS
            and 0 < self.reads <= 255
        )
        if not sound:
            raise InvalidArgumentError(f"{self} does not describe a queue pair")
        return self


class Work(NamedTuple):
    """One RDMA READ (into local memory) or WRITE (from it)."""

    write: bool
    address: int
    local_key: int
    nbytes: int
    remote: int
    remote_key: int


class Device:
    """An opened RDMA device, and the port to use."""

    def __init__(self, settings: Settings) -> None:
        """Raises NoDeviceError."""
        found = devices.look(settings.device, settings.port, settings.gid_index)
        if found.pyverbs is None or not found.ports:
            raise NoDeviceError("; ".join(found.missing) or "no RDMA device")
        self.settings = settings
        self.port = found.ports[0]
        self.enums = importlib.import_module("pyverbs.enums")
        self.errors: tuple[type[Exception], ...] = (importlib.import_module("pyverbs.pyverbs_error").PyverbsError,)
        pyverbs = importlib.import_module("pyverbs.device")
        try:
            self.context = pyverbs.Context(name=self.port.device)
            state = self.context.query_port(self.port.number)
            limits = self.context.query_device()
        except self.errors as error:
            raise NoDeviceError(f"cannot open {self.port.device}: {error}") from error
        self.lid = int(state.lid)
        self.mtu = min(settings.mtu or 4096, 128 << int(state.active_mtu))
        self.reads = max(1, min(_READS_MAX, int(limits.max_qp_rd_atom)))

    def __str__(self) -> str:
        return f"{self.port.device} port {self.port.number}, GID {self.port.gid}"


class Region:
    """Memory that a card may access. The owner keeps the memory alive until `close`."""

    __slots__ = ("_mr", "address", "local_key", "nbytes", "remote_key")

    def __init__(self, mr: Any, address: int, nbytes: int) -> None:
        self._mr = mr
        self.address = address
        self.nbytes = nbytes
        self.local_key = int(mr.lkey)
        self.remote_key = int(mr.rkey)

    def close(self) -> None:
        """End the card's access to the memory. A second call does nothing."""
        if self._mr is not None:
            self._mr.close()
            self._mr = None


class Users:
    """Counts the users of a resource, so that it is freed after the last one. For any thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._changed = threading.Condition()
        self._count = 0
        self._ending = False

    def enter(self) -> None:
        """Begin to use the resource. Raises TransportError after `end`."""
        with self._changed:
            if self._ending:
                raise TransportError(f"{self._what} is closed")
            self._count += 1

    def leave(self) -> None:
        """Stop using the resource; call it once for each `enter`."""
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def end(self, timeout: float) -> bool:
        """Refuse new users, and wait until all have left. False if some have not left in time."""
        with self._changed:
            self._ending = True
            return self._changed.wait_for(lambda: self._count == 0, timeout)


class Domain:
    """A protection domain: only its own queue pairs access the memory that is registered in it.

    Its users are the owners of queue pairs, and threads while they register memory: pyverbs does not count them.
    """

    def __init__(self, device: Device) -> None:
        """Raises NoDeviceError."""
        self.device = device
        self.users = Users(f"the protection domain on {device}")
        self._make_mr = importlib.import_module("pyverbs.mr").MR
        try:
            self.pd = importlib.import_module("pyverbs.pd").PD(device.context)
        except device.errors as error:
            raise NoDeviceError(f"{device}: cannot make a protection domain: {error}") from error

    def register(self, address: int, nbytes: int, *, read: bool = False, write: bool = False) -> Region:
        """Pin memory and let the card access it; `read` and `write` allow that to the peer, too. Blocks. Raises
        TransportError.
        """
        e = self.device.enums
        access = e.IBV_ACCESS_LOCAL_WRITE
        access |= e.IBV_ACCESS_REMOTE_READ if read else 0
        access |= e.IBV_ACCESS_REMOTE_WRITE if write else 0
        try:
            with self.users.using():
                return Region(self._make_mr(self.pd, nbytes, access, address=address), address, nbytes)
        except self.device.errors as error:
            raise TransportError(
                f"cannot register {nbytes} bytes with {self.device.port.device}: {error}; "
                "check how much memory may be locked (ulimit -l)"
            ) from error

    def close(self) -> None:
        """Free the domain, after all memory that is registered in it was closed. A second call does nothing.

        Waits until the domain's queue pairs are closed, also those that another thread is making.
        """
        if self.users.end(_LAST_USER_S):
            self.pd.close()
        else:  # keeping the domain until the process ends is better than freeing it while it is in use
            _log.error(
                "%s: a queue pair is still in use %g s after it should have been closed", self.device, _LAST_USER_S
            )


class BlockPool:
    """Registered memory of this process, in equal blocks. For one thread."""

    def __init__(self, domain: Domain, block_bytes: int, count: int) -> None:
        """Raises TransportError."""
        self.block_bytes = block_bytes
        self.memory = mmap.mmap(-1, block_bytes * count)
        self._view = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._view)
        self.region = domain.register(self.address, block_bytes * count)
        self._free = deque(range(count))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Return the address of a free block. Raises IndexError if there is none."""
        return self.address + self._free.popleft() * self.block_bytes

    def give(self, address: int) -> None:
        self._free.append((address - self.address) // self.block_bytes)

    def close(self) -> None:
        """Free the memory. No work may use it any more."""
        self.region.close()
        del self._view
        self.memory.close()


class QueuePair:
    """A reliable connection to one peer: messages both ways, reads and writes of the peer's memory."""

    def __init__(self, domain: Domain) -> None:
        """Raises NoDeviceError."""
        self.device = domain.device
        self.failed = ""  # the reason why it cannot be used any more
        self.on_message: Callable[[bytes], None] = lambda _message: None
        self._posted = self._completed = self._unsignalled = 0
        self._finishing: deque[tuple[int, Callable[[], None]]] = deque()
        self._sends: deque[int] = deque()  # numbers of sends that occupy a slot of the ring
        self._sent = 0
        self._sequence = secrets.randbits(24)
        domain.users.enter()
        try:
            self._rings = BlockPool(domain, MESSAGE_BYTES, 2 * MESSAGES)
            try:
                self._make(domain)
            except BaseException:
                # Close the parts now, not when they are collected: no one waits for them from here on.
                for part in ("_qp", "_cq", "_channel"):
                    if hasattr(self, part):
                        getattr(self, part).close()
                self._rings.close()
                raise
        except BaseException as error:
            domain.users.leave()
            if isinstance(error, self.device.errors):
                raise NoDeviceError(f"{self.device}: cannot make a queue pair: {error}") from error
            raise
        self._leave = weakref.finalize(self, domain.users.leave)  # runs at close, or when the object is collected
        self._leave.atexit = False

    def _make(self, domain: Domain) -> None:
        completions, pairs, works = (importlib.import_module(f"pyverbs.{name}") for name in ("cq", "qp", "wr"))
        e, context = self.device.enums, self.device.context
        self._channel, self.fd = _completion_channel(completions.CompChannel, context)
        os.set_blocking(self.fd, False)
        self._cq = completions.CQ(context, WORKS_MAX + MESSAGES, None, self._channel, 0)
        cap = pairs.QPCap(max_send_wr=WORKS_MAX, max_recv_wr=MESSAGES, max_send_sge=1, max_recv_sge=1)
        sends = e.IBV_QP_EX_WITH_SEND | e.IBV_QP_EX_WITH_RDMA_READ | e.IBV_QP_EX_WITH_RDMA_WRITE
        extended = pairs.QPInitAttrEx(
            qp_type=e.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, pd=domain.pd, send_ops_flags=sends,
            comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        )  # fmt: skip
        try:
            self._qp = pairs.QPEx(context, extended)
            self._extended = True
        except self.device.errors:  # older providers have the older calls only
            plain = pairs.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap)
            self._qp = pairs.QP(domain.pd, plain)
            self._extended = False
        attributes = pairs.QPAttr(port_num=self.device.port.number)
        # The peer's rights are those of the regions in this domain.
        attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE
        self._qp.to_init(attributes)
        self._attributes = attributes
        self._works = works
        self._sge = works.SGE(0, 0, 0)
        key = self._rings.region.local_key
        self._receives = []
        for index in range(MESSAGES):
            sge = works.SGE(self._rings.address + (MESSAGES + index) * MESSAGE_BYTES, MESSAGE_BYTES, key)
            self._receives.append(works.RecvWR(wr_id=_RECEIVED | index, num_sge=1, sg=[sge]))
            self._qp.post_recv(self._receives[index])
        self._cq.req_notify()

    def end(self) -> End:
        """Return what the peer must know."""
        device = self.device
        gid = device.port.gid.address.packed
        return End(int(self._qp.qp_num), gid, device.lid, self._sequence, device.mtu, device.reads)

    def connect(self, peer: End) -> None:
        """Connect to the peer's queue pair, which may not be connected to this one yet. Raises BrokenQueueError."""
        addresses, e = importlib.import_module("pyverbs.addr"), self.device.enums
        port, attributes = self.device.port, self._attributes
        gid = addresses.GID(ipaddress.IPv6Address(peer.gid).exploded)
        route = addresses.GlobalRoute(dgid=gid, sgid_index=port.gid.index)
        route.hop_limit = 64
        ah = addresses.AHAttr(
            gr=route, is_global=int(port.link_layer != "InfiniBand"), port_num=port.number,
            sl=self.device.settings.service_level, dlid=peer.lid,
        )  # fmt: skip
        attributes.ah_attr = ah
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = peer.number, peer.packet_sequence, self._sequence
        attributes.path_mtu = _MTUS[min(self.device.mtu, peer.mtu)]
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = min(self.device.reads, peer.reads)
        attributes.timeout, attributes.retry_cnt = _TIMEOUT, _RETRIES
        attributes.rnr_retry, attributes.min_rnr_timer = _NOT_READY_RETRIES, _NOT_READY_TIMER
        attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE
        try:
            self._qp.to_rtr(attributes)
            self._qp.to_rts(attributes)
        except self.device.errors as error:
            gid_text = ipaddress.IPv6Address(peer.gid)
            raise BrokenQueueError(
                f"{self.device} cannot connect to {gid_text.ipv4_mapped or gid_text}: {error}"
            ) from error

    def room(self) -> int:
        """Return how many works may be posted."""
        return WORKS_MAX - (self._posted - self._completed)

    def may_send(self) -> bool:
        """Return True if a message may be sent now."""
        return len(self._sends) < MESSAGES and self.room() > 0

    def send(self, message: bytes | bytearray | memoryview) -> None:
        """Send at most MESSAGE_BYTES; call only if may_send(). The peer receives the message after all work posted
        before has arrived.
        """
        address = self._rings.address + self._sent % MESSAGES * MESSAGE_BYTES
        ctypes.memmove(address, bytes(message), len(message))
        self._sent += 1
        self._post((Work(True, address, self._rings.region.local_key, len(message), 0, 0),), None, message=True)
        self._sends.append(self._posted)

    def post(self, works: Sequence[Work], finished: Callable[[], None] | None = None) -> None:
        """Post works, at most room() of them. `finished` is called when all are complete, but not after a failure."""
        self._post(works, finished, message=False)

    def probe(self) -> None:
        """Write zero bytes to the peer. Its card answers that all the same; if it does not, the queue pair fails."""
        if self.room() > 0:
            self._post((Work(True, self._rings.address, self._rings.region.local_key, 0, 0, 0),), None, message=False)

    def _post(self, works: Sequence[Work], finished: Callable[[], None] | None, *, message: bool) -> None:
        if self.failed:
            return
        e = self.device.enums
        first = self._posted
        last = first + len(works)
        signal = finished is not None or self._unsignalled + len(works) >= _SIGNAL_EVERY
        if finished is not None:
            self._finishing.append((last, finished))
        try:
            if self._extended:
                self._qp.wr_start()
            for number, work in enumerate(works, first + 1):
                flags = e.IBV_SEND_SIGNALED if number == last and signal else 0
                if self._extended:
                    self._build(work, number, flags, message)
                else:
                    self._post_plain(work, number, flags, message)
            if self._extended:
                self._qp.wr_complete()
        except self.device.errors as error:
            self.failed = f"posting failed: {error}"
            return
        self._posted = last
        self._unsignalled = 0 if signal else self._unsignalled + len(works)

    def _build(self, work: Work, number: int, flags: int, message: bool) -> None:
        qp, sge = self._qp, self._sge
        qp.wr_id = number
        qp.wr_flags = flags
        if message:
            qp.wr_send()
        elif work.write:
            qp.wr_rdma_write(work.remote_key, work.remote)
        else:
            qp.wr_rdma_read(work.remote_key, work.remote)
        sge.addr, sge.length, sge.lkey = work.address, work.nbytes, work.local_key
        qp.wr_set_sge(sge)

    def _post_plain(self, work: Work, number: int, flags: int, message: bool) -> None:
        e = self.device.enums
        opcode = e.IBV_WR_SEND if message else e.IBV_WR_RDMA_WRITE if work.write else e.IBV_WR_RDMA_READ
        sge = self._works.SGE(work.address, work.nbytes, work.local_key)
        request = self._works.SendWR(wr_id=number, opcode=opcode, num_sge=1, sg=[sge], send_flags=flags)
        if not message:
            request.set_wr_rdma(work.remote_key, work.remote)
        try:
            self._qp.post_send(request)
        finally:
            request.close()
            sge.close()

    def poll(self) -> int:
        """Take completions and call the functions that wait for them. Returns how many; look at `failed` afterwards."""
        if self.failed:
            return 0
        try:
            count, completions = self._cq.poll(_POLLED)
        except self.device.errors as error:
            self.failed = f"polling failed: {error}"
            return 0
        for completion in completions:
            number = int(completion.wr_id)
            if completion.status != 0:
                self.failed = f"{_status_name(int(completion.status))} (vendor {int(completion.vendor_err):#x})"
                return int(count)
            if number & _RECEIVED:
                index = number & ~_RECEIVED
                at = self._rings.address + (MESSAGES + index) * MESSAGE_BYTES
                message = ctypes.string_at(at, int(completion.byte_len))
                self._qp.post_recv(self._receives[index])
                self.on_message(message)
            else:
                self._complete(number)
        return int(count)

    def _complete(self, number: int) -> None:
        self._completed = number
        while self._sends and self._sends[0] <= number:
            self._sends.popleft()
        while self._finishing and self._finishing[0][0] <= number:
            self._finishing.popleft()[1]()

    def arm(self) -> None:
        """Make `fd` readable at the next completion; poll once more after this call."""
        if not self.failed:
            self._cq.req_notify()

    def take_event(self) -> None:
        """Take the event once `fd` is readable. Never waits, even if there is no event: the descriptor may have been
        another file's.
        """
        if self._rings is None:
            return  # closed: the objects are empty
        try:
            self._channel.get_cq_event(self._cq)
        except self.device.errors:
            return
        self._cq.ack_events(1)

    def close(self) -> None:
        """Free the queue pair: the peer cannot access this process's memory after the return. A second call does
        nothing.
        """
        self.failed = self.failed or "closed"
        self._finishing.clear()
        self._qp.close()
        for request in self._receives:
            request.close()
        self._receives = []
        self._cq.close()
        self._channel.close()
        if self._rings is not None:
            self._rings.close()
            self._rings = None  # type: ignore[assignment]
        self._leave()


def _status_name(status: int) -> str:
    names = {
        4: "local protection error", 5: "flushed", 9: "refused by the peer's card: bad request",
        10: "refused by the peer's card: no access", 11: "failed at the peer's card", 12: "the peer does not answer",
        13: "the peer is not ready",
    }  # fmt: skip
    return names.get(status, f"completion status {status}")


def _completion_channel(make: Callable[[Any], Any], context: Any) -> tuple[Any, int]:
    """Return a completion channel and its descriptor.

    Older versions of pyverbs do not tell the descriptor. It is then the only new descriptor of a completion channel
    (docs/decisions.md, 0020).
    """
    for _ in range(_CHANNEL_TRIES):
        with _fd_lock:
            before = _event_fds()
            channel = make(context)
            descriptor = getattr(channel, "fd", None)
            new = {descriptor} if isinstance(descriptor, int) else _event_fds() - before
        if len(new) == 1:
            return channel, new.pop()
        # another library made or closed a channel at the same time, so the new descriptor is not known for sure
        channel.close()
    raise NoDeviceError(
        "cannot find the descriptor of the completion channel, since another library makes and closes channels at the "
        "same time; try again"
    )


def _event_fds() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()) == "anon_inode:[infinibandevent]":
                found.add(int(entry.name))
        except OSError:
            continue  # closed in the meantime, or the listing's own descriptor
    return found
