"""What the commands say of a buffer's copies."""

from __future__ import annotations

import pytest

from smb.buffer_info import BufferInfo
from smb.rpc import control_pb2 as pb
from smb.tools.cli.describe import buffer_json, copies_state

WHOLE = pb.Segment(id=1, server="a", nbytes=100, epoch=1, backup="b")
PLAIN = pb.Segment(id=4, server="a", nbytes=100)
LOST = pb.Segment(id=2, server="a", nbytes=100, epoch=2)
COPYING = pb.Segment(id=3, server="a", nbytes=300, epoch=3, copying_to="c", copied=0.5, copy_left_s=2.2)


def described(*segments: pb.Segment, replicas: int = 2) -> BufferInfo:
    layout = pb.Layout(epoch=1, stripe_bytes=4096, chunk_bytes=4096, segments=segments)
    return BufferInfo.of(pb.Buffer(name="w", shape=[25], dtype="float32", nbytes=100, layout=layout, replicas=replicas))


@pytest.mark.parametrize(
    ("segments", "replicas", "said"),
    [
        ((PLAIN,), 1, "1"),
        ((PLAIN, LOST), 1, "1, which has moved: reached through its servers alone"),
        ((PLAIN, COPYING), 1, "1, moving to another server: 50%, about 3 s left"),
        ((WHOLE,), 2, "2"),
        (
            (WHOLE, LOST),
            2,
            "2, degraded: 1 of 2 segments have one; none is being copied: another server must have room",
        ),
        ((LOST, COPYING), 2, "2, degraded: 2 of 2 segments have one; copying 1 of them: 50%, about 3 s left"),
    ],
)
def test_copies_in_words(segments: tuple[pb.Segment, ...], replicas: int, said: str) -> None:
    """Whole, degraded, or copying, with how far and how long."""
    assert copies_state(described(*segments, replicas=replicas)) == said


def test_copies_in_json() -> None:
    """Where a segment is being copied to, and how much of it is there."""
    whole, copying = buffer_json(described(WHOLE, COPYING))["segments"]
    assert "copying_to" not in whole
    assert (copying["copying_to"], copying["copied"]) == ("c", 0.5)
