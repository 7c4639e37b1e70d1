"""The fsspec filesystem beside fsspec's own LocalFileSystem: its suites, and a table of methods and modes."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests import abstract
from fsspec.tests.abstract.common import GLOB_EDGE_CASES_TESTS

import smb
from smb.files.softmem import SoftmemFileSystem
from tests.fault.long import times

# Three tests for each of these cases, which copy, put and get alike: all 137 tests of the suites run with SMB_LONG=1.
# Without it those of every eighth case do: patterns of each form, one of them with recursive and maxdepth.
GLOB_EDGE_CASES_TESTS["argvalues"][:] = GLOB_EDGE_CASES_TESTS["argvalues"][:: times(8, 1)]


class SoftmemFixtures(abstract.AbstractFixtures):  # type: ignore[misc] # fsspec has no types
    """What fsspec's suites ask of a filesystem."""

    @pytest.fixture
    def fs(self, softmem: SoftmemFileSystem) -> SoftmemFileSystem:
        return softmem

    @pytest.fixture
    def local_fs(self) -> LocalFileSystem:
        return LocalFileSystem(auto_mkdir=True)

    @pytest.fixture
    def fs_path(self) -> str:
        return "suite"


class TestCopy(abstract.AbstractCopyTests, SoftmemFixtures):  # type: ignore[misc]
    pass


class TestGet(abstract.AbstractGetTests, SoftmemFixtures):  # type: ignore[misc]
    pass


class TestPut(abstract.AbstractPutTests, SoftmemFixtures):  # type: ignore[misc]
    pass


class TestOpen(abstract.AbstractOpenTests, SoftmemFixtures):  # type: ignore[misc]
    pass


class TestPipe(abstract.AbstractPipeTests, SoftmemFixtures):  # type: ignore[misc]
    pass


# ---- the table


class Both:
    """The same calls on both filesystems, below a directory of each."""

    def __init__(self, files: Any, root: str) -> None:
        self.files = files
        self.root = root

    def at(self, path: Any) -> Any:
        """Return a path below the root."""
        return (
            [self.at(each) for each in path] if isinstance(path, list) else f"{self.root}/{path}" if path else self.root
        )

    def plain(self, found: Any) -> Any:
        """Return what a call returned, without the root, and as far as both filesystems can say it."""
        if isinstance(found, dict) and "type" in found:
            size = found["size"] if found["type"] == "file" else 0
            return self.plain(found["name"]), found["type"], size
        if isinstance(found, dict):
            return sorted((self.plain(key), self.plain(value)) for key, value in found.items())
        if isinstance(found, (list, tuple, set)) and not isinstance(found, bytes):
            return sorted(map(self.plain, found), key=str)
        if isinstance(found, str):
            return found.replace(self.root, "").strip("/")
        return found

    def make(self) -> None:
        self.files.makedirs(self.root)
        for path, content in (("one", b"first;"), ("sub/two", b"second"), ("sub/deep/three.txt", b"a\nb\nc\n")):
            self.files.pipe_file(self.at(path), content)
        self.files.makedirs(self.at("empty"))

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self.files.rm(self.root, recursive=True)

    def tree(self) -> Any:
        """Return all files with their bytes, and all directories."""
        found = self.files.find(self.root, withdirs=True)
        return [
            (self.plain(each), "directory" if self.files.isdir(each) else self.files.cat_file(each)) for each in found
        ]


@pytest.fixture(scope="module")
def softmem(cluster: smb.LocalCluster) -> Iterator[SoftmemFileSystem]:
    files = fsspec.filesystem("softmem", coordinator=cluster.address, skip_instance_cache=True)
    yield files
    for path in files.ls("", detail=False):
        files.rm(path, recursive=True)
    files.namespace.client.close()


@pytest.fixture
def both(softmem: SoftmemFileSystem, tmp_path: Path) -> Iterator[tuple[Both, Both]]:
    """A directory with files and directories, on each."""
    pair = (
        Both(softmem, "both"),
        Both(LocalFileSystem(auto_mkdir=True, skip_instance_cache=True), str(tmp_path / "both")),
    )
    for one in pair:
        one.make()
    yield pair
    for one in pair:
        one.remove()


