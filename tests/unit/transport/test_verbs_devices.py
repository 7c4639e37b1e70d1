"""What `smb.transport.verbs.devices` says about a machine, told by made-up files of the kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from smb.transport.verbs import devices

GIDS = {
    0: ("fe80:0000:0000:0000:0000:00ff:fe77:0001", "IB/RoCE v1"),
    1: ("fe80:0000:0000:0000:0000:00ff:fe77:0001", "RoCE v2"),
    2: ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "IB/RoCE v1"),
    3: ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2"),
    4: ("0000:0000:0000:0000:0000:0000:0000:0000", ""),
}


def make(
    root: Path,
    device: str = "mlx5_0",
    state: str = "4: ACTIVE",
    gids: dict[int, tuple[str, str]] = GIDS,
    layer: str = "Ethernet",
    node: str = "uverbs0",
) -> Path:
    """Write the files of a device with one port; return its device file."""
    port = root / "sys/class/infiniband" / device / "ports/1"
    texts = {"state": state, "link_layer": layer, "rate": "100 Gb/sec (4X EDR)"}
    for index, (address, kind) in gids.items():
        texts |= {f"gids/{index}": address, f"gid_attrs/types/{index}": kind, f"gid_attrs/ndevs/{index}": "eth0"}
    for name, text in texts.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(f"{text}\n")
    ibdev = root / "sys/class/infiniband_verbs" / node / "ibdev"
    ibdev.parent.mkdir(parents=True)
    ibdev.write_text(f"{device}\n")
    file = root / "dev/infiniband" / node
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


@pytest.fixture
def no_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without pyverbs, whatever this one has."""
    monkeypatch.setattr(devices, "_import_pyverbs", lambda: (None, "pyverbs is not installed"))


pytestmark = pytest.mark.usefixtures("no_pyverbs")


def test_an_active_port_is_found_with_its_ipv4_gid_of_roce_v2(tmp_path: Path) -> None:
    """Of the addresses of a port the RoCE v2 one of an IPv4 address is chosen, not the first."""
    make(tmp_path)
    (port,) = devices.look(root=tmp_path).ports
    assert (port.device, port.number, port.gid.index, str(port.gid)) == ("mlx5_0", 1, 3, "10.77.0.1")
    assert (port.gid.kind, port.gid.netdev, port.speed_gbps, port.mtu) == ("RoCE v2", "eth0", 100, 0)
    assert str(port) == "mlx5_0 port 1: Ethernet, RoCE v2, GID 3 (10.77.0.1), 100 Gb/s"


@pytest.mark.parametrize(
    ("kept", "chosen"),
    [((0, 1, 2, 3), 3), ((0, 1, 2), 1), ((0, 2), 2), ((0,), 0)],
    ids=["all", "no v2-ip4", "v1", "one"],
)
def test_gids_have_an_order(tmp_path: Path, kept: tuple[int, ...], chosen: int) -> None:
    """RoCE v2 goes before v1, and IPv4 before link-local."""
    make(tmp_path, gids={index: GIDS[index] for index in kept})
    assert devices.look(root=tmp_path).ports[0].gid.index == chosen


def test_infiniband_takes_the_first_gid(tmp_path: Path) -> None:
    """Over InfiniBand the first address is the port's own."""
    make(tmp_path, layer="InfiniBand", gids={0: GIDS[0], 1: GIDS[3]})
    assert devices.look(root=tmp_path).ports[0].gid.index == 0


def test_options_narrow_what_is_found(tmp_path: Path) -> None:
    """Device, port and GID index are taken as asked, and what is not there is said."""
    make(tmp_path)
    make(tmp_path, "mlx5_1", node="uverbs1")
    assert [p.device for p in devices.look(root=tmp_path).ports] == ["mlx5_0", "mlx5_1"]
    (port,) = devices.look("mlx5_1", 1, 0, root=tmp_path).ports
    assert (port.device, port.gid.index) == ("mlx5_1", 0)
    for asked, said in (
        (("mlx5_7", 0, None), "no RDMA device mlx5_7"),
        (("mlx5_0", 2, None), "no RDMA device mlx5_0 with port 2"),
        (("mlx5_0", 1, 9), "has no GID 9, there are [0, 1, 2, 3]"),
    ):
        found = devices.look(*asked, root=tmp_path)
        assert not found.ports
        assert any(said in line for line in found.missing), found.missing


def test_each_missing_thing_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device, a port that is down, no device file, no right to it, little memory to lock: a line each."""

    def said(part: str) -> bool:
        return any(part in line for line in devices.look(root=tmp_path).missing)

    assert said("rdma link add")
    assert said("pyverbs is not installed")
    file = make(tmp_path, state="1: DOWN")
    assert said("mlx5_0 port 1 is DOWN")
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("4: ACTIVE\n")
    assert not said("mlx5_0")
    assert not said("memory may be locked")
    monkeypatch.setattr(devices, "_memlock", lambda: 8 << 20)
    assert said("only 8192 KiB of memory may be locked")
    monkeypatch.setattr("os.access", lambda *given: False)
    assert said(f"no access to {file}")
    (tmp_path / "sys/class/infiniband_verbs/uverbs0/ibdev").unlink()
    assert said("modprobe ib_uverbs")


def test_how_to_get_pyverbs_depends_on_what_is_there(tmp_path: Path) -> None:
    """Debian's package is linked where it fits this Python, and refused by name where it is another's."""
    gone = ModuleNotFoundError("No module named 'pyverbs'")
    assert "apt install python3-pyverbs" in devices._how_to_get_pyverbs(gone, tmp_path)
    assert "libibverbs1" in devices._how_to_get_pyverbs(ImportError("libibverbs.so.1: cannot open"), tmp_path)
    tag = f"cpython-{sys.version_info[0]}{sys.version_info[1]}"
    own = tmp_path / f"device.{tag}-x86_64-linux-gnu.so"
    own.touch()
    assert f"ln -s {tmp_path} " in devices._how_to_get_pyverbs(gone, tmp_path)
    own.rename(tmp_path / "device.cpython-27-x86_64-linux-gnu.so")
    assert "built for cpython-27" in devices._how_to_get_pyverbs(gone, tmp_path)


def test_looking_leaves_the_logging_of_the_process_alone(tmp_path: Path) -> None:
    """pyverbs configures the root logger when it is imported; a program that uses us has its own say in that."""
    package = tmp_path / "pyverbs"
    package.mkdir()
    (package / "__init__.py").write_text("import logging\nlogging.basicConfig(level=logging.INFO)\n")
    (package / "device.py").write_text("imported = True\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import logging; from smb.transport.verbs.devices import look\n"
        "look(); assert sys.modules['pyverbs.device'].imported\n"
        "print(logging.root.handlers, logging.root.level)"
    )
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert told.split() == ["[]", "30"]


def test_importing_imports_no_pyverbs() -> None:
    """Whoever has pyverbs does not pay for it before verbs is used."""
    code = "import smb.transport.verbs.devices, sys; sys.exit('pyverbs' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
