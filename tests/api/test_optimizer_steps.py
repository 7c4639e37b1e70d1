"""Optimizers' steps on the servers: as stated, as torch's, beside whoever else is at work; once, whatever breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import smb
from smb.call.optimizer_rules import RULES, hyper_of
from tests.api.test_transports import hidden_socket
from tests.conftest import Connect
from tests.support.daemons import wait_for
from tests.support.optimizers import step
from tests.support.transports import EACH_WAY, FAR, MIXED

PAGE = 4096
SIZE = 150_007  # of every segment several chunks, the last one in part
STRIPE = "64KiB"
Array = np.ndarray[Any, np.dtype[np.float32]]
NUMBERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.1, "scale": 0.5, "weight_decay": 0.01},
    "momentum": {"lr": 0.1, "mu": 0.9, "weight_decay": 0.01},
    "nesterov": {"lr": 0.7, "mu": 0.9, "scale": -1.0},
    "adam": {"lr": 0.01, "weight_decay": 0.1},
    "adamw": {"lr": 0.01, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6},
    "elastic": {"alpha": 0.125},
}


def numbers_at(rule: str, turn: int) -> dict[str, float]:
    """Return what is given in the step of that number."""
    return {**NUMBERS[rule], **({"step": turn} if "step" in RULES[rule].hyper else {})}


def normal(seed: int, size: int = SIZE) -> Array:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


class Model:
    """Weights, gradient and a rule's state, in buffers and as arrays."""

    def __init__(self, client: smb.Client, rule: str, servers: list[str] | None = None) -> None:
        self.rule = rule
        weights = client.create("weights", SIZE, "float32", stripe=STRIPE, servers=servers)
        names = ("gradient", *RULES[rule].states)
        self.buffers = [weights, *(client.create(name, like=weights) for name in names)]
        self.arrays = [normal(1), normal(2), *(np.zeros(SIZE, np.float32) for _ in RULES[rule].states)]
        for buffer, array in zip(self.buffers, self.arrays, strict=True):
            buffer.write(array)

    def turn(self, number: int) -> None:
        """Apply a new gradient, in both."""
        self.arrays[1][:] = normal(10 + number)
        self.buffers[1].write(self.arrays[1])
        self.buffers[0].apply(self.rule, *self.buffers[1:], **numbers_at(self.rule, number))
        numbers = hyper_of(RULES[self.rule], numbers_at(self.rule, number), "here")
        step(self.rule, *self.arrays, **numbers)  # type: ignore[arg-type]

    def check(self) -> None:
        for buffer, array in zip(self.buffers, self.arrays, strict=True):
            np.testing.assert_array_equal(buffer.read(), array, buffer.name)


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_as_stated(client: smb.Client, rule: str) -> None:
    """Three steps of each rule over three servers, to the bit of numpy in the stated order; the gradient stays."""
    model = Model(client, rule)
    for turn in range(1, 4):
        model.turn(turn)
    model.check()


def test_over_two_transports(connect: Connect) -> None:
    """A buffer whose parts are mapped here and reached over tcp there: the servers do all of it."""
    client = connect()
    with hidden_socket(client, "server-1"):
        model = Model(client, "adam", ["server-0", "server-1"])
        model.turn(1)
        model.check()
        assert model.buffers[0].transports == ("shm", FAR)


TORCH: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.98), weight_decay=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.98), weight_decay=0.05),
}


