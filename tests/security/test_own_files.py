"""On disks, too, nothing is believed for its name: no coordinator's state, data directory of a local cluster or ready
file that another user put there is used, and no link of another user's is written through."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.other_users import AS_ROOT, DAEMON, STRANGER, output_as, sticky
from tests.support.rights import may_mount

# Tells of each path what became of it as a coordinator's state directory.
STATE = """
import asyncio, logging
from pathlib import Path
from smb.coordinator.store import open_store
from smb.errors import Error
become()
logging.basicConfig(stream=sys.stdout, format="%(message)s")
os.umask(0)
for path in sys.argv[2:]:
    try:
        store = open_store(path)
    except Error as error:
        print("refused", type(error).__name__, error)
        continue
    asyncio.run(store.change({"key": "text"}))
    print("taken", path, sorted((each.name, oct(each.stat().st_mode & 0o777)) for each in Path(path).iterdir()))
    asyncio.run(store.close())
"""
FILES = [("coordinator.reserve", "0o600"), ("coordinator.sqlite", "0o600"), ("coordinator.sqlite-wal", "0o600")]
# Keeps the data directory of a local cluster as a start does, and opens a daemon's log there.
CLUSTER = """
from pathlib import Path
from smb.cluster import Daemon, LocalCluster
from smb.errors import Error
become()
os.umask(0)
sys.executable = "/bin/true"
LocalCluster.start = lambda self: self  # only what it does to its directory
for path in map(Path, sys.argv[2:]):
    try:
        LocalCluster(data_dir=path)._keep(path)
        Daemon("no_such_module", "coordinator", {"listen": "127.0.0.1:9", "metrics": "127.0.0.1:9"}, path).spawn()
    except Error as error:
        print("refused", error)
    else:
        print("taken", path, oct(path.stat().st_mode & 0o777))
"""


def given(path: Path, mode: int, user: int = DAEMON) -> Path:
    """A directory of a user's."""
    path.mkdir()
    os.chown(path, user, user)
    path.chmod(mode)
    return path


def linked(path: Path, to: Path, user: int = STRANGER) -> Path:
    """A link that a user made."""
    path.symlink_to(to)
    os.chown(path, user, user, follow_symlinks=False)
    return path


def written(path: Path, user: int, mode: int = 0o600) -> Path:
    """A file of a user's, with something in it."""
    path.write_text("precious")
    os.chown(path, user, user)
    path.chmod(mode)
    return path


@pytest.fixture
def place() -> Iterator[Path]:
    with sticky() as found:
        yield found


@AS_ROOT
def test_a_state_directory_of_ones_own_is_taken(place: Path) -> None:
    """One that others may read, one of a group (umask 002), one by a link of root's, one that is not there: that is
    made closed, whatever the umask, and so are the files. Files that a group was given rights to are closed."""
    good = [given(place / "a", 0o755), given(place / "b", 0o2775), given(place / "c", 0o700)]
    good += [linked(place / "d", given(place / "e", 0o700), 0), place / "new" / "state"]
    given(place / "new", 0o755)
    told = output_as(DAEMON, STATE, *good).splitlines()
    assert [line for line in told if line.startswith("taken")] == [f"taken {path} {FILES}" for path in good]
    assert [line for line in told if not line.startswith("taken")] == [
        f"--state {good[1]} can be written to by others (drwxrwsr-x), who can remove the files in it"
    ]
    assert good[-1].stat().st_mode & 0o7777 == 0o700
    for path in good[2].iterdir():
        path.chmod(0o660)
    assert output_as(DAEMON, STATE, good[2]) == f"taken {good[2]} {FILES}\n"


@AS_ROOT
def test_a_state_directory_of_others_is_refused(place: Path) -> None:
    """One that another user made, or in which everybody writes, or to which another user's link leads."""
    own = given(place / "own", 0o700)
    linked(place / "middle", given(place / "around", 0o755))
    given(place / "around" / "own", 0o700)
    bad = {
        given(place / "a", 0o777, STRANGER): f"belongs to user {STRANGER}, and this is user {DAEMON}",
        given(place / "b", 0o777): "can be written to by everybody (drwxrwxrwx)",
        given(place / "c", 0o1777, 0): "can be written to by everybody (drwxrwxrwt)",
        linked(place / "d", own): f"is reached by {place}/d, a link that user {STRANGER} made",
        place / "middle" / "own": f"is reached by {place}/middle, a link that user {STRANGER} made",
    }
    told = output_as(DAEMON, STATE, *bad).splitlines()
    for (path, why), line in zip(bad.items(), told, strict=True):
        assert line.startswith(f"refused UnavailableError --state {path} {why}. It is not used"), line
    assert [path for path in place.rglob("*") if path.is_file()] == []


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "another user's": lambda path, _: written(path, STRANGER, 0o666),
    "a link to a file of the user's": linked,
    "a link to nothing": lambda path, precious: linked(path, precious.with_name("nothing")),
    "a second name": lambda path, precious: path.hardlink_to(precious),
    "a file that everybody writes": lambda path, _: written(path, DAEMON, 0o666),
    "a pipe": lambda path, _: (os.mkfifo(path), os.chown(path, DAEMON, DAEMON)),
}


