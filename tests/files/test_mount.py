"""smb mount: real tools on a real mount. Not run where this machine has no FUSE, and said so."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import smb
from smb.files.temporary_names import private_name
from tests.fault.long import LIMIT_S, seed, times
from tests.support.commands import run_smb
from tests.support.daemons import tidy, wait_for
from tests.support.mounts import end_mount, is_mounted, names, needs_fuse, run, shown, start_mount, unmount

pytestmark = [needs_fuse, pytest.mark.timeout(LIMIT_S)]
SOURCES = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=2, capacity="96MiB") as running:
        yield running


@pytest.fixture
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with tidy(cluster, timeout=60) as connected:
        yield connected


@pytest.fixture(scope="module")
def mounted(cluster: smb.LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("mount") / "files"
    process = start_mount(cluster, directory)
    yield directory
    unmount(directory)
    end_mount(process, directory)


@pytest.fixture
def files(mounted: Path, client: smb.Client) -> Path:
    """The mount, with nothing in it."""
    wait_for(lambda: names(mounted) == [], "end of the last test's files")
    return mounted


def test_new_files_have_as_many_copies_as_the_mount_says(
    cluster: smb.LocalCluster, files: Path, client: smb.Client, tmp_path: Path
) -> None:
    """And what is written or renamed in the place of a file keeps the copies that the file had, in any mount."""

    def copies() -> dict[str, int]:
        return {info.name: info.replicas for info in client.list()}

    (files / "one").write_bytes(b"1")
    twice = tmp_path / "twice"
    process = start_mount(cluster, twice, "--replicas", "2")
    try:
        np.save(twice / "w.npy", np.arange(1000))
        (twice / "two.tmp").write_bytes(b"2")
        (twice / "two.tmp").rename(twice / "two")
        save_file({"a": np.ones(3)}, twice / "m.tmp")
        (twice / "m.tmp").rename(twice / "m.safetensors")
        assert copies() == {"one": 1, "w": 2, "two": 2, "m": 2}
        shown(files / "two").write_bytes(b"longer")
        shown(twice / "one").write_bytes(b"longest")
        np.save(files / "w.npy", np.arange(2000))
        (files / "one").write_bytes(b"longer")
        assert copies() == {"one": 1, "w": 2, "two": 2, "m": 2}
    finally:
        unmount(twice)
        end_mount(process, twice)


def test_buffers_are_files(files: Path, client: smb.Client) -> None:
    """What a client makes is there for ls, cat, stat, numpy and getfattr; what is written there the client reads."""
    values = np.arange(30_000, dtype=np.float32).reshape(300, 100)
    buffer = client.create("run/w", values.shape, "float32", stripe=4096)
    buffer.write(values)
    assert run("ls", shown(files / "run")).stdout.split() == ["w.npy"]
    assert "120000" in run("ls", "-l", files / "run/w").stdout
    assert (files / "run/w").read_bytes() == values.tobytes()
    mapped = np.load(files / "run/w.npy", mmap_mode="r")
    assert isinstance(mapped, np.memmap)
    assert np.array_equal(mapped, values)
    attributes = {name: os.getxattr(files / "run/w", name).decode() for name in os.listxattr(files / "run/w")}
    assert attributes["user.smb.dtype"] == "float32"
    assert attributes["user.smb.shape"] == "300,100"
    assert "stripe=4096" in attributes["user.smb.layout"]
    with (files / "run/w").open("r+b") as file:
        file.seek(4 * 250)
        file.write(np.full(3, -1, np.float32).tobytes())
    values.reshape(-1)[250:253] = -1
    assert np.array_equal(buffer.read(), values)
    space = os.statvfs(files)
    assert space.f_blocks * space.f_frsize == 2 * 96 << 20
    assert 0 < space.f_bavail < space.f_blocks


def test_tools_write_and_read_what_the_api_does(files: Path, client: smb.Client, tmp_path: Path) -> None:
    """dd, cp, rsync --inplace, mv, sha256sum, truncate, numpy, torch and safetensors: the same bytes on both sides."""
    data = np.random.default_rng(seed()).bytes(3_000_001)
    (tmp_path / "plain").write_bytes(data)

    def check(name: str) -> None:
        assert (files / name).read_bytes() == data, name
        assert client.open(name).read().tobytes() == data, name

    assert run("cp", tmp_path / "plain", files / "a").returncode == 0
    check("a")
    assert run("dd", f"if={tmp_path / 'plain'}", f"of={files / 'b'}", "bs=70000").returncode == 0
    check("b")
    sums = run("sha256sum", tmp_path / "plain", files / "a").stdout.split()
    assert sums[0] == sums[2]
    data = data[:1_000_000] + b"changed" + data[1_000_007:]
    (tmp_path / "plain").write_bytes(data)
    if shutil.which("rsync"):
        done = run("rsync", "--inplace", "--no-whole-file", "-aI", tmp_path / "plain", files / "a")
        assert done.returncode == 0, done.stderr
        check("a")
    assert run("dd", f"if={tmp_path / 'plain'}", f"of={files / 'b'}", "bs=1M", "conv=notrunc").returncode == 0
    check("b")
    assert run("mv", files / "b", files / "a").returncode == 0
    check("a")
    assert run("truncate", "-s", "1234", files / "a").returncode == 0
    data = data[:1234]
    check("a")
    (files / "dir").mkdir()
    assert run("cp", "-r", SOURCES / "docs", files / "dir").returncode == 0
    assert run("diff", "-r", SOURCES / "docs", files / "dir/docs").returncode == 0
    assert run("mv", files / "dir", files / "moved").returncode == 0
    assert run("rm", "-r", files / "moved").returncode == 0
    assert names(files) == ["a"]

    values = np.arange(2000.0).reshape(20, 100)
    np.save(files / "w.npy", values)
    assert np.array_equal(client.open("w").read(), values)
    written = np.lib.format.open_memmap(files / "m.npy", "w+", "float32", (1000,))
    written[:] = 3
    written.flush()
    del written
    assert (client.open("m").read() == 3).all()
    torch.save({"x": torch.arange(1000)}, files / "t.pt")
    assert torch.equal(torch.load(files / "t.pt")["x"], torch.arange(1000))
    assert torch.equal(torch.load(files / "t.pt", mmap=True)["x"], torch.arange(1000))
    save_file({"a": values, "b": np.ones(7, np.float16)}, tmp_path / "s.safetensors", metadata={"format": "pt"})
    assert run("cp", tmp_path / "s.safetensors", files / "s.safetensors").returncode == 0
    assert (files / "s.safetensors").read_bytes() == (tmp_path / "s.safetensors").read_bytes()
    assert np.array_equal(client.open("s").tensor("a").read(), values)
    assert np.array_equal(load_file(files / "s.safetensors")["a"], values)


def test_versions_are_stable(files: Path, client: smb.Client) -> None:
    """A file that was opened stays the version that it was, mapped or not, while others are published."""
    buffer = client.create("v", 50_000, "float32", versions=2)
    buffer.publish(np.full(50_000, 1, np.float32))
    mapped = np.load(shown(files / "v@1.npy"), mmap_mode="r")
    with (files / "v").open("rb", buffering=0) as first:
        assert first.read(4) == np.float32(1).tobytes()
        for value in (2, 3, 4):
            buffer.publish(np.full(50_000, value, np.float32))
        with (files / "v").open("rb", buffering=0) as last:
            assert set(np.frombuffer(last.read(), np.float32)) == {4}
        assert set(np.frombuffer(first.read(), np.float32)) == {1}
    assert (mapped == 1).all()
    assert names(files) == ["v.npy"]
    (files / "v").write_bytes(np.full(50_000, 7, np.float32).tobytes())
    assert (buffer.version, buffer.read()[0]) == (5, 7)


def test_refusals_have_their_errno(files: Path, client: smb.Client, tmp_path: Path) -> None:
    """What can't be is refused as on any file system, and leaves what was there."""
    client.create("d/w", 10)
    shown(files / "d/w")

    def refused(number: int, call: Callable[[], object]) -> None:
        with pytest.raises(OSError, match="Errno") as caught:
            call()
        assert caught.value.errno == number, caught.value

    refused(errno.ENOENT, (files / "nobody").read_bytes)
    refused(errno.ENOENT, lambda: (files / "no/w").write_bytes(b"x"))
    refused(errno.EISDIR, lambda: (files / "d").write_bytes(b"x"))
    refused(errno.ENOTDIR, (files / "d/w/x").read_bytes)
    refused(errno.EEXIST, lambda: os.close(os.open(files / "d/w", os.O_CREAT | os.O_EXCL)))
    refused(errno.ENAMETOOLONG, lambda: (files / ("x" * 256)).write_bytes(b"x"))
    refused(errno.EPERM, (files / ".smb-files").mkdir)
    refused(errno.ENOTEMPTY, (files / "d").rmdir)
    refused(errno.EXDEV, lambda: (files / "d/w.npy").rename(files / "d/x"))
    refused(errno.ENODATA, lambda: os.getxattr(files / "d/w", "user.other"))
    refused(errno.EPERM, lambda: os.link(files / "d/w", files / "d/x"))
    refused(errno.EPERM, lambda: os.mkfifo(files / "d/x"))
    refused(errno.EOPNOTSUPP, lambda: os.setxattr(files / "d/w", "user.smb.dtype", b"int8"))
    refused(errno.EOPNOTSUPP, lambda: os.setxattr(files / "d/w", "trusted.x", b"1"))
    (files / "old").write_bytes(b"as it was")
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(300 << 20)
    full = run("cp", huge, files / "old")
    assert full.returncode == 1
    assert "No space left on device" in full.stderr
    # The kernel believes in the truncation for as long as it keeps attributes.
    wait_for(lambda: (files / "old").stat().st_size == 9, "old size")
    assert (files / "old").read_bytes() == b"as it was"
    with (files / "d/w").open("rb", buffering=0) as file:
        client.delete("d/w")
        refused(errno.ESTALE, lambda: file.read(1))


