"""torch.distributed.checkpoint on buffers, with torch's own library and processes: what is loaded is what was saved."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import smb
import smb.torch.checkpoint
from smb.torch import checkpoint
from tests.fault.long import LIMIT_S, seed
from tests.support import forks
from tests.support.daemons import tidy, wait_for

pytestmark = [
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=2, capacity="160MiB") as running:
        yield running


@pytest.fixture
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with tidy(cluster, timeout=30) as connected:
        yield connected


@pytest.fixture
def run_ranks(client: smb.Client, tmp_path: Path, context: Any) -> Callable[[str], str]:
    """Return what gives what ranks print: see tests/support/checkpoints.py."""

    def run(phases: str) -> str:
        command = [sys.executable, "-m", "tests.support.checkpoints", phases, str(tmp_path / "store")]
        command += [client.address, "run/ckpt", str(seed() % 1000)]
        with Path("/dev/null").open() as nothing, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            program = forks.launch(context, command, [file.fileno() for file in (nothing, out, err)], os.environ)
            try:
                code = program.wait(100)
            finally:
                program.kill()
                program.wait()
            out.seek(0)
            err.seek(0)
            assert code == 0, err.read().decode()
            return out.read().decode()

    return run


def names(client: smb.Client) -> list[str]:
    return [info.name for info in client.list()]


def load(client: smb.Client, state: dict[str, Any], name: str = "c") -> None:
    dcp.load(state, storage_reader=smb.torch.checkpoint.Reader(client, name))


def save(client: smb.Client, state: dict[str, Any], name: str = "c") -> None:
    dcp.save(state, storage_writer=smb.torch.checkpoint.Writer(client, name))


def failure(error: pytest.ExceptionInfo[dcp.CheckpointException]) -> BaseException:
    return error.value.failures[0][0]


AT_NIGHT = pytest.mark.skipif(not os.environ.get("SMB_LONG"), reason="more ranks; SMB_LONG=1 runs it")


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param("save:1,load:4,load:2", marks=AT_NIGHT),
        pytest.param("save:4,load:2,load:1", marks=AT_NIGHT),
        "save:2,load:1",
        "async:2,load:2",
    ],
)
def test_other_ranks_load_what_some_saved(client: smb.Client, run_ranks: Callable[[str], str], phases: str) -> None:
    """A model and its AdamW, sharded by rows and columns, are equal to the last bit on another number of ranks; an
    asynchronous save is of the values at its call."""
    told = run_ranks(phases).split("\n")[:-1]
    assert len(told) == sum(int(phase[-1]) for phase in phases.split(",") if "load" in phase)
    assert all(int(line.split()[1]) > 7_000_000 for line in told), told
    assert len(names(client)) == 2


def test_a_killed_rank_leaves_the_former_checkpoint(client: smb.Client, run_ranks: Callable[[str], str]) -> None:
    """SIGKILL in the middle of a save over another one: that is whole, and the next save takes the rest away."""
    save(client, {"x": torch.arange(1000)}, "run/ckpt")
    run_ranks("kill:2")
    assert len(names(client)) == 3, "nothing was half written: nothing was tested"
    load(client, state := {"x": torch.zeros(1000, dtype=torch.int64)}, "run/ckpt")
    assert torch.equal(state["x"], torch.arange(1000))
    save(client, {"x": torch.arange(1000) + 1}, "run/ckpt")
    assert len(names(client)) == 2
    load(client, state, "run/ckpt")
    assert torch.equal(state["x"], torch.arange(1000) + 1)


def test_all_dtypes_and_shapes(client: smb.Client) -> None:
    """Elements of any kind, empty tensors, single elements, transposed ones, objects are as they were; then a smaller
    checkpoint takes the place."""
    dtypes = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64,
              torch.float8_e4m3fn)  # fmt: skip
    state: dict[str, Any] = {
        f"t{at}": torch.randint(0, 2, (3, 5), dtype=torch.uint8).to(dtype) for at, dtype in enumerate(dtypes)
    }
    state |= {"empty": torch.empty(0, 4), "one": torch.tensor(2.5), "turned": torch.randn(6, 4).t()}
    state["object"] = {"deep": [1, 2.5, None, "x"], "flag": True}
    save(client, state)
    other = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in state.items()}
    other["object"] = {"deep": [0, 0.0, None, ""], "flag": False}
    load(client, other)
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert other[key].dtype == value.dtype
            assert torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (other[key], value)))
    assert other["object"] == state["object"]
    save(client, {"one": torch.tensor(1.0)})
    load(client, other_one := {"one": torch.tensor(0.0)})
    assert other_one["one"] == 1


def test_what_is_no_checkpoint_or_not_safe_is_refused(client: smb.Client) -> None:
    """Nothing there; a buffer that is none; a pickle in the place of an object, which is not run, neither when it is
    saved nor when it is loaded; a save that fails leaves the former one."""
    reader = smb.torch.checkpoint.Reader(client, "nowhere")
    for _ in range(2):
        with pytest.raises(dcp.CheckpointException, match='no buffer "nowhere"') as missing:
            dcp.load({"x": torch.zeros(1)}, storage_reader=reader)
        assert isinstance(failure(missing), smb.NotFoundError)
    with pytest.raises(smb.NotFoundError, match='no buffer "nowhere"'):
        reader.read_metadata()
    client.create("plain", 10)
    with pytest.raises(dcp.CheckpointException, match="not a checkpoint") as plain:
        load(client, {"x": torch.zeros(1)}, "plain")
    assert isinstance(failure(plain), smb.InvalidArgumentError)
    save(client, {"x": torch.ones(1)}, "nowhere")
    dcp.load(late := {"x": torch.zeros(1)}, storage_reader=reader)
    assert late["x"] == 1
    client.delete("plain")
    smb.torch.checkpoint.delete(client, "nowhere")
    save(client, {"x": "before"})
    with pytest.raises(dcp.CheckpointException, match="weights_only"):
        save(client, {"x": _Boom()})
    state = {"x": ""}
    load(client, state)
    assert state == {"x": "before"}
    evil = io.BytesIO()
    torch.save(_Boom(), evil)
    index = client.open("c")
    mark = index.metadata["smb.checkpoint"]
    text = index.read()[: mark["json"]].tobytes().replace(b'"x":[0,', b'"x":[0,%d],"y":[0,' % len(evil.getvalue()))
    forged = np.frombuffer(text + evil.getvalue(), np.uint8)
    metadata = {"smb.checkpoint": {"data": mark["data"], "json": len(text)}}
    client.create("forged", forged.size, "uint8", metadata=metadata).write(forged)
    with pytest.raises(dcp.CheckpointException, match="weights_only"):
        load(client, {"x": ""}, "forged")
    assert _Boom.ran == 0


class _Boom:
    ran = 0

    def __reduce__(self) -> Any:
        return _ran, ()


def _ran() -> None:
    _Boom.ran += 1


def test_replaced_while_it_is_loaded(client: smb.Client) -> None:
    """A reader that has the index of a checkpoint which another one replaced gets an error and no mix; the next load
    works."""
    save(client, {"x": torch.ones(5)})

    class Late(smb.torch.checkpoint.Reader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            save(client, {"x": torch.full((5,), 2.0)})
            return super().read_data(plan, planner)

    state = {"x": torch.zeros(5)}
    with pytest.raises(dcp.CheckpointException, match="load again"):
        dcp.load(state, storage_reader=Late(client, "c"))
    load(client, state)
    assert state["x"].tolist() == [2.0] * 5
    smb.torch.checkpoint.delete(client, "c")
    assert names(client) == []


def test_no_room_for_it(client: smb.Client) -> None:
    """A save that does not fit says so, and the former one is whole."""
    save(client, {"x": torch.ones(5)})
    with pytest.raises(dcp.CheckpointException) as full:
        save(client, {"x": torch.empty(400 << 20, dtype=torch.uint8)})
    assert isinstance(failure(full), smb.OutOfMemoryError)
    load(client, state := {"x": torch.zeros(5)})
    assert state["x"].tolist() == [1.0] * 5


def test_a_load_that_fails_leaves_no_read_behind(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ended later wrote over tensors that the caller had gone on with."""
    save(client, {name: torch.ones(4) for name in "abcd"})
    reads: list[Future[Any]] = []
    late = Future[Any]()

    def read_async(*_: object, **__: object) -> Future[Any]:
        reads.append(Future[Any]() if not reads else late)
        if len(reads) == 1:
            reads[0].set_exception(smb.UnavailableError("its server is away"))
        elif len(reads) == 3:
            threading.Thread(target=lambda: (wait_for(lambda: waited, "the wait"), late.set_result(None))).start()
        return reads[-1]

    waited: list[object] = []
    wait = checkpoint.wait

    def waits(futures: Any) -> Any:
        waited.append(futures)
        return wait(futures)

    monkeypatch.setattr(checkpoint, "wait", waits)
    monkeypatch.setattr(smb.Buffer, "read_async", read_async)
    with pytest.raises(dcp.api.CheckpointException):
        load(client, {name: torch.zeros(4) for name in "abcd"})
    assert late.done()


