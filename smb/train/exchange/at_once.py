"""Runs independent calls at the same time, because over a network a small call consists mostly of its round trip."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from smb.buffer import Buffer

Result = TypeVar("Result")

# Threads are started on first use. Calls in the first pool start no calls in it; calls in the second pool may start
# calls in the first.
_pool, _chains = ThreadPoolExecutor(8, "smb-calls"), ThreadPoolExecutor(8, "smb-train")


def is_remote(buffer: Buffer) -> bool:
    """Return True if the buffer's calls cross a network. In shared memory a thread costs more than it saves."""
    return any(transport != "shm" for transport in buffer.transports)


def begin(call: Callable[[], Result], pool: ThreadPoolExecutor = _chains) -> Future[Result]:
    """Begin `call` in a thread of its own. If no thread can be had, run it here."""
    done: Future[Result] = Future()
    claim = threading.Lock()

    def run() -> None:
        if not claim.acquire(blocking=False):
            return
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - result() raises it
            done.set_exception(error)

    try:
        pool.submit(run)
    # The pool is full or shut down, or has accepted the call without a thread for it: then it may still run it.
    except RuntimeError:
        run()
    return done


def at_once(calls: Sequence[Callable[[], Any]], *, remote: bool) -> list[Any]:
    """Make all calls, at the same time if `remote`, otherwise in order. Return their results when all have ended. The
    first call is made in the caller's thread.

    Raises the error of the first call in the sequence that failed. If `remote`, the other calls were made all the same.
    """
    if not remote or len(calls) == 1:
        return [call() for call in calls]
    others = [begin(call, _pool) for call in calls[1:]]
    try:
        first = calls[0]()
    finally:
        for each in others:
            each.exception()  # waits
    return [first, *(each.result() for each in others)]
