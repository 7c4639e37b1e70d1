"""smb.torch in the real frameworks, with models made from a config: nothing is downloaded.

docs/training.md, "Frameworks", has a table of what works with what.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import smb
import smb.torch
import smb.train
from tests.fault.long import LONG
from tests.support.devices import DEVICE, ON_HOST

Connect = Callable[..., smb.Client]
pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers")


def language_model(transformers: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


class Text(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of counting numbers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) + row) % 64
        return {"input_ids": ids, "labels": ids}


def arguments(transformers: Any, path: Path, **options: Any) -> Any:
    defaults = {
        "output_dir": str(path), "max_steps": 8, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": ON_HOST,
        "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2,
    }  # fmt: skip
    return transformers.TrainingArguments(**(defaults | options))


# Together in the short form, and each alone in the long one, too.
ACCUMULATING = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
IN_BF16 = {"bf16": True, "gradient_checkpointing": True}
TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    **({"accumulation-and-clipping": ACCUMULATING, "bf16-and-checkpointing": IN_BF16} if LONG else {}),
    "all-of-these": {**ACCUMULATING, **IN_BF16},
    "adafactor": {"optim": "adafactor"},
}


@pytest.mark.parametrize("options", TRAINERS.values(), ids=TRAINERS)
# More than 5 s: transformers is imported, and its Trainer trains a model several times to be compared.
def test_trainer(
    transformers: Any, connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """The Trainer trains with the group: exchanges by steps of the optimizer, events, and the shared model at the end;
    a later one's schedule goes on where the group is."""
    from smb.torch import hf

    events: list[smb.train.ExchangeEvent] = []
    model = language_model(transformers)
    together = hf.Callback("run", "diloco", every=4, client=connect(), on_exchange=events.append)
    trainer = transformers.Trainer(
        model, arguments(transformers, tmp_path, **options), train_dataset=Text(), callbacks=[together]
    )
    trainer.train()
    assert together.shared is None
    assert [(event.step, event.round, event.staleness) for event in events] == [(4, 1, 0), (8, 2, 0)]
    assert all(event.norm > 0 and event.bytes > 0 and event.seconds > 0 for event in events)
    client = connect()
    status = smb.train.status(client, "run")
    assert (status.round, status.workers[0].samples) == (2, 8 * 4 * options.get("gradient_accumulation_steps", 1))
    shared = smb.torch.shared_state_dict(client, "run")
    assert all(torch.equal(value.cpu(), shared[name]) for name, value in model.state_dict().items())
    if options:
        return  # the rest is the same with all of them
    rates: list[float] = []

    class Rates(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    later = transformers.Trainer(
        language_model(transformers, 1), arguments(transformers, tmp_path, max_steps=10, optim="sgd"),
        train_dataset=Text(), callbacks=[hf.Callback("run", client=client), Rates()],
    )  # fmt: skip
    later.train()
    assert rates == pytest.approx([1e-2 * (10 - 8) / 10, 1e-2 * (10 - 9) / 10])  # it ends where the schedule does
    assert smb.train.status(client, "run").round == 2
    for schedule in (True, False):
        caplog.clear()
        rates.clear()
        again = transformers.Trainer(
            language_model(transformers, 1), arguments(transformers, tmp_path, max_steps=8, optim="sgd"),
            train_dataset=Text(), callbacks=[hf.Callback("run", client=client, schedule=schedule), Rates()],
        )  # fmt: skip
        again.train()
        assert ("'run' has done 8 steps, and this run's schedule ends at 8" in caplog.text) == schedule
        assert rates[0] == (0 if schedule else 1e-2)
        assert len(rates) == (1 if schedule else 8)


# More than 5 s: transformers' Trainer trains four times.
def test_a_trainer_in_a_training_that_is_done_changes_nothing(
    transformers: Any, connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even by the one step that the Trainer makes before it asks whether to stop. And what a seed means is said."""
    from smb.torch import hf

    client, steady = connect(), {"lr_scheduler_type": "constant", "max_steps": 4}
    for seed in (0, 1):
        model = language_model(transformers, seed)
        transformers.Trainer(
            model, arguments(transformers, tmp_path, **steady), train_dataset=Text(),
            callbacks=[hf.Callback("run", "localsgd", every=2, client=client)],
        ).train()  # fmt: skip
        if seed == 0:
            made = smb.torch.shared_state_dict(client, "run")
    assert all(torch.equal(value.cpu(), made[name]) for name, value in model.state_dict().items())
    found = smb.torch.shared_state_dict(client, "run")
    assert all(torch.equal(value, made[name]) for name, value in found.items())
    assert smb.train.status(client, "run").round == 2
    caplog.clear()
    other = language_model(transformers)
    for options, said in (({}, True), ({"seed": 7}, False)):
        caplog.clear()
        with smb.torch.join(other, torch.optim.SGD(other.parameters(), lr=0.1), "run", client=connect()):
            transformers.Trainer(
                language_model(transformers), arguments(transformers, tmp_path, **steady, **options),
                train_dataset=Text(), callbacks=[hf.Callback("run", client=client)],
            ).train()  # fmt: skip
        assert ("in the order of seed 42, as another member may" in caplog.text) == said


def test_a_trainer_whose_join_fails(transformers: Any, connect: Connect, tmp_path: Path) -> None:
    """Other settings than the group's: train() raises, and nothing of it is left; close() does no harm."""
    from smb.torch import hf

    client = connect()
    model = language_model(transformers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with smb.torch.join(model, optimizer, "run", scheme="localsgd", every=2, client=client):
        together = hf.Callback("run", "localsgd", every=3, client=client)
        trainer = transformers.Trainer(
            language_model(transformers, 1), arguments(transformers, tmp_path), train_dataset=Text(),
            callbacks=[together],
        )  # fmt: skip
        with pytest.raises(smb.InvalidArgumentError, match="every is 2, not 3"):
            trainer.train()
        together.close()
        assert sum(worker.alive for worker in smb.train.status(client, "run").workers) == 1


def _batches(count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield torch.randn(8, 6, generator=generator)


def test_accelerate(connect: Connect) -> None:
    """Prepared model and optimizer: steps count once for each accumulation, and the end is a plain loop's."""
    accelerate = pytest.importorskip("accelerate")
    from smb.torch import accelerate as together

    accelerator = accelerate.Accelerator(cpu=ON_HOST, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    client = connect()
    with together.join(accelerator, prepared, wrapped, "run", "localsgd", every=2, client=client) as shared:
        for images in _batches(8):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(images.to(DEVICE)).square().mean())
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                wrapped.step()
                wrapped.zero_grad()
        assert smb.train.status(client, "run").round == 2  # 8 batches are 4 steps are 2 rounds
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in shared.state_dict().items())
    assert not optimizer._optimizer_step_post_hooks


def test_accelerate_skips_what_the_scaler_skips(connect: Connect) -> None:
    """A step that a gradient scaler leaves out, as gradients are infinite, is no step of the scheme either."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    events: list[smb.train.ExchangeEvent] = []
    with smb.torch.join(model, optimizer, "run", scheme="localsgd", every=1, client=connect()) as shared:
        shared.on_exchange(events.append)
        for number, images in enumerate(_batches(4)):
            optimizer.zero_grad()
            scaler.scale(model(images.to(DEVICE)).square().mean()).backward()
            if number == 1:
                model.weight.grad.fill_(torch.inf)  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
    assert [event.step for event in events] == [1, 2, 3]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_lightning(connect: Connect, tmp_path: Path, precision: str) -> None:
    """Lightning's Trainer; with accumulation, clipping and a schedule by steps; on an exception it has left."""
    lightning = pytest.importorskip("lightning")
    from smb.torch.lightning import Callback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, fails_at: int = -1) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers, self.fails_at = nn.Linear(6, 2), fails_at

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if number == self.fails_at:
                raise ZeroDivisionError
            return functional.mse_loss(self.layers(batch[0]), batch[0][:, :2])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat(list(_batches(8)))), batch_size=8)

    def fit(module: Any, **options: Any) -> Any:
        trainer = lightning.Trainer(
            max_epochs=1, accelerator=DEVICE, devices=1, precision=precision, gradient_clip_val=1.0, logger=False,
            accumulate_grad_batches=2, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, callbacks=[Callback("run", **options)],
        )  # fmt: skip
        trainer.fit(module, data)
        return trainer

    client, module = connect(), Module()
    fit(module, scheme="localsgd", every=2, client=client, samples=16)
    status = smb.train.status(client, "run")
    assert (status.round, status.workers[0].samples, status.workers[0].alive) == (2, 64, False)
    shared = smb.torch.shared_state_dict(client, "run")
    assert torch.equal(
        module.layers.weight.cpu().float(), shared["layers.weight"].to(module.layers.weight.dtype).float()
    )
    if precision != "32-true":
        return  # the rest is the same with all of them
    again = fit(Module(), client=client)
    assert again.lr_scheduler_configs[0].scheduler.last_epoch == 8
    with pytest.raises(ZeroDivisionError):
        fit(Module(2), client=client)
    assert not any(worker.alive for worker in smb.train.status(client, "run").workers)


