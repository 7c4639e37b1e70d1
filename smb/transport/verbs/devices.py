"""What this machine has for verbs: pyverbs, RDMA devices with their ports and GIDs, and the limit of locked memory.

Reads the kernel's own files (/sys/class/infiniband), so that a message can name what is missing even without pyverbs.
Importing this module does not import pyverbs; `look` tries to.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import ipaddress
import logging
import os
import re
import resource
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEBIAN = Path("/usr/lib/python3/dist-packages/pyverbs")  # the folder of Debian's package python3-pyverbs
_CAP_IPC_LOCK = 14  # a capability of capabilities(7): its process may lock any amount
_MEMLOCK_WANTED = (
    64 << 20
)  # with less, staging blocks and one array may not fit; a daemon locks all memory that it serves


@dataclass(frozen=True, slots=True)
class Gid:
    """One address of a port. `kind` is the kernel's name, "RoCE v2" or "IB/RoCE v1"; `netdev` may be ""."""

    index: int
    address: ipaddress.IPv6Address
    kind: str
    netdev: str

    def __str__(self) -> str:
        return str(self.address.ipv4_mapped or self.address)


@dataclass(frozen=True, slots=True)
class Port:
    """One active port; `gid` is the address to use. `mtu` is in bytes, 0 without pyverbs; the speed in Gb/s."""

    device: str
    number: int
    link_layer: str  # "Ethernet" or "InfiniBand"
    gid: Gid
    mtu: int
    speed_gbps: float

    def __str__(self) -> str:
        mtu = f", MTU {self.mtu}" if self.mtu else ""
        return (
            f"{self.device} port {self.number}: {self.link_layer}, {self.gid.kind}, "
            f"GID {self.gid.index} ({self.gid}){mtu}, {self.speed_gbps:g} Gb/s"
        )


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices found. Verbs can be used if `missing` is empty."""

    pyverbs: str | None  # the version of rdma-core that it belongs to; None if it cannot be imported
    ports: tuple[Port, ...]  # active ports that have an address
    memlock_bytes: int | None  # how many bytes this process may lock; None: any amount
    missing: tuple[str, ...]  # one line for each missing thing, with the way to get it


def look(device: str = "", port: int = 0, gid_index: int | None = None, root: Path = Path("/")) -> Devices:
    """Inspect this machine. Never raises, never blocks for long.

    device, port, gid_index: inspect only these; "", 0 and None stand for all devices, all ports and the best GID. root:
    the folder with sys and dev, for tests.
    """
    missing = []
    version, why = _import_pyverbs()
    if why:
        missing.append(why)
    ports, refusals = _ports(device, port, gid_index, root, ask=version is not None)
    missing += refusals
    limit = _memlock()
    if limit is not None and limit < _MEMLOCK_WANTED:
        missing.append(
            f"only {limit >> 10} KiB of memory may be locked: 'ulimit -l unlimited', '* - memlock unlimited' in "
            "/etc/security/limits.d/smb.conf, LimitMEMLOCK=infinity in systemd units, --ulimit memlock=-1 with docker"
        )
    return Devices(version, ports, limit, tuple(missing))


def choose_gid(gids: list[Gid], link_layer: str) -> Gid | None:
    """Return the address to use. Over Ethernet, RoCE v2 comes before v1, and IPv4 before global IPv6 before
    link-local.
    """
    if link_layer == "InfiniBand":
        return gids[0] if gids else None

    def rank(gid: Gid) -> tuple[bool, bool, bool, int]:
        address = gid.address
        return ("v2" not in gid.kind, address.ipv4_mapped is None, address.is_link_local, gid.index)

    return min(gids, key=rank, default=None)


def _import_pyverbs() -> tuple[str | None, str]:
    """Return (version of pyverbs, ""), or (None, what to do)."""
    try:
        _import_quietly("pyverbs.device")
    except ImportError as error:
        return None, _how_to_get_pyverbs(error)
    try:
        return importlib.metadata.version("pyverbs"), ""
    except (
        importlib.metadata.PackageNotFoundError
    ):  # Debian's package has no such metadata; its version is that of the library
        found = re.search(r"/libibverbs\.so\.1\.\d+\.(\d[\d.]*)$", Path("/proc/self/maps").read_text(), re.M)
        return found[1] if found else "unknown", ""


def _import_quietly(name: str) -> None:
    """Import a module without a change of the process's logging: pyverbs would print all records from INFO on."""
    root = logging.getLogger()
    level, ours = root.level, logging.NullHandler()
    root.addHandler(ours)  # basicConfig does nothing if there is a handler
    try:
        importlib.import_module(name)
    finally:
        root.removeHandler(ours)
        root.setLevel(level)


