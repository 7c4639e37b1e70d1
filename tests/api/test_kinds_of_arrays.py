"""docs/arrays.md: every kind of array at every entry point. Its values arrive, or the call is refused and nothing is
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import smb
from smb.arrays.dtypes import BITS, DTYPES, OPS
from smb.arrays.memory import readable, writable
from tests.support.doc_tables import table_of

torch: Any = pytest.importorskip("torch", reason="PyTorch is not here")

SHAPE = (2, 3)
VALUES = np.array([[1, -2, 3], [-4, 5, 6]], np.float32)  # what every kind stands for
PAGE = table_of("arrays.md", "kind")
FLOAT32 = DTYPES["float32"]


pytestmark = pytest.mark.filterwarnings("ignore:.*MaskedTensors:UserWarning")


class _Subclass(np.ndarray[Any, Any]):
    pass


class _OnlyInterface:
    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values
        self.__array_interface__ = values.__array_interface__


def _strided(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    room = np.zeros((values.shape[0], 2 * values.shape[1]), values.dtype)
    room[:, ::2] = values
    return room[:, ::2]


def _read_only(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values = values.copy()
    values.flags.writeable = False
    return values


def _tensor() -> Any:
    return torch.from_numpy(VALUES.copy())


def _in_inference_mode(make: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return make().clone()


def _negative_in_inference_mode() -> Any:
    with torch.inference_mode():
        return torch._neg_view(-_tensor())


# The arrays stand for VALUES, except for those that nobody takes.
KINDS: dict[str, Callable[[], Any]] = {
    "numpy, contiguous": VALUES.copy,
    "numpy, transposed": lambda: np.asfortranarray(VALUES),
    "numpy, every second element": lambda: _strided(VALUES),
    "numpy, backwards": lambda: VALUES[::-1].copy()[::-1],
    "numpy, read-only": lambda: _read_only(VALUES),
    "numpy, big-endian": lambda: VALUES.astype(">f4"),
    "numpy, masked elements": lambda: np.ma.masked_array(VALUES.copy(), mask=VALUES < 0),
    "numpy, a mask that hides nothing": lambda: np.ma.masked_array(VALUES.copy(), mask=np.zeros(SHAPE, bool)),
    "numpy, another dtype": lambda: VALUES.astype(np.float64),
    "numpy, a subclass": lambda: VALUES.copy().view(_Subclass),
    "list of numbers": VALUES.tolist,
    "list of masked arrays": lambda: [np.ma.masked_array(row, mask=row < 0) for row in VALUES],
    "memoryview": lambda: memoryview(VALUES.copy()),
    "memoryview, big-endian": lambda: memoryview(VALUES.astype(">f4")),
    "what has `__array_interface__`": lambda: _OnlyInterface(VALUES.copy()),
    "tensor, contiguous": _tensor,
    "tensor, transposed": lambda: _tensor().T.contiguous().T,
    "tensor, expanded": lambda: _tensor()[:, :1].expand(2, 3),
    "tensor that requires gradients": lambda: torch.nn.Parameter(_tensor()),
    "tensor with the negative bit": lambda: torch._neg_view(-_tensor()),
    "tensor made in inference mode": lambda: _in_inference_mode(_tensor),
    "tensor with the negative bit, made in inference mode": _negative_in_inference_mode,
    "tensor on the meta device": lambda: torch.empty(SHAPE, device="meta"),
    "tensor, sparse": lambda: _tensor().to_sparse(),
    "tensor, masked": lambda: torch.masked.masked_tensor(_tensor(), _tensor() > 0),
    "tensor, another dtype": lambda: _tensor().double(),
}
EXPANDED = np.repeat(VALUES[:, :1], 3, axis=1)


def _flat(array: Any) -> Any:
    """Return the array in one dimension, of the same kind as far as there is one."""
    if isinstance(array, memoryview):
        return memoryview(np.asarray(array).reshape(-1))
    if isinstance(array, _OnlyInterface):
        return _OnlyInterface(array.values.reshape(-1))
    if isinstance(array, list):
        return [each for row in array for each in ([row] if isinstance(row, np.ma.MaskedArray) else row)]
    if getattr(array, "is_sparse", False):
        return array.to_dense().reshape(-1).to_sparse()
    return array.reshape(-1) if hasattr(array, "reshape") else array


def _of(out: Any) -> list[float]:
    array: Any = out.detach().resolve_neg() if isinstance(out, torch.Tensor) else out
    return [float(each) for each in np.asarray(array).ravel()]


@pytest.fixture(scope="module")
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with smb.connect(cluster.address) as one:
        yield one


@pytest.fixture
def buffers(client: smb.Client) -> Iterator[dict[str, Any]]:
    """Buffers of the same shape, all of zeros: one for each sort of entry point."""
    forms: dict[str, Any] = {"w": (SHAPE, "float32"), "c": ((), "float64")}
    made = {
        "plain": client.create("plain", SHAPE),
        "versions": client.create("versions", SHAPE, versions=2),
        "tensors": client.create("tensors", tensors={"w": (SHAPE, "float32")}),
        "bytes": client.create("bytes", tensors=forms),
    }
    yield made
    for buffer in made.values():
        client.delete(buffer)


def _add_sparse(buffers: dict[str, Any], array: Any) -> None:
    buffers["plain"].accumulate_sparse(np.arange(6), _flat(array))


def _queue(client: smb.Client, call: str, *given: Any) -> None:
    with client.queue() as queue:
        getattr(queue, call)(*given).result()


# Entry point: (what is done with an array, of which buffer). All begin with zeros, so what arrives is the array.
GIVEN: dict[str, tuple[Callable[[smb.Client, dict[str, Any], Any], object], str]] = {
    "write": (lambda _, b, a: b["plain"].write(a), "plain"),
    "write, offset": (lambda _, b, a: b["plain"].write(_flat(a), 0), "plain"),
    "write, fewer bits": (lambda _, b, a: b["plain"].write(a, wire="bfloat16"), "plain"),
    "write_async": (lambda _, b, a: b["plain"].write_async(a).result(), "plain"),
    "queue.write": (lambda c, b, a: _queue(c, "write", b["plain"], a), "plain"),
    "accumulate": (lambda _, b, a: b["plain"].accumulate(a), "plain"),
    "accumulate, fetch": (lambda _, b, a: b["plain"].accumulate(a, fetch=True), "plain"),
    "accumulate, feedback": (
        lambda _, b, a: b["plain"].accumulate(a, feedback=smb.ErrorFeedback(b["plain"])), "plain"
    ),
    "accumulate_async": (lambda _, b, a: b["plain"].accumulate_async(a).result(), "plain"),
    "queue.accumulate": (lambda c, b, a: _queue(c, "accumulate", b["plain"], a), "plain"),
    "accumulate_sparse": (lambda _, b, a: _add_sparse(b, a), "plain"),
    "accumulate_sparse, rows": (lambda _, b, a: b["plain"].accumulate_sparse([0, 1], a, rows=True), "plain"),
    "top_k": (
        lambda _, b, a: b["plain"].accumulate_sparse(*smb.ErrorFeedback(b["plain"]).top_k(a, 6)), "plain"
    ),
    "publish": (lambda _, b, a: b["versions"].publish(a), "versions"),
    "publish, one copy": (lambda _, b, a: b["plain"].publish(a), "plain"),
    "tensor.write": (lambda _, b, a: b["tensors"].tensor("w").write(a), "tensors"),
    "tensor.accumulate": (lambda _, b, a: b["tensors"].tensor("w").accumulate(a, fetch=True), "tensors"),
    "tensor.write of bytes": (lambda _, b, a: b["bytes"].tensor("w").write(a), "bytes"),
}  # fmt: skip


def _content(buffers: dict[str, Any], name: str) -> list[float]:
    buffer = buffers[name]
    if name == "versions" and buffer.version == 0:
        return [0.0] * 6
    return _of(buffer.tensor("w").read() if name in ("tensors", "bytes") else buffer.read())


def test_given(client: smb.Client, buffers: dict[str, Any]) -> None:
    """The values of an array that is taken arrive; what is refused changes nothing."""
    for entry in GIVEN:
        print(entry)  # the one that fails is the last
        call, name = GIVEN[entry]
        for kind, make in KINDS.items():
            if name == "versions":
                client.delete("versions")
                buffers["versions"] = client.create("versions", SHAPE, versions=2)
            else:
                buffers[name].fill(0)
            wanted = EXPANDED if kind == "tensor, expanded" else VALUES
            if PAGE[kind][0] == "refused":
                with pytest.raises(smb.InvalidArgumentError) as refused:
                    call(client, buffers, make())
                assert str(refused.value).count("\n") == 0, kind
                wanted = np.zeros(SHAPE)
            else:
                call(client, buffers, make())
            assert _content(buffers, name) == _of(wanted), kind


FILLED: dict[str, tuple[Callable[[smb.Client, dict[str, Any], Any], object], str]] = {
    "read": (lambda _, b, out: b["plain"].read(out=out), "plain"),
    "read of a part": (lambda _, b, out: b["plain"].read(0, 6, out=out), "plain"),
    "read, fewer bits": (lambda _, b, out: b["plain"].read(out=out, wire="bfloat16"), "plain"),
    "read_async": (lambda _, b, out: b["plain"].read_async(out=out).result(), "plain"),
    "queue.read": (lambda c, b, out: _read_by_queue(c, b["plain"], out), "plain"),
    "read_sparse": (lambda _, b, out: b["plain"].read_sparse([0, 1], rows=True, out=out), "plain"),
    "accumulate": (
        lambda _, b, out: b["plain"].accumulate(np.zeros(SHAPE, np.float32), fetch=True, out=out), "plain"
    ),
    "accumulate, feedback": (
        lambda _, b, out: b["plain"].accumulate(
            np.zeros(SHAPE, np.float32), fetch=True, out=out, feedback=smb.ErrorFeedback(b["plain"])
        ), "plain"
    ),
    "accumulate_async": (
        lambda _, b, out: b["plain"].accumulate_async(
            np.zeros(SHAPE, np.float32), fetch=True, out=out
        ).result(), "plain"
    ),
    "read of versions": (lambda _, b, out: b["versions"].read(out=out), "versions"),
    "read_version": (lambda _, b, out: b["versions"].read_version(out), "versions"),
    "pin.read": (lambda _, b, out: _read_pinned(b["versions"], out), "versions"),
    "tensor.read": (lambda _, b, out: b["tensors"].tensor("w").read(out=out), "tensors"),
    "tensor.read of bytes": (lambda _, b, out: b["bytes"].tensor("w").read(out=out), "bytes"),
}  # fmt: skip


def _read_by_queue(client: smb.Client, buffer: smb.Buffer, out: Any) -> None:
    with client.queue() as queue:
        queue.read(buffer, out=out).result()


def _read_pinned(buffer: smb.Buffer, out: Any) -> None:
    with buffer.pin() as pin:
        pin.read(out=out)


def test_filled(client: smb.Client, buffers: dict[str, Any]) -> None:
    """An array that is taken as out= has the buffer's values then; what is refused is as it was."""
    for entry in FILLED:
        print(entry)  # the one that fails is the last
        call, _ = FILLED[entry]
        buffers["plain"].write(7 * VALUES)
        buffers["versions"].publish(7 * VALUES)
        buffers["tensors"].tensor("w").write(7 * VALUES)
        buffers["bytes"].tensor("w").write(7 * VALUES)
        for kind, make in KINDS.items():
            out = make()
            if PAGE[kind][1] == "refused":
                with pytest.raises(smb.InvalidArgumentError) as refused:
                    call(client, buffers, out)
                assert str(refused.value).count("\n") == 0, kind
            else:
                call(client, buffers, out)
                assert _of(out.values if isinstance(out, _OnlyInterface) else out) == _of(7 * VALUES), kind


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_copied(kind: str) -> None:
    """An array is used where it is, or copied, as the page says; and the page has all kinds."""
    assert PAGE.keys() == KINDS.keys()
    for take, told in (
        (lambda array: readable(array, FLOAT32), PAGE[kind][0]),
        (lambda array: writable(array, FLOAT32, 6), PAGE[kind][1]),
    ):
        array = KINDS[kind]()
        if told == "refused":
            with pytest.raises(smb.InvalidArgumentError):
                take(array)
            continue
        memory = take(array)
        base = array.values if isinstance(array, _OnlyInterface) else array
        address = base.data_ptr() if isinstance(base, torch.Tensor) else np.asarray(base).__array_interface__["data"][0]
        from smb._engine import ffi

        assert (int(ffi.cast("uintptr_t", memory.pointer)) == address) == (told == "used")


