"""The engine of the backend "smb", which vLLM makes in each of its workers: see smb/torch/vllm/__init__.py.

A generation is in host memory, whole, before anything of the model is touched, and at all workers of an engine or at
none: smb/torch/publishing/host_copy.py. What can be refused (a generation that was overwritten or does not come, names
and shapes that the model does not take) is refused before that, and the engine serves on with the generation that it
has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import smb
from smb.errors import Error, InvalidArgumentError
from smb.torch.publishing.host_copy import HostCopy, agreed
from smb.torch.ranks import Ranks
from smb.torch.vllm.check import check_fits

if TYPE_CHECKING:
    from smb.client import Client

_log = logging.getLogger("smb")


@dataclass
class SmbInitInfo(WeightTransferInitInfo):  # type: ignore[misc,unused-ignore]
    """The name of a published state, and arguments of smb.connect and smb.torch.follow. `timeout`, in seconds, limits
    each call, and the wait for a name and for a generation.
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
    """One worker's engine. `generation` is the one that the model has, 0 before the first, and while an update that
    failed half-way has left parts of two.
    """

    init_info_cls = SmbInitInfo
    update_info_cls = SmbUpdateInfo

    generation = 0
    _ranks: Ranks | None = None  # the engine's workers, None for a single one
    _client: Client | None = None
    _copy: HostCopy | None = None
    _timeout = 0.0
    _reloading = False  # whether vLLM has the model's layers prepared to take whole tensors
    _fits: torch.nn.Module | None = None  # the model that was found to take what is published

    def init_transfer_engine(self, init_info: SmbInitInfo) -> None:
        """Connect, and wait for the name. A further call stops following the earlier name."""
        self.shutdown()
        self._ranks = _ranks(self.vllm_config)
        client = None
        try:
            with agreed(self._ranks):
                client = smb.connect(
                    init_info.coordinator, timeout=init_info.timeout, credentials=init_info.credentials
                )
            self._copy = HostCopy(client, init_info.name, init_info.timeout, init_info.near, self._ranks)
        except Exception as error:  # noqa: BLE001 - the same at all workers
            if client is not None:
                client.close()
            return self._report(error)
        self._client, self._timeout = client, init_info.timeout

    def start_weight_update(self) -> None:
        """Check that there is a state to take. The model is prepared when the generation is here."""
        self._published()

    def receive_weights(self, update_info: SmbUpdateInfo) -> None:
        """Load that generation, tensor by tensor. Raises NotFoundError if it was overwritten (publish with more
        versions=, or pass a later generation), TimeoutError if it does not come, InvalidArgumentError if the model does
        not take these names and shapes. In all these cases the model is unchanged.
        """
        copy, generation = self._published(), update_info.generation
        try:
            with agreed(self._ranks):
                if self._fits is not self.model:
                    check_fits(copy.name, self.model, copy.tensors, self.model_config, whole=not copy.part)
                    self._fits = self.model
            with copy.held(generation, self._timeout) as tensors:
                self._load(tensors)
        except Exception as error:  # noqa: BLE001 - the same at all workers
            half_way = self._reloading and not self.generation
            self.finish_weight_update()  # vLLM does not after an error
            return self._report(_half_way(generation, copy.name, error) if half_way else error)
        self.generation = generation

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.generation, self._reloading = 0, True
        initialize_layerwise_reload(self.model)
        self.model.load_weights(self._moved(tensors))

    def _moved(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            there = tensor.to(self.device)
            # load_weights may keep the tensors, but the shared memory changes with the next generation.
            yield name, there.clone() if there is tensor else there

    def finish_weight_update(self) -> None:
        """Let the model process the tensors that it took, if it took any."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._reloading:
            self._reloading = False
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        copy, self._copy, self._fits = self._copy, None, None
        client, self._client = self._client, None
        if copy is not None:
            copy.close()
        if client is not None:
            client.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterable[Any], trainer_args: Any) -> None:  # noqa: ARG004
        """Refuse: vLLM 0.25 to 0.27 ask for this method."""
        raise InvalidArgumentError(
            "weight transfer backend 'smb': a trainer publishes with smb.torch.Publisher, or by the backend's "
            "trainer engine (vLLM 0.26 and newer)"
        )

    def _report(self, error: Exception) -> None:
        """Raise an error that all workers of the engine have, at the last of them. vLLM's executor reads their answers
        in order, stops at the first error, and takes the answers that it left for those of its next calls.
        """
        if self._ranks is None or self._ranks.rank == self._ranks.count - 1:
            raise error
        _log.warning("weight transfer backend 'smb': %s", error)

    def _published(self) -> HostCopy:
        if self._copy is None:
            raise InvalidArgumentError(
                "weight transfer backend 'smb': call init_weight_transfer_engine first, with the published name and "
                "the coordinator's address"
            )
        return self._copy


def _half_way(generation: int, name: str, cause: Exception) -> Error:
    error = Error(
        f"generation {generation} of {name!r} was not loaded to its end, and some layers may have it already: update "
        f"to it or another generation before you generate: {cause!r}"
    )
    error.__cause__ = cause
    return error


def _ranks(vllm_config: Any) -> Ranks | None:
    """Return this engine's workers (tensor and pipeline parallel) as ranks, None for a single one."""
    count = getattr(vllm_config.parallel_config, "world_size", 1)
    if count == 1 or not dist.is_initialized():
        return None
    first = dist.get_rank() // count * count  # data parallel engines may share one world
    return Ranks(DeviceMesh("cpu", torch.arange(first, first + count, device="cpu"), _init_backend=False), "vllm")
