"""client.list() and `smb ls` failed as a whole when one buffer had a dtype that only a newer release knew."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import smb
from smb.arrays.dtypes import DTYPES
from smb.files.softmem import SoftmemFileSystem
from tests.conftest import Connect
from tests.support.commands import run_here

NEW = "float8_e5m2"  # what this process forgets, as an older release never knew it


@pytest.fixture
def older(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> smb.Client:
    """A client of an older release beside two buffers of a newer one, and a buffer that it knows."""
    newer = connect()
    newer.create("newer/vector", (10,), NEW).write(np.ones(10, DTYPES[NEW].numpy))
    newer.create("newer/empty", (0, 3), NEW)
    newer.create("known", (10,), "float64").write(np.arange(10.0))
    monkeypatch.delitem(DTYPES, NEW)
    return connect()


def test_a_list_names_a_dtype_that_this_release_does_not_know(
    older: smb.Client, cluster: smb.LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Python, in a notebook, by `smb ls` and as JSON, with its size; the others are as they always were."""
    infos = {info.name: info for info in older.list()}
    assert [infos[name].unknown_dtype for name in ("newer/vector", "newer/empty", "known")] == [NEW, NEW, ""]
    assert [infos[name].nbytes for name in ("newer/vector", "newer/empty", "known")] == [10, 0, 80]
    assert infos["known"].dtype == np.float64
    assert infos["newer/vector"].dtype_name == f"{NEW} (unknown to this release)"
    rows: Any = older.list()
    assert f"{NEW} (unknown" in rows._repr_html_()
    code, table, _ = run_here(capsys, "ls", "--coordinator", cluster.address)
    assert (code, NEW in table) == (0, True)
    code, text, _ = run_here(capsys, "ls", "--json", "--coordinator", cluster.address)
    listed = {row["name"]: row["dtype"] for row in json.loads(text)}
    assert listed == {"newer/vector": NEW, "newer/empty": NEW, "known": "float64"}


def test_only_opening_a_buffer_of_an_unknown_dtype_is_refused(older: smb.Client, cluster: smb.LocalCluster) -> None:
    """The sentence names the buffer, its dtype and what to do. It may be deleted, and lies among the files."""
    assert older.open("known").read(offset=3, count=1) == [3.0]
    with pytest.raises(smb.Error, match=rf"newer/vector: .* its dtype {NEW}; install the release that the cluster"):
        older.open("newer/vector")
    files = SoftmemFileSystem(coordinator=cluster.address, skip_instance_cache=True)
    assert {entry["name"]: entry["size"] for entry in files.ls("newer")} == {"newer/empty": 0, "newer/vector": 10}
    with pytest.raises(OSError, match=NEW):
        files.cat_file("newer/vector")
    older.delete("newer/empty")
    assert [info.name for info in older.list()] == ["known", "newer/vector"]
