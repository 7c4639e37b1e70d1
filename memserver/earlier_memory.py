"""Memory that an earlier release left in the directory around the private one: it is moved, never left behind unseen.

Earlier releases had their files in /dev/shm itself by default, where others may write. This one refuses such a
directory, and its default is a private one in there. A start there takes along what runs of the same name and user left
around it. Both places are on one file system, so a file is moved by a rename: clients that have it mapped go on, and
the next start goes on where one was killed in the middle. The lock of the name is held in both places meanwhile.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from contextlib import closing
from pathlib import Path

from memserver.memory_dir import MemoryDirectory
from smb.daemon.own_files import fault_at
from smb.daemon.private_directory import directory_fault, is_private_name
from smb.errors import AlreadyExistsError, Error, UnavailableError

_log = logging.getLogger("memserver")


def take_in(memory_dir: MemoryDirectory) -> None:
    """Move the files of this server's name from the directory around a private one into that.

    Raises AlreadyExistsError if a server of an earlier release runs there, UnavailableError if a file is in both places
    or cannot be moved; then all that is there stays, and the message has the command.
    """
    around = memory_dir.directory.parent
    # In a directory that is this user's alone other servers of this release may be.
    if not is_private_name(memory_dir.directory) or not directory_fault(around.stat()):
        return
    try:
        found = _files(around, memory_dir.name)
    except OSError:  # not to be listed: then no earlier run could find anything there either
        return
    foreign = [path for path, fault in found.items() if fault and path.suffix == ".segment"]
    if foreign:
        _log.error(
            "%s %s: it is not used, and %s does not take it in (%d such segments in %s)",
            foreign[0], found[foreign[0]], memory_dir.directory, len(foreign), around,
        )  # fmt: skip
    ours = [path for path, fault in found.items() if not fault]
    if not ours:
        return
    try:
        with closing(MemoryDirectory(around, memory_dir.name, serves=False)) as earlier:
            _move(ours, memory_dir)
            for path in earlier.segment_files()[1]:
                if not fault_at(path):
                    earlier.make_way(path, must=False)
            if not fault_at(earlier.socket_path, stat.S_ISSOCK):
                earlier.make_way(earlier.socket_path, must=False)
    except (OSError, Error) as error:
        kind = AlreadyExistsError if isinstance(error, AlreadyExistsError) else UnavailableError
        raise kind(f"{error}. {_by_hand(memory_dir, around)}") from None
    _log.info("moved %d files that an earlier run left in %s to %s", len(ours), around, memory_dir.directory)


def _pattern(name: str) -> str:
    """Return what matches the names of files that count after a restart, for Python and for find."""
    return rf"smb\.{re.escape(name)}\.([0-9a-f]{{16}}\.(segment|quarantined)|journal|stamps)"


def _files(around: Path, name: str) -> dict[Path, str]:
    """Return them, and why each is not believed; "" if it is this user's alone."""
    there = sorted(path for path in around.iterdir() if re.fullmatch(_pattern(name), path.name))
    return {path: fault_at(path, stat.S_ISLNK if path.suffix == ".stamps" else stat.S_ISREG) for path in there}


def _move(paths: list[Path], memory_dir: MemoryDirectory) -> None:
    both = [path for path in paths if os.path.lexists(memory_dir.directory / path.name)]
    if both:
        raise UnavailableError(f"{both[0].name} is in {both[0].parent} and in {memory_dir.directory}")
    for path in paths:
        path.rename(memory_dir.directory / path.name)  # nobody else writes there, so nothing is replaced


def _by_hand(memory_dir: MemoryDirectory, around: Path) -> str:
    return (
        f"So what earlier runs of this server left in {around} was not moved to {memory_dir.directory}, where this one "
        f"has its memory; all of it is kept. Where both directories have a file, remove the one that does not count. "
        f"Then, while no server uses them, move the rest: find {around} -maxdepth 1 -user {os.geteuid()} -regextype "
        f"posix-extended -regex '.*/{_pattern(memory_dir.name)}' -exec mv -n -t {memory_dir.directory} {{}} +"
    )