def said_by(one: Both, call: Callable[[Both], Any]) -> Any:
    """Return what a call returned, or the kind of its error."""
    try:
        return one.plain(call(one))
    except Exception as error:  # noqa: BLE001 - its kind is compared
        kinds = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, OSError, ValueError)
        return next((kind.__name__ for kind in kinds if isinstance(error, kind)), type(error).__name__)


def _local(one: Both, name: str) -> str:
    """Return a path of this host, of a file that both are given."""
    path = Path(os.environ["PYTEST_BOTH"]) / f"{len(one.root)}-{name}"
    path.parent.mkdir(exist_ok=True)
    return str(path)


def _upload(one: Both, path: str, content: bytes) -> str:
    where = _local(one, path)
    Path(where).write_bytes(content)
    return where


def _download(one: Both, path: str, **options: Any) -> Any:
    where = _local(one, "got")
    shutil.rmtree(where, ignore_errors=True)
    one.files.get(one.at(path), where, **options)
    found = Path(where)
    return sorted(str(each.relative_to(found)) for each in found.rglob("*")) if found.is_dir() else found.read_bytes()


METHODS: dict[str, Callable[[Both], Any]] = {
    "ls": lambda b: b.files.ls(b.at(""), detail=False),
    "ls, detail": lambda b: b.files.ls(b.at(""), detail=True),
    "ls of a file": lambda b: b.files.ls(b.at("one"), detail=True),
    "ls of nothing": lambda b: b.files.ls(b.at("none")),
    "listdir": lambda b: b.files.listdir(b.at("sub"), detail=True),
    "info of a file": lambda b: b.files.info(b.at("one")),
    "info of a directory": lambda b: b.files.info(b.at("sub")),
    "info of an empty directory": lambda b: b.files.info(b.at("empty")),
    "info of nothing": lambda b: b.files.info(b.at("none")),
    "stat": lambda b: b.files.stat(b.at("sub/two")),
    "exists": lambda b: [b.files.exists(b.at(each)) for each in ("one", "sub", "empty", "none", "one/below")],
    "lexists": lambda b: [b.files.lexists(b.at(each)) for each in ("one", "sub", "none")],
    "isdir": lambda b: [b.files.isdir(b.at(each)) for each in ("one", "sub", "sub/deep", "empty", "none")],
    "isfile": lambda b: [b.files.isfile(b.at(each)) for each in ("one", "sub", "none")],
    "size": lambda b: b.files.size(b.at("one")),
    "sizes": lambda b: [str(each) for each in b.files.sizes(b.at(["one", "sub/two"]))],
    "du": lambda b: b.files.du(b.at("")),
    "du, each": lambda b: b.files.du(b.at(""), total=False),
    "disk_usage": lambda b: b.files.disk_usage(b.at("sub")),
    "find": lambda b: b.files.find(b.at("")),
    "find, with directories": lambda b: b.files.find(b.at(""), withdirs=True, detail=True),
    "find, one level": lambda b: b.files.find(b.at(""), maxdepth=1),
    "find of a file": lambda b: b.files.find(b.at("one")),
    "find of nothing": lambda b: b.files.find(b.at("none")),
    "walk": lambda b: [(b.plain(at), sorted(dirs), sorted(files)) for at, dirs, files in b.files.walk(b.at(""))],
    "walk, one level": lambda b: [(b.plain(at), sorted(dirs)) for at, dirs, _ in b.files.walk(b.at(""), maxdepth=1)],
    "glob": lambda b: b.files.glob(b.at("*")),
    "glob, all": lambda b: b.files.glob(b.at("**")),
    "glob, names": lambda b: b.files.glob(b.at("sub/**/*.txt")),
    "glob of nothing": lambda b: b.files.glob(b.at("x*")),
    "expand_path": lambda b: b.files.expand_path(b.at("sub"), recursive=True),
    "expand_path of nothing": lambda b: b.files.expand_path(b.at("none")),
    "cat": lambda b: b.files.cat(b.at("one")),
    "cat of several": lambda b: b.files.cat(b.at(["one", "sub/two"])),
    "cat, recursive": lambda b: b.files.cat(b.at("sub"), recursive=True),
    "cat of nothing": lambda b: b.files.cat(b.at("none")),
    "cat_file": lambda b: [b.files.cat_file(b.at("one"), *each) for each in ((1, 3), (-3, None), (2, -1), (5, 100))],
    "cat_file of a directory": lambda b: b.files.cat_file(b.at("sub")),
    "cat_ranges": lambda b: b.files.cat_ranges(b.at(["one", "sub/two"]), [0, 2], [2, 4]),
    "head": lambda b: b.files.head(b.at("one"), 3),
    "tail": lambda b: b.files.tail(b.at("one"), 3),
    "tail of less": lambda b: b.files.tail(b.at("one"), 300),
    "read_block": lambda b: b.files.read_block(b.at("sub/deep/three.txt"), 2, 2),
    "read_block, to the end": lambda b: b.files.read_block(b.at("sub/deep/three.txt"), 1, None),
    "read_block, lines": lambda b: b.files.read_block(b.at("sub/deep/three.txt"), 1, 2, delimiter=b"\n"),
    "read_bytes": lambda b: b.files.read_bytes(b.at("one"), 1, 4),
    "read_text": lambda b: b.files.read_text(b.at("sub/deep/three.txt")),
    "write_bytes": lambda b: b.files.write_bytes(b.at("new/er"), b"12"),
    "write_text": lambda b: b.files.write_text(b.at("one"), "ü\n", encoding="utf-8"),
    "pipe": lambda b: b.files.pipe({b.at("one"): b"1", b.at("new/er"): b"2"}),
    "pipe_file, create": lambda b: b.files.pipe_file(b.at("one"), b"1", mode="create"),
    "pipe_file on a directory": lambda b: b.files.pipe_file(b.at("sub"), b"1"),
    "pipe_file, empty": lambda b: b.files.pipe_file(b.at("one"), b""),
    "touch": lambda b: b.files.touch(b.at("new/er")),
    "touch of a file": lambda b: b.files.touch(b.at("one")),
    "touch, as it is": lambda b: b.files.touch(b.at("one"), truncate=False),
    "touch, new as it is": lambda b: b.files.touch(b.at("new/er"), truncate=False),
    "mkdir": lambda b: b.files.mkdir(b.at("new/er/est")),
    "mkdir of one": lambda b: b.files.mkdir(b.at("new/er"), create_parents=False),
    "mkdir of one, there": lambda b: b.files.mkdir(b.at("sub/er"), create_parents=False),
    "mkdir again": lambda b: b.files.mkdir(b.at("sub")),
    "mkdir on a file": lambda b: b.files.mkdir(b.at("one")),
    "mkdir below a file": lambda b: b.files.mkdir(b.at("one/below")),
    "makedir": lambda b: b.files.makedir(b.at("sub/new")),
    "makedirs": lambda b: b.files.makedirs(b.at("new/er/est")),
    "makedirs beside files": lambda b: b.files.makedirs(b.at("sub/er/est")),
    "makedirs again": lambda b: b.files.makedirs(b.at("sub/deep")),
    "makedirs, there": lambda b: b.files.makedirs(b.at("sub/deep"), exist_ok=True),
    "makedirs, a file there": lambda b: b.files.makedirs(b.at("one"), exist_ok=True),
    "mkdirs": lambda b: b.files.mkdirs(b.at("sub/deep"), exist_ok=True),
    "rmdir": lambda b: b.files.rmdir(b.at("empty")),
    "rmdir of a full one": lambda b: b.files.rmdir(b.at("sub")),
    "rmdir of a file": lambda b: b.files.rmdir(b.at("one")),
    "rmdir of nothing": lambda b: b.files.rmdir(b.at("none")),
    "rm": lambda b: b.files.rm(b.at("one")),
    "rm of several": lambda b: b.files.rm(b.at(["one", "sub/two"])),
    "rm of nothing": lambda b: b.files.rm(b.at("none")),
    "rm, recursive": lambda b: b.files.rm(b.at("sub"), recursive=True),
    "rm, recursive, of a file": lambda b: b.files.rm(b.at("one"), recursive=True),
    "rm, recursive, of all": lambda b: b.files.rm(b.at(""), recursive=True),
    "rm_file": lambda b: b.files.rm_file(b.at("one")),
    "rm_file of a directory": lambda b: b.files.rm_file(b.at("sub")),
    "delete": lambda b: b.files.delete(b.at("sub"), recursive=True),
    "cp_file": lambda b: b.files.cp_file(b.at("one"), b.at("new/er")),
    "cp_file of a directory": lambda b: b.files.cp_file(b.at("sub"), b.at("new/er")),
    "cp_file of nothing": lambda b: b.files.cp_file(b.at("none"), b.at("new")),
    "cp_file onto itself": lambda b: b.files.cp_file(b.at("one"), b.at("one")),
    "copy": lambda b: b.files.copy(b.at("one"), b.at("sub/two")),
    "copy into": lambda b: b.files.copy(b.at("one"), b.at("sub")),
    "copy, recursive": lambda b: b.files.copy(b.at("sub"), b.at("new"), recursive=True),
    "copy, recursive, into": lambda b: b.files.copy(b.at("sub"), b.at("empty"), recursive=True),
    "copy of several": lambda b: b.files.copy(b.at(["one", "sub/two"]), b.at("new/")),
    "copy of nothing": lambda b: b.files.copy(b.at("none"), b.at("new")),
    "cp": lambda b: b.files.cp(b.at("one"), b.at("two")),
    "mv": lambda b: b.files.mv(b.at("one"), b.at("new/er")),
    "mv onto a file": lambda b: b.files.mv(b.at("one"), b.at("sub/two")),
    "mv into": lambda b: b.files.mv(b.at("one"), b.at("sub")),
    "mv of a directory": lambda b: b.files.mv(b.at("sub"), b.at("new/er"), recursive=True),
    "mv of a directory into": lambda b: b.files.mv(b.at("sub"), b.at("empty"), recursive=True),
    "mv onto itself": lambda b: b.files.mv(b.at("one"), b.at("one")),
    "mv of nothing": lambda b: b.files.mv(b.at("none"), b.at("new")),
    "move": lambda b: b.files.move(b.at("one"), b.at("two")),
    "rename": lambda b: b.files.rename(b.at("one"), b.at("two")),
    "put": lambda b: b.files.put(_upload(b, "x", b"new"), b.at("new/er")),
    "put_file": lambda b: b.files.put_file(_upload(b, "x", b"new"), b.at("one")),
    "upload": lambda b: b.files.upload(_upload(b, "x", b"new"), b.at("one")),
    "get": lambda b: _download(b, "one"),
    "get, recursive": lambda b: _download(b, "sub", recursive=True),
    "get of nothing": lambda b: _download(b, "none"),
    "get_file": lambda b: b.files.get_file(b.at("one"), _local(b, "file")) or Path(_local(b, "file")).read_bytes(),
    "download": lambda b: b.files.download(b.at("one"), _local(b, "file")) or Path(_local(b, "file")).read_bytes(),
    "get_mapper": lambda b: dict(b.files.get_mapper(b.at("sub")).items()),
    "modified": lambda b: b.files.modified(b.at("one")).tzinfo is not None,
    "created": lambda b: [b.files.created(b.at(each)).tzinfo is not None for each in ("one", "sub")],
    "ukey": lambda b: b.files.ukey(b.at("one")) == b.files.ukey(b.at("one")),
    "checksum": lambda b: b.files.checksum(b.at("one")) == b.files.checksum(b.at("one")),
    "unstrip_protocol": lambda b: b.files._strip_protocol(b.files.unstrip_protocol(b.at("one"))),
    "tree": lambda b: len(b.files.tree(b.at("")).splitlines()) > 3,
    "to_json": lambda b: type(b.files).from_json(b.files.to_json()).cat_file(b.at("one")),
    "pickle": lambda b: pickle.loads(pickle.dumps(b.files)).cat_file(b.at("one")),
    "sign": lambda b: b.files.sign(b.at("one")),
    "invalidate_cache": lambda b: b.files.invalidate_cache(b.at("")),
}  # fmt: skip
# What fsspec has for programs that extend it, for whole processes, or only so that a filesystem may have it.
UNTOLD = {
    "clear_instance_cache", "current", "from_dict", "to_dict", "from_json", "open", "transaction", "start_transaction",
    "end_transaction", "open_async", "transaction_type", "cat_file_kwargs",
}  # fmt: skip