def test_indices_are_arrays_too(client: smb.Client) -> None:
    """The indices of accumulate_sparse: masked ones are refused, strided and reversed memory is read by its values."""
    buffer = client.create("sparse", 6)
    one = np.ones(2, np.float32)
    for indices in (
        np.arange(6)[1:5:2],
        np.array([3, 1])[::-1],
        torch.tensor([1, 3]),
        torch._neg_view(-torch.tensor([1, 3])),
    ):
        buffer.fill(0)
        buffer.accumulate_sparse(indices, one)
        assert buffer.read().tolist() == [0, 1, 0, 1, 0, 0]
    for indices in (
        np.ma.masked_array([1, 3], mask=[0, 1]), np.array([1, 3], ">i8"), np.array([1, 3], np.int32),
        np.array([[1, 3]]), torch.empty(2, dtype=torch.int64, device="meta"),
    ):  # fmt: skip
        with pytest.raises(smb.InvalidArgumentError):
            buffer.accumulate_sparse(indices, one)
    with pytest.raises(smb.InvalidArgumentError):
        buffer.accumulate_sparse(np.array([1, 3]), one.reshape(1, 2))
    client.delete(buffer)


DTYPE_PAGE = table_of("arrays.md", "dtype")


def test_element_types(client: smb.Client) -> None:
    """A buffer of each dtype is written, filled, read and published; it takes the operations of the page, no others."""
    for name in DTYPES:
        print(name)  # the one that fails is the last
        assert DTYPE_PAGE.keys() == DTYPES.keys()
        arithmetic, bits, atomic = (word == "yes" for word in DTYPE_PAGE[name])
        numbers: list[Any] = (
            [True, False, True] if name == "bool" else [1 + 2j, 0, 1] if name == "complex64" else [1, 0, 2]
        )
        with_name = client.create(name, 3, name)
        kind = getattr(torch, name, None)
        assert client.open(name).dtype == DTYPES[name].numpy
        for given in (
            numbers,
            np.array(numbers).astype(with_name.dtype),
            torch.tensor(numbers).to(kind) if kind else [],
        ):
            if len(given):
                with_name.fill(0)
                with_name.write(given)
                assert with_name.read().tolist() == numbers
        with_name[1:] = numbers[0]
        assert with_name.read().tolist() == [numbers[0]] * 3
        if kind is not None:
            out = torch.zeros(3, dtype=kind)
            with_name.read(out=out)
            assert out.tolist() == [numbers[0]] * 3
        with_name.fill(numbers[0])
        one = np.array(numbers).astype(with_name.dtype)
        for op in OPS:
            taken = op == "replace" or (bits if op in BITS else arithmetic)
            with_name.fill(1)
            if taken:
                with_name.accumulate(one, op=op)
            else:
                with pytest.raises(smb.InvalidArgumentError, match=name):
                    with_name.accumulate(one, op=op)
                assert with_name.read().tolist() == [1, 1, 1]
        with_name.fill(0)
        if atomic:
            assert (with_name.fetch_add(1, 1), with_name.compare_swap(1, 1, 0)) == (0, 1)
        else:
            with pytest.raises(smb.InvalidArgumentError, match=name):
                with_name.fetch_add(1, 1)
        versions = client.create("versions", 3, name, versions=2)
        versions.publish(one)
        assert versions.read().tolist() == numbers
        for each in (with_name, versions):
            client.delete(each)


