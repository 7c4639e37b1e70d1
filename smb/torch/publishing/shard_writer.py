"""One generation from all ranks of a mesh: each rank writes its own shards; the first rank, the speaker, begins and
commits.

The speaker has the publisher's turn, and sends the others its fencing token. It commits once every rank has reported
that all of its shards are written, so a generation with a missing part is never committed. If a rank dies, nobody sees
its shards. If the speaker dies, its turn ends by itself, and the others' later writes are refused as soon as the next
publisher has begun. A stopped rank holds up its mesh, as in any collective, but no other trainer: the speaker gives up
its turn when another rank takes much longer than the speaker did.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from smb.call.versions import Publication
from smb.errors import APPLIED, NOT_APPLIED, CallOutcome, Error, InvalidArgumentError, UnavailableError
from smb.pins import PIN_S_MAX
from smb.spi import versions_of
from smb.torch.publishing.state_bytes import PartBytes
from smb.torch.ranks import Alone, Ranks, world
from smb.torch.tensor_slices import TensorSlice, is_sharded, sharding_of, slice_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh

    from smb.buffer import Buffer

Result = TypeVar("Result")
# The outcome of a commit: its generation, or its failure.
_Said: TypeAlias = "tuple[int, tuple[type[Error], str, CallOutcome] | None]"

_log = logging.getLogger("smb")
_TURN_S = 10.0  # how long the next publisher waits after the speaker was killed; a live speaker renews it
# After the speaker has written its shards, other ranks may write for _LATE_TIMES times as long, plus _LATE_S seconds.
_LATE_TIMES = 10.0
_LATE_S = 60.0
# For a rank whose shards lie in many places: calls in flight at once, and calls that one thread makes in a row.
_WRITES = 4
_IN_A_ROW = 16


def ranks_of(asked: str, state: torch.nn.Module | Mapping[str, Any], mesh: DeviceMesh | None) -> Ranks | None:
    """Return the ranks that publish a state together: those of `mesh`; without a mesh, if the state has DTensors, all
    ranks of torch.distributed. None if this process publishes alone. Raises InvalidArgumentError.
    """
    if mesh is None:
        tensors: Iterable[Any] = state.parameters() if isinstance(state, torch.nn.Module) else state.values()
        if not any(is_sharded(tensor) for tensor in tensors):
            return None
        mesh = world()
    return None if mesh is None or mesh.size() == 1 else Ranks(mesh, asked)


def parts_of(buffer: Buffer, ranks: Ranks, tensors: Mapping[str, torch.Tensor]) -> PartBytes:
    """Return memory for the parts of a state that this rank publishes. With all ranks. `tensors` are the stored tensors
    as this rank has them.
    """
    with ranks.agreed():
        parts = {name: slice_of(name, tensor) for name, tensor in tensors.items()}
        # A tensor that is not a DTensor may differ between ranks (running statistics): the speaker's is published.
        apart = {name for name, tensor in tensors.items() if not is_sharded(tensor)}
    everywhere = ranks.gather(parts)
    mine: dict[str, TensorSlice] = {}
    for number, (name, part) in enumerate(parts.items()):
        if part is None:
            continue
        holders = [rank for rank, each in enumerate(everywhere) if each[name] == part]
        # One of the ranks with the same shard publishes it, in turn from tensor to tensor.
        if ranks.rank == (0 if name in apart else holders[number % len(holders)]):
            mine[name] = part
    memory = PartBytes(buffer, mine)
    memory.shardings = {name: sharding_of(tensors[name]) for name in mine}
    return memory


class ShardWriter:
    """One rank's side. All ranks make it, take a state, and publish together."""

    def __init__(self, buffer: Buffer, ranks: Ranks, memory: PartBytes) -> None:
        """With all ranks. `memory` is that of `parts_of`."""
        self._buffer = buffer
        self._ranks = ranks
        self._kept: Exception | None = None  # the error of taking the state, which `publish` raises at all ranks
        self.memory = memory
        self.take = memory.take

    @property
    def generation(self) -> int:
        """The generation that was published last."""
        return int(self._buffer.version)

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that this rank sends in each generation."""
        return self.memory.nbytes

    def fail(self, error: Exception) -> None:
        """Let the next publication fail at all ranks with the error for which this rank's state was refused."""
        self._kept = error

    def publish(self, asked: str, timeout: float) -> int:
        """Publish the state that all ranks took last. Return its generation. With all ranks. Raises one rank's failure
        at all ranks.
        """
        kept, self._kept = self._kept, None
        self._ranks.agree(kept)
        return self.publish_whole(asked, timeout, Late(asked))

    def publish_whole(self, asked: str, timeout: float, late: Late) -> int:
        """As publish, of a state that all ranks have taken."""
        return publish_together(self._buffer, self._ranks, asked, timeout, late, lambda turn: turn.do(self._write))

    def _write(self, publication: Publication) -> None:
        ranges = list(self.memory.ranges)

        def write(first: int) -> None:
            for each in ranges[first : first + _IN_A_ROW]:
                publication.write(*each)

        starts = range(0, len(ranges), _IN_A_ROW)
        if len(starts) < 2:
            for first in starts:
                write(first)
            return
        with ThreadPoolExecutor(min(_WRITES, len(starts)), "smb-shards") as threads:
            for _ in threads.map(write, starts):  # the first failure cancels calls that have not begun
                pass


