"""A client of docs/protocol.md in Python alone: it forms frames by hand, good and bad. Its numbers: protocol.toml."""

from __future__ import annotations

import _ssl
import array
import contextlib
import ctypes
import hashlib
import itertools
import os
import socket
import ssl
import struct
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag
from pathlib import Path

from tests.support.protocol_table import TABLE, numbers

_WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
HEADER = struct.Struct("<" + "".join(_WIDTHS[field["bytes"]] for field in TABLE["field"]))
MAGIC = TABLE["frame"]["magic"]
VERSION = TABLE["frame"]["version"]
CHUNK_BYTES_MAX = 1 << 20

Opcode = IntEnum("Opcode", numbers("opcode"))
Status = IntEnum("Status", numbers("status"))
Dtype = IntEnum("Dtype", {name.upper(): number for name, number in numbers("dtype").items()})
Op = IntEnum("Op", {name.upper(): number for name, number in numbers("op").items()})
Rule = IntEnum("Rule", {name.upper(): number for name, number in numbers("rule").items()})
_BITS = {row["name"]: row["bit"] for row in TABLE["flag"]}
# The wire encodings beside the other flags: a frame has at most one of them.
Flag = IntFlag(
    "Flag",
    {name: 1 << bit for name, bit in _BITS.items() if name != "WIRE"}
    | {name.upper(): number << _BITS["WIRE"] for name, number in numbers("wire").items() if number},
)


@dataclass(frozen=True)
class Frame:
    """A header, field for field."""

    opcode: int
    dtype: int = 0
    op: int = 0
    flags: int = 0
    status: int = 0
    lane: int = 0
    epoch: int = 0
    session: int = 0
    sequence: int = 0
    segment: int = 0
    offset: int = 0
    length: int = 0
    payload: int = 0
    argument: int = 0
    magic: int = MAGIC
    version: int = VERSION

    def pack(self) -> bytes:
        return HEADER.pack(
            self.magic, self.version, self.opcode, self.dtype, self.op, self.flags, self.status, self.lane, self.epoch,
            self.session, self.sequence, self.segment, self.offset, self.length, self.payload, self.argument,
        )  # fmt: skip

    @classmethod
    def unpack(cls, header: bytes) -> Frame:
        magic, version, *fields = HEADER.unpack(header)
        return cls(*fields, magic=magic, version=version)


def scale_bits(scale: float) -> int:
    """Return the argument of an accumulate with this scale."""
    return int.from_bytes(struct.pack("<d", scale), "little")


_sessions = itertools.count(1)


def next_session() -> int:
    """Return a session id that no other client of this process has: of two with one, the older would be fenced."""
    return next(_sessions)


IN_THE_CLEAR, INSIDE_TLS, UNIX_SOCKET = 1, 2, 3  # kinds of a channel
HAS_IDS = 1 << 19  # among a HELLO's features
_UCRED = struct.Struct("<iII")  # pid, uid, gid


def bond_of_channel(kind: int, rest: bytes = b"") -> bytes:
    """Return what proofs cover of a connection."""
    return hashlib.sha256(struct.pack("<16sQ", b"smb channel 1", kind) + rest).digest()


def exported(secured: ssl.SSLSocket) -> bytes:
    """Return what a TLS session exports for proofs. Python's ssl does not give it: its own OpenSSL is asked."""
    library = ctypes.CDLL(_ssl.__file__)
    inner = secured._sslobj  # type: ignore[attr-defined]
    # Behind CPython's object head and a weak reference to the socket lies the session.
    session = ctypes.c_void_p.from_address(id(inner._sslobj if hasattr(inner, "_sslobj") else inner) + 24)
    label, found = b"EXPORTER-smb-channel", ctypes.create_string_buffer(32)
    library.SSL_export_keying_material.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t),
        *(ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int),
    ]
    assert library.SSL_export_keying_material(session, found, 32, label, len(label), None, 0, 0) == 1
    return found.raw


