"""A link whose buffer was closed kept its descriptor, until the interpreter next collected all garbage: a mount had 191
after 15 minutes of faults.

With several coordinators each call that failed was a cycle of the exception and the frame that raised it. It kept the
variables of all callers, and the thread that looks after links had all of them in one.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import smb
from smb.engine import Link
from smb.rpc.coordinator_client import Coordinator
from smb.transport.base import SegmentLocation
from tests.support.daemons import wait_for

AWAY = "127.0.0.1:1"
WAITS_S = 20.0


class Held:
    """A variable of a caller's."""


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Off: what is not let go stays."""
    gc.disable()
    yield
    gc.enable()


def caller(call: Callable[[], object]) -> weakref.ref[Held]:
    held = Held()
    with suppress(smb.Error):
        call()
        pytest.fail("the call was to fail")
    return weakref.ref(held)


def test_a_call_that_nobody_answers() -> None:
    coordinator = Coordinator(f"{AWAY},127.0.0.1:2")
    assert caller(lambda: coordinator.list_servers(0.2))() is None
    coordinator.close()


def test_a_call_that_is_refused(connect: Callable[..., smb.Client]) -> None:
    coordinator = Coordinator(f"{connect().address},{AWAY}")
    assert caller(lambda: coordinator.open_buffer("no such buffer", 0.0, 5.0))() is None
    coordinator.close()


class Two:
    """A client with two buffers of two copies; their links."""

    def __init__(self, client: smb.Client) -> None:
        self.links = client._session._links
        self.stays, self.goes = (client.create(name, 1000, replicas=2) for name in ("stays", "goes"))
        for buffer in (self.stays, self.goes):
            buffer.write(1.0, 0)

    def link(self, buffer: smb.Buffer) -> weakref.ref[Link]:
        (segment,) = buffer.info.layout.segments
        found = self.links._table[segment.id, False].link()
        assert found is not None
        return weakref.ref(found)

    def end_one(self) -> None:
        """Close it, and see that its link is let go, sooner than those end that wait; somebody may just look at it."""
        link = self.link(self.goes)
        del self.goes
        wait_for(lambda: link() is None, "end of the link", WAITS_S / 4)


@pytest.fixture
def two(connect: Callable[..., smb.Client]) -> Two:
    return Two(connect())


def test_no_link_is_kept_by_who_looks_after_them(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the coordinator is asked about one of them."""
    asked, answers = threading.Event(), threading.Event()

    def locate(_place: SegmentLocation) -> SegmentLocation | None:
        asked.set()
        answers.wait(WAITS_S)
        return None

    monkeypatch.setattr(two.links._means, "locate_copies", locate)
    assert asked.wait(20)
    try:
        two.end_one()
    finally:
        answers.set()


def test_no_link_is_kept_by_who_mends_another(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ends = threading.Event(), threading.Event()

    def mend(*_given: Any) -> None:
        begun.set()
        ends.wait(WAITS_S)

    monkeypatch.setattr(two.links, "_resume", mend)
    link = two.link(two.stays)()
    assert link is not None
    mending = threading.Thread(target=two.links.resume, args=(link.id,))
    mending.start()
    assert begun.wait(20)
    try:
        two.end_one()
    finally:
        ends.set()
        mending.join()
