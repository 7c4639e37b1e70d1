"""Training data from buffers: rows of two arrays and samples of tar files, loaded by two workers beside local files.

    python examples/data_loading.py

Prints samples a second of the second epoch, each beside the same DataLoader over files in the page cache.
"""

import io
import tarfile
import tempfile
import time
from pathlib import Path

import fsspec
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import smb
from smb.torch.data import Rows, Shards

SAMPLES, PIXELS, FILES, BATCH, WORKERS = 20_000, 784, 8, 250, 2


class LocalRows(Dataset):
    """The rows of two .npy files."""

    def __init__(self, images: Path, labels: Path) -> None:
        self.paths = images, labels
        self.arrays = tuple(torch.from_numpy(np.load(path, mmap_mode="c")) for path in self.paths)

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(array[index] for array in self.arrays)

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, ...]]:
        rows = torch.as_tensor(indices)
        return list(zip(*(array[rows] for array in self.arrays), strict=True))


def decode(sample: dict) -> tuple[torch.Tensor, int]:
    """Return the image and the class of a sample of the tar files."""
    return torch.frombuffer(bytearray(sample["img"]), dtype=torch.uint8), int(sample["cls"])


def write_tar(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write samples of an image and a class."""
    with tarfile.open(path, "w") as archive:
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            for kind, content in (("img", image.tobytes()), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number:06}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def rate(samples: Dataset, **options: object) -> float:
    """Return samples a second in the second epoch, once the workers run."""
    loader = DataLoader(samples, BATCH, num_workers=WORKERS, persistent_workers=True, **options)
    for epoch in range(2):
        start, count = time.perf_counter(), 0
        for _images, labels in loader:
            count += len(labels)
        assert count == SAMPLES, f"epoch {epoch} had {count} samples"
    return count / (time.perf_counter() - start)


def main() -> None:
    """Write the data into the box and into files, and load it from both."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (SAMPLES, PIXELS), np.uint8)
    labels = random.integers(0, 10, SAMPLES)
    with (
        tempfile.TemporaryDirectory() as folder,
        smb.LocalCluster(servers=2, capacity="128MiB") as cluster,
        smb.connect(cluster.address) as client,
    ):
        local, box = Path(folder), f"softmem://{cluster.address}/data"
        for name, array in (("images", images), ("labels", labels)):
            np.save(local / f"{name}.npy", array)
            client.create(f"data/{name}", array.shape, array.dtype).write(array)
        part = SAMPLES // FILES
        for number in range(FILES):
            path = local / f"train-{number}.tar"
            write_tar(path, images[number * part :][:part], labels[number * part :][:part])
            with fsspec.open(f"{box}/{path.name}", "wb") as file:
                file.write(path.read_bytes())
        pattern = f"train-{{0..{FILES - 1}}}.tar"
        shared = Rows("data/images", "data/labels", coordinator=cluster.address)
        print(f"mapped by all workers: {', '.join(shared.mapped)}")
        for what, ours, files in (
            ("rows, shuffled", (shared, True), (LocalRows(local / "images.npy", local / "labels.npy"), True)),
            (
                "tar files",
                (Shards(f"{box}/{pattern}", seed=0, transform=decode), None),
                (Shards(f"{local}/{pattern}", seed=0, transform=decode), None),
            ),
        ):
            found, beside = (rate(samples, shuffle=shuffle) for samples, shuffle in (ours, files))
            print(f"{what}: {found:,.0f} samples/s, {found / beside:.2f} of local files")


if __name__ == "__main__":
    main()
