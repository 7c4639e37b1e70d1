"""Each error class of the design, provoked through the public API; the message says what, of whom, and what next."""

from __future__ import annotations

import builtins
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import smb
from tests.conftest import Connect
from tests.support.daemons import stopped, wait_for
from tests.support.transports import FAR


def test_classes_are_pythons_too() -> None:
    """Whoever catches Python's own classes catches ours, and smb.Error catches all of them."""
    for ours, pythons in (
        (smb.NotFoundError, KeyError),
        (smb.OutOfMemoryError, MemoryError),
        (smb.UnavailableError, ConnectionError),
        (smb.TimeoutError, builtins.TimeoutError),
        (smb.InvalidArgumentError, ValueError),
    ):
        assert issubclass(ours, pythons)
    for name in smb.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(smb, name), smb.Error)
    assert str(smb.NotFoundError("plain text")) == "plain text"


# ---- names


def test_what_is_not_there(client: smb.Client) -> None:
    """open and delete of a name that nobody made say the name; missing_ok says nothing."""
    for call in (client.open, client.delete):
        with pytest.raises(smb.NotFoundError, match="nobody/made/this"):
            call("nobody/made/this")
    client.delete("nobody/made/this", missing_ok=True)


def test_what_is_there_already(client: smb.Client) -> None:
    """A second create is refused with the way out, and with exist_ok for another shape or dtype too."""
    client.create("w", (2, 3)).fill(1)
    with pytest.raises(smb.AlreadyExistsError, match=r"w.*exist_ok"):
        client.create("w", (2, 3))
    for shape, dtype in (((3, 2), "float32"), ((2, 3), "float64")):
        with pytest.raises(smb.AlreadyExistsError, match="w"):
            client.create("w", shape, dtype, exist_ok=True)
    assert client.create("w", (2, 3), exist_ok=True).read().sum() == 6


# ---- capacity


def test_more_than_there_is(client: smb.Client) -> None:
    """A buffer beyond the capacity says what is free on which server; nothing stays behind, and one that fits works."""
    before = client.servers()
    for shape, servers in ((200 << 20, None), (65 << 20, ["server-1"]), (2**55, 3), ((2**40, 2**40), None)):
        with pytest.raises(smb.OutOfMemoryError, match=r"create of .huge.: .*free: .*server-1 .*MiB"):
            client.create("huge", shape, "uint8", servers=servers)
    assert client.list() == []
    assert [server.used for server in client.servers()] == [server.used for server in before]
    client.create("fits", 60 << 20, "uint8", servers=["server-1"])
    assert client.open("fits").read((60 << 20) - 1)[0] == 0


# ---- bad arguments


BAD_CREATIONS: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name"),
    ({"name": "/a"}, "name"),
    ({"name": "a/../b"}, "name"),
    ({"name": "a b"}, "name"),
    ({"name": "a\ud800"}, "name"),
    ({"name": 5}, "name"),
    ({"shape": None}, "shape"),
    ({"shape": (3, -1)}, "shape"),
    ({"shape": 2.5}, "shape"),
    ({"shape": "ab"}, "shape"),
    ({"shape": (2**60,)}, "shape"),
    ({"shape": (1,) * 40}, "extents"),
    ({"dtype": "complex128"}, "supported are float16"),
    ({"dtype": object()}, "supported are float16"),
    ({"stripe": 5000}, "multiple of 4096"),
    ({"stripe": 0}, "stripe"),
    ({"stripe": -4096}, "size"),
    ({"stripe": "much"}, "a size must be"),
    ({"servers": 0}, "servers"),
    ({"servers": -1}, "servers"),
    ({"servers": True}, "servers"),
    ({"servers": 1.5}, "servers"),
    ({"servers": []}, "servers"),
    ({"servers": [1, 2]}, "name"),
    ({"servers": ["server-0", "server-0"]}, "once"),
    ({"replicas": 3}, "replicas must be 1 or 2, not 3"),
    ({"versions": 0}, "versions must be an integer from 1 to 16, not 0"),
    ({"versions": 17}, "versions must be an integer from 1 to 16, not 17"),
    ({"like": 5}, "name"),
]


