"""The memory of a deleted buffer once stayed in use as long as any local process had it mapped, beyond the capacity."""

from __future__ import annotations

import os

import numpy as np
import pytest

import smb
from tests.support.transports import FAR


def test_deleted_memory_goes_back_although_it_is_mapped() -> None:
    """The file of a deleted segment that an idle client still maps holds no more than its header and chunk table."""
    with (
        smb.LocalCluster(servers=1) as cluster,
        smb.connect(cluster.address, transport="shm") as idle,
        smb.connect(cluster.address, transport=FAR) as other,
    ):
        buffer = idle.create("weights", (1 << 20,))
        buffer.write(np.ones(1 << 20, np.float32))
        (path,) = cluster.memory_directory.glob("*.segment")
        file = os.open(path, os.O_RDONLY)
        try:
            assert os.fstat(file).st_blocks * 512 >= 4 << 20
            other.delete("weights")
            assert os.fstat(file).st_blocks * 512 <= 64 << 10
        finally:
            os.close(file)
        with pytest.raises(smb.NotFoundError, match="weights"):
            buffer.read()
