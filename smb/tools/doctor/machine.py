"""Checks of this machine: memory directory, limits, huge pages, network buffers, MTU, RDMA. Changes nothing."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from smb.config.parse import format_bytes, parse_bytes
from smb.config.settings import SETTINGS, private_memory, text_of
from smb.config.untrusted import others_write
from smb.daemon.host_memory import HEADROOM_BYTES, MEMORY_FILE_SYSTEMS, MemoryLimit, file_system_of
from smb.daemon.private_directory import directory_fault, is_private_name
from smb.tools.doctor.findings import Finding, advice, fine, problem
from smb.transport.verbs import devices

_FILES_WANTED = 4096  # connections of a daemon (server.h), each a descriptor
_BUFFER_WANTED = 4 << 20  # for a TCP connection: 32 Gb/s over 1 ms; the kernel's default for reading is 6 MiB
_FAST_MBPS = 10_000  # from this speed on, packets of 1500 bytes cost a core noticeably
_JUMBO = 9000
_COLLAPSE_SINCE = (6, 1)  # first Linux with madvise(MADV_COLLAPSE), see csrc/memory/pages.c


def look_at_machine(memory_dir: Path, capacity: str | None, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield the findings.

    `capacity` is what a memory server on this machine will offer, None if unknown; `root` is the folder with proc and
    sys, for tests.
    """
    yield _memory_dir(memory_dir, capacity)
    yield _memory_limit(memory_dir, capacity, root)
    yield _huge_pages(memory_dir, root)
    yield _open_files()
    yield from _socket_buffers(root)
    yield from _interfaces(root)
    yield from _rdma(root, capacity)


def _memory_dir(directory: Path, capacity: str | None) -> Finding:
    check = "memory directory"
    # A server makes a directory with its user's name.
    missing = is_private_name(directory) and not os.path.lexists(directory)
    there = directory.parent if missing else directory
    if not there.is_dir():
        mount = "mount -t tmpfs -o size=64G,mode=700,uid=USER tmpfs DIR"
        return problem(check, f"{there} is not a directory", f"make it for the daemon's user, on tmpfs: {mount}")
    if not os.access(there, os.W_OK):
        return problem(
            check, f"{there} cannot be written to", "chown it to the daemon's user, or pass another directory"
        )
    if (fault := _fault(directory)) and not missing:
        private = private_memory(str(directory).rstrip("/"))
        change = "remove it" if is_private_name(directory) else f"pass {private}, which a server makes"
        return problem(check, f"{directory} {fault}: a memory server does not use it", change)
    kind = file_system_of(there)
    space = os.statvfs(there)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    name = f"{directory}{' (a server makes it)' if missing else ''}"
    found = f"{name}: {kind}, {format_bytes(size)}, {format_bytes(free)} free"
    figures = {"size_bytes": float(size), "free_bytes": float(free)}
    if kind not in MEMORY_FILE_SYSTEMS:
        return problem(check, found, "segments belong into memory: pass a directory on tmpfs or hugetlbfs", **figures)
    wanted = parse_bytes(capacity or SETTINGS["memserver.capacity"].default)
    if size and wanted > size:
        larger = f"mount -o remount,size={wanted >> 20}M {_mount_point(there)} (docker: --shm-size)"
        if capacity is None:  # perhaps no memory server will run on this machine
            change = f"a memory server's default --capacity is {format_bytes(wanted)}: offer less, or {larger}"
            return advice(check, found, change, **figures)
        return problem(check, found, f"--capacity is {format_bytes(wanted)}: offer less, or {larger}", **figures)
    if size and wanted > free and capacity is not None:
        change = f"--capacity is {format_bytes(wanted)}: unless the rest is that server's own, others take its room"
        return advice(check, found, change, **figures)
    return fine(check, found, **figures)


def _fault(directory: Path) -> str:
    """Return why a memory server would refuse the directory. This command may run as another user than the server."""
    try:
        status = directory.stat()
    except OSError:
        return ""
    return directory_fault(status) if is_private_name(directory) or others_write(status) else ""


def _memory_limit(directory: Path, capacity: str | None, root: Path) -> Finding:
    """Check the limit of this shell's control group. A service or container has its own, and must be checked inside
    it.
    """
    check = "memory limit"
    limit = MemoryLimit(root)
    if limit.nbytes is None:
        return fine(check, "none: the processes of this control group may take all of the machine's memory")
    room = limit.room_bytes() or 0
    found = f"{format_bytes(limit.nbytes)}, {format_bytes(room)} of it left"
    figures = {"limit_bytes": float(limit.nbytes), "room_bytes": float(room)}
    if directory.is_dir() and file_system_of(directory) == "hugetlbfs":
        return fine(check, f"{found}; pages of {directory} do not count", **figures)
    wanted = parse_bytes(capacity or SETTINGS["memserver.capacity"].default)
    if wanted + HEADROOM_BYTES > limit.nbytes:
        least = format_bytes(limit.nbytes - HEADROOM_BYTES)
        change = f"raise it (MemoryMax= in a systemd unit, a container's limit), or offer less than {least}"
        if capacity is None:  # perhaps no memory server will run on this machine
            change = f"a memory server's default --capacity is {format_bytes(wanted)}: {change}"
            return advice(check, found, change, **figures)
        return problem(check, f"{found}; --capacity is {format_bytes(wanted)}", change, **figures)
    return fine(check, found, **figures)


