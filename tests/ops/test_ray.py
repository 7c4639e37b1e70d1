"""smb.ray on a real Ray: two nodes of it, both on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
import smb.train
from tests.support.daemons import wait_for

pytest.importorskip("ray", reason="not run: it needs Ray (make ray)")
pytestmark = [
    pytest.mark.timeout(300),
    # Ray's own, of its start and its end.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::UserWarning"),
]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
# A job that starts memory servers and ends without stop().
JOB = """
import sys, numpy as np, ray, smb, smb.ray
ray.init(address=sys.argv[1], log_to_driver=False)
cluster = smb.ray.start(capacity_per_node="32MiB")
with smb.connect(cluster.address) as client:
    client.create("w", 1000).write(np.ones(1000, np.float32))
print(cluster.address, flush=True)
"""


def left() -> set[str]:
    """Directories of daemons, in memory and on disk."""
    return {str(path) for root in ("/dev/shm", "/tmp") for path in Path(root).glob("smb-ray-*")}


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Two nodes of Ray, and this process as a job of theirs."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


def test_each_node_lends_memory(ray_address: str) -> None:
    """One server for each node, with a memory directory of its own; a buffer lies on both; what tasks of Ray add is
    there; stop leaves nothing.
    """
    import ray

    import smb.ray

    before = left()
    with smb.ray.start(capacity_per_node="32MiB") as cluster:
        assert len(cluster.servers) == 2
        assert len([path for path in left() - before if path.startswith("/dev/shm/")]) == 2
        for name, actor in cluster._servers.items():
            where = actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
            assert name == f"ray-{ray.get(where, timeout=DEADLINE_S)[:12]}"
        with smb.connect(cluster.address) as client:
            assert sorted(server.name for server in client.servers()) == sorted(cluster.servers)
            weights = client.create("w", (4, 65536), servers=2)
            assert {segment.server for segment in weights.layout.segments} == set(cluster.servers)

            @ray.remote(num_cpus=0.5, scheduling_strategy="SPREAD")
            def add(address: str) -> None:
                with smb.connect(address) as mine:
                    mine.open("w").accumulate(np.ones((4, 65536), np.float32))

            ray.get([add.remote(cluster.address) for _ in range(4)], timeout=DEADLINE_S)
            assert (weights.read() == 4).all()
    assert cluster.servers == []
    assert left() == before


def test_a_daemon_that_dies_comes_back_with_its_memory(ray_address: str) -> None:
    """kill -9 of a memory server's process, and of the coordinator's: what was written is there."""
    import ray

    import smb.ray

    with (
        smb.ray.start(capacity_per_node="32MiB") as cluster,
        smb.connect(cluster.address, timeout=DEADLINE_S) as client,
    ):
        weights = client.create("w", 1000)
        weights.write(np.full(1000, 7, np.float32))
        for actor in (*cluster._servers.values(), cluster._coordinator):
            os.kill(ray.get(actor.pid.remote(), timeout=DEADLINE_S), signal.SIGKILL)
        assert (weights.read() == 7).all()

        assert [info.name for info in client.list()] == ["w"]

        def created() -> bool:
            with contextlib.suppress(smb.UnavailableError):  # the memory server may come back after the coordinator
                client.create("more", 10)
                return True
            return False

        wait_for(created, "the memory server", DEADLINE_S)


def test_it_is_gone_with_the_job(ray_address: str) -> None:
    """A driver that exits without stop() leaves no daemon, and no memory."""
    before = left()
    job = subprocess.run(
        [sys.executable, "-c", JOB, ray_address], capture_output=True, text=True, timeout=120, check=False
    )
    assert job.returncode == 0, job.stderr[-2000:]
    address = job.stdout.split()[-1]
    wait_for(lambda: left() == before, "the end of what the job left", DEADLINE_S)
    with pytest.raises(smb.UnavailableError):
        smb.connect(address, timeout=1.0)


def test_what_can_not_be_started_is_told(ray_address: str) -> None:
    """A node that is not there; a capacity that no host has. Nothing is left."""
    import smb.ray

    before = left()
    with pytest.raises(smb.InvalidArgumentError, match="the live ones are"):
        smb.ray.start(nodes=["f" * 56])
    with pytest.raises(smb.InvalidArgumentError):
        smb.ray.start(capacity_per_node="much")
    with pytest.raises(smb.UnavailableError, match=r"smb\.ray\.start"):
        smb.ray.start(credentials="/nowhere")
    wait_for(lambda: left() == before, "the end of what was begun", DEADLINE_S)


def test_the_example_with_ray_train(ray_address: str) -> None:
    """Two workers of Ray Train contribute to one training."""
    pytest.importorskip("pyarrow", reason="not run: it needs ray[train] (make ray)")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray_address, "OMP_NUM_THREADS": "1"}
    example = [sys.executable, str(ROOT / "examples/ray_train.py")]
    done = subprocess.run(example, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("round ")
    contributions = [int(word) for word in last.partition("[")[2].rstrip("]").split(", ")]
    assert len(contributions) == 2
    assert min(contributions) > 0
