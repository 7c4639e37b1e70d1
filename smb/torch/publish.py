"""One trainer, many readers: a whole state_dict is published as one generation, and no reader ever sees a mix of two.

The state_dict lies in a buffer with versions as named tensors, bytes exact (smb/tensors.py); generation n is version n
of that buffer, or with deltas= what smb/torch/deltas.py says. Both sides keep one copy of it in their own memory. The
trainer flattens into its copy before anything is sent. A reader reads the whole state before it touches any tensor of a
model. So neither a failure nor a later generation in the middle leaves a mixed state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from smb.errors import Error, InvalidArgumentError, NotFoundError
from smb.pins import PIN_S_MAX
from smb.tensors import TensorTable
from smb.torch.deltas import DELTAS_MAX, DeltaReader, DeltaWriter, StateBytes, create
from smb.torch.model_tensors import plain_name, plain_state
from smb.train.group import METADATA

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.client import Client

State: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]

# A publication waits for readers as long as a pin lasts that is not renewed, and has something left for the way.
_PATIENCE_S = PIN_S_MAX + 5.0
_ABOUT = "smb.publish"  # in the buffer's metadata: how it is published


class Publisher:
    """Publishes a state_dict under a name, generation after generation. Any device; one process at a time.

    `state` (a module, or a mapping of names to dense tensors) gives names, shapes and dtypes; the buffer is created, or
    opened where it exists with the same: a trainer that was restarted goes on with the next generation. `names` takes
    some of them only: names, or a function of a name that says whether (LoRA's, say). `dtype` (torch.bfloat16, say)
    publishes floating-point tensors rounded to it. A tensor with several names (tied weights) is stored once, under the
    first.

    deltas=16 publishes what changed since the last generation, bit for bit, and the whole state every 16th time, or
    sooner where much changes. That is for states of which a step changes few bits, as with bfloat16; what is published
    stays exact. It takes one further buffer of one and a half times the state's size, and two names beside this one
    (`.deltas`, `.generations`).

    `versions` copies are kept (2 to 16): with 3 or more one slow reader delays no publication. `options` are
    Client.create's: servers, stripe, metadata. It keeps one copy of the state in this process, and uses it for every
    publication. Thread-safe. Raises AlreadyExistsError if the name has another state's tensors, and says which;
    InvalidArgumentError if it was made with other deltas, ties or names.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        state: State,
        *,
        names: Iterable[str] | Callable[[str], bool] | None = None,
        dtype: torch.dtype | None = None,
        deltas: int = 0,
        versions: int = 2,
        **options: Any,
    ) -> None:
        asked = f"publish {name!r}"
        if dtype is not None and not dtype.is_floating_point:
            raise InvalidArgumentError(f"{asked}: dtype={dtype} is no floating-point dtype; integers stay as they are")
        if not isinstance(deltas, int) or not 0 <= deltas <= DELTAS_MAX or deltas == 1:
            raise InvalidArgumentError(f"{asked}: deltas={deltas!r} is not 0 or between 2 and {DELTAS_MAX}")
        if not isinstance(versions, int) or versions < 2:
            raise InvalidArgumentError(f"{asked}: versions={versions!r}: a published state takes 2 to 16 copies")
        self._source = state
        self._names = names if names is None or callable(names) else frozenset(names)
        self._dtype = dtype
        self._turn = threading.Lock()
        tensors = self._selected(asked, state)
        self._tied = _tied(tensors)
        about = {"deltas": deltas, "tied": self._tied, "part": names is not None}
        options["metadata"] = {**(options.get("metadata") or {}), _ABOUT: about}
        forms = {
            each: (tuple(tensor.shape), self._kind(tensor))
            for each, tensor in tensors.items()
            if each not in self._tied
        }
        placement = {key: value for key, value in options.items() if key in ("servers", "stripe")}
        made: list[str] = []
        try:
            self.buffer = create(client, made, name, tensors=forms, versions=versions, **options)
            if (found := _about(self.buffer)) != about:
                raise InvalidArgumentError(
                    f"{asked}: it exists, published with {_told(found)}, not {_told(about)}; do as before, or delete it"
                )
            self._memory = _Memory(self.buffer)
            self._writer = DeltaWriter(client, self.buffer, self._memory, deltas, placement, made) if deltas else None
        except BaseException:
            for each in reversed(made):
                with suppress(Error):  # the first error says more
                    client.delete(each, missing_ok=True)
            raise

    @property
    def generation(self) -> int:
        """The one published last, by whomever; 0 before the first."""
        return self.buffer.version if self._writer is None else self._writer.generation

    @property
    def sent_bytes(self) -> int:
        """Bytes that the last publication sent, without frames."""
        return self._memory.nbytes if self._writer is None else self._writer.sent_bytes

    def publish(self, state: State | None = None, *, timeout: float = _PATIENCE_S) -> int:
        """Publish the state as it is now (default: of what the Publisher was made with); return its generation.

        Readers see it at once and as a whole, those who wait are woken. Blocks while readers have every copy but the
        latest pinned (with versions=2 one, with more as many on different generations): for a second less than
        `timeout` (seconds), at least 30, and then it goes on. So with the default readers can delay a trainer, but not
        fail or stop it. With a shorter one TimeoutError is raised then: nothing was published, and the call may be made
        again, or left out. Raises InvalidArgumentError if names, shapes or dtypes are not those of the first time.
        """
        with self._turn:
            self._take(state)
            return self._publish(timeout)

    def publish_async(self, state: State | None = None, *, timeout: float = _PATIENCE_S) -> Future[int]:
        """As publish, in the background: the state may change as soon as this returns. Blocks while an earlier
        publication of this Publisher is under way.
        """
        self._turn.acquire()
        try:
            self._take(state)
            future = self.buffer.submit(lambda: self._publish(timeout))
        except BaseException:
            self._turn.release()
            raise
        future.add_done_callback(lambda _: self._turn.release())
        return future

    def _publish(self, timeout: float) -> int:
        if self._writer is not None:
            return self._writer.publish(f"publish {self.buffer.name!r}", timeout)
        return self.buffer.publish(self._memory.elements, timeout=timeout)

    def _take(self, state: State | None) -> None:
        asked = f"publish {self.buffer.name!r}"
        given = self._selected(asked, self._source if state is None else state)
        for name, first in self._tied.items():
            if name in given and first in given and not _same_values(given[name], given[first]):
                raise InvalidArgumentError(
                    f"{asked}: {name} and {first} were one tensor at the first time; now they differ"
                )
            if given.pop(name, None) is None:
                raise InvalidArgumentError(f"{asked}: {name} is missing, which is one tensor with {first}")
        ours = {name: (tensor.shape, tensor.dtype) for name, tensor in self._memory.tensors.items()}
        _check_same(asked, {name: (tensor.shape, self._kind(tensor)) for name, tensor in given.items()}, ours)
        if self._writer is None:
            self._memory.take(given)
        else:
            self._writer.take(self._memory.pieces(given))

    def _kind(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype

    def _selected(self, asked: str, state: State) -> dict[str, torch.Tensor]:
        """Return the tensors of which names= speaks."""
        tensors = _tensors(asked, state)
        if callable(self._names):
            return {name: tensor for name, tensor in tensors.items() if self._names(name)}
        if self._names is None:
            return tensors
        if missing := sorted(self._names - tensors.keys()):
            raise InvalidArgumentError(f"{asked}: names= has {missing[0]!r}, which the state has not")
        return {name: tensor for name, tensor in tensors.items() if name in self._names}


class Follower:
    """Reads what a Publisher publishes, always one generation as a whole. Made by `follow`. For one thread at a time.

    It keeps one copy of the state in this process. `generation` is the one that was read last, 0 before the first.
    """

    def __init__(self, client: Client, buffer: Buffer, timeout: float = 0.0) -> None:
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
        self._about = _about(buffer)
        deltas = self._about["deltas"]
        self._reader = DeltaReader(client, buffer, self._memory, deltas, max(timeout, 10.0)) if deltas else None

    @property
    def latest(self) -> int:
        """The generation published last, 0 before the first. Asks the home server, unless it is on this host."""
        return self.buffer.version if self._reader is None else self._reader.latest

    @property
    def received_bytes(self) -> int:
        """Bytes that the last read received, without frames."""
        return self._memory.nbytes if self._reader is None else self._reader.received_bytes

    def wait(self, *, timeout: float | None = None) -> int:
        """Wait until there is a generation later than the one read last; return the latest. Does not read it.

        Sleeps; the publication wakes it. Raises TimeoutError after `timeout` seconds (None: no end).
        """
        if self._reader is not None:
            return self._reader.wait(self.generation + 1, timeout)
        return self.buffer.wait(self.generation + 1, timeout=timeout)

    def load(self, model: torch.nn.Module) -> int:
        """Read the latest generation into a model, on any device, and return its number.

        Its names and shapes must be those of the published state; prefixes of torch.compile and DistributedDataParallel
        do not count. If a part was published (names=), the model may have more tensors, which stay. Else it raises
        InvalidArgumentError, and the model is unchanged. Values of another dtype are converted, as load_state_dict
        does. Raises NotFoundError before the first generation: wait() for it.
        """
        asked = f"load {self.buffer.name!r}"
        wanted = {name: tensor for name, tensor in plain_state(model).items() if isinstance(tensor, torch.Tensor)}
        tensors = self._named()
        if self._about["part"]:
            wanted = {name: tensor for name, tensor in wanted.items() if name in tensors}
        _check_same(
            asked,
            {name: tensor.shape for name, tensor in wanted.items()},
            {name: tensor.shape for name, tensor in tensors.items()},
        )
        self._read(asked)
        names = ((name, plain_name(model, name)) for name in model.state_dict())
        model.load_state_dict(
            {name: tensors[plain] for name, plain in names if plain in wanted}, strict=not self._about["part"]
        )
        return self.generation

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Read the latest generation; return it as new tensors in the host's memory; tied ones are one tensor. Raises
        NotFoundError as load.
        """
        self._read(f"state_dict of {self.buffer.name!r}")
        return self._named({name: tensor.clone() for name, tensor in self._memory.tensors.items()})

    def _named(self, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors by all their names."""
        stored = self._memory.tensors if tensors is None else tensors
        return stored | {name: stored[first] for name, first in self._about["tied"].items()}

    @contextmanager
    def pin(self, *, ttl: float = 5.0) -> Iterator[Generation]:
        """Hold the latest generation while the block runs: `with follower.pin() as generation: generation[name]`.

        All that is read inside is of that generation. It is a lease that ends after `ttl` seconds (at most 30) whatever
        happens, and that is what a trainer may be delayed by; it publishes one further generation meanwhile. A read
        that comes too late, after the trainer went on, raises LockLostError instead of returning another generation's
        values. Raises NotFoundError as load. Of a state published with deltas= all of it is read first, and delays
        nobody.
        """
        if self._reader is not None:
            self._read(f"pin of {self.buffer.name!r}")
            yield Generation(self.generation, self.buffer.table, self._about["tied"], self._piece)
            return
        with self.buffer.pin(ttl=ttl) as pin:
            if pin.version == 0:
                raise _nothing_yet(f"pin of {self.buffer.name!r}")
            itemsize = self.buffer.table.dtype.itemsize

            def piece(start: int, memory: Any) -> None:
                out = memory.view(self.buffer.table.dtype)
                pin.read(start // itemsize, memory.nbytes // itemsize, out=out)

            yield Generation(pin.version, self.buffer.table, self._about["tied"], piece)

    def _piece(self, start: int, memory: Any) -> None:
        memory[:] = self._memory.bytes[start : start + memory.nbytes]

    def _read(self, asked: str) -> None:
        if self._reader is not None:
            generation = self._reader.read(asked)
        else:
            generation = self.buffer.read_version(self._memory.elements)
        if generation == 0:
            raise _nothing_yet(asked)
        self.generation = generation


class Generation(Mapping[str, torch.Tensor]):
    """A pinned generation: tensors by name, each read when it is asked for, into new memory."""

    def __init__(
        self, number: int, table: TensorTable, tied: Mapping[str, str], read: Callable[[int, Any], None]
    ) -> None:
        self._number = number
        self._table = table
        self._tied = tied
        self._read = read  # (first byte, where to)

    @property
    def number(self) -> int:
        """Which one it is."""
        return self._number

    def __getitem__(self, name: str) -> torch.Tensor:
        first = self._tied.get(name, name)
        if first not in self._table:
            raise KeyError(name)
        place = self._table[first]
        memory = np.empty(place.nbytes, np.uint8)
        if place.nbytes:
            self._read(place.offset, memory)
        return _as_torch(memory, place.dtype, place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._table, *self._tied))

    def __len__(self) -> int:
        return len(self._table) + len(self._tied)


def publish(client: Client, name: str, state: State, **options: Any) -> int:
    """Publish a module's state, or a state_dict, once; return its generation. As Publisher(...).publish(), which keeps
    its memory for the next time: take that to publish often.
    """
    return Publisher(client, name, state, **options).publish()


def follow(client: Client, name: str, *, timeout: float = 0.0) -> Follower:
    """Follow what is published under that name; with timeout > 0 (seconds) wait until a trainer has made it.

    Raises NotFoundError, InvalidArgumentError if the buffer is no published state. There may be no generation yet:
    Follower.wait waits for it.
    """
    return Follower(client, client.open(name, timeout=timeout), timeout)


class _Memory(StateBytes):
    """One copy of a state in this process: as bytes, as the buffer's elements, and as tensors that are views of it."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer)
        self._places = buffer.table
        self.tensors = {
            name: _as_torch(self.bytes[place.offset : place.offset + place.nbytes], place.dtype, place.shape)
            for name, place in self._places.items()
        }

    def take(self, given: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors of the same names, shapes and dtypes in."""
        with torch.no_grad():
            for name, tensor in given.items():
                self.tensors[name].copy_(tensor)

    def pieces(self, given: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, int, int, object]]:
        """Yield (first byte, address, bytes, owner) of such tensors; not of the host's memory they are copied there."""
        for name, tensor in given.items():
            place = self._places[name]
            host = tensor.to("cpu", self.tensors[name].dtype).contiguous()
            if place.nbytes:
                yield place.offset, host.data_ptr(), place.nbytes, host


def _about(buffer: Buffer) -> dict[str, Any]:
    """Return how a state is published: of one from before there was a choice, as then."""
    stored = buffer.metadata.get(_ABOUT, {})
    return {"deltas": 0, "tied": {}, "part": False, **(stored if isinstance(stored, dict) else {})}


def _tied(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return which names are further ones of a tensor: name to the first."""
    first: dict[tuple[Any, ...], str] = {}
    return {
        name: kept
        for name, tensor in tensors.items()
        if tensor.numel() and tensor.device.type != "meta" and (kept := first.setdefault(_place(tensor), name)) != name
    }


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _place(one) == _place(other) or (one.dtype == other.dtype and one.equal(other.to(one.device)))


def _told(about: dict[str, Any]) -> str:
    return (
        f"deltas={about['deltas']}, {len(about['tied'])} tied names, {'a part' if about['part'] else 'all'} of a state"
    )


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
