"""A mount refused writes for want of room while a coordinator, just started, had not heard of the memory servers. One
such refusal made the file one that could not be stored any more, though the write was repeated and succeeded.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.files.namespace import NameTree
from smb.files.staged_file import StagedFile
from tests.support.daemons import running_daemons, stopped, wait_for


def octets(text: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(text, np.uint8)


def test_a_file_grows_while_no_server_was_heard_of(tmp_path: Path) -> None:
    """The bytes are kept by the mount, and stored once the servers are there again."""
    with running_daemons(tmp_path) as daemons:
        coordinator = daemons.coordinator()
        address = coordinator.address
        server = daemons.memory_server(address, "a")
        with smb.connect(address, transport="tcp") as client:
            assert server.address
            client.create("first", 4)
            tree = NameTree(client)
            file = tree.open("f", os.O_RDWR | os.O_CREAT)
            with stopped(server.pid):
                coordinator.kill()
                assert daemons.coordinator(address).address == address
                wait_for(lambda: [each.unheard for each in client.servers()] == [True], "the server, not heard of")
                capacity, free, *_ = tree.space()
                assert capacity >= free > 0
                file.write(0, octets(b"grown"))
            file.flush()
            file.close()
            assert client.open("f").read().tobytes() == b"grown"


def test_a_write_that_is_repeated_makes_the_file_whole(
    cluster: smb.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ENOSPC the file is stored once the same bytes were written; before that, and with fewer, it is not."""
    with smb.connect(cluster.address) as client:
        file = NameTree(client).open("f", os.O_RDWR | os.O_CREAT)
        file.write(0, octets(b"abc"))

        def refuse(_self: StagedFile, _offset: int, _data: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as full:
            full.setattr(StagedFile, "write", refuse)
            with pytest.raises(OSError, match="No space left"):
                file.write(3, octets(b"defg"))
        file.write(3, octets(b"de"))
        with pytest.raises(OSError, match="is incomplete: some of the written data") as caught:
            file.flush()
        assert caught.value.errno == errno.ENOSPC
        file.write(3, octets(b"defg"))
        file.flush()
        file.close()
        assert client.open("f").read().tobytes() == b"abcdefg"
        client.delete("f")