def test_creations_that_cannot_be(connect: Connect) -> None:
    """Every wish that cannot be meant, or is not there yet, is refused with its reason, and leaves no buffer."""
    client = connect()
    for wish, told in BAD_CREATIONS:
        print(wish)  # the one that fails is the last
        with pytest.raises(smb.InvalidArgumentError, match=told):
            client.create(**{"name": "w", "shape": (4,), **wish})
        assert client.list() == []
        assert client.create("w", (4,)).size == 4
        client.delete("w")


def test_servers_that_are_not_there(connect: Connect) -> None:
    """More servers than live are unavailable, one of another name is a mistake; both name those that are there."""
    client = connect()
    with pytest.raises(smb.UnavailableError, match=r"99.*server-0, server-1, server-2"):
        client.create("w", 5, servers=99)
    with pytest.raises(smb.InvalidArgumentError, match=r"nobody.*server-0, server-1, server-2"):
        client.create("w", 5, servers=["nobody"])
    assert client.list() == []


def test_like_allows_no_contradiction(client: smb.Client) -> None:
    """Shape, dtype, servers or stripe that contradict like= are refused; equal ones are fine."""
    model = client.create("model", (4, 4), "float64")
    for wish, told in (
        ({"shape": (16,)}, "differs from"),
        ({"dtype": "float32"}, "differs from"),
        ({"servers": 1}, "leave both out"),
        ({"stripe": 8192}, "leave both out"),
    ):
        with pytest.raises(smb.InvalidArgumentError, match=told):
            client.create("w", like=model, **wish)  # type: ignore[arg-type]
    with pytest.raises(smb.NotFoundError, match="nobody"):
        client.create("w", like="nobody")
    assert client.create("w", (4, 4), "float64", like=model).shape == (4, 4)


