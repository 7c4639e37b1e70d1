"""A reader that took longer than publications came once read for ever: its pin was never renewed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import smb
from smb.call import versions
from smb.call.sync_requests import Home
from smb.engine import AskOpcode
from tests.support.daemons import wait_for

_SIZE = 1 << 20  # float32 elements


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read is looked at after each chunk, as a slow one is."""
    monkeypatch.setattr(versions, "_LOOK_S", 0.0)
    monkeypatch.setattr(versions, "_BLOCK_BYTES", 64 << 10)


def _slow(buffer: smb.Buffer, monkeypatch: pytest.MonkeyPatch, between: Callable[[], Any]) -> list[int]:
    """Do something between the pieces of its reads; return where they began."""
    call, begun = buffer._dispatcher.call, []

    def slow(request: Any, **named: Any) -> int:
        begun.append(request.offset)
        result = call(request, **named)
        between()
        return result

    monkeypatch.setattr(buffer._dispatcher, "call", slow)
    return begun


@pytest.mark.usefixtures("pieces")
def test_it_ends_beside_a_publisher_that_never_rests(
    connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its pieces the trainer publishes as often as it may; the reader reads all little more than once."""
    trainer = connect("tcp", timeout=60).create("m", _SIZE, versions=2)
    reader = connect("tcp", timeout=60).open("m")
    published, end = [trainer.publish(np.ones(_SIZE, np.float32))], threading.Event()

    def train() -> None:
        while not end.is_set():
            published.append(trainer.publish(np.full(_SIZE, published[-1] + 1, np.float32), timeout=60))

    def publication() -> None:
        """Wait until the trainer has published once more, or has waited for us for a moment."""
        before, until = published[-1], time.monotonic() + 0.05
        wait_for(lambda: published[-1] > before or time.monotonic() > until, "the trainer")

    begun = _slow(reader, monkeypatch, publication)
    training = threading.Thread(target=train)
    training.start()
    try:
        out = np.empty(_SIZE, np.float32)
        version = reader.read_version(out)
    finally:
        end.set()
        training.join()
    assert version in published
    assert (out == version).all()
    alone = _SIZE // 65536  # pieces end with chunks
    assert len(begun) <= 1.3 * alone, f"{len(begun)} pieces instead of {alone}"


@pytest.mark.usefixtures("pieces")
def test_no_publication_waits_longer_than_its_bound(
    connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that goes on and on is overtaken after `readers` seconds; it is told so within its own timeout."""
    trainer = connect("tcp", timeout=60).create("m", _SIZE, versions=2)
    reader = connect("tcp", timeout=2).open("m")
    trainer.publish(np.ones(_SIZE, np.float32))
    waited: list[float] = []

    def publish_twice() -> None:
        for _ in range(2):
            began = time.monotonic()
            trainer.publish(np.full(_SIZE, trainer.version + 1, np.float32), timeout=60, readers=0.3)
            waited.append(time.monotonic() - began)

    _slow(reader, monkeypatch, publish_twice)
    began = time.monotonic()
    with pytest.raises(smb.TimeoutError, match=r"publishers overwrote|no answer") as caught:
        reader.read()
    assert time.monotonic() - began < 30
    assert caught.value.outcome == "not applied"
    assert waited
    assert max(waited) < 5
    with pytest.raises(smb.InvalidArgumentError, match="readers must be between"):
        trainer.publish(np.ones(_SIZE, np.float32), readers=0)


@pytest.mark.usefixtures("pieces")
def test_a_read_that_failed_keeps_no_pin(connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that failed at its deadline left its pin, and a publisher waited 30 s for a reader that was gone."""
    trainer = connect("tcp", timeout=60).create("m", _SIZE, versions=2)
    reader = connect("tcp", timeout=1).open("m")
    trainer.publish(np.ones(_SIZE, np.float32))

    def too_late() -> None:
        if len(begun) == 2:  # the first piece was looked at, and pinned
            wait_for(lambda: time.monotonic() - began > 1.1, "the deadline")
            raise smb.TimeoutError("too late")

    begun = _slow(reader, monkeypatch, too_late)
    began = time.monotonic()
    with pytest.raises(smb.TimeoutError, match="too late"):
        reader.read()
    for version in (2, 3):  # 3 takes the place of what was read
        assert trainer.publish(np.full(_SIZE, version, np.float32), timeout=10) == version


@pytest.mark.usefixtures("pieces")
def test_a_pin_that_cannot_be_let_go_fails_no_read(
    connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All was read, and the last request, which lets the pin go, failed: the read did not fail."""
    reader = connect("tcp", timeout=60).create("m", _SIZE, versions=2)
    reader.publish(np.ones(_SIZE, np.float32))
    ask, asked = Home.ask, []

    def lost(home: Home, what: str, opcode: AskOpcode, *rest: Any, **named: Any) -> Any:
        asked.append(opcode)
        if opcode is AskOpcode.UNPIN:
            raise smb.UnavailableError(what)
        return ask(home, what, opcode, *rest, **named)

    monkeypatch.setattr(Home, "ask", lost)
    assert (reader.read() == 1).all()
    assert AskOpcode.UNPIN in asked
