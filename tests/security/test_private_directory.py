"""A memory server uses a directory of its own user alone, makes one where it is to choose, and takes along what earlier
releases left where everybody may write."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import smb
from memserver.earlier_memory import _by_hand, take_in
from memserver.memory_dir import MemoryDirectory
from smb.config.settings import SETTINGS, private_memory
from tests.support.daemons import Daemon, Daemons, running_daemons
from tests.support.other_users import AS_ROOT, DAEMON, STRANGER, output_as, sticky
from tests.support.rights import may_mount

OWN = f"smb-{DAEMON}"
# Tells of each path what became of it as a memory directory.
TAKE = """
import logging
from pathlib import Path
from smb.daemon.private_directory import take_memory_directory
from smb.errors import Error
become()
logging.basicConfig(stream=sys.stdout, format="%(message)s")
os.umask(0o022)
for path in map(Path, sys.argv[2:]):
    try:
        print("taken", take_memory_directory(path))
    except Error as error:
        print("refused", type(error).__name__, error)
"""


def given(path: Path, mode: int, user: int = DAEMON) -> Path:
    """A directory of a user's."""
    path.mkdir()
    os.chown(path, user, user)
    path.chmod(mode)
    return path


def linked(path: Path, to: Path, user: int) -> Path:
    """A link that a user made."""
    path.symlink_to(to)
    os.chown(path, user, user, follow_symlinks=False)
    return path


def owned(path: Path, make: Callable[[Path], object]) -> None:
    """Make something of the stranger's."""
    make(path)
    os.chown(path, STRANGER, STRANGER)


@pytest.fixture
def place() -> Iterator[Path]:
    with sticky() as found:
        yield found


@AS_ROOT
def test_a_directory_of_ones_own_is_taken(place: Path) -> None:
    """Whatever its name, also by a link that its own user or root made; others may look, and may not write."""
    good = [given(place / "a", 0o700), given(place / "b", 0o755), given(place / OWN, 0o750)]
    links = [linked(place / "c", good[0], DAEMON), linked(place / "d", good[1], 0)]
    told = output_as(DAEMON, TAKE, *good, *links).splitlines()
    assert told == [f"taken {path}" for path in (*good, *good[:2])]


@AS_ROOT
def test_a_directory_in_which_others_write_is_refused(place: Path) -> None:
    """Sticky or not, by a group, or another user's: the sentence names the private one, and that is made there, or
    below /dev/shm where it would be in another user's, or this user can't make one."""
    open_to_all = [given(place / "a", 0o777), given(place / "b", 0o1777), given(place / "c", 0o770)]
    roots, strangers = given(place / "d", 0o1777, 0), given(place / "e", 0o777, STRANGER)
    closed = [given(place / "f", 0o755, STRANGER), given(place / "g", 0o700, 0)]
    told = output_as(DAEMON, TAKE, *open_to_all, roots, strangers, *closed).splitlines()
    assert len(told) == 7
    for path, line in zip((*open_to_all, roots), told, strict=False):
        assert line.startswith(f"refused UnavailableError --memory-dir {path} "), line
        assert f"use --memory-dir {path}/{OWN}, which the server makes with mode 0700" in line
        assert f"left in {path} is moved there" in line
    assert f"Move there what its earlier runs left in {strangers} " in told[4]
    for path, line in zip((strangers, *closed), told[4:], strict=True):
        assert line.startswith(f"refused UnavailableError --memory-dir {path} belongs to user "), line
        assert f"use --memory-dir /dev/shm/{OWN}, which the server makes with mode 0700" in line
    # A command that would close a directory of everybody's to all others is not offered.
    assert ["chmod" in line for line in told] == [True, False, True, False, False, False, False]
    wanted = [path / OWN for path in (*open_to_all, roots)]
    assert set(output_as(DAEMON, TAKE, *wanted).splitlines()) >= {f"taken {path}" for path in wanted}
    assert [(path.stat().st_uid, path.stat().st_mode & 0o7777) for path in wanted] == [(DAEMON, 0o700)] * 4


