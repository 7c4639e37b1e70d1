"""What failed first is what the caller hears: tidying up that fails, too, took its place, or undid what was done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.engine import AskOpcode
from smb.files import copying
from smb.files.open_file import open_file
from smb.train import saved

AWAY = "the coordinator is away"


@pytest.fixture
def kept(client: smb.Client) -> Iterator[list[str]]:
    """Nothing that is there can be deleted; the names of what was to be."""
    names: list[str] = []

    def delete(buffer: str | smb.Buffer, **_: object) -> None:
        name = buffer if isinstance(buffer, str) else buffer.name
        if name in {info.name for info in client.list()}:
            names.append(name)
            raise smb.UnavailableError(AWAY)

    with pytest.MonkeyPatch.context() as patched:  # undone before the client tidies up
        patched.setattr(client, "delete", delete)
        yield names


def test_a_pin_that_cannot_be_given_back(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends by itself. What was read through it is read."""
    buffer = client.create("w", 10, versions=2)
    buffer.publish(np.arange(10, dtype=np.float32))
    for fails in (False, True):
        pin = buffer.pin()
        ask = pin._home.ask

        def lost(asked: str, opcode: AskOpcode, *given: Any, ask: Any = ask, **options: Any) -> Any:
            if opcode is AskOpcode.UNPIN:
                raise smb.UnavailableError("its server is away")
            return ask(asked, opcode, *given, **options)

        monkeypatch.setattr(pin._home, "ask", lost)
        if fails:
            with pytest.raises(ZeroDivisionError), pin:
                raise ZeroDivisionError
        else:
            with pin:
                assert pin.read(3, 1) == 3


def test_a_load_that_fails(
    client: smb.Client, kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was made is to be deleted, though one can't be."""
    with smb.train.join(client, "run", np.ones(100, np.float32), smb.train.DiLoCo()):
        smb.train.save(client, "run", tmp_path / "run.safetensors")
    kept.clear()
    create = client.create
    made: list[str] = []

    def full(name: str, *given: Any, **options: Any) -> smb.Buffer:
        if len(made) == 2:
            raise smb.OutOfMemoryError("no room")
        made.append(name)
        return create(name, *given, **options)

    monkeypatch.setattr(client, "create", full)
    with pytest.raises(smb.OutOfMemoryError, match="no room"):
        saved.load(client, "copy", tmp_path / "run.safetensors")
    assert sorted(kept) == sorted(made)
    assert len(made) == 2


def test_a_copy_whose_name_is_taken_meanwhile(
    client: smb.Client, kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "w.npy", np.ones(100, np.float32))

    def taken(*_: object, **__: object) -> None:
        raise smb.AlreadyExistsError("another has it")

    monkeypatch.setattr(client, "rename", taken)
    with pytest.raises(smb.AlreadyExistsError, match="another has it"):
        copying.restore(client, tmp_path / "w.npy", "w")
    assert kept


def test_a_snapshot_that_is_whole(client: smb.Client, kept: list[str], tmp_path: Path) -> None:
    """Its copy on the servers is left over. That is no reason to say that the snapshot failed."""
    client.create("w", 100).write(np.arange(100, dtype=np.float32))
    copying.snapshot(client, "w", tmp_path / "w.npy")
    assert np.load(tmp_path / "w.npy")[99] == 99
    assert kept


def test_a_file_that_cannot_be_closed(
    client: smb.Client, cluster: smb.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client is, with its session and threads."""
    client.create("w", 10, "uint8")
    own = smb.connect(cluster.address)
    file = open_file("w", "rb", client=own)
    monkeypatch.setattr(file, "_client", own)

    def close() -> None:
        raise smb.UnavailableError(AWAY)

    monkeypatch.setattr(file._file, "close", close)
    with pytest.raises(smb.UnavailableError, match=AWAY):
        file.close()
    assert own._session.closed
