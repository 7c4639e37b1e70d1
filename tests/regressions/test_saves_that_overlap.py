"""Two saves of one checkpoint that overlap: what can be loaded is one of the states that were saved, at any time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import smb
import smb.torch.checkpoint as checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

NAME = "run/ckpt"
PATIENCE_S = 60


class _Held(checkpoint.Writer):
    """Waits before it commits."""

    def __init__(self, client: smb.Client) -> None:
        super().__init__(client, NAME)
        self.written, self.go_on = threading.Event(), threading.Event()

    def finish(self, *given: Any, **named: Any) -> None:
        self.written.set()
        assert self.go_on.wait(PATIENCE_S)
        super().finish(*given, **named)


class _Saving:
    """A save in another thread, held before it commits."""

    def __init__(self, client: smb.Client, value: float) -> None:
        self.writer = _Held(client)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(value,))
        self._thread.start()
        assert self.writer.written.wait(PATIENCE_S)

    def _run(self, value: float) -> None:
        try:
            _save(value, self.writer)
        except BaseException as error:  # noqa: BLE001 - looked at below
            self.error = error

    def end(self) -> BaseException | None:
        """Let it commit; return its error."""
        self.writer.go_on.set()
        self._thread.join(PATIENCE_S)
        return self.error


def _save(value: float, writer: checkpoint.Writer) -> None:
    dcp.save({"x": torch.full((9,), value)}, storage_writer=writer)


def _loaded(client: smb.Client) -> float:
    state = {"x": torch.zeros(9)}
    dcp.load(state, storage_reader=checkpoint.Reader(client, NAME))
    return float(state["x"][0])


@pytest.fixture
def clients(cluster: smb.LocalCluster) -> Iterator[tuple[smb.Client, smb.Client]]:
    with smb.connect(cluster.address) as one, smb.connect(cluster.address) as two:
        yield one, two
        checkpoint.delete(one, NAME, missing_ok=True)
        assert [info.name for info in one.list()] == []


def test_the_earlier_one_is_refused(clients: tuple[smb.Client, smb.Client]) -> None:
    """The later save's checkpoint stays; the earlier one is told, and its index and tensors are gone."""
    one, two = clients
    _save(1.0, checkpoint.Writer(one, NAME))
    earlier = _Saving(one, 2.0)
    _save(3.0, checkpoint.Writer(two, NAME))
    error = earlier.end()
    assert isinstance(error, dcp.api.CheckpointException)
    assert "another save of this name began meanwhile" in str(error)
    assert _loaded(one) == 3.0
    assert len(one.list()) == 2


def test_the_former_one_stays_until_one_commits(clients: tuple[smb.Client, smb.Client]) -> None:
    """Whichever of two saves comes to its end first: the former checkpoint, or the later save's, can be loaded."""
    one, two = clients
    _save(1.0, checkpoint.Writer(one, NAME))
    earlier = _Saving(one, 2.0)
    later = _Saving(two, 3.0)
    assert _loaded(one) == 1.0
    assert isinstance(earlier.end(), dcp.api.CheckpointException)
    assert _loaded(one) == 1.0
    assert later.end() is None
    assert _loaded(one) == 3.0


def test_a_delete_in_the_middle(clients: tuple[smb.Client, smb.Client]) -> None:
    """A checkpoint that is deleted while one is saved leaves none behind that cannot be loaded."""
    one, two = clients
    saving = _Saving(one, 2.0)
    checkpoint.delete(two, NAME, missing_ok=True)
    assert isinstance(saving.end(), dcp.api.CheckpointException)
    with pytest.raises(dcp.api.CheckpointException, match="no buffer"):
        _loaded(two)


def test_lost_memory_is_no_checkpoint(clients: tuple[smb.Client, smb.Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """If a memory server has lost what was written, the commit is refused, and the former checkpoint stays."""
    from dataclasses import replace

    one, _ = clients
    _save(1.0, checkpoint.Writer(one, NAME))
    saving = _Saving(one, 2.0)
    opened = one.open

    def lost(name: str, **options: Any) -> smb.Buffer:
        buffer = opened(name, **options)
        if name.endswith(".data"):
            layout = buffer.info.layout
            segments = tuple(replace(each, lost=True) for each in layout.segments)
            buffer._arguments.info = replace(buffer.info, layout=replace(layout, segments=segments))
        return buffer

    with monkeypatch.context() as patched:
        patched.setattr(one, "open", lost)
        error = saving.end()
    assert "has lost what was written to it" in str(error)
    assert _loaded(one) == 1.0


def test_a_buffer_that_is_not_a_checkpoint_stays(clients: tuple[smb.Client, smb.Client]) -> None:
    """A save took its place without a word, and a delete took it away."""
    client, _ = clients
    client.create("mine", 3).write([1, 2, 3])
    with pytest.raises(CheckpointException, match="not a checkpoint"):
        dcp.save({"w": torch.zeros(2)}, storage_writer=checkpoint.Writer(client, "mine"))
    with pytest.raises(smb.InvalidArgumentError, match="not a checkpoint"):
        checkpoint.delete(client, "mine")
    assert client.open("mine").read().tolist() == [1, 2, 3]
    client.delete("mine")
