"""Several vLLM engines as one client of a trainer engine. Needs no vLLM."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from smb.errors import Error

BACKEND = "smb"  # the name under which vLLM knows our engines

_log = logging.getLogger("smb")


class Engines:
    """Several engines as one client of vLLM's trainer engines, so that one `send_weights()` updates all of them.

    ```python
    client = Engines({"rollout-1": HTTPVLLMWeightSyncClient("http://rollout-1:8000"), "rollout-2": ...})
    client.add("rollout-3", HTTPVLLMWeightSyncClient("http://rollout-3:8000"))  # joins with the next update
    ```

    `clients` maps names of your choice to clients, each with the methods of vLLM's VLLMWeightSyncClient. All engines
    are called at the same time. An engine whose call fails (it is dead, or refused the generation and serves on with
    the one that it has) is left out of that update, logged, and named in `failed`; it is initialized again and called
    again with the next update. So a dead engine holds up the others for at most its client's timeout, and one that was
    restarted joins again. Raises Error only if no engine is left. One thread at a time.
    """

    def __init__(self, clients: Mapping[str, Any]) -> None:
        self._clients = dict(clients)
        self._init_info: dict[str, Any] | None = None
        self._ready: set[str] = set()  # engines that were initialized and have not failed since
        self.failed: dict[str, Exception] = {}  # by engine: what it raised in the last update

    def add(self, name: str, client: Any) -> None:
        """Add an engine, or replace the one of that name."""
        self._clients[name] = client
        self._ready.discard(name)

    def remove(self, name: str) -> None:
        """Leave an engine out from now on. Raises KeyError."""
        del self._clients[name]
        self._ready.discard(name)
        self.failed.pop(name, None)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Initialize all engines."""
        self._init_info, self.failed = init_info, {}
        self._ready.clear()
        self._all(lambda _, client: client.init_weight_transfer_engine(init_info))
        self._ready.update(self._going())

    def start_weight_update(self) -> None:
        """Begin an update with all engines."""
        ready, self.failed = frozenset(self._ready), {}

        def start(name: str, client: Any) -> None:
            if name not in ready:
                with suppress(Exception):  # an update that broke off may still be open there
                    client.finish_weight_update()
                client.init_weight_transfer_engine(self._init_info)
            client.start_weight_update()

        self._all(start)
        self._ready.update(self._going())

    def update_weights(self, update_info: Any) -> None:
        """Update the engines that have begun."""
        self._all(lambda _, client: client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update of the engines that took it."""
        self._all(lambda _, client: finish(client, weight_version))

    def _going(self) -> dict[str, Any]:
        return {name: client for name, client in self._clients.items() if name not in self.failed}

    def _all(self, call: Callable[[str, Any], None]) -> None:
        """Call all engines that have not failed in this update, at the same time."""
        with ThreadPoolExecutor(max(1, len(self._clients))) as threads:
            calls = {name: threads.submit(call, name, client) for name, client in self._going().items()}
        for name, future in calls.items():
            error = future.exception()
            if isinstance(error, Exception):
                self.failed[name] = error
                self._ready.discard(name)
                _log.warning("vLLM engine %r is left out of this update: %r", name, error)
            elif error is not None:
                raise error
        if self._clients and not self._going():
            name, first = next(iter(self.failed.items()))
            raise Error(
                f"weight transfer backend {BACKEND!r}: none of {len(self._clients)} engines is left in this update; "
                f"{name!r} said {first!r}"
            ) from first


def finish(client: Any, weight_version: str | None) -> None:
    """End an update; the version goes to clients that take one (vLLM 0.27 and newer)."""
    takes = inspect.signature(client.finish_weight_update).parameters
    if weight_version is not None and "weight_version" in takes:
        client.finish_weight_update(weight_version)
    else:
        client.finish_weight_update()