def test_removed_and_replaced_files_are_read_on(files: Path, client: smb.Client) -> None:
    """Whoever has a file open keeps it, as long as it is open, and nothing of it is left then."""
    (files / "w").write_bytes(b"first")
    (files / "next").write_bytes(b"second")
    with (files / "w").open("rb", buffering=0) as first:
        (files / "next").rename(files / "w")
        assert (files / "w").read_bytes() == b"second"
        assert os.fstat(first.fileno()).st_size == 5
        assert first.read() == b"first"
        assert [info.name for info in client.list() if "/" not in info.name] == ["w"]
    with (files / "w").open("rb", buffering=0) as second:
        (files / "w").unlink()
        assert not (files / "w").exists()
        assert second.read() == b"second"
    wait_for(lambda: client.list() == [], "end of what was removed")


LARGE_BYTES = 12 << 20  # more than the kernel reads ahead: what was not read comes from the servers
_READ_FIRST = pytest.mark.parametrize("read_first", [0, 10], ids=["before", "middle"])


@_READ_FIRST
@pytest.mark.parametrize("removed", [False, True], ids=["replaced", "removed"])
def test_a_file_that_goes_away_in_this_mount_is_read_to_its_end(files: Path, read_first: int, removed: bool) -> None:
    """As on a local file system, before its first read and in the middle of reading it."""
    (files / "w").write_bytes(b"1" * LARGE_BYTES)
    (files / "next").write_bytes(b"2" * 1000)
    with (files / "w").open("rb", buffering=0) as file:
        assert file.read(read_first) == b"1" * read_first
        (files / "w").unlink() if removed else (files / "next").rename(files / "w")
        assert (files / "w").exists() is not removed
        rest = file.readall()
        assert (len(rest), set(rest)) == (LARGE_BYTES - read_first, set(b"1"))
        assert removed or (files / "w").read_bytes() == b"2" * 1000


