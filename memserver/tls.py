"""TLS of the data port: whether it is used, certificates that follow their files, and the end of connections with
their certificates."""

from __future__ import annotations

import logging
import threading
import time

from memserver.engine import Engine
from smb.engine import Tls
from smb.errors import Error, InvalidArgumentError
from smb.security.credentials import Credentials, Current, tls_of

AUTO, ON, OFF = CHOICES = ("auto", "on", "off")
LOOK_S = 1.0
JUDGE_S = 5.0  # how long a connection may outlive its peer's certificate

_log = logging.getLogger("memserver")


def is_on(choice: str, credentials: Credentials | None) -> bool:
    """Whether data over TCP goes inside TLS. Raises InvalidArgumentError for "on" without credentials."""
    if choice == ON and credentials is None:
        raise InvalidArgumentError("--data-tls on needs credentials: give them with --credentials DIR")
    return choice != OFF and credentials is not None


class DataTls:
    """Has the engine use TLS with its peers, and looks for new files each second. Call `close` at the end."""

    def __init__(self, engine: Engine, current: Current) -> None:
        self._engine = engine
        self._current = current
        self._used: Credentials | None = None
        self._tls: Tls | None = None
        self._complained = ""
        self._judged_s = 0.0  # when the engine was last asked to close connections whose certificates have ended
        self._look()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="certificates", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> Tls | None:
        """Return the credentials that this server shows to others."""
        return self._tls

    def _look(self) -> None:
        found = self._current.now()
        if found is not self._used:
            tls = tls_of(found)
            self._engine.use_tls(tls)
            self._used, self._tls, self._judged_s = found, tls, time.monotonic()
        elif self._tls is not None and time.monotonic() - self._judged_s >= JUDGE_S:
            self._engine.use_tls(self._tls)
            self._judged_s = time.monotonic()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self._look()
            except Error as error:
                if str(error) != self._complained:
                    _log.warning("the data port keeps its former credentials: %s", error)
                self._complained = str(error)