class SharedTurn:
    """A publisher's turn, in which all ranks write."""

    def __init__(self, ranks: Ranks | Alone, publication: Publication, late: Late) -> None:
        self._ranks = ranks
        self._publication = publication
        self.late = late

    @property
    def version(self) -> int:
        """The number of the version that is written."""
        return self._publication.version

    def do(self, do: Callable[[Publication], Result]) -> Result:
        """Run `do` at all ranks, and return this rank's result when all have done it. Raises one rank's failure at all
        ranks.
        """
        with self._ranks.agreed(), self.late.working():
            return do(self._publication)


def publish_together(
    buffer: Buffer,
    ranks: Ranks | Alone,
    asked: str,
    timeout: float,
    late: Late,
    fill: Callable[[SharedTurn], None],
) -> int:
    """Publish a version that all ranks write, each by its own call of `fill`, and return the version's number. With all
    ranks. What `fill` raises at one rank it must raise at all ranks.
    """
    versions = versions_of(buffer)
    if not ranks.speaks:
        ranks.agree(None)  # until the first rank has the turn
        fill(SharedTurn(ranks, versions.take_part(ranks.tell()), late))
        return _heard(ranks.tell())
    try:
        begun = versions.begin(timeout, _TURN_S, max(PIN_S_MAX, timeout - 1.0))
    except BaseException as error:
        ranks.agree(error)
        raise
    late.begin()
    with begun.kept(late):
        try:
            ranks.agree(None)
            ranks.tell(begun.turn)
            fill(SharedTurn(ranks, begun, late))
        except BaseException as error:
            begun.give_up()
            if isinstance(error, UnavailableError) and error.outcome is not NOT_APPLIED:
                raise UnavailableError(f"{asked}: nothing was published: {error}", outcome=NOT_APPLIED) from error
            raise
        late.over()
        failure: Error | None = None
        said: _Said
        try:
            said = begun.commit(), None
        except Error as error:
            failure, said = error, (0, (type(error), str(error), error.outcome))
    try:
        ranks.tell(said)
    except UnavailableError as error:
        if failure is None:
            raise UnavailableError(
                f"{asked}: generation {said[0]} was published, but {error}", outcome=APPLIED
            ) from error
    if failure is not None:
        raise failure
    return said[0]


def _heard(said: _Said) -> int:
    """Return the commit's version, or raise its failure."""
    version, failure = said
    if failure is not None:
        kind, text, outcome = failure
        raise kind(text, outcome=outcome)
    return version


class Late:
    """Says whether a rank has been writing for so long that others should not wait for it. Called from other threads,
    one for each buffer to which the ranks publish.
    """

    def __init__(self, asked: str) -> None:
        self._asked = asked
        self._ends = float("inf")
        self._said = False

    def begin(self) -> None:
        """Note that all ranks now hear of a turn."""
        self._ends = time.monotonic() + _LATE_S

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """This rank does in the block what the others do, too."""
        began, self._ends = time.monotonic(), float("inf")
        try:
            yield
        finally:  # also after a failure, which the other ranks have to hear of
            now = time.monotonic()
            self._ends = now + _LATE_TIMES * (now - began) + _LATE_S

    def over(self) -> None:
        """Note that no rank is waited for now."""
        self._ends = float("inf")

    def __call__(self) -> bool:
        """Return True if the turn should be given up."""
        if time.monotonic() < self._ends:
            return False
        if self._said:
            return True
        self._said = True
        _log.warning(
            "%s: a rank of the mesh has not written its shards long after this one did; the turn is given up, and this "
            "publication will be refused",
            self._asked,
        )
        return True


def check_same(asked: str, ranks: Ranks, forms: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError at all ranks unless all have tensors of the same names, shapes and dtypes, in the same
    order.
    """
    said = ranks.gather({name: str(form) for name, form in forms.items()})
    for rank, theirs in enumerate(said):
        if theirs != said[0] or list(theirs) != list(said[0]):
            differ = sorted(
                name for name in theirs.keys() | said[0].keys() if theirs.get(name) != said[0].get(name)
            ) or ["the order of their names"]
            raise InvalidArgumentError(
                f"{asked}: ranks 0 and {rank} of the mesh have other tensors ({len(differ)} differ): "
                f"{'; '.join(differ[:3])}; mesh= must have the ranks of one model"
            )
