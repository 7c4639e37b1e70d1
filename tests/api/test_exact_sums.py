"""Promise 1: concurrent changes of any mix of processes and transports all count, exactly."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import smb
from tests.conftest import Connect
from tests.fault.long import times
from tests.support.clients import TURN, add, add_whole, count_up, pattern, read_whole, run_together, swap_up
from tests.support.transports import FAR, MIXED

SIZE = 3 * 5 * 65536 + 12_345  # odd, many stripes on each server, the last one short
ROUNDS = times(9, 15)
SEED = 100


def draw_ranges(number: int) -> list[tuple[int, int]]:
    """The whole buffer, parts that overlap other processes', and the lane of this process alone, in turn."""
    rng = random.Random(SEED + number)
    lane = SIZE // len(MIXED)
    parts = []
    for _ in range(ROUNDS // 3):
        offset = rng.randrange(SIZE)
        parts += [(0, SIZE), (offset, rng.randint(1, SIZE - offset)), (number * lane, lane)]
    return parts


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_sums_are_exact(connect: Connect, cluster: smb.LocalCluster, dtype: str) -> None:
    """4 processes, two transports, 3 servers: place-dependent integers added to overlapping ranges are never lost."""
    print(f"seeds {SEED} to {SEED + len(MIXED) - 1}")
    client = connect()
    buffer = client.create("w", SIZE, dtype, stripe="256KiB", servers=3)
    work = [draw_ranges(number) for number in range(len(MIXED))]
    used = run_together(
        *((add, cluster.address, transport, "w", ranges) for transport, ranges in zip(MIXED, work, strict=True))
    )
    assert used == [(transport,) for transport in MIXED]
    expected = np.zeros(SIZE, dtype)
    for ranges in work:
        for offset, count in ranges:
            expected[offset : offset + count] += pattern(offset, count, dtype)
    np.testing.assert_array_equal(buffer.read(), expected)
    np.testing.assert_array_equal(connect(FAR).open("w").read(), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "uint8"])
def test_sums_of_small_types_are_exact(connect: Connect, cluster: smb.LocalCluster, dtype: str) -> None:
    """Ones added by 4 processes to types of 8 and 16 bits, as far as these hold every integer: exact."""
    size, additions = 300_001, times(20, 50)
    buffer = connect().create("w", size, dtype, stripe="64KiB")
    run_together(*((add_whole, cluster.address, transport, "w", additions) for transport in MIXED))
    np.testing.assert_array_equal(buffer.read().astype(np.int64), np.full(size, len(MIXED) * additions))


def test_tickets_are_drawn_once(connect: Connect, cluster: smb.LocalCluster) -> None:
    """fetch_add from 4 processes gives each number once without gaps, beside accumulates of the same element."""
    buffer = connect().create("c", 2, "int64")
    tickets = run_together(*((count_up, cluster.address, transport, "c", 300) for transport in MIXED))
    assert sorted(ticket for drawn in tickets for ticket in drawn) == list(range(1200))
    assert all(drawn == sorted(drawn) for drawn in tickets)
    assert buffer.read().tolist() == [1200 * TURN + 1200, 1200]


def test_threads_of_one_client_draw_tickets_once(client: smb.Client) -> None:
    """fetch_add from 8 threads over one client's connection gives each number once without gaps."""
    buffer = client.create("c", 1, "int64")
    with ThreadPoolExecutor(8) as threads:
        tickets = list(threads.map(lambda _: buffer.fetch_add(0, 1), range(2000)))
    assert sorted(tickets) == list(range(2000))


def test_swaps_win_once(connect: Connect, cluster: smb.LocalCluster) -> None:
    """A counter kept by compare_swap from 4 processes ends at the number of successful swaps."""
    buffer = connect().create("c", 1, "int64")
    run_together(*((swap_up, cluster.address, transport, "c", 300) for transport in MIXED))
    assert buffer.read()[0] == 1200


def test_fetched_values_contain_ones_own_contribution(connect: Connect) -> None:
    """accumulate(fetch=True) beside another client's: every fetched value is at least the own sum, at most both."""
    near, far = (connect(transport).create("w", 70_001, "int64", exist_ok=True) for transport in ("shm", FAR))
    ones = np.ones(70_001, np.int64)
    for own in range(1, 21):
        pending = far.accumulate_async(ones, fetch=True)
        mine = near.accumulate(ones, fetch=True)
        theirs = pending.result()
        for fetched in (mine, theirs):
            assert fetched is not None
            assert fetched.min() >= 2 * own - 1
            assert fetched.max() <= 2 * own


def test_reads_are_never_torn(connect: Connect, cluster: smb.LocalCluster) -> None:
    """Readers over both transports, beside writers over both, never see half of a chunk's accumulate."""
    buffer = connect().create("w", 16 * 65536, "float32", stripe="256KiB")
    assert buffer.layout.chunk_bytes == 256 << 10
    address, times = cluster.address, 60
    adders = [(add_whole, address, transport, "w", times) for transport in ("shm", FAR)]
    readers = [(read_whole, address, transport, "w", 2 * times) for transport in ("shm", FAR)]
    torn = run_together(*adders, *readers)
    assert torn == [None, None, 0, 0]
