"""Every operation through a proxy that cuts, swallows, doubles, holds back and spoils frames: nothing lost, nothing
doubled.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.engine import Lane
from tests.fault.long import LIMIT_S, seed, times
from tests.support.checkers import Run, check_at_rest, delta
from tests.support.proxy import Fault, RandomPlan, behind_a_proxy
from tests.support.raw import HEADER, Opcode

pytestmark = pytest.mark.timeout(LIMIT_S)

COUNT = 700
OPERATIONS = times(2000, 100_000)
EVERY = 9.0  # frames for one fault


def make_weights(client: smb.Client) -> None:
    """Make what steps are of; the gradient is ones."""
    weights = client.create("weights", COUNT, "float32")
    for name in ("gradient", "state"):
        client.create(name, like=weights)
    client.open("gradient").fill(1)


class Worker:
    """One client's operations, and what it was told of them."""

    def __init__(self, address: str, number: int, operations: int, *, checksum: bool = False) -> None:
        self._address, self._number, self._operations = address, number, operations
        self._checksum = checksum
        self.spoilt = 0
        self.lane = self.common = self.combined = self.filled = self.steps = self.momenta = 0
        self.counted: list[int] = []
        self.swaps = 0
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with smb.connect(self._address, transport="tcp", timeout=60, checksum=self._checksum) as client:
                self._work(client)
                self.spoilt = client._session.engine.spoilt()
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            self.failure = error

    def _work(self, client: smb.Client) -> None:
        lane, common = client.open(f"lane-{self._number}"), client.open("common")
        combined, source = client.open(f"combined-{self._number}"), client.open("source")
        counter, scratch = client.open("counter"), client.open(f"scratch-{self._number}")
        weights, gradient, state = (client.open(name) for name in ("weights", "gradient", "state"))
        ours = delta(COUNT)
        for turn in range(self._operations):
            match turn % 8:
                case 0:
                    lane.accumulate(ours)
                    self.lane += 1
                case 1:
                    common.accumulate(ours)
                    self.common += 1
                case 2:
                    self.counted.append(counter.fetch_add(0, 1))
                case 3:
                    before = counter.compare_swap(1 + self._number, self.swaps, self.swaps + 1)
                    assert before == self.swaps, f"compare_swap saw {before}, not {self.swaps}"
                    self.swaps += 1
                case 4:
                    combined.accumulate_from(source)
                    self.combined += 1
                case 5:
                    weights.apply("sgd", gradient, lr=-1)
                    self.steps += 1
                case 6:
                    weights.apply("momentum", gradient, state, lr=0, mu=1)
                    self.momenta += 1
                case _:
                    scratch.fill(turn)
                    self.filled = turn
                    lane_now = lane.accumulate(ours, fetch=True)
                    self.lane += 1
                    np.testing.assert_array_equal(lane_now, self.lane * ours)


