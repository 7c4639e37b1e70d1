"""Published states as directories, in a real mount and by fsspec: what loads a model from a directory needs no code."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file

import smb
import smb.torch
from tests.fault.long import LIMIT_S
from tests.support.daemons import tidy, wait_for
from tests.support.mounts import end_mount, names, needs_fuse, shown, start_mount, unmount

pytestmark = pytest.mark.timeout(LIMIT_S)
BOTH = pytest.mark.parametrize("deltas", [0, 4])


def state_of(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300, 40), value, dtype=torch.bfloat16), "n": torch.tensor(value)}


def value_of(state: dict[str, torch.Tensor]) -> int:
    """The one value that all of a state has: a mix of two generations has none."""
    value = int(state["n"])
    assert bool((state["w"] == value).all())
    return value


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=2, capacity="96MiB") as running:
        yield running


@pytest.fixture
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with tidy(cluster, timeout=60) as connected:
        yield connected


@pytest.fixture(scope="module")
def mounted(cluster: smb.LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("mount") / "files"
    process = start_mount(cluster, directory)
    yield directory
    unmount(directory)
    end_mount(process, directory)


@pytest.fixture
def box(mounted: Path, client: smb.Client) -> Path:
    """The mount, with nothing in it."""
    wait_for(lambda: names(mounted) == [], "end of the last test's files")
    return mounted


@pytest.fixture
def fs(cluster: smb.LocalCluster) -> Any:
    return fsspec.filesystem("softmem", coordinator=cluster.address, skip_instance_cache=True)


# More than 5 s: here and in the mount PyTorch is imported, and here transformers.
@needs_fuse
def test_transformers_loads_what_is_mounted(client: smb.Client, box: Path) -> None:
    """from_pretrained of policy/latest, with the config.json that the trainer put there, after each of two steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    trained = LlamaForCausalLM(config)
    files = {"config.json": trained.config.to_json_string().encode()}
    publisher = smb.torch.Publisher(client, "run/policy", trained, deltas=4, files=files)
    tokens = torch.arange(10).reshape(1, -1)
    for generation in (1, 2):
        with torch.no_grad():
            trained.model.norm.weight.mul_(1.5)
        assert publisher.publish() == generation
        directory = shown(box / "run/policy") / "latest"
        loaded = LlamaForCausalLM.from_pretrained(directory)
        assert torch.equal(loaded(tokens).logits, trained(tokens).logits)
        assert directory.readlink() == Path(str(generation))
    first = LlamaForCausalLM.from_pretrained(box / "run/policy/1")
    assert torch.equal(first.model.norm.weight * 1.5, trained.model.norm.weight)


@needs_fuse
@BOTH
def test_an_open_generation_stays_whole(client: smb.Client, box: Path, deltas: int) -> None:
    """A reader with a mapped file, while more generations are published than are kept; others get the latest."""
    publisher = smb.torch.Publisher(client, "policy", state_of(1), deltas=deltas)
    publisher.publish()
    latest = shown(box / "policy") / "latest/model.safetensors"
    with safe_open(str(latest), "pt") as held:
        for number in range(2, 12):
            assert publisher.publish(state_of(number)) == number
            assert value_of(load_file(latest)) == number
        assert value_of({name: held.get_tensor(name) for name in held.keys()}) == 1  # noqa: SIM118
        listed = names(box / "policy")
        assert {"1", "11", "latest"} <= set(listed)  # 1 is open here
        assert "2" not in listed
        assert value_of(load_file(box / "policy/1/model.safetensors")) == 1
    wait_for(lambda: "1" not in names(box / "policy"), "generation 1 to be gone")
    with pytest.raises(FileNotFoundError):
        (box / "policy/1/model.safetensors").open("rb")
    for number in names(box / "policy"):
        if number != "latest":
            assert value_of(load_file(box / "policy" / number / "model.safetensors")) == int(number)


@needs_fuse
def test_what_is_published_can_not_be_changed_by_files(client: smb.Client, box: Path) -> None:
    """Names of generations are refused, and all changes below them; files beside the state are ordinary files."""
    smb.torch.publish(client, "policy", state_of(1))
    policy = shown(box / "policy")
    (policy / "config.json").write_text("{}")
    assert names(policy / "latest") == names(policy / "1") == ["config.json", "model.safetensors"]
    assert (policy / "1/config.json").read_text() == "{}"
    assert names(box) == ["policy", "policy.safetensors"]
    assert not os.access(policy / "1/model.safetensors", os.W_OK) or os.geteuid() == 0
    refused: list[tuple[Callable[[], Any], int]] = [
        (lambda: (policy / "1/new").write_text(""), errno.EACCES),
        (lambda: (policy / "latest/model.safetensors").write_bytes(b"x"), errno.EACCES),
        (lambda: (policy / "1/config.json").write_text("x"), errno.EACCES),
        (lambda: (policy / "1/model.safetensors").unlink(), errno.EACCES),
        (lambda: (policy / "7").mkdir(), errno.EACCES),
        (lambda: (policy / "7").write_text(""), errno.EACCES),
        (lambda: (policy / "config.json").rename(policy / "8"), errno.EACCES),
        (lambda: (policy / "1/model.safetensors").rename(policy / "x"), errno.EACCES),
        (lambda: policy.rename(box / "other"), errno.EACCES),
        (lambda: (policy / "1").rmdir(), errno.ENOTEMPTY),
        (lambda: policy.rmdir(), errno.ENOTEMPTY),
        (lambda: (policy / "2/model.safetensors").read_bytes(), errno.ENOENT),
        (lambda: (policy / "1/nothing").read_bytes(), errno.ENOENT),
        (lambda: (policy / "01").stat(), errno.ENOENT),
    ]
    for call, number in refused:
        with pytest.raises(OSError, match=r".") as caught:
            call()
        assert caught.value.errno == number, caught.value
    assert value_of(load_file(policy / "latest/model.safetensors")) == 1
    (policy / "config.json").unlink()
    client.delete("policy")
    wait_for(lambda: names(policy) == [], "the state to be gone")

    def is_removed() -> bool:
        with suppress(OSError):  # the mount keeps what it has listed for a moment
            policy.rmdir()  # kept until then, as any directory whose last file was removed
        return "policy" not in names(box)

    wait_for(is_removed, "an empty directory")
    wait_for(lambda: names(box) == [], "the state's file to be gone")


