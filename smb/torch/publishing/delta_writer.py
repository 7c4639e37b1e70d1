"""Generations as deltas: the changes since the last generation, bit for bit, with whole states in between.

There are two buffers. NAME holds whole states, by its versions. NAME.log has an entry for each generation, and the
deltas (smb/relay/publication_log.py). A generation exists once its entry is published. Readers: delta_reader.py.

A generation is published whole, before its entry, if its delta would be large, if it is the first one of a trainer's
process, or after a failure. Ranks of a mesh write one generation together (shard_writer.py): each its parts of the
delta, or its shards of the whole state; the first rank also writes the table of the parts and the entry, and commits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.engine import SUM_PRIME, memory_of, state_sum
from smb.errors import AlreadyExistsError, Error
from smb.published import LOG
from smb.relay.publication_log import LogEntry, PublicationLog, log_of
from smb.torch.publishing.delta_parts import DeltaParts, compare, pieces_of, rows_of, table_of
from smb.torch.publishing.shard_writer import Late, ShardWriter, SharedTurn, publish_together
from smb.torch.ranks import Alone, Ranks

if TYPE_CHECKING:
    import torch

    from smb.buffer import Buffer
    from smb.call.versions import Publication
    from smb.client import Client
    from smb.torch.publishing.whole_writer import WholeWriter

DELTAS_MAX = 1024
_log = logging.getLogger("smb")


def create(client: Client, made: list[Buffer], name: str, *form: Any, **options: Any) -> Buffer:
    """As Client.create, if the buffer may exist already. A buffer that this call had to make is added to `made`."""
    try:
        buffer = client.create(name, *form, **options)
    except AlreadyExistsError:
        return client.create(name, *form, exist_ok=True, **options)
    made.append(buffer)
    return buffer


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
                self._log = log_of(buffer, deltas, state)
        with self._ranks.agreed():
            if not self._ranks.speaks:
                self._log = log_of(client.open(name), deltas, state)
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