def test_random_faults(tmp_path: Path) -> None:
    """Two clients, all operations, a fault for every tenth frame or so."""
    workers_count = 2
    plan = RandomPlan(seed(), EVERY)
    plan.quiet = True
    with behind_a_proxy(tmp_path, plan) as (address, proxy):
        with smb.connect(address, transport="tcp", timeout=60) as client:
            for name in (
                "common",
                "source",
                *(f"{kind}-{i}" for kind in ("lane", "combined", "scratch") for i in range(2)),
            ):
                client.create(name, COUNT, "int64")
            client.create("counter", 8, "int64")
            client.open("source").write(delta(COUNT))
            make_weights(client)
        plan.quiet = False
        began = time.monotonic()
        workers = [Worker(address, number, OPERATIONS // workers_count) for number in range(workers_count)]
        for worker in workers:
            worker.thread.start()
        for worker in workers:
            worker.thread.join()
        taken_s = time.monotonic() - began
        plan.quiet = True
        for worker in workers:
            if worker.failure is not None:
                raise worker.failure
        with smb.connect(address, transport="tcp") as client:
            for number, worker in enumerate(workers):
                check_at_rest(client.open(f"lane-{number}").read(), worker.lane, f"lane {number}")
                check_at_rest(client.open(f"combined-{number}").read(), worker.combined, f"combined {number}")
                assert (client.open(f"scratch-{number}").read() == worker.filled).all()
            check_at_rest(client.open("common").read(), sum(worker.common for worker in workers), "common")
            assert (client.open("weights").read() == sum(worker.steps for worker in workers)).all()
            assert (client.open("state").read() == sum(worker.momenta for worker in workers)).all()
            counted = sorted(value for worker in workers for value in worker.counted)
            assert counted == list(range(len(counted)))
        fired = sum(proxy.fired.values())
        print(f"{OPERATIONS} operations, {fired} faults {dict(proxy.fired)}: 0 lost, 0 doubled")
        # Faults come from the start on, so the rate is the whole run's. About one in EVERY fires; a third less is void.
        Run(OPERATIONS, taken_s, round(OPERATIONS / EVERY * 2 / 3), fired, last_operation_succeeded=True).check(10)
        assert len(proxy.fired) == 7, f"not every kind of fault fired: {dict(proxy.fired)}"


class CutEachByte:
    """Cuts the first answer of every request at the next byte; the second time it passes."""

    def __init__(self, opcode: Opcode, reply: bool, length: int) -> None:
        self._opcode, self._reply, self._length = opcode, reply, length
        self._seen: set[bytes] = set()
        self.cuts = 0

    def __call__(self, reply: bool, header: bytes) -> Fault | None:
        if header[3] != self._opcode or reply is not self._reply or header[24:32] in self._seen:
            return None
        self._seen.add(header[24:32])
        self.cuts += 1
        return Fault("cut reply" if reply else "cut request", self.cuts % self._length)


@pytest.mark.parametrize("reply", [True, False], ids=["answer", "request"])
def test_cut_at_each_byte(tmp_path: Path, reply: bool) -> None:
    """A fetch_add's answer, and its request, cut at each of its bytes in turn: every number is given once."""
    plan = CutEachByte(Opcode.FETCH_ADD, reply, HEADER.size)
    with behind_a_proxy(tmp_path, plan) as (address, _), smb.connect(address, transport="tcp", timeout=60) as client:
        counter = client.create("counter", 1, "int64")
        for turn in range(HEADER.size + 1):
            assert counter.fetch_add(0, 1) == turn
        assert plan.cuts >= HEADER.size


@pytest.mark.parametrize("reply", [True, False], ids=["answer", "request"])
def test_steps_cut_at_each_byte(tmp_path: Path, reply: bool) -> None:
    """An optimizer's step whose answer, or request with its payload, is cut at each byte: made once, as a whole."""
    nbytes = HEADER.size + (0 if reply else 96)
    plan = CutEachByte(Opcode.APPLY, reply, nbytes)
    with behind_a_proxy(tmp_path, plan) as (address, _), smb.connect(address, transport="tcp", timeout=60) as client:
        make_weights(client)
        weights, gradient, state = (client.open(name) for name in ("weights", "gradient", "state"))
        for _ in range(nbytes + 1):
            weights.apply("momentum", gradient, state, lr=-1, mu=1)
        steps = nbytes + 1
        assert (state.read() == steps).all()
        assert (weights.read() == steps * (steps + 1) / 2).all()
        assert plan.cuts >= nbytes


class FlipBits:
    """Flips one bit of one frame in some: header, payload and checksum alike; never of a HELLO."""

    def __init__(self, seed: int, every: int) -> None:
        self._random = random.Random(seed)
        self._every = every
        self._lock = threading.Lock()
        self.quiet = True

    def __call__(self, reply: bool, header: bytes) -> Fault | None:
        with self._lock:
            if self.quiet or header[3] == Opcode.HELLO or self._random.randrange(self._every):
                return None
            frame_bytes = HEADER.size + int.from_bytes(header[52:56], "little")
            return Fault("flip reply" if reply else "flip request", self._random.randrange(8 * frame_bytes))


def test_flipped_bits_with_checksums(tmp_path: Path) -> None:
    """With checksums no changed bit of any frame is believed: every operation counts once, every value is right."""
    plan = FlipBits(seed(), round(2 * EVERY))
    with behind_a_proxy(tmp_path, plan) as (address, proxy):
        with smb.connect(address, transport="tcp", timeout=60) as client:
            for name in ("common", "source", "lane-0", "combined-0", "scratch-0"):
                client.create(name, COUNT, "int64")
            client.create("counter", 8, "int64")
            client.open("source").write(delta(COUNT))
            floats = client.create("floats", 5000)
            make_weights(client)
        plan.quiet = False
        worker = Worker(address, 0, OPERATIONS // 4, checksum=True)
        worker.thread.start()
        wanted = np.arange(5000, dtype=np.float32) - 2500
        with smb.connect(address, transport="tcp", timeout=60, checksum=True) as client:
            floats = client.open("floats")
            for turn in range(OPERATIONS // 40):
                floats.write(wanted + turn)
                np.testing.assert_array_equal(floats.read(), wanted + turn)
                floats.accumulate(np.ones(5000, np.float32), wire="int8")
                np.testing.assert_array_equal(floats.read(wire="exact"), wanted + turn + 1)
            answers_spoilt = client._session.engine.spoilt()
        worker.thread.join()
        plan.quiet = True
        if worker.failure is not None:
            raise worker.failure
        with smb.connect(address, transport="tcp") as client:
            check_at_rest(client.open("lane-0").read(), worker.lane, "lane")
            check_at_rest(client.open("combined-0").read(), worker.combined, "combined")
            check_at_rest(client.open("common").read(), worker.common, "common")
            assert (client.open("scratch-0").read() == worker.filled).all()
            assert (client.open("weights").read() == worker.steps).all()
            assert (client.open("state").read() == worker.momenta).all()
        assert worker.counted == list(range(len(worker.counted)))
        flipped = dict(proxy.fired)
        print(f"{flipped}: {answers_spoilt + worker.spoilt} answers found spoilt")
        assert min(flipped["flip request"], flipped["flip reply"]) > OPERATIONS // 100
        # A broken connection takes later ones along; a request of another version gets an answer without checksum.
        assert 0 < answers_spoilt + worker.spoilt <= sum(flipped.values())


class OfLanes:
    """Another plan's faults, counted by the lane of the frame that they befell."""

    def __init__(self, plan: RandomPlan) -> None:
        self.plan = plan
        self.fired: dict[int, int] = {}

    def __call__(self, reply: bool, header: bytes) -> Fault | None:
        fault = self.plan(reply, header)
        if fault is not None:
            lane = int.from_bytes(header[10:12], "little")
            self.fired[lane] = self.fired.get(lane, 0) + 1
        return fault


def test_large_calls_of_two_clients(tmp_path: Path) -> None:
    """Calls of ten chunks, and small ones between them, of two clients, over connections that break again and again:
    a small call to any chunk finds what the large ones before it left; nothing is lost, doubled or overtaken."""
    count = 10 * 32768 + 5  # int64: ten chunks of 256 KiB and a bit
    calls, step = times(40, 400), delta(count)
    plan = OfLanes(RandomPlan(seed(), 25.0))
    plan.plan.quiet = True

    def work(address: str, number: int) -> None:
        with smb.connect(address, transport="tcp", timeout=60) as client:
            common, own = client.open("common"), client.open(f"own-{number}")
            for turn in range(calls):
                common.accumulate(step)
                own.write(step * turn)
                at = (turn * 32768 + number) % count
                assert own.read(at, 1)[0] == step[at] * turn
                assert own.fetch_add(at, 7) == step[at] * turn
                expected = step * turn
                expected[at] += 7
                np.testing.assert_array_equal(own.read(), expected)

    daemons = behind_a_proxy(tmp_path, plan)
    with daemons as (address, _), smb.connect(address, transport="tcp", timeout=60) as client:
        for name in ("common", "own-0", "own-1"):
            client.create(name, count, "int64")
        plan.plan.quiet = False
        with ThreadPoolExecutor(2) as workers:
            for done in [workers.submit(work, address, number) for number in range(2)]:
                done.result()
        plan.plan.quiet = True
        np.testing.assert_array_equal(client.open("common").read(), step * (2 * calls))
    assert plan.fired.get(Lane.TCP_DATA, 0) > 10, plan.fired
