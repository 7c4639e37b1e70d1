"""Moves memory that an earlier release left in the directory around the private one, so that none is left unnoticed.

Earlier releases had their files in /dev/shm itself by default, where other users may write. This release refuses such a
directory, and by default uses a private one inside it. At its start it moves the files that runs of the same name and
user left around it. Both directories are on one file system, so a file is moved by a rename: clients that have it
mapped go on, and if a start is killed meanwhile, the next start continues. The lock of the name is held in both places.
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

    Raises AlreadyExistsError if a server of an earlier release runs there, and UnavailableError if a file is in both
    places or cannot be moved. Then all files stay, and the message has the command that moves them.
    """
    around = memory_dir.directory.parent
    # A directory that belongs to this user alone may have the files of other servers of this release.
    if not is_private_name(memory_dir.directory) or not directory_fault(around.stat()):
        return
    try:
        found = _files(around, memory_dir.name)
    except OSError:  # the directory cannot be listed, so no earlier run could have found anything there either
        return
    foreign = [path for path, fault in found.items() if fault and path.suffix == ".segment"]
    if foreign:
        _log.error(
            "%s %s: it is not used and was not moved to %s (%d such segments in %s)",
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
    """Return the pattern of the names of files that matter after a restart, for Python and for find."""
    return rf"smb\.{re.escape(name)}\.([0-9a-f]{{16}}\.(segment|quarantined)|journal|stamps)"


def _files(around: Path, name: str) -> dict[Path, str]:
    """Return these files, each with why it is not trusted; "" if it belongs to this user alone."""
    there = sorted(path for path in around.iterdir() if re.fullmatch(_pattern(name), path.name))
    return {path: fault_at(path, stat.S_ISLNK if path.suffix == ".stamps" else stat.S_ISREG) for path in there}


def _move(paths: list[Path], memory_dir: MemoryDirectory) -> None:
    both = [path for path in paths if os.path.lexists(memory_dir.directory / path.name)]
    if both:
        raise UnavailableError(f"{both[0].name} is in {both[0].parent} and in {memory_dir.directory}")
    for path in paths:
        path.rename(memory_dir.directory / path.name)  # no other user can write there, so no file is replaced


def _by_hand(memory_dir: MemoryDirectory, around: Path) -> str:
    return (
        f"So the files that earlier runs of this server left in {around} were not moved to {memory_dir.directory}, "
        f"where this server has its memory; all of them are kept. If both directories have a file, remove the one that "
        f"you do not need. Then, while no server uses them, move the rest: "
        f"find {around} -maxdepth 1 -user {os.geteuid()} -regextype "
        f"posix-extended -regex '.*/{_pattern(memory_dir.name)}' -exec mv -n -t {memory_dir.directory} {{}} +"
    )
