"""Training with others in Hugging Face's Trainer: one callback. Needs transformers (the extra `hf`). It uses
smb.torch.join and what that returns, and reads which of the Trainer's processes this one is.

>>> together = smb.torch.hf.Callback("run", scheme="diloco", every=50)
>>> Trainer(model, arguments, train_dataset=data, callbacks=[together]).train()
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

import smb
import smb.train
from smb.torch.exchange_log import ExchangeLog
from smb.torch.ranks import world
from smb.torch.training.joining import join
from smb.torch.training.shared_model import Shared

_log = logging.getLogger("smb.train")


class Callback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Joins when training begins, and leaves with the shared model when it ends.

    name, scheme and options are smb.torch.join's. The learning-rate schedule continues at the group's step, and
    training ends when the group has done max_steps steps; with schedule=False only this run's steps count. If the group
    has done them already, this run leaves at once, and ends with the shared model.

    Each process's Trainer goes through its own data set in the order of its own seed: give each process another
    TrainingArguments(seed=...), or its own rows. The model at the end is the shared one, also with
    load_best_model_at_end.

    `on_exchange` is called after each exchange (Shared.on_exchange). `shared` is the result of smb.torch.join. If
    train() ends by an exception, the Trainer calls no callback: call close() then. The Trainer's processes (DDP, FSDP2)
    are one member, as with mesh=.

    A record of the Trainer's log also has the values of the last exchange since the record before
    (ExchangeEvent.scalars), for TensorBoard, W&B and whatever else report_to= names. So this callback becomes the first
    of the Trainer's callbacks when training begins.
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
        self._ahead = 0  # steps that the group had done when this run joined, and this run had not
        self._done: dict[str, Any] = {}  # the shared model, if there is nothing left to train

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        *_: Any,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **__: Any,
    ) -> None:
        """Join the training."""
        assert model is not None
        self.close()
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        options = {"samples": samples} | self._options
        if args.world_size > 1:
            options.setdefault("mesh", world())
        self.shared = join(model, optimizer, self._name, scheme=self._scheme, **options)
        if self._on_exchange is not None:
            self.shared.on_exchange(self._on_exchange)
        self._exchanges = ExchangeLog(self.shared)
        _put_first(self)
        self._ahead, self._done = 0, {}
        self._warn(args)
        if self._schedule and lr_scheduler is not None:
            done = self.shared.catch_up(lr_scheduler)
            self._ahead = done - state.global_step  # global_step is not 0 if the Trainer resumes from a checkpoint
            if done >= state.max_steps:
                _log.warning(
                    "training %r has done %d steps, and this run's schedule ends at %d (max_steps), so this run trains "
                    "nothing and ends with the shared model. Ask for more steps, take another name, or let the "
                    "schedule begin anew: schedule=False",
                    self._name,
                    done,
                    state.max_steps,
                )
                # The Trainer makes a step before it asks whether to stop. Nobody else gets it.
                self.shared.close()
                self.shared = self._exchanges = None
                self._done = {
                    name: value.clone() if isinstance(value, torch.Tensor) else value
                    for name, value in model.state_dict().items()
                }

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - Trainer's names
        """End the training at the end of the schedule."""
        if self._done or (self.shared is not None and self._ahead + state.global_step >= state.max_steps):
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002 - Trainer's names
        """Add the values of the last exchange to a record of the log, and to the Trainer's list of records."""
        if self._exchanges is None or logs is None:
            return
        values = self._exchanges.take()
        logs.update(values)
        if state.log_history:
            state.log_history[-1].update(values)

    def on_train_end(self, *_: Any, model: torch.nn.Module | None = None, **__: Any) -> None:
        """Leave the training with the shared model."""
        if self._done and model is not None:
            model.load_state_dict(self._done)
            self._done = {}
        if self.shared is not None:
            shared, self.shared = self.shared, None
            shared.close()

    def close(self) -> None:
        """Leave if train() did not end normally. The model stays as it is."""
        if self.shared is not None:
            shared, self.shared = self.shared, None
            shared.abandon()

    def _warn(self, args: Any) -> None:
        """Say what the Trainer's settings do to a shared training that their users may not expect."""
        assert self.shared is not None
        if args.process_index != 0:
            return
        if args.load_best_model_at_end:
            _log.warning(
                "training %r: the model is the shared one at the end, not the best checkpoint, whatever "
                "load_best_model_at_end says; load trainer.state.best_model_checkpoint after train()",
                self._name,
            )
        usual = type(args).__dataclass_fields__["seed"].default
        if self.shared.worker.members > 1 and args.seed == usual and args.data_seed is None:
            _log.warning(
                "training %r: this Trainer goes through its data set in the order of seed %d, as another member may: "
                "they would train the same batches. Give each its own TrainingArguments(seed=...), or its own rows",
                self._name,
                args.seed,
            )


def _put_first(callback: Callback) -> None:
    """Move the callback to the front of its Trainer's callbacks. The Trainer puts the callbacks that write its log
    before those that it is given, so they would write a record before on_log() has added to it.

    transformers hands neither the Trainer nor its list to a callback, so the list is found in the caller.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            # The handler is going through this list: what comes after the callback keeps its place.
            handler.callbacks.remove(callback)
            handler.callbacks.insert(0, callback)
            return
        frame = frame.f_back
