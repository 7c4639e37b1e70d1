"""smb mount: what POSIX has beside bytes and names: symbolic links, rights, owners, times, attributes, holes, room.

Each case also says what a second mount of the same cluster sees.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

import smb
from smb.files import folders
from smb.files.attributes import Attributes
from smb.files.namespace import NameTree
from smb.rpc.control_pb2 import RenameBufferRequest
from smb.rpc.coordinator_client import Coordinator
from smb.spi import rename_file
from tests.fault.long import LIMIT_S
from tests.support.daemons import tidy, wait_for
from tests.support.mounts import end_mount, names, needs_fuse, run, shown, start_mount, two_mounts, unmount

pytestmark = [needs_fuse, pytest.mark.timeout(LIMIT_S)]
PAST_NS = 1_234_567_890_123_456_789
ROOT = os.geteuid() == 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=1, capacity="96MiB") as running:
        yield running


@pytest.fixture
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with tidy(cluster, timeout=60) as connected:
        yield connected


@pytest.fixture(scope="module")
def mounts(cluster: smb.LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    with two_mounts(cluster, tmp_path_factory) as directories:
        yield directories


@pytest.fixture
def files(mounts: list[Path], client: smb.Client) -> Path:
    """A directory of its own for each test: those of earlier tests stay in the mount."""
    directory = mounts[0] / f"t{time.monotonic_ns()}"
    directory.mkdir()
    return directory


def beside(mounts: list[Path], path: Path) -> Path:
    """The same path in the second mount."""
    return mounts[1] / path.relative_to(mounts[0])


def refused(number: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError, match="Errno") as caught:
        call()
    assert caught.value.errno == number, caught.value


# ---- symbolic links


def test_a_symbolic_link_leads_to_its_target(files: Path, mounts: list[Path]) -> None:
    """To a file, a directory, nothing, and through other links; the link itself is seen by lstat and by a listing."""
    (files / "d").mkdir()
    (files / "d/w").write_bytes(b"bytes")
    (files / "link").symlink_to("d/w")
    (files / "folder").symlink_to("d")
    (files / "chain").symlink_to("folder/../link")
    (files / "nowhere").symlink_to("nobody")
    for directory in (files, beside(mounts, files)):
        wait_for(lambda there=directory: len(names(there)) == 5, "links in the mount")
        assert (directory / "link").read_bytes() == b"bytes"
        assert (directory / "chain").read_bytes() == b"bytes"
        assert (directory / "folder/w").read_bytes() == b"bytes"
        assert names(directory / "folder") == ["w"]
        assert (directory / "link").readlink() == Path("d/w")
        assert (directory / "link").lstat().st_size == len("d/w")
        assert (directory / "link").stat().st_size == len(b"bytes")
        kinds = {
            entry.name: (entry.is_symlink(), entry.is_dir(follow_symlinks=False)) for entry in os.scandir(directory)
        }
        assert kinds == {
            "d": (False, True), "link": (True, False), "folder": (True, False), "chain": (True, False),
            "nowhere": (True, False),
        }  # fmt: skip
        refused(errno.ENOENT, (directory / "nowhere").read_bytes)


def test_a_symbolic_link_is_renamed_and_removed_as_itself(files: Path, client: smb.Client) -> None:
    (files / "w").write_bytes(b"bytes")
    (files / "link").symlink_to("w")
    (files / "link").rename(files / "other.npy")
    assert (files / "other.npy").readlink() == Path("w")
    (files / "new").write_bytes(b"new")
    (files / "new").rename(files / "other.npy")
    assert not (files / "other.npy").is_symlink()
    assert (files / "w").read_bytes() == b"bytes"
    (files / "link").symlink_to("w")
    (files / "link").unlink()
    assert names(files) == ["other.npy", "w"]
    refused(errno.EEXIST, lambda: (files / "w").symlink_to("x"))
    refused(errno.EEXIST, lambda: files.symlink_to("x"))
    refused(errno.ENOENT, lambda: (files / "no/link").symlink_to("x"))
    refused(errno.ENAMETOOLONG, lambda: (files / "long").symlink_to("x/" * 2048))
    (files / "loop").symlink_to("loop")
    refused(errno.ELOOP, (files / "loop").read_bytes)
    refused(errno.ELOOP, lambda: os.open(files / "loop", os.O_RDONLY | os.O_NOFOLLOW))
    assert {info.name.rpartition("/")[2] for info in client.list()} == {"other.npy", "w", "loop"}


def test_links_are_followed_without_a_kernel(files: Path, mounts: list[Path], cluster: smb.LocalCluster) -> None:
    """By smb.open_file and fsspec; not out of the cluster's files, and not by what removes a tree."""
    (files / "d").mkdir()
    (files / "d/w").write_bytes(b"bytes")
    for name, target in (("link", "d/w"), ("folder", "d"), ("out", "/etc/hostname"), ("loop", "loop"), ("up", "../up")):
        (files / name).symlink_to(target)
    base = str(files.relative_to(mounts[0]))
    with smb.connect(cluster.address) as client:
        for name in ("link", "folder/w"):
            with smb.open_file(f"{base}/{name}", client=client) as file:
                assert file.read() == b"bytes"
        with smb.open_file(f"{base}/link", "r+", client=client) as file:
            file.write(b"B")
        for name, number in (("out", errno.ENOENT), ("loop", errno.ELOOP), ("up", errno.ENOENT)):
            refused(number, lambda name=name: smb.open_file(f"{base}/{name}", client=client))
    there = fsspec.filesystem("softmem", coordinator=cluster.address, skip_instance_cache=True)
    wait_for(lambda: there.exists(f"{base}/link"), "link by fsspec")
    assert there.cat_file(f"{base}/folder/w") == there.cat_file(f"{base}/link") == b"Bytes"
    found = there.info(f"{base}/link")
    assert (found["type"], found["size"], found["islink"], found["destination"]) == ("file", 5, True, "d/w")
    assert there.info(f"{base}/folder")["type"] == there.info(f"{base}/out")["type"] == "other"
    there.rm(f"{base}/folder", recursive=True)
    assert there.cat_file(f"{base}/d/w") == b"Bytes"


