"""The tokens of a client, as answers of the coordinator come in."""

from __future__ import annotations

import random

from smb.rpc import control_pb2 as pb
from smb.rpc.client_tokens import Tokens

SEGMENT, SESSION = 7, 9


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

        tokens, newest = Tokens(refuse), 0
        for epoch in epochs:
            tokens.learn(answer(epoch, copies))
            newest = max(newest, epoch)
            proof = tokens.proof(SEGMENT, SESSION)
            assert proof is not None
            assert proof.epoch == newest
