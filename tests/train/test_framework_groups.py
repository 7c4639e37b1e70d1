"""Accelerate and Lightning with several processes: a group of two gloo ranks is one member."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.config.parse import OWNER_VARIABLE
from smb.daemon.process import end_with_owner
from tests.support.meshes import NOWHERE

RANKS, STEPS = 2, 4
TOLD_S = 240  # to import a framework takes long where the machine is busy
pytestmark = pytest.mark.timeout(TOLD_S + 60)


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def _rows() -> torch.Tensor:
    return torch.randn(STEPS * RANKS * 4, 6, generator=torch.Generator().manual_seed(3))


def _accelerate(client: smb.Client, rank: int, kind: str, directory: str) -> nn.Module:
    import accelerate

    from smb.torch import accelerate as together

    options: dict[str, Any] = {}
    if kind == "fsdp2":
        options["fsdp_plugin"] = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    with NOWHERE:
        shared = together.join(accelerator, prepared, wrapped, "run", "localsgd", every=2, samples=8, client=client)
    with shared:
        schedule = torch.optim.lr_scheduler.LinearLR(wrapped.optimizer, 1.0, 1.0)
        shared.catch_up(schedule)
        for images in _rows().view(STEPS, RANKS, 4, 6)[:, rank]:
            wrapped.zero_grad()
            accelerator.backward(prepared(images).square().mean())
            wrapped.step()
    return accelerator.unwrap_model(prepared)  # type: ignore[no-any-return]


def _lightning(client: smb.Client, rank: int, kind: str, directory: str) -> nn.Module:
    import lightning

    from smb.torch.lightning import Callback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = _network()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.layers(batch[0]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    own = _rows().view(STEPS, RANKS, 4, 6)[:, rank].reshape(-1, 6)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=RANKS, strategy=kind, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=directory, barebones=False,
        use_distributed_sampler=False, callbacks=[Callback("run", "localsgd", every=2, samples=8, client=client)],
    )  # fmt: skip
    module = Module()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(own), batch_size=4)
    trainer.fit(module, data)
    assert ("smb/round" in trainer.callback_metrics) == (rank == 0)
    return module.layers


def _trainer(client: smb.Client, rank: int, kind: str, directory: str) -> nn.Module:
    import transformers

    from smb.torch.hf import Callback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _network()

        def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layers(images).square().mean()}

    arguments = transformers.TrainingArguments(
        output_dir=directory, max_steps=STEPS, per_device_train_batch_size=4, report_to=[], use_cpu=True, optim="sgd",
        save_strategy="no", disable_tqdm=True, learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0,
        ddp_backend="gloo", remove_unused_columns=False,
    )  # fmt: skip
    rows = [{"images": _rows()[0]} for _ in range(STEPS * RANKS * 4)]  # alike, since it draws them by chance
    model = Model()
    together = Callback("run", "localsgd", every=2, client=client)
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[together]).train()
    return model.layers


FRAMEWORKS = {"accelerate": _accelerate, "lightning": _lightning, "transformers": _trainer}
LONG = pytest.mark.skipif(not os.environ.get("SMB_LONG"), reason="it takes long to import; SMB_LONG=1 runs it")


def _run_ranks(framework: str, kind: str, address: str, directory: str, outboxes: list[Any]) -> None:
    """Two processes, of which one is the other's fork: importing a framework takes seconds. The fork ends with it."""
    importlib.import_module(framework)
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    rank = 0 if os.fork() else 1
    if rank:
        end_with_owner()
    _run_rank(framework, kind, address, directory, rank, outboxes[rank])


def _run_rank(framework: str, kind: str, address: str, directory: str, rank: int, outbox: Any) -> None:
    """A process: trains, and tells its model or what went wrong."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    try:
        with smb.connect(address) as client:
            model = FRAMEWORKS[framework](client, rank, kind, directory)
            whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
            outbox.put([tensor.detach().numpy().copy() for tensor in whole])
    except Exception as error:  # noqa: BLE001 - what ends a rank is told, in words
        outbox.put(f"{type(error).__name__}: {error}")
    outbox.close()
    outbox.join_thread()
    os._exit(0)  # the other rank may be gone


@pytest.mark.parametrize(
    ("framework", "kind"),
    [
        ("accelerate", "ddp"),
        ("accelerate", "fsdp2"),
        ("lightning", "ddp"),
        pytest.param("transformers", "ddp", marks=LONG),
    ],
)
def test_two_processes_are_one_member(
    context: Any, cluster: smb.LocalCluster, connect: Any, tmp_path: Path, framework: str, kind: str
) -> None:
    """They come to what one process with the whole batch comes to, and the group has seen one member."""
    if importlib.util.find_spec(framework) is None:  # importing it takes seconds
        pytest.skip(f"not run: it needs {framework}")
    outboxes = [context.Queue() for _ in range(RANKS)]
    process = context.Process(
        target=_run_ranks, args=(framework, kind, cluster.address, str(tmp_path), outboxes), daemon=True
    )
    process.start()
    try:
        told = [outbox.get(timeout=TOLD_S) for outbox in outboxes]
        process.join(30)
    finally:
        process.kill()
        process.join(30)
    model, client = _network(), connect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images in _rows().view(STEPS, RANKS * 4, 6):
        optimizer.zero_grad()
        model(images if framework != "transformers" else _rows()[:1]).square().mean().backward()
        optimizer.step()
    for values in told:
        assert not isinstance(values, str), values
        assert all(
            np.allclose(one, other.detach().numpy(), atol=1e-6)
            for one, other in zip(values, model.parameters(), strict=True)
        )
    (worker,) = smb.train.status(client, "run").workers
    assert (worker.contributions, worker.samples) == (2, 8 * STEPS)
