"""The engine's server in a process of its own, with a few segments and nothing around it: the target of frames."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memserver.engine import Engine, SegmentForm
from tests.support.raw import Dtype, Frame, Opcode, RawClient, Status

INSTANCE = 0x1234
EPOCH = 5
# No two differ in one byte only, so that one changed byte of a frame never makes a good frame for the other segment.
WITNESS = 0x1111111111111111
SCRATCH = 0x2222222222222222
FLOATS = 0x3333333333333333
MORE_FLOATS = (0x4444444444444444, 0x5555555555555555, 0x6666666666666666)
FEW_FLOATS = 0x7777777777777777
CHUNK_BYTES = 65536
SEGMENT_BYTES = 3 * CHUNK_BYTES + 24
PATTERN = bytes(i % 251 for i in range(SEGMENT_BYTES))  # what lies in WITNESS


class EngineServer:
    """One run of the server. Its counters are asked for over its standard input."""

    def __init__(self, directory: Path, memory: Path, descriptors: int) -> None:
        self.unix_path = directory / "socket"
        command = [sys.executable, "-m", "tests.support.engine_server", str(self.unix_path), str(memory)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        self._process = subprocess.Popen(
            [*command, str(descriptors)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.pid = self._process.pid
        self.port = int(self._read()["port"])

    def counters(self) -> dict[str, Any]:
        """Return memserver.engine.Counters as JSON has it."""
        assert self._process.stdin is not None
        self._process.stdin.write("counters\n")
        self._process.stdin.flush()
        return self._read()

    def end_sessions(self, first: int, count: int) -> None:
        """End so many sessions, and have it know that no others ever did."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"end {first} {count}\n")
        self._process.stdin.flush()
        self._read()

    def alive(self) -> bool:
        return self._process.poll() is None

    def connect(self) -> RawClient:
        """Return a TCP connection that has not said hello."""
        return RawClient(self.port)

    def hello(self) -> RawClient:
        """Return a TCP connection that has."""
        return self.connect().hello()

    def hello_unix(self) -> RawClient:
        """Return a connection over the Unix socket that has said hello."""
        return RawClient(self.unix_path).hello()

    def read_segment(self, segment: int) -> bytes:
        """Return all bytes of a segment."""
        found = b""
        with self.hello() as client:
            for offset in range(0, SEGMENT_BYTES, CHUNK_BYTES):
                length = min(CHUNK_BYTES, SEGMENT_BYTES - offset)
                reply, data = client.ask(whole(Opcode.READ, segment, offset, length))
                assert reply.status == Status.OK
                found += data
        return found

    def write_segment(self, segment: int, content: bytes) -> None:
        """Write all bytes of a segment."""
        with self.hello() as client:
            for offset in range(0, SEGMENT_BYTES, CHUNK_BYTES):
                part = content[offset : offset + CHUNK_BYTES]
                reply, _ = client.ask(whole(Opcode.WRITE, segment, offset, len(part)), part)
                assert reply.status == Status.OK

    def stop(self) -> int:
        """End it cleanly; return its exit code."""
        self._process.communicate(timeout=20)
        return self._process.returncode

    def kill(self) -> None:
        if self.alive():
            self._process.kill()
            self._process.communicate(timeout=20)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the server has ended: {self._process.wait(20)}"
        found: dict[str, Any] = json.loads(line)
        return found


def whole(opcode: int, segment: int, offset: int, length: int) -> Frame:
    """Return a frame for a range of one of the segments."""
    return Frame(opcode, dtype=Dtype.INT64, epoch=EPOCH, segment=segment, offset=offset, length=length)


@contextmanager
def engine_server(directory: Path, descriptors: int = 4096) -> Iterator[EngineServer]:
    """Give a running server; at the end it must be alive, hold the witness as it was, and end cleanly."""
    memory = Path("/dev/shm") / f"smb-wire-{os.getpid()}-{directory.name}"
    memory.mkdir()
    server = None
    try:
        server = EngineServer(directory, memory, descriptors)
        server.write_segment(WITNESS, PATTERN)
        yield server
        assert server.alive()
        assert server.read_segment(WITNESS) == PATTERN
        assert server.stop() == 0
    finally:
        if server is not None:
            server.kill()
        for path in memory.iterdir():
            path.unlink()
        memory.rmdir()


def serve(unix_path: Path, memory: Path, descriptors: int) -> None:
    """Run in the child until standard input ends."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    engine = Engine(INSTANCE, loops=2, capacity_bytes=64 << 20)
    for segment in (WITNESS, SCRATCH):
        form = SegmentForm(segment, EPOCH, Dtype.INT64, SEGMENT_BYTES, CHUNK_BYTES)
        engine.create_segment(memory / f"{segment:016x}", form)
    for segment in (FLOATS, *MORE_FLOATS, FEW_FLOATS):
        nbytes = 2048 if segment == FEW_FLOATS else 4096
        engine.create_segment(memory / f"{segment:016x}", SegmentForm(segment, EPOCH, Dtype.FLOAT32, nbytes, 4096))
    engine.listen_unix(unix_path)
    print(json.dumps({"port": engine.listen_tcp("127.0.0.1", 0)}), flush=True)
    for line in sys.stdin:
        if line.startswith("end "):
            first, count = (int(word) for word in line.split()[1:])
            for session in range(first, first + count):
                engine.end_session(session)
            engine.know_ended(True)
        counters = asdict(engine.figures.counters())
        for name in ("operations", "transferred_bytes"):
            counters[name] = {" ".join(key): value for key, value in counters[name].items()}
        print(json.dumps(counters), flush=True)
    engine.close()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