BAD_CALLS: list[tuple[Callable[[smb.Buffer], Any], str]] = [
    (lambda w: w.read(-1), "from element -1"),
    (lambda w: w.read(11), "from element 11"),
    (lambda w: w.read(0, 11), "11 elements from element 0 are not inside the buffer's 10"),
    (lambda w: w.read(11, 0), "0 elements from element 11"),
    (lambda w: w.read(0, -1), "-1 elements"),
    (lambda w: w.read(5, 6), "6 elements from element 5"),
    (lambda w: w.read(2**70), "not inside"),
    (lambda w: w.read(1.5), "must be integers"),  # type: ignore[arg-type]
    (lambda w: w.read(0, 2.0), "must be integers"),  # type: ignore[arg-type]
    (lambda w: w.read("0"), "must be integers"),  # type: ignore[arg-type]
    (lambda w: w.read(out=np.empty(9, np.float32)), "has 9 elements but 10"),
    (
        lambda w: w.read(out=np.empty(10)),
        "read of buffer 'w': out= is float64 but the buffer is float32; pass an array of float32",
    ),
    (lambda w: w.read(out=np.empty(20, np.float32)[::2]), "not contiguous"),
    (lambda w: w.write(np.ones(11, np.float32)), "the array has 11 elements but the buffer has 10; .* offset="),
    (lambda w: w.write(np.ones(9, np.float32)), "the array has 9 elements but the buffer has 10; .* offset="),
    (lambda w: w.accumulate([1.0]), "the array has 1 elements but the buffer has 10; .* offset="),
    (lambda w: w.write(np.ones(11, np.float32), 0), "11 elements from element 0"),
    (
        lambda w: w.write(np.ones((2, 5), np.float32)),
        r"the array has the shape \(2, 5\) but the buffer has \(10,\); .*reshape",
    ),
    (lambda w: w.write(np.ones((2, 2), np.float32), 3), r"the array has the shape \(2, 2\) but the buffer has \(10,\)"),
    (
        lambda w: w.accumulate(np.ones((10, 1), np.float32), fetch=True),
        r"the shape \(10, 1\) but the buffer has \(10,\)",
    ),
    (lambda w: w.publish(np.ones((5, 2), np.float32)), r"the shape \(5, 2\) but the buffer has \(10,\)"),
    (lambda w: w.write(np.ones(2, np.float32), 9), "2 elements from element 9"),
    (lambda w: w.write([], 11), "0 elements from element 11"),
    (
        lambda w: w.write(np.ones(10)),
        r"write of buffer 'w': .* float64 but the buffer is float32; .*astype\('float32'\)",
    ),
    (lambda w: w.write(torch.ones(10, dtype=torch.bfloat16)), r"buffer 'w': .*bfloat16 but .*float32; .*\.float\(\)"),
    (lambda w: w.accumulate(np.ones(10)), "accumulate of buffer 'w': the array is float64"),
    (lambda w: w.publish(np.ones(10)), "publish of buffer 'w': the array is float64"),
    (lambda w: w.write("text"), "float32"),
    (lambda w: w.write(object()), "float32"),
    (lambda w: w.fill("1"), "fill of buffer 'w': value must be a number that float32 can hold, not '1'"),  # type: ignore[arg-type]
    (lambda w: w.fill([1, 2]), "a number that float32 can hold"),  # type: ignore[arg-type]
    (lambda w: w.fill(1j), "a number that float32 can hold"),  # type: ignore[arg-type]
    (lambda w: w.accumulate(np.ones(10), scale=2), "float64"),
    (lambda w: w.accumulate(np.ones(11, np.float32)), "11 elements"),
    (lambda w: w.accumulate([1], op="mean"), "unknown op 'mean'; known are sum"),
    (lambda w: w.accumulate([1], scale="2"), "scale must be a number, not '2'"),  # type: ignore[arg-type]
    (lambda w: w.accumulate([1], scale=np.ma.masked), "scale is a masked value"),  # type: ignore[arg-type]
    (lambda w: w.fill(None), "can hold, not None"),  # type: ignore[arg-type]
    (lambda w: w.fill(np.void(b"1234")), "can hold, not "),  # type: ignore[arg-type]
    (lambda w: w.accumulate([1], scale=1j), "must be a number"),  # type: ignore[arg-type]
    (lambda w: w.accumulate([1], scale=10**400), "must be a number"),
    (lambda w: w.accumulate_from([1.0]), "opened by the same client"),  # type: ignore[arg-type]
    (lambda w: w.accumulate_from(w, wire="int9"), "unknown wire 'int9'; known are exact"),
    (lambda w: w.write(np.ones(10, np.float32), fence="x"), "fence= takes a lock that a buffer's lock"),  # type: ignore[arg-type]
    (lambda w: w.accumulate_from([w, w]), "only op='replace' takes several buffers, 2 to 5 of them; op='sum' with 2"),
    (lambda w: w.accumulate_from([w] * 6, op="replace"), "op='replace' with 6"),
    (lambda w: w.accumulate_from([], op="replace"), "op='replace' with 0"),
    (lambda w: w.accumulate_from([w, w], op="replace", scale=[1.0]), "2 buffers, 1 scales and 2 wires were passed"),
    (lambda w: w.accumulate_from([w, w], op="replace", scale=[1, "2"]), "scale must be a number, not '2'"),
    (lambda w: w.accumulate_from([w, w], op="replace", wire=["exact", "int9"]), "unknown wire 'int9'"),
    (lambda w: w.fetch_add(0, "1"), "values must be numbers, not '1'"),  # type: ignore[type-var]
    (lambda w: w.compare_swap(0, None, 1.0), "values must be numbers, not None"),  # type: ignore[type-var]
    (lambda w: w.accumulate([1], op="band"), "combines the bits of whole numbers and bool, with scale=1; .* float32"),
]


