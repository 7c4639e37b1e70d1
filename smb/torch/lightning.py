"""Training with others in Lightning's Trainer: one callback. Needs Lightning (the extra `lightning`). It uses
smb.torch.join and what that returns, and reads which of the Trainer's processes this one is.

>>> trainer = lightning.Trainer(callbacks=[smb.torch.lightning.Callback("run", scheme="diloco", every=50)])
>>> trainer.fit(module, data)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning

import smb
import smb.train
from smb.errors import InvalidArgumentError
from smb.torch.exchange_log import ExchangeLog
from smb.torch.ranks import world
from smb.torch.training.joining import join
from smb.torch.training.shared_model import Shared


class Callback(lightning.Callback):  # type: ignore[misc,unused-ignore]
    """Joins when fitting begins, and leaves with the shared model when it ends; on an exception it only leaves.

    name, scheme and options are smb.torch.join's. If there are several optimizers, the last one's steps count.
    Learning-rate schedules by steps continue at the group's step, unless schedule=False. `on_exchange` is called after
    each exchange. The Trainer's processes (strategy "ddp", ModelParallelStrategy) are one member, as with mesh=.

    After each batch the values of the last exchange (ExchangeEvent.scalars) are logged by log_dict, so the Trainer's
    loggers have them every log_every_n_steps, and callbacks in trainer.callback_metrics.
    """

    shared: Shared | None = None
    _exchanges: ExchangeLog | None = None

    def __init__(
        self,
        name: str,
        scheme: str | smb.train.Scheme | None = None,
        *,
        schedule: bool = True,
        on_exchange: Callable[[smb.train.ExchangeEvent], object] | None = None,
        **options: Any,
    ) -> None:
        self._name = name
        self._scheme = scheme
        self._schedule = schedule
        self._on_exchange = on_exchange
        self._options = options

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the training."""
        if "deepspeed" in type(trainer.strategy).__name__.lower():
            raise InvalidArgumentError(
                "smb.torch.lightning: DeepSpeed keeps the parameters itself, so they can't be shared; use another "
                "strategy"
            )
        options = dict(self._options)
        if trainer.world_size > 1:
            options.setdefault("mesh", world())
        self.shared = join(pl_module, trainer.optimizers[-1], self._name, scheme=self._scheme, **options)
        if self._on_exchange is not None:
            self.shared.on_exchange(self._on_exchange)
        self._exchanges = ExchangeLog(self.shared)
        for config in trainer.lr_scheduler_configs if self._schedule else ():
            if config.interval == "step" and config.frequency == 1:
                self.shared.catch_up(config.scheduler)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the values of the last exchange."""
        if self._exchanges is not None and self._exchanges.values:
            # The first of several processes has events, the others have none.
            pl_module.log_dict(self._exchanges.values, rank_zero_only=trainer.world_size > 1)

    def on_train_end(self, *_: Any) -> None:
        """Leave the training with the shared model."""
        if self.shared is not None:
            shared, self.shared = self.shared, None
            shared.close()

    def on_exception(self, *_: Any) -> None:
        """Leave the training. The model stays as it is."""
        if self.shared is not None:
            shared, self.shared = self.shared, None
            shared.abandon()
