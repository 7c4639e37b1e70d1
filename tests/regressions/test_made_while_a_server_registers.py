"""A server came back empty, and was asked for what it should have; a buffer that its former run had made became ready
only then. The buffer counted as whole, and writes to it waited for the second copy without end.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from smb import errors
from smb.coordinator.events import BufferMade
from tests.support.decisions import Cluster, registration, returned, server


@pytest.mark.parametrize("between", [False, True])
def test_a_server_that_was_not_asked_registers_again(between: bool) -> None:
    """Made before the server's copies are judged, or between that and its registration."""
    cluster = Cluster()
    cluster.register("a", "b")
    cluster.want("w", replicas=2, server_names=("a",))
    nothing_due = replace(returned(cluster.state, "b", 2), missing=frozenset())
    answer = replace(registration(cluster.state, server("b", 2)), missing=frozenset())
    if between:
        cluster.do(nothing_due)
    cluster.do(BufferMade("w"))
    with pytest.raises(errors.UnavailableError, match='not asked for a segment of buffer "w"'):
        cluster.do(answer if between else nothing_due)
    cluster.do(returned(cluster.state, "b", 2))
    cluster.do(registration(cluster.state, server("b", 2)))
    (segment,) = cluster.state.buffers["w"].segments
    assert (segment.server, segment.backup) == ("a", "")
