"""The relay of a ring of deltas: fills its mirror with what a generation names, before that shows beside it.

No thread of its own: the relay of what describes generations calls it (smb/relay/mirror.py). Deltas lie in the mirror
where they lie in the source. They come in the order of their generations, each in pieces from the plan's parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.relay import arrived
from smb.relay.arrived import Arrived
from smb.relay.fill import Fill
from smb.relay.filler import TURN_S, Filler
from smb.relay.generations import Entry, Head
from smb.spi import versions_of

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.client import Client


class RingRelay:
    """Keeps the mirror of a ring filled. `stop` it."""

    def __init__(self, client: Client, server: str, name: str, source: str) -> None:
        self.name = name
        self.version = 0  # the generation whose delta came last
        self.published = 0
        self.wanted_bytes = 0  # of what is being brought
        self._came_bytes = 0
        self._filler = Filler(client, name, source, self)
        self._client = client
        self._server = server
        self._open: tuple[Buffer, Buffer, Buffer] | None = None  # the source, the mirror, what has arrived there
        self._heads: Buffer | None = None  # the source's
        self._head = Head()  # a recent one of these

    def stop(self) -> None:
        """Begin no other delta, and leave the one that is under way."""
        self._filler.stop()

    def plan(self, parents: Sequence[tuple[float, str]]) -> None:
        """Take the next delta from these."""
        self._filler.parents = parents

    def rates(self) -> dict[str, float]:
        """Return in bytes per second what came from each parent while it came."""
        return self._filler.rates()

    def arrived_bytes(self) -> int:
        """Return how much there is of what is being brought."""
        return self._came_bytes + self._filler.arrived_bytes()

    def bring(self, heads: Buffer, generation: int, words: np.ndarray[Any, Any]) -> bool:
        """Have what that generation names in the mirror; return whether it is: not if it was stopped. `heads`: the
        source of descriptions, `words`: this one. Raises NotFoundError if the source has overwritten some of it.
        """
        self.published = generation
        try:
            if self._open is None:
                mirror, beside = arrived.open_mirror(self._client, self.name, self._server)
                self._open = self._client.open(self._filler.source), mirror, beside
            source, mirror, beside = self._open
            self._heads, self._head = heads, Head.of(f"mirror {self.name!r}", words, generation, source.size)
            missing, oldest = missing_of(self._head, source, arrived.look(beside))
            self._came_bytes, self.wanted_bytes = 0, sum(entry.nbytes for entry in missing)
            done = not missing or self._take(missing, oldest)
            if done:
                self.version = generation
            return done
        except BaseException:
            self._open = None
            self._filler.forget()
            raise
        finally:
            self._came_bytes = self.wanted_bytes = 0

    def _take(self, missing: Sequence[Entry], oldest: int) -> bool:
        assert self._open is not None
        source, mirror, beside = self._open
        publication = versions_of(mirror).begin(TURN_S, TURN_S, TURN_S)
        try:
            with publication.kept():
                for entry in missing:
                    fill = Fill(entry.pieces(source), entry.generation, source.name, self._filler.parents)
                    if not self._filler.bring(fill, publication, beside, oldest):
                        return False
                    self.version = entry.generation
                    self._came_bytes += entry.nbytes
            return True
        finally:
            publication.give_up()

    def copy_of(self, has: Arrived) -> int:  # noqa: ARG002 - as Whereabouts
        """As Whereabouts: a ring has one copy."""
        return 0

    def find(self, buffer: Buffer, version: int, has: Arrived | None) -> int:
        """As Whereabouts."""
        if has is not None:
            return 0 if has.oldest <= version < has.version else -1
        assert self._heads is not None
        head = self._head
        if self._heads.version >= head.generation + 2:  # what our head named may be gone, the latest one knows
            head = self._head = Head.read(f"mirror {self.name!r}", self._heads, buffer.size)
        return 0 if any(entry.generation == version for entry in head.entries) else -1  # others may set an older one


def missing_of(head: Head, ring: Buffer, has: Arrived) -> tuple[tuple[Entry, ...], int]:
    """Return what a mirror lacks of the deltas that a generation names, and the oldest one that stays there while they
    come. Where it has none of them, or some between are gone: those since the last whole state. Pure.
    """
    there = [entry for entry in head.entries if entry.is_in(ring, has)]
    newest = there[-1].generation if there else head.anchor_generation
    missing = tuple(entry for entry in head.entries if entry.generation > newest)
    if there:
        return missing, max(has.oldest, head.entries[0].generation)
    return missing, missing[0].generation if missing else 0
