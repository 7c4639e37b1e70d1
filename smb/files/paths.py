"""What each path shows in the cluster: a buffer in one of its forms, a directory, a symbolic link.

ShownPaths belongs to one NameTree. It changes nothing, and needs no lock. It knows neither the tree's open files nor
its hidden ones.
"""

from __future__ import annotations

import errno
import os
from collections import deque

import numpy as np

from smb.buffer_info import BufferInfo
from smb.files.attributes import decode
from smb.files.catalogue import Catalogue
from smb.files.contents import Live
from smb.files.error_codes import refuse
from smb.files.folders import OwnFolders
from smb.files.generations import LATEST, Generations
from smb.files.making import FoundForm
from smb.files.names import escaped, is_private, meanings, parent_of

TARGET_BYTES_MAX = 4095  # of a symbolic link, as in Linux
_LINKS_MAX = 40  # in one path, as in Linux


class ShownPaths:
    """See the module. `folders` are the tree's own."""

    def __init__(self, catalogue: Catalogue, generations: Generations, folders: OwnFolders) -> None:
        self._catalogue = catalogue
        self._generations = generations
        self._folders = folders

    def look(self, path: str) -> FoundForm | None:
        """Return the buffer that a path shows, and in which form."""
        if not path or is_private(path):
            return None
        escaped(path)  # raises for a path that is too long
        shown = meanings(path)
        for missed in (False, True):
            infos = (self._catalogue.missed(path) if missed else self._catalogue.listing()).infos
            for one in shown:
                info = infos.get(one.name)
                if info is None or (one.version is not None and info.versions == 1):
                    continue
                view = self._catalogue.view(info, one.form)
                if view is not None:
                    return FoundForm(one, info, view)
        return None

    def is_folder(self, path: str) -> bool:
        """Return True for a directory: of the tree, of the cluster, or of a published state."""
        if not path or path in self._folders.paths:
            return True
        listing = self._catalogue.listing()
        if path in listing.folders:
            return True
        known = any(shown.name in listing.infos for shown in meanings(path))  # a file is not looked for again
        if not known and path in self._catalogue.missed(path).folders:
            return True
        return self._generations.is_folder(path)

    def missing(self, path: str) -> OSError:
        """Return the error for a missing path: ENOTDIR below a file, else ENOENT."""
        above, infos = parent_of(path), self._catalogue.listing().infos
        while above and above not in infos:
            above = parent_of(above)
        if above and not self.is_folder(above):
            return refuse(errno.ENOTDIR, f"{path!r} does not exist: {above!r} is a file")
        return refuse(errno.ENOENT, f"{path!r} does not exist")

    def link(self, path: str) -> str | None:
        """Return the target of a symbolic link, or the generation to which STATE/latest leads; None for any other path.

        ENOENT before the first generation.
        """
        place = self._generations.at(path)
        if place is not None and place.generation == LATEST and not place.file:
            return str(self._generations.number(place))
        found = self.look(path)
        if found is None or not is_link(found.info):
            return None
        target = np.empty(found.view.nbytes, np.uint8)
        Live(self._catalogue.known(found.info), found.view).read_into(0, target)
        return os.fsdecode(target.tobytes())

    def follow(self, path: str) -> str:
        """Return the path to which the symbolic links in a path lead. ELOOP; ENOENT for a link out of the cluster's
        files.
        """
        left, done, links = deque(path.split("/")), "", 0
        if not {"", ".", ".."}.isdisjoint(left):  # refused where the path is used
            return path
        while left:
            part = left.popleft()
            if part in ("", "."):
                continue
            if part == "..":
                done = parent_of(done)
                continue
            here = f"{done}/{part}" if done else part
            info = self._catalogue.listing().infos.get(here)
            target = self.link(here) if info is not None and is_link(info) else None
            if target is None:
                done = here
                continue
            links += 1
            if links > _LINKS_MAX:
                raise refuse(errno.ELOOP, f"{path!r} leads through more than {_LINKS_MAX} symbolic links")
            if target.startswith("/"):
                raise refuse(errno.ENOENT, f"{path!r}: the symbolic link {here!r} leads to {target!r} of a host")
            left.extendleft(reversed(target.split("/")))
        return done

    def refuse_published(self, *paths: str) -> None:
        """Raise EACCES for a path in the directory of a published state, or for that directory."""
        for path in paths:
            if self._generations.at(path) is not None:
                raise published(path)

    def refuse_generation(self, path: str) -> None:
        """Raise EACCES for a path in a generation of a published state."""
        place = self._generations.at(path)
        if place is not None and place.generation:
            raise published(path)


def published(path: str) -> OSError:
    """Return the error for a change of a generation."""
    return refuse(
        errno.EACCES,
        f"{path!r} belongs to a published state: its generations cannot be changed. Files that all of them have are "
        f"written into the state's own directory; smb rm deletes the state",
    )


def is_link(info: BufferInfo) -> bool:
    """Return True for a symbolic link, whose buffer's bytes can be a target."""
    fits = info.versions == 1 and info.dtype == np.uint8 and 0 < info.nbytes <= TARGET_BYTES_MAX
    return bool(info.file_attributes) and fits and decode(info.file_attributes).link