@AS_ROOT
@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_planted_in_a_state_directory_is_refused(place: Path, kind: str) -> None:
    """Each file that the store would read or write. No link is written through, and nobody's mode is changed."""
    precious = written(place / "precious", DAEMON, 0o640)
    before = precious.stat()
    names = ["sqlite", "sqlite-wal", "sqlite-shm", "sqlite-journal", "reserve"]
    paths = [given(place / name, 0o700) / f"coordinator.{name}" for name in names]
    for path in paths:
        PLANTED[kind](path, precious)
    for path, line in zip(paths, output_as(DAEMON, STATE, *(path.parent for path in paths)).splitlines(), strict=True):
        assert line.startswith(f"refused UnavailableError {path} "), line
        assert "it is not used" in line
    assert precious.read_text() == "precious"
    assert precious.stat().st_mode == before.st_mode
    assert not (place / "nothing").exists()


@pytest.mark.skipif(not may_mount(), reason="it takes the right to mount")
@AS_ROOT
def test_a_volume_of_everybodys_is_taken(place: Path) -> None:
    """As provisioners of Kubernetes make them: root's, of mode 0777. The log says so, and planted files are refused."""
    volume = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0
assert libc.mount(b"tmpfs", os.fsencode(sys.argv[2]), b"tmpfs", 0, b"mode=0777") == 0
"""
    given(place / "v", 0o755, 0)
    told = output_as(DAEMON, volume + STATE, place / "v").splitlines()
    assert told == [
        f"--state {place}/v can be written to by others (drwxrwxrwx), who can remove the files in it",
        f"taken {place}/v {FILES}",
    ]
    planted = f"""
with open(sys.argv[2] + "/coordinator.sqlite-wal", "w") as file:
    os.fchown(file.fileno(), {STRANGER}, {STRANGER})
"""
    told = output_as(DAEMON, volume + planted + STATE, place / "v").splitlines()
    assert told[-1].startswith(f"refused UnavailableError {place}/v/coordinator.sqlite-wal belongs to user {STRANGER}")


@AS_ROOT
def test_the_data_directory_of_a_local_cluster(place: Path) -> None:
    """Made closed; refused where others may write; lock and log are neither another user's nor written by a link."""
    precious = written(place / "precious", DAEMON)
    good = [given(place / "a", 0o755), place / "new"]
    bad = [given(place / "b", 0o1777), given(place / "c", 0o700, STRANGER), linked(place / "d", good[0])]
    for name in ("lock", "coordinator.log"):
        for kind in PLANTED.keys() - {"a file that everybody writes"}:
            bad.append(given(place / f"{name} is {kind}", 0o700))
            PLANTED[kind](bad[-1] / name, precious)
    told = output_as(DAEMON, CLUSTER, *good, *bad).splitlines()
    assert told[:2] == [f"taken {good[0]} 0o755", f"taken {good[1]} 0o700"]
    for path, line in zip(bad, told[2:], strict=True):
        assert line.startswith("refused "), line
        assert str(path) in line
    assert precious.read_text() == "precious"
    assert not (place / "nothing").exists()


@AS_ROOT
def test_a_ready_file_of_another_user_is_of_no_run(place: Path) -> None:
    """It names a process that runs: it is removed all the same, and where that can't be, nothing starts. One of this
    user's or root's that a run has written stays. What a start writes only its user can change, whatever the umask."""
    code = """
from pathlib import Path
from smb.daemon.process import clear_ready_file, write_ready_file
from smb.errors import Error
become()
os.umask(0)
for path in map(Path, sys.argv[2:]):
    try:
        clear_ready_file(path)
    except Error as error:
        print("refused", error)
    else:
        print("kept" if path.exists() else "gone")
        write_ready_file(path.with_name("new"), address="h:1", metrics="h:2", name="n")
"""
    planted = json.dumps({"address": "203.0.113.1:7070", "metrics": "", "name": "coordinator", "pid": 1})
    paths: list[Path] = []
    for user, around in ((STRANGER, 0o700), (STRANGER, 0o1777), (DAEMON, 0o700), (0, 0o700)):
        paths.append(given(place / str(len(paths)), around) / "ready")
        paths[-1].write_text(planted)
        os.chown(paths[-1], user, user)
    os.chown(paths[1].parent, 0, 0)
    told = output_as(DAEMON, code, *paths).splitlines()
    assert told[0] == "gone"
    assert told[1].startswith(f"refused cannot remove the ready file of an earlier run, {paths[1]}: ")
    assert told[2:] == ["kept", "kept"]
    assert (paths[0].parent / "new").stat().st_mode & 0o777 == 0o644
