"""One trainer, many readers: a whole state_dict is published as one generation, and no reader ever sees a mix of two.

The state_dict lies in a buffer with versions=2 as named tensors, bytes exact (smb/tensors.py); generation n is version
n of that buffer. Both sides keep one copy of it in their own memory: the trainer flattens into it before anything is
sent, a reader reads all of it before any tensor of a model is touched, so that neither a failure nor a later generation
in the middle leaves something that never was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from smb.errors import InvalidArgumentError, NotFoundError
from smb.pins import PIN_S_MAX, Pin
from smb.tensors import TensorTable
from smb.torch.model_tensors import plain_name, plain_state
from smb.train.group import METADATA

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.client import Client

State: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]

# A publication waits for readers as long as a pin lasts that is not renewed, and has something left for the way.
_PATIENCE_S = PIN_S_MAX + 5.0


class Publisher:
    """Publishes a state_dict under a name, generation after generation. Any device; one process at a time.

    `state` (a module, or a mapping of names to dense tensors) gives names, shapes and dtypes; the buffer is created, or
    opened where it exists with the same: a trainer that was restarted goes on with the next generation. `options` are
    Client.create's: servers, stripe, metadata. It keeps one copy of the state in this process, and uses it for every
    publication. Thread-safe. Raises AlreadyExistsError where the name has another state's tensors, and says which.
    """

    def __init__(self, client: Client, name: str, state: State, **options: Any) -> None:
        tensors = _tensors(f"publish {name!r}", state)
        self._source = state
        self._turn = threading.Lock()
        self.buffer = client.create(name, tensors=tensors, versions=2, exist_ok=True, **options)
        self._memory = _Memory(self.buffer)

    @property
    def generation(self) -> int:
        """The one published last, by whomever; 0 before the first."""
        return self.buffer.version

    def publish(self, state: State | None = None, *, timeout: float = _PATIENCE_S) -> int:
        """Publish the state as it is now (default: of what the Publisher was made with); return its generation.

        Readers see it at once and as a whole, those who wait are woken. Blocks while a reader has the generation before
        the last pinned, whose place this one takes: for a second less than `timeout` (seconds), at least 30, and then
        it goes on. So with the default readers can delay a trainer, but not fail or stop it. With a shorter one
        TimeoutError is raised then: nothing was published, and the call may be made again, or left out. Raises
        InvalidArgumentError where names, shapes or dtypes are not those of the first time.
        """
        with self._turn:
            self._memory.take(f"publish {self.buffer.name!r}", self._source if state is None else state)
            return self.buffer.publish(self._memory.elements, timeout=timeout)

    def publish_async(self, state: State | None = None, *, timeout: float = _PATIENCE_S) -> Future[int]:
        """As publish, in the background: the state may change as soon as this returns. Blocks while an earlier
        publication of this Publisher is under way.
        """
        self._turn.acquire()
        try:
            self._memory.take(f"publish {self.buffer.name!r}", self._source if state is None else state)
            future = self.buffer.submit(lambda: self.buffer.publish(self._memory.elements, timeout=timeout))
        except BaseException:
            self._turn.release()
            raise
        future.add_done_callback(lambda _: self._turn.release())
        return future


class Follower:
    """Reads what a Publisher publishes, always one generation as a whole. Made by `follow`. For one thread at a time.

    It keeps one copy of the state in this process. `generation` is the one that was read last, 0 before the first.
    """

    def __init__(self, buffer: Buffer) -> None:
        if METADATA in buffer.metadata:
            raise InvalidArgumentError(
                f"follow {buffer.name!r}: it is a group of smb.train, which publishes nothing: read what it has by "
                f"smb.torch.shared_state_dict(client, {buffer.name!r})"
            )
        if buffer.versions < 2 or not buffer.table:
            raise InvalidArgumentError(
                f"follow {buffer.name!r}: it is no published state: it has one copy, or no named tensors"
            )
        self.buffer = buffer
        self.generation = 0
        self._memory = _Memory(buffer)

    @property
    def latest(self) -> int:
        """The generation published last, 0 before the first. Asks the home server, unless it is on this host."""
        return self.buffer.version

    def wait(self, *, timeout: float | None = None) -> int:
        """Wait until there is a generation later than the one read last; return the latest. Does not read it.

        Sleeps; the publication wakes it. Raises TimeoutError after `timeout` seconds (None: no end).
        """
        return self.buffer.wait(self.generation + 1, timeout=timeout)

    def load(self, model: torch.nn.Module) -> int:
        """Read the latest generation into a model, on any device, and return its number.

        The model's names, without what torch.compile and DistributedDataParallel put into them, and its shapes are
        those of the published state, else InvalidArgumentError and it is as it was;
        where a dtype is another one values are converted, as load_state_dict does. Raises NotFoundError before the
        first generation: wait() for it.
        """
        asked = f"load {self.buffer.name!r}"
        wanted = {name: tensor for name, tensor in plain_state(model).items() if isinstance(tensor, torch.Tensor)}
        _check_same(asked, {name: tensor.shape for name, tensor in wanted.items()}, self._memory.shapes())
        self._read(asked)
        names = ((name, plain_name(model, name)) for name in model.state_dict())
        model.load_state_dict({name: self._memory.tensors[plain] for name, plain in names if plain in wanted})
        return self.generation

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Read the latest generation; return it as new tensors in the host's memory. Raises NotFoundError as load."""
        self._read(f"state_dict of {self.buffer.name!r}")
        return {name: tensor.clone() for name, tensor in self._memory.tensors.items()}

    @contextmanager
    def pin(self, *, ttl: float = 5.0) -> Iterator[Generation]:
        """Hold the latest generation while the block runs: `with follower.pin() as generation: generation[name]`.

        All that is read inside is of that generation. It is a lease that ends after `ttl` seconds (at most 30) whatever
        happens, and that is what a trainer may be delayed by; it publishes one further generation meanwhile. A read
        that comes too late, after the trainer went on, raises LockLostError instead of returning another generation's
        values. Raises NotFoundError as load.
        """
        with self.buffer.pin(ttl=ttl) as pin:
            if pin.version == 0:
                raise _nothing_yet(f"pin of {self.buffer.name!r}")
            yield Generation(pin, self.buffer.table)

    def _read(self, asked: str) -> None:
        generation = self.buffer.read_version(self._memory.elements)
        if generation == 0:
            raise _nothing_yet(asked)
        self.generation = generation