def test_an_index_that_another_client_wrote_is_refused(client: smb.Client) -> None:
    """Before it is parsed where it has too many parts; what it says of places has to be in it."""
    mark = {"data": "c.data", "json": 0}
    tensor = {"dtype": "float32", "shape": [4], "pieces": [[[0], [4], 0]]}
    good = {"format": 1, "tensors": {"a": tensor}, "objects": {"o": [0, 3]}, "paths": {}}
    cases = {
        json.dumps(good): "",
        "[" + "[]," * (1 << 21) + "0]": "it has 4194305 commas and opening brackets, but may have at most 4194304",
        "[" * 1000_000: "it is nested too deep",
        json.dumps(good | {"objects": {"o": [-1, 3]}}): "'o' lies at (-1, 3) of 3 bytes",
        json.dumps(good | {"objects": {"o": [0, 1 << 40]}}): "'o' lies at (0, 1099511627776) of 3 bytes",
        json.dumps(good | {"tensors": {"a": tensor | {"dtype": "load"}}}): "'a' has the dtype 'load'",
        json.dumps(good | {"tensors": {"a": tensor | {"shape": [10**30]}}}): "'a' has the extents [1000",
        json.dumps(good | {"tensors": {"a": tensor | {"pieces": [[[0], [-4], 0]]}}}): "'a' has the extents [-4]",
        json.dumps(good | {"tensors": {"a": tensor | {"pieces": [[[0, 0], [4], 0]]}}}): "a piece of 'a' lies at",
        "[]": "can't be read", "5": "can't be read", '{"format": NaN}': "it has NaN",
    }  # fmt: skip
    for text, why in cases.items():
        content = np.frombuffer(text.encode() + b"abc", np.uint8)
        for nbytes in (len(text), -1, content.size + 1) if not why else (len(text),):
            client.create("c", content.size, "uint8", metadata={checkpoint.METADATA: mark | {"json": nbytes}})
            client.open("c").write(content)
            if nbytes != len(text):
                with pytest.raises(smb.Error, match=f"its JSON has {nbytes} of"):
                    checkpoint._read_index(client, "c")
            elif why:
                with pytest.raises(smb.Error, match=re.escape(why)) as caught:
                    checkpoint._read_index(client, "c")
                assert len(str(caught.value)) < 500
            else:
                assert checkpoint._read_index(client, "c").metadata.state_dict_metadata.keys() == {"a", "o"}
            client.delete("c")


def test_an_object_that_would_unpack_to_more_is_refused() -> None:
    """torch.save stores the members of its archive as they are; its loader would unpack others, to any size."""
    stream = io.BytesIO()
    torch.save({"a": torch.zeros(1 << 20)}, stream)
    assert len(checkpoint._safe_bytes("load", stream.getvalue())) >= 4 << 20
    packed = io.BytesIO()
    with zipfile.ZipFile(stream) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as smaller:
        for member in archive.infolist():
            smaller.writestr(member.filename, archive.read(member))
    assert len(packed.getvalue()) < 1 << 16
    with pytest.raises(smb.InvalidArgumentError, match="its archive has compressed members"):
        checkpoint._safe_bytes("load", packed.getvalue())
