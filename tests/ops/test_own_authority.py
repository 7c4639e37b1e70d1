"""docs/own-authority.md, as an operator types it: two levels, RSA and ECDSA, and a cluster with the result."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import smb
from tests.support.daemons import wait_for

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```sh ([\w-]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS: dict[str, str] = dict(_BLOCK.findall((ROOT / "docs/own-authority.md").read_text()))


def follow(place: Path, *blocks: str) -> None:
    """Run these blocks of the page in a directory."""
    place.mkdir(exist_ok=True)
    done = subprocess.run(
        # Shorter keys, which are made in a tenth of the time.
        ["bash", "-e", "-c", "\n".join(BLOCKS[block] for block in blocks).replace("rsa:3072", "rsa:2048")],
        cwd=place, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def use(cluster: smb.LocalCluster, place: Path, name: str) -> None:
    """A client writes, a reader reads, alice has her namespace alone."""
    values = np.arange(1000, dtype="float32")
    with (
        smb.connect(cluster.address, transport="tcp", credentials=place / "client", timeout=30) as client,
        smb.connect(cluster.address, transport="tcp", credentials=place / "reader", timeout=30) as reader,
        smb.connect(cluster.address, credentials=place / "alice", timeout=30) as alice,
    ):
        client.create(name, (1000,), servers=2).write(values)
        np.testing.assert_array_equal(reader.open(name).read(), values)
        with pytest.raises(smb.PermissionDeniedError, match="may only read the buffer"):
            reader.open(name).write(values)
        alice.create(f"team-a/{name}", (8,))
        with pytest.raises(smb.PermissionDeniedError, match="limited to team-a/"):
            alice.open(name)


def _revoke(cluster: smb.LocalCluster, authority: Path, place: Path) -> None:
    """The daemons take the list: alice is out, and who was not revoked works on."""
    for file in ("cert.pem", "key.pem"):  # the page has the certificates beside the authority
        shutil.copy(place / "alice" / file, authority / "alice" / file)
    follow(authority, "revoke")
    for daemon in ("coordinator", "server-0", "server-1"):
        shutil.copy(authority / "crl.pem", place / daemon / "crl.pem")

    def why() -> str:
        try:
            smb.connect(cluster.address, credentials=place / "alice", timeout=5).close()
        except smb.PermissionDeniedError as error:
            return str(error)
        return ""

    assert "a list in crl.pem revokes it" in wait_for(why, "refusal of alice")
    with smb.connect(cluster.address, transport="tcp", credentials=place / "client", timeout=30) as client:
        assert client.open("third").read().size == 1000


@pytest.mark.parametrize("algorithm", ["ecdsa", "rsa"])
def test_the_page_works_as_it_is_written(tmp_path: Path, algorithm: str) -> None:
    """A set, a cluster with it, then the set of another authority in its place while the cluster runs."""
    place, following = tmp_path / "now", ("authorities", "issue", "set")
    follow(place, algorithm, *following)
    assert all(path.stat().st_mode & 0o077 == 0 for path in place.glob("*/key.pem"))
    with smb.LocalCluster(servers=2, capacity="16MiB", credentials=place) as cluster:
        use(cluster, place, "first")
        if algorithm == "rsa":
            return  # the rest is of files, whatever they hold
        follow(tmp_path / "next", algorithm, *following)
        follow(place, "both")
        with smb.connect(cluster.address, credentials=place / "operator", timeout=30) as of_before:
            follow(place, "anew")
            use(cluster, place, "second")
            follow(place, "old-out")
            use(cluster, place, "third")
            assert sorted(buffer.name for buffer in of_before.list()) == sorted(
                [f"{prefix}{name}" for name in ("first", "second", "third") for prefix in ("", "team-a/")]
            )
        _revoke(cluster, tmp_path / "next", place)
