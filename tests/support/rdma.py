"""A memory server's engine and clients of it in one process, over two RDMA ports: no daemon, no coordinator."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memserver.engine import Engine, SegmentForm
from memserver.rdma_target import RdmaTarget
from smb.engine import NOWHERE, BufferHandle, EngineClient, EngineError, Lane, Link, Opcode, Request, memory_of
from smb.errors import UnavailableError
from smb.transport.verbs.devices import Port
from smb.transport.verbs.progress_thread import ProgressThread
from smb.transport.verbs.queue_pair import Device, Domain, QueuePair, Settings
from smb.transport.verbs.registration import ClientMemory
from smb.transport.verbs.requester import Carrier, RemoteSlot, Right

CHUNK_BYTES = 64 << 10
SEGMENT = 5
INSTANCE = 77
_DEADLINE_MS = 120_000


class RdmaServer:
    """The engine with one segment of int64, which is also reached by TCP at `port` and as a file."""

    def __init__(self, port: Port, elements: int) -> None:
        self.elements = elements
        self.ended: set[int] = set()
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm"))  # the journal wants tmpfs
        self.engine = Engine(INSTANCE, 2, 1 << 30)
        self.engine.open_journal(self.directory / "journal")
        form = SegmentForm(SEGMENT, 1, 6, elements * 8, CHUNK_BYTES)
        self.engine.create_segment(self.directory / "segment", form)
        self.tcp_port = self.engine.listen_tcp("127.0.0.1", 0)
        self.engine.listen_unix(self.directory / "socket")
        self.rdma = RdmaTarget(self.engine, INSTANCE, Settings(device=port.device, port=port.number))
        assert not self.rdma.why_not, self.rdma.why_not

    def close(self) -> None:
        self.rdma.close()
        self.engine.close()
        shutil.rmtree(self.directory)


class RdmaClient:
    """A session with one link by reference. `tend` mends it when it breaks."""

    def __init__(self, server: RdmaServer, port: Port, opened: bool = True) -> None:
        self.server = server
        self.session = secrets.randbits(60) | 1
        self.device = Device(Settings(device=port.device, port=port.number))
        self.memory = ClientMemory(Domain(self.device))
        self.progress = ProgressThread("test-client")
        self.engine = EngineClient(self.session)
        self.rights: dict[int, Right] = {}
        self.resumed: list[str] = []
        self.tcp_after: int | None = None
        self.link: Link = self.engine.connect_reference(self.carry(), Lane.VERBS_DATA, 20_000)[0]
        self.handle = self._handle()
        if opened:
            self.open()
        self._tender = threading.Thread(target=self._tend, daemon=True)
        self._tender.start()

    def carry(self) -> int:
        """Make a queue pair and a carrier; return the engine's end of its socket."""
        if self.session in self.server.ended:  # as the daemon's control service refuses it
            raise UnavailableError("the session has ended")
        queue = QueuePair(self.memory.domain)
        end, slots = self.server.rdma.connect(self.session, queue.end())
        queue.connect(end)
        places = [RemoteSlot(slot.address, slot.key, slot.nbytes) for slot in slots]
        self.carrier = Carrier(queue, places, self.rights, self.memory)
        self.progress.add(self.carrier)
        return self.carrier.engine_end.detach()

    def open(self, writable: bool = True) -> Right:
        """Have the segment's keys."""
        o = self.server.rdma.open_segment(self.session, SEGMENT, 1, writable)
        right = Right(
            1, o.dtype, o.data.nbytes, o.data.address, o.data.key, o.writable, o.chunk_bytes, o.states.address,
            o.states.key, o.sequence_at,
        )  # fmt: skip
        self.rights[SEGMENT] = right
        return right

    def read(self, offset: int = 0, count: int | None = None, out: Any = None) -> np.ndarray[Any, Any]:
        """Return elements."""
        array = np.zeros(self.server.elements - offset if count is None else count, np.int64) if out is None else out
        self.call(Opcode.READ, offset, array.nbytes, sink=memory_of(array))
        return array

    def write(self, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        self.call(Opcode.WRITE, offset, array.nbytes, source=memory_of(array))

    def add(self, array: np.ndarray[Any, Any], offset: int = 0, out: Any = None) -> None:
        sink = NOWHERE if out is None else memory_of(out)
        self.call(Opcode.ACCUMULATE, offset, array.nbytes, source=memory_of(array), sink=sink, op=1)

    def fetch_add(self, index: int, value: int) -> int:
        return self.call(Opcode.FETCH_ADD, index, 8, argument=value)

    def call(
        self, opcode: Opcode, offset: int, nbytes: int, source: Any = NOWHERE, sink: Any = NOWHERE, op: int = 0,
        argument: int = 0, timeout_ms: int = _DEADLINE_MS,
    ) -> int:  # fmt: skip
        done = self.handle.transfer(
            Request(opcode, offset * 8, nbytes, source, sink, op, argument=argument), timeout_ms
        )
        assert isinstance(done, int), done
        return done

    def break_queue(self) -> None:
        """Let the queue pair fail, as if the peer had gone."""
        done = threading.Event()
        carrier = self.carrier

        def fail() -> None:
            carrier.close()
            done.set()

        self.progress._call(fail)
        assert done.wait(30)

    def close(self) -> None:
        self.engine.close()
        self._tender.join(30)
        self.progress.close()
        self.memory.close()

    def _handle(self) -> BufferHandle:
        handle = BufferHandle(self.engine, self.server.elements * 8, CHUNK_BYTES, CHUNK_BYTES, 1, 6)
        handle.set_link(0, SEGMENT, 1, self.link)
        return handle

    def _tend(self) -> None:
        while True:
            try:
                link_id = self.engine.wait_down(60_000)
            except EngineError:
                return
            if link_id is None:
                continue
            try:
                if self.tcp_after is not None and len(self.resumed) >= self.tcp_after:
                    self.server.rdma.close_connection(self.session)
                    self.link.resume_tcp("127.0.0.1", self.server.tcp_port, 0, 10_000)
                    self.resumed.append("tcp")
                else:
                    self.link.resume_reference(self.carry(), 0, 20_000)
                    self.resumed.append("verbs")
            except (EngineError, UnavailableError):
                self.link.let_go()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return once it holds; fail the test after the deadline."""
    end = threading.Event()
    for _ in range(int(seconds * 100)):
        if condition():
            return
        end.wait(0.01)
    raise AssertionError("it did not come about in time")
