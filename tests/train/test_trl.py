"""smb.torch.trl: in which order it publishes and calls vLLM servers (a stand-in; see tests/support/vllm_routes.py).
tests/train/test_stacks.py has the real TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import smb
import smb.torch
from smb.torch.trl import WeightTransfer
from tests.conftest import Connect
from tests.support.vllm_routes import Routes

UPDATE = ["pause?mode=keep", "start_weight_update", "update_weights", "finish_weight_update", "resume"]

Pairs = Iterator[tuple[str, torch.Tensor]]


class Weights:
    """A trainer's iterator, as TRL makes one for each sync."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Linear(8, 4, dtype=torch.bfloat16))
        self.left = 0  # tensors of the last iterator that were not asked for

    def step(self) -> dict[str, torch.Tensor]:
        for each in self.model.parameters():
            torch.nn.init.normal_(each)
        return {name: each.detach().clone() for name, each in self.model.named_parameters()}

    def pairs(self) -> Pairs:
        named = list(self.model.named_parameters())
        self.left = len(named)
        for name, each in named:
            self.left -= 1
            yield name, each.detach()


@pytest.fixture
def serve() -> Iterator[Callable[..., Routes]]:
    """Start stand-ins, and stop them at the end."""
    servers: list[Routes] = []

    def make(*arguments: object, **named: object) -> Routes:
        servers.append(Routes(*arguments, **named))  # type: ignore[arg-type]
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def transfer(cluster: smb.LocalCluster, connect: Connect) -> Iterator[Callable[..., WeightTransfer]]:
    """Make transfers of the name "policy". They are destroyed at the end, before `connect` deletes the name."""
    made: list[WeightTransfer] = []

    def make(*servers: Routes, **named: object) -> WeightTransfer:
        options = {"coordinator": cluster.address, "server_timeout": 10.0, "timeout": 10.0} | named
        made.append(WeightTransfer("policy", [each.url for each in servers], **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.destroy()


def sync(transfer: WeightTransfer, pairs: Pairs) -> None:
    """One sync, in the order of AsyncGRPOTrainer."""
    transfer.pause()
    transfer.send_weights(pairs)
    transfer.resume()


def test_servers_are_paused_only_while_they_take_a_published_generation(
    connect: Connect, cluster: smb.LocalCluster, serve: Callable[..., Routes], transfer: Callable[..., WeightTransfer]
) -> None:
    """Each takes each generation, whose bits are the trainer's, and is told its number as the weight version."""
    weights, reader = Weights(), connect()
    taken: list[int] = []

    def take(generation: int) -> None:
        assert server.paused
        states[generation] = smb.torch.follow(reader, "policy").state_dict(generation=generation)
        taken.append(generation)

    states: dict[int, dict[str, torch.Tensor]] = {}
    server = serve(take)
    sender = transfer(server, server_options={"near": "zone-2"})
    sender.init_weight_transfer()
    for generation in (1, 2, 3):
        given = weights.step()
        sync(sender, weights.pairs())
        assert (sender.generation, server.version, server.paused) == (generation, str(generation), False)
        assert states[generation].keys() == given.keys()
        assert all(states[generation][name].equal(each) for name, each in given.items())
    assert taken == [1, 2, 3]
    assert server.calls == ["health", "init_weight_transfer_engine", *UPDATE, *UPDATE, *UPDATE]
    assert server.infos == [
        {"name": "policy", "coordinator": cluster.address, "credentials": None, "timeout": 10.0, "near": "zone-2"}
    ]


def test_a_server_that_refuses_or_dies_holds_up_no_other(
    serve: Callable[..., Routes], transfer: Callable[..., WeightTransfer]
) -> None:
    """A server that refuses a generation is resumed, and takes the next one. One that was killed is left out until it
    was restarted. One that is added takes the next one, one that is removed is not called any more."""
    weights, refused = Weights(), [2]

    def refuse(generation: int) -> None:
        if generation in refused:
            raise ValueError(f"generation {generation} was overwritten")

    good, other = serve(), serve(refuse)
    sender = transfer(good, other)
    sender.init_weight_transfer()
    sync(sender, weights.pairs())
    sync(sender, weights.pairs())
    assert list(sender.engines.failed) == [other.url]
    assert "500: generation 2 was overwritten" in str(sender.engines.failed[other.url])
    assert (good.version, other.version, other.paused) == ("2", "1", False)
    sync(sender, weights.pairs())
    assert (good.version, other.version, sender.engines.failed) == ("3", "3", {})

    other.stop()
    sync(sender, weights.pairs())
    assert (good.version, list(sender.engines.failed)) == ("4", [other.url])
    again = serve(port=other.port)
    sync(sender, weights.pairs())
    assert (good.version, again.version, again.infos[0]["name"]) == ("5", "5", "policy")

    late = serve()
    sender.add(late.url)
    sender.remove(good.url)
    sync(sender, weights.pairs())
    assert (good.version, again.version, late.version) == ("5", "6", "6")


def test_what_cannot_be_sent_is_refused_and_the_iterator_is_read(
    connect: Connect, serve: Callable[..., Routes], transfer: Callable[..., WeightTransfer]
) -> None:
    """Other names or shapes, an iterator that raises, and servers of which none takes the generation. Readers and
    servers keep the generation before; other ranks get to the end of their collectives."""

    def refuse(generation: int) -> None:
        if generation > 1:
            raise ValueError("not this one")

    def broken() -> Pairs:
        yield from list(weights.pairs())[:1]
        raise RuntimeError("a collective failed")

    weights, server = Weights(), serve(refuse)
    sender = transfer(server)
    with pytest.raises(smb.InvalidArgumentError, match="call init_weight_transfer"):
        sender.send_weights(weights.pairs())
    sender.init_weight_transfer()
    sync(sender, weights.pairs())
    plain, weights.model = weights.model, torch.nn.Sequential(torch.nn.Linear(10, 9))
    with pytest.raises(smb.InvalidArgumentError, match=r"0.weight is \(\(9, 10\)"):
        sync(sender, weights.pairs())
    assert weights.left == 0
    weights.model = plain
    with pytest.raises(RuntimeError, match="a collective failed"):
        sync(sender, broken())
    assert (sender.generation, server.version, server.calls[-1]) == (1, "1", "resume")
    with pytest.raises(smb.Error, match=r"none of 1 engines is left in this update.*not this one"):
        sync(sender, weights.pairs())
    assert (weights.left, server.version, smb.torch.follow(connect(), "policy").latest) == (0, "1", 2)
    assert server.paused
    sender.destroy()
    assert not server.paused


def test_a_start_without_servers_or_coordinator_says_so(
    serve: Callable[..., Routes], transfer: Callable[..., WeightTransfer], kept_port: int
) -> None:
    """One server that is away is left out; if all are, or the coordinator is, the start fails. One URL is no list."""
    with pytest.raises(smb.InvalidArgumentError, match="a list of URLs"):
        WeightTransfer("policy", "http://rollout-1:8000")
    with pytest.raises(smb.UnavailableError, match=str(kept_port)):
        transfer(serve(), coordinator=f"127.0.0.1:{kept_port}", timeout=0.5).init_weight_transfer()
    away = serve()
    away.stop()
    with pytest.raises(smb.TimeoutError, match=f"no vLLM server answered within 0.2 s: {away.url}"):
        transfer(away, server_timeout=0.2).init_weight_transfer()
    here = serve()
    sender = transfer(away, here, server_timeout=0.5)
    sender.init_weight_transfer()
    sync(sender, Weights().pairs())
    assert (here.version, list(sender.engines.failed)) == ("1", [away.url])
