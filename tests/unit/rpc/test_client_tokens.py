"""The tokens of a client, as answers of the coordinator come in."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import cast

import pytest

from smb.engine import Link, Token
from smb.rpc import client_tokens
from smb.rpc import control_pb2 as pb
from smb.rpc.client_tokens import ClientTokens

SEGMENT, SESSION = 7, 9


class FakeLink:
    """A link whose connection is there or not, as `connections` says each time that it is asked."""

    def __init__(self, connections: Iterator[bool]) -> None:
        self._connections = connections
        self.kept: list[int] = []
        self.shown: list[int] = []

    def alive(self) -> bool:
        return True

    def connected(self) -> bool:
        return next(self._connections)

    def keep_token(self, token: Token) -> None:
        self.kept.append(token.epoch)

    def authorize(self, token: Token, _timeout_ms: int) -> None:
        self.shown.append(token.epoch)


def answer(epoch: int, copies: bool) -> pb.Buffer:
    """A buffer with a token of that epoch: of its layout, or of a segment's roles."""
    segment = pb.Segment(id=SEGMENT, epoch=epoch if copies else 0, token=pb.Token(rights=3, secret=bytes(32)))
    return pb.Buffer(name="b", id=1, layout=pb.Layout(epoch=1 if copies else epoch, segments=[segment]))


def test_the_newest_epoch_stays() -> None:
    """Answers may arrive in any order: a token of an older epoch takes the place of none that is newer."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for copies in (False, True):
        epochs = list(range(1, 20))
        random.Random(seed).shuffle(epochs)

        def refuse(_kind: pb.Kind, _name: str, _known_id: int) -> pb.Buffer:
            raise AssertionError

        tokens, newest = ClientTokens(refuse), 0
        for epoch in epochs:
            tokens.learn(answer(epoch, copies))
            newest = max(newest, epoch)
            proof = tokens.proof(SEGMENT, SESSION, b"")
            assert proof is not None
            assert proof.epoch == newest


def test_a_renewed_token_makes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that nobody has used keeps it for its first connection. One that has a connection shows it there, also if
    that was made meanwhile: it may have begun with the old one.
    """
    monkeypatch.setattr(client_tokens, "_RENEW_AT", 0.0)

    def open_again(_kind: pb.Kind, _name: str, _known_id: int) -> pb.Buffer:
        tokens.learn(answer(2, False))
        return answer(2, False)

    tokens = ClientTokens(open_again)
    tokens.learn(answer(1, False))
    used, unused = FakeLink(itertools.repeat(True)), FakeLink(itertools.repeat(False))
    late = FakeLink(itertools.chain([False], itertools.repeat(True)))
    for link in (used, unused, late):
        tokens.keep(cast("Link", link), SEGMENT)
    tokens.renew()
    assert (used.kept, used.shown) == ([1], [2])
    assert (unused.kept, unused.shown) == ([1, 2], [])
    assert (late.kept, late.shown) == ([1, 2], [2])
    assert tokens.shows(cast("Link", unused), SEGMENT)
