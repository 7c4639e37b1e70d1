"""Independent calls at one time: over a network a round trip is most of a small call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from smb.buffer import Buffer

Result = TypeVar("Result")

# Threads are made when they are needed first. Those of the first make no calls of these, those of the second may.
_pool, _chains = ThreadPoolExecutor(8, "smb-calls"), ThreadPoolExecutor(8, "smb-train")


def is_remote(buffer: Buffer) -> bool:
    """Whether calls of it cross a network: in shared memory a thread costs more than it saves."""
    return any(transport != "shm" for transport in buffer.transports)


def begin(call: Callable[[], Result], pool: ThreadPoolExecutor = _chains) -> Future[Result]:
    """Begin a call, or several in it, in a thread of its own; where none can be had do it here."""
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
    except RuntimeError:  # the pool takes no more, or has taken it and has no thread for it: then it may still run it
        run()
    return done


def at_once(calls: Sequence[Callable[[], Any]], *, remote: bool) -> list[Any]:
    """Do all calls, at one time if `remote`, else in order; return their results. Ends when all have ended. The first
    one is done in the caller's thread.

    Raises what the first one raised, in the order of the sequence; the others were done all the same if `remote`.
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
