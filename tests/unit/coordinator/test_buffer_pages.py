"""smb.coordinator.buffer_pages and beside_loop: lists of buffers are made beside the loop, in pages, once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

from smb.coordinator.beside_loop import BesideLoop
from smb.coordinator.buffer_pages import PAGE_BUFFERS, PAGES_KEPT_MAX, SCANNED_MAX, BufferPages
from smb.coordinator.records import BufferRecord, SegmentRecord, SessionRecord
from smb.coordinator.state import State
from smb.rpc import control_pb2 as pb
from smb.security.roles import Caller, Role

READER = Caller(Role.READER)
NOTHING: frozenset[int] = frozenset()


def record(number: int, name: str) -> BufferRecord:
    segment = SegmentRecord(id=number + 10**6, server="s0", nbytes=4, file_bytes=4096)
    return BufferRecord(
        name=name, id=number, shape=(1,), dtype="float32", nbytes=4, stripe_bytes=4096, chunk_bytes=4096, epoch=1,
        created_at=0.0, segments=(segment,), ready=True,
    )  # fmt: skip


def state_of(count: int) -> State:
    return State(buffers={f"team-{i % 2}/b{i:05}": record(i + 1, f"team-{i % 2}/b{i:05}") for i in range(count)})


class Lists:
    """A list, and how often a page of it was made."""

    def __init__(self) -> None:
        self.made = 0
        self.threads: set[int] = set()
        self.list = BufferPages(BesideLoop(self._in_thread))

    async def _in_thread(self, function: Callable[..., object], *args: object) -> object:
        self.made += 1

        def noted() -> object:
            self.threads.add(threading.get_ident())
            return function(*args)

        return await asyncio.to_thread(noted)

    async def page(self, state: State, after: str = "", who: Caller = READER) -> pb.ListBuffersReply:
        return await self.list.page(state, NOTHING, who, after)


def test_pages_have_each_visible_buffer_once_in_order() -> None:
    async def run() -> None:
        lists, state = Lists(), state_of(2 * PAGE_BUFFERS + 10)
        found: list[str] = []
        more = True
        while more:
            page = await lists.page(state, found[-1] if found else "")
            assert len(page.buffers) <= PAGE_BUFFERS
            found += [buffer.name for buffer in page.buffers]
            more = page.more
        assert found == sorted(state.buffers)
        limited = Caller(Role.READER, namespaces=frozenset({"team-1"}))
        page = await lists.page(state, "team-1/b02000", limited)
        assert [each.name for each in page.buffers] == [
            "team-1/b02001",
            *(f"team-1/b0{i}" for i in range(2003, 2010, 2)),
        ]
        assert not page.more
        assert not (await lists.page(state, "zzz")).buffers

    asyncio.run(run())


def test_a_page_is_made_once_beside_the_loop() -> None:
    """However many ask for it at once; again only after something that it shows has changed."""

    async def run() -> None:
        lists, state = Lists(), state_of(10)
        pages = await asyncio.gather(*(lists.page(state) for _ in range(50)))
        assert lists.made == 2  # the index of all, and the page
        assert threading.get_ident() not in lists.threads
        assert all(page is pages[0] for page in pages)
        other = replace(state, sessions={1: SessionRecord(1, "another client")})  # shown nowhere in a list
        assert await lists.page(other) is pages[0]
        renamed = replace(state, buffers={"x": record(1, "x")})
        assert [each.name for each in (await lists.page(renamed)).buffers] == ["x"]
        lost = await lists.list.page(renamed, frozenset({10**6 + 1}), READER, "")
        assert lost.buffers[0].layout.segments[0].lost
        assert lists.made == 5

    asyncio.run(run())


def test_kept_pages_are_bounded() -> None:
    async def run() -> None:
        lists, state = Lists(), state_of(4)
        for number in range(2 * PAGES_KEPT_MAX):
            await lists.page(state, who=Caller(Role.READER, namespaces=frozenset({f"team-{number}"})))
        assert len(lists.list._pages) == PAGES_KEPT_MAX

    asyncio.run(run())


def test_one_certificate_has_one_place_in_the_queue() -> None:
    """Twenty computations for one caller are waiting; another caller's only one comes second. A caller that gives up
    does not let two run at once."""

    async def run() -> None:
        running = 0
        order: list[str] = []

        async def in_thread(function: Callable[..., object], *args: object) -> object:
            nonlocal running
            running += 1
            assert running == 1
            try:
                return await asyncio.to_thread(function, *args)
            finally:
                running -= 1

        beside = BesideLoop(in_thread)
        many = [asyncio.create_task(beside.run("one", lambda: order.append("one"))) for _ in range(20)]
        await asyncio.sleep(0)
        other = asyncio.create_task(beside.run("other", lambda: order.append("other")))
        await asyncio.sleep(0)
        many[0].cancel()
        await asyncio.gather(*many, other, return_exceptions=True)
        assert order.index("other") == 1
        assert order.count("one") == 20

    asyncio.run(run())


def test_a_page_of_long_attributes_fits_into_a_message() -> None:
    async def run() -> None:
        state, lists = state_of(1000), Lists()
        state = replace(state, buffers={k: replace(b, file_attributes=bytes(4096)) for k, b in state.buffers.items()})
        pages = [await lists.page(state)]
        while pages[-1].more:
            pages.append(await lists.page(state, pages[-1].buffers[-1].name))
        assert [each.name for page in pages for each in page.buffers] == sorted(state.buffers)
        assert all(page.ByteSize() < 2 << 20 for page in pages)

    asyncio.run(run())


def test_single_names_and_one_of_a_folder_are_looked_up() -> None:
    """As far as the caller may see them, and ready; in another thread if a folder is looked for among many."""

    async def run() -> None:
        lists, state = Lists(), state_of(10)
        pending = replace(state.buffers["team-0/b00002"], ready=False)
        state = replace(state, buffers={**state.buffers, pending.name: pending})
        names = ["team-0/b00000", "team-0/b00002", "team-1/b00001", "nobody"]

        async def found(who: Caller, folder: str = "", state: State = state) -> list[str]:
            reply = await lists.list.look_up(state, NOTHING, who, names, folder)
            assert reply.looked_up
            assert not reply.more
            return [each.name for each in reply.buffers]

        assert await found(READER) == ["team-0/b00000", "team-1/b00001"]
        limited = Caller(Role.READER, namespaces=frozenset({"team-1"}))
        assert await found(limited, "team-0") == ["team-1/b00001"]
        assert await found(READER, "team-1") == ["team-0/b00000", "team-1/b00001"]
        assert await found(READER, "team") == ["team-0/b00000", "team-1/b00001"]
        names.clear()
        assert await found(READER, "team-1") == ["team-1/b00001"]
        assert lists.made == 0
        assert await found(READER, "team-0", state_of(SCANNED_MAX + 1)) == ["team-0/b00000"]
        assert lists.made == 1

    asyncio.run(run())
