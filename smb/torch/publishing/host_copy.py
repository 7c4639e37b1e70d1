"""One copy of a published state on a host, for all processes of an inference engine there.

The first process of each host reads: in the background it brings each new generation into memory, whole, while the
engine serves. The other processes map the same memory. `held` holds one generation at all processes, or raises at all,
before anything is done with it: so no process of an engine goes on alone to another generation.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from smb.config.backoff import Backoff
from smb.config.boot import boot_id
from smb.errors import DeadlineError, Error, UnavailableError
from smb.published import ABOUT, LOG, has_deltas
from smb.torch.publishing.following import Follower
from smb.torch.ranks import Ranks

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.client import Client

# How long the thread waits at a time, during which it is not stopped, or keeps the memory from a caller of `held`.
_TURN_S = 1.0
_AGAIN_FIRST_S, _AGAIN_MAX_S = 0.1, 1.0  # pauses after a generation could not be read
_log = logging.getLogger("smb")


def agreed(ranks: Ranks | None) -> AbstractContextManager[None]:
    """Run the block at all processes. An error at one of them is raised at all."""
    return nullcontext() if ranks is None else ranks.agreed()


class HostCopy:
    """A published state in memory that the processes of one engine share. All of them make it, and call `held`,
    together. One thread at a time.
    """

    def __init__(self, client: Client, name: str, timeout: float, near: str | None, ranks: Ranks | None) -> None:
        """Wait for the name for up to `timeout` seconds. `ranks` are the engine's processes, None for a single one.

        Raises at all processes what smb.torch.follow raises at one of them.
        """
        self.name = name
        self._ranks = ranks
        self._memory = threading.Lock()  # held while the memory is read into, or its content is in use
        self._held = 0  # the generation that the memory has, 0 while it has none as a whole
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._descriptor = -1
        try:
            with agreed(ranks):
                buffer = client.open(name, timeout=timeout)
                published = client.open(name + LOG, timeout=timeout) if has_deltas(buffer) else buffer
                if ranks is None:
                    self._reads = True
                    self._follower = Follower(client, buffer, timeout, near)
            if ranks is not None:
                self._share(client, buffer, timeout, near, ranks)
        except BaseException:
            self.close()
            raise
        self.tensors: dict[str, torch.Tensor] = self._follower.tensors
        about = buffer.metadata.get(ABOUT)
        self.part = bool(isinstance(about, dict) and about.get("part"))  # whether names= chose some tensors of a state
        if self._reads:
            self._thread = threading.Thread(target=self._follow, args=(published,), name="smb-host-copy", daemon=True)
            self._thread.start()

    def _share(self, client: Client, buffer: Buffer, timeout: float, near: str | None, ranks: Ranks) -> None:
        """Make this process's Follower in memory of its own host's first process."""
        host = f"{boot_id()} {Path('/proc/self/ns/pid').stat().st_ino}"
        first = ranks.gather(host).index(host)
        self._reads = ranks.rank == first
        with agreed(ranks):
            if self._reads:
                self._descriptor = os.memfd_create(f"smb-{buffer.name}"[:200])
                self._follower = Follower(client, buffer, timeout, near, allocate=self._allocate)
        memory = _identity(self._descriptor) if self._descriptor >= 0 else None
        process, descriptor, memory = ranks.gather((os.getpid(), self._descriptor, memory))[first]
        with agreed(ranks):
            if not self._reads:
                path = f"/proc/{process}/fd/{descriptor}"
                self._follower = Follower(client, buffer, timeout, near, allocate=lambda size: _map(path, size, memory))

    def _allocate(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        os.truncate(self._descriptor, size)
        return _map(f"/proc/self/fd/{self._descriptor}", size, _identity(self._descriptor))

    @contextmanager
    def held(self, generation: int, timeout: float) -> Iterator[dict[str, torch.Tensor]]:
        """Hold that generation, whole, at all processes while the block runs at all of them. Yields its tensors, which
        are the shared memory: copy what must outlast the block.

        Waits for it for up to `timeout` seconds if it is not in memory yet. Raises, at all processes and before the
        block, what Follower.wait and Follower.views raise; and after the block what the block raises at one of them.
        """
        with ExitStack() as stack:
            with agreed(self._ranks):
                if self._reads:
                    self._bring(stack, generation, timeout)
            with agreed(self._ranks):
                yield self.tensors
            self._follower.generation = generation

    def _bring(self, stack: ExitStack, generation: int, timeout: float) -> None:
        end = time.monotonic() + timeout
        if not self._memory.acquire(timeout=timeout):
            raise DeadlineError(
                f"generation {generation} of {self._follower.buffer.name!r}: another generation was still arriving "
                f"after {timeout:g} s; nothing was changed"
            )
        stack.callback(self._memory.release)
        if self._held != generation:
            self._follower.wait(generation=generation, timeout=max(0.0, end - time.monotonic()))
            self._read(generation)

    def _read(self, generation: int | None) -> None:
        """Read a generation, the latest one if None. The caller holds the memory's lock."""
        self._held = 0
        self._follower.views(generation=generation)
        self._held = self._follower.generation

    def _follow(self, published: Buffer) -> None:
        backoff = Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S)
        while not self._closed.is_set():
            try:
                published.wait(self._held + 1, timeout=_TURN_S)
                with self._memory:
                    if not self._closed.is_set():
                        self._follower.wait(generation=self._held + 1, timeout=_TURN_S)  # a mirror may be behind
                        self._read(None)
                        backoff = Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S)
            except DeadlineError:
                continue
            except Error as error:  # `held` reads again, and its caller gets the error
                _log.debug("%s", error)
                self._closed.wait(backoff.next_s())

    def close(self) -> None:
        """Stop following. The memory goes when no process maps it any more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2 * _TURN_S)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _map(path: str, size: int, memory: tuple[int, int] | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Map the shared memory at a path. `memory` tells it from what a process of another user, with the same number by
    now, has open. Raises UnavailableError.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            if _identity(descriptor) != memory:
                raise UnavailableError(f"{path} is not the memory that this engine's first process made: it has ended")
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UnavailableError(
            f"the engine's processes on this host can't share memory ({error}): run them as one user, with the right "
            f"to open {path}"
        ) from error
    return np.frombuffer(mapped, np.uint8)
