"""Evictions of records whose sessions had ended once counted like others: after 33 clients had come and gone, a small
buffer answered for good that it had forgotten, to everybody whose first change was cut off."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import smb
from tests.support.proxy import Fault, behind_a_proxy
from tests.support.raw import Opcode

CLIENTS = 150  # more than a small segment has records


class CutOneRequest:
    """Cuts the next accumulate in the middle, once it is armed."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self, reply: bool, header: bytes) -> Fault | None:
        if not self.armed or reply or header[3] != Opcode.ACCUMULATE:
            return None
        self.armed = False
        return Fault("cut request", 80)


def test_a_small_buffer_serves_the_151st_client(tmp_path: Path) -> None:
    """However many came and went before: the first change of the next one, sent again, is made once."""
    plan = CutOneRequest()
    with behind_a_proxy(tmp_path, plan) as (address, proxy):
        with smb.connect(address, transport="tcp") as client:
            client.create("w", 8, "int64")
        for _ in range(CLIENTS):
            with smb.connect(address, transport="tcp") as client:
                client.open("w").accumulate(np.ones(8, np.int64))
        with smb.connect(address, transport="tcp", timeout=60) as client:
            buffer = client.open("w")
            plan.armed = True
            buffer.accumulate(np.ones(8, np.int64))
            assert proxy.fired == {"cut request": 1}
            assert (buffer.read() == CLIENTS + 1).all()
