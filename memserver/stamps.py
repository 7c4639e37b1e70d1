"""Stamps: how new the coordinator's records were when this server's memory last changed, as the coordinator reported.

They lie beside the segments and end with them. At each registration the coordinator compares them with the history of
its store. A store that was restored from an older backup does not have them, and then no segment is dropped because
that store does not know it. The stamps are the text of a symbolic link, because one rename replaces that text as a
whole, also on hugetlbfs, which has no ordinary files.

Threads: any; one lock.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path
from typing import NamedTuple, Protocol

from smb.daemon.own_files import fault_of

STAMPS_MAX = 16  # terms since the last registration; there are several only while leaders change

_log = logging.getLogger("memserver")


class ServerStamp(NamedTuple):
    """See StoreStamp in control.proto."""

    cluster: int
    term: int
    sequence: int


class Kept(Protocol):
    """Storage in which stamps outlive the daemon."""

    def read(self) -> tuple[ServerStamp, ...]: ...

    def keep(self, stamps: tuple[ServerStamp, ...]) -> None:
        """Store these stamps in place of the former ones, all or none of them."""


class StampsFile:
    """Stores stamps as the text of a symbolic link."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[ServerStamp, ...]:
        """Return the stamps of an earlier run."""
        return _read(self._path)

    def keep(self, stamps: tuple[ServerStamp, ...]) -> None:
        """Store these stamps, by one rename."""
        text = ",".join(f"{cluster:x}.{term:x}.{sequence:x}" for cluster, term, sequence in stamps)
        fresh = self._path.with_suffix(".stamps_new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(text)
        fresh.rename(self._path)


class Stamps:
    """The newest stamp of each term."""

    def __init__(self, kept: Kept) -> None:
        """Read the stamps of an earlier run."""
        self._kept = kept
        self._lock = threading.Lock()
        self._stamps = kept.read()

    def reported(self) -> tuple[ServerStamp, ...]:
        with self._lock:
            return self._stamps

    def learn(self, stamp: ServerStamp) -> None:
        """Store a stamp, before the change that comes with it is made."""
        with self._lock:
            others = tuple(each for each in self._stamps if each[:2] != stamp[:2])
            known = max((each.sequence for each in self._stamps if each[:2] == stamp[:2]), default=-1)
            if stamp.sequence <= known:
                return
            if len(others) >= STAMPS_MAX:
                # No store has term 0: a stamp that is dropped here must not make an older store look new enough.
                others = (ServerStamp(stamp.cluster, 0, 0), *others[2:])
            self._keep((*others, stamp))

    def replace(self, stamp: ServerStamp) -> None:
        """Store the stamp of a coordinator that has judged all segments here by the former stamps."""
        with self._lock:
            if self._stamps != (stamp,):
                self._keep((stamp,))

    def _keep(self, stamps: tuple[ServerStamp, ...]) -> None:
        self._kept.keep(stamps)
        self._stamps = stamps


def _text(path: Path) -> str:
    """Return the text of the link that was checked, even if another user replaces the link meanwhile."""
    link = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fault = fault_of(os.fstat(link), stat.S_ISLNK)
        if fault:
            _log.error("%s %s: it is not read", path, fault)
            return ""
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)


def _read(path: Path) -> tuple[ServerStamp, ...]:
    try:
        text = _text(path)
    except OSError:
        return ()
    try:
        found = [[int(number, 16) for number in each.split(".")] for each in text.split(",")]
        return tuple(ServerStamp(cluster, term, sequence) for cluster, term, sequence in found)
    except ValueError:
        return (ServerStamp(0, 0, 0),)  # a stamp that no store has
