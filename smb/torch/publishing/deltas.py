"""Generations as deltas: the changes since the last generation, bit for bit, with whole states in between.

There are two buffers. NAME holds whole states, by its versions. NAME.log has an entry for each generation, and the
deltas (smb/relay/publication_log.py). A generation exists once its entry is published.

A reader takes the entries after the generation that it has, and the deltas that they name. If these deltas are gone, or
larger than a state, the reader begins with the last whole state. At the end it compares the state's sum: a state with
another sum than the published one is never shown, but read anew. A reader of parts takes the parts of a delta that
concern it (delta_parts.py), and compares their checksums.

A generation is published whole, before its entry, if its delta would be large, if it is the first one of a trainer's
process, or after a failure. Ranks of a mesh write one generation together (shard_writer.py): each its parts of the
delta, or its shards of the whole state; the first rank also writes the table of the parts and the entry, and commits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.engine import SUM_PRIME, delta_apply, memory_of, state_sum
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, NotFoundError, UnavailableError
from smb.published import LOG
from smb.relay.publication_log import LogEntry, PublicationLog, chain
from smb.torch.publishing.delta_parts import Choice, DeltaParts, compare, pieces_of, rows_of, table_of
from smb.torch.publishing.shard_writer import Late, ShardWriter, SharedTurn, publish_together
from smb.torch.ranks import Alone, Ranks

if TYPE_CHECKING:
    import torch

    from smb.buffer import Buffer
    from smb.call.versions import Publication
    from smb.client import Client
    from smb.relay.reader_source import Nearest
    from smb.torch.publishing.state_bytes import PartBytes, StateBytes
    from smb.torch.publishing.whole_writer import WholeWriter

DELTAS_MAX = 1024
_log = logging.getLogger("smb")
_TRIES = 100  # attempts of a reader while publications overtake it
_TRIES_NEAR = 3  # attempts at a mirror before the reader takes another one


def create(client: Client, made: list[Buffer], name: str, *form: Any, **options: Any) -> Buffer:
    """As Client.create, if the buffer may exist already. A buffer that this call had to make is added to `made`."""
    try:
        buffer = client.create(name, *form, **options)
    except AlreadyExistsError:
        return client.create(name, *form, exist_ok=True, **options)
    made.append(buffer)
    return buffer


def _log_of(buffer: Buffer, deltas: int, state: Buffer) -> PublicationLog:
    """Return the log in a buffer. Raises InvalidArgumentError if no Publisher of that state made the buffer."""
    if buffer.size != PublicationLog.form(deltas, state.nbytes)[0]:
        raise InvalidArgumentError(
            f"{buffer.name!r} was not made by a Publisher of {state.name!r} with deltas={deltas}; delete it, or "
            f"publish under another name"
        )
    return PublicationLog(buffer)


class DeltaWriter:
    """A trainer's side. One thread at a time. All ranks of a mesh make it, take a state, and publish together."""

    def __init__(
        self,
        client: Client,
        state: Buffer,
        wholes: WholeWriter | ShardWriter,
        deltas: int,
        placement: Mapping[str, Any],
        made: list[Buffer],
        ranks: Ranks | None = None,
    ) -> None:
        """`state` is the state's buffer, and `wholes` publishes in it, together with `ranks`. A log is made if it does
        not exist, and added to `made`.
        """
        self._ranks = ranks or Alone()
        size, metadata = PublicationLog.form(deltas, state.nbytes)
        name = state.name + LOG
        with self._ranks.agreed():
            if self._ranks.speaks:
                buffer = create(client, made, name, size, "uint8", metadata=metadata, **placement)
                self._log = _log_of(buffer, deltas, state)
        with self._ranks.agreed():
            if not self._ranks.speaks:
                self._log = _log_of(client.open(name), deltas, state)
        self._wholes = wholes
        self._memory = wholes.memory
        self._pieces = pieces_of(self._memory)  # made once: a shard that is cut into columns has many runs
        self._deltas = deltas
        self._last: LogEntry | None = None  # the entry under which the memory was published; None: publish it whole
        self._begin = 0  # where the deltas since the last whole state begin in the ring
        self._parts: DeltaParts | None = None  # what has changed since `_last`
        self._kept: Exception | None = None  # the error of taking the state, which `publish` raises at all ranks
        self.sent_bytes = 0

    @property
    def generation(self) -> int:
        """The generation that was published last."""
        return self._log.buffer.version

    def take(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Copy a state, or a rank's shards of it. Return the number of bytes."""
        self.take_pairs(tensors.items())
        return self._memory.bytes_of(tensors)

    def take_pairs(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As take, one tensor after the other. If the pairs fail, the next state is published whole."""
        last, self._last, self._parts = self._last, None, None
        parts = compare(self._memory, self._pieces, pairs, self._log.delta_max)
        if last is not None and parts is not None:
            self._last, self._parts = last, parts

    def fail(self, error: Exception) -> None:
        """Let the next publication fail at all ranks with the error for which this rank's state was refused."""
        self._last, self._kept = None, error

    def publish(self, asked: str, timeout: float) -> int:
        """Publish the state that was taken last. Return its generation. With all ranks. Raises one rank's failure at
        all ranks.
        """
        ranks, kept, last, parts = self._ranks, self._kept, self._last, self._parts
        self._kept = self._last = self._parts = None
        self.sent_bytes = 0
        ranks.agree(kept)
        # The whole state is published unless all ranks know what has changed since one generation.
        offers = ranks.gather(None if last is None or parts is None else (last, parts.rows.tobytes(), parts.added))
        late = Late(asked)
        made: list[tuple[LogEntry, bool]] = []

        # In the publisher's turn, which refuses late writes of a former trainer: its entry and its delta would lie
        # where ours do.
        def fill(turn: SharedTurn) -> None:
            planned: tuple[LogEntry, bool] | None = None
            if last is not None and parts is not None and all(offer is not None for offer in offers):
                planned = ranks.tell(self._planned(turn.version, offers) if ranks.speaks else None)
                if planned is not None:
                    self._send_delta(turn, planned[0], offers, parts)
            made.append(planned or (self._send_whole(asked, turn, timeout), False))

        publish_together(self._log.buffer, ranks, asked, timeout, late, fill)
        entry, is_far = made[0]
        self._last = self._with_whole(asked, entry, timeout, late) if is_far else entry
        return entry.generation

    def publish_pairs(self, asked: str, pairs: Iterable[tuple[str, torch.Tensor]], timeout: float) -> int:
        """Publish a state that comes one tensor after the other. Return its generation."""
        self.take_pairs(pairs)
        return self.publish(asked, timeout)

    def _planned(self, generation: int, offers: Sequence[tuple[LogEntry, bytes, int]]) -> tuple[LogEntry, bool] | None:
        """Return the entry of a delta that all ranks make, and whether the whole state shall follow. None if the state
        must be published whole.
        """
        log, last = self._log, offers[0][0]
        if any(base != last for base, _, _ in offers) or generation != last.generation + 1:
            return None
        rows = rows_of(b"".join(each for _, each, _ in offers))
        nbytes = len(table_of(rows)) + int(rows["nbytes"].sum()) if len(rows) else 0
        position = log.next_position(last.end, nbytes)
        total = (last.total + sum(added for _, _, added in offers)) % SUM_PRIME
        made = replace(last, generation=generation, position=position, nbytes=nbytes, total=total)
        since, length = generation - made.whole_generation, made.end - self._begin
        if since > log.kept or length > log.room or nbytes > log.delta_max:
            return None  # readers could not get to it from the last whole state, or it is large
        return made, since >= self._deltas or length > log.room // 2

    def _send_delta(
        self, turn: SharedTurn, entry: LogEntry, offers: Sequence[tuple[LogEntry, bytes, int]], parts: DeltaParts
    ) -> None:
        """Write this rank's parts; the first rank also writes the table of all parts, and the entry."""
        ranks = self._ranks
        table = table_of(rows_of(b"".join(rows for _, rows, _ in offers)))
        before = [int(rows_of(rows)["nbytes"].sum()) for _, rows, _ in offers[: ranks.rank]]
        start, data = (0, table + parts.data) if ranks.speaks else (len(table) + sum(before), parts.data)

        def write(publication: Publication) -> None:
            if entry.nbytes and data:
                self._send(publication, self._log.position(entry) + start, np.frombuffer(data, np.uint8))
            if ranks.speaks:
                self._send(publication, self._log.slot(entry.generation), entry.to_words())

        turn.do(write)

    def _send_whole(self, asked: str, turn: SharedTurn, timeout: float) -> LogEntry:
        """Publish the whole state, with which readers may begin, and write its entry."""
        ranks, memory = self._ranks, self._memory

        def look(_: Publication) -> tuple[int, int]:
            end = self._end(asked, turn.version) if ranks.speaks else 0
            return end, state_sum(memory.width, memory.bytes, memory.runs)

        said = ranks.gather(turn.do(look))
        end, total = said[0][0], sum(each for _, each in said) % SUM_PRIME
        turn.late.over()  # the next turn may have to wait for readers; in it a stopped rank is noticed again
        version = self._publish_whole(asked, timeout, turn.late)
        entry = LogEntry(turn.version, end, 0, total, turn.version, version, total)
        if ranks.speaks:
            self._begin = end

        def write(publication: Publication) -> None:
            if ranks.speaks:
                self._send(publication, self._log.slot(entry.generation), entry.to_words())

        turn.do(write)
        return entry

    def _end(self, asked: str, generation: int) -> int:
        """Return where the delta of the generation before ends in the ring."""
        before = self._log.entries(self._log.buffer, generation - 1, generation - 2) if generation > 1 else ()
        if generation > 1 and not before:
            raise Error(
                f"{asked}: the log's last entry was not written by a Publisher; delete the state with its log, and "
                f"publish anew"
            )
        return before[-1].end if before else 0

    def _send(self, publication: Publication, start: int, content: np.ndarray[Any, Any]) -> None:
        publication.write(start, content.nbytes, memory_of(content))
        self.sent_bytes += content.nbytes

    def _with_whole(self, asked: str, made: LogEntry, timeout: float, late: Late) -> LogEntry:
        """Publish a generation whole that exists already, so that the next one names this whole state. Until then
        readers begin with the one before.
        """
        try:
            version = self._publish_whole(asked, timeout, late)
        except Error as error:  # the next generation tries again
            _log.warning("%s: generation %d is not there as a whole state yet: %s", asked, made.generation, error)
            return made
        self._begin = made.end
        return replace(made, whole_generation=made.generation, whole_version=version, whole_total=made.total)

    def _publish_whole(self, asked: str, timeout: float, late: Late) -> int:
        """Publish the memory as a version of the state's buffer, and return its number. With all ranks."""
        self.sent_bytes += self._memory.nbytes
        return self._wholes.publish_whole(asked, timeout, late)


class DeltaReader:
    """A follower's side: brings a state from its generation to the latest one. One thread at a time."""

    def __init__(
        self,
        client: Client,
        wholes: Buffer,
        nearest: Nearest,
        memory: StateBytes | PartBytes,
        deltas: int,
        timeout: float,
    ) -> None:
        """`nearest` chooses among the state's buffer and its mirrors. The log is read from the nearest one, too."""
        self._log = _log_of(client.open(wholes.name + LOG, timeout=timeout), deltas, wholes)
        self._wholes = nearest
        self._name = wholes.name
        self._logs = nearest.beside(self._log.buffer)
        self._memory = memory
        self.generation = 0  # the generation of `memory`
        self._returned = 0  # by the last read; mirrors that are behind this generation are not read
        self._total = 0
        self.received_bytes = 0

    @property
    def latest(self) -> int:
        """The generation that was published last."""
        return self._log.buffer.version

    def generations(self, versions: Collection[int]) -> tuple[int, ...]:
        """Return the generations that can be read now, if the state's buffer has these versions."""
        entries = self._log.entries(self._log.buffer, self.latest)
        return tuple(
            entry.generation
            for entry in entries
            if entry.whole_version in versions and chain(entries, entry.whole_generation, entry.generation) is not None
        )

    @property
    def mirror_name(self) -> str:
        """The state's mirror on the server from which generations come now; "" if they come from the source. For any
        thread.
        """
        name = self._logs.mirror_name
        return self._name + name.removeprefix(self._log.buffer.name) if name else ""

    @property
    def transports(self) -> tuple[str, ...]:
        """As Buffer.transports, of the log from which generations come."""
        return self._logs.transports

    def wait(self, generation: int, timeout: float | None) -> int:
        """As Buffer.wait, but until the nearest mirror has the generation, too."""
        return self._logs.wait(generation, timeout)

    def read(self, asked: str, wanted: int | None = None) -> int:
        """Bring the state to the latest generation of the nearest source, or to `wanted`, and return its number; 0
        before the first generation. Raises UnavailableError if publications overtake every attempt, NotFoundError if
        `wanted` is not there.
        """
        self.received_bytes = 0
        self._returned = self._logs.read(partial(self._read_from, asked), self._returned, wanted)
        return self._returned

    def _read_from(self, asked: str, source: Buffer, wanted: int | None) -> int:
        """As read, from the log or a mirror of it."""
        for _ in range(_TRIES if source is self._log.buffer else _TRIES_NEAR):
            latest = source.version
            if latest < (wanted or 0):
                raise NotFoundError(
                    f"{asked}: generation {wanted} is not published yet; the latest is {latest}; wait(generation=) "
                    f"waits for it"
                )
            to = latest if wanted is None else wanted
            if to in (0, self.generation):
                return to
            since = self.generation if self.generation < to else 0
            entries = self._log.entries(source, latest, since)
            deltas = chain(entries, since, to) if since else None
            chosen = None if deltas is None else self._chosen(source, deltas)
            if chosen is None or sum(each.nbytes for each in chosen) >= self._memory.nbytes:
                if since:
                    entries = self._log.entries(source, latest)
                if not entries:
                    continue  # later entries have overwritten them
                deltas = self._begin(entries, to)
                if deltas is None and to < latest:
                    raise NotFoundError(
                        f"{asked}: generation {wanted} can't be read any more, because the whole state before it was "
                        f"overwritten"
                    )
                chosen = None if deltas is None else self._chosen(source, deltas)
            if chosen is not None and deltas is not None and self._apply(source, latest, entries, deltas, chosen, to):
                return self.generation
        raise UnavailableError(
            f"{asked}: each attempt was overtaken by a publication, or read other bytes than were published; the state "
            f"is unchanged or empty; read again"
        )

    def _begin(self, entries: tuple[LogEntry, ...], to: int) -> tuple[LogEntry, ...] | None:
        """Read the last whole state before a generation. Return the deltas from there on, or None if one of them is
        gone.
        """
        wanted = next((entry for entry in entries if entry.generation == to), None)
        deltas = chain(entries, wanted.whole_generation, to) if wanted is not None else None
        if wanted is None or deltas is None:
            return None
        self.generation = 0
        try:
            self._wholes.read(self._memory.read, 0, wanted.whole_version)
        except NotFoundError:  # overwritten; a later entry names another one
            return None
        self.received_bytes += self._memory.nbytes
        if self._memory.is_whole:
            self._total = state_sum(self._memory.width, self._memory.bytes, self._memory.runs)
            if self._total != wanted.whole_total:
                return None
        self.generation = wanted.whole_generation
        return deltas

    def _chosen(self, source: Buffer, deltas: Sequence[LogEntry]) -> list[Choice] | None:
        """Return what to read of each delta; None if one has no valid table."""
        chosen = []
        for entry in deltas:
            read = partial(self._read_range, source, entry)
            chosen.append(Choice(read, entry.nbytes, None if self._memory.is_whole else self._memory.runs))
        return chosen if all(choice.is_valid for choice in chosen) else None

    def _read_range(self, source: Buffer, entry: LogEntry, start: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Read bytes of a delta."""
        self.received_bytes += nbytes
        return source.read(self._log.position(entry) + start, nbytes, out=np.empty(nbytes, np.uint8))

    def _apply(
        self,
        source: Buffer,
        latest: int,
        entries: tuple[LogEntry, ...],
        deltas: tuple[LogEntry, ...],
        chosen: Sequence[Choice],
        to: int,
    ) -> bool:
        """Bring the memory to that generation. Returns False if it is unchanged, or was spoiled."""
        read = [choice.parts() for choice in chosen]
        if deltas and not self._log.holds(source, deltas[0], latest):
            return False  # the deltas may have been overwritten; the memory is unchanged
        wanted = next(entry.total for entry in entries if entry.generation == to)
        self.generation = 0  # until all deltas are applied and the sum is right
        total: int | None = self._total
        memory = self._memory
        for delta in read:
            if delta is None or total is None:
                return False
            if len(delta):
                total = delta_apply(memory.width, memory.bytes, memory.runs, memory.count, delta, total)
        if total is None or (memory.is_whole and total != wanted):
            return False
        self.generation, self._total = to, total
        return True
