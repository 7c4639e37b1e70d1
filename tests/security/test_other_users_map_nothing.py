"""A segment is mapped by processes of its server's own user alone. Its chunks' locks are the C library's: who writes
into one has its next holder write where he says. A second user tries every way to that memory."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.other_users import AS_ROOT, DAEMON, STRANGER, output_as, start_as, sticky
from tests.support.raw import Dtype, Frame, Op, Opcode, RawClient, Status, scale_bits

ID, EPOCH, COUNT = 0xABC, 1, 512
LIST_AT = 4096 + 24  # of the first chunk's lock: the two list pointers of glibc's robust mutex
NOWHERE = 0x414141414141
# What a memory server is, as far as memory goes. Its own user may look into the process, as without credentials.
SERVER = """
import ctypes
from pathlib import Path
from memserver.engine import Engine, SegmentForm
from memserver.memory_dir import MemoryDirectory
from memserver.recovery import recover
from memserver.segments import Segments
become()
ctypes.CDLL(None).prctl(4, 1)
place = MemoryDirectory(Path(sys.argv[2]), "a")
engine = Engine(7, 1, 4 << 20)
segments = Segments(engine, place, 4 << 20)
recover(engine, place, segments, 4 << 20)
found = segments.ids()
segments.create(SegmentForm(id=int(sys.argv[3]), epoch=1, dtype=6, nbytes=4096, chunk_bytes=4096))
engine.listen_unix(place.socket_path)
os.chmod(place.socket_path, 0o777)
print("serves", engine.listen_tcp("127.0.0.1", 0), *found, flush=True)
sys.stdin.read()
engine.close()
place.close()
"""
# Tells what came of each way: "yes", or the error. Where it gets memory it may write to, it writes.
ATTACK = """
import array, ctypes, errno, mmap, socket
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
pid, segment, sock, own = int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
hello_and_attach = bytes.fromhex(sys.argv[6])
become()

def write_into(fd):
    memory = mmap.mmap(fd, 8192)
    memory[4120:4136] = memory[4120:4136]

def by_its_path(): write_into(os.open(segment, os.O_RDWR))
def by_its_path_to_read(): mmap.mmap(os.open(segment, os.O_RDONLY), 8192, prot=mmap.PROT_READ)
def by_a_path_alone(): write_into(os.open(f"/proc/self/fd/{os.open(segment, os.O_PATH)}", os.O_RDWR))
def by_its_length(): os.truncate(segment, os.stat(segment).st_size)
def by_its_mode(): os.chmod(segment, 0o600)
def by_its_name(): os.rename(segment, f"{segment}.x"); os.rename(f"{segment}.x", segment)
def by_a_file_beside_it():
    os.close(os.open(f"{segment}.new", os.O_CREAT | os.O_RDWR, 0o666))
    os.unlink(f"{segment}.new")
def by_a_link(): (own / "link").symlink_to(segment); write_into(os.open(own / "link", os.O_RDWR))
def by_a_hard_link(): os.link(segment, own / "hard"); write_into(os.open(own / "hard", os.O_RDWR))
def by_the_servers_descriptor():
    (at,) = [each for each in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(each) == str(segment)]
    write_into(os.open(at, os.O_RDWR))
def by_the_servers_memory(): os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
def by_a_copy_of_its_descriptor():
    if libc.syscall(438, os.pidfd_open(pid), 0, 0) < 0:  # pidfd_getfd
        raise OSError(ctypes.get_errno(), "")
def by_the_socket():
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(20)
        peer.connect(sock)
        got, fds = b"", []
        try:
            peer.sendall(hello_and_attach)
            while not fds:
                part, control, _, _ = peer.recvmsg(64, 64)
                if not part:
                    raise ConnectionResetError(errno.ECONNRESET, "closed")
                got += part
                fds += [array.array("i", data)[0] for _, _, data in control]
        except BrokenPipeError:
            raise ConnectionResetError(errno.ECONNRESET, "closed") from None
        write_into(fds[0])
        return

WAYS = [way for name, way in globals().copy().items() if name.startswith("by_")]

def attack(whom):
    for way in WAYS:
        try:
            way()
            told = "yes"
        except OSError as error:
            told = errno.errorcode[error.errno]
        print(whom, way.__name__, told, flush=True)
    for name in ("link", "hard"):
        (own / name).unlink(missing_ok=True)

attack("user")
libc.prctl(4, 1)  # its files in /proc are its own again
# Root in a user namespace of its own has every capability in there, and out here it is the same user.
if libc.unshare(0x10000000) == 0:
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {user} 1")
    assert os.geteuid() == 0
    attack("root")
"""
# Writes into files what it wants to be the list of a lock, again and again, until its input ends.
SCRIBBLE = """
import mmap, struct, threading
become()
memories = [mmap.mmap(os.open(path, os.O_RDWR), 0) for path in sys.argv[2:]]
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
print("writes", flush=True)
while not ended.wait(0.0005):
    for memory in memories:
        memory[4120:4136] = struct.pack("<QQ", 0x414141414141, 0x414141414141)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """Directories of the server and of the stranger."""
    with sticky() as found:
        for name, user in (("memory", DAEMON), ("own", STRANGER), ("daemons", DAEMON)):
            (found / name).mkdir(mode=0o700)
            os.chown(found / name, user, user)
        yield found


