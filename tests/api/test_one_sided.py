"""MPI's one-sided calls, as far as they have a meaning here: docs/mpi.md says which call of ours does the work.

A table of calls, datatypes and operations, beside numpy; and beside a real MPI where there is one (`make mpi`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
from tests.conftest import Connect
from tests.support.transports import FAR

PAGE = Path(__file__).parents[2] / "docs/mpi.md"
COUNTS = range(10)  # elements, none included
# MPI's names of datatypes and operations, and ours.
ARITHMETIC = {
    "MPI_FLOAT": "float32", "MPI_DOUBLE": "float64", "MPI_INT32_T": "int32", "MPI_INT64_T": "int64",
    "MPI_UINT8_T": "uint8",
}  # fmt: skip
STORAGE = {
    "MPI_INT8_T": "int8", "MPI_INT16_T": "int16", "MPI_UINT16_T": "uint16", "MPI_UINT32_T": "uint32",
    "MPI_UINT64_T": "uint64", "MPI_C_FLOAT_COMPLEX": "complex64", "MPI_C_BOOL": "bool",
}  # fmt: skip
BITS = {"MPI_BAND": "band", "MPI_BOR": "bor", "MPI_BXOR": "bxor"}
OPS = {"MPI_SUM": "sum", "MPI_PROD": "prod", "MPI_MAX": "max", "MPI_MIN": "min", "MPI_REPLACE": "replace", **BITS}
DATATYPES = {**ARITHMETIC, **STORAGE}
ATOMIC = ("MPI_FLOAT", "MPI_DOUBLE", "MPI_INT32_T", "MPI_INT64_T", "MPI_UINT32_T", "MPI_UINT64_T")
# What stands in the window before, and what is put or combined there, for `count` elements.
VALUES: dict[str, Callable[[Any, Any], Any]] = {
    "MPI_SUM": np.add, "MPI_PROD": np.multiply, "MPI_MAX": np.maximum, "MPI_MIN": np.minimum,
    "MPI_REPLACE": lambda _, new: new,
    "MPI_BAND": np.bitwise_and, "MPI_BOR": np.bitwise_or, "MPI_BXOR": np.bitwise_xor,
}  # fmt: skip


def has(datatype: str, op: str) -> bool:
    """Whether accumulate takes the operation on the datatype."""
    whole = np.dtype(DATATYPES[datatype]).kind in "iub"
    return op == "MPI_REPLACE" or (op in BITS and whole) or (op not in BITS and datatype in ARITHMETIC)


def before(datatype: str) -> np.ndarray[Any, Any]:
    """What stands in a window of 16 elements."""
    return (np.arange(16) % 5 + 1).astype(DATATYPES[datatype])


def origin(datatype: str, count: int) -> np.ndarray[Any, Any]:
    """What is sent there."""
    return (np.arange(count) * 3 % 7).astype(DATATYPES[datatype])


def test_put_get_and_accumulate(client: smb.Client) -> None:
    """Each operation, from no element to nine, from the first and from the second: what is beside them stays."""
    for datatype in DATATYPES:
        print(datatype)  # the one that fails is the last
        buffer = client.create("window", 16, DATATYPES[datatype])
        for count in COUNTS:
            for at in (0, 1):
                put, expected = origin(datatype, count), before(datatype)
                buffer.write(expected)
                buffer.write(put, offset=at)  # MPI_Put
                expected[at : at + count] = put
                assert np.array_equal(buffer.read(), expected)
                assert np.array_equal(buffer.read(offset=at, count=count), put)  # MPI_Get
        for op, name in OPS.items():
            for count in COUNTS:
                expected = before(datatype)
                buffer.write(expected)
                if not has(datatype, op):
                    with pytest.raises(smb.InvalidArgumentError, match=re.escape(DATATYPES[datatype])):
                        buffer.accumulate(origin(datatype, count), offset=1, op=name)
                    continue
                buffer.accumulate(origin(datatype, count), offset=1, op=name)  # MPI_Accumulate
                expected[1 : 1 + count] = VALUES[op](expected[1 : 1 + count], origin(datatype, count))
                assert np.array_equal(buffer.read(), expected), f"{op}, {count} elements"
                # MPI_Get_accumulate returns the values before; ours returns those after, from the same instant.
                after = buffer.accumulate(origin(datatype, count), offset=1, op=name, fetch=True)
                expected[1 : 1 + count] = VALUES[op](expected[1 : 1 + count], origin(datatype, count))
                assert np.array_equal(after, expected[1 : 1 + count]), f"{op}, {count} elements"
        client.delete("window")


def test_fetch_and_op_and_compare_and_swap(client: smb.Client) -> None:
    """On one element, with the value before as the result, as in MPI. What is not SUM is a loop of compare_swap."""
    for datatype in ATOMIC:
        print(datatype)  # the one that fails is the last
        buffer = client.create("window", 4, DATATYPES[datatype])
        buffer.write(np.array([1, 2, 3, 4], DATATYPES[datatype]))
        assert buffer.fetch_add(2, 5) == 3  # MPI_Fetch_and_op with MPI_SUM
        assert buffer.compare_swap(2, 7, 1) == 8  # MPI_Compare_and_swap: it was another value
        assert buffer.compare_swap(2, 8, 1) == 8
        old = buffer.read(1, 1)[0].item()  # MPI_Fetch_and_op with MPI_PROD, as docs/mpi.md has it
        while (found := buffer.compare_swap(1, old, old * 6)) != old:
            old = found
        assert old == 2
        assert buffer.read().tolist() == [1, 12, 1, 4]
        for datatype_without in ("MPI_UINT8_T", "MPI_C_BOOL", "MPI_C_FLOAT_COMPLEX"):
            other = client.create("other", 4, DATATYPES[datatype_without], exist_ok=False)
            with pytest.raises(smb.InvalidArgumentError, match=DATATYPES[datatype_without]):
                other.fetch_add(0, 1)
            client.delete("other")
        client.delete("window")


def test_operations_that_mpi_has_and_this_has_not(client: smb.Client) -> None:
    """MPI_LAND, MPI_LOR, MPI_LXOR, MPI_MAXLOC, MPI_MINLOC and operations of users are refused by name."""
    buffer = client.create("window", 4, "int64")
    for op in ("land", "lor", "lxor", "maxloc", "minloc", "no_op"):
        with pytest.raises(smb.InvalidArgumentError, match=op):
            buffer.accumulate(np.ones(4, np.int64), op=op)
    with pytest.raises(smb.InvalidArgumentError):
        buffer.accumulate(np.ones(4, np.int64), op=np.add)  # type: ignore[arg-type]
    for count in (5, 17):  # MPI leaves what is beyond the window to chance
        with pytest.raises(smb.InvalidArgumentError, match=str(count)):
            buffer.write(np.zeros(count, np.int64), offset=0)
    assert (buffer.read() == 0).all()


def test_derived_datatypes_are_sparse_calls(client: smb.Client) -> None:
    """A vector with a stride, an indexed block, and the same element twice, which MPI leaves undefined in one Put."""
    buffer = client.create("window", 12, "float32")
    stride = np.arange(0, 12, 3)
    buffer.accumulate_sparse(stride, np.ones(4, np.float32))
    assert buffer.read().tolist() == [1, 0, 0] * 4
    assert buffer.read_sparse(stride).tolist() == [1] * 4
    buffer.accumulate_sparse([5, 5], np.ones(2, np.float32))
    assert buffer.read_sparse([5])[0] == 2


def test_locks_epochs_and_completion(client: smb.Client, connect: Connect) -> None:
    """MPI_Win_lock of both kinds, MPI_Win_fence, MPI_Rput and MPI_Win_flush: what others see, and when."""
    buffer, others = client.create("window", 4, "int64"), [connect(FAR), connect("shm")]
    with buffer.lock() as exclusive:  # MPI_LOCK_EXCLUSIVE
        buffer.write(np.ones(4, np.int64), fence=exclusive)
        with pytest.raises(smb.TimeoutError):
            others[0].open("window").lock(shared=True, timeout=0).acquire()
    windows = [other.open("window") for other in others]
    holders = [window.lock(shared=True).acquire() for window in windows]  # MPI_LOCK_SHARED
    for window, lock in zip(windows, holders, strict=True):
        window.accumulate(np.ones(4, np.int64), fence=lock)
        assert (buffer.read() >= 2).all()  # a call that returned is complete at the target: no flush, no sync
        lock.release()
    futures = [window.accumulate_async(np.ones(4, np.int64)) for window in windows]  # MPI_Raccumulate
    for future in futures:
        future.result(30)  # MPI_Wait, and MPI_Win_flush
    assert buffer.read().tolist() == [5] * 4

    def fence(own: smb.Client, number: int) -> None:
        own.open("window").write(np.array([number], np.int64), offset=number)
        own.barrier("fence", 2, timeout=30)  # MPI_Win_fence
        seen.append(own.open("window").read(0, 2).tolist())

    seen: list[list[int]] = []
    threads = [threading.Thread(target=fence, args=pair) for pair in zip(others, range(2), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [[0, 1]] * 2


def test_windows_of_shared_memory_and_windows_that_come_and_go(connect: Connect) -> None:
    """MPI_Win_allocate_shared is view(); MPI_Win_create_dynamic is create and delete, at any time, by anybody."""
    client, other = connect("shm"), connect("shm")
    view = client.create("window", 4, "int32").view()
    other.open("window").write(np.arange(4, dtype=np.int32))
    assert view.tolist() == [0, 1, 2, 3]
    with pytest.raises(smb.TransportError):
        connect(FAR).open("window").view()
    with pytest.raises(smb.NotFoundError):
        other.open("attached")
    client.create("attached", 4)
    assert other.open("attached").size == 4
    other.delete("attached")
    with pytest.raises(smb.NotFoundError):
        client.open("attached").read()


def calls_of_the_page() -> set[str]:
    """MPI's calls in docs/mpi.md, without MPI_ and MPI_Win_."""
    return {name.removeprefix("Win_").lower() for name in re.findall(r"`MPI_(\w+)`", PAGE.read_text())}


