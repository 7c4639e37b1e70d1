"""MPI's one-sided operations, of Open MPI and of MPICH, through mpi4py: over shared memory and over TCP.

Rank 0 holds the window, the others are the clients: Put, Get, Accumulate and Fetch_and_op under lock_all, each with its
flush. Over TCP neither is one-sided: rank 0 has to be within MPI, so it waits there, which is what its CPU seconds are.
Over shared memory it sleeps. `python -m perf.peers.mpi CASE FILE` is what a rank runs; rank 0 leaves the runs in
the file (a launcher takes half a minute to pass on the times of 400,000 calls through its output).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from perf import remote
from perf.clients import ANSWER_S, Array, check, end_with_parent, zeros
from perf.contender import FETCH_ADD, READ, SHM, TCP, Case, Run, Sample, sample_of
from perf.peers import processes

OWNER = 0
RANK_VARIABLE = "PMI_RANK"  # of MPICH's launcher, before MPI is there
NAP_S = 0.001  # of the owner, where the clients do without it


class Window:
    """The owner's memory, from a client."""

    def __init__(self, window: Any) -> None:
        from mpi4py import MPI

        self._window = window
        self._float, self._sum, self._int64 = MPI.FLOAT, MPI.SUM, MPI.INT64_T
        self._value, self._before = np.zeros(1, np.int64), np.zeros(1, np.int64)

    def write(self, source: Array) -> None:
        self._window.Put((source, self._float), OWNER)
        self._window.Flush(OWNER)

    def read(self, into: Array) -> Array:
        self._window.Get((into, self._float), OWNER)
        self._window.Flush(OWNER)
        return into

    def accumulate(self, contribution: Array) -> None:
        self._window.Accumulate((contribution, self._float), OWNER, op=self._sum)
        self._window.Flush(OWNER)

    def fetch_add(self, value: int) -> int:
        self._value[0] = value
        self._window.Fetch_and_op((self._value, self._int64), (self._before, self._int64), OWNER, op=self._sum)
        self._window.Flush(OWNER)
        return int(self._before[0])

    def close(self) -> None:
        pass


