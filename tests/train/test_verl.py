"""smb.torch.verl in the real verl, on a CPU: its registry, its abstract class, and its manager over Ray's workers."""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import smb
import smb.torch
from tests.conftest import Connect

pytestmark = [
    pytest.mark.timeout(600),  # imports of verl take 6 s of one core for each of Ray's workers
    pytest.mark.filterwarnings("ignore"),  # verl's, and those of what it brings
]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("verl", reason="not run: it needs verl (make stacks)")
    from omegaconf import OmegaConf
    from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.import_utils import import_external_libs

ROOT = Path(__file__).parents[2]

Make = Callable[..., Any]


def state(step: int) -> dict[str, torch.Tensor]:
    """What a model has after that step."""
    torch.manual_seed(step)
    return {"embed.weight": torch.randn(20, 6, dtype=torch.bfloat16), "head.bias": torch.randn(7)}


def config(address: str, **named: Any) -> Any:
    """The part of verl's configuration, as its command line makes it."""
    kwargs = {"coordinator": address, "timeout": 10.0, "patience": 20.0, **named}
    return omega_conf_to_dataclass(
        OmegaConf.create(
            {
                "_target_": "verl.workers.config.CheckpointEngineConfig",
                "backend": "smb",
                "custom_backend_module": "smb.torch.verl",
                "engine_kwargs": {"smb": kwargs},
            }
        )
    )


def new(settings: Any, **named: Any) -> Any:
    """An engine, as verl's workers make it."""
    import_external_libs(settings.custom_backend_module)
    kwargs = settings.engine_kwargs.get(settings.backend, {})
    return CheckpointEngineRegistry.new(settings.backend, bucket_size=1 << 20, **named, **kwargs)


@pytest.fixture
def make(cluster: smb.LocalCluster, connect: Connect) -> Iterator[Make]:
    """Make engines; they are closed before `connect` deletes the name."""
    made: list[Any] = []

    def engine(*, is_master: bool | None = None, **named: Any) -> Any:
        role = {} if is_master is None else {"is_master": is_master}  # only actors get it
        made.append(new(config(named.pop("address", cluster.address), **named), **role))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def begin(actors: list[Any], rollouts: list[Any]) -> None:
    """What verl's manager does before each sync."""
    said = [each.prepare() for each in (*actors, *rollouts)]
    kind = CheckpointEngineRegistry.get("smb")
    for engines, kwargs in zip((actors, rollouts), kind.build_topology(len(actors), len(rollouts), said), strict=True):
        for index, engine in enumerate(engines):
            engine.init_process_group(**{name: values[index] for name, values in kwargs.items()})


async def received(rollout: Any, step: int | None = None) -> dict[str, torch.Tensor]:
    return {name: tensor async for name, tensor in rollout.receive_weights(global_steps=step)}


def sync(actors: list[Any], rollouts: list[Any], step: int) -> list[dict[str, torch.Tensor]]:
    """One sync of a step. Return what each rollout has received."""

    async def all_at_once() -> list[Any]:
        sends = [each.send_weights(iter(state(step).items()), global_steps=step) for each in actors]
        return await asyncio.gather(*(received(each, step) for each in rollouts), *sends)

    begin(actors, rollouts)
    answers = asyncio.run(all_at_once())
    for each in (*actors, *rollouts):
        each.finalize()
    return answers[: len(rollouts)]


def same(got: dict[str, torch.Tensor], step: int) -> bool:
    wanted = state(step)
    return got.keys() == wanted.keys() and all(got[name].equal(each) for name, each in wanted.items())


@pytest.mark.parametrize("publisher", [{}, {"deltas": 4, "versions": 4}])
def test_each_rollout_takes_the_generation_of_its_step(make: Make, publisher: dict[str, Any]) -> None:
    """Also one that joins between two steps, one that asks before the trainer has published, and one that is late;
    what a rollout was given stays. Steps need not be consecutive."""
    actors = [make(is_master=rank == 0, publisher=publisher) for rank in range(2)]
    rollouts = [make(), make()]
    first = sync(actors, rollouts, 10)
    assert all(same(each, 10) for each in first)
    rollouts.append(make())
    assert all(same(each, 20) for each in sync(actors, rollouts, 20))
    assert all(same(each, 10) for each in first)

    async def early() -> dict[str, torch.Tensor]:
        asks = asyncio.create_task(received(rollouts[1]))
        while not rollouts[1]._reading.locked():
            await asyncio.sleep(0.01)
        metrics = await actors[0].send_weights(iter(state(30).items()))
        assert metrics["checkpoint_engine/generation"] == 3
        return await asks

    begin(actors, rollouts)
    assert same(asyncio.run(early()), 30)
    assert same(asyncio.run(received(rollouts[0], 30)), 30)
    assert all(same(each, 40) for each in sync(actors, rollouts[1:], 40))


