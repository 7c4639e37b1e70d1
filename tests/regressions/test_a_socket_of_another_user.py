"""A directory of sockets that this user may not search ended the first call with a bare PermissionError."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import smb


def test_it_is_reached_over_tcp(
    cluster: smb.LocalCluster, connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from another host. Asked for by name, shared memory is refused with what is in the way."""
    paths = {server.unix_path for server in connect("tcp")._coordinator.list_servers(10)}
    assert all(paths)
    look = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if os.fspath(path) in paths:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return look(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    buffer = connect("auto").create("w", 1000)
    buffer.write(np.ones(1000, np.float32))
    assert (buffer.read() == 1).all()
    assert set(buffer.transports) == {"tcp"}
    with pytest.raises(smb.TransportError, match="no socket at"):
        connect("shm").open("w").read()