class Generation(Mapping[str, torch.Tensor]):
    """A pinned generation: tensors by name, each read when it is asked for, into new memory."""

    def __init__(self, pin: Pin, table: TensorTable) -> None:
        self._pin = pin
        self._table = table

    @property
    def number(self) -> int:
        """Which one it is."""
        return self._pin.version

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._table:
            raise KeyError(name)
        place = self._table[name]
        memory = np.empty(place.nbytes, np.uint8)
        if place.nbytes:
            itemsize = self._table.dtype.itemsize
            self._pin.read(place.offset // itemsize, place.nbytes // itemsize, out=memory.view(self._table.dtype))
        return _as_torch(memory, place.dtype, place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def publish(client: Client, name: str, state: State, **options: Any) -> int:
    """Publish a module's state, or a state_dict, once; return its generation. As Publisher(...).publish(), which keeps
    its memory for the next time: take that to publish often.
    """
    return Publisher(client, name, state, **options).publish()


def follow(client: Client, name: str, *, timeout: float = 0.0) -> Follower:
    """Follow what is published under that name; with timeout > 0 (seconds) wait until a trainer has made it.

    Raises NotFoundError, InvalidArgumentError where the buffer is no published state. There may be no generation yet:
    Follower.wait waits for it.
    """
    return Follower(client.open(name, timeout=timeout))


class _Memory:
    """One copy of a state in this process: as the buffer's elements, and as tensors that are views of it."""

    def __init__(self, buffer: Buffer) -> None:
        # Zeros: what lies between the tensors is published too.
        self.elements = np.zeros(buffer.size, buffer.dtype)
        flat = self.elements.view(np.uint8)
        self.tensors = {
            name: _as_torch(flat[place.offset : place.offset + place.nbytes], place.dtype, place.shape)
            for name, place in buffer.table.items()
        }

    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def take(self, asked: str, state: State) -> None:
        """Copy the state in."""
        given = _tensors(asked, state)
        ours = {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}
        _check_same(asked, {name: (tensor.shape, tensor.dtype) for name, tensor in given.items()}, ours)
        with torch.no_grad():
            for name, tensor in given.items():
                self.tensors[name].copy_(tensor)


def _tensors(asked: str, state: State) -> dict[str, torch.Tensor]:
    """Return the state as names and tensors that can be copied byte by byte."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in (plain_state(state) if isinstance(state, torch.nn.Module) else state).items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(
                f"{asked}: {name!r} is a {type(tensor).__name__}, no tensor; leave it out, or put it into metadata="
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise InvalidArgumentError(f"{asked}: {name!r} is sparse or quantized; pass a dense tensor")
        tensors[name] = tensor.detach()
    return tensors


def _as_torch(memory: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> torch.Tensor:
    """Return bytes as a tensor, without a copy."""
    kind = getattr(torch, dtype.name)
    return torch.from_numpy(memory).view(kind).view(shape) if memory.size else torch.empty(shape, dtype=kind)


def _check_same(asked: str, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    differ = sorted(
        [f"{name} is missing" for name in wanted.keys() - given.keys()]
        + [f"{name} is not in it" for name in given.keys() - wanted.keys()]
        + [f"{name} is {given[name]}, not {wanted[name]}" for name in given.keys() & wanted.keys()
           if given[name] != wanted[name]]
    )  # fmt: skip
    if differ:
        raise InvalidArgumentError(
            f"{asked}: not the tensors that are published there ({len(differ)} differ): {'; '.join(differ[:3])}"
        )


def _nothing_yet(asked: str) -> NotFoundError:
    return NotFoundError(f"{asked}: no generation was published yet; wait() for the first")
