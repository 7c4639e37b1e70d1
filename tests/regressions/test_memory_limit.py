"""A capacity above the control group's memory limit started without a word, and one create got the daemon killed, again
and again.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import smb
from memserver.engine import Engine, SegmentForm
from memserver.load import LastLook, load_of
from memserver.memory_dir import MemoryDirectory
from memserver.segments import Segments
from memserver.usage_by_client import Names
from smb import errors
from smb.daemon.host_memory import HEADROOM_BYTES, MemoryLimit
from smb.tools.doctor import Finding, Severity, look_at_machine
from tests.support import stem
from tests.support.daemons import Daemons, running_daemons, wait_for

MIB = 1 << 20
V1, V2 = "cgroup", "cgroup2"


def machine(root: Path, version: str, own: str, mounted: str, groups: dict[str, tuple[str, int, int]]) -> Path:
    """A system with control groups: below the mount point, their limit, and what is used of it, and taken back."""
    where = "/sys/fs/cgroup" if version == V2 else "/sys/fs/cgroup/memory"
    options = "rw" if version == V2 else "rw,memory"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(f"35 31 0:32 {mounted} {where} rw - {version} {version} {options}\n")
    (root / "proc/self/cgroup").write_text(f"5:cpu:/x\n{'0::' if version == V2 else '4:memory:'}{own}\n")
    limit_file, used_file = (
        ("memory.max", "memory.current") if version == V2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    total = "" if version == V2 else "total_"
    for below, (limit, used, freed) in groups.items():
        place = root / where.lstrip("/") / below
        place.mkdir(parents=True, exist_ok=True)
        (place / limit_file).write_text(f"{limit}\n")
        (place / used_file).write_text(f"{used}\n")
        lines = {"active_file": freed - freed // 2, "inactive_file": freed // 2, "shmem": used // 3, "file": used // 2}
        (place / "memory.stat").write_text("".join(f"{total}{name} {count}\n" for name, count in lines.items()))
    return root


@pytest.mark.parametrize(
    ("version", "own", "mounted", "groups"),
    [
        # A service of systemd, and its slice with a higher one.
        (V2, "/a.slice/b.service", "/", {"a.slice/b.service": ("500", 300, 40), "a.slice": ("900", 310, 40)}),
        # The limit of a group around it is the lower one.
        (V2, "/a.slice/b.service", "/", {"a.slice/b.service": ("max", 300, 40), "a.slice": ("500", 300, 40)}),
        # A container that sees its own group alone, in each version.
        (V2, "/", "/", {"": ("500", 300, 40)}),
        (V1, "/kubepods/pod1/abc", "/kubepods/pod1/abc", {"": ("500", 300, 40)}),
        # One that is told the host's path of it.
        (V1, "/process/1", "/", {"": ("500", 300, 40)}),
        (V1, "/a/b", "/", {"a/b": (str((1 << 63) - 4096), 300, 0), "a": ("500", 300, 40), "": ("900", 400, 0)}),
    ],
)
def test_the_lowest_limit_counts(
    tmp_path: Path, version: str, own: str, mounted: str, groups: dict[str, tuple[str, int, int]]
) -> None:
    """Of all groups around the process, in each version and seen from in a container; what the kernel takes back
    before it kills is room, files in memory are not."""
    limit = MemoryLimit(machine(tmp_path, version, own, mounted, groups))
    assert limit.nbytes == 500
    assert limit.room_bytes() == 240
    limit.check_capacity(500)
    with pytest.raises(errors.InvalidArgumentError, match=r"--capacity 501 B is more than the memory limit .*500 B"):
        limit.check_capacity(501)


def test_no_limit_is_none(tmp_path: Path) -> None:
    """Without control groups, and with ones that have none, any capacity will do."""
    for limit in (
        MemoryLimit(tmp_path / "nothing"),
        MemoryLimit(machine(tmp_path / "2", V2, "/a", "/", {"a": ("max", 1, 0)})),
        MemoryLimit(machine(tmp_path / "1", V1, "/a", "/", {"a": (str((1 << 63) - 4096), 1, 0)})),
    ):
        assert (limit.nbytes, limit.room_bytes()) == (None, None)
        limit.check_capacity(1 << 50)


def test_segments_that_are_made_at_once_count_together(tmp_path: Path) -> None:
    """Two creates that fit each by itself, while the pages of neither are counted yet: the second is refused, and after
    the first its memory is what the kernel says."""
    root = machine(tmp_path / "machine", V2, "/", "/", {"": (str(HEADROOM_BYTES + 3 * MIB), 0, 0)})
    (tmp_path / "memory").mkdir()
    with ExitStack() as leaving:
        place = MemoryDirectory(tmp_path / "memory", "a")
        leaving.callback(place.close)
        engine = Engine(1, 1, 16 * MIB)
        leaving.callback(engine.close)
        segments = Segments(engine, place, 16 * MIB, MemoryLimit(root))
        begun, go_on = threading.Event(), threading.Event()
        make: Callable[..., None] = engine.create_segment

        def slow(*given: object, **options: object) -> None:
            begun.set()
            assert go_on.wait(20)
            make(*given, **options)

        engine.create_segment = slow  # type: ignore[method-assign]
        first = threading.Thread(target=segments.create, args=(SegmentForm(1, 1, 2, 2 * MIB, 256 << 10),))
        first.start()
        assert begun.wait(20)
        with pytest.raises(errors.OutOfMemoryError, match="left below the memory limit of its process, 35 MiB"):
            segments.create(SegmentForm(2, 1, 2, 2 * MIB, 256 << 10))
        go_on.set()
        first.join(20)
        assert segments.ids() == [1]
        segments.create(SegmentForm(2, 1, 2, 2 * MIB, 256 << 10))  # the file here says that nothing is used


@pytest.mark.parametrize(
    ("used", "told"), [(100 * MIB, 380 * MIB), (500 * MIB, 1), (512 * MIB, 1), (600 * MIB, 1), (None, 1)]
)
def test_no_room_is_told_as_such(tmp_path: Path, used: int | None, told: int) -> None:
    """What a renewal tells leaves out what creates may not take; nothing left, or no limit that can be read, is 1
    byte, as 0 says that nobody knows: the warning of a capacity that can't be kept was missing just then."""
    root = machine(tmp_path / "machine", V2, "/", "/", {"": (str(512 * MIB), used or 0, 0)})
    limit = MemoryLimit(root)
    if used is None:
        (root / "sys/fs/cgroup/memory.stat").unlink()
    (tmp_path / "memory").mkdir()
    with ExitStack() as leaving:
        place = MemoryDirectory(tmp_path / "memory", "a")
        leaving.callback(place.close)
        engine = Engine(1, 1, 16 * MIB)
        leaving.callback(engine.close)
        assert load_of(engine, place, LastLook(Names(), Names()), limit).memory_free_bytes == told