class EightBit(torch.optim.Optimizer):
    """As 8-bit optimizers are: a step of its own, and state that is no float."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["signs"] = parameter.grad.sign().to(torch.int8)
                    parameter.sub_(self.state[parameter]["signs"], alpha=group["lr"])


class Wrapper:
    """Holds an optimizer as several libraries' do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, capturable=False, amsgrad=True),
        EightBit,
        lambda parameters: torch.optim.LBFGS(parameters, max_iter=2),
    ],
    ids=["fused", "foreach", "amsgrad", "eight-bit", "lbfgs"],
)
def test_optimizers(connect: Connect, make: Callable[..., torch.optim.Optimizer]) -> None:
    """Whatever the optimizer does between two exchanges is shared; wrapped ones are found inside."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2).to(DEVICE)
    optimizer = make(model.parameters())
    client = connect()
    with smb.torch.join(model, Wrapper(Wrapper(optimizer)), "run", scheme="asp", client=client):  # type: ignore[arg-type]
        for images in _batches(3):

            def closure(images: torch.Tensor = images) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(images.to(DEVICE)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else (closure(), optimizer.step())
            shared = smb.torch.shared_state_dict(client, "run")
            assert torch.allclose(shared["weight"], model.weight.cpu(), atol=1e-6)


def test_several_optimizers(connect: Connect) -> None:
    """One for each part of the model: join with the one that steps last; all of the model is shared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(DEVICE)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    last = torch.optim.AdamW(model[2].parameters(), lr=0.1)
    client = connect()
    with smb.torch.join(model, last, "run", scheme="localsgd", every=1, client=client):
        for images in _batches(3):
            model.zero_grad()
            model(images.to(DEVICE)).square().mean().backward()
            first.step()
            last.step()
        assert smb.train.status(client, "run").round == 3
    shared = smb.torch.shared_state_dict(client, "run")
    assert all(torch.equal(value.cpu(), shared[name]) for name, value in model.state_dict().items())