def test_methods(both: tuple[Both, Both], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each method returns or raises, and leaves behind, is what LocalFileSystem's does."""
    monkeypatch.setenv("PYTEST_BOTH", str(tmp_path / "uploads"))
    fresh = [one.tree() for one in both]
    assert fresh[0] == fresh[1]
    wrong = {}
    for name, method in METHODS.items():
        said = [said_by(one, method) for one in both]
        left = [one.tree() if one.files.isdir(one.root) else None for one in both]
        if said[0] != said[1] or left[0] != left[1]:
            wrong[name] = said, left
        if left != fresh:
            for one in both:
                one.remove()
                one.make()
    assert wrong == {}


def test_every_method_is_in_the_table() -> None:
    """The table has all public methods of fsspec's AbstractFileSystem."""
    found = vars(fsspec.AbstractFileSystem).items()
    plain = {name: getattr(each, "__func__", each) for name, each in found if not isinstance(each, type)}
    public = {name for name, each in plain.items() if callable(each) and not name.startswith("_")}
    told = {method.split(",")[0].split(" ")[0] for method in METHODS}
    assert public - told - UNTOLD == set()


def _written(file: Any) -> Any:
    file.write(b"+new")
    return None


def _read_and_written(file: Any) -> Any:
    file.seek(0)
    before = file.read()
    file.seek(2)
    file.write(b"NEW")
    file.seek(0)
    return before, file.read()


# What is done with a file that is open: of all modes, as far as the mode lets it.
DEEDS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda _: None,
    "read": lambda file: file.read(),
    "write": _written,
    "read and write": _read_and_written,
    "lines": lambda file: list(file),
    "seek to the end": lambda file: file.seek(0, 2),
    "truncate": lambda file: file.truncate(3),
    "what it can": lambda file: [file.readable() if not isinstance(file, io.IOBase) else True, file.seekable()],
}
MODES = [base + plus for base in "rwxa" for plus in ("b", "b+", "+b", "t+")] + ["r", "wt"]


