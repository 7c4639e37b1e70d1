"""HSGD: hosts whose workers take the mean of every step, and whose roots run SEASGD."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

import smb
import smb.lock
import smb.train
from smb.config.parse import TRAIN_HOST_VARIABLE
from smb.train import member_table as t
from smb.train.rare import hsgd
from tests.support import elastic
from tests.support.elastic import Trace, Values, sgd
from tests.support.training import together, waiting

Connect = Callable[..., smb.Client]
SIZE = 70_000
LEASE_S = 0.6
HOSTS = ((0, 1), (2, 3, 4))  # workers


class Hosts:
    """Workers on hosts that are one machine, each with a client and values of its own."""

    def __init__(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch, scheme: smb.train.HSGD, size: int, lease: float
    ) -> None:
        self._connect, self._monkeypatch, self._scheme, self._lease = connect, monkeypatch, scheme, lease
        self.values: dict[int, Values] = {}
        self.workers: dict[int, smb.train.Worker] = {}
        self.start = np.linspace(-1, 1, size, dtype=np.float32)

    def join(self, host: int, number: int) -> smb.train.Worker:
        self._monkeypatch.setenv(TRAIN_HOST_VARIABLE, f"host-{host}")
        self.values[number] = self.start.copy()
        client = self._connect()
        self.workers[number] = smb.train.join(client, "run", self.values[number], self._scheme, lease=self._lease)
        return self.workers[number]

    def step(self, *numbers: int, local: Callable[[int, Values], None] = sgd) -> None:
        """One step of these workers, a whole host's, at the same time; then what the root sent is there."""

        def one(number: int) -> None:
            local(number, self.values[number])
            self.workers[number].step(samples=2)
            self.workers[number].flush()

        together(*(lambda number=number: one(number) for number in numbers))

    def roots(self) -> set[int]:
        return {number for number, worker in self.workers.items() if worker.exchange.root}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


@pytest.fixture
def make(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hosts]:
    return lambda scheme, size=SIZE, lease=LEASE_S: Hosts(connect, monkeypatch, scheme, size, lease)


