"""A coordinator is killed after a server has made room for a copy, and before that is recorded. Nobody wants the copy
any more. The server kept the room for good, and each of its renewals was refused, as it held too much: how far it was
with copies was never heard again.
"""

from __future__ import annotations

import signal
from contextlib import closing, suppress
from pathlib import Path

import numpy as np

import smb
from smb.daemon.failpoint import ALLOWED_VARIABLE, POINT_VARIABLE
from smb.rpc.coordinator_client import Coordinator
from tests.support.daemons import running_daemons, wait_for

_ELEMENTS = 1 << 20


def _spread(address: str) -> None:
    """Have copies moved to empty servers. A coordinator that is started again forgets it."""
    with closing(Coordinator(address)) as coordinator:
        coordinator.rebalance(10.0, dry_run=False, single_copies=True)


def test_the_room_is_given_back_and_used_again(tmp_path: Path) -> None:
    """A segment that is nobody's is dropped, and the next copy of it may be made there."""
    with running_daemons(tmp_path) as daemons:
        point = {POINT_VARIABLE: "coordinator.copy.made", ALLOWED_VARIABLE: "1"}
        daemons.variables |= point
        coordinator = daemons.coordinator()
        address = coordinator.address
        for variable in point:
            daemons.variables.pop(variable)
        for name in ("a", "b"):
            assert daemons.memory_server(address, name).address
        with smb.connect(address, timeout=30.0) as client:
            wait_for(lambda: len(client.servers()) == 2, "both servers")
            for number in range(4):
                client.create(f"w{number}", _ELEMENTS, servers=["a"]).fill(number)

            def held() -> list[Path]:
                return list(daemons.memory.glob("smb.b.*.segment"))

            with suppress(smb.Error):
                _spread(address)
            assert coordinator.wait() == -signal.SIGKILL
            assert held()
            coordinator.ready_file.unlink(missing_ok=True)
            assert daemons.coordinator(address).address
            wait_for(lambda: not held(), "no room that is nobody's")
            _spread(address)

            def moved() -> int:
                return sum(place.server == "b" for info in client.list() for place in info.layout.segments)

            wait_for(lambda: moved() == 2, "two of four segments on the other server")
            for number in range(4):
                assert (client.open(f"w{number}").read() == np.float32(number)).all()