@AS_ROOT
def test_a_link_of_another_user_is_followed_nowhere(place: Path) -> None:
    """Not on the way to a directory of the server's, and behind one of its own links either: nothing is made there, and
    the sentence names a place that such a link does not lead to."""
    inner = given(given(place / "own", 0o700) / "inner", 0o700)
    foreign = linked(place / "foreign", place / "own", STRANGER)
    behind = linked(place / "behind", Path("foreign/inner"), DAEMON)
    told = output_as(
        DAEMON, TAKE, foreign, foreign / "inner", foreign / OWN, behind, foreign / ".." / "own"
    ).splitlines()
    for path, line in zip((foreign, foreign / "inner", foreign / OWN, behind), told, strict=False):
        what = "is" if path == foreign else f"leads through {foreign},"
        assert line.startswith(
            f"refused UnavailableError --memory-dir {path} {what} a link that user {STRANGER} made"
        ), line
        assert f"use --memory-dir /dev/shm/{OWN}, which the server makes" in line
    assert len(told) == 5
    assert list((place / "own").iterdir()) == [inner]
    assert output_as(DAEMON, TAKE, linked(place / "good", Path("own"), DAEMON) / "inner") == f"taken {inner}\n"


@AS_ROOT
@pytest.mark.parametrize("umask", ["0o277", "0o777"])
def test_the_private_directory_is_its_users_under_each_umask(place: Path, umask: str) -> None:
    """It is made with mode 0700; so is one that an earlier start left without its own user's rights."""
    for _ in range(2):
        assert output_as(DAEMON, TAKE.replace("0o022", umask), place / OWN) == f"taken {place / OWN}\n"
        assert (place / OWN).stat().st_mode & 0o777 == 0o700
        (place / OWN).chmod(0o100)


SQUATS: dict[str, Callable[[Path], object]] = {
    "directory": lambda path: given(path, 0o700, STRANGER),
    "open directory": lambda path: given(path, 0o1777, STRANGER),
    "link to a directory of the server's": lambda path: linked(path, path.parent / "own", STRANGER),
    "link to nothing": lambda path: linked(path, Path("nothing"), STRANGER),
    "link to itself": lambda path: linked(path, path, STRANGER),
    "file": lambda path: owned(path, Path.touch),
    "pipe": lambda path: owned(path, os.mkfifo),
}


@AS_ROOT
@pytest.mark.parametrize("kind", SQUATS)
def test_what_has_the_private_name_is_not_believed(place: Path, kind: str) -> None:
    """The start ends with a sentence that says whose it is, and how to have another place. What is there stays."""
    given(place / "own", 0o700)
    SQUATS[kind](place / OWN)
    before = (place / OWN).lstat()
    (line,) = output_as(DAEMON, TAKE, place / OWN).splitlines()
    if "directory" in kind:
        assert line.startswith(f"refused UnavailableError --memory-dir {place / OWN} "), line
        assert "chmod" not in line
    else:
        assert line.startswith(f"refused InvalidArgumentError --memory-dir {place / OWN} is not a directory"), line
    assert f"user {STRANGER}" in line
    assert f"mktemp -d -p {place}" in line
    assert os.path.samestat(before, (place / OWN).lstat())
    assert list((place / "own").iterdir()) == []


@AS_ROOT
def test_a_directory_that_others_can_replace_is_told_of(place: Path) -> None:
    """One below a directory that is another's, or that everybody writes and that is not sticky: a line in the log."""
    lines = []
    for around in (given(place / "a", 0o777), given(place / "b", 0o755, STRANGER), given(place / "c", 0o1777)):
        lines.append(output_as(DAEMON, TAKE, given(around / "own", 0o700)).splitlines())
    for line, why in zip(lines, ("is not sticky", f"belongs to user {STRANGER}"), strict=False):
        assert line[0].startswith("others can put another directory in the place of "), line
        assert why in line[0]
    assert lines[2] == [f"taken {place}/c/own"]


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with running_daemons(tmp_path) as found:
        yield found


def refusal(daemon: Daemon) -> str:
    """The one line with which it ended."""
    assert daemon.wait() == 1
    told = daemon.log.read_text()
    assert "Traceback" not in told
    daemon.log.unlink()
    return told