def _done(one: Both, *, mode: str, deed: Callable[[Any], Any], path: str) -> Any:
    # LocalFileSystem's own files hide some of what the built-in open's can.
    opened: Any = one.files.open if one.root == "both" else open
    with opened(one.at(path), mode) as file:
        return deed(file if "b" in mode else _Text(file))


@pytest.mark.parametrize(
    ("deed", "path"),
    [(deed, path) for deed in DEEDS for path in ("one", "new")] + [("nothing", "sub"), ("nothing", "one/below")],
)
def test_modes(both: tuple[Both, Both], deed: str, path: str) -> None:
    """Every mode does with a file, with what is none yet, with a directory, and below a file, what the built-in open
    does.
    """
    for mode in MODES:
        said = []
        for one in both:
            if path == "new":
                with suppress(FileNotFoundError):
                    one.files.rm(one.at(path))
            elif path == "one":
                one.files.pipe_file(one.at(path), b"a\nb\nfirst;")

            said.append(
                (
                    said_by(one, partial(_done, mode=mode, deed=DEEDS[deed], path=path)),
                    said_by(one, lambda one: one.files.cat_file(one.at(path))),
                )
            )
        assert said[0] == said[1], (mode, said)
    assert both[0].tree() == both[1].tree()


class _Text:
    """A text file, to which bytes may be given."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> Any:
        return self._file.write(data.decode())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __iter__(self) -> Any:
        return iter(self._file)


@pytest.mark.parametrize("mode", ["rx", "b", "", "rw", "r++", "q", "wa"])
def test_modes_that_there_are_not(softmem: SoftmemFileSystem, mode: str) -> None:
    """They are ValueErrors, as of the built-in open."""
    with pytest.raises(ValueError, match="mode"):
        softmem.open("one", mode)


# ---- transactions


@pytest.mark.parametrize("mode", ["wb", "w+b", "ab", "a+b", "xb", "x+b", "r+b", "w", "a"])
@pytest.mark.parametrize("fails", [False, True])
def test_transactions(both: tuple[Both, Both], mode: str, fails: bool) -> None:
    """A file of a transaction is what its mode makes of it once that ends, and as it was before, and if it fails."""
    close = "b" not in mode or fails  # what is left open the transaction closes; of text it has not all
    one = both[0]
    before = one.tree()
    new = b"+new"
    names = ["new"] if "x" in mode else ["one"] if "r" in mode else ["one", "new", "deep/new"]
    wanted = dict(before)
    try:
        with one.files.transaction:
            files = []
            for name in names:
                files.append(one.files.open(one.at(name), mode))
                files[-1].write(new if "b" in mode else new.decode())
                if close:
                    files[-1].close()
                had = dict(before).get(name, b"")
                wanted[name] = had + new if "a" in mode else new + had[4:] if "r" in mode else new
                if "/" in name:
                    wanted["deep"] = "directory"
            assert one.files.cat_file(one.at("one")) == b"first;"
            assert not one.files.exists(one.at("new"))
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        found = {name: content for name, content in one.tree() if name != "deep"}
        assert found == dict(before)
    else:
        assert dict(one.tree()) == wanted
    assert not one.files._intrans


def test_new_files_of_transactions(both: tuple[Both, Both]) -> None:
    """A file that is to be new is refused if there is one, when it is opened and when it gets its name."""
    one = both[0]
    with pytest.raises(FileExistsError), one.files.transaction, one.files.open(one.at("one"), "xb") as file:
        file.write(b"other")
    one.files.start_transaction()
    with one.files.open(one.at("new"), "xb") as file:
        file.write(b"other")
    one.files.pipe_file(one.at("new"), b"of another", autocommit=True)
    with pytest.raises(FileExistsError):
        one.files.end_transaction()
    assert one.files.cat_file(one.at("one")) == b"first;"
    assert one.files.cat_file(one.at("new")) == b"of another"
    assert [name for name, _ in one.tree() if "part" in name] == []
    with one.files.transaction:
        assert one.files.cat_file(one.at("one")) == b"first;"
        with one.files.open(one.at("one")) as file:
            assert file.read() == b"first;"
        with pytest.raises(FileNotFoundError):
            one.files.open(one.at("none"), "r+b")
        with pytest.raises(IsADirectoryError):
            one.files.open(one.at("sub"), "wb")
    one.files.start_transaction()
    with one.files.open(one.at("late"), "wb") as file:
        file.write(b"1")
    assert not one.files.exists(one.at("late"))
    one.files.end_transaction()
    assert one.files.cat_file(one.at("late")) == b"1"


# ---- what is beside LocalFileSystem's


def test_a_directory_is_not_removed_by_mistake(both: tuple[Both, Both]) -> None:
    """rm of a directory without recursive=True is refused, before files beside it are removed."""
    one = both[0]
    before = one.tree()
    for path in ("sub", "empty", ["one", "sub"], "*"):
        with pytest.raises(IsADirectoryError, match="recursive=True"):
            one.files.rm(one.at(path))
    assert one.tree() == before


def test_open_files_say_what_they_are(both: tuple[Both, Both]) -> None:
    """Size, path, filesystem and information; one that is read is pickled with its place."""
    one = both[0]
    with one.files.open(one.at("one")) as file:
        assert (file.size, file.path, file.fs, file.mode) == (6, one.at("one"), one.files, "rb")
        assert file.info()["size"] == 6
        file.read(2)
        with pickle.loads(pickle.dumps(file)) as again:
            assert again.read() == b"rst;"
        assert file.read() == b"rst;"
    with one.files.open(one.at("one"), "ab") as file:
        file.write(b"12")
        file.flush()
        assert file.size == 8


def test_big_endian_files(softmem: SoftmemFileSystem) -> None:
    """A .npy file of another byte order reads back as it was written, and is no array of other numbers; so does one of
    Fortran's order.
    """
    import numpy as np

    for dtype in (">f4", ">f8", ">f2", ">i4", ">i8", "<f4", "u1", ">u2", ">c8"):
        for order in "CF":
            wanted, kept = np.asarray(np.arange(6).reshape(2, 3), dtype, order=order), io.BytesIO()
            np.save(kept, wanted)
            softmem.pipe_file("array.npy", kept.getvalue())
            assert softmem.cat_file("array.npy") == kept.getvalue()
            with softmem.open("array.npy") as file:
                found = np.load(file)
            assert found.dtype == wanted.dtype
            assert np.array_equal(found, wanted)
            is_array = softmem.namespace.buffer("array.npy")[0].shape == (2, 3)
            assert is_array == (order == "C" and dtype in ("<f4", "u1"))
            softmem.rm("array.npy")


def test_a_file_that_a_transaction_opens_twice(both: tuple[Both, Both]) -> None:
    """The second time it has what the first one wrote: of two appends the first one was lost."""
    softmem, _ = both  # fsspec's own appends of transactions fail
    with softmem.files.transaction:
        for content in (b"a;", b"b;"):
            with softmem.files.open(softmem.at("one"), "ab") as file:
                file.write(content)
    assert softmem.files.cat(softmem.at("one")) == b"first;a;b;"
    with softmem.files.transaction:
        with softmem.files.open(softmem.at("new"), "wb") as file:
            file.write(b"12")
        with softmem.files.open(softmem.at("new"), "r+b") as file:
            file.write(b"3")
        assert softmem.files.ls(softmem.at("empty")) == []
        assert not [name for name in softmem.files.find(softmem.root) if name.endswith(".part")]
        with softmem.files.open(softmem.at("l" * 250), "wb") as file:
            file.write(b"long")
    assert softmem.files.cat(softmem.at("new")) == b"32"
    assert softmem.files.cat(softmem.at("l" * 250)) == b"long"
    softmem.files.start_transaction()
    softmem.files.open(softmem.at("newer"), "xb").close()
    with pytest.raises(FileExistsError):
        softmem.files.open(softmem.at("newer"), "xb")
    softmem.files.end_transaction()
    assert softmem.files.exists(softmem.at("newer"))


def test_an_array_that_moves_to_another_form(both: tuple[Both, Both]) -> None:
    """By a copy, as into another file system: its bytes are those of a .npy file under the other name, too."""
    array = io.BytesIO()
    np.save(array, np.arange(3))
    for one in both:
        one.files.pipe_file(one.at("w.npy"), array.getvalue())
        one.files.mv(one.at("w.npy"), one.at("x.bin"))
        assert one.files.cat(one.at("x.bin")) == array.getvalue()
        assert not one.files.exists(one.at("w.npy"))


def test_chained_caches(cluster: smb.LocalCluster, softmem: SoftmemFileSystem) -> None:
    """fsspec's own, before it."""
    softmem.pipe_file("cached", bytes(range(200)))
    for cache in ("simplecache", "filecache"):
        with fsspec.open(f"{cache}::softmem://cached", softmem={"coordinator": cluster.address}) as file:
            file.seek(100)
            assert file.read(50) == bytes(range(100, 150)), cache


def test_a_directory_goes_whole(both: tuple[Both, Both]) -> None:
    """With a depth, too: some of it was removed, and the directory stayed."""
    for one in both:
        one.files.rm(one.at("sub"), recursive=True, maxdepth=1)
        assert not one.files.exists(one.at("sub"))
