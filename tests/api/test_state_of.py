"""create(state_of=): an optimizer's state of weights with two copies moves together with them, so that each step is in
all of them or in none, whichever server is lost.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import smb
from smb.call.optimizer_rules import RULES, hyper_of
from smb.cluster import Daemon
from smb.tools.cli.main import app
from tests.api.test_optimizer_steps import Array, normal, numbers_at
from tests.fault.long import seed, times
from tests.support import second_copy
from tests.support.daemons import tidy, wait_for
from tests.support.optimizers import step

SIZE = 100_003  # several chunks on each server, the last one in part
STEPS_MAX = 5_000  # 1 + 2 + ... of so many is exact in float32
WITH_STATE = [rule for rule in RULES if RULES[rule].states]


@pytest.fixture
def own() -> Iterator[smb.LocalCluster]:
    """A cluster of the test, for one whose servers die or are emptied."""
    with smb.LocalCluster(servers=3, capacity="32MiB") as made:
        yield made


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[smb.Client]:
    """A client of the test's cluster: its own one if it has that, else the worker's."""
    name = "own" if "own" in request.fixturenames else "cluster"
    with tidy(request.getfixturevalue(name), 60.0) as made:
        yield made


class Model:
    """Weights, a gradient and a rule's state, in buffers of two copies and as arrays."""

    def __init__(self, client: smb.Client, rule: str, **wishes: Any) -> None:
        self.client, self.rule, self.turns = client, rule, 0
        weights = client.create("weights", SIZE, stripe="64KiB", replicas=2, **wishes)
        gradient = client.create("gradient", like=weights, replicas=2)
        states = [client.create(name, state_of=weights) for name in RULES[rule].states]
        self.buffers = [weights, gradient, *states]
        self.arrays: list[Array] = [normal(1), normal(2)]
        self.arrays = [each[:SIZE].copy() for each in self.arrays]
        self.arrays += [np.zeros(SIZE, np.float32) for _ in states]
        weights.write(self.arrays[0])

    @property
    def names(self) -> list[str]:
        """Of the buffers that move together."""
        return ["weights", *RULES[self.rule].states]

    def turn(self) -> None:
        """Apply a new gradient, in both."""
        self.turns += 1
        self.arrays[1][:] = normal(10 + self.turns)[:SIZE]
        self.buffers[1].write(self.arrays[1])
        numbers = numbers_at(self.rule, self.turns)
        self.buffers[0].apply(self.rule, *self.buffers[1:], **numbers)
        step(self.rule, *self.arrays, **hyper_of(RULES[self.rule], numbers, "here"))  # type: ignore[arg-type]

    def check(self) -> None:
        for buffer, array in zip(self.buffers, self.arrays, strict=True):
            np.testing.assert_array_equal(buffer.read(), array, buffer.name)

    def places(self) -> list[tuple[str, str, int]]:
        """Where the segments of all that move together are, which is the same for each."""
        return places(self.client, *self.names)


def places(client: smb.Client, *names: str) -> list[tuple[str, str, int]]:
    """Return the servers and epochs of these buffers' segments, which are alike at every moment."""
    listed = {info.name: info for info in client.list()}  # of one moment
    found = [[(place.server, place.backup, place.epoch) for place in listed[name].layout.segments] for name in names]
    assert all(each == found[0] for each in found), found
    return found[0]


def lose(cluster: smb.LocalCluster, name: str) -> Daemon:
    """A host dies: the process and its memory."""
    (server,) = (each for each in cluster.servers if each.name == name)
    server.kill()
    second_copy.lose(cluster.memory_directory, name)
    return server


def wait_until_whole(client: smb.Client, lost: Daemon) -> None:
    """The loss was noticed, and what was lost is there again."""

    wait_for(lambda: second_copy.are_whole(client, lost.name), f"two copies of each segment without {lost.name}", 60.0)


@pytest.mark.parametrize("way", ["auto", "tcp"])
@pytest.mark.parametrize("rule", WITH_STATE)
def test_rules_with_a_state_are_as_stated(cluster: smb.LocalCluster, client: smb.Client, rule: str, way: str) -> None:
    """To the bit, in both copies, at a client that opens the buffers, too."""
    model = Model(client, rule)
    for _ in range(3):
        model.turn()
    with smb.connect(cluster.address, transport=way, timeout=60) as other:
        model.buffers = [other.open(buffer.name) for buffer in model.buffers]
        model.turn()
        model.check()
    compared = second_copy.check_copies(client, cluster.memory_directory)
    assert compared == len(model.buffers) * len(model.buffers[0].layout.segments)


