"""accumulate_from where one buffer's segment was gated this moment, and the other's is mapped still.

The engine takes both by one kind of path. The call failed as invalid, as the coordinator did not say yet that a segment
moves; a drain whose server died in the middle showed it once in eight runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import smb
from smb.transport.base import Deadline


def test_both_go_through_their_servers(connect: Callable[..., smb.Client]) -> None:
    client = connect("auto")
    into, source = client.create("into", 1000), client.create("source", like="into")
    source.fill(2)
    into.accumulate_from(source)
    into.fill(1)
    assert set(into.transports) == {"shm"}
    paths = into._dispatcher.paths
    # As after a server has sent this client away from its mapping.
    paths.handle = paths.gated(Deadline(10.0))
    paths.found = tuple(replace(path, segment=None) for path in paths.found)
    into.accumulate_from(source)
    assert (into.read() == 3).all()
