"""UCX's put, get and 64-bit fetch-add through its C interface, over shared memory and TCP. It adds no floats.

The library and its headers are those of the package libucx-cu12 (no GPU is needed); ucx_peer.c is compiled against them
on first use. Over TCP the target must call UCX for anything to happen: it polls, which is what its CPU seconds are.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perf import remote
from perf.clients import Array
from perf.contender import ACCUMULATE, READ, SHM, Case, Sample
from perf.peers import processes

SOURCE = Path(__file__).with_name("ucx_peer.c")
BUILD = Path(__file__).parents[2] / "build" / "perf"
GET_MAPPED_BYTES = 64 << 10  # up to here a get by the target's help is faster than one by the kernel
# Messages of the system's own size, 8 KiB, read at a third of the speed.
SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
DECLARATIONS = """
struct peer;
int peer_open(const char *transports, const char *devices, struct peer **out);
int peer_offer(struct peer *peer, size_t nbytes, void **memory, void **address, size_t *address_bytes, void **key,
               size_t *key_bytes);
int peer_connect(struct peer *peer, const void *address, const void *key, uint64_t memory);
int peer_put(struct peer *peer, const void *source, size_t nbytes);
int peer_get(struct peer *peer, void *into, size_t nbytes);
int peer_fetch_add(struct peer *peer, int64_t value, int64_t *before);
long peer_progress(struct peer *peer, double seconds);
void peer_close(struct peer *peer);
"""


def compiled() -> Path:
    """The shared library of ucx_peer.c, made where it is not there yet."""
    spec = importlib.util.find_spec("libucx")
    assert spec is not None
    assert spec.origin is not None
    ucx = Path(spec.origin).parent
    key = hashlib.sha256(SOURCE.read_bytes() + str(ucx).encode()).hexdigest()[:16]
    library = BUILD / f"ucx_peer-{key}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = ["cc", "-O2", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{ucx}/include", str(SOURCE)]
        command += ["-o", str(unfinished), f"-L{ucx}/lib", f"-Wl,-rpath,{ucx}/lib", "-lucp", "-lucs"]
        subprocess.run(command, check=True)
        unfinished.rename(library)
    return library


def transports(case: Case) -> tuple[bytes, bytes]:
    """Names and network devices, in UCX's words: the fastest for that operation and size."""
    if case.over_tcp:
        return b"tcp,self", remote.device().encode()
    by_kernel = case.operation == READ and not target_works(case)  # CMA, which "shm" has and "posix" has not
    return (b"shm,self" if by_kernel else b"posix,self"), b""


def target_works(case: Case) -> bool:
    """Whether a process of the target's must poll: UCX gets from mapped memory by asking it."""
    return case.over_tcp or (case.operation == READ and case.nbytes <= GET_MAPPED_BYTES)


class Peer:
    """One worker of UCX; only ever in a process that is there for it, since UCX hooks the memory functions."""

    def __init__(self, library: Path, case: Case) -> None:
        import cffi

        self.ffi = cffi.FFI()
        self.ffi.cdef(DECLARATIONS)
        self.lib: Any = self.ffi.dlopen(str(library))
        out = self.ffi.new("struct peer **")
        self.check("open", self.lib.peer_open(*transports(case), out))
        self.peer = out[0]

    def check(self, what: str, status: int) -> None:
        if status:
            raise RuntimeError(f"UCX: {what} failed with status {status} (ucs_status_t in ucs/type/status.h)")

    def close(self) -> None:
        self.lib.peer_close(self.peer)


class Client(Peer):
    def __init__(self, library: Path, target: tuple[bytes, bytes, int], case: Case, _client: int) -> None:
        super().__init__(library, case)
        self.check("connect", self.lib.peer_connect(self.peer, *target))
        self._before = self.ffi.new("int64_t *")

    def write(self, source: Array) -> None:
        self.check("put", self.lib.peer_put(self.peer, self.ffi.cast("void *", source.ctypes.data), source.nbytes))

    def read(self, into: Array) -> Array:
        self.check("get", self.lib.peer_get(self.peer, self.ffi.cast("void *", into.ctypes.data), into.nbytes))
        return into

    def accumulate(self, contribution: Array) -> None:
        raise NotImplementedError("UCX adds no floats at the target")

    def fetch_add(self, value: int) -> int:
        self.check("fetch-add", self.lib.peer_fetch_add(self.peer, value, self._before))
        return int(self._before[0])


def serve(ready: Callable[[Any], None], library: Path, case: Case) -> None:
    peer = Peer(library, case)
    memory, address, key = (peer.ffi.new("void **") for _ in range(3))
    address_bytes, key_bytes = peer.ffi.new("size_t *"), peer.ffi.new("size_t *")
    offered = peer.lib.peer_offer(peer.peer, case.nbytes, memory, address, address_bytes, key, key_bytes)
    peer.check("offer", offered)
    buffer = peer.ffi.buffer
    at = int(peer.ffi.cast("uintptr_t", memory[0]))
    ready((bytes(buffer(address[0], address_bytes[0])), bytes(buffer(key[0], key_bytes[0])), at))
    while True:
        if target_works(case):
            peer.lib.peer_progress(peer.peer, 0.1)
        elif not peer.lib.peer_progress(peer.peer, 0):  # to be connected to; puts and gets go by
            time.sleep(0.001)


def _measure(case: Case) -> Sample:
    if case.over_tcp:
        os.environ.update(SEGMENTS)  # of this process and of those it starts
    library = compiled()
    with processes.server(serve, library, case) as (pid, target):
        connect = functools.partial(Client, library, target)
        return processes.measure(case, connect, pid if target_works(case) else None)


class Ucx(processes.Peer):
    name = "UCX"

    def missing(self) -> str | None:
        if shutil.which("cc") is None:
            return "no C compiler (cc)"
        return processes.missing_modules("libucx", "cffi")

    def takes(self, case: Case) -> bool:
        return (case.transport == SHM or case.over_tcp) and case.operation != ACCUMULATE

    def measure(self, case: Case) -> Sample:
        return processes.apart(_measure, case)


CONTENDERS = [Ucx()]
