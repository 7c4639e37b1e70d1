"""The trainer's engine of the backend "smb": publishes once, and has any number of vLLM engines take the generation.

Needs vLLM, 0.26 or newer. See smb/torch/vllm/__init__.py, which registers it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource

import smb
from smb.errors import InvalidArgumentError
from smb.torch import Publisher
from smb.torch.vllm.clients import BACKEND, finish


@dataclass
class SmbTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc,unused-ignore]
    """The name to publish under, and arguments of smb.connect. `timeout`, in seconds, limits each call of the trainer,
    and is the engines' `timeout`, too. `publisher` has further arguments of smb.torch.Publisher, `engines` further ones
    of the engines' init_info (credentials, near; they replace the trainer's).

    ```python
    SmbTrainerInitInfo(name="policy", coordinator="storage-1:7070", publisher={"versions": 3}, rank=0)
    ```
    """

    backend: ClassVar[str] = BACKEND

    name: str
    coordinator: str | None = None
    credentials: str | None = None
    timeout: float = 60.0
    publisher: dict[str, Any] = field(default_factory=dict)
    engines: dict[str, Any] = field(default_factory=dict)


class SmbTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc,unused-ignore]
    """One trainer rank's engine. Every rank makes it and calls `send_weights`, since iterating over `source` may be a
    collective; rank 0 publishes and drives the engines. `generation` is what it published last, 0 before.
    """

    init_info_cls = SmbTrainerInitInfo

    generation = 0
    _connection: smb.Client | None = None
    _publisher: Publisher

    @classmethod
    def trainer_init(
        cls, *given: Any, client: Any, source: WeightSource | None = None, **named: Any
    ) -> SmbTrainerWeightTransferEngine:
        """Connect, create or open the published state with the names and shapes of `source`, and have the engines
        follow it. vLLM 0.26 passes a config before the init_info, which is not used.

        Raises InvalidArgumentError without a source, and what smb.connect and smb.torch.Publisher raise.
        """
        infos = [each for each in (*given, *named.values()) if isinstance(each, SmbTrainerInitInfo)]
        if len(infos) != 1 or source is None:
            raise InvalidArgumentError(
                f"weight transfer backend {BACKEND!r}: trainer_init needs one SmbTrainerInitInfo and a source of all "
                f"weights (source=ModuleSource(model))"
            )
        info = infos[0]
        takes = inspect.signature(TrainerWeightTransferEngine.__init__).parameters
        options = {"config": None, "rank": info.rank}
        engine = cls(
            client=client,
            source=source,
            is_sender=info.is_sender,
            **{name: value for name, value in options.items() if name in takes},
        )
        if info.is_sender:
            engine._connect(info)
        return engine

    def _connect(self, info: SmbTrainerInitInfo) -> None:
        metadata = self.source.metadata  # a method in vLLM 0.26 to 0.32, a property later
        shapes = {each.name: each for each in (metadata() if callable(metadata) else metadata)}
        state = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in shapes.items()}
        self._connection = smb.connect(info.coordinator, timeout=info.timeout, credentials=info.credentials)
        try:
            self._publisher = Publisher(self._connection, info.name, state, **{"versions": 3, **info.publisher})
            own = {key: asdict(info)[key] for key in ("name", "coordinator", "credentials", "timeout")}
            self.client.init_weight_transfer_engine({**own, **info.engines})
        except BaseException:
            self.shutdown()
            raise

    def send_weights(self) -> None:
        """Publish the weights as one generation, and have all engines take it. Its number becomes their weight version.

        Blocks until they have it. An error of the client is raised: the generation is published then, and an engine
        that refused it serves on with the one that it had.
        """
        passes = self.source.iter_full() if hasattr(self.source, "iter_full") else iter(self.source)
        if not self.is_sender:
            for _ in passes:  # with the other ranks
                pass
            return
        weights = _here(passes)
        try:
            self.generation = self._publisher.publish(weights)
        finally:
            for _ in passes:  # also after an error: the other ranks wait in a collective
                pass
        self.client.start_weight_update()
        try:
            self.client.update_weights({"generation": self.generation})
        except BaseException:
            with suppress(Exception):  # workers that were not asked yet may take the update for an open one
                finish(self.client, None)
            raise
        finish(self.client, str(self.generation))

    def shutdown(self) -> None:
        """Close the connection. Engines keep the generation that they have, and a new trainer goes on with the next."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _here(weights: Iterable[tuple[str, torch.Tensor | None]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights in host memory, so that a device holds one gathered tensor at a time."""
    for name, tensor in weights:
        if tensor is None:
            raise InvalidArgumentError(
                f"weight transfer backend {BACKEND!r}: the source has no values of {name!r} on rank 0; pass one that "
                f"yields all tensors there, because rank 0 publishes"
            )
        yield name, tensor.detach().to("cpu")