def test_a_buffer_that_only_says_that_it_is_a_link_is_a_file(
    files: Path, mounts: list[Path], client: smb.Client
) -> None:
    """Another program may store anything: a large or a typed buffer has no target."""
    name = str(files.relative_to(mounts[0]))
    for at, (shape, dtype) in enumerate(((5000, "uint8"), (3, "float32"))):
        buffer = client.create(f"{name}/b{at}", shape, dtype)
        rename_file(client, (buffer.name, 0), buffer.name, attributes=Attributes(link=True).encode())
    for path in (files / "b0", files / "b1.npy"):
        assert stat.S_ISREG(shown(path).lstat().st_mode)
        refused(errno.EINVAL, path.readlink)
    assert not any(entry.is_symlink() for entry in os.scandir(files))


# ---- rights, owners, times


def test_rights_and_times_are_kept_by_the_cluster(files: Path, mounts: list[Path]) -> None:
    """Over renames, and over writing by another mount; those of a file that takes another's place are its own."""
    (files / "w").write_bytes(b"bytes")
    (files / "w").chmod(0o4750)
    os.utime(files / "w", ns=(PAST_NS + 1, PAST_NS))
    before = (files / "w").stat()
    assert (before.st_atime_ns, before.st_mtime_ns, stat.S_IMODE(before.st_mode)) == (PAST_NS + 1, PAST_NS, 0o4750)
    assert before.st_ctime_ns > PAST_NS
    (files / "w").rename(files / "v")
    there = beside(mounts, files / "v")
    wait_for(lambda: there.exists() and there.stat().st_mtime_ns == PAST_NS, "times in the other mount")
    assert stat.S_IMODE(there.stat().st_mode) == 0o4750
    there.write_bytes(b"other")  # of the same length: into the same buffer
    assert there.stat().st_mtime_ns > PAST_NS
    wait_for(lambda: (files / "v").stat().st_mtime_ns > PAST_NS, "new time of change")
    there.write_bytes(b"longer than before")
    wait_for(lambda: (files / "v").stat().st_size == 18, "new bytes")
    assert stat.S_IMODE((files / "v").stat().st_mode) == (0o750 if not ROOT else 0o4750)
    os.utime(files / "v", ns=(0, 0))
    assert (files / "v").stat().st_mtime_ns == 0
    (files / "x").write_bytes(b"x")
    (files / "x").rename(files / "v")
    assert stat.S_IMODE((files / "v").stat().st_mode) == 0o644


