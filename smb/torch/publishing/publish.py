"""One trainer, many readers: a whole state_dict is published as one generation, and no reader ever sees a mix of two.

The state_dict lies in a buffer with versions as named tensors, byte for byte (smb/tensors.py). Generation n is version
n of that buffer; with deltas= delta_writer.py applies. The trainer and each reader (following.py) keep one copy of
the state in their own memory. The trainer copies the state before anything is sent. A reader reads the whole state
before it touches any tensor of a model. So neither a failure nor a later generation in between leaves a mixed state.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias

import torch

import smb
from smb.call.published_states import PUBLISHER
from smb.config.pickling import refuse_pickle
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, NotFoundError
from smb.html_tables import described
from smb.pins import PIN_S_MAX
from smb.published import ABOUT, LOG_FORMAT
from smb.spi import session_of
from smb.state_costs import StateCosts
from smb.torch.publishing.delta_writer import DELTAS_MAX, DeltaWriter, create
from smb.torch.publishing.pairs import PairReader, Pairs, Spool, is_in_several_ranks, is_repeatable, with_forms
from smb.torch.publishing.published_state import (
    State,
    about_of,
    check_same_tensors,
    generations_text,
    note_transports,
    state_row,
)
from smb.torch.publishing.shard_writer import ShardWriter, check_same, parts_of, ranks_of
from smb.torch.publishing.state_explanation import PublishedTensor, StateExplanation, state_explained
from smb.torch.publishing.whole_writer import WholeWriter
from smb.torch.ranks import Ranks
from smb.torch.tensor_slices import is_sharded, local_of
from smb.torch.tensor_values import check_dense
from smb.torch.training.model_tensors import plain_state
from smb.train.group import METADATA

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from smb.buffer import Buffer
    from smb.client import Client

# A shape and a dtype by name, as tensors= of Client.create.
Forms: TypeAlias = Mapping[str, tuple[Sequence[int], Any]]

# Readers' pins that are not renewed end within PIN_S_MAX; the rest is time for the publication itself.
_PATIENCE_S = PIN_S_MAX + 5.0
_log = logging.getLogger("smb")


class Publisher:
    """Publishes a state_dict under a name, generation after generation. One trainer at a time.

    ```python
    publisher = smb.torch.Publisher(client, "policy", model)
    generation = publisher.publish()
    ```

    - `state` is a module, or a mapping of names to dense tensors, on any device. It defines names, shapes and dtypes.
      The buffer is created, or opened if it exists with the same tensors: a restarted trainer goes on with the next
      generation.
    - `names` publishes only some tensors: a list of names, or a function that says whether a name is wanted (LoRA's,
      for example). Use it to leave out a module's get_extra_state() that is not a tensor.
    - `dtype` (for example torch.bfloat16) publishes floating-point tensors rounded to it.
    - `deltas=16` publishes what changed since the last generation, bit for bit, and the whole state every 16th time, or
      sooner if much changed. Use it for states of which a step changes few bits, as with bfloat16. It takes one more
      buffer of one and a half times the state's size (`NAME.log`).
    - `mesh` is for a model that is sharded over several ranks (FSDP2, tensor parallel): every rank makes a Publisher
      and publishes when the others do; each writes its own shards. If the state has DTensors and no mesh is given, the
      ranks are all of torch.distributed. Other tensors are taken from the first rank. If a rank fails, all raise, and
      nothing was published. If a rank dies, the others raise UnavailableError; an incomplete generation never appears.
    - `relays` mirrors the state, and its deltas, on memory servers near its readers: their names, or "auto"
      (Client.relay).
    - `versions` copies are kept (2 to 16, by default 3). With 3 or more, one slow reader delays no publication.
    - `files={"config.json": content}` puts files beside the state, as the bytes `content` or from a path. `smb mount`
      and softmem:// show them in the directory of each generation, which programs load as a model (docs/publishing.md).
      They have one copy, and each trainer that passes them replaces them.
    - `options` are servers, stripe, replicas and metadata of Client.create.

    Without `state` names, shapes and dtypes are those of the first publication, or of the state that exists under that
    name. A mapping of names to (shape, dtype) gives them without values.

    A tensor with several names (tied weights) is stored once, under the first. publish() of a model or a mapping keeps
    one copy of the state in this process's memory; of pairs (name, tensor) only with `deltas`. Thread-safe. Raises
    AlreadyExistsError if the name has another state's tensors, and says which; InvalidArgumentError if it was made with
    other deltas, ties or names.
    """

    ROLE: ClassVar[str] = PUBLISHER

    def __init__(
        self,
        client: Client,
        name: str,
        state: State | Forms | None = None,
        *,
        names: Iterable[str] | Callable[[str], bool] | None = None,
        dtype: torch.dtype | None = None,
        deltas: int = 0,
        versions: int = 3,
        relays: Iterable[str] | str | None = None,
        mesh: DeviceMesh | None = None,
        files: Mapping[str, bytes | str | os.PathLike[str]] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(name, str) or not (state is None or isinstance(state, (torch.nn.Module, Mapping))):
            given = f"{type(name).__name__} and {type(state).__name__}"
            raise InvalidArgumentError(
                f"Publisher(client, name, state): pass a name and a model or state_dict, not {given}; pass an iterator "
                f"to publish()"
            )
        self._client = client
        self._name = name
        self._asked = asked = f"publish {name!r}"
        if state is None and mesh is not None:
            raise InvalidArgumentError(f"{asked}: mesh= needs the model: pass it as the third argument")
        source: State | None = with_forms(asked, state) if isinstance(state, Mapping) else state
        self._ranks = ranks = None if source is None else ranks_of(asked, source, mesh)
        self._source = source
        self._names = names if names is None or callable(names) else frozenset(names)
        self._dtype = dtype
        self._deltas, self._versions, self._relays, self._options = deltas, versions, relays, options
        self._files = _contents(asked, files or {})
        self._pairs = PairReader(asked, self._names, self._kind)
        self._turn = threading.Lock()
        self.costs = StateCosts()
        self._buffer: Buffer | None = None
        self._writer: WholeWriter | DeltaWriter | ShardWriter
        self._last = 0  # the generation that was published or found last
        self._sure = False  # whether `_last` is this Publisher's own; unknown after a failure
        self._alone = True  # whether no other trainer was noticed
        with _agreed(ranks):
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise InvalidArgumentError(
                    f"{asked}: dtype must be a floating-point dtype, not {dtype}; integer tensors keep theirs"
                )
            if not isinstance(deltas, int) or not 0 <= deltas <= DELTAS_MAX or deltas == 1:
                raise InvalidArgumentError(f"{asked}: deltas must be 0 or from 2 to {DELTAS_MAX}, not {deltas!r}")
            if not isinstance(versions, int) or versions < 2:
                raise InvalidArgumentError(f"{asked}: versions must be from 2 to 16, not {versions!r}")
            tensors = None if source is None else self._selected(asked, source)
        if tensors is None:
            self._find()
        else:
            self._make(tensors)

    def __repr__(self) -> str:
        return f"<smb.torch.Publisher of {self._name!r}, {generations_text(self._last)}>"

    def __reduce__(self) -> NoReturn:
        address = self._client.address
        refuse_pickle(repr(self), f"call smb.torch.Publisher(smb.connect({address!r}), {self._name!r}, ...)")

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {"name": self._name, "generation": self._last or "none yet"}
        if self._buffer is not None:
            rows |= state_row(self._buffer)
        if self._deltas:
            rows["deltas"] = f"a whole state every {self._deltas}th time"
        return described("Publisher", rows)

    def _find(self) -> bool:
        """Return True if a state of that name exists, from now on or before: this Publisher publishes it."""
        if self._buffer is not None:
            return True
        try:
            found = self._client.open(self._name)
        except NotFoundError:
            return False
        _check_no_training(self._asked, found)
        if found.versions < 2 or not found.table:
            raise AlreadyExistsError(
                f"{self._asked}: a buffer of that name exists, and is not a published state; delete it (smb rm "
                f"{self._name}), or publish under another name"
            )
        self._create(found.table, about_of(self._asked, found)["tied"], {})
        return True

    def _make(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Create the state's buffer, or open it. The tensors may have no values."""
        tied = _tied(tensors)
        if self._ranks is not None:
            tied = self._ranks.tell(tied)  # a rank whose shards are empty cannot know which tensors are tied
        stored = {each: tensor for each, tensor in tensors.items() if each not in tied}
        forms = {each: (tuple(tensor.shape), self._kind(tensor)) for each, tensor in stored.items()}
        self._create(forms, tied, stored)

    def _create(self, forms: Mapping[str, Any], tied: dict[str, str], stored: Mapping[str, torch.Tensor]) -> None:
        """As _make, of stored tensors by their forms. Only ranks need the tensors themselves."""
        asked, client, name, ranks, deltas = self._asked, self._client, self._name, self._ranks, self._deltas
        if ranks is not None:
            check_same(asked, ranks, forms)
        about = {"deltas": deltas, "tied": tied, "part": self._names is not None}
        if deltas:
            about["log"] = LOG_FORMAT
        options = {**self._options, "metadata": {**(self._options.get("metadata") or {}), ABOUT: about}}
        placement = {key: value for key, value in options.items() if key in ("servers", "stripe", "replicas")}
        made: list[Buffer] = []
        wholes: WholeWriter | ShardWriter
        writer: WholeWriter | ShardWriter | DeltaWriter
        try:
            with _agreed(ranks):
                if ranks is None or ranks.speaks:
                    try:
                        buffer = create(client, made, name, tensors=forms, versions=self._versions, **options)
                    except AlreadyExistsError:
                        _check_no_training(asked, client.open(name))
                        raise
                    found = about_of(asked, buffer)
                    if found != about:
                        raise InvalidArgumentError(
                            f"{asked}: it exists, published with {_described(found)}, not {_described(about)}; do "
                            f"as before, or delete it"
                        )
            if ranks is None:
                wholes = WholeWriter(buffer)
            else:
                with ranks.agreed():
                    if not ranks.speaks:
                        buffer = client.open(name)
                wholes = ShardWriter(buffer, ranks, parts_of(buffer, ranks, stored))
            writer = DeltaWriter(client, buffer, wholes, deltas, placement, made, ranks) if deltas else wholes
            with _agreed(ranks):
                if ranks is None or ranks.speaks:
                    if self._relays is not None:
                        client.relay(name, self._relays)
                    for file, content in self._files.items():
                        with smb.open_file(f"{name}/{file}", "w", client=client) as written:
                            written.write(content)
        except BaseException:
            with suppress(Error):  # the first error says more
                _give_up(client, made)
            raise
        self._last = writer.generation
        self._tied, self._writer, self._buffer = tied, writer, buffer
        session_of(client).published.add(self)

    @property
    def buffer(self) -> Buffer:
        """The state's buffer. NotFoundError if it will be made by the first publication."""
        if self._buffer is None:
            raise NotFoundError(f"{self._asked}: the first publication makes the buffer, and there was none yet")
        return self._buffer

    @property
    def generation(self) -> int:
        """The latest generation, whoever published it; 0 before the first."""
        return 0 if self._buffer is None else self._writer.generation

    @property
    def last(self) -> int:
        """The generation that this Publisher published or found last; 0 before the first. Asks no server."""
        return self._last

    @property
    def source(self) -> str:
        """Always empty: a Publisher writes the state's own buffer, and no mirror."""
        return ""

    @property
    def sent_bytes(self) -> int:
        """Bytes that the last publication sent, without frames; with a mesh, from this rank."""
        return 0 if self._buffer is None else self._writer.sent_bytes

    def publish(self, state: State | Pairs | None = None, *, timeout: float = _PATIENCE_S) -> int:
        """Publish the state (default: the one that the Publisher was made with) as it is now, and return its
        generation.

        Readers see it at once and as a whole, and waiting readers are woken. Blocks while readers have pinned every
        version but the latest: for at most a second less than `timeout` (seconds), at least 30, and then goes on. So by
        default readers can delay a trainer, but not stop it. With a shorter `timeout` TimeoutError is raised then:
        nothing was published, and the call may be repeated or left out. After 2 s of waiting a warning in the log names
        the reader. Raises InvalidArgumentError if names, shapes or dtypes differ from the first time.

        ```python
        publisher = smb.torch.Publisher(client, "digits", model)
        publisher.publish()  # 1: the first generation
        publisher.publish((name, tensor) for name, tensor in model.state_dict().items())  # 2, one tensor at a time
        ```

        `state` may be an iterable of pairs (name, tensor) in any order, such as a generator that gathers one tensor
        after the other. Each tensor is sent before the next one is asked for. With `deltas` each is compared with a
        copy of the former state, and the changes are sent at the end. Names that are tied may be left out. If the
        iterable raises, or gives too few tensors, a name twice, or another name, shape or dtype, this raises, and
        nothing is published. Other trainers of that name wait meanwhile. Not for a state that several ranks publish.

        If names and shapes are not known at the first publication, an iterable that can be read only once is kept in a
        temporary file (in $TMPDIR) until its end, and sent then. The state that exists under that name, or a state or
        shapes given to the Publisher, make this unnecessary.
        """
        began = self.costs.now()
        with self._turn:
            if state is None or isinstance(state, (torch.nn.Module, Mapping)):
                copied = self._take(state)
                return self._publish(self._writer.publish, timeout, copied, lambda: self.costs.now() - began)
            with self._known(state) as pairs:
                writer = self._pair_writer()
                return self._publish(
                    lambda asked, wait: writer.publish_pairs(asked, pairs, wait),
                    timeout,
                    None,
                    lambda: self.costs.now() - began,
                )

    def publish_async(self, state: State | Pairs | None = None, *, timeout: float = _PATIENCE_S) -> Future[int]:
        """Publish in the background, and return a future. The state may change as soon as this returns.

        Blocks while an earlier publication of this Publisher is in progress. Otherwise as publish(). An iterable of
        pairs is read to its end first, so it takes memory for a copy of the state, too.

        ```python
        publisher = smb.torch.Publisher(client, "digits", model)
        future = publisher.publish_async()
        optimizer.step()  # does not change what is published
        future.result()  # 1: the generation
        ```
        """
        began, copied = self.costs.now(), None
        self._turn.acquire()
        try:
            if state is None or isinstance(state, (torch.nn.Module, Mapping)):
                copied = self._take(state)
            else:
                with self._known(state) as pairs:
                    self._pair_writer().take_pairs(pairs)
            stood = self.costs.now() - began
            future = self.buffer.submit(lambda: self._publish(self._writer.publish, timeout, copied, lambda: stood))
        except BaseException:
            self._turn.release()
            raise
        future.add_done_callback(lambda _: self._turn.release())
        return future

    @contextmanager
    def _known(self, pairs: Pairs) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Make the buffer, if there is none, and give the pairs as they are stored, each once it is asked for."""
        self._pairs.check(pairs)
        with ExitStack() as spooled:
            again: Pairs = pairs
            if not self._find():
                if is_repeatable(pairs):
                    forms = self._pairs.forms(pairs)
                else:
                    again = spool = spooled.enter_context(Spool(self._asked))
                    spool.fill(self._pairs.on_host(pairs))
                    forms = spool.forms
                if not forms:
                    raise InvalidArgumentError(f"{self._asked}: there are no tensors to publish")
                self._create(forms, {}, {})
            yield self._pairs.stored(again, self.buffer.table, self._tied)

    def _pair_writer(self) -> WholeWriter | DeltaWriter:
        if self._ranks is not None or isinstance(self._writer, ShardWriter):  # the latter has ranks, too
            raise InvalidArgumentError(
                f"{self._asked}: each of several ranks publishes its shards; pass the sharded model or its state_dict, "
                f"not pairs"
            )
        return self._writer

    def explain(self) -> StateExplanation:
        """Return what publishing has cost this process so far: bytes, copies, time, transport, and what may help.
        Asks no server. Raises NotFoundError before the first publication if that makes the buffer.

        ```python
        print(publisher.explain())
        ```
        """
        tensors = (
            PublishedTensor(name, tuple(info.shape), info.dtype.name, info.nbytes)
            for name, info in self.buffer.table.items()
        )
        return state_explained(self.buffer, self.ROLE, self._last, self.costs, self.source, tensors)

    def _publish(
        self, publish: Callable[[str, float], int], timeout: float, copied: int | None, stood: Callable[[], float]
    ) -> int:
        """Publish what was taken, of which `copied` bytes were copied. `stood` says for how many seconds the caller
        stood still.
        """
        sure, self._sure = self._sure, False
        generation = publish(self._asked, timeout)
        between, self._last, self._sure = generation - self._last - 1, generation, True
        self.costs.count(self._writer.sent_bytes, copied, stood())
        note_transports(self.costs, self.buffer)
        if sure and between and self._alone and (self._ranks is None or self._ranks.speaks):
            self._alone = False
            _log.warning(
                "%s: generation %d is ours, but %d between it and our last one are not. Another trainer "
                "publishes under this name, and readers get both trainers' states in turn. Stop one, or give it "
                "another name",
                self._asked,
                generation,
                between,
            )
        return generation

    def _take(self, state: State | None) -> int:
        """Copy a state; return the number of bytes. With ranks a failure is raised by `_publish`, at all of them."""
        given = self._source if state is None else state
        if given is None:
            raise InvalidArgumentError(
                f"{self._asked}: this Publisher was made without a state; pass one: publish(model), or an iterable of "
                f"pairs (name, tensor)"
            )
        if self._buffer is None and not self._find():
            values = given.parameters() if isinstance(given, torch.nn.Module) else given.values()
            if any(map(is_in_several_ranks, values)):
                raise InvalidArgumentError(
                    f"{self._asked}: the state lies in several ranks; make the Publisher with it: Publisher(client, "
                    f"name, model)"
                )
            self._make(self._selected(self._asked, given))
        try:
            return self._check_and_take(given)
        except Exception as error:
            if self._ranks is None or isinstance(self._writer, WholeWriter):  # the latter has no ranks, either
                raise
            self._writer.fail(error)
            return 0

    def _check_and_take(self, state: State) -> int:
        asked = self._asked
        given = self._selected(asked, state)
        for name, first in self._tied.items():
            if name in given and first in given and not _same_values(given[name], given[first]):
                raise InvalidArgumentError(
                    f"{asked}: {name} and {first} were one tensor at the first time, and now they differ; tie them "
                    f"again, or publish under another name"
                )
            if given.pop(name, None) is None:
                raise InvalidArgumentError(f"{asked}: {name} is missing; it is published as one tensor with {first}")
        ours = {name: (info.shape, getattr(torch, info.dtype.name)) for name, info in self.buffer.table.items()}
        check_same_tensors(
            asked, {name: (tuple(tensor.shape), self._kind(tensor)) for name, tensor in given.items()}, ours
        )
        for name, tensor in given.items():
            check_dense(asked, name, tensor)
        return self._writer.take(given)

    def _kind(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype

    def _selected(self, asked: str, state: State) -> dict[str, torch.Tensor]:
        """Return the tensors that names= selects. The other entries may be anything."""
        given: Mapping[str, Any] = plain_state(state) if isinstance(state, torch.nn.Module) else state
        if self._ranks is None:  # with a single rank all shards are here
            given = {name: local_of(each) if is_sharded(each) else each for name, each in given.items()}
        if callable(self._names):
            return _tensors(asked, {name: each for name, each in given.items() if self._names(name)})
        if self._names is None:
            return _tensors(asked, given)
        if missing := sorted(self._names - given.keys()):
            raise InvalidArgumentError(f"{asked}: names= has {missing[0]!r}, but the state has no such tensor")
        return _tensors(asked, {name: each for name, each in given.items() if name in self._names})


def publish(client: Client, name: str, state: State | Pairs, **options: Any) -> int:
    """Publish a module's state, a state_dict, or an iterable of pairs (name, tensor), once. Return its generation.

    ```python
    smb.torch.publish(client, "policy", model)
    ```

    The same as Publisher(...).publish(). To publish often, keep a Publisher: it reuses its memory.
    """
    if isinstance(state, (torch.nn.Module, Mapping)):
        return Publisher(client, name, state, **options).publish()
    return Publisher(client, name, **options).publish(state)


def _give_up(client: Client, made: Sequence[Buffer]) -> None:
    """Delete the buffers that a failed Publisher has made, unless another one has published there since. While a
    buffer's server is away that is unknown, and the buffer stays.
    """
    for buffer in made:
        with suppress(NotFoundError):
            if buffer.versions > 1 and buffer.version:
                return
    for buffer in reversed(made):
        with suppress(Error):
            client.delete(buffer, missing_ok=True)


def _check_no_training(asked: str, found: Buffer) -> None:
    """Raise AlreadyExistsError if the name is a training's: what it says of other buffers, to delete them, would end
    that.
    """
    if METADATA in found.metadata:
        raise AlreadyExistsError(f"{asked}: {found.name!r} is a training; publish its model under another name")


def _contents(asked: str, files: Mapping[str, bytes | str | os.PathLike[str]]) -> dict[str, bytes]:
    """Return what the files have in them. Raises InvalidArgumentError for names that a generation's directory has."""
    found: dict[str, bytes] = {}
    for file, content in files.items():
        if "/" in file or file in ("", ".", "..", "latest", "model.safetensors") or file.isdigit():
            raise InvalidArgumentError(
                f"{asked}: files= has {file!r}; take a name without a slash that is not a number, and neither 'latest' "
                f"nor 'model.safetensors', which the directory of a state has itself"
            )
        found[file] = content if isinstance(content, bytes) else Path(content).read_bytes()
    return found


