"""Training data from buffers: rows and tar files, by DataLoader's workers, forked and spawned.

A fork of the server of forks gets its data set as a spawned process does, by pickle, and finds PyTorch imported.
"""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import smb
from smb.torch.data import Rows, Shards
from tests.conftest import Connect
from tests.fault.long import LONG
from tests.support.transports import FAR

ROWS, WIDTH, FILES, IN_A_FILE = 100, 16, 6, 5
EACH_START = pytest.mark.parametrize("how", ["fork", "forkserver", *(["spawn"] if LONG else [])])


@pytest.fixture
def digits(connect: Connect) -> smb.Client:
    """Images in bfloat16 over three servers, and their labels."""
    client = connect("shm")
    images = client.create("digits/images", (ROWS, WIDTH), "bfloat16", stripe="4KiB")
    images.write(torch.arange(ROWS * WIDTH).remainder(256).bfloat16().view(ROWS, WIDTH))
    client.create("digits/labels", (ROWS,), "int64").write(np.arange(ROWS))
    return client


def with_process(row: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, int, int]:
    """A transform: the label, whether the image fits to it, and the process."""
    image, label = row
    fits = torch.equal(image.float(), (torch.arange(WIDTH) + int(label) * WIDTH).remainder(256).float())
    return label, int(fits), os.getpid()


@EACH_START
@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "copied"])
def test_workers_share_one_copy_of_rows(
    digits: smb.Client, cluster: smb.LocalCluster, monkeypatch: pytest.MonkeyPatch, how: str, mapped: bool
) -> None:
    """Each row comes once an epoch, from two processes; mapped ones show later changes, copied ones do not."""
    if not mapped:
        monkeypatch.setenv("SMB_TRANSPORT", FAR)
    samples = Rows("digits/images", "digits/labels", coordinator=cluster.address, transform=with_process)
    assert samples.mapped == (("digits/images", "digits/labels") if mapped else ())
    assert len(samples) == ROWS
    loader = DataLoader(
        samples, batch_size=7, shuffle=True, num_workers=2, multiprocessing_context=how, persistent_workers=True,
        timeout=60,
    )  # fmt: skip
    for epoch in range(2):
        batches = list(loader)
        labels = torch.cat([batch[0] for batch in batches]).tolist()
        assert sorted(labels) == list(range(ROWS))
        assert all(torch.cat([batch[1] for batch in batches]).tolist()), f"epoch {epoch}"
        processes = set(torch.cat([batch[2] for batch in batches]).tolist())
        assert len(processes) == 2
        assert os.getpid() not in processes
    digits.open("digits/labels").write(np.full(ROWS, 7))
    seen = set(torch.cat([batch[0] for batch in loader]).tolist())
    assert seen == ({7} if mapped else set(range(ROWS)))
    del loader


def test_rows_are_copies_and_what_makes_no_sense_is_refused(digits: smb.Client, cluster: smb.LocalCluster) -> None:
    """A sample that is changed changes nothing; wrong names, shapes and indices, and a replaced buffer raise."""
    samples = Rows("digits/images", "digits/labels", coordinator=cluster.address)
    assert isinstance(samples[3], tuple)
    image, label = samples[-1]
    assert label == ROWS - 1
    image.fill_(0)
    samples.__getitems__([0, 1])[1][0].fill_(9)
    assert samples[-1][0].float().sum() > 0
    assert not (samples[1][0] == 9).all()
    for index in (ROWS, -ROWS - 1):
        with pytest.raises(IndexError, match=str(ROWS)):
            samples[index]
    digits.create("digits/few", (3, 2))
    digits.create("digits/scalar", ())
    digits.create("digits/none", (0, 2), "float16")
    for names in (("digits/images", "digits/few"), ("digits/scalar",)):
        with pytest.raises(smb.InvalidArgumentError, match="the same number of rows"):
            Rows(*names, coordinator=cluster.address)
    with pytest.raises(smb.InvalidArgumentError, match="names"):
        Rows(coordinator=cluster.address)
    with pytest.raises(smb.NotFoundError):
        Rows("digits/nothing", coordinator=cluster.address)
    assert len(Rows("digits/none", coordinator=cluster.address)) == 0
    other = pickle.loads(pickle.dumps(samples))
    digits.delete("digits/labels")
    digits.create("digits/labels", (ROWS,), "int64")
    with pytest.raises(smb.Error, match="was replaced"):
        other[0]


def test_rows_of_a_buffer_with_versions_are_of_the_latest(connect: Connect, cluster: smb.LocalCluster) -> None:
    """Such a buffer cannot be mapped: the data set has one version as a whole."""
    client = connect("shm")
    buffer = client.create("published", (4, 2), versions=2)
    for version in (1, 2):
        buffer.publish(np.full((4, 2), version, np.float32))
    samples = Rows("published", coordinator=cluster.address)
    buffer.publish(np.full((4, 2), 3, np.float32))
    assert samples.mapped == ()
    assert samples[3][0].tolist() == [2, 2]


