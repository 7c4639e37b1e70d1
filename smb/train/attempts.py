"""Joins that are made again while their error says that this may help."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from smb.client import Client
from smb.config import cancellation
from smb.config.backoff import Backoff
from smb.errors import UnavailableError
from smb.spi import session_of
from smb.train.members import NoSlotError

_FIRST_S, _MOST_S = 0.1, 2.0

_log = logging.getLogger("smb")
Made = TypeVar("Made")


def until_joined(client: Client, join: Callable[[], Made]) -> Made:
    """Return the result of `join`. Repeats it after UnavailableError and NoSlotError, which leave nothing behind, for
    up to the client's timeout. Blocks so long, and as long as a call of `join`.
    """
    end, warned = time.monotonic() + client.timeout, False
    backoff = Backoff(_FIRST_S, _MOST_S, lambda: end - time.monotonic())
    while True:
        try:
            return join()
        except (UnavailableError, NoSlotError) as error:
            session_of(client).check_open()  # otherwise no further attempt can succeed
            if backoff.over():
                raise
            if not warned:
                _log.warning("%s; trying again for up to %.0f s", error, max(0.0, end - time.monotonic()))
            warned = True
        cancellation.check()  # a member that nobody knows of would hold up the others
        time.sleep(backoff.next_s())