def test_calls_that_cannot_be(client: smb.Client) -> None:
    """A range, array, op or number that cannot be meant is refused before anything is done."""
    buffer = client.create("w", 10)
    buffer.fill(7)
    for call, told in BAD_CALLS:
        print(told)
        with pytest.raises(smb.InvalidArgumentError, match=told):
            call(buffer)
        assert (buffer.read() == 7).all()


BAD_INTEGER_CALLS: list[tuple[Callable[[smb.Buffer], Any], str]] = [
    (lambda c: c.accumulate_from(c, wire="int8"), "wire='int8' is for float32 buffers, and this one is int64"),
    (lambda c: c.fetch_add(10, 1), "1 elements from element 10"),
    (lambda c: c.fetch_add(-1, 1), "element -1"),
    (lambda c: c.fetch_add(0, 2**63), "does not fit into 64 bits"),
    (lambda c: c.fetch_add(0, 1.5), "must be integers"),  # type: ignore[arg-type]
    (lambda c: c.compare_swap(0, 0, -(2**63) - 1), "does not fit into 64 bits"),
    (lambda c: c.compare_swap(0, "0", 1), "must be integers"),  # type: ignore[arg-type]
    (lambda c: c.accumulate([1], op="bor", scale=2), "with scale=1; this buffer is int64, and scale=2 was asked"),
    (lambda c: c.accumulate([1], scale=0.5), "integer buffers take integer scales"),
    (lambda c: c.accumulate([1], scale=2**63), "integer scales"),
    (lambda c: c.accumulate([1], scale=2**53 + 1), "a double holds exactly"),
    (lambda c: c.accumulate([1], scale=float("nan")), "integer scales"),
    (lambda c: c.accumulate([1], scale=float("inf")), "integer scales"),
    (lambda c: c.fill(1.5), "a number that int64 can hold"),
    (lambda c: c.fill(2**63), "a number that int64 can hold"),
    (lambda c: c.fill(float("nan")), "a number that int64 can hold"),
    (lambda c: c.write([0.5]), "int64"),
]


def test_integer_calls_that_cannot_be(client: smb.Client) -> None:
    """What 64-bit integers cannot hold exactly is refused, not rounded."""
    buffer = client.create("c", 10, "int64")
    for call, told in BAD_INTEGER_CALLS:
        print(told)
        with pytest.raises(smb.InvalidArgumentError, match=told):
            call(buffer)
        assert not buffer.read().any()


def test_buffers_that_lie_apart_are_not_combined(client: smb.Client, connect: Connect) -> None:
    """accumulate_from refuses another placement, dtype or client, and says how to make one that fits."""
    a = client.create("a", 100_000, "float32", servers=["server-0", "server-1"])
    for name, dtype, servers in (("b", "float32", ["server-1", "server-0"]), ("c", "int32", ["server-0", "server-1"])):
        with pytest.raises(smb.InvalidArgumentError, match="create it with like='a'"):
            a.accumulate_from(client.create(name, 100_000, dtype, servers=servers))
    with pytest.raises(smb.InvalidArgumentError, match="opened by the same client"):
        a.accumulate_from(connect().open("b"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"transport": "pigeon"}, "transport must be one of auto, shm, verbs, tcp, not 'pigeon'"),
        ({"timeout": 0}, "timeout must be a number of seconds"),
        ({"timeout": -1}, "timeout must be a number of seconds"),
        ({"timeout": float("nan")}, "timeout must be a number of seconds"),
        ({"timeout": float("inf")}, "timeout must be a number of seconds"),
        ({"timeout": None}, "timeout must be a number of seconds"),
        ({"timeout": "5"}, "timeout must be a number of seconds"),
    ],
)
def test_connections_that_cannot_be(cluster: smb.LocalCluster, options: dict[str, Any], told: str) -> None:
    """A transport that is not there and a timeout that is no time are refused before anything is opened."""
    with pytest.raises(smb.InvalidArgumentError, match=told):
        smb.connect(cluster.address, **options)


