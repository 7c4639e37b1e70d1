"""Published weights for TRL's AsyncGRPOTrainer: an object to pass as `weight_transfer=`. Needs TRL, 1.16 or newer
(the extra `trl`). It uses smb.torch.Publisher, and the clients of vLLM's servers in smb.torch.vllm.

>>> transfer = smb.torch.trl.WeightTransfer("policy", ["http://rollout-1:8000"], coordinator="storage-1:7070")
>>> AsyncGRPOTrainer(model, ..., weight_transfer=transfer).train()

Each server is `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "smb"}'`. It has the
methods of TRL's WeightTransferProtocol; nothing of TRL is imported, as the protocol is structural.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

import smb
from smb.errors import DeadlineError, Error, InvalidArgumentError
from smb.torch.publishing.publish import Publisher
from smb.torch.vllm.clients import Engines
from smb.torch.vllm.routes import Server

_log = logging.getLogger("smb")


class WeightTransfer:
    """Publishes the trainer's weights, and has vLLM servers take each generation. `generation` is the one published
    last, 0 before the first.

    `servers` are URLs of vLLM servers; without any it only publishes, for readers that follow by themselves. A server
    that fails or refuses a generation is left out of that update, logged, and in `engines.failed`; the next update
    tries it again. `coordinator`, `credentials` (a directory) and `timeout` (seconds) are those of smb.connect, and
    those of the servers, unless `server_options` has others, or `near` of smb.torch.follow. `server_timeout` limits
    each HTTP call, and the wait until the servers have started. `options` are those of smb.torch.Publisher.
    """

    def __init__(
        self,
        name: str,
        servers: Iterable[str] = (),
        *,
        coordinator: str | None = None,
        credentials: str | None = None,
        timeout: float = 60.0,
        server_timeout: float = 300.0,
        server_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(servers, str):
            raise InvalidArgumentError(f"WeightTransfer({name!r}): servers must be a list of URLs, not one string")
        self.generation = 0
        self._info: dict[str, Any] = {
            "name": name,
            "coordinator": coordinator,
            "credentials": credentials,
            "timeout": timeout,
        }
        self._server_info = {**self._info, **(server_options or {})}
        self._server_timeout = server_timeout
        self._options = options
        self._servers = {url: Server(url, server_timeout) for url in servers}
        self.engines = Engines(self._servers)
        self._client: smb.Client | None = None
        self._publisher: Publisher | None = None
        self._followed = False  # whether the engines were told what to follow

    def add(self, url: str) -> None:
        """Have another server take the next generation, or one again that was restarted under its URL."""
        self._servers[url] = Server(url, self._server_timeout)
        self.engines.add(url, self._servers[url])

    def remove(self, url: str) -> None:
        """Leave a server out from now on. Raises KeyError."""
        self.engines.remove(url)
        del self._servers[url]

    def init_weight_transfer(self) -> None:
        """Connect, and wait until the servers have started. One that has not after `server_timeout` is left out until
        it answers. Raises UnavailableError if there is no coordinator, DeadlineError if no server answers.
        """
        self.destroy()
        info = self._info
        self._client = smb.connect(info["coordinator"], timeout=info["timeout"], credentials=info["credentials"])
        try:
            self._publisher = Publisher(self._client, info["name"], **self._options)
            end = time.monotonic() + self._server_timeout
            late = [url for url, server in self._servers.items() if not server.started(end)]
            if late and len(late) == len(self._servers):
                raise DeadlineError(
                    f"weight transfer {info['name']!r}: no vLLM server answered within {self._server_timeout:g} s: "
                    f"{', '.join(late)}"
                )
        except BaseException:
            self.destroy()
            raise

    def pause(self) -> None:
        """Do nothing yet: servers are paused once the new generation is published, and serve until then."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights as one generation, one tensor at a time, then have all servers take it. Blocks until
        they have it. After any error the iterator is read to its end, as other ranks may wait in its collectives.

        Raises what Publisher.publish raises, and Error if no server has taken the generation; then it is published,
        and the servers have the one before.
        """
        if self._publisher is None:
            raise InvalidArgumentError(f"weight transfer {self._info['name']!r}: call init_weight_transfer() first")
        try:
            self.generation = self._publisher.publish(iterator)
        finally:
            for _ in iterator:
                pass
        if not self._servers:
            return
        if not self._followed:  # not before: the first publication makes the name for which they wait
            self.engines.init_weight_transfer_engine(self._server_info)
            self._followed = True
        self.engines.start_weight_update()
        self.engines.update_weights({"generation": self.generation})
        self.engines.finish_weight_update(str(self.generation))

    def resume(self) -> None:
        """Resume the servers that were paused, also those that refused the generation and have the one before."""
        for url, server in self._servers.items():
            try:
                server.resume()
            except Error as error:
                _log.warning("vLLM server %s is still paused: %s", url, error)

    def destroy(self) -> None:
        """Resume the servers and close the connection. The servers keep the generation that they have."""
        self.resume()
        client, self._client, self._publisher = self._client, None, None
        if client is not None:
            client.close()