def test_memory_of_an_earlier_release_is_taken_along(daemons: Daemons, place: Path) -> None:
    """In a directory in which everybody writes a start is refused. Another one at the place that its sentence names
    finds data, journal, stamps and marks, also if a start before was killed as it moved them, and leaves nothing. A
    server that still runs there, and a file that is in both places, keep it from starting, and nothing is lost."""
    private = Path(private_memory(str(place)))
    coordinator = daemons.coordinator()
    server = daemons.memory_server(coordinator.address, "a")
    assert server.address
    with smb.connect(coordinator.address, timeout=30) as client:
        buffer = client.create("w", (1000,), "int64", stripe=4096)
        buffer.write(np.arange(1000))
        counter = client.create("n", 1, "int64")
        counter.fetch_add(0, 7)
        server.kill()
        kept = sorted(path.name for path in daemons.memory.iterdir())
        assert {name.rpartition(".")[2] for name in kept} == {"segment", "journal", "stamps", "lock", "sock"}
        for name in kept:
            shutil.move(daemons.memory / name, place / name)
        unfinished = place / "smb.a.0123456789abcdef.segment.new"
        unfinished.touch()
        other = place / "smb.a.b.0123456789abcdef.segment"  # of server "a.b"
        other.touch()

        def start(where: Path) -> Daemon:
            return daemons.memory_server(coordinator.address, "a", "--memory-dir", str(where))

        assert f"use --memory-dir {private}," in refusal(start(place))

        private.mkdir(mode=0o700)
        both = private / kept[0]
        both.touch()
        with closing(MemoryDirectory(private, "a")) as held, (place / "smb.a.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as a server of the earlier release
            with pytest.raises(smb.AlreadyExistsError, match=f'"a" runs already on {place}; .*all of them are kept'):
                take_in(held)
            fcntl.flock(lock, fcntl.LOCK_UN)
            with pytest.raises(
                smb.UnavailableError, match=f"{both.name} is in {place} and in {private}.*all of them are"
            ):
                take_in(held)
            both.unlink()
        assert {path.name for path in place.iterdir()} >= {*kept, other.name} - {"smb.a.lock"}
        # As by a start that was killed in the middle.
        for name in kept[:2]:
            shutil.move(place / name, private / name)
        moved = start(private)
        assert moved.address
        assert (buffer.read() == np.arange(1000)).all()
        assert counter.fetch_add(0, 1) == 7
        assert sorted(path.name for path in place.iterdir()) == sorted([private.name, other.name])
        assert set(kept) <= {path.name for path in private.iterdir()}
        assert moved.stop() == 0


# What a run of an earlier release left in a directory, and then a start with the private one in there.
EARLIER = """
import logging
from contextlib import closing
from pathlib import Path
from memserver.earlier_memory import take_in
from memserver.engine import Engine, SegmentForm
from memserver.memory_dir import MemoryDirectory
become()
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
around = Path(sys.argv[2])
engine = Engine(1, 1, 4 << 20)
form = SegmentForm(id=7, epoch=1, dtype=2, nbytes=4096, chunk_bytes=4096)
engine.create_segment(around / f"smb.a.{7:016x}.segment", form)
engine.close()
private = around / f"smb-{user}"
private.mkdir(mode=0o700)
with closing(MemoryDirectory(private, "a")) as place:
    take_in(place)
    print(sorted(path.name for path in private.iterdir()))
"""


CAUGHT = """
    try:
        take_in(place)
    except Exception as error:
        print("refused", type(error).__name__, error)
"""


@AS_ROOT
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_what_others_plant_keeps_no_memory_back(place: Path, mode: int) -> None:
    """Where an earlier release had its memory another user has put a lock, a socket's name, and what is read after a
    restart: the server's own segment is moved, and nothing of the other user's."""
    names = ("lock", "sock", "journal", "journal.new", "stamps", f"{8:016x}.segment", f"{9:016x}.segment.new")
    for name in (*names, f"{7:016x}.quarantined"):
        path = place / f"smb.a.{name}"
        path.touch()
        path.chmod(mode)
        os.chown(path, STRANGER, STRANGER)
    told = output_as(DAEMON, EARLIER, place)
    assert told.splitlines()[-1] == f"['smb.a.{7:016x}.segment', 'smb.a.lock']", told
    assert f"moved 1 files that an earlier run left in {place} to {place / OWN}" in told
    assert sorted(path.name for path in place.iterdir()) == sorted(
        [*(f"smb.a.{name}" for name in names), f"smb.a.{7:016x}.quarantined", OWN]
    )


@AS_ROOT
@pytest.mark.parametrize("user", [STRANGER, DAEMON])
def test_a_lock_that_another_user_holds_keeps_no_memory_back(place: Path, user: int) -> None:
    """He could keep a server from starting after an upgrade. One of the server's own user is a server's."""
    lock = place / "smb.a.lock"
    lock.touch()
    lock.chmod(0o666)
    os.chown(lock, user, user)
    with lock.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        if user == STRANGER:
            assert "moved 1 files" in output_as(DAEMON, EARLIER, place)
        else:
            told = output_as(DAEMON, EARLIER.replace("    take_in(place)\n", CAUGHT), place)
            assert f'refused AlreadyExistsError a memory server "a" runs already on {place}' in told
    assert lock.exists()


@AS_ROOT
def test_the_command_of_the_refusal_moves_everything(place: Path) -> None:
    """By hand: files of this server and user, no other's, and none over one that is there."""
    private = given(place / "smb-0", 0o700, 0)
    ours = [f"smb.a.{7:016x}.segment", f"smb.a.{7:016x}.quarantined", "smb.a.journal", "smb.a.stamps"]
    for name in (*ours, "smb.a.b.journal", f"smb.b.{7:016x}.segment"):
        (place / name).write_text(name)
    (place / f"smb.a.{8:016x}.segment").touch()
    os.chown(place / f"smb.a.{8:016x}.segment", STRANGER, STRANGER)
    (private / "smb.a.journal").write_text("of now")
    with closing(MemoryDirectory(private, "a", serves=False)) as held:
        command = _by_hand(held, place).partition("move the rest: ")[2]
    subprocess.run(["sh", "-c", command], check=True)
    assert sorted(path.name for path in private.iterdir()) == sorted(ours)
    assert (private / "smb.a.journal").read_text() == "of now"
    assert len(list(place.iterdir())) == 5


def test_segments_of_others_are_not_taken_along(daemons: Daemons, place: Path) -> None:
    """Another user's segment there is neither moved nor served, and keeps nothing from starting."""
    if os.geteuid() != 0:
        pytest.skip("only root makes files of other users")
    planted = place / f"smb.a.{7:016x}.segment"
    planted.write_bytes(b"x" * 8192)
    planted.chmod(0o666)
    os.chown(planted, STRANGER, STRANGER)
    coordinator = daemons.coordinator()
    server = daemons.memory_server(coordinator.address, "a", "--memory-dir", private_memory(str(place)))
    assert server.address
    assert f"{planted} belongs to user {STRANGER}" in server.log.read_text()
    assert server.stop() == 0
    assert sorted(path.name for path in place.iterdir()) == sorted([planted.name, "smb-0"])


@pytest.mark.skipif(not may_mount(), reason="it takes the right to mount")
def test_the_default_is_private(tmp_path: Path) -> None:
    """Below a /dev/shm of its own: smb-UID of mode 0700; /dev/shm itself is refused, and named by no default."""
    default = SETTINGS["memserver.memory_dir"].default
    assert default == private_memory() == f"/dev/shm/smb-{os.geteuid()}"
    script = f"""
mount -t tmpfs -o size=64m tmpfs /dev/shm
serve() {{ {sys.executable} -m memserver --coordinator 127.0.0.1:9 --capacity 16MiB --name a "$@" & server=$!; }}
serve --memory-dir /dev/shm; wait $server; echo ended $?
serve
for i in $(seq 600); do [ -S {default}/smb.a.sock ] && break; sleep 0.05; done
stat -c '%A %u %n' {default} /dev/shm/*; ls /dev/shm | wc -l
kill $server; wait $server; echo ended $?
"""
    run = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout.splitlines() == [
        "ended 1", *[f"drwx------ {os.geteuid()} {default}"] * 2, "1", "ended 0",
    ], run.stdout + run.stderr  # fmt: skip
    assert f"use --memory-dir {default}, which the server makes" in run.stderr
