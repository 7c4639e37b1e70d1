"""Processes that find heavy modules there, since they are forks of one that has imported them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing import forkserver
from typing import Any


def forks_of(modules: Sequence[str]) -> Any:
    """Return a multiprocessing context whose processes have these modules.

    A process has one server of forks for all of its contexts, and what that imports counts at its start alone. One that
    another test file started with other modules is ended: each of its forks would import these by itself, PyTorch for
    instance in 3 s of processor time.
    """
    context = multiprocessing.get_context("forkserver")
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None and server._preload_modules != [*modules]:
        server._stop()
    context.set_forkserver_preload([*modules])
    return context