@_READ_FIRST
@pytest.mark.parametrize("how", ["renamed over", "made anew", "deleted"])
def test_a_file_that_another_client_replaces_is_stale(
    files: Path, client: smb.Client, read_first: int, how: str
) -> None:
    """ESTALE for what was not read, before its first read and in the middle; nothing of the new file is in the old
    one. Who opens the path again has the new one.
    """
    (files / "w").write_bytes(b"1" * LARGE_BYTES)
    with (files / "w").open("rb", buffering=0) as file:
        assert file.read(read_first) == b"1" * read_first
        if how != "renamed over":
            client.delete("w")
        if how != "deleted":
            client.create("next", LARGE_BYTES, "uint8").fill(2)
            client.rename("next", "w", replace=True)
        with pytest.raises(OSError, match="Stale") as caught:
            os.pread(file.fileno(), 10, LARGE_BYTES - 10)
        assert caught.value.errno == errno.ESTALE
        if read_first:
            with contextlib.suppress(OSError):  # what the kernel had read ahead is there still
                while piece := file.read(1 << 20):
                    assert set(piece) == set(b"1")
            assert file.tell() < LARGE_BYTES
    if how != "deleted":
        with (files / "w").open("rb", buffering=0) as file:
            assert set(file.readall()) == {2}


