"""A real vLLM follows a trainer: `make vllm`. After each step engines generate what transformers generates with the
same weights. The model is a small Llama with random weights, on a CPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import smb
import smb.torch
import smb.torch.vllm
from smb.torch.trl import WeightTransfer
from tests.support.daemons import wait_for
from tests.support.vllm_process import CALL_S, START_S, Engine, Server

pytest.importorskip("vllm", reason="not run: it needs vLLM (make vllm)")
pytestmark = [
    pytest.mark.timeout(1200),  # minutes: engines start, some with several processes
    pytest.mark.filterwarnings("ignore"),  # vLLM's
]
ROOT = Path(__file__).parents[2]
PROMPT = [5, 17, 99, 300, 42]
# Publishes under a name without end, and says each generation.
TRAINER = """
import sys, torch, smb, smb.torch
with smb.connect(sys.argv[1]) as client:
    state = torch.load(sys.argv[2])
    publisher = smb.torch.Publisher(client, "orphan", state, versions=3)
    while True:
        for tensor in state.values():
            tensor.add_(torch.randn_like(tensor) * 0.05)
        print(publisher.publish(), flush=True)
"""


def policy(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=512, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def step(model: Any) -> Any:
    """Change all weights, in place of a step of training."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def expected(model: Any, prompt: list[int] = PROMPT) -> list[int]:
    """What transformers generates."""
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return list(found[0, len(prompt) :].tolist())


