"""The directories that only this process knows, and the attributes of all directories, which only it knows, too.

A directory is there for the cluster while a buffer lies below it. OwnFolders belongs to one NameTree. Whoever changes
it holds the tree's lock (namespace.py).
"""

from __future__ import annotations

import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import replace

from smb.files.attributes import NONE, Attributes
from smb.files.names import parent_of

_FOLDERS_KEPT = 10_000


class OwnFolders:
    """`paths`: made by mkdir, or left empty: no buffer lies below them."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self._attributes: dict[str, Attributes] = {}

    def attributes(self, path: str) -> Attributes:
        """Return the attributes of a directory. Needs no lock."""
        return self._attributes.get(path, NONE)

    def describe(self, path: str, attributes: Attributes) -> None:
        """Keep the attributes of a directory, in place of those that were changed the longest ago if there are many."""
        self._attributes.pop(path, None)
        self._attributes[path] = attributes
        while len(self._attributes) > _FOLDERS_KEPT:
            with suppress(KeyError, RuntimeError, StopIteration):  # forget_attributes drops some without the lock
                del self._attributes[next(iter(self._attributes))]

    def forget_attributes(self, path: str) -> None:
        """Forget those of a directory that is gone: a new one of its name is another. Needs no lock."""
        self._attributes.pop(path, None)

    def touch(self, path: str) -> None:
        """Note that a name in the directory of this path has changed now."""
        parent = parent_of(path)
        self.describe(parent, replace(self.attributes(parent), modified=time.time_ns()))

    def add(self, path: str) -> None:
        """Make a directory and its missing parents."""
        while path and path not in self.paths:
            self.paths.add(path)
            path = parent_of(path)

    def keep_above(self, path: str, listed: Container[str]) -> None:
        """Keep a directory whose last file was removed: removing a tree removes the directory next. `listed`: those of
        the cluster.
        """
        while path := parent_of(path):
            if path not in listed:
                self.paths.add(path)

    def remove(self, path: str) -> None:
        """Remove a directory, which is empty."""
        self.paths.discard(path)
        self.forget_attributes(path)

    def rename(self, path: str, new_path: str) -> None:
        """Rename a directory, and those in it."""
        for folder in [each for each in self._attributes if each == path or each.startswith(path + "/")]:
            self._attributes[new_path + folder[len(path) :]] = self._attributes.pop(folder)
        inside = {folder for folder in self.paths if folder == path or folder.startswith(path + "/")}
        self.paths -= inside
        self.paths |= {new_path + folder[len(path) :] for folder in inside}
        self.add(new_path)