def look(root: Path, capacity: str | None) -> Finding:
    (finding,) = (f for f in look_at_machine(Path("/dev/shm"), capacity, root) if f.check == "memory limit")
    return finding


def test_the_doctor_looks_at_the_limit(tmp_path: Path) -> None:
    """A capacity that does not fit below it is a problem, the default one advice, as perhaps no server runs here."""
    root = machine(tmp_path, V2, "/", "/", {"": (str(512 * MIB), 100 * MIB, 0)})
    assert look(root, "256MiB").state is Severity.OK
    assert look(root, None).state is Severity.ADVICE
    found = look(root, "500MiB")
    assert found.state is Severity.PROBLEM
    assert found.found == "512 MiB, 412 MiB of it left; --capacity is 500 MiB"
    assert "offer less than 480 MiB" in found.change
    assert look(tmp_path / "nothing", "1TiB").state is Severity.OK


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A control group with a limit of 320 MiB, which daemons that are started then go into."""
    made = next(
        (
            place / f"smb-test-{os.getpid()}-{time.monotonic_ns()}"
            for place in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
            if (place / "cgroup.procs").exists() and os.access(place, os.W_OK)
        ),
        None,
    )
    limit = 320 * MIB
    try:
        assert made is not None
        made.mkdir()
        name = "memory.limit_in_bytes" if made.parent.name == "memory" else "memory.max"
        (made / name).write_text(str(limit))
    except (AssertionError, OSError):
        if made is not None and made.is_dir():
            made.rmdir()
        pytest.skip("a control group with a memory limit takes root, and control groups that may be written")
    started = subprocess.Popen

    def within(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        shell = ["sh", "-c", f'echo $$ > {made}/cgroup.procs && exec "$@"', "sh", *command]
        return started(shell if "memserver" in command else command, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(subprocess, "Popen", within)
    monkeypatch.setattr(stem, "launch", stem.program)  # a fork would be in the group of what it is forked from
    yield made
    wait_for(lambda: not (made / "cgroup.procs").read_text(), "end of the daemons")
    made.rmdir()


@pytest.fixture
def daemons(group: Path, tmp_path: Path) -> Iterator[Daemons]:
    with running_daemons(tmp_path) as running:
        yield running


def test_a_server_in_a_small_group_outlives_every_create(daemons: Daemons) -> None:
    """In a real control group: a capacity above its limit does not start, and says why; one below starts, a create
    that its limit has no room for is refused by name, and the server lives and makes one that fits."""
    coordinator = daemons.coordinator()
    above = daemons.memory_server(coordinator.address, "above", "--capacity", "1GiB")
    assert above.wait() == 1
    assert "--capacity 1 GiB is more than the memory limit of this process, 320 MiB" in above.log.read_text()
    server = daemons.memory_server(coordinator.address, "server", "--capacity", "319MiB")
    assert server.address
    with smb.connect(coordinator.address) as client:
        with pytest.raises(smb.OutOfMemoryError, match="left below the memory limit of its process, 320 MiB"):
            client.create("large", 300 * MIB, "uint8")
        small = client.create("small", 32 * MIB, "uint8")
        small.fill(1)
        assert small.read(0, 1)[0] == 1
    assert server.process.poll() is None
