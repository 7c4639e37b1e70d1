"""smb.daemon.held_directory: a directory goes when its lock is there and free, and in no other case."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smb.daemon import held_directory
from smb.daemon.held_directory import LOCK_NAME, HeldDirectory, is_held, sweep


def _made(root: Path, name: str, text: str | None) -> Path:
    """A directory with something in it; with a lock file that nobody holds, unless its text is None."""
    path = root / name
    (path / "state").mkdir(parents=True)
    (path / "state" / "file").write_text("data")
    if text is not None:
        (path / LOCK_NAME).write_text(text)
    return path


def test_what_its_holder_left_goes_and_nothing_else(tmp_path: Path) -> None:
    """Held, without a lock, of another boot, of another name, a link, a file: all of these stay."""
    boot = held_directory.boot_id()
    assert len(boot) == 36
    ours = HeldDirectory(_made(tmp_path, "c-held", None))
    left = _made(tmp_path, "c-left", boot)
    kept = [
        ours.path,
        _made(tmp_path, "c-bare", None),  # being made, or of an earlier release
        _made(tmp_path, "c-other-boot", boot[::-1]),
        _made(tmp_path, "c-no-boot", ""),
        _made(tmp_path, "other", boot),
        tmp_path / "c-link",
        tmp_path / "c-file",
    ]
    (tmp_path / "c-link").symlink_to(tmp_path / "other")
    (tmp_path / "c-file").write_text("data")
    linked = _made(tmp_path, "c-linked-lock", None)
    (linked / LOCK_NAME).symlink_to(tmp_path / "other" / LOCK_NAME)
    assert [is_held(path) for path in (*kept, left)] == [True, *[False] * 7]
    sweep(tmp_path, "c-*")
    assert not left.exists()
    assert sorted(tmp_path.iterdir()) == sorted([*kept, linked])
    assert all((path / "state" / "file").exists() for path in kept[:-1])
    ours.remove()
    assert not ours.path.exists()
    ours.remove()
    sweep(tmp_path / "nowhere", "c-*")


def test_a_lock_has_its_name_only_when_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep before or after the moment of locking leaves a directory that is just being made alone."""
    path = _made(tmp_path, "c-new", None)
    seen: list[list[str]] = []

    def look() -> None:
        sweep(tmp_path, "c-*")
        seen.append(sorted(inside.name for inside in path.iterdir()))

    def watched(fd: int, how: int) -> None:
        monkeypatch.undo()
        look()
        fcntl.flock(fd, how)
        look()

    monkeypatch.setattr(held_directory.fcntl, "flock", watched)
    held = HeldDirectory(path)
    look()
    assert seen == [["held.new", "state"], ["held.new", "state"], [LOCK_NAME, "state"]]
    held.remove()


def test_it_is_held_until_each_process_that_has_it_ended(tmp_path: Path) -> None:
    """A daemon that outlives the process that started it keeps the directory that it uses."""
    path = _made(tmp_path, "c-shared", None)
    held = HeldDirectory(path)
    assert held.fd is not None
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=[held.fd]
    ) as daemon:
        os.close(held.fd)
        sweep(tmp_path, "c-*")
        assert path.exists()
        daemon.kill()
    sweep(tmp_path, "c-*")
    assert not path.exists()


def test_a_removal_that_was_cut_short_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is the last to go: what is left of a directory is found again."""
    path = _made(tmp_path, "c-left", held_directory.boot_id())
    with monkeypatch.context() as patched:
        patched.setattr(held_directory.shutil, "rmtree", lambda *_, **__: None)
        sweep(tmp_path, "c-*")
    assert (path / LOCK_NAME).exists()
    sweep(tmp_path, "c-*")
    assert not path.exists()


def test_without_locks_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that has no locks nobody can tell whose it is."""

    def refused(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    path = _made(tmp_path, "c-new", None)
    with monkeypatch.context() as patched:
        patched.setattr(held_directory.fcntl, "flock", refused)
        held = HeldDirectory(path)
    assert held.fd is None
    sweep(tmp_path, "c-*")
    assert (path / "state" / "file").exists()
    held.remove()
    assert not path.exists()