def make_trainer(cluster: smb.LocalCluster, name: str, client: Any, model: Any, **publisher: Any) -> Any:
    """vLLM's own factory makes the trainer engine, on vLLM's own source."""
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    smb.torch.vllm.register()
    from smb.torch.vllm.trainer import SmbTrainerInitInfo

    return WeightTransferTrainerFactory.trainer_init(
        init_info=SmbTrainerInitInfo(name=name, coordinator=cluster.address, publisher=publisher, rank=0),
        client=client,
        source=ModuleSource(model),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory from which engines start."""
    place = tmp_path_factory.mktemp("policy")
    policy().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def engines(saved: Path) -> Iterator[dict[str, Engine]]:
    """Two engines, that all tests use. A test that kills one puts another one in its place."""
    started = {name: Engine(saved).start() for name in ("one", "two")}
    try:
        for engine in started.values():
            engine.ready()
            assert engine.tokens(PROMPT) == expected(policy())
        yield started
    finally:
        for engine in started.values():
            engine.stop()


def refused(engine: Engine, generation: int) -> str:
    """Have an engine update as vLLM's own clients do, and return the error."""
    engine.start_weight_update()
    with pytest.raises(RuntimeError) as error:
        engine.update_weights({"generation": generation})
    with pytest.raises(RuntimeError, match="without a matching start"):  # the worker that refused has closed it
        engine.finish_weight_update()
    return str(error.value)


def check_refusals(cluster: smb.LocalCluster, client: smb.Client, engine: Engine, model: Any, prefix: str) -> None:
    """Each refusal leaves an engine with what it had, and a good update works afterwards."""
    good = engine.tokens(PROMPT)
    state = model.state_dict()
    kept = [name for name in state if "k_proj" not in name]
    for name, published, told in (
        ("rows", {**state, "lm_head.weight": state["lm_head.weight"][:-1].clone()}, "does not take the published"),
        ("unknown", {**state, "model.layers.0.unknown": torch.zeros(3)}, "does not take the published"),
        ("few", {name: each for name, each in state.items() if "norm" not in name}, "nothing was published for 5"),
        ("fused", {name: state[name] for name in kept}, "only 49,152 of|only 98,304 of"),
    ):
        smb.torch.publish(client, prefix + name, published)
        engine.init_weight_transfer_engine({"name": prefix + name, "coordinator": cluster.address, "timeout": 30.0})
        assert re.search(told, refused(engine, 1))
        assert engine.tokens(PROMPT) == good
    publisher = smb.torch.Publisher(client, prefix + "over", step(model), versions=2)
    engine.init_weight_transfer_engine({"name": prefix + "over", "coordinator": cluster.address, "timeout": 2.0})
    for _ in range(4):
        publisher.publish()
    assert "overwritten" in refused(engine, 1)
    assert engine.tokens(PROMPT) == good
    assert "not published within" in refused(engine, 99)
    assert engine.tokens(PROMPT) == good
    engine.start_weight_update()
    engine.update_weights({"generation": 4})
    engine.finish_weight_update("4")
    assert engine.version() == "4"
    assert engine.tokens(PROMPT) == expected(model) != good


def test_engines_follow_a_trainer_and_refuse_what_does_not_fit(
    cluster: smb.LocalCluster, connect: Any, engines: dict[str, Engine]
) -> None:
    """One call of the trainer engine updates both, with and without deltas; refusals leave an engine as it was."""
    model = policy()
    for name, deltas in (("plain", 0), ("deltas", 4)):
        trainer = make_trainer(cluster, name, smb.torch.vllm.Engines(engines), model, deltas=deltas)
        for generation in (1, 2, 3):
            step(model)
            trainer.send_weights()
            for engine in engines.values():
                assert engine.tokens(PROMPT) == expected(model)
                assert engine.version() == str(generation)
        trainer.shutdown()
    check_refusals(cluster, connect(), engines["one"], model, "refused-")


def test_engines_serve_on_when_a_trainer_is_killed(
    cluster: smb.LocalCluster, connect: Any, engines: dict[str, Engine], tmp_path: Path
) -> None:
    """Killed while it publishes: engines take what it published last, and a new trainer goes on from there."""
    torch.save(policy().state_dict(), tmp_path / "state")
    killed = subprocess.Popen(
        [sys.executable, "-c", TRAINER, cluster.address, str(tmp_path / "state")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert killed.stdout is not None
    for line in killed.stdout:
        if int(line) == 5:
            break
    killed.kill()
    killed.wait()
    killed.stdout.close()
    before = {name: engine.tokens(PROMPT) for name, engine in engines.items()}
    model = policy()
    follower = smb.torch.follow(connect(), "orphan")
    last = follower.load(model)
    assert last >= 5
    for name, engine in engines.items():
        assert engine.tokens(PROMPT) == before[name]
        engine.init_weight_transfer_engine({"name": "orphan", "coordinator": cluster.address})
        engine.start_weight_update()
        engine.update_weights({"generation": last})
        engine.finish_weight_update(str(last))
        assert engine.tokens(PROMPT) == expected(model)
    trainer = make_trainer(cluster, "orphan", smb.torch.vllm.Engines(engines), step(model), versions=3)
    trainer.send_weights()
    assert trainer.generation > last
    for engine in engines.values():
        assert engine.tokens(PROMPT) == expected(model)
    trainer.shutdown()


def test_engines_follow_over_the_loss_of_a_memory_server(engines: dict[str, Engine]) -> None:
    """With two copies. What engines have not taken yet comes from the second one, and publications go on."""
    model = policy()
    with smb.LocalCluster(servers=3, capacity="128MiB") as cluster:
        client = smb.torch.vllm.Engines(engines)
        trainer = make_trainer(cluster, "safe", client, model, replicas=2, servers=["server-0", "server-1"])
        trainer.send_weights()
        cluster.servers[0].kill()
        for _ in range(3):
            step(model)
            trainer.send_weights()
            assert client.failed == {}
            for engine in engines.values():
                assert engine.tokens(PROMPT) == expected(model)
        trainer.shutdown()


def test_a_dead_engine_holds_up_nobody_and_another_one_joins(
    cluster: smb.LocalCluster, engines: dict[str, Engine], saved: Path
) -> None:
    """The trainer's next call updates the others and names the dead one. One that starts in its place is updated with
    the next call."""
    model = policy()
    client = smb.torch.vllm.Engines(engines)
    trainer = make_trainer(cluster, "elastic", client, model)
    trainer.send_weights()
    engines["two"].kill()
    for _ in range(2):
        step(model)
        trainer.send_weights()
        assert list(client.failed) == ["two"]
        assert engines["one"].tokens(PROMPT) == expected(model)
    engines["two"].stop()
    engines["two"] = Engine(saved).start().ready()
    assert engines["two"].tokens(PROMPT) == expected(policy())
    client.add("two", engines["two"])
    step(model)
    trainer.send_weights()
    assert client.failed == {}
    for engine in engines.values():
        assert engine.tokens(PROMPT) == expected(model)
    trainer.shutdown()


def test_workers_of_an_engine_share_one_copy(cluster: smb.LocalCluster, connect: Any, saved: Path) -> None:
    """Of a tensor parallel engine: both map the same memory, both take a generation, and both refuse one."""
    engine = Engine(saved, workers=2).start()
    try:
        engine.ready()
        model = step(policy())
        trainer = make_trainer(cluster, "parallel", engine, model)
        for _ in range(2):
            step(model)
            trainer.send_weights()
            assert engine.tokens(PROMPT) == expected(model)
        mapped = memory_of(engine, "smb-parallel")
        assert len(mapped) == 2
        assert len(set(mapped.values())) == 1
        trainer.shutdown()
        check_refusals(cluster, connect(), engine, model, "parallel-")
    finally:
        engine.stop()


def memory_of(engine: Engine, name: str) -> dict[int, str]:
    """Return the inode of the memory of that name in each of an engine's processes that maps it."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) != engine.process.pid:
                continue
            maps = [line.split() for line in (process / "maps").read_text().splitlines()]
        except (OSError, ProcessLookupError):
            continue
        for line in maps:
            if line[5:6] == [f"/memfd:{name}"]:
                found[int(process.name)] = line[4]
    return found


def test_trls_transfer_updates_a_server_that_generates(cluster: smb.LocalCluster, tmp_path: Path) -> None:
    """smb.torch.trl, called as TRL calls it. The server answers by the new weights, though it had a prompt's keys and
    values by the former ones, and ends the request that was in progress."""
    model = policy()
    model.save_pretrained(tmp_path)
    prompt = torch.randint(1, 512, (300,)).tolist()  # longer than a block of the cache, 128 tokens
    server = Server(tmp_path, 512)
    transfer = WeightTransfer("trl", [server.url], coordinator=cluster.address, server_timeout=START_S)
    try:
        transfer.init_weight_transfer()
        assert server.tokens(prompt) == expected(model, prompt)
        for generation in (1, 2):
            step(model)
            with ThreadPoolExecutor(1) as thread:
                in_progress = thread.submit(server.tokens, PROMPT, 400)
                transfer.pause()
                transfer.send_weights(iter(model.named_parameters()))
                transfer.resume()
                assert server.tokens(prompt) == expected(model, prompt)
                assert len(in_progress.result(CALL_S)) == 400
            assert (transfer.generation, transfer.engines.failed) == (generation, {})
        transfer.destroy()
    finally:
        server.stop()


def test_the_example_updates_a_server() -> None:
    """examples/vllm_serve.py: `vllm serve`, its routes, and vLLM's client of them."""
    done = subprocess.run(
        [sys.executable, "examples/vllm_serve.py"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(": ") for line in done.stdout.splitlines() if re.match("before: |generation [123]: ", line))
    assert list(lines) == ["before", "generation 1", "generation 2", "generation 3"], done.stdout
    assert len(set(lines.values())) == 4
    assert all(len(words.split()) == 6 for words in lines.values())
    wait_for(lambda: not server_runs(), "end of its processes")


def server_runs() -> bool:
    """Whether a process of the example is still there."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"--served-model-name=policy" in command.read_bytes():
                return True
        except OSError:
            continue
    return False
