"""Samples of tar files, in the form of WebDataset, as an iterable data set."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from fsspec.core import url_to_fs
from torch.utils.data import IterableDataset, get_worker_info

from smb.errors import InvalidArgumentError

_FILES_MAX = 1_000_000  # that one pattern may name
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class Shards(IterableDataset[Any]):
    """The samples of tar files, each read by one worker once an epoch, the next files read ahead.

    ```python
    samples = Shards("softmem://127.0.0.1:7070/digits/train-{000..127}.tar", seed=0, transform=decode)
    loader = torch.utils.data.DataLoader(samples, batch_size=64, num_workers=4, persistent_workers=True)
    ```

    `urls`: one or several of softmem://HOST:PORT/NAME (docs/files.md), of paths, or of other URLs that fsspec knows;
    {000..127} stands for each number of that range, with as many digits. Any tool may have written the files there: a
    mount, fsspec, `smb cp`.

    Files of a tar file that follow each other and have one name up to the first dot are one sample: a dict with the
    part after the dot ("jpg", "cls", "seg.png") and the bytes of each, and with that name as "__key__". `transform`, if
    given, is called with this dict in the process that reads the file, and returns the sample.

    With a `seed` each epoch has the files in another order, the same one for all; without it the order is that of
    `urls`. The files are dealt to the workers of the DataLoader, and to the processes of a training by `part`: (1, 4)
    takes the second quarter. Parts may differ by one file, so a training that needs equal steps gives each as many.

    `prefetch` (0 or more) files are read ahead by a thread, also the next epoch's first ones while this epoch's last
    samples are in use; that many and one more are in memory. With persistent_workers=True the workers begin the next
    epoch with them. Otherwise new workers start each epoch: call set_epoch() before it.

    Raises OSError, as files do, and for a file that is not a tar file.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        seed: int | None = None,
        prefetch: int = 1,
        part: tuple[int, int] = (0, 1),
        transform: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self._urls = [url for each in ([urls] if isinstance(urls, str) else urls) for url in _expanded(each)]
        if not self._urls:
            raise InvalidArgumentError("Shards: give one or more urls")
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise InvalidArgumentError(f"Shards: prefetch must be a number of files, 0 or more, not {prefetch!r}")
        if not 0 <= part[0] < part[1]:
            raise InvalidArgumentError(f"Shards: part must be (index, count) with 0 <= index < count, not {part!r}")
        self._seed, self._prefetch, self._part, self._transform = seed, prefetch, part, transform
        self._epoch = 0  # of the next iteration
        self._ahead: _Ahead | None = None

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of an epoch, from 0. Each iteration of a process counts up by itself."""
        self._epoch = epoch

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ahead": None}

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        if self._ahead is None or self._ahead.pid != os.getpid():
            self._ahead = _Ahead(self._prefetch)
        ahead = self._ahead
        mine = self._mine(epoch)
        coming = [(epoch, url) for url in mine] + [(epoch + 1, url) for url in self._mine(epoch + 1)]
        for position, url in enumerate(mine):
            for sample in _samples(url, ahead.take(coming[position : position + 1 + self._prefetch])):
                yield sample if self._transform is None else self._transform(sample)

    def _mine(self, epoch: int) -> list[str]:
        """Return the files of this process in their order."""
        order = list(range(len(self._urls)))
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(order)).tolist()
        worker, (index, count) = get_worker_info(), self._part
        if worker is not None:
            index, count = index * worker.num_workers + worker.id, count * worker.num_workers
        return [self._urls[at] for at in order[index::count]]


class _Ahead:
    """The files that one process has read, or is reading, before they are needed."""

    def __init__(self, prefetch: int) -> None:
        self.pid = os.getpid()
        self._thread = ThreadPoolExecutor(1, "smb-shards") if prefetch else None
        self._files: dict[tuple[int, str], Future[bytes]] = {}  # by epoch and url

    def take(self, coming: list[tuple[int, str]]) -> bytes:
        """Return the content of the first file, and let the others be read; what was read of others is dropped."""
        if self._thread is None:
            return _content(coming[0][1])
        for other in self._files.keys() - set(coming):
            self._files.pop(other).cancel()
        for each in coming:
            if each not in self._files:
                self._files[each] = self._thread.submit(_content, each[1])
        return self._files.pop(coming[0]).result()


def _expanded(url: str) -> list[str]:
    """Return the urls for which a pattern with {000..127} stands."""
    found = _RANGE.search(url)
    if found is None:
        return [url]
    first, last = found.groups()
    if int(last) < int(first) or int(last) - int(first) >= _FILES_MAX:
        raise InvalidArgumentError(f"Shards: {url!r}: a range has 1 to {_FILES_MAX} numbers, the lower one first")
    head, tail = url[: found.start()], url[found.end() :]
    return [each for n in range(int(first), int(last) + 1) for each in _expanded(f"{head}{n:0{len(first)}}{tail}")]


def _content(url: str) -> bytes:
    system, path = url_to_fs(url)  # one for each process and thread
    content: bytes = system.cat_file(path)
    return content


def _samples(url: str, content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the samples of one tar file."""
    sample: dict[str, Any] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is None:
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, _, kind = name.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if sample and sample["__key__"] != key:
                    yield sample
                    sample = {}
                sample["__key__"] = key
                sample[kind] = file.read()
    except tarfile.TarError as error:
        raise OSError(f"{url} is not a tar file, or ends early: {error}") from error
    if sample:
        yield sample