def _how_to_get_pyverbs(error: ImportError, debian: Path = DEBIAN) -> str:
    if not isinstance(error, ModuleNotFoundError):  # most often a shared library of rdma-core is missing
        return f"pyverbs does not import ({error}): apt install libibverbs1 ibverbs-providers librdmacm1"
    built = [path.name.split(".")[1] for path in debian.glob("device.*.so")]
    if not built:
        return "pyverbs is not installed: apt install python3-pyverbs ibverbs-providers (dnf: python3-pyverbs)"
    if not any(suffix.startswith(f".{built[0]}") for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        return (
            f"Debian's pyverbs is built for {built[0]}, this Python is {sys.implementation.cache_tag}: use that Python"
        )
    return f"pyverbs is not in this environment: ln -s {debian} {sysconfig.get_path('platlib')}/"


def _ports(
    device: str, port: int, gid_index: int | None, root: Path, ask: bool
) -> tuple[tuple[Port, ...], tuple[str, ...]]:
    """Return the ports to use, and if there are none, the reasons."""
    found, refusals = [], []
    for entry in _sorted(root / "sys/class/infiniband"):
        if device and entry.name != device:
            continue
        why = _no_access(entry.name, root)
        if why:
            refusals.append(why)
            continue
        for directory in _sorted(entry / "ports"):
            if port and directory.name != str(port):
                continue
            one = _port(entry.name, directory, gid_index, ask)
            if isinstance(one, Port):
                found.append(one)
            else:
                refusals.append(one)
    if found:
        return tuple(found), ()
    if not refusals:
        asked = f" {device}" if device else ""
        asked += f" with port {port}" if port else ""
        refusals.append(
            f"no RDMA device{asked}: load the adapter's driver (mlx5_ib, irdma, bnxt_re, ...); with an ordinary "
            "network card: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0"
        )
    return (), tuple(refusals)


def _port(device: str, directory: Path, gid_index: int | None, ask: bool) -> Port | str:
    """Return the port, or the reason why it cannot be used."""
    number, name = int(directory.name), f"{device} port {directory.name}"
    state = _text(directory / "state").partition(": ")[2]
    if state != "ACTIVE":
        return f"{name} is {state or 'gone'}: plug its cable, 'ip link set DEV up', or start the subnet manager"
    link_layer = _text(directory / "link_layer")
    gids = list(_gids(directory))
    gid = choose_gid([gid for gid in gids if gid_index is None or gid.index == gid_index], link_layer)
    if gid is None:
        asked = "" if gid_index is None else f" {gid_index}, there are {[g.index for g in gids]}"
        return f"{name} has no GID{asked}: give its network interface an address (ip addr add)"
    rate = re.match(r"[\d.]+", _text(directory / "rate"))
    return Port(device, number, link_layer, gid, _mtu(device, number) if ask else 0, float(rate[0]) if rate else 0.0)


def _gids(directory: Path) -> Iterator[Gid]:
    for entry in _sorted(directory / "gids"):
        text = _text(entry)
        if not text or not int(text.replace(":", ""), 16):
            continue  # an empty entry of the table
        attributes = directory / "gid_attrs"
        netdev = _text(attributes / "ndevs" / entry.name)
        yield Gid(int(entry.name), ipaddress.IPv6Address(text), _text(attributes / "types" / entry.name), netdev)


def _mtu(device: str, number: int) -> int:
    """Return the active MTU in bytes, 0 if the device does not say. Only libibverbs knows the MTU."""
    pyverbs = importlib.import_module("pyverbs.device")
    error = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
    try:
        with pyverbs.Context(name=device) as context:
            return 128 << int(context.query_port(number).active_mtu)
    except error:
        return 0


def _no_access(device: str, root: Path) -> str:
    """Return "" if this process may open the device, else what to do."""
    classes = _sorted(root / "sys/class/infiniband_verbs")
    nodes = [root / "dev/infiniband" / entry.name for entry in classes if _text(entry / "ibdev") == device]
    if not nodes:
        return f"{device} has no device file: modprobe ib_uverbs"
    if os.access(nodes[0], os.R_OK | os.W_OK):
        return ""
    return (
        f"no access to {nodes[0]} of {device}: run 'chmod 666 {nodes[0]}' as root; for a container --device "
        "/dev/infiniband"
    )


def _memlock() -> int | None:
    status = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.M)
    if status and int(status[1], 16) >> _CAP_IPC_LOCK & 1:
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _sorted(directory: Path) -> list[Path]:
    """Return a directory's entries with numbers in numeric order; an empty list if there is no such directory."""
    try:
        return sorted(directory.iterdir(), key=lambda path: (len(path.name), path.name))
    except OSError:
        return []


def _text(path: Path) -> str:
    """Return the only line of a small file, "" if it cannot be read: the kernel refuses reads of empty table
    entries.
    """
    try:
        return path.read_text().strip()
    except OSError:
        return ""
