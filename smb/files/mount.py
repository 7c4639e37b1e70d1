"""`smb mount`: the files of a cluster as a directory of this host, through FUSE (mfusepy over libfuse3).

libfuse calls from up to ten threads of its own, each of which takes the GIL; the engine releases it while bytes move.
Reads go from the servers' memory into libfuse's reply, writes from its request to the servers, without a copy in
between.
"""

# libfuse dictates the arguments.
# ruff: noqa: ARG002

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mfusepy
import numpy as np

from smb.client import Client
from smb.errors import Error
from smb.files.attributes import NONE, Attributes, FileKind
from smb.files.contents import Octets
from smb.files.error_codes import refuse
from smb.files.generations import LATEST
from smb.files.handles import FileStatus, OpenFile
from smb.files.namespace import NameTree
from smb.spi import smallest_buffer_bytes

READ_AHEAD_BYTES = 4 << 20  # the kernel's default of 128 KiB would make a request for each
DEFAULT_UMASK = 0o022
_BLOCK_BYTES = 4096
_LINK_MODE = stat.S_IFLNK | 0o777
_ENDED_BY_SIGNAL = 8  # a result of fuse_main
_NAME_BYTES_MAX = 255
_RENAME_NOREPLACE = 1  # linux/fs.h
_LATEST = f"/{LATEST}"
_USER = "user."
_XATTR = "user.smb."
_XATTR_CREATE, _XATTR_REPLACE = 1, 2  # linux/xattr.h
_KEEP_SIZE, _PUNCH_HOLE, _ZERO_RANGE = 0x01, 0x02, 0x10  # linux/falloc.h
_ZEROS_BYTES = 1 << 20
_log = logging.getLogger("smb.mount")


