"""Pins: a reader holds one version of a buffer while it reads it piece by piece."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from smb.call.sync_requests import WAIT_FOR_READERS, Home
from smb.engine import AskOpcode
from smb.errors import Error, InvalidArgumentError, LockLostError, NotFoundError

Array = np.ndarray[Any, np.dtype[Any]]
# The arguments are (version, offset, count, out, wire); the result is None if the version was overwritten.
Read: TypeAlias = "Callable[[int, int, int | None, Any, str | None], Array | None]"

PIN_S_MIN, PIN_S_MAX = 0.001, 30.0  # csrc/sync/sync.h: SYNC_PIN_MS


class Pin:
    """One version of a buffer, held for reading. Made by Buffer.pin.

    ```python
    with published.pin() as pin:
        print(pin.version, pin.read(offset=0, count=10))
    ```

    Entering the block takes the latest version, or the one asked for; all reads through the pin are of that version.
    Publishers use the other slots meanwhile. With versions=2 the next version can be published, but the publisher of
    the one after it waits; with versions=K this takes pins on K - 1 different versions. A publisher waits as long as it
    chose (`publish(readers=)`, 30 s by default), counted from when pins first kept a publisher from its turn.

    The pin is a lease: it ends after `ttl` seconds unless renew() is called. A read after a publisher has gone on
    raises LockLostError; a read never returns a mix of versions. Not reentrant. Use it in one thread at a time.
    """

    def __init__(self, buffer: str, home: Home, read: Read, ttl: float, wanted: int | None = None) -> None:
        self._asked = f"pin of buffer {buffer!r}"
        if not isinstance(ttl, (int, float)) or not PIN_S_MIN <= ttl <= PIN_S_MAX:
            raise InvalidArgumentError(
                f"{self._asked}: ttl must be between {PIN_S_MIN} and {PIN_S_MAX:g} s, not {ttl!r}"
            )
        self._home = home
        self._read = read
        self._ttl_ms = round(1000 * ttl)
        self._wanted = wanted
        self._name: int | None = None
        self._version = 0

    @property
    def version(self) -> int:
        """The number of the version that is held; 0 before the block is entered."""
        return self._version

    def read(self, offset: int = 0, count: int | None = None, *, out: Any = None, wire: str | None = None) -> Array:
        """Read from the held version, as Buffer.read does. Raises LockLostError if a publisher has overwritten it.

        ```python
        with published.pin() as pin:
            first = pin.read(offset=0, count=500)
            second = pin.read(offset=500)  # of the same version
        ```
        """
        if self._name is None:
            raise InvalidArgumentError(
                f"{self._asked}: the pin is not taken; enter it first (with buffer.pin() as pin: ...)"
            )
        result = self._read(self._version, offset, count, out, wire)
        if result is None:
            raise LockLostError(
                f"{self._asked}: version {self._version} was overwritten: the pin expired after "
                f"{self._ttl_ms / 1000:g} s, or a publisher did not wait longer for readers, or the server was "
                f"restarted; pin the latest version, for a longer ttl, or let publishers wait longer for readers: "
                f"{WAIT_FOR_READERS}"
            )
        return result

    def renew(self) -> None:
        """Hold the version for another `ttl` seconds. Raises LockLostError if a publisher has gone on.

        ```python
        with published.pin(ttl=5.0) as pin:
            first = pin.read(offset=0, count=500)
            pin.renew()  # 5 seconds more
            second = pin.read(offset=500)
        ```
        """
        if self._name is None:
            raise InvalidArgumentError(f"{self._asked}: the pin is not taken; enter it first")
        self._home.ask(self._asked, AskOpcode.PIN, 0, (self._ttl_ms, self._name))

    def __enter__(self) -> Pin:
        if self._name is not None:
            raise InvalidArgumentError(f"{self._asked}: the pin is already taken")
        wanted = 0 if self._wanted is None else self._wanted + 1
        try:
            reply = self._home.ask(self._asked, AskOpcode.PIN, 0, (self._ttl_ms, 0, wanted))
        except LockLostError:
            raise NotFoundError(
                f"{self._asked}: version {self._wanted} was overwritten or is not published yet"
            ) from None
        if reply.a == 0:
            self._home.tell(AskOpcode.UNPIN, (reply.b,))
            raise NotFoundError(f"{self._asked}: nothing is published yet; Buffer.wait(1) waits for the first version")
        self._version, self._name = reply.a, reply.b
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        name, self._name = self._name, None
        if name is not None:
            with contextlib.suppress(Error):  # the block is over, and raises its own errors; the pin ends with its ttl
                self._home.ask(self._asked, AskOpcode.UNPIN, 0, (name,))