@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_hosts_are_lost_between_steps(own: smb.LocalCluster, client: smb.Client, rule: str) -> None:
    """Each in turn, with its memory; the next step begins at once, and the last one is still there."""
    model = Model(client, rule)
    model.turn()
    for _ in range(times(1, 10)):
        for name in [server.name for server in own.servers]:
            lost = lose(own, name)
            model.turn()
            model.check()
            model.places()
            wait_until_whole(client, lost)
            lost.start()
            model.turn()
    model.check()
    model.places()
    second_copy.check_copies(client, own.memory_directory)


def test_hosts_are_lost_during_steps(own: smb.LocalCluster, client: smb.Client) -> None:
    """Two clients' momentum steps: no call fails, m counts to K, and the weights have gained 1 + 2 + ... + K."""
    weights = client.create("weights", SIZE, stripe="64KiB", replicas=2)
    client.create("gradient", like=weights, replicas=2).fill(1)
    state = client.create("m", state_of=weights)
    rng, done, ends = random.Random(seed()), [0, 0], threading.Event()
    failed: list[smb.Error] = []

    def work(number: int) -> None:
        try:
            with smb.connect(own.address, transport=("auto", "tcp")[number], timeout=60) as ours:
                w, g, m = (ours.open(name) for name in ("weights", "gradient", "m"))
                while not ends.is_set():
                    if done[number] < STEPS_MAX // 2:
                        w.apply("momentum", g, m, lr=-1, mu=1)
                    else:
                        w.apply("sgd", g, lr=-1)
                    done[number] += 1
        except smb.Error as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(times(1, 10)):
            for name in [server.name for server in own.servers]:
                before = list(done)
                wait_for(lambda before=before: failed or all(map(int.__gt__, done, before)), "steps", 60.0)
                time.sleep(rng.uniform(0.0, 0.1))
                lost = lose(own, name)
                wait_until_whole(client, lost)
                lost.start()
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert not failed, failed
    steps = sum(min(each, STEPS_MAX // 2) for each in done)
    assert (state.read() == steps).all()
    assert (weights.read() == steps * (steps + 1) // 2 + sum(done) - steps).all()
    places(client, "weights", "m")
    second_copy.check_copies(client, own.memory_directory)


def test_a_drain_moves_all_of_them(own: smb.LocalCluster, client: smb.Client) -> None:
    """Each copy goes with the others; steps go on meanwhile and afterwards."""
    model = Model(client, "adam")
    before = model.places()
    for leaving in ("server-0", "server-1"):
        client._coordinator.drain_server(leaving, 20.0)

        def left(leaving: str = leaving) -> bool:
            model.turn()
            now = model.places()
            return all(leaving not in each and each[1] for each in now) and second_copy.are_whole(client)

        wait_for(left, f"nothing on {leaving}", 60.0)
        client._coordinator.drain_server(leaving, 20.0, undo=True)
        model.check()
    assert model.places() != before
    second_copy.check_copies(client, own.memory_directory)


def test_a_state_that_is_created_while_a_copy_is_lost() -> None:
    """It has one copy as the weights have, gets the other one with them, and is all there when the first host dies."""
    with smb.LocalCluster(servers=2, capacity="32MiB") as cluster, smb.connect(cluster.address, timeout=60) as client:
        weights = client.create("w", SIZE, servers=1, replicas=2)
        gradient = client.create("g", like=weights, replicas=2)
        gradient.fill(1)
        place = weights.layout.segments[0]
        lost = lose(cluster, place.backup)
        weights.fill(0)
        state = client.create("m", state_of=client.open("w"))
        assert places(client, "w", "m")[0][:2] == (place.server, "")
        weights.apply("momentum", gradient, state, lr=-1, mu=1)
        lost.start()
        wait_for(lambda: second_copy.are_whole(client), "two copies of each segment", 60.0)
        weights.apply("momentum", gradient, state, lr=-1, mu=1)
        places(client, "w", "m")
        lose(cluster, place.server)
        weights.apply("momentum", gradient, state, lr=-1, mu=1)
        assert (state.read() == 3).all()
        assert (weights.read() == 6).all()
        assert places(client, "w", "m")[0][0] == place.backup


def test_a_state_whose_memory_is_lost_is_not_copied_as_zeros() -> None:
    """The weights, which are there, are not lost with it. They have no second copy until the state is deleted."""
    with smb.LocalCluster(servers=2, capacity="32MiB") as cluster, smb.connect(cluster.address, timeout=5) as client:
        weights = client.create("w", SIZE, servers=1, replicas=2)
        state = client.create("m", state_of=weights)
        weights.fill(3)
        state.fill(4)
        place = state.layout.segments[0]
        (alone,) = (each for each in cluster.servers if each.name == place.server)
        lost = lose(cluster, place.backup)
        weights.fill(5)  # noticed
        alone.kill()
        (cluster.memory_directory / f"smb.{alone.name}.{place.id:016x}.segment").unlink()
        alone.start()
        lost.start()
        wait_for(lambda: all(each.alive for each in client.servers()), "both servers")
        assert (weights.read() == 5).all()
        with pytest.raises(smb.Error):
            state.read()
        word = 'buffer "m", buffer "w" move together, and have one copy as long as'
        wait_for(lambda: word in cluster.coordinator.log.read_text(), "a word of the coordinator's", 60.0)
        assert not any(each.backup for info in client.list() for each in info.layout.segments)
        client.delete("m")
        wait_for(lambda: second_copy.are_whole(client), "two copies of each segment", 60.0)
        assert (weights.read() == 5).all()


def test_states_are_deleted_during_steps(cluster: smb.LocalCluster, client: smb.Client) -> None:
    """Steps with them end with an error, and nothing else stops: the weights keep both copies, in the same epoch."""
    weights = client.create("weights", SIZE, stripe="64KiB", replicas=2)
    client.create("gradient", like=weights, replicas=2).fill(1)
    before = places(client, "weights")
    ended: list[smb.Error] = []

    def work(number: int) -> None:
        with smb.connect(cluster.address, timeout=60) as ours:
            w, g, m = (ours.open(name) for name in ("weights", "gradient", f"m{number}"))
            try:
                while True:
                    w.apply("momentum", g, m, lr=1, mu=0.5)
            except smb.NotFoundError as error:
                ended.append(error)

    for number in range(times(3, 30)):
        client.create(f"m{number}", state_of=weights)
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        first = float(weights.read(1)[0])
        wait_for(lambda first=first: weights.read(1)[0] < first, "steps")
        client.delete(f"m{number}")
        thread.join(60)
        assert len(ended) == number + 1
    assert places(client, "weights") == before
    second_copy.check_copies(client, cluster.memory_directory)


def test_a_state_outlives_its_weights(own: smb.LocalCluster, client: smb.Client) -> None:
    """Those that are left go on together, and others join them."""
    weights = client.create("w", SIZE, stripe="64KiB", replicas=2)
    m = client.create("m", state_of=weights)
    v = client.create("v", state_of="w")
    m.fill(2)
    v.fill(3)
    client.delete("w")
    lost = lose(own, m.layout.segments[0].server)
    assert (m.read() == 2).all()
    assert (v.read() == 3).all()
    wait_until_whole(client, lost)
    places(client, "m", "v")
    client.create("x", state_of=m)
    places(client, "m", "v", "x")


def test_a_state_that_was_deleted_is_told(cluster: smb.LocalCluster, client: smb.Client) -> None:
    """And nothing of the step is done; other members go on."""
    weights = client.create("w", SIZE, stripe="64KiB", replicas=2)
    gradient = client.create("g", like=weights, replicas=2)
    gradient.fill(1)
    m = client.create("m", state_of=weights)
    with smb.connect(cluster.address) as other:
        other.delete("m")
    with pytest.raises(smb.NotFoundError):
        weights.apply("momentum", gradient, m, lr=-1, mu=1)
    assert not weights.read().any()
    m = client.create("m", state_of=weights)
    weights.apply("momentum", gradient, m, lr=-1, mu=1)
    assert (weights.read() == 1).all()


def test_of_one_copy_it_is_like(client: smb.Client) -> None:
    """Shape, dtype, servers, stripe and wire of the weights."""
    weights = client.create("w", SIZE, stripe="64KiB", wire="bfloat16")
    gradient = client.create("g", like=weights)
    m = client.create("m", state_of=weights)
    assert (m.shape, m.dtype, m.info.wire, m.info.replicas) == (weights.shape, weights.dtype, "bfloat16", 1)
    assert [each.server for each in m.layout.segments] == [each.server for each in weights.layout.segments]
    assert not any(each.group for each in m.layout.segments)
    gradient.fill(1)
    weights.apply("momentum", gradient, m, lr=-1, mu=1)
    assert (weights.read() == 1).all()


def test_what_create_refuses(client: smb.Client) -> None:
    """With a sentence, and nothing is left behind."""
    weights = client.create("w", 1000, replicas=2)
    one = client.create("one", 1000)
    news = client.create("news", 1000, replicas=2, versions=2)
    client.create("beside", like=weights, replicas=2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"state_of": weights, "like": weights}, "leave out like="),
        ({"state_of": weights, "tensors": {"a": ((1,), "float32")}}, "leave out tensors="),
        ({"state_of": weights, "versions": 2}, "leave out versions="),
        ({"state_of": weights, "servers": 1}, "leave both out"),
        ({"state_of": weights, "stripe": "4KiB"}, "leave both out"),
        ({"state_of": weights, "replicas": 1}, "the weights 'w' have replicas=2; their state must have as many"),
        ({"state_of": one, "replicas": 2}, "the weights 'one' have replicas=1; their state must have as many"),
        ({"state_of": weights, "shape": 5}, "leave out shape and dtype"),
        ({"state_of": news}, "keeps 2 versions"),
    ]
    for wishes, told in wrong:
        with pytest.raises(smb.InvalidArgumentError, match=told):
            client.create("m", **wishes)
    with pytest.raises(smb.NotFoundError):
        client.create("m", state_of="none")
    with pytest.raises(smb.AlreadyExistsError, match='it does not move together with "w"'):
        client.create("beside", state_of=weights, exist_ok=True)
    assert "m" not in [info.name for info in client.list()]
    made = client.create("m", state_of=weights, replicas=2)
    client.create("v", state_of="w")
    assert client.create("m", state_of=weights, exist_ok=True).info.id == made.info.id
    shown = CliRunner().invoke(app, ["stat", "w", "--json", "--coordinator", client.address])
    assert json.loads(shown.output)["moves_with"] == ["m", "v"]
    assert "moves with  m, v" in CliRunner().invoke(app, ["stat", "w", "--coordinator", client.address]).output


def test_what_apply_refuses(client: smb.Client) -> None:
    """A state that does not move together with the weights, as it was made in another way or for others."""
    weights = client.create("w", 1000, replicas=2)
    gradient = client.create("g", like=weights, replicas=2)
    single = client.create("single", like=weights, replicas=1)
    good = client.create("m", state_of=weights)
    beside = client.create("beside", like=weights, replicas=2)
    for state, told in (
        (beside, "and the weights can move to different servers.* create it with state_of='w'"),
        (single, "has replicas=1 but the weights have replicas=2; .* create it with state_of='w'"),
    ):
        with pytest.raises(smb.InvalidArgumentError, match=told):
            weights.apply("momentum", gradient, state, lr=1, mu=1)
    with pytest.raises(smb.InvalidArgumentError, match="has replicas=2 but the weights have replicas=1"):
        single.apply("momentum", client.create("h", like=single), good, lr=1, mu=1)
    with pytest.raises(smb.InvalidArgumentError, match="the weights can move to different servers"):
        weights.apply("adam", gradient, good, beside, lr=1, step=1)


def test_a_coordinator_of_before_is_told(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a buffer that is merely like the weights: that is not taken for a state."""
    weights = client.create("w", 1000, replicas=2)
    create_buffer = client._coordinator.create_buffer

    def without_joins(request: Any, timeout: float) -> Any:
        request.joins = False
        return create_buffer(request, timeout)

    monkeypatch.setattr(client._coordinator, "create_buffer", without_joins)
    with pytest.raises(smb.UnavailableError, match="the coordinator is too old for state_of="):
        client.create("m", state_of=weights)
    assert client.open("m").info.replicas == 2