def test_a_file_that_a_mount_replaces_is_opened_again_elsewhere(files: Path, client: smb.Client) -> None:
    """Cut to nothing, or renamed over, between the open and the first read of smb.open_file: it reads the new one."""
    (files / "w").write_bytes(b"first")
    writer = os.open(files / "w", os.O_RDWR)
    os.ftruncate(writer, 0)
    first = client.open("w")

    def is_gone() -> bool:  # its name is another's a moment before
        with contextlib.suppress(smb.NotFoundError):
            first.read()
            return False
        return True

    with smb.open_file("w", client=client) as file:
        os.close(writer)
        wait_for(is_gone, "end of the first file")
        assert file.read() == b""
    (files / "w").write_bytes(b"second")
    (files / "next").write_bytes(b"third")
    with smb.open_file("w", client=client) as file:
        (files / "next").rename(files / "w")
        assert file.read() == b"third"


def test_a_rename_is_one_step_for_readers(files: Path, client: smb.Client) -> None:
    """A checkpoint that is renamed over another one, which somebody has open: a reader of the path through another
    client finds the one or the other, never nothing."""
    (files / "ckpt").write_bytes(bytes(1000))
    stop: list[bool] = []
    process = subprocess.Popen(
        [sys.executable, "-c", _READER, client.address], stdout=subprocess.PIPE, stdin=subprocess.PIPE,
        text=True, cwd=SOURCES,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in range(times(30, 300)):
        with (files / "ckpt").open("rb"):
            (files / "ckpt.new").write_bytes(bytes([number % 256]) * 1000)
            (files / "ckpt.new").rename(files / "ckpt")
    told, _ = process.communicate("stop\n", timeout=30)
    assert process.returncode == 0, told
    assert int(told.split()[0]) > 10
    assert not stop


_READER = """
import sys, threading, smb
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
with smb.connect(sys.argv[1]) as client:
    opened = client.open("ckpt")
    print("ready", flush=True)
    count = 0
    while not stop.is_set():
        assert client.open("ckpt").nbytes == 1000
        count += 1
    print(count)
"""


@pytest.mark.parametrize("kind", ["bytes", "float32", "safetensors"])
def test_random_operations_of_two_processes(files: Path, client: smb.Client, tmp_path: Path, kind: str) -> None:
    """As on a plain file, operation by operation: reads, writes, mappings, truncation, appending, replacing; on typed
    buffers those that leave the size."""
    first = seed()
    name, fixed = kind, kind != "bytes"
    if kind == "float32":
        client.create(name, 30_001, "float32", stripe=4096)
    elif kind == "safetensors":
        client.create("t", tensors={"a": ((3, 5), "float32"), "b": ((7001,), "uint8"), "c": ((2000,), "float64")})
        name = "t"
    else:
        (files / name).write_bytes(b"")
    (tmp_path / "model").write_bytes(shown(files / name).read_bytes())
    command = [sys.executable, "-m", "tests.support.fsx", str(files / name), str(tmp_path / "model")]
    count = times(150 if fixed else 300, 10_000 if fixed else 30_000)
    testers = [
        subprocess.Popen(
            [*command, str(count), str(first + index), *(["fixed"] if fixed else [])], cwd=SOURCES, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for index in range(2)
    ]  # fmt: skip
    for tester in testers:
        told, _ = tester.communicate()
        assert tester.returncode == 0, told
        print(told)
    # A file that was cut to nothing becomes an empty one of the cluster's once nobody has it open, and the kernel says
    # that a moment after the process is gone: open_file may meet it between its open and its read.
    model = (tmp_path / "model").read_bytes()

    def is_as_the_model() -> bool:
        with contextlib.suppress(FileNotFoundError), smb.open_file(name, client=client) as file:
            return file.read() == model
        return False

    wait_for(is_as_the_model, f"{len(model)} bytes as the model's")


_REPLACES = """
import pathlib, sys
path = pathlib.Path(sys.argv[1])
for round in range(int(sys.argv[2])):
    new = path.with_name("new")
    new.write_bytes(b"%06d" % round)
    held = path.open("rb")  # libfuse takes the name of an open file away before another gets it
    new.rename(path)
"""


def test_a_path_that_is_replaced_by_rename_is_always_there(files: Path, client: smb.Client) -> None:
    """Whoever opens it or looks at it, here or through another client, finds the old file or the new one."""
    (files / "w").write_bytes(b"before")
    rounds = times(50, 3000)
    with subprocess.Popen([sys.executable, "-c", _REPLACES, str(files / "w"), str(rounds)]) as replacing:
        opened = 0
        while replacing.poll() is None:
            assert len((files / "w").read_bytes()) == 6
            assert (files / "w").stat().st_size == 6
            assert "w" in [info.name for info in client.list()]
            opened += 1
    assert replacing.returncode == 0
    assert opened > rounds // 10, "it was over too soon: nothing was tested"
    assert (files / "w").read_bytes() == b"%06d" % (rounds - 1)


def test_what_another_client_has_just_deleted_is_made_anew(files: Path, client: smb.Client) -> None:
    """The kernel remembers for a moment that it was there."""
    for turn in range(5):
        (files / "w").write_bytes(b"%d" % turn)
        client.delete("w")
    wait_for(lambda: not (files / "w").exists(), "end of what the kernel remembers")
    (files / "w").write_bytes(b"again")
    client.delete("w")
    with pytest.raises(FileNotFoundError):
        (files / "w").open("rb")


def test_what_another_client_puts_at_a_removed_path_stays(files: Path, client: smb.Client) -> None:
    """The name of a removed file that is open is taken away in the cluster a moment later: not if it is another's."""
    (files / "w").write_bytes(b"old")
    client.create("other", 3, "uint8").write(np.frombuffer(b"new", np.uint8))
    with (files / "w").open("rb"):
        (files / "w").unlink()
        client.rename("other", "w", replace=True)
        wait_for(lambda: "w" in names(files), "the other one's file")
        assert (files / "w").read_bytes() == b"new"
    assert client.open("w").read().tobytes() == b"new"


def test_a_server_killed_under_a_cp_harms_nothing(
    cluster: smb.LocalCluster, client: smb.Client, tmp_path: Path
) -> None:
    """Over TCP, in the middle of copying to and from the mount: it takes longer, and the bytes are right."""
    files = tmp_path / "files"
    process = start_mount(cluster, files, SMB_TRANSPORT="tcp")
    data = np.random.default_rng(seed()).bytes(24 << 20)
    client.create("w", len(data), "uint8").fill(0)
    (tmp_path / "plain").write_bytes(data)
    for source, target in ((tmp_path / "plain", files / "w"), (files / "w", tmp_path / "back")):
        command = ["dd", f"if={source}", f"of={target}", "bs=16k", "conv=notrunc"]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as copy:
            killed = 0
            for server in cluster.servers:
                server.kill()
                killed += copy.poll() is None
                server.start()
            _, told = copy.communicate(timeout=60)
        assert copy.returncode == 0, told
        assert killed, "it was over before a server was killed: nothing was tested"
    cluster.servers[0].kill()  # a new file becomes a buffer when cp closes it: that waits for the server
    with subprocess.Popen(["cp", tmp_path / "plain", files / "new"]) as new:
        cluster.servers[0].start()
        assert new.wait(60) == 0
    process.send_signal(signal.SIGTERM)
    end_mount(process, files)
    assert not is_mounted(files)
    assert client.open("new").read().tobytes() == data
    assert (tmp_path / "back").read_bytes() == data
    assert client.open("w").read().tobytes() == data


# More than 5 s: mounts and unmounts by programs of their own, as users do.
def test_the_command_in_the_background(cluster: smb.LocalCluster, client: smb.Client, tmp_path: Path) -> None:
    """It returns when the files are there; a mount that was killed is taken away by the next; umount ends one; what
    can't be mounted is an error that says why."""
    files = tmp_path / "files"
    files.mkdir()
    where = {"SMB_COORDINATOR": cluster.address}
    client.create("w", 10)
    client.create(_dead_owner("v"), 10)
    client.create(_dead_owner("team/v"), 10)
    assert f"mounted at {files}" in run_smb("mount", files, variables=where).stdout
    assert names(files) == ["w.npy"]
    assert [info.name for info in client.list()] == ["w"], "what a dead process of this host left half done"
    again = run_smb("mount", files, variables=where)
    assert (again.returncode, "already mounted" in again.stderr) == (1, True)
    (pid,) = _servers_of(files)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: _stale(files), "stale mount")
    assert run_smb("mount", files, variables=where).returncode == 0
    assert names(files) == ["w.npy"]
    assert run_smb("umount", files).returncode == 0
    assert not is_mounted(files)
    assert names(files) == []
    (spaced := tmp_path / "with a space").mkdir()
    assert run_smb("mount", spaced, variables=where).returncode == 0
    assert "already mounted" in run_smb("mount", spaced, variables=where).stderr
    assert run_smb("umount", spaced).returncode == 0
    assert f"no cluster is mounted at {spaced}" in run_smb("umount", spaced).stderr
    for arguments, variables, said in (
        (("mount", tmp_path / "nobody"), where, "does not exist; create it first"),
        (("mount", files), {"SMB_COORDINATOR": "127.0.0.1:1"}, "no coordinator"),
    ):
        done = run_smb(*arguments, variables=variables)
        assert done.returncode != 0
        assert said in done.stderr, done.stderr


def _dead_owner(name: str) -> str:
    process = subprocess.Popen(["true"])
    process.wait()
    return private_name(name).replace(f"-{os.getpid()}-", f"-{process.pid}-")


def _stale(directory: Path) -> bool:
    try:
        directory.stat()
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


def _servers_of(directory: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"mount" in words and str(directory).encode() in words and b"--foreground" in words:
            found.append(int(path.parent.name))
    return found


def test_attributes_that_a_mount_keeps(files: Path, client: smb.Client) -> None:
    """Times and rights that tools set are shown until the mount ends; writing makes a file newer."""
    client.create("w", 10)
    os.utime(shown(files / "w"), ns=(0, 1_234_567_890_000_000_000))
    (files / "w").chmod(0o600)
    found = (files / "w").stat()
    assert (found.st_mtime_ns, found.st_mode & 0o777) == (1_234_567_890_000_000_000, 0o600)
    before = time.time()
    with (files / "w").open("r+b") as file:
        file.write(b"x")
    wait_for(lambda: (files / "w").stat().st_mtime >= before - 1, "new time of change")
