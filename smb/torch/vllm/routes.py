"""A vLLM server by its HTTP routes, which `VLLM_SERVER_DEV_MODE=1 vllm serve` has. Needs neither vLLM nor requests."""

from __future__ import annotations

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from typing import Any

from smb.config.backoff import Backoff
from smb.errors import Error, UnavailableError

_AGAIN_FIRST_S, _AGAIN_MAX_S = 0.5, 2.0  # between two questions whether a server has started
_SAID_MAX = 2000  # bytes of a server's answer that an error repeats
_log = logging.getLogger("smb")


class Server:
    """One server, as a client for Engines. It is paused from the start of each update until resume().

    Each call blocks for at most `timeout` seconds. It raises UnavailableError if the server cannot be reached, and
    Error with the server's answer if it refuses.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._paused = False

    def started(self, end: float) -> bool:
        """Wait until it answers, or until `end` of the monotonic clock. Return whether it does."""
        backoff = Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S, lambda: end - time.monotonic())
        while True:
            try:
                self._call("GET", "health")
                return True
            except Error as error:
                if time.monotonic() >= end:
                    _log.warning("vLLM server is left out until it answers: %s", error)
                    return False
            time.sleep(backoff.next_s())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the workers follow a published state."""
        self._call("POST", "init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Pause generation and begin an update. Requests in progress go on after resume()."""
        self._paused = True  # perhaps also if the call fails
        self._call("POST", "pause?mode=keep")
        self._call("POST", "start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have the workers take a generation."""
        self._call("POST", "update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update. The server stays paused."""
        self._call("POST", "finish_weight_update", weight_version and {"weight_version": weight_version})

    def resume(self) -> None:
        """Go on generating, if start_weight_update has paused it."""
        if self._paused:
            self._call("POST", "resume")
            self._paused = False

    def _call(self, method: str, route: str, body: Any = None) -> None:
        url = f"{self._url}/{route}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=self._timeout):  # noqa: S310 - a URL of the caller's
                pass
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(_SAID_MAX).decode(errors="replace")
            raise Error(f"{method} {url}: HTTP {error.code}: {said}") from error
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{method} {url}: {error}") from error
