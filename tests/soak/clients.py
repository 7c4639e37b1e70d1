"""The functions that run in the processes of a soak. Each notes what it asks and what it is told, until the file `stop`
is there."""

from __future__ import annotations

import contextlib
import errno
import queue
import time
from pathlib import Path

import numpy as np

import smb
import smb.train
from smb.files.copying import snapshot
from tests.support import second_copy
from tests.support.checkers import check_one_version, check_untorn, delta
from tests.support.fsx import Tester
from tests.support.history import Notes, Step, draw_tickets, take_turns

TIMEOUT_S = 60.0  # of a call: longer than any fault
PAUSE_S = 0.03  # between calls: there are many of us, and the notes of an hour are read at the end
MEET_S = 5.0
MIRROR_S = 10.0  # for the next version to come to a mirror; then it is asked for anew
FILE_S = 30.0  # for an operation on a file, once all faults are over
WEIGHTS = 20_000
LEASE_S = 6.0  # of a training's member


def add(address: str, way: str, path: Path, stop: Path, lane: str) -> None:
    """Add to the lane and to "common"."""
    notes = Notes(path)
    with smb.connect(address, transport=way, timeout=TIMEOUT_S) as client:
        own, common = client.open(lane), client.open("common")
        ours = delta(own.size)
        while not stop.exists():
            notes.add(Step.ASKS)
            own.accumulate(ours)
            common.accumulate(ours)
            notes.add(Step.TOLD)
            time.sleep(PAUSE_S)


def draw(address: str, way: str, path: Path, stop: Path) -> None:
    """Draw from "tickets"."""
    draw_tickets(None, address, way, path, stop, PAUSE_S, "tickets")


def lock(address: str, way: str, path: Path, stop: Path) -> None:
    """Write to "locked" under its lock."""
    take_turns(None, address, way, path, stop, PAUSE_S)


def meet(address: str, way: str, path: Path, stop: Path) -> None:
    """Arrive at the barrier that "meetings" names, together with one other; who passes names the next one."""
    notes = Notes(path)
    with smb.connect(address, transport=way, timeout=TIMEOUT_S) as client:
        meetings = client.open("meetings")
        while not stop.exists():
            number = int(meetings.read(0, 1)[0])
            notes.add(Step.ASKS, number)
            # The other was killed, or passed and could not say so; or the coordinator, who knows the barriers, is away,
            # or its disk is full.
            with contextlib.suppress(
                smb.TimeoutError, smb.BrokenBarrierError, smb.UnavailableError, smb.OutOfMemoryError
            ):
                client.barrier(f"meeting-{number}", 2, timeout=MEET_S)
                notes.add(Step.TOLD, number)
                meetings.compare_swap(0, number, number + 1)
            time.sleep(PAUSE_S)


def goal() -> smb.train.Values:
    """Where the trainings go."""
    return np.random.default_rng(7).standard_normal(WEIGHTS).astype(np.float32)


def train(address: str, way: str, path: Path, stop: Path, name: str) -> None:
    """Take part in a training; the loss is half the squared distance from the goal, its gradient is noisy."""
    notes, target, values = Notes(path), goal(), np.zeros(WEIGHTS, np.float32)
    scheme = smb.train.DiLoCo(every=5) if name == "rounds" else smb.train.EASGD(every=4)
    rng = np.random.default_rng()
    with (
        smb.connect(address, transport=way, timeout=TIMEOUT_S) as client,
        smb.train.join(client, name, values, scheme, lease=LEASE_S, replicas=2) as worker,
    ):
        while not stop.exists():
            notes.add(Step.ASKS)
            values -= np.float32(0.1) * (values - target + rng.standard_normal(WEIGHTS).astype(np.float32))
            worker.step()
            notes.add(Step.TOLD)
            time.sleep(PAUSE_S)


def use_copies(address: str, way: str, path: Path, stop: Path, number: int) -> None:
    """Do all that a client can with buffers of two copies; the count of rounds goes into a file beside the notes."""
    told: queue.SimpleQueue[tuple[int, int, str]] = queue.SimpleQueue()
    second_copy.work(told, address, way, number, path, stop, 5 * PAUSE_S)
    _, done, why = told.get_nowait()
    assert not why, why
    path.with_suffix(".done").write_text(str(done))


