"""Parts in which a source is brought that lies on other servers than the buffer."""

from __future__ import annotations

from smb.call.dispatcher import _cut


def test_no_chunk_is_cut() -> None:
    """Every part but the last ends where a chunk does, wherever the first begins: a chunk changes as a whole."""
    assert list(_cut(range(5, 30), 8)) == [range(5, 8), range(8, 16), range(16, 24), range(24, 30)]
    assert list(_cut(range(16, 24), 8)) == [range(16, 24)]
    assert list(_cut(range(3, 3), 8)) == []