def rank_main(case: Case, answer: Path) -> None:
    end_with_parent()
    if os.environ.get(RANK_VARIABLE) == str(OWNER):
        remote.move_to_server()  # its connection to the launcher is there already
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if case.transport == SHM:
        window = MPI.Win.Allocate(case.nbytes if world.rank == OWNER else 0, comm=world)
    else:  # Open MPI's allocated windows are shared memory on one host, whatever transport is asked for
        window = MPI.Win.Create(zeros(case.nbytes // 4 if world.rank == OWNER else 0), comm=world)

    def together() -> None:
        """A barrier in which the owner answers the clients meanwhile: all it does over TCP."""
        barrier = world.Ibarrier()
        if world.rank == OWNER and case.transport == SHM:
            while not barrier.Test():
                time.sleep(NAP_S)
        else:
            barrier.Wait()

    if world.rank == OWNER:
        array: Array = np.frombuffer(window.tomemory(), np.float32)
        window.Lock(OWNER)
        array[:] = processes.start_values(case)
        window.Unlock(OWNER)
    world.Barrier()
    window.Lock_all()
    run: Run | None = None
    cpu_s = 0.0
    if world.rank == OWNER:
        together()
        cpu_s = time.process_time()
        together()
        cpu_s = time.process_time() - cpu_s
    else:
        run = processes.work(case, world.rank - 1, Window(window), together)
        together()
    window.Unlock_all()
    runs = world.gather(run, OWNER)
    if world.rank == OWNER:
        window.Lock(OWNER)
        assert runs is not None
        clients = [run for run in runs if run is not None]
        if case.operation != READ:
            found = array.view(np.int64)[:1] if case.operation == FETCH_ADD else array
            check(case, found, sum(run.calls for run in clients))
        window.Unlock(OWNER)
        answer.write_bytes(pickle.dumps((clients, cpu_s)))
    window.Free()


class Mpi(processes.Peer):
    """One implementation: where its files are, and how it is told to use a transport."""

    name: str
    package: str  # on PyPI
    abi: str  # what mpi4py calls it
    library: str
    launcher: str
    options: tuple[str, ...] = ()
    transports: dict[str, tuple[tuple[str, ...], dict[str, str]]]  # transport: launcher options, environment

    def missing(self) -> str | None:
        try:
            self._file(self.library), self._file(self.launcher)
        except importlib.metadata.PackageNotFoundError:
            return f"no Python package {self.package} (perf/peers/README.md)"
        return processes.missing_modules("mpi4py")

    def takes(self, case: Case) -> bool:
        return case.transport in self.transports or (case.remote and self.not_remote is None)

    def measure(self, case: Case) -> Sample:
        options, environment = self.transports[TCP if case.over_tcp else SHM]
        library = self._file(self.library)
        with (
            tempfile.TemporaryDirectory(prefix="perf-mpi-") as directory,
            processes.program(
                self._file(self.launcher),
                *self.options,
                *options,
                *("-n", str(case.clients + 1)),
                *(sys.executable, "-m", "perf.peers.mpi", json.dumps(asdict(case)), f"{directory}/answer"),
                environment={
                    "LD_LIBRARY_PATH": f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}",
                    "MPI4PY_MPIABI": self.abi,
                    **{name: value.format(device=remote.device()) for name, value in environment.items()},
                },
            ) as launched,
        ):
            _, error = launched.communicate(timeout=ANSWER_S + case.seconds)
            if launched.returncode:
                raise RuntimeError(f"{self.name}: {case}: its ranks ended with {launched.returncode}:\n{error[-4000:]}")
            runs, owner_cpu_s = pickle.loads(Path(directory, "answer").read_bytes())
        return sample_of(case, runs, None if case.transport == SHM else owner_cpu_s)

    def _file(self, name: str) -> Path:
        """Where the package's file of that name is. PackageNotFoundError where the package is not installed."""
        for file in importlib.metadata.files(self.package) or []:
            if file.name == name:
                return Path(str(file.locate())).resolve()
        raise importlib.metadata.PackageNotFoundError(f"{self.package} has no {name}")


class OpenMpi(Mpi):
    name = "Open MPI 5"
    package = "openmpi"
    abi = "openmpi"
    library = "libmpi.so.40"
    not_remote = "its ranks reach their launcher over loopback, so each host would need one, started by ssh"
    launcher = "prterun"  # both packages have an mpirun; the last one installed owns that name
    options = ("--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none")
    transports = {  # noqa: RUF012
        SHM: ((), {}),
        TCP: (
            (),
            {
                "OMPI_MCA_pml": "ob1",
                "OMPI_MCA_btl": "tcp,self",
                "OMPI_MCA_osc": "rdma",
                "OMPI_MCA_btl_tcp_if_include": "{device}",
                "OMPI_MCA_btl_tcp_sndbuf": str(4 << 20),
                "OMPI_MCA_btl_tcp_rcvbuf": str(4 << 20),
            },
        ),
    }


class Mpich(Mpi):
    name = "MPICH 5"
    package = "mpich"
    abi = "mpich"
    library = "libmpi.so.12"
    launcher = "mpiexec.hydra"
    transports = {  # noqa: RUF012
        SHM: ((), {}),
        TCP: (
            (),
            {
                "MPIR_CVAR_CH4_NETMOD": "ofi",
                "MPIR_CVAR_NOLOCAL": "1",
                "FI_PROVIDER": "tcp",
                "FI_TCP_IFACE": "{device}",
            },
        ),
    }


CONTENDERS = [OpenMpi(), Mpich()]

if __name__ == "__main__":
    rank_main(Case(**json.loads(sys.argv[1])), Path(sys.argv[2]))
