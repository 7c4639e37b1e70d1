"""A client that is none of ours: bare pyverbs for data, gRPC by hand for control. It may do what ours never would."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub, MemoryServerStub
from smb.transport.verbs.devices import Port
from tests.support.memory_server import OPTIONS
from tests.support.transports import SLOWNESS
from tests.verbs.endpoint import Address, Endpoint, as_address

TIMEOUT_S = 10.0 * SLOWNESS
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Keys:
    """What a memory server gave for one segment."""

    address: int
    key: int
    nbytes: int
    states_address: int
    states_key: int


class Stranger:
    """A session with a queue pair to the memory server that has a buffer's only segment."""

    def __init__(self, coordinator: str, buffer: str, port: Port) -> None:
        self._channels = [grpc.insecure_channel(coordinator, options=OPTIONS)]
        self.coordinator = CoordinatorStub(self._channels[0])
        request = pb.OpenSessionRequest(client_name=f"stranger:{os.getpid()}.{next(_numbers)}")
        self.session_id = self.coordinator.OpenSession(request, timeout=TIMEOUT_S).session_id
        self.buffer = self.coordinator.OpenBuffer(pb.OpenBufferRequest(name=buffer), timeout=TIMEOUT_S)
        (self.segment,) = self.buffer.layout.segments
        self._channels.append(grpc.insecure_channel(self.segment.control_address, options=OPTIONS))
        self.server = MemoryServerStub(self._channels[1])
        self.endpoint = Endpoint(port)
        self.slots: list[Any] = []

    def request(self, **changes: Any) -> Any:
        """Return a request to connect this end; changes replace fields of it."""
        mine = self.endpoint.address
        end = {
            "number": mine.queue_pair,
            "gid": self.endpoint.port.gid.address.packed,
            "packet_sequence": mine.sequence,
            "mtu": mine.mtu,
            "reads": 4,
        }
        return pb.ConnectVerbsRequest(session_id=self.session_id, client=pb.VerbsEnd(**(end | changes)))

    def connect(self) -> None:
        """Make a queue pair, anew if there was one, and connect it with the server's."""
        self.endpoint.renew()
        reply = self.server.ConnectVerbs(self.request(), timeout=TIMEOUT_S)
        self.slots = list(reply.slots)
        peer = reply.server
        self.endpoint.connect(Address(as_address(peer.gid), peer.number, peer.packet_sequence, peer.mtu))

    def open(self, writable: bool = True, **changes: Any) -> Keys:
        """Ask for the segment's keys."""
        fields = {"session_id": self.session_id, "segment_id": self.segment.id, "epoch": self.buffer.layout.epoch}
        request = pb.OpenSegmentVerbsRequest(**(fields | {"writable": writable} | changes))
        reply = self.server.OpenSegmentVerbs(request, timeout=TIMEOUT_S)
        data, states = reply.data, reply.states
        return Keys(data.address, data.key, data.nbytes, states.address, states.key)

    def leave(self) -> None:
        """End the session as a client does that is closed."""
        self.coordinator.CloseSession(pb.CloseSessionRequest(session_id=self.session_id), timeout=TIMEOUT_S)

    def close(self) -> None:
        """Close what is open here; tells nobody."""
        self.endpoint.close()
        for channel in self._channels:
            channel.close()


@contextmanager
def strangers(coordinator: str, buffer: str, port: Port, count: int = 1) -> Iterator[list[Stranger]]:
    """Give connected strangers; they leave at the end."""
    made: list[Stranger] = []
    try:
        for _ in range(count):
            made.append(Stranger(coordinator, buffer, port))
            made[-1].connect()
        yield made
    finally:
        for stranger in made:
            stranger.leave()
            stranger.close()
