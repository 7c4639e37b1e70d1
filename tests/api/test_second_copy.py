"""Buffers with two copies: what they do, what they refuse, and how they are shown."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import smb
from smb.call import dispatcher, unfinished_calls
from smb.call.cluster_session import ClusterSession
from smb.engine import Opcode, Request
from smb.tools.cli.main import app
from tests.support import second_copy
from tests.support.daemons import tidy, wait_for


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=2, capacity="32MiB") as made:
        yield made


@pytest.fixture
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with tidy(cluster, 20.0) as made:
        yield made


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_every_call_changes_both_copies(cluster: smb.LocalCluster, client: smb.Client, way: str) -> None:
    """Reads, writes, additions in every form, fills and the 64-bit operations; the copies are equal at rest."""
    count = 100_003
    buffer = client.create("floats", count, replicas=2)
    numbers = client.create("numbers", 100, "int64", replicas=2)
    with smb.connect(cluster.address, transport=way) as other:
        ours = other.open("floats")
        ours.write(np.arange(count, dtype=np.float32))
        ours.accumulate(np.ones(count, np.float32), scale=2.0)
        assert ours.accumulate(np.ones(10, np.float32), 5, fetch=True).tolist() == [8.0 + i for i in range(10)]
        ours.accumulate(np.ones(count, np.float32), wire="bfloat16")
        ours.accumulate_sparse([1, 90_000], [1.0, 2.0])
        expected = np.arange(count, dtype=np.float32) + 3
        expected[5:15] += 1
        expected[[1, 90_000]] += [1.0, 2.0]
        assert np.array_equal(ours.read(), expected)
        assert np.array_equal(buffer.read(), expected)
        whole = other.open("numbers")
        whole.fill(7)
        assert whole.fetch_add(3, 5) == 7
        assert whole.compare_swap(3, 12, 1) == 12
        assert [future.result() for future in (whole.write_async([2], 4), whole.read_async(4, 1))][1].tolist() == [2]
        assert set(ours.transports) == {"unix" if way == "auto" else "tcp"}
    assert numbers.read(2, 3).tolist() == [7, 1, 2]
    assert second_copy.check_copies(client, cluster.memory_directory) == len(buffer.layout.segments) + 1


@pytest.mark.parametrize("way", ["auto", "tcp"])
@pytest.mark.parametrize("versions", [1, 2, 3])
def test_versions_of_two_copies(cluster: smb.LocalCluster, client: smb.Client, way: str, versions: int) -> None:
    """What is published is waited for, read, pinned and read by its number, as with one copy."""
    count = 50_000
    buffer = client.create("news", count, "int64", stripe="64KiB", replicas=2, versions=versions)
    with smb.connect(cluster.address, transport=way) as other:
        theirs = other.open("news")
        assert theirs.version == 0
        for version in range(1, 5):
            assert buffer.publish(np.full(count, version)) == version
            assert theirs.wait(version) == theirs.version == version
            assert (theirs.read() == version).all()
        with pytest.raises(smb.TimeoutError):
            theirs.wait(5, timeout=0.01)
        if versions > 1:
            with theirs.pin() as pin:
                buffer.publish(np.full(count, 5))
                assert (pin.version, pin.read(0, 2).tolist()) == (4, [4, 4])
        if versions > 2:
            assert (theirs.read(version=4) == 4).all()
            with pytest.raises(smb.NotFoundError, match="was overwritten"):
                theirs.read(version=2)
    assert second_copy.check_copies(client, cluster.memory_directory) == len(buffer.layout.segments)


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_locks_of_two_copies(cluster: smb.LocalCluster, client: smb.Client, way: str) -> None:
    """One holder at a time, tokens that grow, and a change of a former holder that is refused."""
    buffer = client.create("w", 50_000, "int64", stripe="64KiB", replicas=2)
    ones = np.ones(50_000, np.int64)
    with smb.connect(cluster.address, transport=way) as other:
        theirs = other.open("w")
        former = theirs.lock(ttl=0.05).acquire()
        other._session.renewals.remove(former)
        lock = buffer.lock(timeout=20).acquire()
        assert lock.token > former.token
        with pytest.raises(smb.LockLostError):
            theirs.accumulate(ones, fence=former)
        buffer.accumulate(ones, fence=lock)
        with pytest.raises(smb.TimeoutError, match="holds it; nothing was done"):
            theirs.lock(timeout=0.01).acquire()
        lock.release()
        with theirs.lock(timeout=20) as later:
            assert later.token > former.token + 2
            theirs.accumulate(ones, fence=later)
    assert (buffer.read() == 2).all()


# ---- changes whose operands lie in other buffers

SIZE = 50_003
PLACES = {"beside": ["server-0", "server-1"], "apart": ["server-1", "server-0"]}


@pytest.mark.parametrize("known", [True, False], ids=["known", "told by servers"])
@pytest.mark.parametrize(("way", "checksum"), [("auto", False), ("tcp", False), ("tcp", True)])
def test_operands_of_other_buffers(
    cluster: smb.LocalCluster,
    client: smb.Client,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    checksum: bool,
    known: bool,
) -> None:
    """accumulate_from and steps of random ranges, from sources beside and apart, of one copy and of two:
    every element is what numpy says, and the copies are equal at rest. `known`: where the source lies.
    """
    if not known:  # as where one of them has just moved
        monkeypatch.setattr(ClusterSession, "server_of", lambda *_: "")
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, servers in PLACES.items():
        for replicas in (1, 2):
            made = client.create(f"{name}{replicas}", SIZE, servers=servers, stripe="64KiB", replicas=replicas)
            arrays[made.name] = rng.normal(size=SIZE).astype(np.float32)
            made.write(arrays[made.name])
    with smb.connect(cluster.address, transport=way, checksum=checksum) as other:
        buffers = {name: other.open(name) for name in arrays}
        for _ in range(40):
            name, source = (str(each) for each in rng.choice(list(arrays), 2, replace=False))
            if (name, source) in (("beside1", "apart1"), ("apart1", "beside1")):
                continue  # one copy each: these are not brought
            first, last = sorted(int(at) for at in rng.integers(0, SIZE + 1, 2))
            a, b, span = arrays[name], arrays[source], slice(first, last)
            scale = float(np.float32(rng.normal()))
            how = str(rng.choice(["sum", "elastic", "min", "sgd", "step", "several"]))
            given = {"offset": first, "count": last - first}
            if how in ("sgd", "step") and name.endswith("2"):
                if how == "sgd":
                    buffers[name].apply("sgd", buffers[source], lr=scale, weight_decay=0.5, **given)
                    a[span] -= np.float32(scale) * (b[span] + np.float32(0.5) * a[span])
                else:
                    buffers[name].apply("elastic", buffers[source], alpha=scale, **given)
                    a[span] += np.float32(scale) * (b[span] - a[span])
            elif how == "several":
                third = str(rng.choice(list(arrays)))
                if {name, third} == {"beside1", "apart1"}:
                    continue
                rounded = buffers[third].read(first, last - first, wire="int8")
                buffers[name].accumulate_from(
                    [buffers[source], buffers[third]],
                    op="replace",
                    scale=[scale, -2.0],
                    wire=["exact", "int8"],
                    **given,
                )
                a[span] = np.float32(scale) * b[span] + np.float32(-2) * rounded
            elif how in ("sum", "elastic", "min"):
                wire = str(rng.choice(["exact", "exact", "bfloat16", "int8", "int4"]))
                rounded = buffers[source].read(first, last - first, wire=wire)
                assert wire != "exact" or np.array_equal(rounded, b[span])
                buffers[name].accumulate_from(buffers[source], op=how, scale=scale, wire=wire, **given)
                s = np.float32(scale)
                a[span] = {
                    "sum": lambda a, b, s: a + s * b,
                    "elastic": lambda a, b, s: a + s * (b - a),
                    "min": lambda a, b, s: np.minimum(a, s * b),
                }[how](a[span], rounded, s)
        for name, buffer in buffers.items():
            np.testing.assert_array_equal(buffer.read(), arrays[name], err_msg=name)
    copied = [client.open(name).layout.segments for name in arrays if name.endswith("2")]
    assert second_copy.check_copies(client, cluster.memory_directory) == sum(map(len, copied))


@pytest.mark.parametrize("place", PLACES)
def test_operands_under_a_lock(client: smb.Client, place: str) -> None:
    """Under the buffer's lock they are combined, wherever the source lies; under one that was lost nothing is."""
    buffer = client.create("w", SIZE, servers=PLACES["beside"], replicas=2)
    source = client.create("g", SIZE, servers=PLACES[place], replicas=2)
    source.fill(2)
    with buffer.lock() as lock:
        buffer.accumulate_from(source, fence=lock)
        buffer.apply("sgd", source, lr=-1, fence=lock)
    former = buffer.lock(ttl=0.05).acquire()
    client._session.renewals.remove(former)
    with buffer.lock(timeout=20):
        for call in (
            lambda: buffer.accumulate_from(source, fence=former),
            lambda: buffer.apply("sgd", source, lr=-1, fence=former),
        ):
            with pytest.raises(smb.LockLostError):
                call()
    assert (buffer.read() == 4).all()


