"""A training in a file, and what is exported: exact, of one round, whatever wire= says."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file
from torch import nn
from typer.testing import CliRunner

import smb
import smb.torch
import smb.train
from smb.tools.cli.main import app, main
from smb.train import BSP, DiLoCo, parameters
from smb.train import group as groups
from smb.train import member_table as t
from tests.fault.long import LONG
from tests.support.daemons import wait_for
from tests.support.training import COUNT, local_step, start

Connect = Callable[..., smb.Client]


def _rounds(client: smb.Client, name: str, steps: range, values: np.ndarray | None = None) -> np.ndarray:  # type: ignore[type-arg]
    """Train alone, a round for each step; return the weights at the end."""
    values = np.zeros(COUNT, np.float32) if values is None else values
    with smb.train.join(client, name, values, DiLoCo(every=1)) as worker:
        for step in steps:
            local_step(values, 0, step)
            worker.step()
        return worker.shared()


@pytest.mark.parametrize("wire", ["exact", "int8"])
def test_a_run_resumes_where_it_was(client: smb.Client, tmp_path: Path, wire: str) -> None:
    """From the file it goes on to the bit as without it: weights, momentum and round; with other servers too."""
    client.create("old", 16)
    with smb.train.join(client, "run", start(), DiLoCo(every=1), wire=wire, lease=3):
        pass
    _rounds(client, "run", range(3))
    file = tmp_path / "run.smb"
    assert smb.train.save(client, "run", file) == 3
    assert np.array_equal(load_file(file)["values"], smb.train.shared(client, "run"))
    expected = _rounds(client, "run", range(3, 6))
    with pytest.raises(smb.AlreadyExistsError, match="there is a training 'run'; delete it first"):
        smb.train.load(client, "run", file)
    smb.train.delete(client, "run")
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as elsewhere:
        assert smb.train.load(elsewhere, "again", file, servers=2) == 3
        assert elsewhere.open("again").wire == wire
        assert smb.train.load(elsewhere, "other", file, wire="float16") == 3
        assert elsewhere.open("other").wire == "float16"
        status = smb.train.status(elsewhere, "again")
        assert (status.round, status.scheme, status.lease) == (3, "diloco", 3)
        assert np.array_equal(_rounds(elsewhere, "again", range(3, 6)), expected)


def test_torn_and_foreign_files_are_not_loaded(client: smb.Client, tmp_path: Path) -> None:
    """One bit, one byte less, another kind of file: refused, and nothing is made. A save that fails leaves the file
    that was there."""
    _rounds(client, "run", range(2), start())
    file = tmp_path / "run.safetensors"
    smb.train.save(client, "run", file)
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[-77] ^= 1
    (tmp_path / "changed").write_bytes(changed)
    (tmp_path / "short").write_bytes(whole[:-4])
    (tmp_path / "text").write_bytes(b"no such thing")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "other").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "head").write_bytes(whole[:100])
    torn, foreign = "the file is incomplete", "this is not a saved training"
    reasons = {"changed": torn, "short": torn, "head": torn, "text": foreign, "empty": foreign, "other": foreign}
    for name, reason in reasons.items():
        with pytest.raises(smb.InvalidArgumentError, match=f"{name}: .*{reason}"):
            smb.train.load(client, "new", tmp_path / name)
    assert not [info.name for info in client.list() if info.name.startswith("new")]
    with pytest.raises(smb.NotFoundError):
        smb.train.save(client, "nothing", file)
    assert file.read_bytes() == whole
    assert sorted(each.name for each in tmp_path.iterdir() if "part" in each.name) == []


def test_it_is_of_one_round_while_the_training_goes_on(connect: Connect, tmp_path: Path) -> None:
    """Beside a worker that closes rounds as fast as it can each file has the weights of the round that it says."""
    values, seen, stop = start(), [start()], threading.Event()
    worker = smb.train.join(connect(), "run", values, BSP())

    def train() -> None:
        while not stop.is_set():
            values[:] += 1
            worker.step()
            seen.append(values.copy())

    thread = threading.Thread(target=train)
    thread.start()
    try:
        saver = connect()
        for number in range(5):
            file = tmp_path / str(number)
            at = smb.train.save(saver, "run", file)
            wait_for(lambda at=at: len(seen) > at, "the worker to have seen the round")  # type: ignore[misc]
            assert np.array_equal(load_file(file)["values"], seen[at])
    finally:
        stop.set()
        thread.join()
    worker.close()


def test_what_a_dead_closer_left_is_done_first(client: smb.Client, tmp_path: Path) -> None:
    """A round whose weights were being replaced when everybody died is saved as replaced."""
    _rounds(client, "run", range(2), start())
    group = groups.view(client, "run")
    word = group.table.get(0, t.ROUND)
    group.table.swap(0, t.ROUND, word, word | groups.BUILT)
    assert smb.train.save(client, "run", tmp_path / "run") == 3


def test_a_joined_model_goes_through_a_file(connect: Connect, tmp_path: Path) -> None:
    """Tensors by their names, running statistics too; a model joins what was loaded."""
    torch.manual_seed(1)
    models = [nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)) for _ in range(2)]
    client = connect()
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    with smb.torch.join(models[0], optimizer, "run", scheme="localsgd", every=1, client=client) as shared:
        models[0](torch.randn(8, 5)).square().sum().backward()
        optimizer.step()
        shared.worker.flush()
    file = tmp_path / "model.safetensors"
    smb.train.save(client, "run", file)
    found = {name: torch.from_numpy(array) for name, array in load_file(file).items()}
    assert found.keys() == smb.torch.shared_state_dict(client, "run").keys()
    models[1].load_state_dict(found)
    assert torch.equal(models[1][0].weight, models[0][0].weight)
    assert torch.equal(models[1][1].running_var, models[0][1].running_var)
    smb.train.delete(client, "run")
    smb.train.load(client, "run", file)
    fresh = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    with smb.torch.join(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), "run", client=client):
        assert torch.equal(fresh[2].weight, models[0][2].weight)
        assert torch.equal(fresh[1].running_var, models[0][1].running_var)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_joined_model_goes_through_distributed_checkpoint(connect: Connect, tmp_path: Path) -> None:
    """PyTorch's checkpoints of a joined model, and of what is shared, are what a plain one's are."""
    model = nn.Linear(5, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with smb.torch.join(model, optimizer, "run", scheme="localsgd", every=2, client=connect()) as shared:
        model(torch.randn(8, 5)).square().sum().backward()
        optimizer.step()  # this process's own is not the shared one now
        saved = {"own": model.state_dict(), "shared": shared.state_dict()}
        dcp.save(saved, checkpoint_id=tmp_path / "checkpoint")
        read = {key: {name: torch.zeros_like(each) for name, each in state.items()} for key, state in saved.items()}
        dcp.load(read, checkpoint_id=tmp_path / "checkpoint")
        assert torch.equal(read["own"]["weight"], model.weight)
        assert torch.equal(read["shared"]["weight"], shared.state_dict()["weight"])
        assert not torch.equal(read["shared"]["weight"], model.weight)


@pytest.mark.parametrize("scheme", ["bsp", "asp", "easgd", "diloco"])
def test_what_is_exported_is_exact(client: smb.Client, connect: Connect, scheme: str) -> None:
    """Final models went through int8 once, off by up to 7.5e-3: shared(), state_dict, close and files are exact."""
    model = nn.Linear(300, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"every": 1} if scheme in ("easgd", "diloco") else {}
    shared = smb.torch.join(model, optimizer, "run", scheme=scheme, client=client, wire="int8", **options)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    shared.worker.flush()
    exact = client.open("run").tensor("weight").read(wire="exact")
    assert np.array_equal(shared.state_dict()["weight"].numpy(), exact)
    assert np.array_equal(smb.torch.shared_state_dict(connect(), "run")["weight"].numpy(), exact)
    shared.close()
    assert np.array_equal(model.weight.detach().numpy(), exact)


_PLAIN: dict[str, Any] = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
_ADDING = [
    smb.train.BSP(),
    smb.train.LocalSGD(every=1),
    DiLoCo(**_PLAIN),
    smb.train.AsyncDiLoCo(**_PLAIN),
    smb.train.ASP(),
    smb.train.SSP(),
    smb.train.R2SP(),
]


# In so many steps small values exceed one rounding: without feedback they would stay at zero.
@pytest.mark.parametrize(("wire", "rounding", "steps"), [("int8", 8, 40), *([("int4", 160, 400)] if LONG else [])])
@pytest.mark.parametrize("scheme", _ADDING, ids=lambda scheme: str(scheme.NAME))
def test_error_feedback(client: smb.Client, scheme: smb.train.Scheme, wire: str, rounding: float, steps: int) -> None:
    """What rounding leaves out of one contribution goes along with the next: a value that each round hides beside a
    large one arrives in the end, and the sum of many differs by no more than one rounding."""
    values = np.zeros(COUNT, np.float32)
    with smb.train.join(client, "run", values, scheme, wire=wire) as worker:
        for _ in range(steps):
            values[0] += 1000.0  # an int8 block shows steps of 8 then, one of int4 of up to 160
            values[1:] += 1.0
            worker.step()
        error = worker.shared() - np.full(COUNT, steps, np.float32)
    assert abs(error[0] - 999 * steps) <= rounding
    assert abs(error[1:]).max() <= rounding
    assert abs(error[256:]).max() <= 0.01  # no large one beside them


def test_elastic_halves_are_equal_in_fewer_bits(client: smb.Client) -> None:
    """What the worker gives, rounded to int8, is what the shared model takes: their sum changes by steps alone."""
    values = start()
    total = 2.0 * values.astype(np.float64)
    with smb.train.join(client, "run", values, smb.train.SEASGD(alpha=0.3), wire="int8") as worker:
        for step in range(5):
            before = values.copy()
            local_step(values, 0, step)
            total += values.astype(np.float64) - before
            worker.step()
        worker.flush()
        assert np.allclose(values.astype(np.float64) + worker.shared(), total, atol=1e-5)


def test_save_and_load_by_commands(
    cluster: smb.LocalCluster, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`smb train save` and `load`; `smb snapshot` of a training says what to use instead."""
    monkeypatch.setenv("SMB_COORDINATOR", cluster.address)
    client = connect()
    weights, file = _rounds(client, "run", range(2), start()), tmp_path / "run"
    runner = CliRunner()
    refused = runner.invoke(app, ["snapshot", "run", str(file)])
    assert f"smb train save run {file}" in str(refused.exception)
    assert runner.invoke(app, ["train", "save", "run", str(file)]).exit_code == 0
    assert runner.invoke(app, ["train", "load", "copy", str(file)]).exit_code == 0
    assert np.array_equal(smb.train.shared(client, "copy"), weights)
    assert runner.invoke(app, ["train", "load", "fewer", str(file), "--wire", "int8"]).exit_code == 0
    assert smb.train.status(client, "fewer").wire == "int8"
    assert "int8" in runner.invoke(app, ["train", "stat", "fewer"]).output
    with pytest.raises(smb.InvalidArgumentError, match="unknown option fresh="):
        smb.train.load(client, "other", file, fresh=True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["save", "run", "no/run.safetensors"], "no: no such directory"),
        (["save", "run", "."], ".: this is a directory"),
        (["load", "copy", "no/run.safetensors"], "no/run.safetensors: No such file or directory"),
    ],
    ids=["save", "directory", "load"],
)
def test_a_path_that_is_not_there_is_told_in_a_line(
    client: smb.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    """By the command: a line that names the path, and exit code 1."""
    _rounds(client, "run", range(1), start())
    monkeypatch.setenv("SMB_COORDINATOR", client.address)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["smb", "train", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    assert capsys.readouterr().err == f"smb: {told}\n"


@pytest.mark.parametrize(("scheme", "copies"), [(DiLoCo(every=1), 1.0), (smb.train.EASGD(every=1), 1.0)])
def test_host_memory_of_a_scheme(connect: Connect, monkeypatch: pytest.MonkeyPatch, scheme: Any, copies: float) -> None:
    """Beside the values: one array of their size, and pieces of a fixed size, while it joins, exchanges and leaves."""
    block = 1 << 16
    monkeypatch.setattr(parameters, "BLOCK_ELEMENTS", block)
    client, values = connect(), np.zeros(3 << 20, np.float32)
    tracemalloc.start()
    try:
        with smb.train.join(client, "run", values, scheme) as worker:
            for _ in range(2):
                values += 1
                worker.step()
            worker.close(load=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= copies * values.nbytes + 4 * 4 * block + (1 << 20)


def test_a_saved_file_goes_into_a_model_without_us(client: smb.Client, tmp_path: Path) -> None:
    """The lines of docs/training.md, as they stand, load a saved training's weights into a plain model."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with smb.torch.join(model, optimizer, "run", client=client, scheme="diloco", every=1):
        model(torch.randn(8, 3, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        optimizer.step()
    smb.train.save(client, "run", tmp_path / "run.safetensors")
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    lines = page.split("A test runs this block as it stands. -->\n```python\n")[1].split("```")[0]
    plain = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    exec(lines.replace("run.safetensors", str(tmp_path / "run.safetensors")), {"model": plain})
    assert torch.equal(plain[0].weight, model[0].weight)
    assert torch.equal(plain[1].running_mean, model[1].running_mean)
