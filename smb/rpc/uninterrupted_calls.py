"""Calls of gRPC where no signal's handler interrupts them.

Handlers run on the main thread, and what they raise (Ctrl-C) leaves whatever that thread is in. gRPC enters its
threading.Condition of a channel in Python code: an exception at the wrong place leaves that lock taken, and every later
call on the channel by another thread stands there without end: the threads that make connections again, and the one
that renews the session. A plain threading.Lock is safe: `with` enters it by one call of C.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def aside(call: Callable[[], Answer]) -> Answer:
    """Return what a call returns, or raise what it raises. The main thread's calls are made on a thread of their own;
    that one goes on alone, until its own timeout, if a handler raises meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    ended: list[Any] = []
    done = threading.Lock()
    done.acquire()

    def run() -> None:
        try:
            ended.append(call())
        except BaseException as error:  # noqa: BLE001 - the caller's
            ended.extend((None, error))
        finally:
            done.release()

    try:
        # Not threading.Thread: its start waits, and leaves the thread in the lurch if a handler raises there.
        _thread.start_new_thread(run, ())
    except RuntimeError:  # this process may have no more threads
        return call()
    done.acquire()
    if len(ended) == 1:
        answer: Answer = ended.pop()
        return answer
    try:
        raise ended.pop()
    finally:
        ended.clear()  # else the error and this frame keep each other