def _mount_point(directory: Path) -> Path:
    there = directory.resolve()
    while not there.is_mount():
        there = there.parent
    return there


def _huge_pages(directory: Path, root: Path) -> Finding:
    check = "huge pages"
    reserved = re.search(r"^HugePages_Free:\s*(\d+)", _text(root / "proc/meminfo"), re.M)
    if directory.is_dir() and file_system_of(directory) == "hugetlbfs":
        pages = int(reserved[1]) if reserved else 0
        if pages == 0:
            return problem(check, f"{directory} is hugetlbfs, no page is free", "sysctl vm.nr_hugepages=N")
        return fine(check, f"{directory} is hugetlbfs, {pages} pages free")
    path = root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    chosen = re.search(r"\[(\w+)\]", _text(path))
    if chosen is None:
        return fine(check, "this kernel has none for tmpfs")
    if chosen[1] in ("always", "within_size", "force"):
        return fine(check, f"tmpfs uses them ({chosen[1]})")
    release = re.match(r"(\d+)\.(\d+)", _text(root / "proc/sys/kernel/osrelease"))
    if release and (int(release[1]), int(release[2])) >= _COLLAPSE_SINCE and chosen[1] != "deny":
        return fine(check, f"tmpfs makes none by itself ({chosen[1]}), memory servers ask for them")
    return advice(check, f"tmpfs does not use them ({chosen[1]})", f"echo within_size > {path}: fewer TLB misses")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = str(soft) if soft == hard >= 0 else f"{soft}, a daemon raises it to {hard if hard >= 0 else 'any number'}"
    if 0 <= hard < _FILES_WANTED:
        return problem("open files", found, f"ulimit -Hn {_FILES_WANTED} or more; LimitNOFILE=65536 in a systemd unit")
    return fine("open files", found, hard=float(hard))


def _socket_buffers(root: Path) -> Iterator[Finding]:
    for name in ("tcp_rmem", "tcp_wmem"):
        words = _text(root / "proc/sys/net/ipv4" / name).split()
        if len(words) != 3:
            continue
        most = int(words[2])
        found = f"net.ipv4.{name}: up to {format_bytes(most)} a connection"
        if most < _BUFFER_WANTED:
            change = f'sysctl -w net.ipv4.{name}="{words[0]} {words[1]} {4 * _BUFFER_WANTED}": more on its way at once'
            yield advice("socket buffers", found, change, max_bytes=float(most))
        else:
            yield fine("socket buffers", found, max_bytes=float(most))


def _interfaces(root: Path) -> Iterator[Finding]:
    try:
        interfaces = sorted((root / "sys/class/net").iterdir())
    except OSError:
        return
    for interface in interfaces:
        mtu, speed = _text(interface / "mtu"), _text(interface / "speed")
        if not mtu.isdigit() or interface.name == "lo" or _text(interface / "operstate") == "down":
            continue
        mbps = int(speed) if speed.isdigit() else 0  # -1 if a driver does not know the speed
        found = f"{interface.name}: MTU {mtu}" + (f", {mbps / 1000:g} Gb/s" if mbps else "")
        if mbps >= _FAST_MBPS and int(mtu) < _JUMBO:
            change = f"ip link set {interface.name} mtu {_JUMBO}, if all switches on the way take it"
            yield advice("MTU", found, change, mtu_bytes=float(mtu))
        else:
            yield fine("MTU", found, mtu_bytes=float(mtu))


def _rdma(root: Path, capacity: str | None) -> Iterator[Finding]:
    """Check devices, pyverbs, and the memory that may be locked: RDMA needs all three."""
    asked = text_of("client.transport") == "verbs"
    found = devices.look(root=root)
    for port in found.ports:
        yield fine("RDMA", str(port))
    grade = problem if asked else advice
    locked = found.memlock_bytes
    limit = "any amount of memory may be locked" if locked is None else f"{format_bytes(locked)} may be locked"
    wanted = parse_bytes(capacity) if capacity else 0
    missing = [line.partition(": ") for line in found.missing if "may be locked" not in line]
    if not asked and any("no RDMA device" in what for what, _, _ in missing):
        yield fine("RDMA", "no device; transports shm and tcp need none")
        missing = []
    for what, _, change in missing:
        yield grade("RDMA", what, change)
    if locked is not None and (locked < (64 << 20) or locked < wanted):
        change = "for verbs alone: LimitMEMLOCK=infinity in a systemd unit, ulimit -l unlimited, --ulimit memlock=-1"
        yield (grade if found.ports or asked else advice)("memlock", limit, change, memlock_bytes=float(locked))
    else:
        yield fine("memlock", limit)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