def test_a_source_that_is_gone_is_named(client: smb.Client) -> None:
    """It was deleted: nothing changes, and the next one is taken."""
    buffer, source = (client.create(name, SIZE, replicas=2) for name in ("w", "g"))
    source.fill(1)
    buffer.accumulate_from(source)
    client.delete("g")
    for call in (lambda: buffer.accumulate_from(source), lambda: buffer.apply("sgd", source, lr=-1)):
        with pytest.raises(smb.NotFoundError, match="buffer 'g' was deleted") as caught:
            call()
        assert caught.value.outcome == "not applied"
        assert buffer.settle(caught.value) == [range(SIZE)]
    assert (buffer.read() == 1).all()
    source = client.create("g", SIZE, replicas=2)
    source.fill(1)
    buffer.apply("sgd", source, lr=-1)
    assert (buffer.read() == 2).all()


@pytest.mark.parametrize("failing", ["the reading", "the change"])
def test_what_became_of_a_change_whose_source_is_brought(
    client: smb.Client, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """It is brought in parts, and the third one fails: settle names what was not applied, and that once more is all."""
    buffer = client.create("w", SIZE, servers=PLACES["beside"], stripe="16KiB", replicas=2)
    source = client.create("g", SIZE, servers=PLACES["apart"], stripe="16KiB", replicas=2)
    source.fill(1)
    monkeypatch.setattr(unfinished_calls, "BROUGHT_BYTES", buffer.layout.chunk_bytes)
    fails = (source if failing == "the reading" else buffer)._dispatcher
    whole, calls = type(fails).call, 0

    def call(self: dispatcher.Dispatcher, request: Request, **given: Any) -> int:
        nonlocal calls
        calls += self is fails and request.opcode in (Opcode.READ, Opcode.ACCUMULATE)
        if calls == 3:
            calls += 1
            raise smb.UnavailableError("the network is down")
        return whole(self, request, **given)

    monkeypatch.setattr(type(fails), "call", call)
    with pytest.raises(smb.UnavailableError, match=r"^accumulate_from of buffer 'w', .* the network is down") as caught:
        buffer.accumulate_from(source)
    assert caught.value.outcome == "unknown"
    missing = buffer.settle(caught.value)
    done = 2 * buffer.layout.chunk_bytes // 4
    assert missing == [range(done, SIZE)]
    assert buffer.read()[:done].all()
    assert not buffer.read()[done:].any()
    for part in missing:
        buffer.accumulate_from(source, offset=part.start, count=len(part))
    assert (buffer.read() == 1).all()


def test_what_is_not_there_yet_is_refused_with_a_sentence(cluster: smb.LocalCluster, client: smb.Client) -> None:
    """Nothing is accepted and ignored."""
    buffer = client.create("w", 1000, replicas=2)
    like = client.create("v", 1000, like=buffer, replicas=1)
    state = client.create("m", like=buffer)
    assert [each.info.replicas for each in (buffer, like, state)] == [2, 1, 2]
    for call, told in (
        (lambda: buffer.view(), "cannot be mapped; use read"),
        (lambda: buffer.apply("momentum", like, state, lr=0.1, mu=0.9), "create it with state_of='w'"),
        (lambda: like.apply("sgd", buffer, lr=0.1), "has two copies but the weights have one"),
        (lambda: buffer.accumulate_from(client.create("n", 1000, stripe="4KiB")), "create it with like='w'"),
        (lambda: buffer.apply("sgd", buffer, lr=0.1), "must be different buffers"),
    ):
        with pytest.raises(smb.InvalidArgumentError, match=told):
            call()
    buffer.apply("sgd", state, lr=0.1)  # beside them, one that can be
    with smb.connect(cluster.address, transport="shm") as other:
        with pytest.raises(smb.TransportError, match="two copies"):
            other.open("w").read()
        with pytest.raises(
            smb.InvalidArgumentError, match=r"create 'shm': a buffer with two copies .* transport='auto'"
        ):
            other.create("shm", 1000, replicas=2)
    for wrong in (0, 3, True):
        with pytest.raises(smb.InvalidArgumentError, match=f"replicas must be 1 or 2, not {wrong}"):
            client.create("wrong", 1000, replicas=wrong)
    with pytest.raises(smb.AlreadyExistsError, match="replicas 2, not 1"):
        client.create("w", 1000, exist_ok=True)


def test_a_buffer_that_is_deleted_is_gone_for_its_users(cluster: smb.LocalCluster, client: smb.Client) -> None:
    """They are told so at once, and not only when their time is over."""
    client.create("w", 1000, replicas=2).write(np.ones(1000, np.float32))
    with smb.connect(cluster.address, timeout=20) as other:
        theirs = other.open("w")
        assert theirs.read()[0] == 1
        client.delete("w")
        with pytest.raises(smb.NotFoundError, match="deleted"):
            theirs.accumulate(np.ones(1000, np.float32))


def test_a_lost_copy_is_shown(client: smb.Client, cluster: smb.LocalCluster) -> None:
    """smb stat says how many copies there are, and where. Last: a server of the cluster dies."""

    def shown(*options: str, command: tuple[str, ...] = ("stat", "w")) -> str:
        answer = CliRunner().invoke(app, [*command, "--coordinator", cluster.address, *options])
        assert answer.exit_code == 0, answer.output
        return answer.output

    client.create("w", 1000, replicas=2).write(np.ones(1000, np.float32))
    described = json.loads(shown("--json"))
    assert described["replicas"] == 2
    assert {described["segments"][0][key] for key in ("server", "backup")} == {"server-0", "server-1"}
    assert "degraded" not in shown()
    assert "with one copy" not in shown(command=("status",))
    victim = next(server for server in cluster.servers if server.name == described["segments"][0]["server"])
    victim.kill()
    wait_for(lambda: "degraded: 1 of 1 segments have one" in shown(), "a lost copy")
    assert "1 buffer with one copy of two in some part: w" in shown(command=("status",))
    assert json.loads(shown("--json", command=("status",)))["totals"]["degraded"] == ["w"]
    assert client.open("w").read()[0] == 1