def test_times_to_wait_that_cannot_be(client: smb.Client) -> None:
    """open(timeout=) takes seconds from 0 on."""
    for timeout in (-1, float("nan"), float("inf"), "5", None):
        with pytest.raises(smb.InvalidArgumentError, match="timeout must be a number of seconds"):
            client.open("w", timeout=timeout)  # type: ignore[arg-type]


# ---- nobody there


def test_no_coordinator() -> None:
    """Where nobody listens, connect says the address and what to check, at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(smb.UnavailableError, match=rf"127.0.0.1:{port}.*check that it runs"):
        smb.connect(f"127.0.0.1:{port}", timeout=5)
    for address in ("nowhere", "host:", ":1", "host:99999"):
        with pytest.raises(smb.InvalidArgumentError, match=r"an address must be HOST:PORT|must be from 0 to 65535"):
            smb.connect(address)


def test_what_answers_is_no_coordinator(cluster: smb.LocalCluster, connect: Connect) -> None:
    """A memory server's ports, for data and for control, are told from nobody's; no traceback of gRPC's is chained."""
    server = connect()._session.coordinator.list_servers(5)[0]
    for address in (server.data_address, server.control_address):
        with pytest.raises(
            smb.UnavailableError, match=f"{address} .*a program that is not a coordinator listens there"
        ) as raised:
            smb.connect(address, timeout=5)
        assert raised.value.__suppress_context__
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(smb.UnavailableError, match="refused") as raised:
        smb.connect(f"127.0.0.1:{port}", timeout=5)
    assert raised.value.__suppress_context__
    assert raised.value.__cause__ is None


def test_a_coordinator_that_does_not_answer() -> None:
    """One that accepts and says nothing is given up with a TimeoutError or UnavailableError within the timeout."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises((smb.TimeoutError, smb.UnavailableError), match=r"127\.0\.0\.1.*check that it runs"),
    ):
        smb.connect(f"127.0.0.1:{listener.getsockname()[1]}", timeout=0.3)


def test_after_close(client: smb.Client) -> None:
    """Every call on a closed client, or on its buffers, is an UnavailableError; closing again is fine."""
    buffer = client.create("w", 5)
    buffer.fill(1)
    client.close()
    client.close()
    calls: list[Callable[[], Any]] = [
        buffer.read, lambda: buffer.accumulate([1.0], 0), lambda: buffer.read_async(), lambda: client.open("w"),
        lambda: client.create("v", 5), client.list, client.servers, lambda: client.delete("w"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(smb.UnavailableError, match="closed"):
            call()


def test_a_server_that_hangs(connect: Connect, cluster: smb.LocalCluster) -> None:
    """While a server is stopped, TCP calls end within their timeout and name it; shm goes on; afterwards all works."""
    far, near = connect(FAR, timeout=1), connect("shm")
    buffer = far.create("w", 1000, servers=["server-1"])
    local = near.open("w")
    other = connect(FAR, timeout=1).open("w")
    for each in (buffer, local, other):
        each.fill(1)
    with stopped(cluster.servers[1].pid):
        with pytest.raises(smb.TimeoutError, match=r"read of buffer 'w'.*server-1 at 127\..*within 1 s"):
            buffer.read()
        with pytest.raises(smb.TimeoutError, match=r"accumulate of buffer 'w'.*outcome unknown"):
            other.accumulate([1.0], 0)
        local.accumulate([1.0], 0)
        assert local.read(0, 1)[0] == 2
    found = wait_for(lambda: _try(lambda: buffer.read(0, 1)), "answer")
    assert found[0] in (2, 3)


def _try(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (smb.TimeoutError, smb.UnavailableError):
        return None