def test_a_write_in_place_makes_a_file_newer_for_all(files: Path, mounts: list[Path]) -> None:
    """Its time had been set, and other mounts would show that for good."""
    (files / "w").write_bytes(b"bytes")
    os.utime(files / "w", ns=(PAST_NS, PAST_NS))
    there = beside(mounts, files / "w")
    wait_for(lambda: there.exists() and there.stat().st_mtime_ns == PAST_NS, "times in the other mount")
    with (files / "w").open("r+b") as file:
        file.write(b"B")
    wait_for(lambda: there.stat().st_mtime_ns > PAST_NS, "new time of change")


@pytest.mark.parametrize(("mode", "data"), [("r+b", b"BYTES"), ("wb", b"other"), ("wb", b"longer than before")])
def test_a_write_keeps_what_another_mount_set_meanwhile(
    files: Path, mounts: list[Path], mode: str, data: bytes
) -> None:
    """Rights and attributes that were set after the file was opened: by a write in place, into the same buffer, and
    into a new one."""
    path, there = files / "w", beside(mounts, files / "w")
    path.write_bytes(b"bytes")
    path.chmod(0o644)
    os.setxattr(path, "user.gone", b"1")
    os.utime(path, ns=(PAST_NS, PAST_NS))
    wait_for(lambda: there.exists() and there.stat().st_mtime_ns == PAST_NS, "times in the other mount")
    with path.open(mode) as file:
        file.write(data)
        there.chmod(0o600)
        os.setxattr(there, "user.k", b"value")
        os.removexattr(there, "user.gone")
        if mode == "wb":
            os.setxattr(path, "user.own", b"value")
    for each in (path, there):
        wait_for(lambda each=each: each.stat().st_mtime_ns > PAST_NS, "new time of change")
        wait_for(lambda each=each: stat.S_IMODE(each.stat().st_mode) == 0o600, "the other mount's rights")
        own = {"user.own"} if mode == "wb" else set()
        wait_for(
            lambda each=each, own=own: {name for name in os.listxattr(each) if "smb" not in name} == {"user.k"} | own,
            "the other mount's attributes",
        )


def test_two_mounts_set_different_attributes_of_a_file(files: Path, mounts: list[Path]) -> None:
    """One after the other, at once: the second mount's listing does not have yet what the first one has set."""
    path, there = files / "w", beside(mounts, files / "w")
    path.write_bytes(b"bytes")
    wait_for(there.exists, "file in the other mount")
    for turn in range(5):
        path.chmod(0o600 + turn)
        os.setxattr(there, f"user.k{turn}", b"value")
        assert stat.S_IMODE(there.stat().st_mode) == 0o600 + turn
    os.utime(path, ns=(PAST_NS, PAST_NS))
    with path.open("r+b") as file:
        file.write(b"B")
        os.fchmod(file.fileno(), 0o640)
    assert path.stat().st_mtime_ns > PAST_NS


def test_attributes_of_an_open_file(files: Path) -> None:
    """By its descriptor, of a new one and of one that was removed; and those of bytes that become typed."""
    with (files / "new").open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        os.utime(file.fileno(), ns=(PAST_NS, PAST_NS))
        file.write(b"")
    found = (files / "new").stat()
    assert (found.st_mtime_ns, stat.S_IMODE(found.st_mode)) == (PAST_NS, 0o600)
    with (files / "new").open("r+b") as file:
        (files / "new").unlink()
        os.fchmod(file.fileno(), 0o640)
        os.utime(file.fileno(), ns=(PAST_NS, PAST_NS + 1))
        found = os.fstat(file.fileno())
        assert (found.st_mtime_ns, stat.S_IMODE(found.st_mode)) == (PAST_NS + 1, 0o640)
    assert names(files) == []
    save_file({"a": np.ones(3)}, files / "m.tmp")
    (files / "m.tmp").chmod(0o600)
    os.utime(files / "m.tmp", ns=(PAST_NS, PAST_NS))
    (files / "m.tmp").rename(files / "m.safetensors")  # made again, as named tensors
    found = (files / "m.safetensors").stat()
    assert (found.st_mtime_ns, stat.S_IMODE(found.st_mode)) == (PAST_NS, 0o600)


