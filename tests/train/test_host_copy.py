"""One host's copy of a published state, for all processes of an inference engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smb
import smb.torch
from smb.torch.publishing.host_copy import _identity, _map
from tests.conftest import Connect
from tests.support.meshes import Mesh, published


@pytest.fixture
def mesh(context: Any, cluster: smb.LocalCluster, tmp_path: Path) -> Iterator[Mesh]:
    """Two processes of an engine."""
    made = Mesh(context, cluster.address, tmp_path)
    yield made
    made.end()


def values(seed: int) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in published(seed).state_dict().items()}


@pytest.mark.parametrize("deltas", [0, 4])
def test_all_processes_of_an_engine_hold_one_generation_in_one_memory(
    mesh: Mesh, connect: Connect, deltas: int
) -> None:
    """One of them reads. A generation that is over, or does not come in time, is refused at all; one that fails at a
    process fails at all; and what is held afterwards is right. When a process is killed the other ones hear of it."""
    trainer = smb.torch.Publisher(connect(), "w", published(0), versions=3, deltas=deltas)
    assert mesh.ask("copy", "w") == [True, False]
    for seed in (1, 2):
        trainer.publish(published(seed))
        (first, memory), (second, same_memory) = mesh.ask("hold", seed)
        assert first == second == values(seed)
        assert memory == same_memory
        assert memory.isdigit()
    for seed in range(3, 12):  # with deltas more than the log has, too
        trainer.publish(published(seed))
    for generation, told in ((1, "NotFoundError"), (99, "TimeoutError")):
        assert [told in said for said in mesh.ask("hold", generation, 0.5)] == [True, True]
    assert [said.rpartition(": ")[2] for said in mesh.ask("hold", 11, fails=1)] == ["no room on the device"] * 2
    assert [held for held, _ in mesh.ask("hold", 11)] == [values(11)] * 2
    mesh.ask("uncopy")
    assert mesh.ask("copy", "w") == [True, False]  # again, as for another name
    assert [held for held, _ in mesh.ask("hold", 11)] == [values(11)] * 2
    mesh.processes[1].kill()
    mesh.tell("hold", 11, ranks=(0,))
    assert "a rank of the mesh is gone" in mesh.heard(0)
    mesh.tell("uncopy", ranks=(0,))
    mesh.heard(0)


def test_a_number_that_another_process_has_by_now_maps_nothing() -> None:
    """What stands at a path of /proc must be what the first process of the engine made."""
    files = [os.memfd_create(name) for name in ("first", "other")]
    try:
        for descriptor in files:
            os.truncate(descriptor, 4096)
        path = f"/proc/self/fd/{files[0]}"
        assert _map(path, 4096, _identity(files[0])).nbytes == 4096
        with pytest.raises(smb.UnavailableError, match="not the memory that this engine's first process made"):
            _map(path, 4096, _identity(files[1]))
    finally:
        for descriptor in files:
            os.close(descriptor)