def test_compiled_and_plain_members_work_together(connect: Connect) -> None:
    """A compiled model has `_orig_mod.` in its names; the group has not, nor what is published."""
    torch.manual_seed(0)
    plain, inner = nn.Linear(6, 2), nn.Linear(6, 2).to(DEVICE)
    compiled = torch.compile(inner, backend="eager")
    client = connect()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, inner)]
    with (
        smb.torch.join(plain, optimizers[0], "run", scheme="asp", client=client),
        smb.torch.join(compiled, optimizers[1], "run", client=connect()) as shared,  # type: ignore[arg-type]
    ):
        compiled(torch.ones(3, 6, device=DEVICE)).square().mean().backward()
        optimizers[1].step()
        assert list(shared.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
        found = smb.torch.shared_state_dict(client, "run")
        assert torch.equal(found["weight"], inner.weight.cpu())
    smb.torch.publish(client, "policy", compiled)  # type: ignore[arg-type]
    follower = smb.torch.follow(client, "policy")
    follower.load(plain)
    assert torch.equal(plain.weight, inner.weight.cpu())
    follower.load(compiled)  # type: ignore[arg-type]


def test_what_is_no_optimizer_leaves_nothing(connect: Connect) -> None:
    """A wrapper without hooks ended in AttributeError, and a member that nobody had: refused before joining."""
    model, client = nn.Linear(2, 2), connect()
    with pytest.raises(smb.InvalidArgumentError, match="the model first, then the optimizer, not Linear and object"):
        smb.torch.join(model, object(), "run", scheme="asp", client=client)  # type: ignore[arg-type]
    assert not client.list()


def test_what_keeps_parameters_is_refused(connect: Connect) -> None:
    """FSDP1, and DeepSpeed in Accelerate and Lightning: a sentence that says what works, and nothing is left."""
    accelerate, lightning = pytest.importorskip("accelerate"), pytest.importorskip("lightning")
    from smb.torch import accelerate as together
    from smb.torch.lightning import Callback

    class FullyShardedDataParallel(nn.Module):
        """As FSDP1 is called."""

        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(6, 2)

    class DeepSpeedStrategy:
        """As Lightning's is called."""

    model, client = FullyShardedDataParallel(), connect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(smb.InvalidArgumentError, match=r"shard it by fully_shard \(FSDP2\), and join with mesh="):
        smb.torch.join(model, optimizer, "run", scheme="asp", client=client)
    zero = SimpleNamespace(distributed_type=accelerate.DistributedType.DEEPSPEED, num_processes=2)
    with pytest.raises(smb.InvalidArgumentError, match="DEEPSPEED keeps the parameters itself"):
        together.join(zero, nn.Linear(6, 2), optimizer, "run", "asp", client=client)
    trainer = SimpleNamespace(strategy=DeepSpeedStrategy(), world_size=2)
    with pytest.raises(smb.InvalidArgumentError, match="DeepSpeed keeps the parameters itself"):
        Callback("run", "asp", client=client).on_train_start(trainer, lightning.LightningModule())
    assert not client.list()


LOGGED = ("round", "members", "staleness", "norm", "bytes", "seconds")


def scalars(directory: Path, prefix: str = "") -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows of exchanges: (step, value) of each point, by the name behind smb/."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    found = EventMultiplexer().AddRunsFromDirectory(str(directory)).Reload()
    return {
        tag.removeprefix(f"{prefix}smb/"): [(event.step, event.value) for event in found.Scalars(run, tag)]
        for run, tags in found.Runs().items()
        for tag in tags["scalars"]
        if "smb/" in tag
    }


def check_points(found: dict[str, list[tuple[int, float]]], rounds: dict[int, int]) -> None:
    """Check the points of a process that trains alone: its rounds by step."""
    assert found.keys() == set(LOGGED)
    assert found["round"] == list(rounds.items())
    assert found["members"] == [(step, 1) for step in rounds]
    assert found["staleness"] == [(step, 0) for step in rounds]
    for name in ("norm", "bytes", "seconds"):
        assert [step for step, _ in found[name]] == list(rounds)
        assert all(value > 0 for _, value in found[name])


@pytest.mark.parametrize("given_by", ["callbacks=", "add_callback"])
def test_trainer_logs_exchanges(
    transformers: Any, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_by: str
) -> None:
    """What report_to= names has the values of an exchange with the loss of its step, and the Trainer's records, too.
    A callback that stands behind ours is called as before.
    """
    pytest.importorskip("tensorboard")
    from smb.torch import hf

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    steps: list[int] = []

    class Last(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            steps.append(0)

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            steps.append(state.global_step)

    ours = [hf.Callback("run", "diloco", every=3, client=connect()), Last()]
    trainer = transformers.Trainer(
        language_model(transformers),
        arguments(transformers, tmp_path, logging_steps=2, report_to=["tensorboard"]),
        train_dataset=Text(), callbacks=ours if given_by == "callbacks=" else None,
    )  # fmt: skip
    for each in ours if given_by == "add_callback" else ():
        trainer.add_callback(each)
    trainer.train()
    assert steps == list(range(9))
    check_points(scalars(tmp_path / "board", "train/"), {4: 1, 6: 2})
    records = {record["step"]: record for record in trainer.state.log_history if "smb/round" in record}
    assert {step: record["smb/round"] for step, record in records.items()} == {4: 1, 6: 2}
    assert all("loss" in record for record in records.values())


def test_lightning_logs_exchanges(connect: Connect, tmp_path: Path) -> None:
    """A logger has the values of the last exchange each time that it writes; callbacks find them, too."""
    lightning = pytest.importorskip("lightning")
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger

    from smb.torch.lightning import Callback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Linear(6, 2)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.layers(batch[0]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat(list(_batches(9)))), batch_size=8)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator=DEVICE, devices=1, logger=TensorBoardLogger(tmp_path), log_every_n_steps=3,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Callback("run", "localsgd", every=2, client=connect())],
    )  # fmt: skip
    trainer.fit(Module(), data)
    check_points(scalars(tmp_path), {2: 1, 5: 3, 8: 4})  # Lightning counts batches from 0
    assert trainer.callback_metrics["smb/round"] == 4