@contextmanager
def serving(memory: Path, found: str = "") -> Iterator[tuple[int, int]]:
    """A server's process id and port; `found` are the segments that it took over. It must end well."""
    process = start_as(DAEMON, SERVER, memory, ID)
    try:
        assert process.stdout is not None
        lines = []
        while not (lines and lines[-1].startswith("serves ")):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        port, _, taken = lines[-1].removeprefix("serves ").strip().partition(" ")
        assert taken == found, "".join(lines)
        yield process.pid, int(port)
        told, _ = process.communicate("", timeout=20)
        assert process.returncode == 0, told
    finally:
        process.kill()
        process.communicate()


def add(port: int, segment: int, times: int = 50) -> int:
    """Add ones that often, each under the chunk's lock; return what the elements are then."""
    with RawClient(port) as client:
        client.hello()
        whole = Frame(Opcode.READ, dtype=Dtype.INT64, epoch=EPOCH, segment=segment, length=8 * COUNT)
        ones = struct.pack("<q", 1) * COUNT
        for _ in range(times):
            frame = replace(whole, opcode=Opcode.ACCUMULATE, op=Op.SUM, argument=scale_bits(1.0))
            assert client.ask(frame, ones)[0].status == Status.OK
        reply, data = client.ask(whole)
        assert reply.status == Status.OK
    (value,) = set(struct.unpack(f"<{COUNT}q", data))
    return int(value)


def attack(user: int, pid: int, memory: Path, own: Path) -> dict[str, str]:
    """What came of each way."""
    session = Frame(Opcode.HELLO, session=99, sequence=1)
    frames = session.pack() + replace(session, opcode=Opcode.ATTACH, sequence=2, segment=ID, epoch=EPOCH).pack()
    segment = memory / f"smb.a.{ID:016x}.segment"
    lines = output_as(user, ATTACK, pid, segment, memory / "smb.a.sock", own, frames.hex()).splitlines()
    return dict(line.rsplit(" ", 1) for line in lines)


@AS_ROOT
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_second_user_gets_no_memory(place: Path, mode: int) -> None:
    """By paths, links, names, the Unix socket and the server's process, also as root of a user namespace; and where
    the operator has opened the directory for others to look into. The server's own user gets it in each way."""
    memory = place / "memory"
    memory.chmod(mode)
    with serving(memory) as (pid, port):
        assert add(port, ID) == 50
        told = attack(STRANGER, pid, memory, place / "own")
        assert {what for what in told.values() if what != "yes"} <= {"EACCES", "EPERM", "ECONNRESET", "ENOENT"}, told
        assert [way for way, what in told.items() if what == "yes"] == [], told
        assert len(told) in (13, 26), told
        if mode == 0o755:
            assert told["user by_the_socket"] == "ECONNRESET"  # it got there, and was shut out
        assert add(port, ID) == 100
        assert {path.name for path in memory.iterdir()} == {
            f"smb.a.{ID:016x}.segment", "smb.a.journal", "smb.a.sock", "smb.a.lock",
        }  # fmt: skip
        own = attack(DAEMON, pid, memory, place / "daemons")
        assert [way for way, what in own.items() if what != "yes" and way.startswith("user ")] == [], own
        assert add(port, ID) == 150


@AS_ROOT
def test_a_lock_that_a_second_user_writes_is_not_taken(place: Path) -> None:
    """Whole segments whose locks' lists another user writes, in the directory under the right names, by whatever way
    they came there: none is mapped. The same file, of the server's user alone, is, and it is added to."""
    memory, own = place / "memory", place / "own"
    memory.chmod(0o755)
    with serving(memory) as (_, port):
        assert add(port, ID) == 50
    made = memory / f"smb.a.{ID:016x}.segment"
    image = made.read_bytes()
    made.unlink()

    def planted(number: int, path: Path, user: int, mode: int = 0o666) -> Path:
        hostile = bytearray(image)
        struct.pack_into("<Q", hostile, 16, number)
        struct.pack_into("<QQ", hostile, LIST_AT, NOWHERE, NOWHERE)
        path.write_bytes(hostile)
        path.chmod(mode)
        os.chown(path, user, user)
        return path

    paths = {number: memory / f"smb.a.{number:016x}.segment" for number in range(1, 6)}
    written = [
        planted(1, paths[1], STRANGER),
        planted(2, own / "two", STRANGER),
        planted(3, own / "three", STRANGER),
        planted(4, paths[4], DAEMON),
        planted(5, own / "five", DAEMON),
    ]
    paths[2].hardlink_to(written[1])
    paths[3].symlink_to(written[2])
    paths[5].hardlink_to(written[4])
    scribbler = start_as(STRANGER, SCRIBBLE, *written)
    try:
        assert scribbler.stdout is not None
        assert scribbler.stdout.readline() == "writes\n"
        with serving(memory) as (_, port):
            with RawClient(port) as client:
                client.hello()
                for number in paths:
                    frame = Frame(Opcode.READ, dtype=Dtype.INT64, epoch=EPOCH, segment=number, length=8)
                    assert client.ask(frame)[0].status == Status.NOT_FOUND
            assert add(port, ID) == 50
            assert scribbler.poll() is None
    finally:
        scribbler.communicate("", timeout=20)
    for path in (*paths.values(), made):
        path.unlink()
    made.write_bytes(image)
    made.chmod(0o600)
    os.chown(made, DAEMON, DAEMON)
    with serving(memory, str(ID)) as (_, port):
        assert add(port, ID) == 100
