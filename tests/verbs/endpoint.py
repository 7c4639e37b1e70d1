"""One side of a connection by bare pyverbs, for tests of what a device does and of peers that do not behave.

Every call has a deadline, and none keeps the GIL while it waits: pyverbs releases it nowhere, so waiting is polling
with pauses.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from smb.transport.verbs.devices import Port

with contextlib.suppress(ImportError):  # without pyverbs the tests are not run, and yet have names
    from pyverbs import enums
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, RecvWR, SendWR

DEADLINE_S = 30.0
# Rights to registered memory (enum ibv_access_flags). A device wants LOCAL wherever it is to write.
LOCAL, READ, WRITE, ATOMIC = 1, 4, 2 | 1, 8 | 1
# How requests end (enum ibv_wc_status).
OK = "IBV_WC_SUCCESS"
REFUSED = "IBV_WC_REM_ACCESS_ERR"  # the other side's device refused: key, bounds or right
BROKEN = "IBV_WC_WR_FLUSH_ERR"  # the queue pair had failed before
UNREACHABLE = "IBV_WC_RETRY_EXC_ERR"  # no answer after all repetitions


@dataclass(frozen=True, slots=True)
class Address:
    """What the other side needs to know to connect."""

    gid: str
    queue_pair: int
    sequence: int
    mtu: int  # bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Registered memory; the array is kept as long as this is."""

    region: Any
    array: np.ndarray[Any, Any]

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    @property
    def key(self) -> int:
        return int(self.region.rkey)


class Endpoint:
    """A device's context, a protection domain, a completion queue and RC queue pairs in it, one at first."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.context = Context(name=port.device)
        self.domain = PD(self.context)
        self.completions = CQ(self.context, 64)
        self._sequence = random.randrange(1 << 24)
        self.queue_pair = self._make_queue_pair()

    @property
    def address(self) -> Address:
        gid = self.port.gid.address.exploded
        return Address(gid, int(self.queue_pair.qp_num), self._sequence, self.port.mtu or 1024)

    def connect(self, other: Address, timeout: int = 14, retries: int = 6) -> None:
        """Bring the queue pair to where it sends and receives. timeout: 4.096 us << timeout for each of the retries;
        7 of them are endless with soft RoCE."""
        route = GlobalRoute(dgid=GID(other.gid), sgid_index=self.port.gid.index, hop_limit=64)
        attributes = QPAttr(port_num=self.port.number)
        attributes.ah_attr = AHAttr(port_num=self.port.number, is_global=1, gr=route)
        attributes.path_mtu = min(self.port.mtu or 1024, other.mtu).bit_length() - 8  # 256 is 1, 4096 is 5
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = other.queue_pair, other.sequence, self._sequence
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 4
        attributes.min_rnr_timer, attributes.timeout = 12, timeout
        attributes.retry_cnt, attributes.rnr_retry = retries, 7
        attributes.qp_access_flags = READ | WRITE | ATOMIC
        self.queue_pair.to_rts(attributes)

    def renew(self) -> None:
        """Replace the queue pair by a new one, to be connected."""
        self.queue_pair.close()
        self.queue_pair = self._make_queue_pair()

    def register(self, array: np.ndarray[Any, Any], access: int) -> Memory:
        """Let the other side reach the array with these rights, once connected."""
        return Memory(MR(self.domain, array.nbytes, access, address=array.ctypes.data), array)

    def write(self, source: Memory, address: int, key: int, count: int | None = None) -> str:
        """RDMA WRITE of the first bytes; return the completion's status."""
        return self._one_sided(enums.IBV_WR_RDMA_WRITE, source, address, key, count)

    def read(self, sink: Memory, address: int, key: int, count: int | None = None) -> str:
        """RDMA READ into the first bytes; return the completion's status."""
        return self._one_sided(enums.IBV_WR_RDMA_READ, sink, address, key, count)

    def fetch_add(self, sink: Memory, address: int, key: int, value: int) -> str:
        """Atomic addition by the device; return the completion's status."""
        request = SendWR(
            num_sge=1, sg=[SGE(sink.address, 8, sink.region.lkey)], opcode=enums.IBV_WR_ATOMIC_FETCH_AND_ADD
        )
        request.set_wr_atomic(key, address, value)
        return self._post(request)

    def send(self, source: Memory, count: int) -> str:
        """SEND of the first bytes; return the completion's status."""
        return self._post(
            SendWR(num_sge=1, sg=[SGE(source.address, count, source.region.lkey)], opcode=enums.IBV_WR_SEND)
        )

    def receive(self, sink: Memory) -> None:
        """Post room for a SEND."""
        self.queue_pair.post_recv(RecvWR(num_sge=1, sg=[SGE(sink.address, sink.array.nbytes, sink.region.lkey)]))

    def completion(self, deadline_s: float = DEADLINE_S) -> Any:
        """Return the next completion. Fails the test after the deadline."""
        end = time.monotonic() + deadline_s
        while True:
            count, found = self.completions.poll(1)
            if count:
                return found[0]
            assert time.monotonic() < end, f"{self.port.device}: no completion within {deadline_s:g} s"
            time.sleep(0.001)

    def close(self) -> None:
        """Close all of it."""
        self.queue_pair.close()
        self.completions.close()
        self.domain.close()
        self.context.close()

    def _make_queue_pair(self) -> Any:
        capacity = QPCap(max_send_wr=32, max_recv_wr=32, max_send_sge=1, max_recv_sge=1)
        return QP(
            self.domain,
            QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self.completions, rcq=self.completions, cap=capacity),
        )

    def _one_sided(self, opcode: int, memory: Memory, address: int, key: int, count: int | None) -> str:
        length = memory.array.nbytes if count is None else count
        request = SendWR(num_sge=1, sg=[SGE(memory.address, length, memory.region.lkey)], opcode=opcode)
        request.set_wr_rdma(key, address)
        return self._post(request)

    def _post(self, request: Any) -> str:
        request.send_flags = enums.IBV_SEND_SIGNALED
        self.queue_pair.post_send(request)
        return status(self.completion())


def status(completion: Any) -> str:
    """Return the name of a completion's status."""
    return str(enums.ibv_wc_status(completion.status).name)


def connect(one: Endpoint, other: Endpoint, **options: int) -> None:
    """Connect two endpoints with each other, again if they were."""
    first, second = one.address, other.address
    one.connect(second, **options)
    other.connect(first, **options)


def as_address(gid: bytes) -> str:
    """Return a GID of 16 bytes as text."""
    return ipaddress.IPv6Address(gid).exploded
