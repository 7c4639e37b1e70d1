"""The engine of the backend "smb", which vLLM makes in each of its workers: see smb/torch/vllm.py.

Each worker follows the published state, and reads the generation that it is told; all workers of an engine are told the
same one. It passes whole tensors to the model's load_weights, which takes this worker's part. A worker on the host of a
memory server, or of a mirror, reads by shared memory. Readers come and go: there is no group to make anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import smb
from smb.errors import InvalidArgumentError
from smb.torch.publish import Follower, follow

if TYPE_CHECKING:
    from smb.client import Client


@dataclass
class SmbInitInfo(WeightTransferInitInfo):  # type: ignore[misc,unused-ignore]
    """The name of a published state, and arguments of smb.connect and smb.torch.follow. `timeout`, in seconds, limits
    each call, and the wait for a name, or for a generation on its way to a mirror.
    """

    name: str
    coordinator: str | None = None
    credentials: str | None = None
    near: str | None = None
    timeout: float = 60.0


@dataclass
class SmbUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc,unused-ignore]
    """The generation to read: the result of Publisher.publish()."""

    generation: int


class SmbWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc,unused-ignore]
    """One worker's engine. `generation` is the one that it read last, 0 before the first; the worker's staleness is the
    trainer's generation less this one.
    """

    init_info_cls = SmbInitInfo
    update_info_cls = SmbUpdateInfo

    _client: Client | None = None
    _follower: Follower | None = None
    _timeout = 0.0

    @property
    def generation(self) -> int:
        """The generation that the model has."""
        return 0 if self._follower is None else self._follower.generation

    def init_transfer_engine(self, init_info: SmbInitInfo) -> None:
        """Connect, and wait for the name. A further call stops following the earlier name."""
        self.shutdown()
        client = smb.connect(init_info.coordinator, timeout=init_info.timeout, credentials=init_info.credentials)
        try:
            self._follower = follow(client, init_info.name, timeout=init_info.timeout, near=init_info.near)
        except BaseException:
            client.close()
            raise
        self._client, self._timeout = client, init_info.timeout

    def start_weight_update(self) -> None:
        """Prepare the model to take whole tensors, layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._following()  # before the model is changed
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SmbUpdateInfo) -> None:
        """Read that generation as a whole into this process's memory, and then into the model, tensor by tensor. Raises
        NotFoundError if it was overwritten: publish with more versions=, or pass a later generation.
        """
        follower = self._following()
        follower.wait(generation=update_info.generation, timeout=self._timeout)
        tensors = follower.views(generation=update_info.generation)

        def moved() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors.items():
                there = tensor.to(self.device)
                # load_weights may keep the tensors, but the Follower's memory changes with the next generation.
                yield name, there.clone() if there is tensor else there

        self.model.load_weights(moved())

    def finish_weight_update(self) -> None:
        """Let the model process the tensors that it took."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        client, self._client, self._follower = self._client, None, None
        if client is not None:
            client.close()

    def _following(self) -> Follower:
        if self._follower is None:
            raise InvalidArgumentError(
                "weight transfer backend 'smb': call init_weight_transfer_engine first, with the published name and "
                "the coordinator's address"
            )
        return self._follower
