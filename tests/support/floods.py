"""Clients with the weakest certificates that ask a coordinator for as much as they can."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Keeps very many calls in flight, over several connections: small ones, or also those that are much work.
_READER = """
import itertools, sys, threading
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub
from smb.security.credentials import COORDINATOR_NAME, channel, load_directory
address, everything, in_flight, *places = sys.argv[1:]
everything, in_flight = everything == "everything", int(in_flight) // 4
arrived = threading.Semaphore(0)
def flood(credentials):
    room = threading.Semaphore(in_flight)
    stub = CoordinatorStub(channel(address, COORDINATOR_NAME, credentials))
    calls = [(stub.ListServers, lambda _: pb.ListServersRequest())]
    if everything:
        reports = [pb.TrainingReport(name=f"none-{number}", slot=number, clock=1) for number in range(16)]
        calls += [
            (stub.ListBuffers, lambda number: pb.ListBuffersRequest(after=str(number))),
            (stub.Overview, lambda _: pb.OverviewRequest()),
            (stub.OpenSession, lambda _: pb.OpenSessionRequest(client_name="flood")),
            (stub.RenewSession, lambda number: pb.RenewSessionRequest(session_id=number + 1, trainings=reports)),
            (stub.OpenBuffer, lambda number: pb.OpenBufferRequest(name=f"none-{number}", timeout_ms=5000)),
            (stub.Leader, lambda _: pb.LeaderRequest()),
        ]
    for number, (call, request) in enumerate(itertools.cycle(calls)):
        room.acquire()
        under_way = call.future(request(number), timeout=30)
        under_way.add_done_callback(lambda _: room.release())
        if number == 0:
            under_way.add_done_callback(lambda _: arrived.release())
for place in places:
    credentials = load_directory(place)
    for _ in range(4):
        threading.Thread(target=flood, args=(credentials,), daemon=True).start()
for _ in range(4 * len(places)):
    arrived.acquire()
print("begun", flush=True)
sys.stdin.read()
"""


@contextmanager
def flooded(address: str, *credentials: Path, everything: bool = False, in_flight: int = 8000) -> Iterator[None]:
    """A process floods the coordinator during the block: with small calls, or with `everything`. It keeps `in_flight`
    calls in flight with each of the credentials, over four connections each. The block begins when each connection has
    had an answer.
    """
    flood = subprocess.Popen(
        [sys.executable, "-c", _READER, address, "everything" if everything else "little", str(in_flight),
         *map(str, credentials)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert flood.stdout is not None
        assert flood.stdout.readline() == b"begun\n"
        yield
        assert flood.poll() is None
    finally:
        flood.send_signal(signal.SIGKILL)
        flood.communicate()