def test_accelerate_logs_exchanges(connect: Connect, tmp_path: Path) -> None:
    """A record of accelerator.log() has the last exchange's values once, under the script's own step."""
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    from smb.torch import accelerate as together

    accelerator = accelerate.Accelerator(cpu=ON_HOST, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("board")
    model = nn.Linear(6, 2)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with together.join(accelerator, prepared, optimizer, "run", "localsgd", every=2, client=connect()):
        for number, images in enumerate(_batches(7), 101):
            accelerator.backward(prepared(images.to(DEVICE)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            values = {"own": number}
            accelerator.log(values, step=number)
            assert values == {"own": number}
    accelerator.end_training()
    check_points(scalars(tmp_path), {102: 1, 104: 2, 106: 3})


def test_tensorboard_of_a_plain_script(connect: Connect, tmp_path: Path) -> None:
    """log_to() writes each exchange under the group's step; what can't write is refused."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        warnings.catch_warnings(),
        tensorboard.SummaryWriter(tmp_path) as writer,
        smb.torch.join(model, optimizer, "run", scheme="localsgd", every=2, client=connect()) as shared,
    ):
        with pytest.raises(smb.InvalidArgumentError, match=r"log_to: pass a SummaryWriter .*, not PosixPath"):
            shared.log_to(tmp_path)  # type: ignore[arg-type]
        shared.log_to(writer)
        for images in _batches(5):
            model(images).square().mean().backward()
            optimizer.step()
    check_points(scalars(tmp_path), {2: 1, 4: 2})


def test_a_log_knows_the_members(connect: Connect) -> None:
    """Of two members that train, each one's events count both."""
    client, models = connect(), [nn.Linear(6, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    events: list[smb.train.ExchangeEvent] = []
    with (
        smb.torch.join(models[0], optimizers[0], "run", scheme="asp", client=client) as shared,
        smb.torch.join(models[1], optimizers[1], "run", client=client),
    ):
        shared.on_exchange(events.append)
        models[0](torch.ones(3, 6)).square().mean().backward()
        optimizers[0].step()
    assert [event.scalars()["smb/members"] for event in events] == [2]


def test_a_bar_over_batches(connect: Connect) -> None:
    """tqdm shows a bar with a total, which is full when a process that trains alone has finished its epoch."""
    tqdm = pytest.importorskip("tqdm")
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with smb.torch.join(model, optimizer, "run", scheme="asp", client=connect()) as shared:
        for epoch in range(2):
            shown = io.StringIO()
            for batch in tqdm.tqdm(shared.batches(40, 4), file=shown, mininterval=0, desc=f"epoch {epoch}"):
                model(torch.ones(len(batch), 6)).square().mean().backward()
                optimizer.step()
            assert f"epoch {epoch}: 100%" in shown.getvalue()
            assert "10/10" in shown.getvalue()


def test_progress(connect: Connect) -> None:
    """Steps go on where the group is for who joins late, in the slot of one that left too; samples are all members'."""
    client, models = connect(), [nn.Linear(6, 2) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def train(which: int, steps: int) -> smb.train.Progress:
        shared = smb.torch.join(
            models[which], optimizers[which], "run", scheme="localsgd", every=2, samples=5, client=client
        )
        with shared:
            for _ in range(steps):
                models[which](torch.ones(3, 6)).square().mean().backward()
                optimizers[which].step()
            return shared.progress

    assert train(0, 4) == smb.train.Progress(4, 20, 2)
    assert train(1, 6) == smb.train.Progress(10, 50, 5)
    late = smb.torch.join(models[2], optimizers[2], "run", client=client)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizers[2], 1.0, 0.0, 20)
    late.catch_up(schedule)
    assert schedule.get_last_lr()[0] == pytest.approx(0.05)
    late.close()