# ---- tar files


def write_shards(folder: Path) -> None:
    """FILES tar files of IN_A_FILE samples with a text and a class each."""
    for number in range(FILES):
        with tarfile.open(folder / f"train-{number:03}.tar", "w") as archive:
            for at in range(IN_A_FILE):
                for kind, content in (("cls", f"{number * IN_A_FILE + at}"), ("seg.txt", f"{number} {at}")):
                    member = tarfile.TarInfo(f"part.a/{number:03}{at:02}.{kind}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content.encode()))


@pytest.fixture
def shards(client: smb.Client, cluster: smb.LocalCluster, tmp_path: Path) -> str:
    """The tar files in the cluster; returns their pattern."""
    write_shards(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        with smb.open_file(f"shards/{path.name}", "w", client=client) as file:
            file.write(path.read_bytes())
    return f"softmem://{cluster.address}/shards/train-{{000..{FILES - 1:03}}}.tar"


def classes(samples: Any) -> list[int]:
    return [int(sample["cls"]) for sample in samples]


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def test_samples_are_those_of_local_files(shards: str, tmp_path: Path) -> None:
    """From the cluster, and from the files from which they were written: keys, kinds and bytes."""
    found = list(Shards(shards))
    assert found == list(Shards(str(tmp_path / f"train-{{000..{FILES - 1:03}}}.tar")))
    assert found == list(Shards(shards, prefetch=0))
    assert found[IN_A_FILE + 2] == {"__key__": "part.a/00102", "cls": b"7", "seg.txt": b"1 2"}
    assert classes(found) == list(range(FILES * IN_A_FILE))


def test_each_epoch_has_another_order_that_the_seed_decides(shards: str) -> None:
    """Files are shuffled as wholes, alike in every process; parts share them out; an epoch may be given."""
    samples, again = Shards(shards, seed=3), Shards(shards, seed=3)
    epochs = [classes(samples) for _ in range(3)]
    assert all(sorted(epoch) == list(range(FILES * IN_A_FILE)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again.set_epoch(2)
    assert classes(again) == epochs[2]
    halves = [classes(Shards(shards, seed=3, part=(index, 2))) for index in range(2)]
    assert sorted(halves[0] + halves[1]) == list(range(FILES * IN_A_FILE))


def test_the_next_files_are_read_ahead_and_handed_to_the_next_epoch(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is read twice in an epoch, and an epoch begins with what the one before has read; what is given up in
    the middle is dropped.
    """
    read: list[str] = []
    content = smb.torch.data.shards._content

    def counted(url: str) -> bytes:
        read.append(url[-7:-4])
        return content(url)

    monkeypatch.setattr("smb.torch.data.shards._content", counted)
    samples = Shards(shards, prefetch=2)
    assert len(classes(samples)) == FILES * IN_A_FILE
    samples._ahead._thread.submit(lambda: None).result(30)  # type: ignore[union-attr] # until it has nothing to do
    names = [f"{number:03}" for number in range(FILES)]
    assert read == [*names, "000", "001"]
    iterator = iter(samples)
    assert number_of(next(iterator)) == 0
    samples._ahead._thread.submit(lambda: None).result(30)  # type: ignore[union-attr]
    assert read == [*names, "000", "001", "002"]
    iterator.close()  # type: ignore[attr-defined]
    assert classes(samples)[0] == 0
    assert read.count("003") == 2


@EACH_START
def test_workers_share_out_the_files(shards: str, how: str) -> None:
    """Two workers read each file once an epoch, for two epochs of the same workers, in other orders."""
    loader = DataLoader(
        Shards(shards, seed=1, transform=number_of), batch_size=4, num_workers=2, multiprocessing_context=how,
        persistent_workers=True, timeout=60,
    )  # fmt: skip
    epochs = [torch.cat(list(loader)).tolist() for _ in range(2)]
    assert all(sorted(epoch) == list(range(FILES * IN_A_FILE)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_shards_that_make_no_sense_are_refused(shards: str, client: smb.Client, cluster: smb.LocalCluster) -> None:
    """Arguments, a range, a file that is not there, and one that is not a tar file: each is named."""
    for arguments, about in (
        ({"urls": []}, "urls"),
        ({"urls": "a-{3..1}.tar"}, "range"),
        ({"urls": "a-{0..9999999}.tar"}, "range"),
        ({"urls": "a", "prefetch": -1}, "prefetch"),
        ({"urls": "a", "prefetch": True}, "prefetch"),
        ({"urls": "a", "part": (2, 2)}, "part"),
    ):
        with pytest.raises(smb.InvalidArgumentError, match=about):
            Shards(**arguments)
    with pytest.raises(FileNotFoundError, match="nothing"):
        list(Shards(f"softmem://{cluster.address}/shards/nothing.tar"))
    client.create("shards/noise", (2000,), "uint8").fill(7)
    with pytest.raises(OSError, match="shards/noise is not a tar file"):
        list(Shards(f"softmem://{cluster.address}/shards/noise"))
