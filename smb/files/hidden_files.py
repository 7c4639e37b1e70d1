"""Files that were removed here, but that the cluster still has for a moment.

libfuse hides a file that is open when it is removed, and when another file is about to be renamed to its path. For the
cluster the latter must be one step, so the file stays there for _HIDDEN_S, or until its name is needed. Processes that
have it open know it as its alias.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from smb.errors import Error, NotFoundError
from smb.files.catalogue import Catalogue
from smb.files.folders import OwnFolders
from smb.files.handles import FileNode, FileStatus
from smb.files.making import Maker
from smb.files.paths import ShownPaths

_HIDDEN_S = 1.0
_ALIASES_KEPT = 1000
_log = logging.getLogger("smb")


class _Hidden:
    """A path that is hidden until `timer` calls `end` or the name is needed.

    A buffer that another process puts there in the meantime has another `buffer_id`.
    """

    def __init__(self, node: FileNode | None, buffer_id: int, end: Callable[[_Hidden], None]) -> None:
        self.node = node
        self.buffer_id = buffer_id
        self.timer = threading.Timer(_HIDDEN_S, end, (self,))
        self.timer.daemon = True
        self.timer.start()


class HiddenFiles:
    """Belongs to one NameTree, and uses its lock."""

    def __init__(
        self, lock: threading.RLock, catalogue: Catalogue, paths: ShownPaths, maker: Maker, folders: OwnFolders
    ) -> None:
        self._lock = lock
        self._catalogue = catalogue
        self._paths = paths
        self._maker = maker
        self._folders = folders
        self._hidden: dict[str, _Hidden] = {}
        self._aliases: dict[str, FileStatus] = {}
        self._latest_aliases: deque[str] = deque(maxlen=_ALIASES_KEPT)

    def __contains__(self, path: str) -> bool:
        return path in self._hidden

    def hide(self, path: str, node: FileNode | None, buffer_id: int) -> None:
        """Hide the file at a path. The caller holds the lock."""
        self._hidden[path] = _Hidden(node, buffer_id, lambda hidden: self._end(path, hidden))

    def note_alias(self, alias: str, status: FileStatus | None) -> None:
        """Take note of the name that a hidden file has; with its status if no node here has it."""
        if status is not None:
            self._aliases[alias] = status
        self._latest_aliases.append(alias)

    def status(self, alias: str) -> FileStatus | None:
        """Return the status of a hidden file by its alias; None for any other path."""
        return self._aliases.get(alias)

    def was_alias(self, path: str) -> bool:
        """Return True if a path was lately an alias."""
        return path in self._latest_aliases

    def forget(self, alias: str) -> None:
        """Forget a hidden file: the last process that had it open has closed it."""
        with self._lock:
            self._aliases.pop(alias, None)

    def take_back(self, path: str) -> FileNode | None:
        """End the hiding of a path whose file is about to be replaced. Return the file that was hidden."""
        hidden = self._hidden.pop(path)
        hidden.timer.cancel()
        return hidden.node

    def end(self, path: str) -> None:
        """Remove a path's hidden file from the cluster, if there is one."""
        hidden = self._hidden.get(path)
        if hidden is not None:
            self._end(path, hidden)

    def end_below(self, path: str) -> None:
        """Remove the hidden files in a directory; "": all."""
        for inside, hidden in list(self._hidden.items()):
            if not path or inside.startswith(path + "/"):
                self._end(inside, hidden)

    def hides(self, path: str) -> bool:
        """Return True if the file at a path was hidden, and no other file is there."""
        if path not in self._hidden:
            return False
        found = self._paths.look(path)
        return found is None or found.info.id in self.ids()

    def ids(self) -> set[int]:
        """Return the ids of the hidden files' buffers."""
        return {hidden.buffer_id for hidden in list(self._hidden.values())}

    def _end(self, path: str, hidden: _Hidden) -> None:
        with self._lock:
            if self._hidden.get(path) is not hidden:
                return  # the hidden file has ended, and the path may have been hidden again, for another file
            self.take_back(path)
            try:
                found = self._paths.look(path)
                if found is not None and found.info.id == hidden.buffer_id:
                    self._maker.take_away(found, hidden.node)
                    self._folders.keep_above(path, self._catalogue.listing().folders)
            except NotFoundError as error:  # another client has taken it away, or put another file there
                _log.debug("%s: %s", path, error)
            except Error as error:
                _log.error("%s was not removed: %s", path, error)