class Operations(mfusepy.Operations):  # type: ignore[misc] # mfusepy's types are not exported
    """Answers FUSE's calls by a NameTree. `umask` removes rights from 0666 and 0777.

    All files belong to this user; if it is root, those of other users belong to these.
    """

    use_ns = True
    flag_nullpath_ok = True  # a removed file that is still open has no path
    flag_nopath = True

    def __init__(self, tree: NameTree, umask: int, on_ready: Callable[[], None]) -> None:
        self._tree = tree
        self._file_mode = stat.S_IFREG | (0o666 & ~umask)
        self._folder_mode = stat.S_IFDIR | (0o777 & ~umask)
        self._owner = (os.getuid(), os.getgid())
        self._gives_away = os.geteuid() == 0  # files may belong to others
        self._on_ready = on_ready
        self._files: dict[int, OpenFile] = {}
        self._folders: dict[int, str] = {}
        self._numbers = itertools.count(1)
        self._begun = time.time_ns()

    def init_with_config(self, conn_info: Any, config_3: Any) -> None:
        """See libfuse: called once, when the mount is ready."""
        if conn_info is not None:
            conn_info.max_readahead = READ_AHEAD_BYTES
            conn_info.max_background = 64
            conn_info.congestion_threshold = 48
        threading.Thread(target=self._on_ready, name="smb-mounted", daemon=True).start()

    # ---- names

    def getattr(self, path: str | None, fh: Any = None) -> dict[str, Any]:
        """See stat(2)."""
        file = self._files.get(fh.fh) if fh is not None else None
        status = file.status() if file is not None else self._tree.status(_plain(path))
        link = status.link
        if not link and status.directory and path is not None and path.endswith(_LATEST):
            target = self._tree.link(_plain(path))  # of a published state
            link = target is not None
            status = status if target is None else replace(status, nbytes=len(target))
        return self._attributes(status, link=link)

    def _attributes(self, status: FileStatus, *, link: bool) -> dict[str, Any]:
        kept = status.attributes
        mode = self._folder_mode if status.directory else self._file_mode
        if kept.mode is not None:
            mode = stat.S_IFMT(mode) | kept.mode
        if status.version is not None:
            mode &= ~0o222
        owner = kept.owner if kept.owner is not None and self._gives_away else self._owner
        modified = self._begun if status.directory and not status.modified else status.modified
        return {
            "st_mode": _LINK_MODE if link else mode,
            "st_uid": owner[0],
            "st_gid": owner[1],
            "st_nlink": 2 if status.directory and not link else 1,
            "st_size": status.nbytes,
            "st_blocks": -(-status.nbytes // 512),
            "st_blksize": 1 << 20,
            "st_mtime": modified,
            "st_ctime": status.changed or modified,
            "st_atime": modified if kept.accessed is None else kept.accessed,
        }

    def readlink(self, path: str) -> str:
        """See readlink(2). STATE/latest leads to the generation that is the latest now."""
        link = self._tree.link(_plain(path))
        if link is None:
            raise refuse(errno.EINVAL, path)
        return link

    def opendir(self, path: str) -> int:
        """See opendir(3). readdir is called without a path."""
        number = next(self._numbers)
        self._folders[number] = _plain(path)
        return number

    def readdir(self, path: str | None, fh: int) -> Iterable[Any]:
        modes = {FileKind.FILE: self._file_mode, FileKind.FOLDER: self._folder_mode, FileKind.LINK: _LINK_MODE}
        found = self._tree.list(self._folders[fh])
        return [".", "..", *((name, {"st_mode": modes[kind]}, 0) for name, kind in found)]

    def releasedir(self, path: str | None, fh: int) -> int:
        """See closedir(3)."""
        self._folders.pop(fh, None)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._tree.make_folder(_plain(path), self._of_new(mode, self._folder_mode))
        return 0

    def rmdir(self, path: str) -> int:
        self._tree.remove_folder(_plain(path))
        return 0

    def unlink(self, path: str) -> int:
        if _is_alias(path):
            self._tree.forget(_plain(path))
        else:
            self._tree.remove(_plain(path))
        return 0

    def symlink(self, target: str, source: str) -> int:
        """See symlink(2). mfusepy gives the new path first."""
        self._tree.make_link(_plain(target), source, self._of_new(0, 0))
        return 0

    def link(self, target: str, source: str) -> int:
        """See link(2)."""
        raise refuse(errno.EPERM, "a buffer has one name, so a file has no second one; make a symbolic link")

    def mknod(self, path: str, mode: int, dev: int) -> int:
        """See mknod(2)."""
        if not stat.S_ISREG(mode):
            raise refuse(errno.EPERM, "a buffer cannot be a pipe, a socket or a device: these are of one host")
        file = self._tree.open(_plain(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._of_new(mode, self._file_mode))
        file.close()
        return 0

    def rename(self, old: str, new: str, flags: int = 0) -> int:
        """See renameat2(2)."""
        if flags & ~_RENAME_NOREPLACE:
            raise refuse(errno.EINVAL, "exchanging two names is not supported")
        if _is_alias(new):
            self._tree.hide(_plain(old), _plain(new))
        else:
            self._tree.rename(_plain(old), _plain(new), replace=not flags)
        return 0

    def _of_new(self, mode: int, usual: int) -> Attributes:
        """Return the attributes of a new file that the calling process makes.

        Rights are left out only if every mount with the default umask shows them: those of a mount with another umask
        are no other mount's.
        """
        rights = stat.S_IMODE(mode)
        default = (0o777 if stat.S_ISDIR(usual) else 0o666) & ~DEFAULT_UMASK
        owner = mfusepy.fuse_get_context()[:2] if self._gives_away else self._owner
        return Attributes(
            None if rights == stat.S_IMODE(usual) == default or not usual else rights,
            None if owner == self._owner else (owner[0], owner[1]),
        )

    def _describe(self, path: str | None, fh: Any, change: Callable[[Attributes], Attributes]) -> None:
        if fh is not None:
            self._files[fh.fh].describe(change)
        else:
            self._tree.describe(_plain(path), change)

    def chmod(self, path: str | None, mode: int, fh: Any = None) -> int:
        """See chmod(2)."""
        self._describe(path, fh, lambda kept: replace(kept, mode=stat.S_IMODE(mode)))
        return 0

    def chown(self, path: str | None, uid: int, gid: int, fh: Any = None) -> int:
        """See chown(2). Asking for the present owner is not an error."""
        if not self._gives_away:
            if uid not in (-1, self._owner[0]) or gid not in (-1, self._owner[1]):
                raise refuse(
                    errno.EPERM, "all files belong to the user who mounted the cluster; root's mount keeps other owners"
                )
            return 0

        def change(kept: Attributes) -> Attributes:
            before = self._owner if kept.owner is None else kept.owner
            owner = before[0] if uid == -1 else uid, before[1] if gid == -1 else gid
            return replace(kept, owner=None if owner == self._owner else owner)

        self._describe(path, fh, change)
        return 0

    def utimens(self, path: str | None, times: tuple[int, int] | None = None, fh: Any = None) -> int:
        """See utimensat(2): the times of the last access and of the last change."""
        now = time.time_ns()
        accessed, modified = (now if each == _UTIME_NOW else each for each in times or (_UTIME_NOW, _UTIME_NOW))

        def change(kept: Attributes) -> Attributes:
            kept = kept if accessed == _UTIME_OMIT else replace(kept, accessed=accessed)
            return kept if modified == _UTIME_OMIT else replace(kept, modified=modified)

        self._describe(path, fh, change)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        """See statvfs(3): the capacity of the memory servers, and how many of the smallest files it has room for."""
        capacity, free, count = self._tree.space()
        smallest = smallest_buffer_bytes()
        return {
            "f_bsize": _BLOCK_BYTES,
            "f_frsize": _BLOCK_BYTES,
            "f_blocks": capacity // _BLOCK_BYTES,
            "f_bfree": free // _BLOCK_BYTES,
            "f_bavail": free // _BLOCK_BYTES,
            "f_files": count + free // smallest,
            "f_ffree": free // smallest,
            "f_favail": free // smallest,
            "f_namemax": _NAME_BYTES_MAX,
        }

    def listxattr(self, path: str) -> list[str]:
        kept = self._tree.status(_plain(path)).attributes.extended
        return [*(_USER + name for name in kept), *(_XATTR + name for name in self._xattrs(path))]

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        """See getxattr(2). user.smb.NAME has dtype, shape, layout, version and the like, as text."""
        value: bytes | str | None = None
        if name.startswith(_XATTR):
            value = self._xattrs(path).get(name.removeprefix(_XATTR))
        elif name.startswith(_USER):
            value = self._tree.status(_plain(path)).attributes.extended.get(name.removeprefix(_USER))
        if value is None:
            raise refuse(errno.ENODATA, name)
        return value.encode() if isinstance(value, str) else value

    def setxattr(self, path: str, name: str, value: bytes, options: int, position: int = 0) -> int:
        """See setxattr(2)."""

        def change(kept: Attributes) -> Attributes:
            there = own in kept.extended
            if there and options & _XATTR_CREATE:
                raise refuse(errno.EEXIST, name)
            if not there and options & _XATTR_REPLACE:
                raise refuse(errno.ENODATA, name)
            return replace(kept, extended={**kept.extended, own: bytes(value)})

        own = _own_name(name)
        self._tree.describe(_plain(path), change)
        return 0

    def removexattr(self, path: str, name: str) -> int:
        """See removexattr(2)."""

        def change(kept: Attributes) -> Attributes:
            if own not in kept.extended:
                raise refuse(errno.ENODATA, name)
            return replace(kept, extended={each: value for each, value in kept.extended.items() if each != own})

        own = _own_name(name)
        self._tree.describe(_plain(path), change)
        return 0

    def _xattrs(self, path: str) -> dict[str, str]:
        try:
            buffer, shown = self._tree.buffer(_plain(path))
        except IsADirectoryError:
            return {}
        except OSError as error:
            if error.errno == errno.ENODATA:
                return {}
            raise
        layout = buffer.layout
        servers = ",".join(segment.server for segment in layout.segments)
        version = buffer.version if shown.version is None else shown.version
        return {
            "name": buffer.name,
            "dtype": buffer.dtype.name,
            "shape": ",".join(map(str, buffer.shape)),
            "layout": f"stripe={layout.stripe_bytes} chunk={layout.chunk_bytes} servers={servers}",
            "version": str(version),
            "versions": str(buffer.versions),
            "form": shown.form.value or "raw",
        }

    # ---- bytes

    def open(self, path: str, flags: Any) -> int:
        try:
            return self._open(path, flags, flags.flags)
        except FileNotFoundError as error:
            # The kernel has just seen the file, or remembers it; another client took it away. At ESTALE the kernel
            # looks again, and with O_CREAT creates the file.
            raise refuse(errno.ESTALE, str(error)) from error

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        """See open(2) with O_CREAT."""
        return self._open(path, fi, fi.flags | os.O_CREAT, self._of_new(mode, self._file_mode))

    def _open(self, path: str, fi: Any, flags: int, attributes: Attributes = NONE) -> int:
        file = self._tree.open(_plain(path), flags, attributes)
        number = next(self._numbers)
        self._files[number] = file
        fi.fh = number
        # All openings of a path share its cached pages, but here they may read different data.
        fi.direct_io = file.changeable
        return 0

    def read_into(self, fi: Any, offset: int, out: Octets) -> int:
        """Fill `out`; return how much there was."""
        return self._files[fi.fh].read_into(offset, out)

    def write_from(self, fi: Any, offset: int, data: Octets) -> int:
        """Write all of it; return how much."""
        self._files[fi.fh].write(offset, data)
        return data.size

    def read(self, path: str | None, size: int, offset: int, fh: Any) -> bytes:
        """Exists so that libfuse asks at all; see _Fuse.read."""
        raise NotImplementedError

    def write(self, path: str | None, data: bytes, offset: int, fh: Any) -> int:
        """Exists so that libfuse asks at all; see _Fuse.write."""
        raise NotImplementedError

    def truncate(self, path: str | None, length: int, fh: Any = None) -> int:
        if fh is not None:
            self._files[fh.fh].truncate(length)
        else:
            self._tree.truncate(_plain(path), length)
        return 0

    def fallocate(self, path: str | None, mode: int, offset: int, size: int, fh: Any) -> int:
        """See fallocate(2). A file takes memory for all of its bytes, so a hole is a range of zeros."""
        file = self._files[fh.fh]
        zeros, keeps = mode & (_PUNCH_HOLE | _ZERO_RANGE), mode & _KEEP_SIZE
        if mode & ~(_KEEP_SIZE | _PUNCH_HOLE | _ZERO_RANGE) or (mode & _PUNCH_HOLE and not keeps):
            raise refuse(errno.EOPNOTSUPP, "a range cannot be inserted into a file or taken out of it")
        end, before = offset + size, file.nbytes
        if end > before and not keeps:
            file.truncate(end)
        if zeros:
            block = np.zeros(min(size, _ZEROS_BYTES), np.uint8)
            for start in range(offset, min(end, before), _ZEROS_BYTES):
                file.write(start, block[: min(_ZEROS_BYTES, min(end, before) - start)])
        return 0

    def flush(self, path: str | None, fh: Any) -> int:
        """See close(2)."""
        self._files[fh.fh].flush()
        return 0

    def fsync(self, path: str | None, datasync: int, fh: Any) -> int:
        self._files[fh.fh].flush()
        return 0

    def release(self, path: str | None, fh: Any) -> int:
        """Called when the last copy of a descriptor was closed."""
        file = self._files.pop(fh.fh, None)
        if file is not None:
            file.close()
        return 0


_UTIME_NOW, _UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2  # sys/stat.h: used in place of nanoseconds


class _Fuse(mfusepy.FUSE):  # type: ignore[misc] # see Operations
    """mfusepy's FUSE, except that reads and writes use libfuse's own memory, and rename gets its flags."""

    def read(self, path: Any, buf: Any, size: int, offset: int, fip: Any) -> int:
        out = _octets(buf, size)
        count: int = self.operations.read_into(fip.contents, offset, out)
        return count

    def write(self, path: Any, buf: Any, size: int, offset: int, fip: Any) -> int:
        data = _octets(buf, size)
        count: int = self.operations.write_from(fip.contents, offset, data)
        return count

    # These calls get a file instead of a path if it is open. mfusepy passes that on for getattr only.

    def truncate_fuse_3(self, path: Any, length: int, fip: Any) -> int:
        result: int = self.operations.truncate(self._name(path), length, fip.contents if fip else None)
        return result

    def chmod_fuse_3(self, path: Any, mode: int, fip: Any) -> int:
        result: int = self.operations.chmod(self._name(path), mode, fip.contents if fip else None)
        return result

    def chown_fuse_3(self, path: Any, uid: int, gid: int, fip: Any) -> int:
        nobody = 0xFFFFFFFF  # -1 in libfuse
        result: int = self.operations.chown(
            self._name(path),
            -1 if uid == nobody else uid,
            -1 if gid == nobody else gid,
            fip.contents if fip else None,
        )
        return result

    def utimens_fuse_3(self, path: Any, buf: Any, fip: Any) -> int:
        times = None
        if buf:
            stamps = buf.contents.actime, buf.contents.modtime
            times = tuple(
                stamp.tv_nsec if stamp.tv_nsec in (_UTIME_NOW, _UTIME_OMIT) else stamp.tv_sec * 10**9 + stamp.tv_nsec
                for stamp in stamps
            )
        result: int = self.operations.utimens(self._name(path), times, fip.contents if fip else None)
        return result

    def _name(self, path: bytes | None) -> str | None:
        return None if path is None else path.decode(self.encoding, self.errors)

    def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
        names = (name.decode(self.encoding, self.errors) for name in (old, new))
        result: int = self.operations.rename(*names, flags)
        return result


def serve(
    client: Client,
    directory: Path,
    *,
    on_ready: Callable[[], None],
    allow_other: bool = False,
    umask: int = DEFAULT_UMASK,
    staged_files: str | None = None,
    replicas: int = 1,
) -> None:
    """Mount, and serve until the directory is unmounted or a signal ends this process.

    Blocks; calls `on_ready` once the mount is ready. Raises Error if the mount fails.
    """
    tree = NameTree(client, staged_files, replicas=replicas)
    tree.sweep()

    mounted = threading.Event()

    def ready() -> None:
        mounted.set()
        _read_ahead(directory)
        on_ready()

    try:
        _Fuse(
            Operations(tree, umask, ready),
            str(directory),
            raw_fi=True,
            foreground=True,
            nothreads=False,
            fsname=f"softmem:{client.address}".replace(",", r"\,"),  # after a bare comma libfuse expects another option
            subtype="smb",
            default_permissions=True,
            allow_other=allow_other,
            attr_timeout=0.5,
            entry_timeout=0.5,
        )
    except RuntimeError as error:
        if mounted.is_set() and error.args == (_ENDED_BY_SIGNAL,):
            return
        raise Error(
            f"mounting on {directory} failed (code {error}); libfuse's message is above. Is it an empty directory of "
            f"yours, and may you use /dev/fuse? --allow-other needs user_allow_other in /etc/fuse.conf"
        ) from None
    finally:
        tree.end_hidden()


def _read_ahead(directory: Path) -> None:
    """Raise the kernel's read-ahead for this mount, if this process may do so (root)."""
    device = directory.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        setting.write_text(str(READ_AHEAD_BYTES >> 10))
    except OSError as error:
        _log.info("the kernel's default read-ahead stays: %s", error)


def _octets(pointer: Any, size: int) -> Octets:
    address = ctypes.cast(pointer, ctypes.c_void_p).value or 0
    return np.frombuffer(memoryview((ctypes.c_char * size).from_address(address)), np.uint8)


def _is_alias(path: str) -> bool:
    """Return True if libfuse made up this path for an open file that was removed."""
    return path.rpartition("/")[2].startswith(".fuse_hidden")


def _own_name(name: str) -> str:
    """Return the name of an extended attribute that a user may set, without its prefix. EOPNOTSUPP for any other, which
    cp and mv pass over.
    """
    if not name.startswith(_USER) or name == _USER or name.startswith(_XATTR):
        raise refuse(
            errno.EOPNOTSUPP, f"{name}: only user.NAME can be set, and not {_XATTR}NAME, which tells of buffers"
        )
    return name.removeprefix(_USER)


def _plain(path: str | None) -> str:
    if path is None:
        raise refuse(errno.ESTALE, "the file was removed")
    return path[1:]