def test_what_cannot_be_had_is_refused(make: Make, connect: Connect, cluster: smb.LocalCluster) -> None:
    """A sync that did not begin, a generation that does not come or was overwritten, other names or shapes, a second
    trainer. All ranks iterate to the end. The next sync is as if nothing had happened."""
    actor, rollout = make(is_master=True), make(patience=0.5)
    with pytest.raises(smb.InvalidArgumentError, match="no sync of 'policy' has begun"):
        asyncio.run(received(rollout))
    with pytest.raises(smb.InvalidArgumentError, match="no sync of 'policy' has begun"):
        asyncio.run(actor.send_weights(iter(state(1).items())))
    with pytest.raises(smb.InvalidArgumentError, match="2 workers are actors of rank 0"):
        CheckpointEngineRegistry.get("smb").build_topology(2, 0, [{"generation": 1}, {"generation": 1}])
    begin([actor], [rollout])
    with pytest.raises(smb.NotFoundError, match="policy"):
        asyncio.run(received(rollout))
    assert same(sync([actor], [rollout], 1)[0], 1)

    begin([actor], [rollout])
    with pytest.raises(smb.TimeoutError, match="policy"):
        asyncio.run(received(rollout))
    for wrong in ({"embed.weight": torch.zeros(20, 6)}, {"embed.weight": state(1)["embed.weight"]}):
        weights = iter({**wrong, "other": torch.zeros(2)}.items())
        with pytest.raises(smb.InvalidArgumentError, match="these are not the published tensors"):
            asyncio.run(actor.send_weights(weights))
        assert next(weights, None) is None
    assert same(sync([actor], [rollout], 2)[0], 2)

    begin([actor], [rollout])
    other = smb.torch.Publisher(connect(), "policy")
    other.publish(state(77))
    with pytest.raises(smb.Error, match=r"step 3 is generation 4 of 'policy'.*another trainer"):
        asyncio.run(actor.send_weights(iter(state(3).items()), global_steps=3))
    rollout.init_process_group(generation=1)
    with pytest.raises(smb.NotFoundError, match="overwritten"):
        asyncio.run(received(rollout))
    assert same(sync([actor], [rollout], 5)[0], 5)
    with pytest.raises(smb.InvalidArgumentError, match="dtype must be a floating-point dtype, not float7"):
        make(is_master=True, publisher={"dtype": "float7"}).prepare()
    with pytest.raises(TypeError, match="coordinater"):
        make(coordinater="storage-1:7070")


def test_syncs_go_on_without_the_coordinator_but_nobody_joins(make: Make) -> None:
    """Who is connected goes on; a rollout that joins is told that the coordinator does not answer."""
    with smb.LocalCluster(servers=1, capacity="64MiB") as own:
        actor, rollout = make(is_master=True, address=own.address), make(address=own.address, timeout=1.0)
        late = make(address=own.address, timeout=1.0)
        assert same(sync([actor], [rollout], 1)[0], 1)
        own.coordinator.kill()
        assert same(sync([actor], [rollout], 2)[0], 2)
        begin([actor], [late])
        with pytest.raises(smb.UnavailableError, match=own.address):
            asyncio.run(received(late))
        with pytest.raises(smb.UnavailableError, match=own.address):
            make(is_master=True, address=own.address, timeout=1.0).prepare()
        for each in (actor, rollout):
            each.close()


class Actor(Worker):
    """An actor with those methods of verl's ActorRolloutRefWorker that its manager calls, without a model."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.checkpoint_engine = new(settings, is_master=self.rank == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str = "auto") -> Any:
        return await self.checkpoint_engine.send_weights(iter(state(global_steps).items()), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter:
    """In place of an inference server: it keeps what it is given."""

    replica_rank, is_leader_rank = 0, True

    def __init__(self) -> None:
        self.given: tuple[int, dict[str, torch.Tensor]] = (0, {})

    async def update_weights(self, weights: Any, global_steps: int, wire_format: str) -> None:
        assert wire_format == "named_tensors"
        self.given = (global_steps, {name: tensor async for name, tensor in weights})


class Rollout(CheckpointEngineWorker):
    """verl's worker of a rollout."""

    def __init__(self, settings: Any) -> None:
        from verl.workers.config import RolloutConfig

        super().__init__(RolloutConfig(name="vllm", checkpoint_engine=settings), None, Adapter())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def given(self) -> tuple[int, dict[str, torch.Tensor]]:
        return self.server_adapter.given


class Replica:
    """What the manager calls of a replica; without a server there is nothing to pause."""

    def __init__(self, group: Any) -> None:
        self.group, self.workers = group, group.workers

    async def _nothing(self, **_: Any) -> None:
        pass

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = _nothing


def test_rollouts_of_verls_manager_join_and_die(cluster: smb.LocalCluster, connect: Connect) -> None:
    """verl's own CheckpointEngineManager over Ray: two actors and two replicas. One replica is killed and removed, and
    another one is added: the next sync has the new ones. Takes minutes: five processes import verl."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    settings = config(cluster.address)

    def group(kind: type, size: int) -> Any:
        pool = RayResourcePool(process_on_nodes=[size], use_gpu=False, max_colocate_count=1)
        wrapped = RayClassWithInitArgs(cls=ray.remote(kind), settings=settings)
        return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=wrapped, device_name="cpu")

    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # verl has a package `tests`, too
    ray.init(num_cpus=6, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False,
             runtime_env={"env_vars": {"PYTHONPATH": path}})  # fmt: skip
    try:
        replicas = [Replica(group(Rollout, 1)) for _ in range(2)]
        manager = CheckpointEngineManager(settings, group(Actor, 2), list(replicas))
        metrics = manager.update_weights(global_steps=5)
        assert metrics["checkpoint_engine/generation"] == 1
        for each in replicas:
            step, got = each.group.given()[0]
            assert step == 5
            assert same(got, 5)
        ray.kill(replicas[0].workers[0])
        with pytest.raises(ray.exceptions.RayActorError):
            manager.update_weights(global_steps=6)
        manager.remove_replicas(replicas[:1])
        manager.add_replicas([Replica(group(Rollout, 1))])
        manager.update_weights(global_steps=6)
        for each in manager.replicas:
            step, got = each.group.given()[0]
            assert (step, same(got, 6)) == (6, True)
        assert smb.torch.follow(connect(), "policy").latest == 2
    finally:
        ray.shutdown()
