"""A memory server believes no file for its name: what another user planted where everybody may write is not served, not
read, and keeps it from no start without saying what to do."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from memserver.engine import Engine, SegmentForm
from tests.support.other_users import AS_ROOT, DAEMON, STRANGER, output_as, sticky

ID = 0xABC
SEGMENT = f"smb.a.{ID:016x}.segment"
# One run on each directory that is named: recovers, makes a segment, and tells what it serves, or why it did not start.
SERVE = """
import logging
from pathlib import Path
from memserver.engine import Engine, SegmentForm
from memserver.memory_dir import MemoryDirectory
from memserver.recovery import recover
from memserver.segments import Segments
from memserver.stamps import Stamps, StampsFile
from smb.errors import Error
become()
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
for directory in map(Path, sys.argv[2:]):
    print("==", directory, flush=True)
    try:
        place = MemoryDirectory(directory, "a")
    except Error as error:
        print("refused:", error)
        continue
    engine = Engine(1, 1, 4 << 20)
    segments = Segments(engine, place, 4 << 20)
    recover(engine, place, segments, 4 << 20)
    print("stamps", Stamps(StampsFile(place.stamps_path)).reported())
    print("found", segments.ids(), sorted(place.quarantined()))
    segments.create(SegmentForm(id=0xDEF, epoch=1, dtype=2, nbytes=4096, chunk_bytes=4096))
    segments.quarantine([0xDEF])
    print("serves", segments.ids())
    engine.listen_unix(place.socket_path)
    engine.close()
    place.close()
"""


def serve(*directories: Path, user: int = DAEMON) -> list[str]:
    """What runs told, one for each directory."""
    return output_as(user, SERVE, *directories).split("== ")[1:]


def a_segment(directory: Path, name: str = SEGMENT) -> Path:
    """A whole segment's file, of a run of this user's."""
    path = directory / name
    engine = Engine(1, 1, 4 << 20)
    engine.create_segment(path, SegmentForm(id=ID, epoch=1, dtype=2, nbytes=4096, chunk_bytes=4096))
    engine.close()
    return path


def a_socket(path: Path) -> None:
    """A socket that nobody listens at."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


MUST_GO: dict[str, Callable[[Path], object]] = {
    "smb.a.lock": Path.touch,
    "smb.a.sock": a_socket,
    "smb.a.journal.new": Path.touch,
    "smb.a.stamps_new": lambda path: path.symlink_to("1.1.1"),
}
MUST_BE_OURS: dict[str, Callable[[Path], object]] = {
    "smb.a.journal": Path.touch,
    "smb.a.stamps": lambda path: path.symlink_to("1.1.1"),
}
HARM_NOTHING: dict[str, Callable[[Path], object]] = {
    SEGMENT: lambda path: a_segment(path.parent),
    f"{SEGMENT}.new": Path.touch,
    f"smb.a.{0xDEF:016x}.quarantined": Path.touch,
}


def plant(directory: Path, name: str, make: Callable[[Path], object], user: int = STRANGER) -> Path:
    """Another user's file."""
    path = directory / name
    make(path)
    os.chown(path, user, user, follow_symlinks=False)
    if not path.is_symlink():
        path.chmod(0o666)
    return path


@AS_ROOT
def test_what_cannot_be_removed_is_named_with_a_place_that_is_private() -> None:
    """For each file that a daemon needs, of a user that it can't remove files of. And that place works."""
    with sticky() as place:
        planted = []
        for name, make in {**MUST_GO, **MUST_BE_OURS}.items():
            (place / name).mkdir()
            (place / name).chmod(0o1777)
            planted.append(plant(place / name, name, make))
        for path, told in zip(planted, serve(*(path.parent for path in planted)), strict=True):
            private = path.parent / f"smb-{DAEMON}"
            refused = next(line for line in told.splitlines() if line.startswith("refused: "))
            assert f"{path} belongs to user {STRANGER}, and this server runs as user {DAEMON}" in refused
            assert f"mkdir -m 700 {private}, and --memory-dir {private}" in refused
            assert os.path.lexists(path)
            assert [left.name for left in path.parent.iterdir()] == [path.name], "its own lock"
            private.mkdir(mode=0o700)
            os.chown(private, DAEMON, DAEMON)
        for told in serve(*(path.parent / f"smb-{DAEMON}" for path in planted)):
            assert f"serves [{0xDEF}]" in told


