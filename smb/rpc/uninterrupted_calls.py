"""Calls of gRPC that no signal handler interrupts.

Handlers run on the main thread, and their exceptions (Ctrl-C) leave whatever that thread is doing. gRPC enters a
channel's threading.Condition in Python code: an exception at the wrong place leaves that lock taken. Then each later
call on the channel by another thread waits forever, such as those of the threads that reconnect and renew the session.
A plain threading.Lock is safe, because `with` enters it by one call of C.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def aside(call: Callable[[], Answer]) -> Answer:
    """Return or raise the result of a call. Calls of the main thread are made on a thread of their own. If a handler
    raises meanwhile, that thread goes on alone, until the call's own timeout.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    ended: list[Any] = []
    done = threading.Lock()
    done.acquire()

    def run() -> None:
        try:
            ended.append(call())
        except BaseException as error:  # noqa: BLE001 - it is raised to the caller
            ended.extend((None, error))
        finally:
            done.release()

    try:
        # Not threading.Thread: its start waits, and leaves the thread half started if a handler raises there.
        _thread.start_new_thread(run, ())
    except RuntimeError:  # this process cannot start more threads
        return call()
    done.acquire()
    if len(ended) == 1:
        answer: Answer = ended.pop()
        return answer
    try:
        raise ended.pop()
    finally:
        ended.clear()  # otherwise the error and this frame would keep each other alive
