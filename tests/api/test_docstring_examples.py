"""The examples in the docstrings of public names run as they stand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smb
import smb.torch
import smb.torch.data
import smb.train

PACKAGE = Path(smb.__file__).parent
FENCE = re.compile(r"```python\n(.*?)```", re.S)
# A cluster of Ray (tests/ops/test_ray.py), and engines of vLLM (tests/train/test_vllm_engines.py).
NEEDS_MORE = ("ray.py", "torch/vllm/clients.py", "torch/vllm/trainer.py")


def examples() -> Iterator[tuple[str, str]]:
    """Yield (file and name, code) of each fenced example in a docstring of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        source = path.read_text()
        if "```python" not in source or name in NEEDS_MORE:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                for code in FENCE.findall(ast.get_docstring(node) or ""):
                    yield f"{name}::{getattr(node, 'name', 'module')}", code


EXAMPLES = list(examples())


def names(client: smb.Client) -> dict[str, Any]:
    """Return what an example may use without making it."""
    rows = np.ones(1000, np.float32)
    published = client.create("published", 1000, versions=2)
    published.publish(rows)
    model = nn.Sequential(nn.Linear(64, 10))
    smb.torch.publish(client, "policy", model)
    for name, shape in (("digits/images", (64, 64)), ("digits/labels", (64,))):
        client.create(name, shape)
    images, labels = torch.randn(64, 64), torch.zeros(64, dtype=torch.int64)
    buffer = client.create("buffer", 1000)
    smb.train.join(client, "run", np.zeros(1000, np.float32), smb.train.LocalSGD(every=50)).close()
    return {
        "np": np, "smb": smb, "nn": nn, "client": client, "buffer": buffer, "published": published, "array": rows,
        "gradient": rows, "other": client.create("other", 1000), "residual": smb.ErrorFeedback(buffer),
        "follower": smb.torch.follow(client, "policy"), "model": model, "images": images, "labels": labels,
        "optimizer": torch.optim.AdamW(model.parameters()), "tensor": torch.zeros(1000), "data": rows,
        "publisher": smb.torch.Publisher(client, "other-policy", model), "torch": torch,
        "Rows": smb.torch.data.Rows, "Shards": smb.torch.data.Shards, "decode": dict, "train": len,
        "batches": [rows] * 3, "rate": 0.1, "values": np.zeros(1000, np.float32),
    }  # fmt: skip


@pytest.fixture(scope="module")
def two_servers() -> Iterator[smb.LocalCluster]:
    """A cluster for all examples."""
    with smb.LocalCluster(servers=2, capacity="64MiB") as running:
        yield running


@pytest.fixture
def empty(two_servers: smb.LocalCluster) -> Iterator[smb.LocalCluster]:
    """The cluster without buffers."""
    yield two_servers
    with smb.connect(two_servers.address) as client:
        for each in client.list():
            client.delete(each.name, missing_ok=True)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than this machine has processors
@pytest.mark.parametrize(("where", "code"), EXAMPLES, ids=[where for where, _ in EXAMPLES])
def test_an_example_runs(
    where: str, code: str, empty: smb.LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runs on an empty cluster, with the names that it takes for granted."""
    monkeypatch.chdir(tmp_path)
    cluster = empty
    with smb.connect(cluster.address) as client:
        monkeypatch.setenv("SMB_COORDINATOR", cluster.address)
        given = names(client)
        if where.startswith("train/"):
            given["gradient"] = lambda values, *_: np.zeros_like(values)
        if where.endswith("::shared_state_dict"):
            smb.torch.join(given["model"], given["optimizer"], "digits", scheme="localsgd", every=20).close()
        if where.startswith("buffer.py"):
            given["weights"] = client.create("weights", 1000)
            given["gradients"] = client.create("gradients", like=given["weights"])
        exec(code.replace("127.0.0.1:7070", cluster.address), given)
