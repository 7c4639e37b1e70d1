"""Published weights for verl: the checkpoint engine "smb". Needs verl, 0.9.1 or newer (the extra `verl`). It uses
smb.torch.Publisher and smb.torch.follow.

    actor_rollout_ref.rollout.checkpoint_engine.backend=smb
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=smb.torch.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.smb.coordinator=storage-1:7070

The actor of rank 0 publishes each sync as one generation. Before each sync verl asks all workers, and rank 0 says which
generation this step will be. Each rollout waits for exactly that one. Rollouts come and go between two syncs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

import smb
from smb.errors import Error, InvalidArgumentError
from smb.torch.publishing.following import Follower, follow
from smb.torch.publishing.publish import Publisher

_ASKED = "checkpoint engine 'smb'"
_log = logging.getLogger("smb")


@CheckpointEngineRegistry.register("smb")
class SmbCheckpointEngine(CheckpointEngine):  # type: ignore[misc,unused-ignore]
    """One worker's engine, of an actor or a rollout. `generation` is that of the present sync, 0 before the first.

    `engine_kwargs.smb` has its arguments: `name` of the published state; `coordinator`, `credentials` and `timeout`
    (seconds) of smb.connect; `near` of smb.torch.follow; `publisher`, with arguments of smb.torch.Publisher, where
    dtype is a name (bfloat16); `patience`, in seconds, limits how long a rollout waits for the trainer's publication.
    """

    def __init__(
        self,
        bucket_size: int,  # noqa: ARG002 - verl passes it; here each tensor travels by itself
        *,
        name: str = "policy",
        coordinator: str | None = None,
        credentials: str | None = None,
        timeout: float = 60.0,
        patience: float = 600.0,
        near: str | None = None,
        publisher: Mapping[str, Any] | None = None,
        is_master: bool = False,
    ) -> None:
        self.generation = 0
        self._name, self._near, self._patience, self._is_master = name, near, patience, is_master
        self._connection = {"address": coordinator, "credentials": credentials, "timeout": timeout}
        self._options = dict(publisher or {})
        if isinstance(dtype := self._options.get("dtype"), str):
            self._options["dtype"] = getattr(torch, dtype, dtype)  # the Publisher refuses what is not a dtype
        self._client: smb.Client | None = None
        self._publisher: Publisher | None = None
        self._follower: Follower | None = None
        self._reading = threading.Lock()  # a sync that failed elsewhere may still wait here

    def prepare(self) -> dict[str, Any]:
        """Return which generation the coming sync will be, at the actor of rank 0, and nothing elsewhere."""
        if not self._is_master:
            return {}
        if self._publisher is None:
            self._publisher = Publisher(self._connect(), self._name, **self._options)
        return {"generation": self._publisher.generation + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return init_process_group's arguments for all actors, and for all rollouts: the generation."""
        said = [each["generation"] for each in metadata if each]
        if len(said) != 1:
            raise InvalidArgumentError(f"{_ASKED}: {len(said)} workers are actors of rank 0, but one must be")
        return {"generation": said * actor_wg_world_size}, {"generation": said * rollout_world_size}

    def init_process_group(self, generation: int) -> None:
        """Note the generation of the coming sync. No process group is made."""
        self.generation = generation

    def finalize(self) -> None:
        """Keep the connection and the memory for the next sync."""

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish the weights, one tensor at a time, at the actor of rank 0, and return metrics for its log. Other
        ranks only iterate, as gathering is collective. Blocks the event loop, whose thread owns the device. Raises
        what Publisher.publish raises, and Error if another trainer has published since the sync began.
        """
        try:
            return self._publish(weights, global_steps) if self._is_master else {}
        finally:
            for _ in weights:  # also after an error: the other ranks wait in a collective
                pass

    def _publish(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None) -> dict[str, float]:
        wanted = self._begun()
        assert self._publisher is not None  # since prepare()
        generation = self._publisher.publish(weights)
        if generation != wanted:
            raise Error(
                f"{_ASKED}: step {global_steps} is generation {generation} of {self._name!r}, but rollouts read "
                f"{wanted}, which another trainer has published: stop it, or choose another name"
            )
        metrics = {"generation": generation, "payload_mbytes": self._publisher.sent_bytes / (1 << 20)}
        return {f"checkpoint_engine/{name}": float(value) for name, value in metrics.items()}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors of this sync's generation, on this worker's device, once all of it is in host memory.
        Raises DeadlineError if the generation does not come in time, NotFoundError if it was overwritten.
        """
        tensors = await asyncio.to_thread(self._read)
        _log.info("%s: step %s is generation %d of %r", _ASKED, global_steps, self.generation, self._name)
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
        for name, tensor in tensors.items():
            there = tensor.to(device)
            # The caller may keep it, but the Follower's memory changes with the next generation.
            yield name, there.clone() if there is tensor else there

    def _read(self) -> dict[str, torch.Tensor]:
        wanted = self._begun()
        with self._reading:
            if self._follower is None:
                self._follower = follow(self._connect(), self._name, timeout=self._patience, near=self._near)
            self._follower.wait(generation=wanted, timeout=self._patience)
            return self._follower.views(generation=wanted)

    def _begun(self) -> int:
        if not self.generation:
            raise InvalidArgumentError(
                f"{_ASKED}: no sync of {self._name!r} has begun at this worker: verl's CheckpointEngineManager calls "
                f"prepare() and init_process_group() of all workers before"
            )
        return self.generation

    def _connect(self) -> smb.Client:
        if self._client is None:
            self._client = smb.connect(**self._connection)  # type: ignore[arg-type]
        return self._client

    def close(self) -> None:
        """Close the connection. verl does not call it; the end of the worker's process does the same."""
        client, self._client, self._publisher, self._follower = self._client, None, None, None
        if client is not None:
            client.close()