@BOTH
def test_fsspec_reads_generations(client: smb.Client, cluster: smb.LocalCluster, fs: Any, deltas: int) -> None:
    """Names, bytes, copies to a local directory, and safe_open of what fsspec has fetched."""
    publisher = smb.torch.Publisher(client, "run/policy", state_of(1), deltas=deltas, files={"config.json": b"{}"})
    assert fs.isdir("run/policy")
    assert not fs.exists("run/policy/latest")
    for number in range(1, 4):
        publisher.publish(state_of(number))
    assert fs.ls("run/policy", detail=False) == [
        f"run/policy/{name}" for name in ("1", "2", "3", "config.json", "latest")
    ]
    assert fs.find("run/policy/2") == ["run/policy/2/config.json", "run/policy/2/model.safetensors"]
    for name, number in (("1", 1), ("3", 3), ("latest", 3)):
        path = f"run/policy/{name}/model.safetensors"
        assert value_of(load(fs.cat_file(path))) == number
        assert fs.info(path)["size"] == len(fs.cat_file(path))
    local = fsspec.open_local(f"simplecache::softmem://{cluster.address}/run/policy/latest/model.safetensors")
    with safe_open(local, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert value_of({name: file.get_tensor(name) for name in file.keys()}) == 3  # noqa: SIM118
    with fs.open("run/policy/latest/model.safetensors") as held:
        head = held.read(100)
        for number in range(4, 10):
            publisher.publish(state_of(number))
        assert value_of(load(head + held.read())) == 3
        assert held.path == "run/policy/3/model.safetensors"
    for call in (
        lambda: fs.open("run/policy/latest/x", "wb").close(),
        lambda: fs.rm_file("run/policy/9/model.safetensors"),
        lambda: fs.pipe_file("run/policy/9/model.safetensors", b""),
    ):
        with pytest.raises(PermissionError, match=r"belongs to a published state.*smb rm"):
            call()
    wait_for(lambda: not fs.exists("run/policy/2"), "generation 2 to be gone")
    with pytest.raises(FileNotFoundError, match=r"generation 2 of 'run/policy': it was overwritten"):
        fs.info("run/policy/2")
    with smb.open_file("run/policy/latest/config.json", client=client) as config:
        assert config.read() == b"{}"


@BOTH
def test_listing_while_a_trainer_publishes(client: smb.Client, fs: Any, connect_again: Any, deltas: int) -> None:
    """Each listing has the latest and only generations that there were; each file that opens is of one generation."""
    publisher = smb.torch.Publisher(connect_again(), "policy", state_of(1), deltas=deltas)
    publisher.publish()
    more = threading.Semaphore(2)  # the trainer is up to two generations ahead of the reader, which reads all the time

    def train() -> None:
        for number in range(2, 32):
            assert more.acquire(timeout=60)
            assert publisher.publish(state_of(number)) == number

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        seen: set[int] = set()
        for _ in range(30):
            before = publisher.last
            listed = fs.ls("policy", detail=False)
            numbers = sorted(int(name.rpartition("/")[2]) for name in listed if not name.endswith("latest"))
            assert "policy/latest" in listed
            assert before <= numbers[-1] <= publisher.last + 1
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            seen.add(value_of(load(fs.cat_file("policy/latest/model.safetensors"))))
            more.release()
        assert len(seen) > 1
    finally:
        for _ in range(30):
            more.release()
        trainer.join()


@pytest.fixture
def connect_again(cluster: smb.LocalCluster) -> Iterator[Callable[[], smb.Client]]:
    made: list[smb.Client] = []

    def make() -> smb.Client:
        made.append(smb.connect(cluster.address))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_names_of_others_come_first(client: smb.Client, fs: Any) -> None:
    """A buffer under the name of a generation hides it, as any buffer hides a form of another one."""
    publisher = smb.torch.Publisher(client, "policy", state_of(1))
    for number in (1, 2):
        publisher.publish(state_of(number))
    client.create("policy/1", 3, "uint8").write(b"abc")
    assert fs.cat_file("policy/1") == b"abc"
    assert value_of(load(fs.cat_file("policy/2/model.safetensors"))) == 2
    plain = client.create("plain", 3, "uint8", versions=3)
    plain.publish(b"abc")
    assert fs.cat_file("plain") == b"abc"  # no published state: a file, as before
    with pytest.raises(NotADirectoryError):
        fs.cat_file("plain/latest/model.safetensors")
    for name in ("latest", "7", "model.safetensors", "a/b", ""):
        with pytest.raises(smb.InvalidArgumentError, match="files= has"):
            smb.torch.Publisher(client, "other", state_of(1), files={name: b""})
    with pytest.raises(FileNotFoundError):
        smb.torch.Publisher(client, "other", state_of(1), files={"config.json": "/nowhere"})
