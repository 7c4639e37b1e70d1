"""Two peers of perf/peers from end to end, at small size; wrong bytes and missing software are said."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from perf.clients import SPAWN
from perf.contender import ACCUMULATE, FETCH_ADD, OPERATIONS, READ, SHM, TCP, WRITE, Case
from perf.peers import do_it_yourself, grpc_python, mpi, processes, redis_store

SECONDS = 0.02


def measured(contender, case):
    assert contender.missing() is None
    assert contender.takes(case)
    with contender:
        return contender.measure(case)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_shared_memory_and_locks(operation):
    nbytes = 8 if operation == FETCH_ADD else 1 << 20  # four stripes: two clients that begin at different ones
    sample = measured(do_it_yourself.SharedMemoryAndLocks(), Case(SHM, operation, nbytes, 2, SECONDS))
    assert sample.calls >= 6
    assert sample.bytes_per_second > 0
    assert sample.server_cpu is None


@pytest.mark.parametrize("operation", [READ, ACCUMULATE, FETCH_ADD])
def test_grpc_unary(operation):
    nbytes = 8 if operation == FETCH_ADD else 5 << 20  # above gRPC's own limit of 4 MiB
    sample = measured(grpc_python.GrpcUnary(), Case(TCP, operation, nbytes, 1, SECONDS))
    assert sample.calls >= 3
    assert sample.server_cpu > 0


@pytest.mark.parametrize("operation", [WRITE, READ, ACCUMULATE])
def test_grpc_without_copies(operation):
    sample = measured(grpc_python.GrpcUncopied(), Case(TCP, operation, 5 << 20, 1, SECONDS))
    assert sample.calls >= 3


def test_a_kept_message_is_what_is_read_and_added_to():
    store = grpc_python.Store(8)
    first, second = np.ones(2, np.float32), np.full(2, 3, np.float32)
    store.keep(first.tobytes(), None)
    store.accumulate_kept(second.tobytes(), None)
    store.accumulate_kept(second.tobytes(), None)
    assert store.read_kept(b"", None) == np.full(2, 7, np.float32).tobytes()
    store.keep(second.tobytes(), None)
    assert store.read_kept(b"", None) == second.tobytes()


def test_grpc_streamed():
    sample = measured(grpc_python.GrpcStreamed(), Case(TCP, WRITE, (2 << 20) + 4096, 1, SECONDS))
    assert sample.calls >= 3


class Forgetful(do_it_yourself.Mapped):
    """It loses the last element of what is written or added, and counts nothing."""

    def write(self, source):
        self._array[:-1] = source[:-1]

    def accumulate(self, contribution):
        self._array[:-1] += contribution[:-1]

    def read(self, into):
        into[1:] = self._array[:-1]
        return into


@pytest.mark.parametrize("operation", [WRITE, READ, ACCUMULATE])
def test_wrong_bytes_are_an_error(operation):
    case = Case(SHM, operation, 4096, 1, SECONDS)
    memory = do_it_yourself.SharedMemory(create=True, size=case.nbytes)
    try:
        with pytest.raises(RuntimeError, match="wrong bytes"):
            processes.measure(case, functools.partial(Forgetful, memory.name, [SPAWN.Lock()] * 64))
    finally:
        memory.close()
        memory.unlink()


def test_a_server_that_fails_ends_and_is_told():
    with pytest.raises(RuntimeError, match="ended without an answer"), processes.server(print, object()):
        pass  # print returns, without having called ready
    with pytest.raises(RuntimeError, match="TypeError"), processes.server(divmod, 0):
        pass  # divmod(ready, 0)


def test_programs_end_on_errors():
    started = []

    def fail():
        with processes.program("sleep", "1000") as program:
            started.append(program)
            assert program.poll() is None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert started[0].returncode is not None


def test_missing_software_is_said(monkeypatch):
    assert "no_such_module" in processes.missing_modules("numpy", "no_such_module")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "redis-server" in redis_store.Redis().missing()

    class Absent(mpi.Mpi):
        package, library, launcher = "no-such-package", "x", "y"

    assert "no-such-package" in Absent().missing()