class RawClient:
    """One connection. Blocks for at most `timeout` seconds wherever it waits; then it raises builtin TimeoutError."""

    def __init__(self, where: int | Path, timeout: float = 20.0) -> None:
        """Connect to a port on this host, or to a Unix socket. Says nothing yet."""
        if isinstance(where, Path):
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.settimeout(timeout)
            self.socket.connect(str(where))
        else:
            self.socket = socket.create_connection(("127.0.0.1", where), timeout)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.session = 0
        self.sequence = 0
        self.certificate = b""  # ours, in DER, inside TLS

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def hello(self, session: int | None = None) -> RawClient:
        """Shake hands, by default as a session of its own: a second connection of one would fence the first."""
        self.session = next_session() if session is None else session
        reply, _ = self.ask(Frame(Opcode.HELLO))
        assert reply.status == Status.OK
        return self

    def namespaces(self) -> int:
        """Where our ids hold, for a HELLO over a Unix socket; 0 over TCP."""
        if self.socket.family != socket.AF_UNIX:
            return 0
        return Path("/proc/self/ns/pid").stat().st_ino | Path("/proc/self/ns/user").stat().st_ino << 32

    def bond(self, reply: Frame) -> bytes:
        """Return what proofs on this connection cover of it, after the answer to a HELLO with `namespaces`."""
        if isinstance(self.socket, ssl.SSLSocket):
            facts = exported(self.socket), self.socket.getpeercert(True) or b"", self.certificate
            return bond_of_channel(INSIDE_TLS, facts[0] + b"".join(hashlib.sha256(der).digest() for der in facts[1:]))
        if self.socket.family != socket.AF_UNIX:
            return bond_of_channel(IN_THE_CLEAR)
        words = [self.namespaces()]
        if reply.length & HAS_IDS:
            pid, uid, _ = _UCRED.unpack(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            words += [os.geteuid(), os.getpid(), uid, pid]
        return bond_of_channel(UNIX_SOCKET, struct.pack(f"<{len(words)}Q", *words))

    def send(self, frame: Frame, payload: bytes = b"") -> None:
        """Send a request of this session with the next sequence number; `payload` in the header is its length."""
        self.socket.sendall(self.form(frame, payload))

    def form(self, frame: Frame, payload: bytes = b"") -> bytes:
        """Return the bytes of such a request."""
        self.sequence += 1
        frame = replace(frame, session=self.session, sequence=self.sequence, payload=len(payload))
        return frame.pack() + payload

    def receive(self) -> tuple[Frame, bytes]:
        """Return the next answer. Raises ConnectionError at the end of the stream."""
        frame = Frame.unpack(self.receive_bytes(HEADER.size))
        return frame, self.receive_bytes(frame.payload)

    def receive_bytes(self, count: int) -> bytes:
        """Return that many bytes. Raises ConnectionError at the end of the stream."""
        received = bytearray()
        while len(received) < count:
            part = self.socket.recv(count - len(received))
            if not part:
                raise ConnectionError(f"closed after {len(received)} of {count} bytes")
            received += part
        return bytes(received)

    def receive_with_descriptor(self) -> tuple[Frame, int]:
        """Return the next answer and the file descriptor that came with it, or -1."""
        descriptors = array.array("i")
        received = b""
        while len(received) < HEADER.size:
            part, control, _, _ = self.socket.recvmsg(HEADER.size - len(received), socket.CMSG_SPACE(4))
            if not part:
                raise ConnectionError("closed")
            received += part
            for level, kind, data in control:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.frombytes(data)
        return Frame.unpack(received), descriptors[0] if descriptors else -1

    def ask(self, frame: Frame, payload: bytes = b"") -> tuple[Frame, bytes]:
        """Send a request and return its answer, checked to be one."""
        self.send(frame, payload)
        reply, data = self.receive()
        assert (reply.magic, reply.version) == (MAGIC, VERSION)
        assert reply.flags & Flag.REPLY
        assert (reply.opcode, reply.session, reply.sequence) == (frame.opcode, self.session, self.sequence)
        return reply, data

    def ended(self) -> bool:
        """Say that nothing more will be sent; whether the server then ends the stream, as `closed`."""
        with contextlib.suppress(OSError):  # it has ended it already
            self.socket.shutdown(socket.SHUT_WR)
        return self.closed()

    def closed(self) -> bool:
        """Whether the server has ended the stream, now or within the time limit; answers before the end are dropped."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass
        return True
