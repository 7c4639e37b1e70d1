"""The progress thread of RDMA ended between being told so and being woken: close() wrote to a closed descriptor.

The number of that descriptor may belong to another file by then. Seen once, as EBADF, on a busy machine.
"""

from __future__ import annotations

import os

import pytest

from smb.transport.verbs.progress_thread import ProgressThread


def test_the_thread_does_not_end_while_it_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = ProgressThread("test")
    write = os.eventfd_write

    def write_slowly(descriptor: int, value: int) -> None:
        write(descriptor, value)
        progress._thread.join(0.5)  # the thread is awake, and ends if nothing keeps it
        write(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", write_slowly)
    progress.close()
    assert not progress._thread.is_alive()