def test_numbers_that_a_dtype_cannot_hold(client: smb.Client) -> None:
    """They are refused, not changed: in lists, fill and assignment."""
    bad: list[tuple[str, Any]] = [
        ("bool", 2), ("bool", -1), ("bool", 0.5), ("int8", 128), ("uint16", -1), ("uint32", 2**32), ("uint64", 2**64),
        ("uint64", -1), ("int16", 0.5), ("uint64", 1j), ("float8_e4m3fn", 1j), ("complex64", "1"),
    ]  # fmt: skip
    for name, value in bad:
        buffer = client.create("holds", 2, name)
        calls: list[tuple[Callable[..., object], Any]] = [
            (buffer.fill, (value,)), (buffer.write, ([1, value],)), (buffer.__setitem__, (0, value))
        ]  # fmt: skip
        for call, arguments in calls:
            with pytest.raises(smb.InvalidArgumentError):
                call(*arguments)
        assert not buffer.read().any()
        client.delete(buffer)
    large = client.create("large", 2, "uint64")
    large.write([1, 2**63 + 1])  # numpy's array of these is of floats, which have no such number
    assert large.read().tolist() == [1, 2**63 + 1]
    large.fill(2**64 - 1)
    assert large.read().tolist() == [2**64 - 1] * 2
    client.delete(large)


def test_conjugates_of_named_tensors(client: smb.Client) -> None:
    """A complex tensor with the conjugate bit is written by its values, and filled with them; so are float8 ones."""
    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    buffer = client.create("c", tensors={"z": (2, "complex64"), "f": (2, "float8_e4m3fn"), "b": (2, "bool")})
    z, f = buffer.tensor("z"), buffer.tensor("f")
    z.write(values.conj())
    assert z.read().tolist() == [1 - 2j, 3 + 4j]
    out = torch.zeros(2, dtype=torch.complex64).conj()
    assert z.read(out=out) is out
    assert out.tolist() == [1 - 2j, 3 + 4j]
    small = torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn)
    f.write(small)
    got = torch.zeros(2).to(torch.float8_e4m3fn)
    f.read(out=got)
    assert got.float().tolist() == [0.5, -2.0]
    buffer.tensor("b").write(torch.tensor([True, False]))
    assert buffer.tensor("b").read().tolist() == [True, False]
    client.delete(buffer)
