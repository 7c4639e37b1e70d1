"""Stores the call's outcome in an exception that a signal handler, e.g. Ctrl-C's, raises inside a buffer's method."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np

from smb.call import turns
from smb.call.accounts import account_later, account_outside, here
from smb.call.arguments import Arguments
from smb.engine import NOWHERE
from smb.errors import Error

Method = TypeVar("Method", bound=Callable[..., Any])


def accounted(method: Method) -> Method:
    """Decorate a method that changes a buffer.

    A signal handler may raise before the call gets to the dispatcher and after the call has returned from it; both are
    covered.
    """
    elements_of = _finder(method)

    @functools.wraps(method)
    def call(buffer: Any, *arguments: Any, **named: Any) -> Any:
        before = here.finished
        try:
            result = method(buffer, *arguments, **named)
            # store the request without the caller's arrays
            if (finished := here.finished) is not None and finished is not before:
                here.finished = finished._replace(source=NOWHERE, sink=NOWHERE, indices=None)
            return result
        except Error:
            raise
        except BaseException as error:
            account_outside(buffer._dispatcher, error, before, elements_of(buffer, arguments, named))
            raise

    return cast(Method, call)


def accounted_later(method: Method) -> Method:
    """Decorate a method that makes an async call.

    A signal handler may raise after the engine has accepted the call. The caller has no future then, but can pass the
    exception to settle().
    """
    elements_of = _finder(method)

    @functools.wraps(method)
    def call(buffer: Any, *arguments: Any, **named: Any) -> Any:
        # These are plain assignments; no handler can run between them. Calls nest: a handler may make calls of its own.
        before, turns.here.last = turns.here.last, None
        try:
            return method(buffer, *arguments, **named)
        except Error:
            raise
        except BaseException as error:
            future = turns.here.future()
            account_later(buffer._dispatcher, error, future, elements_of(buffer, arguments, named))
            raise
        finally:
            turns.here.last = before  # restored, so that no reference to the call's arrays stays

    return cast(Method, call)


def _finder(method: Callable[..., Any]) -> Callable[[Any, tuple[Any, ...], Mapping[str, Any]], range | None]:
    """Return a function that finds the elements of a call from its arguments, None if the arguments are invalid."""
    signature = inspect.signature(method)

    def elements_of(buffer: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> range | None:
        with contextlib.suppress(Error, TypeError, ValueError):
            return _elements_of(buffer._dispatcher.arguments, signature.bind(buffer, *arguments, **named).arguments)
        return None

    return elements_of


def _elements_of(arguments: Arguments, given: Mapping[str, Any]) -> range:
    """Return the elements that a method's arguments name. Raises Error, TypeError or ValueError if there are none."""
    if "indices" in given:
        first, last = int(given["indices"][0]), int(given["indices"][-1])
        return range(first, last + 1)
    offset, count = given.get("offset"), given.get("count")
    if "index" in given:
        offset, count = given["index"], 1
    elif "array" in given:
        count = np.size(given["array"])
    offset, count = arguments.range(0 if offset is None else offset, count, "")
    return range(offset, offset + count)
