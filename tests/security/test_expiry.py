"""Certificates end: their metric, the doctor's line; and whose namespaces `smb certs` gives to whom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import smb
from smb.errors import InvalidArgumentError
from smb.security.credentials import Current, load_directory
from smb.security.expiry import DAY_S, days_left, ends_of, expires_at
from smb.security.lab_ca import Authority, Holder
from smb.security.roles import Callers, Role
from smb.tools.cli.certs import limits_of
from smb.tools.cli.main import app
from smb.tools.doctor import Severity
from smb.tools.doctor.reach import _certificates
from tests.support.daemons import Daemons, running_daemons

x509 = pytest.importorskip("cryptography.x509")


@pytest.mark.parametrize("days", [-1, 1, 29.5, 365, 3650, 20_000])
def test_the_end_is_what_cryptography_reads(tmp_path: Path, days: float) -> None:
    """In both forms in which a certificate writes a time: from 2050 on it is the other one."""
    Authority.make().save(tmp_path / "ca")
    Authority.load(tmp_path / "ca").issue(Holder(Role.CLIENT, "one"), tmp_path / "one", days)
    pem = (tmp_path / "one" / "cert.pem").read_bytes()
    assert expires_at(pem) == x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
    assert abs(days_left(expires_at(pem)) - days) < 0.01
    assert expires_at(b"text before\n" + pem + pem) == expires_at(pem)


@pytest.mark.parametrize("cut", [0, 1, 5, 40, 120, 200])
def test_what_is_no_certificate_has_no_end(cut: int, certificates: Path) -> None:
    """Nothing, and one that is cut off anywhere, is an error of ours."""
    lines = (certificates / "client" / "cert.pem").read_bytes().splitlines()
    body = b"".join(lines[1:-1])[: cut // 4 * 4]
    with pytest.raises(InvalidArgumentError, match="the end of the certificate cannot be read"):
        expires_at(lines[0] + b"\n" + body + b"\n" + lines[-1] if cut else b"")


def test_the_doctor_tells_when_certificates_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A month is advice, a week is a problem, as with the alerts; without credentials nothing is said."""
    assert list(_certificates()) == []
    Authority.make().save(tmp_path / "ca")
    for days, state in ((300, Severity.OK), (29, Severity.ADVICE), (6, Severity.PROBLEM), (-2, Severity.PROBLEM)):
        place = tmp_path / str(days)
        Authority.load(tmp_path / "ca").issue(Holder(Role.CLIENT, ""), place, days)
        monkeypatch.setenv("SMB_CREDENTIALS", str(place))
        own, authority = _certificates()
        assert own.state is state, own
        assert str(place / "cert.pem") in own.found
        assert authority.state is Severity.OK


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with running_daemons(tmp_path) as running:
        yield running


def test_every_daemon_tells_when_its_certificates_end(certificates: Path, daemons: Daemons) -> None:
    """Coordinator and memory server, of their own and of the authority's; a control port that was asked for is the one
    that the coordinator makes segments through."""
    coordinator = daemons.coordinator("127.0.0.1:0", None, "--credentials", str(certificates / "coordinator"))
    server = daemons.memory_server(coordinator.address, "server-0", "--credentials", str(certificates / "server-0"))
    assert server.address
    for daemon, name in ((coordinator, "coordinator"), (server, "server-0")):
        for whose, end in ends_of(load_directory(certificates / name)).items():
            assert daemon.metric(f'smb_certificate_expiry_timestamp_seconds{{certificate="{whose}"}}') == end
            assert end > time.time() + 300 * DAY_S


def test_a_namespace_is_for_those_right_before_it() -> None:
    """Each --client and --reader has the namespaces that follow it; several in a row share them."""
    assert limits_of(["--client", "a", "--namespace", "x", "--client", "b", "--namespace", "y"]) == {
        "a": ("x",),
        "b": ("y",),
    }
    assert limits_of(["d", "--client", "a", "--reader=b", "--namespace=x", "--namespace", "y", "--days", "3"]) == {
        "a": ("x", "y"),
        "b": ("x", "y"),
    }
    assert limits_of(["--client", "a", "--namespace", "x", "--client", "b"]) == {"a": ("x",), "b": ()}
    assert limits_of(["--server", "s"]) == {}
    for wrong in ("--namespace x --client a", "--namespace x", "--client a --namespace x --reader a"):
        with pytest.raises(InvalidArgumentError):
            limits_of(wrong.split())


def test_certs_gives_each_its_own_and_says_what_it_may(tmp_path: Path) -> None:
    """The certificates hold what the command printed."""
    place = tmp_path / "lab"
    done = CliRunner().invoke(
        app, ["certs", str(place), *["--client", "a", "--namespace", "x", "--reader", "b", "--namespace", "y"]]
    )
    assert done.exit_code == 0, done.output
    told = done.output.replace("\n", "")
    assert f"made {place}/a: may create, read, change and delete x/..." in told
    assert f"made {place}/b: may read y/..." in told
    assert f"made {place}/client: may create, read, change and delete all buffers" in told
    for name, role, namespace in (("a", Role.CLIENT, "x"), ("b", Role.READER, "y")):
        certificate = x509.load_pem_x509_certificate((place / name / "cert.pem").read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        shown = {
            "x509_pem_cert": [(place / name / "cert.pem").read_bytes()],
            "peer_uri": [uri.encode() for uri in uris],
        }
        who = Callers(Current(load_directory(place / name))).of(shown)
        assert (who.role, who.name, who.namespaces) == (role, name, frozenset({namespace}))
    refused = CliRunner().invoke(app, ["certs", str(place), "--namespace", "x", "--client", "c"])
    assert refused.exit_code == 2


def test_a_control_port_that_is_asked_for(daemons: Daemons, kept_port: int) -> None:
    """The memory server listens there for the coordinator, and one that is taken is an error with its reason."""
    coordinator = daemons.coordinator()
    server = daemons.memory_server(coordinator.address, "a", "--control", f"127.0.0.1:{kept_port}")
    assert server.address
    taken = daemons.memory_server(coordinator.address, "b", "--control", f"127.0.0.1:{kept_port}")
    assert taken.wait() == 1
    assert f"cannot listen on 127.0.0.1:{kept_port}" in taken.log.read_text()
    with smb.connect(coordinator.address) as client:
        client.create("w", (8,))
    assert f'"control_address":"127.0.0.1:{kept_port}"' in coordinator.page("/api/server?name=a")
