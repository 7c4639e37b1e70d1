"""A reader of what smb/torch/publishing/publish.py publishes: always one generation as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias

import torch

from smb.call.published_states import READER
from smb.config.cancellation import to_thread
from smb.config.pickling import refuse_pickle
from smb.errors import Error, InvalidArgumentError, NotFoundError
from smb.html_tables import described
from smb.pins import Pin
from smb.relay.reader_source import Nearest
from smb.spi import opened_by, session_of, versions_of
from smb.state_costs import StateCosts
from smb.torch.publishing.delta_reader import DeltaReader
from smb.torch.publishing.published_state import (
    State,
    about_of,
    check_same_tensors,
    generations_text,
    note_transports,
    state_row,
)
from smb.torch.publishing.state_bytes import Allocate, PartBytes, StateBytes
from smb.torch.publishing.state_explanation import PublishedTensor, StateExplanation, state_explained
from smb.torch.tensor_slices import TensorSlice, checked_slice, is_sharded, local_of, slice_of, whole
from smb.torch.tensor_values import changing, is_expanded, is_extra_state, lasting
from smb.torch.training.model_tensors import plain_name, plain_state
from smb.train.group import METADATA

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.client import Client

# A model with DTensors, its state_dict, or slices by name.
Placements: TypeAlias = "State | Mapping[str, tuple[slice, ...]]"


class Follower:
    """Reads what a Publisher publishes, always one generation as a whole. Made by follow(). Use it in one thread at a
    time.

    It keeps one copy of the state, or of the parts that it reads, in this process's memory. `generation` is the one
    that was read or pinned last, 0 before the first.

    ```python
    follower = smb.torch.follow(client, "policy")
    follower.load(model)  # 1: the generation that was read
    ```
    """

    ROLE: ClassVar[str] = READER

    def __init__(
        self,
        client: Client,
        buffer: Buffer,
        timeout: float = 0.0,
        near: str | None = None,
        placements: Placements | None = None,
        *,
        allocate: Allocate | None = None,
    ) -> None:
        """`allocate` gives the memory of a whole state, which several processes may share (host_copy.py)."""
        asked = f"follow {buffer.name!r}"
        if METADATA in buffer.metadata:
            raise InvalidArgumentError(
                f"{asked}: this is a group of smb.train, which publishes nothing: read its model with "
                f"smb.torch.shared_state_dict(client, {buffer.name!r})"
            )
        if buffer.versions < 2 or not buffer.table:
            raise InvalidArgumentError(
                f"{asked}: this buffer is not a published state: it has only one version, or no named tensors; open it "
                f"with client.open"
            )
        self.buffer = buffer
        self.generation = 0
        self.costs = StateCosts()
        self._nearest = Nearest(client, buffer, near)
        self._about = about_of(asked, buffer)
        deltas = self._about["deltas"]
        self._memory: StateBytes | PartBytes
        self._reader: DeltaReader | None = None
        if placements is not None:
            self._memory = PartBytes(buffer, self._slices_of(asked, placements))
        else:
            self._memory = StateBytes(buffer, allocate)
        if deltas:
            self._reader = DeltaReader(client, buffer, self._nearest, self._memory, deltas, max(timeout, 10.0))
        session_of(client).published.add(self)

    def __repr__(self) -> str:
        return f"<smb.torch.Follower of {self.buffer.name!r}, {generations_text(self.generation)}>"

    def __reduce__(self) -> NoReturn:
        address = opened_by(self.buffer).coordinator.address
        refuse_pickle(repr(self), f"call smb.torch.follow(smb.connect({address!r}), {self.buffer.name!r})")

    def _repr_html_(self) -> str:
        rows = {"name": self.buffer.name, "generation": self.generation or "none yet", **state_row(self.buffer)}
        return described("Follower", {**rows, "read from": self.source or "the state's own servers"})

    @property
    def last(self) -> int:
        """The same as `generation`."""
        return self.generation

    @property
    def source(self) -> str:
        """The mirror from which generations come now; "" for the state's own buffer. Asks no server."""
        return self._nearest.mirror_name if self._reader is None else self._reader.mirror_name

    def explain(self) -> StateExplanation:
        """Return what reading has cost this process so far: bytes, copies, time, transport, and what may help. Asks no
        server.

        ```python
        print(follower.explain())
        ```
        """
        tensors = (
            PublishedTensor(name, tuple(each.shape), str(each.dtype).removeprefix("torch."), each.nbytes)
            for name, each in self._memory.tensors.items()
        )
        return state_explained(self.buffer, self.ROLE, self.generation, self.costs, self.source, tensors)

    def _slices_of(self, asked: str, placements: Placements) -> dict[str, TensorSlice]:
        """Return the part of each stored tensor that is read. Raises InvalidArgumentError."""
        given = plain_state(placements) if isinstance(placements, torch.nn.Module) else placements
        parts: dict[str, TensorSlice] = {}
        for name, each in given.items():
            first = self._about["tied"].get(name, name)
            if first not in self.buffer.table:
                if self._about["part"] and isinstance(placements, torch.nn.Module):
                    continue  # this part of the model is not published
                raise InvalidArgumentError(f"{asked}: placements= has {name!r}, which is not published there")
            shape = self.buffer.table[first].shape
            if not isinstance(each, torch.Tensor):
                part = checked_slice(asked, name, each, shape)
            elif tuple(each.shape) != shape:
                raise InvalidArgumentError(
                    f"{asked}: {name} has shape {tuple(each.shape)} in placements=, but {shape} in the published state"
                )
            else:
                part = slice_of(name, each) or whole(local_of(each).shape)  # no elements here
            if parts.setdefault(first, part) != part:
                raise InvalidArgumentError(
                    f"{asked}: {name} and {first} are one tensor in the published state, but differ in placements="
                )
        return parts

    @property
    def latest(self) -> int:
        """The latest published generation, 0 before the first. Asks the home server, unless it is on this host."""
        return self.buffer.version if self._reader is None else self._reader.latest

    @property
    def generations(self) -> tuple[int, ...]:
        """The generations that can be read now, in order: load(model, generation=n). Asks the home server.

        ```python
        follower = smb.torch.follow(client, "policy")
        follower.generations  # (1,)
        ```
        """
        held = versions_of(self.buffer).held()
        return held if self._reader is None else self._reader.generations(held)

    @property
    def received_bytes(self) -> int:
        """Bytes that the last read received, without frames; with placements= those of the parts."""
        return self._memory.nbytes if self._reader is None else self._reader.received_bytes

    def wait(self, *, timeout: float | None = None, generation: int | None = None) -> int:
        """Wait for a generation later than the one read last, or until `generation` can be read. Return the latest.

        Does not read it. Sleeps until the publication wakes it. Raises TimeoutError after `timeout` seconds (None: no
        end).

        ```python
        follower.wait(timeout=60)  # 1: the latest generation
        follower.load(model)
        ```
        """
        wanted = self.generation + 1 if generation is None else generation
        if self._reader is not None:
            return self._reader.wait(wanted, timeout)
        return self._nearest.wait(wanted, timeout)

    async def wait_async(self, *, timeout: float | None = None, generation: int | None = None) -> int:
        """As wait(), awaited from asyncio: the event loop goes on meanwhile, and cancelling the task ends the wait.

        Await load() and other calls by smb.to_thread.

        ```python
        import asyncio

        async def newer():
            await follower.wait_async(timeout=60)
            return await smb.to_thread(follower.load, model)

        asyncio.run(newer())  # 1: the generation that was read
        ```
        """
        return await to_thread(self.wait, timeout=timeout, generation=generation)

    def load(self, model: torch.nn.Module, *, generation: int | None = None) -> int:
        """Read the latest generation, or `generation`, into a model on any device. Return its number.

        Names and shapes of the model must be those of the published state, or with placements= those of the parts;
        prefixes of torch.compile and DistributedDataParallel are ignored. Otherwise raises InvalidArgumentError, and
        the model is unchanged. If only some tensors were published (names=), the model's other tensors stay. Entries of
        the model's state that are not tensors (get_extra_state()) stay, too. Values of another dtype are converted, as
        load_state_dict does. Raises NotFoundError before the first generation, and if `generation` was overwritten or
        is not published yet.

        Each rank of a sharded model reads for itself. Pass `generation` so that all have the same one.

        ```python
        follower.load(model)  # 1: the generation that was read
        follower.load(model, generation=1)  # this generation, or NotFoundError
        ```
        """
        asked = f"load {self.buffer.name!r}"
        here = {name: tensor for name, tensor in plain_state(model).items() if isinstance(tensor, torch.Tensor)}
        tensors = self._named()
        if self._memory.is_whole and any(is_sharded(tensor) for tensor in here.values()):
            raise InvalidArgumentError(
                f"{asked}: the model is sharded: call follow() with placements=model, which reads this rank's parts of "
                f"it"
            )
        if self._about["part"]:
            here = {name: tensor for name, tensor in here.items() if name in tensors}
        if meta := [name for name, tensor in here.items() if tensor.is_meta]:
            raise InvalidArgumentError(
                f"{asked}: {meta[0]!r} of the model is on the meta device, which holds no values: give it memory first "
                f"(model.to_empty(device=...))"
            )
        if expanded := [name for name, tensor in here.items() if is_expanded(local_of(tensor))]:
            raise InvalidArgumentError(
                f"{asked}: {expanded[0]!r} of the model is expanded: several of its elements share one place in "
                f"memory; call .contiguous() on it"
            )
        check_same_tensors(
            asked,
            {name: local_of(tensor).shape for name, tensor in here.items()},
            {name: tensor.shape for name, tensor in tensors.items()},
        )
        self._memory.hold(here.values())
        began = self.costs.now()
        self._read(asked, generation)
        names = ((name, plain_name(model, name)) for name in model.state_dict())
        given = {name: _placed_as(here[plain], tensors[plain]) for name, plain in names if plain in here}
        # The Follower's memory changes with the next read. load_state_dict() copies from it, but set_extra_state() may
        # keep it.
        given = {name: each.clone() if is_extra_state(name) else each for name, each in given.items()}
        with changing(here.values()):
            # Not strict, because names were checked, and entries may be missing that are not tensors or not published.
            model.load_state_dict(given, strict=False)
        self._count(began, copied=self._memory.nbytes)
        return self.generation

    def state_dict(self, *, generation: int | None = None) -> dict[str, torch.Tensor]:
        """Read the latest generation, or `generation`. Return it as new tensors in the host's memory.

        With placements= returns the parts. Tied names get the same tensor. Raises NotFoundError as load() does.

        ```python
        state = follower.state_dict()
        state["0.bias"].shape  # torch.Size([10])
        ```
        """
        began = self.costs.now()
        self._read(f"state_dict of {self.buffer.name!r}", generation)
        copies = _copies(self._memory.tensors)
        self._count(began, copied=self._memory.nbytes)
        return self._named(copies)

    def views(self, *, generation: int | None = None) -> dict[str, torch.Tensor]:
        """As state_dict(), without a copy: the tensors are this Follower's memory, and change with its next read.

        ```python
        views = follower.views()
        views["0.bias"].shape  # torch.Size([10])
        ```
        """
        began = self.costs.now()
        self._read(f"views of {self.buffer.name!r}", generation)
        self._count(began)
        return self._named()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What the last read has left, as views() returns it. Reads nothing; zeros before the first read."""
        return self._named()

    def _named(self, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors by all their names."""
        stored = self._memory.tensors if tensors is None else tensors
        return stored | {name: stored[first] for name, first in self._about["tied"].items() if first in stored}

    @contextmanager
    def pin(self, *, ttl: float = 5.0) -> Iterator[Generation]:
        """Hold the latest generation while the block runs.

        ```python
        with follower.pin() as generation:
            bias = generation["0.bias"]
        ```

        All reads inside are of that generation. The pin is a lease that ends after `ttl` seconds (at most 30) in any
        case. It delays a trainer for at most that time; the trainer publishes one more generation meanwhile. A read
        after the trainer has gone on raises LockLostError instead of returning another generation's values. Raises
        NotFoundError as load() does. A state published with deltas= is read as a whole first, and delays nobody.
        """
        if self._reader is not None:
            began = self.costs.now()
            self._read(f"pin of {self.buffer.name!r}")
            self._count(began)

            def copy(name: str) -> torch.Tensor:
                began, tensor = self.costs.now(), self._memory.tensors[name]
                copied = _copies({name: tensor})[name]
                self.costs.count(0, tensor.nbytes, self.costs.now() - began, times=0)
                return copied

            yield self._generation(self.generation, copy)
            return
        if self.latest == 0:
            raise _nothing_yet(f"pin of {self.buffer.name!r}")
        with ExitStack() as held:
            pin = self._pin_nearest(held, ttl)
            self.generation = pin.version
            dtype, times = self.buffer.table.dtype, 1  # a pin counts once something was read

            def read(start: int, memory: Any) -> None:
                nonlocal times
                began = self.costs.now()
                pin.read(start // dtype.itemsize, memory.nbytes // dtype.itemsize, out=memory.view(dtype))
                self.costs.count(memory.nbytes, 0, self.costs.now() - began, times=times)
                if times:
                    note_transports(self.costs, self._nearest)
                times = 0

            yield self._generation(pin.version, lambda name: self._memory.read_one(name, read))

    def _pin_nearest(self, held: ExitStack, ttl: float) -> Pin:
        while (near := self._nearest.buffer()) is not self.buffer:
            try:
                if near.version < self._nearest.least(self.generation):
                    break
                return held.enter_context(near.pin(ttl=ttl))
            except Error as error:
                self._nearest.leave(error)
        return held.enter_context(self.buffer.pin(ttl=ttl))

    def _generation(self, number: int, read: Callable[[str], torch.Tensor]) -> Generation:
        names = {name: name for name in self._memory.tensors}
        names |= {name: first for name, first in self._about["tied"].items() if first in names}
        return Generation(number, names, read)

    def _read(self, asked: str, wanted: int | None = None) -> None:
        if wanted is not None and (not isinstance(wanted, int) or wanted < 1):
            raise InvalidArgumentError(f"{asked}: generation must be a whole number from 1 on, not {wanted!r}")
        if self._reader is not None:
            generation = self._reader.read(asked, wanted)
        else:
            generation = self._nearest.read(self._memory.read, self.generation, wanted)
        if generation == 0:
            raise _nothing_yet(asked)
        self.generation = generation

    def _count(self, began: float, *, copied: int = 0) -> None:
        """Count a read that began then."""
        self.costs.count(self.received_bytes, copied, self.costs.now() - began)
        note_transports(self.costs, self._nearest if self._reader is None else self._reader)


class Generation(Mapping[str, torch.Tensor]):
    """A pinned generation: a mapping of names to tensors. Each tensor is read into new memory when it is asked for.

    With placements= of follow() these are the parts of tensors.

    ```python
    with follower.pin() as generation:
        list(generation)  # ['0.weight', '0.bias']
        bias = generation["0.bias"]
    ```
    """

    def __init__(self, number: int, names: Mapping[str, str], read: Callable[[str], torch.Tensor]) -> None:
        self._number = number
        self._names = names  # name -> the name under which the tensor is stored
        self._read = read

    @property
    def number(self) -> int:
        """The generation's number."""
        return self._number

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def follow(
    client: Client, name: str, *, timeout: float = 0.0, near: str | None = None, placements: Placements | None = None
) -> Follower:
    """Follow what is published under that name. With timeout > 0 (seconds) wait until a trainer has created it.

    ```python
    follower = smb.torch.follow(client, "policy", timeout=60)
    follower.wait(timeout=60)
    follower.load(model)
    ```

    - `near`: if the state has mirrors (`Publisher(relays=)`, `smb relay`), generations come from the nearest one: on
      this host, otherwise in this host's zone (that of a memory server here), otherwise the fastest. `near` names
      another zone, or a server. A mirror that dies, or receives nothing for 6 s, is replaced by the next one.
    - `placements` reads and receives parts only. A model with DTensors, or its state_dict, gives the shards of this
      rank, however the trainer is sharded. A mapping of names to slices, one for each dimension, gives these parts of
      these tensors. Of a state with deltas= it reads the parts of deltas that concern them.

    Does not wait for a generation: use Follower.wait. Raises NotFoundError, and InvalidArgumentError if the buffer is
    not a published state, or lacks tensors that placements= names.
    """
    return Follower(client, client.open(name, timeout=timeout), timeout, near, placements)


@lasting
def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _placed_as(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as the kind of tensor that the model has there."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor

    here = tensor.to(like.to_local().device)
    return DTensor.from_local(
        here, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _nothing_yet(asked: str) -> NotFoundError:
    return NotFoundError(f"{asked}: no generation was published yet; wait() waits for the first")
