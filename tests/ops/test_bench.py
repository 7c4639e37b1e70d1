from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import smb
from smb.errors import Error, InvalidArgumentError
from smb.tools.bench import BenchConfig, run_bench
from tests.support.commands import run_smb


def test_every_operation_size_and_transport_is_measured() -> None:
    """`smb bench --json` prints a checked line for each operation, size and transport, with its limit and ratio."""
    result = run_smb("bench", "--sizes", "8,256KiB,3MiB", "--seconds", "0.02", "--json")
    assert result.returncode == 0, result.stderr
    lines = json.loads(result.stdout)
    measured = {(line["transport"], line["operation"], line["nbytes"]) for line in lines}
    arrays = {
        (t, o, n) for t in ("shm", "tcp") for o in ("write", "read", "accumulate") for n in (8, 256 << 10, 3 << 20)
    }
    assert measured == arrays | {("shm", "fetch_add", 8), ("tcp", "fetch_add", 8)}
    assert len(lines) == len(measured)
    for line in lines:
        assert 0 < line["p50_seconds"] <= line["p99_seconds"]
        if (line["transport"], line["operation"]) != ("shm", "fetch_add"):
            assert line["ratio"] > 0
            assert line["limit"]


def test_a_running_cluster_is_measured_and_left_as_it_was() -> None:
    """A coordinator's own cluster is measured, line after line as they are done, and no buffer stays behind."""
    with smb.LocalCluster(servers=1, capacity="16MiB") as cluster, smb.connect(cluster.address) as client:
        client.create("others", (4,))
        seen: list[str] = []
        config = BenchConfig(transports=("auto",), sizes=(4096,), seconds=0.02, coordinator=cluster.address)
        lines = run_bench(config, lambda line: seen.append(line.operation))
        assert seen == ["write", "read", "accumulate", "fetch_add"] == [line.operation for line in lines]
        assert [info.name for info in client.list()] == ["others"]


def test_a_cluster_of_the_environment_is_measured_by_name() -> None:
    """SMB_COORDINATOR's cluster is measured over what clients take, and that is said; or over what is asked for."""
    with _cluster() as address:
        for options, told in (((), "transport auto"), (("--transport", "tcp"), "transport tcp")):
            result = run_smb("bench", "--sizes", "8", "--seconds", "0.01", "--json", *options, coordinator=address)
            assert result.returncode == 0, result.stderr
            assert f"measuring the cluster at {address}, {told}" in result.stderr
            assert {line["transport"] for line in json.loads(result.stdout)} == {"tcp" if options else "shm"}


def test_verbs_are_measured_or_it_says_why_not() -> None:
    """Without the device `smb bench --transport verbs` ends with what is missing, and measures nothing else instead."""
    options = ("--transport", "verbs", "--sizes", "8", "--seconds", "0.01")
    with _cluster() as address:
        result = run_smb("bench", *options, coordinator=address, variables={"SMB_VERBS_DEVICE": "none0"})
    assert result.returncode != 0
    assert "no RDMA here: " in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_sizes_that_are_no_elements_are_refused() -> None:
    """A size that is no multiple of an element is refused before anything starts."""
    with pytest.raises(InvalidArgumentError, match=r"sizes must be positive multiples of 4 bytes .*, not 6"):
        BenchConfig(sizes=(6,))


def test_a_lost_addition_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that drops a single accumulate of many makes the benchmark fail instead of reporting its speed."""
    dropped: list[Any] = []
    accumulate = smb.Buffer.accumulate

    def lossy(self: smb.Buffer, array: Any, *arguments: Any, **options: Any) -> Any:
        if not dropped:
            dropped.append(array)
            return None
        return accumulate(self, array, *arguments, **options)

    monkeypatch.setattr(smb.Buffer, "accumulate", lossy)
    with _cluster() as address, pytest.raises(Error, match=r"accumulate over shm: .* elements are wrong"):
        run_bench(BenchConfig(transports=("shm",), sizes=(4096,), seconds=0.02, coordinator=address))
    assert np.size(dropped[0]) == 1024


@contextmanager
def _cluster() -> Iterator[str]:
    with smb.LocalCluster(servers=1, capacity="16MiB") as cluster:
        yield cluster.address
