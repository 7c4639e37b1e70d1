"""APPLY by hand, as the page has it: what it does, what segments refuse, and that a repetition is not done again."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from tests.support.engine_server import (
    EPOCH,
    FEW_FLOATS,
    FLOATS,
    MORE_FLOATS,
    SCRATCH,
    EngineServer,
    whole,
)
from tests.support.raw import Dtype, Flag, Frame, Opcode, RawClient, Rule, Status

GRADIENT, FIRST, SECOND = MORE_FLOATS
NAMES = ("lr", "scale", "weight_decay", "mu", "beta1", "beta2", "eps", "step", "alpha")
NUMBERS = {"lr": 0.5, "scale": 1.0, "mu": 0.5, "beta1": 0.5, "beta2": 0.5, "eps": 1e-3, "step": 1.0, "alpha": 0.25}
NBYTES = 64


def step(rule: int, *segments: int, **numbers: float) -> tuple[Frame, bytes]:
    """Frame and payload for the first bytes of FLOATS; segments are the gradient's and the state's."""
    frame = replace(whole(Opcode.APPLY, FLOATS, 0, NBYTES), dtype=Dtype.FLOAT32, op=rule)
    three = (*segments, 0, 0, 0)[:3]
    return frame, struct.pack("<3Q9d", *three, *({**NUMBERS, **numbers}.get(name, 0.0) for name in NAMES))


def put(client: RawClient, segment: int, value: float) -> None:
    frame = Frame(Opcode.FILL, dtype=Dtype.FLOAT32, epoch=EPOCH, segment=segment, length=NBYTES)
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    assert client.ask(replace(frame, argument=bits))[0].status == Status.OK


def get(client: RawClient, segment: int) -> float:
    frame = Frame(Opcode.READ, dtype=Dtype.FLOAT32, epoch=EPOCH, segment=segment, length=NBYTES)
    values = np.frombuffer(client.ask(frame)[1], "<f4")
    assert (values == values[0]).all()
    return float(values[0])


def brought(rule: int, *state: int, value: float, named: int = 0, **numbers: float) -> tuple[Frame, bytes]:
    """As step, with a gradient of that value behind the words; `named`: and a segment's id."""
    frame, words = step(rule, named, *state, **numbers)
    return frame, words + np.full(NBYTES // 4, value, "<f4").tobytes()


@pytest.mark.parametrize("brings", [False, True], ids=["a segment's", "brought"])
def test_every_rule(server: EngineServer, brings: bool) -> None:
    """Each rule by its number, with numbers that float32 has exactly; the gradient is a segment's, or the client's."""
    expected = {
        Rule.SGD: (6.0, 4.0, 9.0),
        Rule.MOMENTUM: (5.0, 6.0, 9.0),  # m = 2 + 4
        Rule.NESTEROV: (4.5, 6.0, 9.0),
        Rule.ADAM: (8 - 4 / (np.sqrt(np.float32(12.5)) * np.float32(2**0.5) + np.float32(1e-3)), 4.0, 12.5),
        Rule.ADAMW: (8 - 4 / (np.sqrt(np.float32(12.5)) * np.float32(2**0.5) + np.float32(1e-3)), 4.0, 12.5),
        Rule.ELASTIC: (7.0, 4.0, 9.0),
    }
    states = {Rule.SGD: 0, Rule.MOMENTUM: 1, Rule.NESTEROV: 1, Rule.ADAM: 2, Rule.ADAMW: 2, Rule.ELASTIC: 0}
    with server.hello() as client:
        for rule, (b, m, v) in expected.items():
            for segment, value in ((FLOATS, 8.0), (GRADIENT, 4.0), (FIRST, 4.0), (SECOND, 9.0)):
                put(client, segment, value)
            state = (FIRST, SECOND)[: states[rule]]
            reply, data = client.ask(*(brought(rule, *state, value=4.0) if brings else step(rule, GRADIENT, *state)))
            assert (reply.status, reply.length, data) == (Status.OK, 0, b"")
            assert get(client, FLOATS) == pytest.approx(b, rel=1e-6), rule.name
            if states[rule]:
                assert get(client, FIRST) == m
            assert get(client, SECOND) == v
            assert get(client, GRADIENT) == 4.0


def test_a_gradient_that_is_brought_counts_once(server: EngineServer) -> None:
    """Under a fence, and repeated."""
    frame, payload = brought(Rule.MOMENTUM, FIRST, value=2.0, mu=1.0, lr=-1.0)
    fenced = replace(frame, flags=Flag.FENCED)
    with server.hello() as client:
        put(client, FLOATS, 0.0)
        put(client, FIRST, 0.0)
        fence = Frame(Opcode.FENCE, segment=FLOATS, epoch=EPOCH)
        assert client.ask(fence, struct.pack("<4Q", 100, 0, 0, 0))[0].status == Status.OK
        for token, status in ((98, Status.LOCK_LOST), (100, Status.OK), (100, Status.OK)):
            assert client.ask(fenced, struct.pack("<Q", token) + payload)[0].status == status
        client.sequence -= 1
        repeated = replace(fenced, flags=Flag.FENCED | Flag.RETRY)
        assert client.ask(repeated, struct.pack("<Q", 100) + payload)[0].status == Status.OK
        assert (get(client, FIRST), get(client, FLOATS)) == (4.0, 6.0)


INVALID = Status.INVALID
REFUSED = {
    "no gradient": (step(Rule.SGD), Status.NOT_FOUND),
    "a gradient that is not here": (step(Rule.SGD, 99), Status.NOT_FOUND),
    "a state that is not here": (step(Rule.MOMENTUM, GRADIENT, 99), Status.NOT_FOUND),
    "no state": (step(Rule.MOMENTUM, GRADIENT), INVALID),
    "one state of two": (step(Rule.ADAM, GRADIENT, FIRST), INVALID),
    "the other state of two": (step(Rule.ADAM, GRADIENT, 0, SECOND), INVALID),
    "a state too many": (step(Rule.SGD, GRADIENT, FIRST), INVALID),
    "two states too many": (step(Rule.ELASTIC, GRADIENT, FIRST, SECOND), INVALID),
    "one state too many": (step(Rule.NESTEROV, GRADIENT, FIRST, SECOND), INVALID),
    "the weights as the gradient": (step(Rule.SGD, FLOATS), INVALID),
    "the weights as the state": (step(Rule.MOMENTUM, GRADIENT, FLOATS), INVALID),
    "the gradient as the state": (step(Rule.MOMENTUM, GRADIENT, GRADIENT), INVALID),
    "the gradient as the second state": (step(Rule.ADAM, GRADIENT, FIRST, GRADIENT), INVALID),
    "one state twice": (step(Rule.ADAM, GRADIENT, FIRST, FIRST), INVALID),
    "integers as the gradient": (step(Rule.SGD, SCRATCH), INVALID),
    "integers as the state": (step(Rule.MOMENTUM, GRADIENT, SCRATCH), INVALID),
    "a gradient that is brought and named": (brought(Rule.SGD, value=1.0, named=GRADIENT), INVALID),
    "a gradient that is brought, and no state": (brought(Rule.MOMENTUM, value=1.0), INVALID),
    "a gradient that is brought, and no number": (brought(Rule.SGD, value=1.0, lr=float("nan")), INVALID),
    "no number": (step(Rule.SGD, GRADIENT, lr=float("nan")), INVALID),
    "an infinite scale": (step(Rule.SGD, GRADIENT, scale=float("inf")), INVALID),
    "too large for float32": (step(Rule.ELASTIC, GRADIENT, alpha=1e39), INVALID),
    "the step before the first": (step(Rule.ADAM, GRADIENT, FIRST, SECOND, step=0), INVALID),
    "half a step": (step(Rule.ADAM, GRADIENT, FIRST, SECOND, step=1.5), INVALID),
    "beta of one": (step(Rule.ADAMW, GRADIENT, FIRST, SECOND, beta2=1.0), INVALID),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_the_segments_is_answered(server: EngineServer, case: str) -> None:
    """It gets its status, nothing has changed anywhere, the connection goes on; a repetition is refused again."""
    (frame, payload), status = REFUSED[case]
    segments = (FLOATS, *MORE_FLOATS)
    with server.hello() as client:
        for segment in segments:
            put(client, segment, 3.0)
        assert client.ask(frame, payload)[0].status == status
        client.sequence -= 1
        assert client.ask(replace(frame, flags=Flag.RETRY), payload)[0].status == status
        assert [get(client, segment) for segment in segments] == [3.0] * 4


def test_ranges_that_others_have_not(server: EngineServer) -> None:
    """The range must lie in one chunk of each segment: past the end of a shorter gradient or state it is refused."""
    with server.hello() as client:
        for rule, segments in ((Rule.SGD, (FEW_FLOATS,)), (Rule.MOMENTUM, (GRADIENT, FEW_FLOATS))):
            frame, payload = step(rule, *segments)
            for offset, status in ((2048 - NBYTES, Status.OK), (2048 - NBYTES + 4, INVALID), (2048, INVALID)):
                assert client.ask(replace(frame, offset=offset), payload)[0].status == status
            assert client.ask(replace(frame, offset=4096 - NBYTES + 4), payload)[0].status == INVALID
            assert client.ask(replace(frame, dtype=Dtype.FLOAT32, epoch=EPOCH + 1), payload)[0].status == (
                Status.STALE_EPOCH
            )
            assert client.ask(replace(frame, segment=SCRATCH), payload)[0].status == INVALID  # int64


def test_a_step_is_made_once(server: EngineServer) -> None:
    """Repeated on the same connection and on a new one it is answered OK, and neither weights nor state move."""
    frame, payload = step(Rule.MOMENTUM, GRADIENT, FIRST, mu=1.0, lr=-1.0)
    with server.hello() as client:
        for segment, value in ((FLOATS, 0.0), (GRADIENT, 1.0), (FIRST, 0.0)):
            put(client, segment, value)
        client.ask(frame, payload)
        mine, session = client.sequence, client.session
        client.ask(frame, payload)
        assert (get(client, FIRST), get(client, FLOATS)) == (2.0, 3.0)
        client.sequence = mine - 1
        assert client.ask(replace(frame, flags=Flag.RETRY), payload)[0].status == Status.OK
        assert (get(client, FIRST), get(client, FLOATS)) == (2.0, 3.0)
    with server.connect().hello(session) as client:
        client.sequence = mine - 1
        assert client.ask(replace(frame, flags=Flag.RETRY), payload)[0].status == Status.OK
        assert (get(client, FIRST), get(client, FLOATS)) == (2.0, 3.0)
        client.sequence = mine + 50
        assert client.ask(frame, payload)[0].status == Status.OK
        assert (get(client, FIRST), get(client, FLOATS)) == (3.0, 6.0)


def test_only_under_the_fence_of_the_weights(server: EngineServer) -> None:
    """With a token that a later one has made stale, LOCK_LOST, and nothing has changed; with that one it is done."""
    frame, payload = step(Rule.MOMENTUM, GRADIENT, FIRST)
    with server.hello() as client:
        put(client, FLOATS, 3.0)
        put(client, FIRST, 3.0)
        raised, _ = client.ask(Frame(Opcode.FENCE, segment=FLOATS, epoch=EPOCH), struct.pack("<4Q", 100, 0, 0, 0))
        assert raised.status == Status.OK
        reply, _ = client.ask(replace(frame, flags=Flag.FENCED), struct.pack("<Q", 98) + payload)
        assert reply.status == Status.LOCK_LOST
        assert (get(client, FIRST), get(client, FLOATS)) == (3.0, 3.0)
        assert client.ask(replace(frame, flags=Flag.FENCED), struct.pack("<Q", 100) + payload)[0].status == Status.OK
        assert get(client, FLOATS) != 3.0