def test_the_page_has_every_one_sided_call() -> None:
    """Each call of the standard's chapter on one-sided communication stands in docs/mpi.md."""
    communication = "put get accumulate get_accumulate fetch_and_op compare_and_swap rput rget raccumulate"
    windows = "create allocate allocate_shared shared_query create_dynamic attach detach free get_group get_name"
    epochs = "fence start complete post wait test lock lock_all unlock unlock_all flush flush_all flush_local sync"
    assert {*communication.split(), *windows.split(), *epochs.split()} <= calls_of_the_page()


def test_results_are_those_of_a_real_mpi(client: smb.Client) -> None:
    """Each call, operation and datatype of the tables above, to the bit, in a window of MPI and in a buffer."""
    mpi = pytest.importorskip("mpi4py.MPI", reason="not run: it needs MPI (make mpi)")
    methods = {name.lower() for name in vars(mpi.Win) if name[0].isupper()}
    beside = {"py2f", "f2py", "call_errhandler", "create_errhandler", "create_keyval", "delete_attr", "free_keyval"}
    of_objects = {"get_attr", "set_attr", "get_errhandler", "set_errhandler", "get_info", "set_info", "set_name"}
    assert methods - calls_of_the_page() <= beside | of_objects | {"rget_accumulate", "flush_local_all"}
    compared = 0
    for datatype, dtype in DATATYPES.items():
        memory = before(datatype)
        window = mpi.Win.Create(memory, memory.itemsize, comm=mpi.COMM_SELF)
        buffer = client.create(f"window/{dtype}", 16, dtype)
        kind = getattr(mpi, datatype.removeprefix("MPI_"))
        for op, name in OPS.items():
            if not has(datatype, op):
                continue
            for count in COUNTS:
                sent, old = origin(datatype, count), np.empty(count, dtype)
                memory[:] = before(datatype)
                buffer.write(before(datatype))
                window.Lock(0)
                window.Get_accumulate([sent, kind], [old, kind], 0, (1, count, kind), getattr(mpi, op[4:]))
                window.Unlock(0)
                buffer.accumulate(sent, offset=1, op=name)
                assert buffer.read().tobytes() == memory.tobytes(), f"{op} on {datatype}, {count} elements"
                compared += 1
        if datatype in ATOMIC:
            five, was, nine = (np.array([number], dtype) for number in (5, 0, 9))
            window.Lock(0)
            window.Fetch_and_op([five, kind], [was, kind], 0, 3, mpi.SUM)
            window.Flush(0)
            buffer.write(memory)
            buffer.write(was, offset=3)
            assert buffer.fetch_add(3, 5) == was[0]
            now = memory[3:4].copy()
            if datatype not in ("MPI_FLOAT", "MPI_DOUBLE"):  # MPI swaps whole numbers only
                window.Compare_and_swap([nine, kind], [now, kind], [was, kind], 0, 3)
                window.Flush(0)
                assert buffer.compare_swap(3, now[0].item(), 9) == was[0]
                compared += 1
            window.Unlock(0)
            assert buffer.read().tobytes() == memory.tobytes()
            compared += 1
        window.Free()
    print(f"{compared} results compared with {mpi.Get_library_version().splitlines()[0]}")
    assert compared > 500
