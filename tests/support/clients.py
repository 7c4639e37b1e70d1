"""Clients in processes of their own, started together. Their functions are here: a spawned process imports this
module."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import smb
from tests.support.forks import Forks
from tests.support.raw import Frame, Opcode, RawClient
from tests.support.transports import FAR, SLOWNESS

PERIOD = 251
DEADLINE_S = 60.0 * SLOWNESS
TIMEOUT_S = 30.0 * SLOWNESS  # of one call
TURN = 1 << 32  # what is accumulated to a counter beside its tickets: the low half stays theirs
# Forks of a process that has imported us: that takes half a second, and 10 s in a virtual machine.
_context = Forks()
_context.set_forkserver_preload(["tests.support.clients"])


def _process(target: Callable[..., object], *given: Any, daemon: bool = True, **options: Any) -> Any:
    """A process that is not started."""
    return _context.Process(target=target, args=given, kwargs=options, daemon=daemon)


def pattern(offset: int, count: int, dtype: str) -> np.ndarray[Any, Any]:
    """(i mod 251) + 1 of the element's place in the buffer: a piece that goes elsewhere is noticed."""
    return (np.arange(offset, offset + count) % PERIOD + 1).astype(dtype)


def run_together(*tasks: tuple[Any, ...]) -> list[Any]:
    """Run each (function, *arguments) as function(barrier, *arguments) in a process of its own.

    Returns what they return, in order. Raises if one fails.
    """
    barrier = _context.Barrier(len(tasks))
    results: Any = _context.Queue()
    processes = [
        _process(_run, results, number, function, barrier, given, daemon=False)
        for number, (function, *given) in enumerate(tasks)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(_take(results, processes) for _ in processes)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        results.close()
        results.join_thread()
    failures = [value for value in found.values() if isinstance(value, BaseException)]
    if failures:
        raise failures[0]
    return [found[number] for number in range(len(tasks))]


def _take(results: Any, processes: Sequence[Any]) -> tuple[int, Any]:
    """Return the next result; fail early where a process died without one."""
    for _ in range(round(DEADLINE_S)):
        try:
            item: tuple[int, Any] = results.get(timeout=1)
            return item
        except queue.Empty:
            dead = [process.exitcode for process in processes if process.exitcode]
            assert not dead, f"a client ended with {dead[0]}"
    raise AssertionError(f"a client did not end within {DEADLINE_S:g} s")


def _run(results: Any, number: int, function: Callable[..., Any], barrier: Any, given: Sequence[Any]) -> None:
    try:
        results.put((number, function(barrier, *given)))
    except BaseException as error:  # noqa: BLE001 - it is raised again in the test's process
        barrier.abort()
        results.put((number, RuntimeError(f"{type(error).__name__}: {error}")))


def add(barrier: Any, address: str, transport: str, name: str, ranges: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Add the pattern to each range in turn; return the transports used."""
    with smb.connect(address, transport=transport, timeout=TIMEOUT_S) as client:
        buffer = client.open(name)
        buffer.read(0, 1)
        barrier.wait(DEADLINE_S)
        for offset, count in ranges:
            buffer.accumulate(pattern(offset, count, buffer.dtype.name), offset)
        return buffer.transports


def add_ones(barrier: Any, address: str, transport: str, times: int) -> int:
    """Add to one tensor of a buffer, knowing its name alone."""
    with smb.connect(address, transport=transport) as client:
        bias = client.open("model").tensor("layer1.bias")
        barrier.wait()
        for _ in range(times):
            bias.accumulate(np.ones(bias.shape, bias.dtype))
        return bias.size


def count_up(barrier: Any, address: str, transport: str, name: str, times: int) -> list[int]:
    """fetch_add 1 and, in between, accumulate TURN to the same element; return the tickets drawn."""
    with smb.connect(address, transport=transport, timeout=TIMEOUT_S) as client:
        buffer = client.open(name)
        buffer.read(0, 1)
        barrier.wait(DEADLINE_S)
        tickets = []
        for _ in range(times):
            tickets.append(buffer.fetch_add(0, 1) % TURN)
            buffer.accumulate([TURN, 1])
        return tickets


def create_or_open(barrier: Any, address: str, name: str) -> int:
    """Create with exist_ok as the others do at the same moment, and draw a ticket; return the buffer's id."""
    with smb.connect(address, timeout=TIMEOUT_S) as client:
        barrier.wait(DEADLINE_S)
        buffer = client.create(name, 100, "int64", exist_ok=True)
        buffer.fetch_add(0, 1)
        return next(info.id for info in client.list() if info.name == name)


def swap_up(barrier: Any, address: str, transport: str, name: str, times: int) -> int:
    """Count up by compare_swap; return how often another was faster."""
    lost = 0
    with smb.connect(address, transport=transport, timeout=TIMEOUT_S) as client:
        buffer = client.open(name)
        seen = int(buffer.read(0, 1)[0])
        barrier.wait(DEADLINE_S)
        for _ in range(times):
            while (found := buffer.compare_swap(0, seen, seen + 1)) != seen:
                seen, lost = found, lost + 1
            seen += 1
    return lost


def add_whole(barrier: Any, address: str, transport: str, name: str, times: int) -> None:
    """Add ones to the whole buffer."""
    with smb.connect(address, transport=transport, timeout=TIMEOUT_S) as client:
        buffer = client.open(name)
        ones = np.ones(buffer.size, buffer.dtype)
        barrier.wait(DEADLINE_S)
        for _ in range(times):
            buffer.accumulate(ones)


def read_whole(barrier: Any, address: str, transport: str, name: str, last: int) -> int:
    """Read until every element is `last`; return how many chunks, of all that were seen, were not uniform."""
    torn = 0
    with smb.connect(address, transport=transport, timeout=TIMEOUT_S) as client:
        buffer = client.open(name)
        per_chunk = buffer.layout.chunk_bytes // buffer.dtype.itemsize
        barrier.wait(DEADLINE_S)
        while True:
            chunks = buffer.read().reshape(-1, per_chunk)
            torn += int((chunks != chunks[:, :1]).any(axis=1).sum())
            if (chunks == last).all():
                return torn


def add_forever(
    address: str, transport: str, name: str, running: Any, pause_s: float = 0.0, additions: int = 1
) -> None:
    """Add until killed, with a pause after so many additions."""
    with smb.connect(address, transport=transport, timeout=TIMEOUT_S) as client:
        buffer = client.open(name)
        ones = np.ones(buffer.size, buffer.dtype)
        while True:
            for _ in range(additions):
                buffer.accumulate(ones)
                running.set()
            time.sleep(pause_s)


def spawn(task: Callable[..., None], *arguments: Any) -> Any:
    """Start a process that the test kills; arguments may hold what make_event gives."""
    process = _process(task, *arguments)
    process.start()
    return process


def make_event() -> Any:
    """Return an event that a spawned process can set."""
    return _context.Event()


@contextlib.contextmanager
def in_process(function: Callable[..., Any], *given: Any, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Run function(messages, *given, **options) in a process of its own, to be killed or stopped.

    Yields the process and the queue of what it tells.
    """
    messages: Any = _context.Queue()
    process = _process(function, messages, *given, **options)
    process.start()
    try:
        yield process, messages
    finally:
        process.kill()
        process.join()
        process.close()
        messages.close()
        messages.join_thread()


def copy_as_far_as(messages: Any, what: str, address: str, path: Path, name: str, last: int) -> None:
    """Snapshot or restore, in blocks of 64 KiB, and tell when so many are done; there it stays."""
    from smb.files import checksums, copying

    copying.BLOCK_BYTES = checksums.BLOCK_BYTES = 1 << 16

    def progress(done: int, _: int) -> None:
        if done >> 16 == last:
            messages.put("here")
            threading.Event().wait()

    with smb.connect(address) as client:
        if what == "restore":
            copying.restore(client, path, name, progress=progress)
        else:
            copying.snapshot(client, name, path, progress=progress)


def hold_lock(
    messages: Any, address: str, name: str, ttl: float, *, fenced: bool = False, shared: bool = False
) -> None:
    """Take the lock, tell the token, hold it; once it is lost try a fenced write, tell the errors."""
    with smb.connect(address, transport=FAR) as client:
        buffer = client.open(name) if fenced else None
        lock = buffer.lock(ttl=ttl, shared=shared) if buffer is not None else client.lock(name, ttl=ttl, shared=shared)
        lock.acquire()
        messages.put(lock.token)
        end = time.monotonic() + DEADLINE_S
        while lock.held and time.monotonic() < end:
            time.sleep(0.01)
        for call in (
            lambda: buffer.write(np.zeros(buffer.size, np.int64), fence=lock) if buffer else None,
            lock.release,
        ):
            try:
                call()
                messages.put("done")
            except smb.Error as error:
                messages.put(type(error).__name__)


def arrive(messages: Any, address: str, name: str, parties: int) -> None:
    """Arrive at a barrier and wait there."""
    with smb.connect(address, transport=FAR) as client:
        client.barrier("warm-up", 1)
        messages.put("arriving")
        client.barrier(name, parties, timeout=DEADLINE_S)


class Adders:
    """Processes that add to a lane of their own and to a common one until told to stop."""

    def __init__(self, address: str, ways: Sequence[str], count: int, timeout: float = TIMEOUT_S) -> None:
        """Create the lanes and start one process for each way."""
        self.address = address
        self.ways = ways
        self.count = count
        self._stop = _context.Event()
        self._progress = [_context.Value("q", 0, lock=False) for _ in ways]
        self._failures: Any = _context.Queue()
        with smb.connect(address, timeout=TIMEOUT_S) as client:
            for name in (*(f"lane-{i}" for i in range(len(ways))), "common"):
                client.create(name, count, "int64", stripe="64KiB")
        self.processes = [
            _process(
                _add_until, address, way, number, count, timeout, self._stop, self._progress[number], self._failures
            )
            for number, way in enumerate(ways)
        ]
        for process in self.processes:
            process.start()

    def done(self) -> list[int]:
        """Additions to each lane that were acknowledged so far."""
        return [int(progress.value) for progress in self._progress]

    def finish(self) -> list[int]:
        """Stop them, and return how many additions of each were acknowledged. Raises what one of them raised."""
        self._stop.set()
        for process in self.processes:
            process.join(DEADLINE_S)
            alive = process.is_alive()
            if alive:
                process.kill()
                process.join()
            assert not alive, "a client hangs"
        try:
            raise AssertionError(f"a client failed: {self._failures.get(timeout=0.5)}")
        except queue.Empty:
            return self.done()

    def kill(self) -> None:
        """End them all, whatever they do."""
        for process in self.processes:
            process.kill()
            process.join()

    def drop(self) -> None:
        """Delete the lanes."""
        with smb.connect(self.address, timeout=TIMEOUT_S) as client:
            for name in (*(f"lane-{i}" for i in range(len(self.ways))), "common"):
                client.delete(name)


def _add_until(
    address: str, way: str, number: int, count: int, timeout: float, stop: Any, progress: Any, failures: Any
) -> None:
    try:
        with smb.connect(address, transport=way, timeout=timeout) as client:
            own, common, delta = client.open(f"lane-{number}"), client.open("common"), pattern(0, count, "int64")
            while not stop.is_set():
                own.accumulate(delta)
                common.accumulate(delta)
                progress.value += 1
    except BaseException as error:  # noqa: BLE001 - told to the test
        failures.put(f"{type(error).__name__}: {error}")


def publish_until_killed(_messages: Any, address: str, name: str, count: int) -> None:
    """Publish version after version: n has n in every element."""
    with smb.connect(address, transport=FAR) as client:
        buffer = client.open(name)
        while True:
            buffer.publish(np.full(count, buffer.version + 1))


def write_fenced_for_ever(messages: Any, address: str, name: str, ttl: float) -> None:
    """Take the buffer's lock and write its token under it until it is lost, tell so; and again."""
    with smb.connect(address, transport=FAR) as client:
        buffer = client.open(name)
        while True:
            lock = buffer.lock(ttl=ttl).acquire()
            messages.put(("holds", lock.token))
            token = lock.token
            try:
                while True:
                    buffer.write(np.full(buffer.size, token), fence=lock)
            except smb.LockLostError:
                messages.put(("lost", token))
            with contextlib.suppress(smb.LockLostError):
                lock.release()


def be_slow(messages: Any, port: int, segment: int, epoch: int, count: int) -> None:
    """Open connections, all of which say hello; half of them send an addition a byte a second, the others ask for much
    and never read it. Tells how many there are once all are slow.
    """
    header = Frame(
        Opcode.ACCUMULATE, dtype=2, op=1, sequence=1, segment=segment, epoch=epoch, length=4096, payload=4096
    )
    read = Frame(Opcode.READ, dtype=2, segment=segment, epoch=epoch, length=65536)
    dripping: list[tuple[socket.socket, bytes]] = []
    clients = []
    for number in range(count):
        session = (1 << 50) + number
        client = RawClient(port).hello(session)
        clients.append(client)
        if number % 2:
            dripping.append((client.socket, replace(header, session=session).pack() + bytes(4096)))
        else:
            for turn in range(64):
                client.socket.sendall(replace(read, session=session, sequence=turn + 1).pack())
    messages.put(count)
    for at in itertools.count():
        for one, frame in dripping:
            one.sendall(frame[at : at + 1])
        time.sleep(1)