@pytest.mark.skipif(not ROOT, reason="only root may give files away")
def test_owners_that_root_sets(files: Path, mounts: list[Path]) -> None:
    (files / "w").write_bytes(b"bytes")
    os.chown(files / "w", 12345, -1)
    os.chown(files / "w", -1, 54321)
    os.chown(files, 12345, 54321)
    there = beside(mounts, files / "w")
    for path in (files / "w", files, shown(there)):
        wait_for(lambda path=path: (path.stat().st_uid, path.stat().st_gid) == (12345, 54321), f"owner of {path}")
    os.chown(files / "w", 0, 0)
    assert ((files / "w").stat().st_uid, (files / "w").stat().st_gid) == (0, 0)


def test_rights_asked_for_are_those_of_every_mount(
    files: Path, mounts: list[Path], cluster: smb.LocalCluster, tmp_path: Path
) -> None:
    """Also if a mount with another umask shows such rights for files without any."""
    process = start_mount(cluster, tmp_path / "files", "--umask", "077")
    try:
        own = tmp_path / "files" / files.name
        own.mkdir()
        for rights in (0o600, 0o644, 0o640):
            os.close(os.open(own / f"w{rights:o}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, rights))
            there = files / f"w{rights:o}"
            wait_for(there.exists, "file in the other mount")
            for each in (own / there.name, there):
                assert stat.S_IMODE(each.stat().st_mode) == rights
    finally:
        unmount(tmp_path / "files")
        end_mount(process, tmp_path / "files")


def test_an_older_coordinator_is_seen(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores attributes and answers that all is well: setting them is refused then, and writing goes on."""
    tree = NameTree(client)

    def put(data: bytes) -> None:
        file = tree.open("old/w", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        file.write(0, np.frombuffer(data, np.uint8))
        file.flush()
        file.close()

    tree.make_folder("old")
    put(b"bytes")
    rename = Coordinator.rename_buffer

    def ignoring(self: Coordinator, request: RenameBufferRequest, timeout: float) -> bool:
        request.ClearField("file_attributes")
        return rename(self, request, timeout)

    monkeypatch.setattr(Coordinator, "rename_buffer", ignoring)
    refused(errno.EOPNOTSUPP, lambda: tree.describe("old/w", lambda kept: replace(kept, mode=0o600)))
    refused(errno.EOPNOTSUPP, lambda: tree.make_link("old/link", "w"))
    put(b"other")
    put(b"longer than before")
    assert client.list()[0].file_attributes == b""
    assert [info.name for info in client.list()] == ["old/w"]
    monkeypatch.undo()
    tree.describe("old/w", lambda kept: replace(kept, mode=0o600))
    assert tree.status("old/w").attributes.mode == 0o600


def test_a_directory_that_is_gone_leaves_no_rights(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client removes it, and makes one of the same name; and this process keeps those of a number of them."""
    tree = NameTree(client)
    client.create("d/w", 1)
    assert tree.status("d").directory
    tree.describe("d", lambda kept: replace(kept, mode=0o700))
    assert tree.status("d").attributes.mode == 0o700
    client.delete("d/w")

    def is_gone() -> bool:
        try:
            return not tree.status("d").directory
        except FileNotFoundError:
            return True

    wait_for(is_gone, "end of the directory")
    client.create("d/w", 1)
    wait_for(lambda: not is_gone(), "new directory")
    assert tree.status("d").attributes.mode is None
    monkeypatch.setattr(folders, "_FOLDERS_KEPT", 2)
    for name in ("e", "f"):
        tree.make_folder(name, Attributes(0o700))
    tree.make_folder("g", Attributes(0o700))
    assert tree.status("e").attributes.mode is None
    assert tree.status("g").attributes.mode == 0o700


def test_a_directory_has_the_time_of_its_last_entry(files: Path) -> None:
    """Also its rights, its attributes and times that were set, within this mount, over a rename."""

    def changes(call: Callable[[], object]) -> None:
        os.utime(files, ns=(PAST_NS, PAST_NS))
        assert files.stat().st_mtime_ns == PAST_NS
        call()
        assert time.time_ns() - files.stat().st_mtime_ns < 60e9, call

    changes(lambda: (files / "w").write_bytes(b"1"))
    changes(lambda: (files / "w").rename(files / "v"))
    changes((files / "d").mkdir)
    changes(lambda: (files / "link").symlink_to("v"))
    changes((files / "v").unlink)
    changes((files / "d").rmdir)
    (files / "e").mkdir(0o700)
    os.utime(files / "e", ns=(PAST_NS, PAST_NS))
    os.setxattr(files / "e", "user.k", b"v")
    (files / "e").rename(files / "f")
    found = (files / "f").stat()
    assert (found.st_mtime_ns, stat.S_IMODE(found.st_mode)) == (PAST_NS, 0o700)
    assert os.getxattr(files / "f", "user.k") == b"v"
    (files / "f").rmdir()
    (files / "f").mkdir()
    assert os.listxattr(files / "f") == []


def test_a_file_has_the_same_status_by_its_name_and_open(files: Path) -> None:
    """tar compares the two, and says that a file was changed while it was read."""
    for name in ("new", "set", "written"):
        (files / name).write_bytes(b"bytes")
    (files / "set").chmod(0o600)
    os.utime(files / "set", ns=(PAST_NS, PAST_NS))
    with (files / "written").open("r+b") as file:
        file.write(b"B")
    for name in ("new", "set", "written"):
        with (files / name).open("rb") as file:
            by_name, opened = (files / name).stat(), os.fstat(file.fileno())
            assert by_name == opened
            assert (by_name.st_mtime_ns, by_name.st_ctime_ns) == (opened.st_mtime_ns, opened.st_ctime_ns)
    done = run("tar", "-C", files, "-cf", files.parent / f"{files.name}.tar", ".")
    assert (done.returncode, done.stderr) == (0, "")


# ---- extended attributes


def test_extended_attributes(files: Path, mounts: list[Path]) -> None:
    path = files / "w"
    path.write_bytes(b"bytes")
    of_buffers = set(os.listxattr(path))
    os.setxattr(path, "user.k", b"\0value")
    os.setxattr(path, "user.long", bytes(2000))
    os.removexattr(path, "user.long")
    os.setxattr(path, "user.empty", b"", os.XATTR_CREATE)
    refused(errno.EEXIST, lambda: os.setxattr(path, "user.k", b"", os.XATTR_CREATE))
    refused(errno.ENODATA, lambda: os.setxattr(path, "user.none", b"", os.XATTR_REPLACE))
    refused(errno.ENODATA, lambda: os.getxattr(path, "user.none"))
    refused(errno.ENODATA, lambda: os.removexattr(path, "user.none"))
    refused(errno.ENOSPC, lambda: os.setxattr(path, "user.large", bytes(4096)))
    for name in ("user.smb.dtype", "trusted.k"):
        refused(errno.EOPNOTSUPP, lambda name=name: os.setxattr(path, name, b"int8"))
    path.write_bytes(b"longer than before")
    path.rename(files / "v")
    there = beside(mounts, files / "v")
    wait_for(there.exists, "file in the other mount")
    for each in (files / "v", there):
        wait_for(lambda each=each: set(os.listxattr(each)) == {"user.k", "user.empty"} | of_buffers, "attributes")
        assert os.getxattr(each, "user.k") == b"\0value"
        assert os.getxattr(each, "user.empty") == b""
    os.removexattr(files / "v", "user.k")
    assert set(os.listxattr(files / "v")) == {"user.empty"} | of_buffers


def test_a_new_file_refuses_what_would_not_be_stored(files: Path, client: smb.Client) -> None:
    """When it is set: closing the file could only lose its bytes then. What is taken leaves room for times."""
    with (files / "new").open("xb") as file:
        file.write(b"bytes")
        refused(errno.ENOSPC, lambda: os.setxattr(file.fileno(), "user.large", bytes(5000)))
        most = 2700

        def fill() -> None:
            nonlocal most
            while True:
                os.setxattr(file.fileno(), "user.k", bytes(most + 1))
                most += 1

        refused(errno.ENOSPC, fill)
    assert (files / "new").read_bytes() == b"bytes"
    with (files / "new").open("r+b") as file:
        file.write(b"BYTES")
    (files / "new").write_bytes(b"other")  # into the same buffer, whose time is stored then
    (files / "new").write_bytes(b"longer than before")
    os.utime(files / "new", ns=(-(1 << 62), PAST_NS))
    (files / "new").chmod(0o4600)
    assert len(os.getxattr(files / "new", "user.k")) == most
    assert [info.name for info in client.list() if ".smb-files" in info.name] == []


# ---- kinds of files, holes, room


def test_what_no_buffer_can_be_is_refused(files: Path) -> None:
    """And the reason is in docs/files.md."""
    (files / "w").write_bytes(b"bytes")
    refused(errno.EPERM, lambda: os.link(files / "w", files / "second"))
    refused(errno.EPERM, lambda: os.mkfifo(files / "pipe"))
    refused(errno.EOPNOTSUPP, lambda: os.open(files, os.O_TMPFILE | os.O_RDWR))
    assert names(files) == ["w"]
    if ROOT:
        os.mknod(files / "plain", 0o600 | stat.S_IFREG)
        assert (files / "plain").stat().st_size == 0
        refused(errno.EEXIST, lambda: os.mknod(files / "plain", 0o600 | stat.S_IFREG))


def test_a_hole_reads_as_zeros_and_takes_memory(files: Path) -> None:
    with (files / "w").open("w+b", buffering=0) as file:
        os.ftruncate(file.fileno(), 100_000)
        os.pwrite(file.fileno(), b"end", 299_997)
        assert os.fstat(file.fileno()).st_size == 300_000
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 300_000
    wanted = bytes(299_997) + b"end"
    assert (files / "w").read_bytes() == wanted
    assert (files / "w").stat().st_blocks * 512 >= 300_000
    (files / "w").write_bytes(b"x" * 10_000)
    assert run("fallocate", "--punch-hole", "--offset", 100, "--length", 5000, files / "w").returncode == 0
    assert (files / "w").read_bytes() == b"x" * 100 + bytes(5000) + b"x" * 4900
    assert run("fallocate", "--zero-range", "--offset", 9000, "--length", 2000, files / "w").returncode == 0
    assert (files / "w").read_bytes() == b"x" * 100 + bytes(5000) + b"x" * 3900 + bytes(2000)
    assert run("fallocate", "--keep-size", "--length", 50_000, files / "w").returncode == 0
    assert (files / "w").stat().st_size == 11_000
    refused_by = run("fallocate", "--collapse-range", "--offset", 0, "--length", 4096, files / "w")
    assert "not supported" in refused_by.stderr


def test_statvfs_counts_what_is_taken(files: Path) -> None:
    """At once after a change that was made here."""
    wait_for(lambda: os.statvfs(files).f_files == os.statvfs(files).f_ffree, "end of the last test's files")
    before = os.statvfs(files)
    (files / "w").write_bytes(bytes(4 << 20))
    after = os.statvfs(files)
    taken = (before.f_bavail - after.f_bavail) * after.f_frsize
    assert 4 << 20 <= taken <= 5 << 20
    assert after.f_blocks == before.f_blocks == (96 << 20) // after.f_frsize
    assert after.f_files - after.f_ffree == 1
    assert after.f_namemax == 255
    (files / "w").unlink()
    wait_for(lambda: os.statvfs(files).f_bavail == before.f_bavail, "memory of the removed file")
    (files / "small").write_bytes(b"x")
    small = (before.f_bavail - os.statvfs(files).f_bavail) * before.f_frsize
    assert before.f_ffree == before.f_favail == before.f_bavail * before.f_frsize // small  # so many more fit
    (files / "small").unlink()


def test_a_rename_over_an_open_file(files: Path) -> None:
    """Its readers go on with the old bytes, and its writers write them; the new file is whole."""
    (files / "old").write_bytes(b"old")
    (files / "new").write_bytes(b"new")
    with (files / "old").open("r+b", buffering=0) as file:
        (files / "new").rename(files / "old")
        assert file.read() == b"old"
        file.write(b"er")
        assert os.fstat(file.fileno()).st_size == 5
    assert (files / "old").read_bytes() == b"new"
    assert names(files) == ["old"]