def publish(address: str, way: str, path: Path, stop: Path) -> None:
    """Publish to "versions": n has n in every element."""
    notes = Notes(path)
    with smb.connect(address, transport=way, timeout=TIMEOUT_S) as client:
        buffer = client.open("versions")
        while not stop.exists():
            notes.add(Step.ASKS)
            notes.add(Step.TOLD, buffer.publish(np.full(buffer.size, buffer.version + 1)))
            time.sleep(PAUSE_S)


def read(address: str, way: str, path: Path, stop: Path) -> None:
    """Read "versions": each is whole, and none is older than the one before."""
    notes, last = Notes(path), 0
    with smb.connect(address, transport=way, timeout=TIMEOUT_S) as client:
        buffer = client.open("versions")
        buffer.wait(1, timeout=TIMEOUT_S)  # nothing can be read before
        while not stop.exists():
            notes.add(Step.ASKS)
            version = check_one_version(buffer.read())
            assert version >= last, f"version {version} after {last}"
            last = version
            notes.add(Step.TOLD, version)
            time.sleep(PAUSE_S)


def read_mirror(address: str, way: str, path: Path, stop: Path, server: str) -> None:
    """Read "versions" from its mirror on a server that loses its memory at times, and have it made anew then."""
    notes, last = Notes(path), 0
    with smb.connect(address, transport=way, timeout=TIMEOUT_S) as client:
        mirror = None
        while not stop.exists():
            notes.add(Step.ASKS)
            try:
                if mirror is None:
                    client.relay("versions", [server])
                    mirror = client.open(f"versions.mirror.{server}")
                mirror.wait(last + 1, timeout=MIRROR_S)
                version = check_one_version(mirror.read())
            except (smb.NotFoundError, smb.OutOfMemoryError, smb.TimeoutError, smb.UnavailableError):
                mirror = None
                time.sleep(PAUSE_S)
                continue
            assert version > last, f"version {version} after {last}"
            last = version
            notes.add(Step.TOLD, version)
            time.sleep(PAUSE_S)


def save(address: str, way: str, path: Path, stop: Path, directory: Path) -> None:
    """Make snapshots of "common": each chunk is whole, and no element is less than it was."""
    notes = Notes(path)
    directory.mkdir(exist_ok=True)
    before: np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None = None
    with smb.connect(address, transport=way, timeout=TIMEOUT_S) as client:
        chunk = client.open("common").layout.chunk_bytes // 8
        while not stop.exists():
            notes.add(Step.ASKS)
            try:
                snapshot(client, "common", directory / "common.npy")
            except smb.UnavailableError:  # the coordinator is away; called again it goes on
                time.sleep(PAUSE_S)
                continue
            found = np.load(directory / "common.npy")
            for at in range(0, found.size, chunk):
                check_untorn(found[at : at + chunk], at, "snapshot")
            assert before is None or (found >= before).all(), "a snapshot is older than the one before"
            before = found
            notes.add(Step.TOLD)
            time.sleep(20 * PAUSE_S)


def change_files(_address: str, _way: str, path: Path, stop: Path, file: Path, model: Path, seed: int) -> None:
    """Random operations on a file in the mount and on a plain one beside it. One that failed is repeated: it may have
    changed a part of the file, so the two are compared only once it succeeds.
    """
    notes, tester = Notes(path), Tester(file, model, seed, fixed=False)

    def do_one() -> OSError | None:
        notes.add(Step.ASKS)
        before = tester.random.getstate()
        try:
            tester.run(1, without=("append", "replace"))  # twice is not the same as once
        except OSError as error:
            # The coordinator is away, or its disk is full. The kernel makes EIO of the first where it writes what was
            # mapped.
            mapped = tester.doing == "mapped_write" and error.errno == errno.EIO
            if error.errno not in (errno.EHOSTUNREACH, errno.ENOSPC) and not mapped:
                raise
            tester.random.setstate(before)  # the same operation again
            return error
        notes.add(Step.TOLD)
        return None

    failed: OSError | None = None
    while not stop.exists():
        failed = do_one()
        time.sleep(PAUSE_S)
    end = time.monotonic() + FILE_S
    while failed is not None:
        assert time.monotonic() < end, f"{tester.doing} still fails: {failed}"
        failed = do_one()
        time.sleep(PAUSE_S)
    tester.whole("at the end")
