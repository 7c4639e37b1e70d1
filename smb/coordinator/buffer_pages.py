"""Replies that list buffers. They are made in another thread, in pages, and kept until something in them changes.

With thousands of buffers a page takes tens of milliseconds, in which the event loop could not renew a server's lease.
One page is made at a time, and callers who want the same one wait for it together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

from smb.coordinator.beside_loop import BesideLoop
from smb.coordinator.messages import buffer_message
from smb.coordinator.records import BufferRecord, Kind
from smb.coordinator.state import State
from smb.rpc import control_pb2 as pb
from smb.security.roles import Caller

PAGE_BUFFERS = 1000  # 160 KiB if each has one segment
PAGE_SEGMENTS = 8192  # 1 MiB; a page ends with the buffer that exceeds it
PAGE_ATTRIBUTE_BYTES = 1 << 20  # the same for the attributes of files; gRPC takes messages of 4 MiB
SCANNED_MAX = 4096  # records in which a folder is looked for in the loop: half a millisecond
PAGES_KEPT_MAX = 64  # of all namespaces; the least recently used one is dropped


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the pages depend on. `buffers` and `progress` are immutable, and replaced as a whole when they change."""

    buffers: Mapping[str, BufferRecord]
    progress: Mapping[str, Any]
    servers: tuple[tuple[str, str, str, int, str, bool], ...]
    lost: Collection[int]

    @staticmethod
    def of(state: State, lost: Collection[int]) -> _Shown:
        servers = tuple(
            (each.name, each.data_address, each.unix_path, each.instance_id, each.control_address, each.data_tls)
            for each in state.servers.values()
        )
        return _Shown(state.buffers, state.progress, servers, lost)

    def shows_the_same(self, other: _Shown) -> bool:
        """Compare the two large parts by identity: that takes no time, and an equal copy only costs a new page."""
        return (
            self.buffers is other.buffers
            and (self.progress is other.progress or not any((*self.progress.values(), *other.progress.values())))
            and self.servers == other.servers
            and self.lost == other.lost
        )


class BufferPages:
    """The pages of ListBuffers. Used in the loop's thread only."""

    def __init__(self, beside: BesideLoop) -> None:
        self._beside = beside
        self._shown: _Shown | None = None
        self._pages: OrderedDict[tuple[frozenset[str] | None, str], pb.ListBuffersReply] = OrderedDict()
        self._index: _ListedBuffers | None = None

    async def page(self, state: State, lost: Collection[int], who: Caller, after: str) -> pb.ListBuffersReply:
        """Return the page of the buffers that `who` may see and whose names are greater than `after`. The caller must
        not change it. `lost`: the segments that have no copy any more.
        """
        shown = _Shown.of(state, lost)
        kept = self._kept(shown, who, after)
        if kept is not None:
            return kept

        async def turn() -> pb.ListBuffersReply:
            kept = self._kept(shown, who, after)  # made for another caller while this one waited
            if kept is not None:
                return kept
            if self._index is None or self._index.buffers is not state.buffers:
                self._index = await self._beside.in_thread(_ListedBuffers.of, state)
            page: pb.ListBuffersReply = await self._beside.in_thread(_page, self._index, state, lost, who, after)
            self._keep(shown, who, after, page)
            return page

        return await self._beside.in_turn(who.key, turn)

    async def look_up(
        self, state: State, lost: Collection[int], who: Caller, names: Iterable[str], folder: str
    ) -> pb.ListBuffersReply:
        """Return those of these buffers that exist, and one buffer in the folder, as far as `who` may see them."""
        if not folder or len(state.buffers) <= SCANNED_MAX:
            return _looked_up(state, lost, who, tuple(names), folder)

        async def turn() -> pb.ListBuffersReply:
            found: pb.ListBuffersReply = await self._beside.in_thread(
                _looked_up, state, lost, who, tuple(names), folder
            )
            return found

        return await self._beside.in_turn(who.key, turn)

    def _keep(self, shown: _Shown, who: Caller, after: str, page: pb.ListBuffersReply) -> None:
        if self._shown is None or not self._shown.shows_the_same(shown):
            self._shown = shown
            self._pages.clear()
        self._pages[who.namespaces, after] = page
        while len(self._pages) > PAGES_KEPT_MAX:
            self._pages.popitem(last=False)

    def _kept(self, shown: _Shown, who: Caller, after: str) -> pb.ListBuffersReply | None:
        key = who.namespaces, after
        if self._shown is None or not self._shown.shows_the_same(shown) or key not in self._pages:
            return None
        self._pages.move_to_end(key)
        return self._pages[key]


@dataclass(frozen=True, slots=True)
class _ListedBuffers:
    """The listed buffers in the order of their names, and the names of all by id."""

    buffers: Mapping[str, BufferRecord]
    listed: tuple[BufferRecord, ...]
    names: Mapping[int, str]

    @staticmethod
    def of(state: State) -> _ListedBuffers:
        return _ListedBuffers(state.buffers, state.listed(), {each.id: each.name for each in state.buffers.values()})


def _page(index: _ListedBuffers, state: State, lost: Collection[int], who: Caller, after: str) -> pb.ListBuffersReply:
    reply = pb.ListBuffersReply()
    segments = attribute_bytes = 0
    for at in range(bisect_right(index.listed, after, key=attrgetter("name")), len(index.listed)):
        record = index.listed[at]
        if not who.may_see(record.name):
            continue
        if len(reply.buffers) == PAGE_BUFFERS or segments > PAGE_SEGMENTS or attribute_bytes > PAGE_ATTRIBUTE_BYTES:
            reply.more = True
            break
        reply.buffers.append(_message(state, record, lost, index.names))
        segments += len(record.segments)
        attribute_bytes += len(record.file_attributes)
    return reply


def _looked_up(
    state: State, lost: Collection[int], who: Caller, names: tuple[str, ...], folder: str
) -> pb.ListBuffersReply:
    found = [state.buffers[name] for name in dict.fromkeys(names) if name in state.buffers]
    if folder:
        inside = (record for name, record in state.buffers.items() if name.startswith(f"{folder}/"))
        found += islice((record for record in inside if _is_listed(record) and who.may_see(record.name)), 1)
    shown = {record.name: record for record in found if _is_listed(record) and who.may_see(record.name)}
    return pb.ListBuffersReply(
        buffers=[_message(state, record, lost, None) for record in shown.values()], looked_up=True
    )


def _is_listed(record: BufferRecord) -> bool:
    return record.ready and record.kind is Kind.BUFFER


def _message(state: State, record: BufferRecord, lost: Collection[int], names: Mapping[int, str] | None) -> pb.Buffer:
    message = buffer_message(state, record, listed=True, names=names)
    for segment in message.layout.segments:
        segment.lost = segment.id in lost
    return message