@pytest.mark.parametrize("rule", TORCH)
def test_rules_are_torchs(client: smb.Client, rule: str) -> None:
    """Twenty steps from the same weights with the same gradients end where torch.optim ends, to float32's tolerance."""
    size = 5 * PAGE // 4 + 3
    weights = client.create("weights", size, "float32", stripe=PAGE)
    gradient, *state = (client.create(name, like=weights) for name in ("gradient", *RULES[rule].states))
    tensor = torch.from_numpy(normal(1, size)).requires_grad_()
    optimizer = TORCH[rule]([tensor])
    weights.write(tensor.detach())
    adam = {"beta1": 0.8, "beta2": 0.98, "lr": 0.01, "weight_decay": 0.05}
    sgd = {"lr": 0.1, "weight_decay": 0.05, **({"mu": 0.9} if state else {})}
    for turn in range(1, 21):
        array = normal(turn, size) + 0.3
        gradient.write(array)
        tensor.grad = torch.from_numpy(array)
        optimizer.step()
        weights.apply(rule, gradient, *state, **({**adam, "step": turn} if len(state) == 2 else sgd))
    np.testing.assert_allclose(weights.read(), tensor.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_weights_and_state_change_as_one(connect: Connect) -> None:
    """Many clients' momentum steps at once: m counts to K, and the weights have gained 1 + 2 + ... + K."""
    clients, each = [connect(transport) for transport in MIXED], 15
    weights = clients[0].create("weights", 40_000, "float32", stripe=STRIPE)
    for name in ("gradient", "m"):
        clients[0].create(name, like=weights)
    clients[0].open("gradient").fill(1)

    def work(client: smb.Client) -> None:
        w, g, m = (client.open(name) for name in ("weights", "gradient", "m"))
        for _ in range(each):
            w.apply("momentum", g, m, lr=-1, mu=1)

    run_all([lambda client=client: work(client) for client in clients])
    steps = each * len(clients)
    assert (clients[0].open("m").read() == steps).all()
    assert (weights.read() == steps * (steps + 1) / 2).all()


def test_crossed_steps_do_not_lock_each_other(connect: Connect) -> None:
    """x with y as its state beside y with x, beside additions to both over shm and between them: all end, all count."""
    clients = [connect(transport) for transport in MIXED]
    x = clients[0].create("x", 40_000, "float32", stripe=STRIPE)
    for name in ("y", "ones", "z"):
        clients[0].create(name, like=x)
    clients[0].open("ones").fill(1)
    rounds = 30

    def cross(client: smb.Client, one: str, two: str) -> None:
        b, m, g = client.open(one), client.open(two), client.open("ones")
        for _ in range(rounds):
            b.apply("momentum", g, m, lr=0, mu=1)

    def add(client: smb.Client, name: str) -> None:
        buffer, ones = client.open(name), np.ones(40_000, np.float32)
        other = client.open("ones")
        for turn in range(rounds):
            if turn % 2:
                buffer.accumulate(ones)
            else:
                buffer.accumulate_from(other)

    run_all(
        [
            lambda: cross(clients[0], "x", "y"),
            lambda: cross(clients[1], "y", "x"),
            lambda: cross(clients[2], "y", "x"),
            lambda: add(clients[1], "x"),
            lambda: add(clients[3], "y"),
        ]
    )
    assert (x.read() == 3 * rounds).all()
    assert (clients[0].open("y").read() == 2 * rounds).all()


def run_all(calls: list[Callable[[], None]]) -> None:
    """Run them at once; raise the first one's failure."""
    failures: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


# ---- what is refused

Buffers = dict[str, smb.Buffer]
REFUSED: list[tuple[Callable[[Buffers], Any], str]] = [
    (lambda b: b["w"].apply("lamb", b["g"], lr=1), "unknown rule 'lamb'; known are sgd, momentum"),
    (lambda b: b["w"].apply("sgd", b["g"]), "lr must be given"),
    (lambda b: b["w"].apply("sgd", b["g"], lr=1, mu=0.9), "rule 'sgd' takes lr, scale, weight_decay: mu is unknown"),
    (lambda b: b["w"].apply("adam", b["g"], b["m"], b["v"], lr=1), "step must be given"),
    (
        lambda b: b["w"].apply("adam", b["g"], b["m"], b["v"], lr=1, step=0),
        "step must be an integer from 1 to .*, not 0",
    ),
    (lambda b: b["w"].apply("sgd", b["g"], lr=float("nan")), "must be a finite float32"),
    (lambda b: b["w"].apply("sgd", b["g"], b["m"], lr=1), "'sgd' takes none as its state, but 1 were passed"),
    (lambda b: b["w"].apply("momentum", b["g"], lr=1, mu=1), r"takes 1 \(m\) as its state, but 0 were passed"),
    (lambda b: b["w"].apply("adam", b["g"], b["m"], lr=1, step=1), r"takes 2 \(m, v\) as its state, but 1 were passed"),
    (lambda b: b["w"].apply("sgd", np.ones(10, np.float32), lr=1), "must be one opened by the same client"),
    (
        lambda b: b["w"].apply("sgd", b["apart"], lr=1),
        "is not striped over the same servers .* create it with like='w'",
    ),
    (lambda b: b["w"].apply("momentum", b["g"], b["apart"], lr=1, mu=1), "create it with like='w'"),
    (lambda b: b["w"].apply("sgd", b["integers"], lr=1), "create it with like='w'"),
    (lambda b: b["w"].apply("sgd", b["theirs"], lr=1), "opened by the same client"),
    (lambda b: b["w"].apply("sgd", b["w"], lr=1), "must be different buffers"),
    (lambda b: b["w"].apply("momentum", b["g"], b["g"], lr=1, mu=1), "must be different buffers"),
    (lambda b: b["w"].apply("momentum", b["g"], b["w"], lr=1, mu=1), "must be different buffers"),
    (lambda b: b["w"].apply("adam", b["g"], b["m"], b["m"], lr=1, step=1), "must be different buffers"),
    (lambda b: b["w"].apply("sgd", b["again"], lr=1), "must be different buffers"),
    (
        lambda b: b["doubles"].apply("sgd", b["doubles-g"], lr=1),
        "rules are for float32 buffers, and this one is float64",
    ),
    (lambda b: b["two"].apply("sgd", b["two-g"], lr=1), "cannot change a buffer that keeps several versions"),
    (lambda b: b["w"].apply("sgd", b["g"], lr=1, fence=b["apart"].lock()), "which lies on other servers"),
    (lambda b: b["w"].apply("sgd", b["g"], lr=1, fence=b["w"].lock()), "not held"),
]


def test_steps_that_cannot_be(client: smb.Client, connect: Connect) -> None:
    """Each is refused by the name of what is wrong with it, and nothing is changed."""
    two = ["server-0", "server-1"]
    w = client.create("w", 40_000, "float32", servers=two)
    buffers = {"w": w, **{name: client.create(name, like=w) for name in ("g", "m", "v")}}
    buffers["again"] = client.open("w")
    buffers["apart"] = client.create("apart", 40_000, "float32", servers=two[::-1])
    buffers["integers"] = client.create("integers", 40_000, "int32", servers=two)
    buffers["doubles"] = client.create("doubles", 40_000, "float64", servers=two)
    buffers["doubles-g"] = client.create("doubles-g", like=buffers["doubles"])
    buffers["two"] = client.create("two", 40_000, "float32", servers=two, versions=2)
    buffers["two-g"] = client.create("two-g", like=buffers["two"])
    buffers["theirs"] = connect().open("g")
    for name in ("w", "g", "m", "v"):
        buffers[name].fill(3)
    for call, told in REFUSED:
        with pytest.raises(smb.InvalidArgumentError, match=rf"^(apply|lock) of buffer '[\w-]+': .*{told}"):
            call(buffers)
    for name in ("w", "g", "m", "v"):
        assert (buffers[name].read() == 3).all(), name
    w.apply("adam", buffers["g"], buffers["m"], buffers["v"], lr=1, step=1)  # beside them, one that can be
    assert (w.read() != 3).all()


def test_fence(client: smb.Client, connect: Connect) -> None:
    """Under the weights' lock it is made; once the lock is another's it is refused, and nothing changes."""
    w = client.create("w", 40_000, "float32")
    g, m = client.create("g", like=w), client.create("m", like=w)
    g.fill(1)
    with w.lock() as lock:
        w.apply("momentum", g, m, lr=-1, mu=1, fence=lock)
    held = w.lock().acquire()
    token = held.token
    held.release()
    with connect().open("w").lock():
        stale = w.lock()
        stale._holding = (token, 0)  # as one that was stopped past its lease has it
        with pytest.raises(smb.LockLostError, match="nothing was applied"):
            w.apply("momentum", g, m, lr=-1, mu=1, fence=stale)
    assert (w.read() == 1).all()
    assert (m.read() == 1).all()


def test_a_buffer_that_is_gone_is_named(client: smb.Client) -> None:
    """Where gradient or state was deleted NotFoundError names it; with a new one it goes on."""
    w = client.create("w", 40_000, "float32")
    g, m = client.create("g", like=w), client.create("m", like=w)
    g.fill(1)
    for name in ("g", "m"):
        client.delete(name)
        with pytest.raises(smb.NotFoundError, match=rf"^buffer '{name}' was deleted$"):
            w.apply("momentum", g, m, lr=-1, mu=0)
        g, m = (client.create(n, like=w) if n == name else b for n, b in (("g", g), ("m", m)))
        g.fill(1)
        assert not w.read().any()
    w.apply("momentum", g, m, lr=-1, mu=0)
    assert (w.read() == 1).all()


# ---- once


@pytest.fixture(scope="module")
def fragile() -> Iterator[smb.LocalCluster]:
    """Two servers, to be restarted."""
    with smb.LocalCluster(servers=2, capacity="64MiB") as running:
        yield running


@pytest.mark.parametrize("transport", EACH_WAY)
def test_steps_go_on_over_kills(fragile: smb.LocalCluster, transport: str) -> None:
    """kill -9 and restart of a server in the middle of steps of two clients: none fails, each counts once, in the state
    and in the weights.
    """
    with smb.connect(fragile.address, transport=transport, timeout=30) as client:
        w = client.create("weights", 300_001, "float32", stripe=STRIPE)
        g, m = client.create("gradient", like=w), client.create("m", like=w)
        g.fill(1)
        done = [0, 0]
        stop = threading.Event()

        def work(index: int) -> None:
            with smb.connect(fragile.address, transport=FAR, timeout=30) as own:
                weights, gradient, state = (own.open(name) for name in ("weights", "gradient", "m"))
                while not stop.is_set():
                    (weights if index else w).apply(
                        "momentum", gradient if index else g, state if index else m, lr=-1, mu=1
                    )
                    done[index] += 1

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(6):
                before = list(done)
                wait_for(lambda before=before: all(n > b + 1 for n, b in zip(done, before, strict=True)), "steps")
                fragile.servers[turn % 2].kill()
                fragile.servers[turn % 2].start()
            before = list(done)
            wait_for(lambda before=before: all(n > b + 1 for n, b in zip(done, before, strict=True)), "the last steps")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        steps = sum(done)
        assert steps * (steps + 1) / 2 < 2**24, "float32 counts no further"
        assert (m.read() == steps).all()
        assert (w.read() == steps * (steps + 1) / 2).all()
        for name in ("weights", "gradient", "m"):
            client.delete(name)


def test_what_became_of_a_failed_step_is_found_out(fragile: smb.LocalCluster) -> None:
    """A step that ran out of time with a server gone: settle names the ranges that were not applied, and never are."""
    with smb.connect(fragile.address, transport=FAR, timeout=0.5) as hasty:
        w = hasty.create("w", 300_001, "float32", stripe=STRIPE)
        g, m = hasty.create("g", like=w), hasty.create("m", like=w)
        g.fill(1)
        m.fill(1)
        w.fill(0)
        fragile.servers[1].kill()
        with pytest.raises(smb.UnavailableError, match="settle") as caught:
            w.apply("momentum", g, m, lr=-1, mu=1)
        fragile.servers[1].start()
        missing = w.settle(caught.value, timeout=20)
        assert 0 < sum(len(part) for part in missing) < w.size
        applied = np.ones(w.size, bool)
        for part in missing:
            applied[part.start : part.stop] = False
        with smb.connect(fragile.address, transport=FAR, timeout=30) as patient:
            np.testing.assert_array_equal(patient.open("w").read(), np.where(applied, 2, 0))
            np.testing.assert_array_equal(patient.open("m").read(), np.where(applied, 2, 1))
            for name in "wgm":
                patient.delete(name)


@pytest.mark.parametrize("transport", EACH_WAY)
def test_ranges(connect: Connect, transport: str) -> None:
    """apply and accumulate_from of a range change that range of all, over stripes and chunks, and nothing beside it;
    a range of no elements does nothing, and one that is not inside is refused."""
    client = connect(transport)
    arrays = [normal(seed) for seed in range(3)]
    weights = client.create("weights", SIZE, "float32", stripe=STRIPE)
    buffers = [weights, client.create("gradient", like=weights), client.create("m", like=weights)]
    for buffer, array in zip(buffers, arrays, strict=True):
        buffer.write(array)
    here = slice(1_003, 101_010)
    span = {"offset": here.start, "count": here.stop - here.start}
    expected = [array.copy() for array in arrays]
    expected[2][here] = np.float32(0.9) * arrays[2][here] + arrays[1][here]
    expected[0][here] -= np.float32(0.5) * (arrays[1][here] + np.float32(0.9) * expected[2][here])
    weights.apply("nesterov", buffers[1], buffers[2], lr=0.5, mu=0.9, **span)
    buffers[1].accumulate_from(weights, op="replace", **span)
    expected[1][here] = expected[0][here]
    buffers[1].accumulate_from(weights, offset=SIZE)
    buffers[1].accumulate_from(weights, offset=7, count=0)
    for buffer, array in zip(buffers, expected, strict=True):
        np.testing.assert_array_equal(buffer.read(), array)
    with pytest.raises(smb.InvalidArgumentError, match="not inside"):
        weights.accumulate_from(buffers[1], offset=1, count=SIZE)
    with pytest.raises(smb.InvalidArgumentError, match="not inside"):
        weights.apply("sgd", buffers[1], lr=1.0, offset=5, count=SIZE)
