"""The physical limits as contenders: what limits.c reaches, one variant each. The best one of a cell is its limit."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perf import remote
from perf.contender import ASIDE, FETCH_ADD, LIMIT, READ, SHM, TCP, TLS, WRITE, Case, Run, Sample, sample_of

FOLDER = Path(__file__).resolve().parent
SOURCES = [FOLDER / name for name in ("limits.c", "limits_memory.c", "limits_sockets.c", "limits_tls.c")]
BUILD = FOLDER.parent / "build" / "perf"
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O3", "-flto", "-march=native", "-Wall", "-Wextra", "-Werror", "-pthread")
# Below this, neither a second connection nor the size of socket buffers matters.
SMALL_BYTES = 256 << 10


def build() -> Path:
    """Return the program, compiled if source, flags or processor are new. Raises RuntimeError with what gcc says."""
    files = [path.read_bytes() for path in (FOLDER / "limits.h", *SOURCES)]
    text = b"".join(files) + " ".join(FLAGS).encode() + _processor().encode()
    program = BUILD / f"limits-{hashlib.sha256(text).hexdigest()[:12]}"
    if not program.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        staged = program.with_suffix(f".{os.getpid()}")
        command = [_compiler() or "gcc", *FLAGS, *map(str, SOURCES), "-lssl", "-lcrypto", "-o", str(staged)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise RuntimeError(f"{SOURCES[0]} does not compile: {made.stderr.strip()[-500:]}")
        staged.replace(program)
    return program


def _compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


def _processor() -> str:
    """The processor's features, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.machine())


class Limit:
    """One variant of limits.c. `transport` is the program's own name for it; `over` the transport whose limit it is.

    Nothing runs except during `measure`: every case is a start of the program.
    """

    def __init__(self, name: str, transport: str, over: str, **options: int) -> None:
        self.name = name
        self.kind = LIMIT if transport == over or over == TLS else ASIDE  # Unix sockets are beside TCP's, not its limit
        self._transport = transport
        self._over = over
        self._options = options

    def missing(self) -> str | None:
        return None if _compiler() else "no C compiler (gcc)"

    def takes(self, case: Case) -> bool:
        if case.transport != self._over and not (case.remote and self._over == TCP == self._transport):
            return False
        return self._takes_memory(case) if self._transport == SHM else self._takes_socket(case)

    def _takes_memory(self, case: Case) -> bool:
        """Locks are for what several change at once: an accumulate needs them, a write is tried with and without."""
        if self._options.get("nontemporal") and (case.operation == FETCH_ADD or platform.machine() != "x86_64"):
            return False
        locks = bool(self._options.get("locks"))
        if case.operation in (READ, FETCH_ADD) or case.clients == 1:
            return not locks
        return locks or case.operation == WRITE

    def _takes_socket(self, case: Case) -> bool:
        plain = self._options.get("connections", 1) == 1 and self._options.get("buffer_bytes", 0) == 0
        return plain or case.nbytes >= SMALL_BYTES

    def __enter__(self) -> Limit:
        self._program = build()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, case: Case) -> Sample:
        asked: dict[str, Any] = {
            "operation": case.operation,
            "transport": self._transport,
            "bytes": case.nbytes,
            "clients": case.clients,
            "seconds": case.seconds,
            **self._options,
        }
        namespace = remote.server_namespace()
        if namespace is not None:
            asked |= {"address": remote.server_address(), "namespace": str(namespace)}
        command = [str(self._program), *(f"{name}={value}" for name, value in asked.items())]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                out, said = process.communicate()
            finally:
                process.kill()  # where we are interrupted; its children end with it
        if process.returncode != 0:
            raise RuntimeError(said.decode(errors="replace").strip() or f"limits ended with {process.returncode}")
        return _sample(case, out, served=self._transport != SHM)


def _sample(case: Case, out: bytes, *, served: bool) -> Sample:
    """Put together what limits.c printed. A batch of calls is one record there: times are shares of it."""
    head, _, raw = out.partition(b"\n")
    told: dict[str, Any] = json.loads(head)
    times = np.frombuffer(raw)
    runs: list[Run] = []
    for client in told["clients"]:
        count = client["batches"]
        starts, ends, times = times[:count], times[count : 2 * count], times[2 * count :]
        run = Run(starts.tolist(), ends.tolist(), client["cpu_seconds"], client["calls"], client["batch_calls"])
        runs.append(run)
    return sample_of(case, runs, told["server_cpu_seconds"] if served else None)


def _sockets(family: str, over: str, buffers: Sequence[int], **options_of_all: int) -> list[Limit]:
    title = "TLS" if over == TLS else "TCP" if family == TCP else "Unix"
    limits = []
    for polling, connections in ((0, 1), (0, 2), (1, 1), (1, 2)):
        if polling and connections > 1 and (os.cpu_count() or 1) < 4:
            continue  # four pollers, a core for each of which there is not
        for buffer_bytes in buffers:
            name = f"bare {title} socket{'s'[: connections > 1]}, {'polling' if polling else 'blocking'}"
            name += f", {connections} connections" if connections > 1 else ""
            name += f", {buffer_bytes >> 10} KiB buffers" if buffer_bytes else ""
            options = {"polling": polling, "connections": connections, "buffer_bytes": buffer_bytes, **options_of_all}
            limits.append(Limit(name, family, over, **options))
    return limits


CONTENDERS = [
    Limit("memory", SHM, SHM),
    Limit("memory, non-temporal", SHM, SHM, nontemporal=1),
    Limit("memory, stripe locks", SHM, SHM, locks=1),
    Limit("memory, non-temporal, stripe locks", SHM, SHM, nontemporal=1, locks=1),
    *_sockets(TCP, TCP, (0, 256 << 10, 1 << 20)),
    *_sockets("unix", TCP, (0, 256 << 10)),
    *_sockets(TCP, TLS, (0,), tls=1),
]
