"""Verbs where tokens are asked for, over real devices: who has one goes past the server, a reader reads, others not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import Role
from smb.transport.base import Deadline
from smb.transport.verbs.devices import Port
from tests.support.transports import SLOWNESS
from tests.verbs.test_daemons import on

COUNT = 100_003
TIMEOUT_S = 20.0 * SLOWNESS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `smb certs` makes them."""
    place = tmp_path_factory.mktemp("credentials")
    roles = (Role.COORDINATOR, Role.CLIENT, Role.READER)
    make_set(place, [*(Holder(role, "") for role in roles), Holder(Role.SERVER, "server-0")])
    return place


@pytest.fixture(scope="module")
def guarded(certificates: Path, ports: tuple[Port, Port]) -> Iterator[smb.LocalCluster]:
    """A memory server on one device, with credentials; clients are on the other."""
    with (
        on(ports[0]),
        smb.LocalCluster(servers=1, capacity="32MiB", credentials=certificates) as running,
        on(ports[1]),
    ):
        yield running


@pytest.mark.verbs("tokens: queue pair and keys by proof, renewed; a reader's keys read")
def test_tokens_give_keys(guarded: smb.LocalCluster, certificates: Path) -> None:
    """A client's reads and writes are one-sided, also after its token was renewed and after its queue pair broke; a
    reader's reads are, and it may not write; keys whose token is gone take the next read through the gate."""
    array = np.arange(COUNT)
    with (
        smb.connect(guarded.address, transport="verbs", timeout=TIMEOUT_S, credentials=certificates / "client") as one,
        smb.connect(guarded.address, transport="verbs", timeout=TIMEOUT_S, credentials=certificates / "reader") as two,
    ):
        buffer = one.create("w", COUNT, "int64")
        buffer.write(array)
        buffer.accumulate(array)
        (carrier,) = one._session.verbs.carriers()
        assert carrier.one_sided_bytes == array.nbytes

        np.testing.assert_array_equal(two.open("w").read(), 2 * array)
        assert two._session.verbs.carriers()[0].one_sided_bytes == array.nbytes
        assert [right.writable for right in two._session.verbs._servers["server-0"].rights.values()] == [False]
        for change in (two.open("w").write, two.open("w").accumulate):
            with pytest.raises(smb.PermissionDeniedError, match=r"'w'.*may only read the buffer; nothing was applied"):
                change(array)

        tokens = one._session.coordinator.tokens
        for opened in tokens._opened.values():
            opened.renew_at = 0.0
        tokens.renew()
        buffer.write(array)
        assert carrier.one_sided_bytes == 2 * array.nbytes

        one._session.verbs._parts.progress._call(carrier.close)  # type: ignore[union-attr]
        np.testing.assert_array_equal(buffer.read(), array)
        buffer.accumulate(array)
        np.testing.assert_array_equal(buffer.read(), 2 * array)
        assert buffer.transports == ("verbs",)
        place = buffer.layout.segments[0]
        server = one._session.verbs._servers["server-0"]
        assert one._session.verbs._ask_right(
            server, place.control_address, place.id, buffer.layout.epoch, Deadline(30)
        ).writable
        tokens._forget(next(iter(tokens._opened)))
        assert not server.rights
        one.delete("w")


@pytest.mark.verbs("with TLS for data over TCP, and with proofs alone: one-sided, gated and waiting calls")
@pytest.mark.parametrize("data_tls", ["auto", "off"])
def test_calls_of_each_kind_beside_each_form_of_tcp(
    data_tls: str, certificates: Path, ports: tuple[Port, Port]
) -> None:
    """What is one-sided, or passes the gate, goes over RDMA; what waits over TCP, inside TLS or after proofs."""
    array = np.arange(COUNT)
    with (
        on(ports[0]),
        smb.LocalCluster(servers=1, capacity="32MiB", credentials=certificates, data_tls=data_tls) as cluster,
        on(ports[1]),
        smb.connect(cluster.address, transport="verbs", timeout=TIMEOUT_S, credentials=certificates / "client") as one,
    ):
        buffer = one.create("w", COUNT, "int64")
        buffer.write(array)
        with buffer.lock() as lock:
            buffer.write(array, fence=lock)
            buffer.accumulate(array, fence=lock)
        assert buffer.fetch_add(0, 5) == 0
        np.testing.assert_array_equal(buffer.read()[1:], 2 * array[1:])
        assert buffer.transports == ("verbs",)
        (carrier,) = one._session.verbs.carriers()
        assert carrier.one_sided_bytes == 2 * array.nbytes
        assert buffer.layout.segments[0].tls is (data_tls == "auto")


@pytest.mark.verbs("no RDMA where data goes over TLS alone")
def test_none_where_data_is_to_be_encrypted(certificates: Path, ports: tuple[Port, Port]) -> None:
    """With --data-tls on a server offers no queue pair, and says why; over TCP it serves."""
    with (
        on(ports[0]),
        smb.LocalCluster(servers=1, capacity="32MiB", credentials=certificates, data_tls="on") as cluster,
        on(ports[1]),
        smb.connect(cluster.address, transport="verbs", timeout=TIMEOUT_S, credentials=certificates / "client") as one,
        smb.connect(cluster.address, transport="tcp", timeout=TIMEOUT_S, credentials=certificates / "client") as two,
    ):
        buffer = one.create("w", COUNT, "int64")
        with pytest.raises(smb.TransportError, match="RDMA is not encrypted"):
            buffer.read()
        assert two.open("w").read().sum() == 0