def _agreed(ranks: Ranks | None) -> AbstractContextManager[None]:
    """Run the block. With ranks, an error at one rank ends it at all."""
    return nullcontext() if ranks is None else ranks.agreed()


def _tied(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the further names of tensors that have several: name to the first name."""
    first: dict[tuple[Any, ...], str] = {}
    return {
        name: kept
        for name, tensor in tensors.items()
        if local_of(tensor).numel()
        and tensor.device.type != "meta"
        and (kept := first.setdefault(_memory_of(tensor), name)) != name
    }


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    here = local_of(tensor)
    return here.device, here.data_ptr(), here.dtype, tensor.shape, here.stride(), here.is_conj(), here.is_neg()


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same values, as far as they lie in this process."""
    here, there = local_of(one), local_of(other)
    if _memory_of(one) == _memory_of(other):
        return True
    if here.dtype != there.dtype or here.shape != there.shape:
        return False
    there = there.to(here.device)
    # NaN counts as equal to NaN, since both are published as they are.
    return bool(((here == there) | ((here != here) & (there != there))).all())


def _described(about: dict[str, Any]) -> str:
    return (
        f"deltas={about['deltas']}, {len(about['tied'])} tied names, {'a part' if about['part'] else 'all'} of a state"
    )


def _tensors(asked: str, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the state as names and tensors that can be copied byte by byte."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(
                f"{asked}: {name!r} is a {type(tensor).__name__}, not a tensor; leave it out (names=lambda name: not "
                f"name.endswith({name.rpartition('.')[2]!r})), or put it into metadata="
            )
        # A model on the meta device has names and shapes, which are enough.
        check_dense(asked, name, tensor, with_values=False)
        tensors[name] = tensor.detach()
    return tensors
