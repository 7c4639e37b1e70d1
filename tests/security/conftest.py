"""What the tests of access share: a lab's certificates, and a cluster that asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import smb
from smb.security.lab_ca import Authority, Holder, make_set
from smb.security.roles import Role

ConnectAs = Callable[..., smb.Client]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as `smb certs` makes it, with a client and a reader of the namespace "team" beside the usual ones,
    one that has expired, and a whole other authority in `other`.
    """
    place = tmp_path_factory.mktemp("credentials")
    holders = [
        *(Holder(role, "") for role in (Role.COORDINATOR, Role.CLIENT, Role.READER, Role.OPERATOR)),
        *(Holder(Role.SERVER, f"server-{index}") for index in range(3)),
        Holder(Role.CLIENT, "of-team", ("team",)),
        Holder(Role.READER, "reader-of-team", ("team",)),
    ]
    make_set(place, holders)
    Authority.load(place / "ca").issue(Holder(Role.OPERATOR, ""), place / "expired", days=-1)
    make_set(place / "other", [Holder(Role.OPERATOR, "")])
    return place


@pytest.fixture(scope="module")
def guarded(certificates: Path) -> Iterator[smb.LocalCluster]:
    """Two memory servers and a coordinator with credentials."""
    with smb.LocalCluster(servers=2, capacity="32MiB", credentials=certificates) as running:
        yield running


@pytest.fixture
def connect_as(guarded: smb.LocalCluster, certificates: Path) -> Iterator[ConnectAs]:
    """Connect with the certificate of that name; clients are closed, and all buffers deleted, at the end."""
    clients: list[smb.Client] = []

    def make(who: str = "client", transport: str = "auto", **options: float) -> smb.Client:
        clients.append(smb.connect(guarded.address, transport=transport, credentials=certificates / who, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
    with smb.connect(guarded.address, credentials=certificates / "operator") as last:
        for buffer in last.list():
            last.delete(buffer.name, missing_ok=True)