@pytest.mark.parametrize("every", [1, 2])
def test_the_rule(make: Callable[..., Hosts], every: int) -> None:
    """Two hosts that take turns, with two and three workers, are what one process in numpy gives, to the bit; all of a
    host's workers go on from the same values; one root for each host.
    """
    hosts = make(smb.train.HSGD(alpha=0.2, every=every), lease=30.0)  # nobody dies here, however slow the machine is
    for host, numbers in enumerate(HOSTS):
        for number in numbers:
            hosts.join(host, number)
    found, order = Trace(), [0, 1, 1, 0, 1, 0, 0]
    for host in order:
        hosts.step(*HOSTS[host])
        for number in HOSTS[host]:
            np.testing.assert_array_equal(hosts.values[number], hosts.values[HOSTS[host][0]])
        found.shared.append(hosts.workers[0].shared())
        found.local.append(hosts.values[HOSTS[host][0]].copy())
    wanted = elastic.hsgd(order, HOSTS, hosts.start, sgd, 0.2, every)
    for turn in range(len(order)):
        np.testing.assert_array_equal(found.shared[turn], wanted.shared[turn], err_msg=f"shared, turn {turn}")
        np.testing.assert_array_equal(found.local[turn], wanted.local[turn], err_msg=f"host, turn {turn}")
    assert hosts.roots() == {0, 2}
    sent = {number: worker.status.contributions for number, worker in hosts.workers.items()}
    assert sent == {0: 4 // every, 1: 0, 2: 3 // every, 3: 0, 4: 0}
    hosts.close()


def test_inside_a_host_nothing_travels(make: Callable[..., Hosts]) -> None:
    """The host's model lies in memory that its workers have mapped."""
    hosts = make(smb.train.HSGD())
    worker = hosts.join(0, 0)
    assert worker.exchange._host.weights.transports == ("shm",)
    hosts.close()


@pytest.mark.parametrize("graceful", [True, False])
def test_another_one_takes_over(make: Callable[..., Hosts], graceful: bool) -> None:
    """When the root leaves, or is gone without a word, the next one in age is root and the host goes on."""
    hosts = make(smb.train.HSGD(alpha=0.5), 100)
    for number in range(3):
        hosts.join(0, number)

    def push(_: int, values: Values) -> None:
        values += 1

    hosts.step(0, 1, 2, local=push)
    assert hosts.roots() == {0}
    gone = hosts.workers.pop(0)
    if graceful:
        gone.close()
    else:
        gone.group.client.close()
    before = hosts.workers[1].shared()
    hosts.step(1, 2, local=push)
    hosts.step(1, 2, local=push)
    assert hosts.roots() == {1}
    after = hosts.workers[1].shared()
    assert (after > before).all()
    # half of (start + 1) - start, then each time half of what the host is ahead
    np.testing.assert_allclose(after - hosts.start, 0.5 + 0.5 + 0.5, rtol=1e-5)
    hosts.close()


def test_who_joins_late_holds_up_nobody(make: Callable[..., Hosts]) -> None:
    """A worker that has joined and still computes is not waited for; a step from a model that the host has left behind
    does not count, the next one does.
    """
    hosts = make(smb.train.HSGD(alpha=0.5), 100)
    hosts.join(0, 0)

    def push(_: int, values: Values) -> None:
        values += 2

    hosts.step(0, local=push)
    late = hosts.join(0, 1)
    np.testing.assert_array_equal(hosts.values[1], hosts.values[0])
    hosts.step(0, local=push)  # alone
    with waiting(lambda: (hosts.step(1, local=push), hosts.step(1, local=push))):
        hosts.step(0, local=push)
    np.testing.assert_array_equal(hosts.values[0], hosts.values[1])
    assert late.exchange._host.member.get(t.DROPPED) == 1
    assert not late.exchange.root
    hosts.close()


def test_a_host_that_comes_back_starts_from_the_shared_model(make: Callable[..., Hosts]) -> None:
    """All workers of a host leave; meanwhile another host trains; the first one back begins where the others are."""
    hosts = make(smb.train.HSGD(alpha=0.5), 100)
    hosts.join(0, 0)
    hosts.join(1, 1)

    def push(_: int, values: Values) -> None:
        values += 4

    hosts.step(0, local=push)
    hosts.workers.pop(0).close()
    for _ in range(3):
        hosts.step(1, local=push)
    hosts.join(0, 2)
    np.testing.assert_array_equal(hosts.values[2], hosts.workers[1].shared())
    np.testing.assert_array_equal(hosts.workers[2].exchange._host.weights.read(), hosts.workers[1].shared())
    hosts.close()


def test_what_is_refused(make: Callable[..., Hosts]) -> None:
    """One worker's NaN does not get into its host's mean, and holds up nobody; one that all of a host have got into is
    refused at the root, and the host starts again from the shared model.
    """
    hosts = make(smb.train.HSGD(alpha=0.5), 100)
    for number in range(2):
        hosts.join(0, number)

    def bad(number: int, values: Values) -> None:
        values += 1
        if number == 1:
            values[3] = np.nan

    with pytest.raises(smb.train.RefusedContributionError):
        hosts.step(0, 1, local=bad)
    np.testing.assert_allclose(hosts.values[0], hosts.start + 0.5, atol=1e-6)
    np.testing.assert_array_equal(hosts.values[0], hosts.values[1])
    host = hosts.workers[0].exchange._host
    spoilt = host.weights.read()
    spoilt[5] = np.inf
    host.weights.write(spoilt)
    with pytest.raises(smb.train.RefusedContributionError):
        hosts.step(0, 1)
    shared = hosts.workers[0].shared()
    assert np.isfinite(shared).all()
    np.testing.assert_array_equal(hosts.values[0], shared)
    np.testing.assert_array_equal(host.weights.read(), shared)
    hosts.step(0, 1)
    np.testing.assert_array_equal(hosts.values[0], hosts.values[1])
    assert host.table.get(0, t.GROUP_EXTRA) == host.round
    hosts.close()


def test_all_of_it_is_deleted(make: Callable[..., Hosts], client: smb.Client) -> None:
    """smb.train.delete takes the hosts' groups away with the rest."""
    hosts = make(smb.train.HSGD(), 100)
    for host, numbers in enumerate(HOSTS):
        hosts.join(host, numbers[0])
    names = [info.name for info in client.list()]
    assert "run/host/host-0" in names
    assert "run/host/host-1" in names
    assert not [name for name in names if "probe" in name]
    hosts.close()
    smb.train.delete(client, "run")
    assert client.list() == []


@pytest.mark.parametrize("settings", [{"alpha": None}, {"alpha": 0.0}, {"every": 0}])
def test_settings_that_mean_nothing(settings: dict[str, float]) -> None:
    """They are refused by name."""
    with pytest.raises(smb.InvalidArgumentError, match="hsgd"):
        smb.train.HSGD(**settings)


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("fault", [smb.UnavailableError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["wake", "release"])
def test_what_a_root_gave_arrives(
    make: Callable[..., Hosts], client: smb.Client, monkeypatch: pytest.MonkeyPatch,
    call: str, fault: type[BaseException], closes: bool,
) -> None:  # fmt: skip
    """The host's model was drawn to the shared one, and then a call failed: the other half was lost."""
    hosts = make(smb.train.HSGD(alpha=0.5), 100)
    worker = hosts.join(0, 0)
    exchange = worker.exchange
    owner: object = exchange._host if call == "wake" else smb.lock.Lock
    done = getattr(owner, call)

    def fails(*given: object) -> None:
        done(*given)
        if exchange._due is not None and exchange._host.table.get(0, hsgd._MET) == exchange._due:
            raise fault("its server is away")

    hosts.values[0] += 8
    with monkeypatch.context() as faults, contextlib.suppress(KeyboardInterrupt):
        faults.setattr(owner, call, fails)
        worker.step()
    if not closes:
        worker.step()
    hosts.close()
    np.testing.assert_allclose(smb.train.shared(client, "run") - hosts.start, 4, rtol=1e-5)