@AS_ROOT
def test_what_can_be_removed_is() -> None:
    """By root, whose capabilities allow it. What may be somebody's data is not: that is refused by name."""
    with sticky() as place:
        for name, make in MUST_GO.items():
            plant(place, name, make)
        (told,) = serve(place, user=0)
        assert f"serves [{0xDEF}]" in told
        for name, make in MUST_BE_OURS.items():
            path = plant(place, name, make)
            (told,) = serve(place, user=0)
            assert f"refused: {path} belongs to user {STRANGER}" in told
            assert os.path.lexists(path)
            path.unlink()


@AS_ROOT
def test_a_planted_segment_is_not_served() -> None:
    """Nor is one of the daemon's own that others may change or that has a second name. All else goes on as without."""
    with sticky() as place:
        directories = [place / str(index) for index in range(9)]
        for directory in directories:
            directory.mkdir()
            directory.chmod(0o1777)
        foreign, new, mark, linked, second, open_to_all, pipe, directory, own = directories
        for where, (name, make) in zip((foreign, new, mark), HARM_NOTHING.items(), strict=True):
            plant(where, name, make)
        hidden = plant(linked, "hidden", lambda path: a_segment(path.parent, path.name), DAEMON)
        plant(linked, SEGMENT, lambda path: path.symlink_to(hidden), DAEMON)
        (second / "second").hardlink_to(plant(second, SEGMENT, lambda path: a_segment(path.parent), DAEMON))
        (second / SEGMENT).chmod(0o600)
        plant(open_to_all, SEGMENT, lambda path: a_segment(path.parent), DAEMON)
        plant(pipe, SEGMENT, os.mkfifo)
        (directory / SEGMENT).mkdir()
        plant(own, SEGMENT, lambda path: a_segment(path.parent), DAEMON).chmod(0o600)
        told = serve(*directories)
        for where, text in zip(directories, told, strict=True):
            ids = [ID, 0xDEF] if where == own else [0xDEF]
            assert f"serves {ids}" in text, text
            assert f"found {ids[:-1]} []" in text, text
        for where, why in (
            (foreign, f"{SEGMENT} belongs to user {STRANGER}"), (linked, "is of another kind (l"),
            (second, "has 2 names"), (open_to_all, "may be changed by others than its owner (-rw-rw-rw-)"),
            (pipe, f"belongs to user {STRANGER}"), (directory, "belongs to user 0"),
        ):  # fmt: skip
            text = told[directories.index(where)]
            for words in (why, "it is not used", "the file stays and is not served"):
                assert words in text, text
            assert os.path.lexists(where / SEGMENT)
        assert f"{SEGMENT}.new belongs to user {STRANGER}" in told[1]
        assert "this server cannot remove" in told[1]
        assert f"quarantined belongs to user {STRANGER}" in told[2]


@AS_ROOT
@pytest.mark.parametrize("held", [False, True])
def test_a_lock_that_another_user_holds(held: bool) -> None:
    """It may be another server's: it stays, and whose it is is said. One that nobody holds is removed."""
    with sticky() as place:
        path = plant(place, "smb.a.lock", Path.touch)
        with path.open() as opened:
            if held:
                fcntl.flock(opened, fcntl.LOCK_EX)
            (told,) = serve(place, user=0)
        if held:
            assert 'a memory server "a" runs already on' in told
            assert f"belongs to user {STRANGER}" in told
        else:
            assert f"serves [{0xDEF}]" in told


@AS_ROOT
def test_a_lock_that_cannot_be_opened_is_named() -> None:
    """One that another user keeps to himself: the sentence says whose it is, not only that it is not permitted."""
    with sticky() as place:
        path = plant(place, "smb.a.lock", Path.touch)
        path.chmod(0o600)
        (told,) = serve(place)
        assert f"refused: {path} belongs to user {STRANGER}" in told


@AS_ROOT
def test_stamps_of_another_user_are_not_read() -> None:
    """Were they believed, a restored coordinator's records would be taken for newer than they are."""
    read = """
from pathlib import Path
from memserver.stamps import Stamps, StampsFile
become()
print(Stamps(StampsFile(Path(sys.argv[2]))).reported())
"""
    with sticky() as place:
        path = place / "smb.a.stamps"
        path.symlink_to("1.2.3")
        assert "cluster=1, term=2, sequence=3" in output_as(0, read, path)
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        assert "(ServerStamp(cluster=0, term=0, sequence=0),)" in output_as(0, read, path)
