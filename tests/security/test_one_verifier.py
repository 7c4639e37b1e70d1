"""Both planes judge a certificate alike, and as it has to be judged: several dozen of them, made by openssl, shown by a
server and by a caller, at the control plane (gRPC) and at the data port.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent import futures
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from memserver.engine import Engine
from smb.engine import ROLES, EngineClient, EngineError, Lane, Status, Tls
from smb.errors import PermissionDeniedError
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import MemoryServerServicer, MemoryServerStub, add_MemoryServerServicer_to_server
from smb.security.credentials import Credentials, Current, channel, server_name
from smb.security.roles import Callers, RoleInterceptor
from tests.support.authority import Authority, Issued, issue
from tests.support.raw import Frame, Opcode

# What a good one has; a case says what is different.
AS_SERVER = "URI:smb:role/server,URI:smb:name/s1,DNS:s1.server.smb"
AS_CLIENT = "URI:smb:role/client,URI:smb:name/c"
BOTH, CALLS, SERVES = "serverAuth,clientAuth", "clientAuth", "serverAuth"


@dataclass(frozen=True)
class Case:
    """A certificate, and whether it is taken. `why`: a part of what the data port's user or server is told."""

    good: bool
    names: str | None
    why: str = ""
    key: str = "P-256"
    purposes: str | None = BOTH
    usage: str | None = "critical,digitalSignature"
    by: str = "root"
    sends: str = ""  # the chain that it sends beside its own
    subject: str = "/CN=x"
    unknown: str = ""  # number of a critical extension
    days: tuple[int, int] = (-1, 9)
    digest: str = "sha256"


SERVERS = {
    "good": Case(True, AS_SERVER),
    "RSA of 2048 bits": Case(True, AS_SERVER, key="rsa:2048"),
    "P-384": Case(True, AS_SERVER, key="P-384", digest="sha384"),
    "several DNS names": Case(True, AS_SERVER + ",DNS:host.example.org,IP:127.0.0.1"),
    "no purposes": Case(True, AS_SERVER, purposes=None),
    "no key usage": Case(True, AS_SERVER, usage=None),
    "no subject": Case(True, AS_SERVER, subject="/"),
    "by an intermediate": Case(True, AS_SERVER, by="issuing", sends="issuing"),
    "by an RSA intermediate": Case(True, AS_SERVER, by="issuing-rsa", sends="issuing-rsa"),
    "within name constraints": Case(True, AS_SERVER, by="constrained", sends="constrained"),
    "no names": Case(False, None, 'role ""'),
    "CN alone": Case(False, None, 'role ""', subject="/CN=s1.server.smb"),
    "CN beside a role": Case(False, "URI:smb:role/server,URI:smb:name/s1", "expected the", subject="/CN=s1.server.smb"),
    "a pattern": Case(False, "URI:smb:role/server,URI:smb:name/s1,DNS:*.server.smb", "expected the"),
    "a pattern of all": Case(False, "URI:smb:role/server,DNS:*", "expected the"),
    "capitals": Case(False, "URI:smb:role/server,DNS:S1.server.smb", "expected the"),
    "a trailing dot": Case(False, "URI:smb:role/server,DNS:s1.server.smb.", "expected the"),
    "a longer name": Case(False, "URI:smb:role/server,DNS:xs1.server.smb", "expected the"),
    "a domain behind": Case(False, "URI:smb:role/server,DNS:s1.server.smb.example.org", "expected the"),
    "an IDN lookalike": Case(False, "URI:smb:role/server,DNS:xn--s1-9ia.server.smb", "expected the"),
    "a NUL in the name": Case(False, "URI:smb:role/server,DNS:s1.server.smb\0.example.org", "expected the"),
    "the name as URI": Case(False, "URI:smb:role/server,URI:s1.server.smb", "expected the"),
    "the name as e-mail": Case(False, "URI:smb:role/server,email:s1.server.smb", "expected the"),
    "an address": Case(False, "URI:smb:role/server,IP:127.0.0.1", "expected the"),
    "another server's": Case(False, "URI:smb:role/server,URI:smb:name/s2,DNS:s2.server.smb", 'name "s2"'),
    "another server's name": Case(False, "URI:smb:role/server,URI:smb:name/s2,DNS:s1.server.smb", "another role"),
    "without a name": Case(False, "URI:smb:role/server,DNS:s1.server.smb,DNS:s2.server.smb", "another role or name"),
    "a mistyped kind": Case(False, AS_SERVER + ",URI:smb:names/s2", "neither smb:role"),
    "two names": Case(False, AS_SERVER + ",URI:smb:name/s2", "and others"),
    "role client": Case(False, "URI:smb:role/client,DNS:s1.server.smb", 'role "client"'),
    "role reader": Case(False, "URI:smb:role/reader,URI:smb:name/s1,DNS:s1.server.smb", 'role "reader"'),
    "role coordinator": Case(False, "URI:smb:role/coordinator,DNS:s1.server.smb", 'role "coordinator"'),
    "no role": Case(False, "URI:smb:name/s1,DNS:s1.server.smb", 'role ""'),
    "two roles": Case(False, AS_SERVER + ",URI:smb:role/client", "and others"),
    "a role twice": Case(False, AS_SERVER + ",URI:smb:role/server", "and others"),
    "a role in capitals": Case(False, "URI:smb:role/Server,DNS:s1.server.smb", 'role "Server"'),
    "a role as DNS name": Case(False, "DNS:smb:role/server,DNS:s1.server.smb", 'role ""'),
    "a role in CN": Case(False, "DNS:s1.server.smb", 'role ""', subject="/CN=smb:role\\/server"),
    "purpose client": Case(False, AS_SERVER, "no serverAuth", purposes=CALLS),
    "purpose code signing": Case(False, AS_SERVER, "no serverAuth", purposes="codeSigning"),
    "key usage agreement": Case(False, AS_SERVER, "keyUsage", usage="critical,keyAgreement"),
    "key usage certificates": Case(False, AS_SERVER, "", usage="critical,keyCertSign"),
    "expired": Case(False, AS_SERVER, "expired", days=(-9, -1)),
    "not yet": Case(False, AS_SERVER, "not yet valid", days=(1, 9)),
    "an unknown critical extension": Case(False, AS_SERVER, "critical", unknown="1.2.3.4"),
    "RSA of 1024 bits": Case(False, AS_SERVER, "too weak", key="rsa:1024"),
    "Ed25519": Case(False, AS_SERVER, "neither RSA", key="ed25519"),
    "P-521": Case(False, AS_SERVER, "neither RSA", key="P-521"),
    "secp256k1": Case(False, AS_SERVER, key="secp256k1"),
    "signed with SHA-1": Case(False, AS_SERVER, "too weak", digest="sha1"),
    "signed with MD5": Case(False, AS_SERVER, "too weak", digest="md5", by="root-rsa"),
    "a long chain": Case(False, AS_SERVER, "too long", by="issuing", sends=11 * "issuing "),
    "the intermediate is missing": Case(False, AS_SERVER, "intermediate", by="issuing"),
    "too long a path": Case(False, AS_SERVER, "path length", by="below", sends="below issuing"),
    "by a server": Case(False, AS_SERVER, "CA", by="leaf", sends="leaf"),
    "by an intermediate without CA": Case(False, AS_SERVER, "CA", by="no-ca", sends="no-ca"),
    "by an intermediate that has expired": Case(False, AS_SERVER, "expired", by="expired", sends="expired"),
    "by an intermediate for clients": Case(False, AS_SERVER, "purpose", by="for-clients", sends="for-clients"),
    "by an intermediate that signs no certificates": Case(False, AS_SERVER, "", by="no-sign", sends="no-sign"),
    "by an intermediate of 1024 bits": Case(False, AS_SERVER, "too weak", by="weak", sends="weak"),
    "outside of name constraints": Case(
        False, "URI:smb:role/server,URI:smb:name/s1,DNS:s1.server.smb,DNS:s1.example.org", "subtree", by="constrained",
        sends="constrained",
    ),
    "self-signed": Case(False, AS_SERVER, "self-signed", by=""),
    "another authority of the same name": Case(False, AS_SERVER, "", by="namesake"),
}  # fmt: skip
# Of a caller. The control plane takes each role, and its rules say for what; the coordinator has no business with data.
CALLERS = {
    "good": Case(True, AS_CLIENT, purposes=CALLS),
    "without a name": Case(True, "URI:smb:role/operator", purposes=CALLS),
    "a reader with RSA": Case(True, "URI:smb:role/reader", purposes=CALLS, key="rsa:3072"),
    "a memory server": Case(True, AS_SERVER),
    "no purposes": Case(True, AS_CLIENT, purposes=None),
    "P-384 by an intermediate": Case(True, AS_CLIENT, by="issuing", sends="issuing", key="P-384", purposes=CALLS),
    "purpose server": Case(False, AS_CLIENT, "no clientAuth", purposes=SERVES),
    "a memory server for serving alone": Case(False, AS_SERVER, "no clientAuth", purposes=SERVES),
    "a memory server without a name": Case(False, "URI:smb:role/server,DNS:s1.server.smb", 'role "server"'),
    "a memory server of two names": Case(False, AS_SERVER + ",URI:smb:name/s2", "and others"),
    "no role": Case(False, "URI:smb:name/c", 'role ""'),
    "CN alone": Case(False, None, 'role ""', subject="/CN=smb:role\\/operator"),
    "two roles": Case(False, AS_CLIENT + ",URI:smb:role/operator", "one role: issue one for each"),
    "a role that there is not": Case(False, "URI:smb:role/root", 'role "root"'),
    "a role in capitals": Case(False, "URI:smb:role/CLIENT", 'role "CLIENT"'),
    "a longer role": Case(False, "URI:smb:role/client/", 'role "client/"'),
    "a role that is not ASCII": Case(False, "URI:smb:role/client\u00e9", 'role "?"'),
    "a role with a NUL": Case(False, "URI:smb:role/client\0x", 'role "?"'),
    "of two namespaces": Case(
        True, AS_CLIENT + ",URI:smb:namespace/a,URI:smb:namespace/b,URI:https://a", purposes=CALLS
    ),
    "a scheme in capitals": Case(False, AS_CLIENT + ",URI:SMB:namespace/a", "neither smb:role"),
    "a mistyped kind": Case(False, AS_CLIENT + ",URI:smb:namespaces/a", "neither smb:role"),
    "a kind in capitals": Case(False, AS_CLIENT + ",URI:smb:Namespace/a", "neither smb:role"),
    "an empty namespace": Case(False, AS_CLIENT + ",URI:smb:namespace/", "neither smb:role"),
    "nothing but the scheme": Case(False, AS_CLIENT + ",URI:smb:", "neither smb:role"),
    "another scheme": Case(False, "URI:https://smb:role/client", 'role ""'),
    "the role as DNS name": Case(False, "DNS:smb:role/client", 'role ""'),
    "expired": Case(False, AS_CLIENT, "expired", days=(-9, -1)),
    "not yet": Case(False, AS_CLIENT, "not yet valid", days=(1, 9)),
    "key usage encryption": Case(False, AS_CLIENT, "", usage="critical,dataEncipherment"),
    "RSA of 1024 bits": Case(False, AS_CLIENT, "too weak", key="rsa:1024"),
    "Ed25519": Case(False, AS_CLIENT, "neither RSA", key="ed25519"),
    "signed with SHA-1": Case(False, AS_CLIENT, "too weak", digest="sha1"),
    "by a client": Case(False, AS_CLIENT, "CA", by="leaf", sends="leaf"),
    "too long a path": Case(False, AS_CLIENT, "path length", by="below", sends="below issuing"),
    "a long chain": Case(False, AS_CLIENT, "too long", by="issuing", sends=11 * "issuing "),
    "the intermediate is missing": Case(False, AS_CLIENT, "intermediate", by="issuing"),
    "an unknown critical extension": Case(False, AS_CLIENT, "critical", unknown="1.2.3.4"),
    "another authority of the same name": Case(False, AS_CLIENT, "", by="namesake"),
    "self-signed": Case(False, AS_CLIENT, "self-signed", by=""),
}

# Of a server and of a caller, where ca.pem has the issuing authority alone: what it issued is taken, with the chain or
# without, and nothing else of the same root.
BY_ISSUING = {
    "with the intermediate": Case(True, "", by="issuing", sends="issuing"),
    "with the whole chain": Case(True, "", by="issuing", sends="issuing root"),
    "alone": Case(True, "", by="issuing"),
    "by the root": Case(False, "", "issued it", by="root"),
    "by the root, with it": Case(False, "", "issued it", by="root", sends="root"),
    "by another intermediate": Case(False, "", "issued it", by="issuing-rsa", sends="issuing-rsa"),
    "by another intermediate, with the root": Case(False, "", "issued it", by="issuing-rsa", sends="issuing-rsa root"),
    "of another root": Case(False, "", "issued it", by="namesake", sends="namesake issuing"),
    "too long a path": Case(False, "", "path length", by="below", sends="below"),
}


class Lab:
    """Authorities, and what is made by them."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._made = itertools.count(1)
        root, root_rsa = Authority(place / "root", "root"), Authority(place / "root-rsa", "rsa", key="rsa:2048")
        namesake, issuing = Authority(place / "namesake", "root"), root.below(place / "issuing", "issuing", pathlen=0)
        self._by: dict[str, Authority | None] = {
            "": None, "root": root, "root-rsa": root_rsa, "namesake": namesake, "issuing": issuing,
            "below": issuing.below(place / "below", "below"),
        }  # fmt: skip
        for name, words in {
            "issuing-rsa": {"key": "rsa:2048"},
            "constrained": {"permitted": "server.smb"},
            "no-ca": {"ca": None},
            "leaf": {"ca": False, "usage": "critical,digitalSignature"},
            "no-sign": {"usage": "critical,cRLSign"},
            "expired": {"days": (-9, -1)},
            "for-clients": {"purposes": "clientAuth"},
            "weak": {"key": "rsa:1024"},
        }.items():
            self._by[name] = root.below(place / name, name, **words)
        self.ca = place / "ca.pem"
        self.ca.write_bytes(root.certificate.read_bytes() + root_rsa.certificate.read_bytes())

    def trusting(self, name: str) -> Lab:
        """Return the same with the certificate of one authority as ca.pem."""
        found, authority = copy(self), self._by[name]
        assert authority is not None
        found.ca = authority.certificate
        return found

    def issue(self, case: Case) -> Issued:
        chain = [found for name in case.sends.split() if (found := self._by[name]) is not None]
        return issue(
            self._by[case.by], self._place / f"{next(self._made)}", names=case.names, key=case.key,
            purposes=case.purposes, usage=case.usage, subject=case.subject, unknown=case.unknown, days=case.days,
            digest=case.digest, chain=chain,
        )  # fmt: skip

    def credentials(self, case: Case) -> Credentials:
        issued = self.issue(case)
        files = self.ca, issued.certificate, issued.key
        ca, certificate, key = (path.read_bytes() for path in files)
        return Credentials(ca, certificate, key, *files, ())


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Made once."""
    assert shutil.which("openssl")
    return Lab(tmp_path_factory.mktemp("lab"))


class Servicer(MemoryServerServicer):
    """A control service that a client may call."""

    def CloseVerbs(self, request: pb.CloseVerbsRequest, context: grpc.ServicerContext) -> pb.CloseVerbsReply:  # noqa: N802
        """Answer."""
        return pb.CloseVerbsReply()


@contextlib.contextmanager
def control_plane(shown: Credentials, trusted: Credentials | None) -> Iterator[str]:
    """A port of gRPC's that shows a certificate. `trusted`: it judges callers by these; None: it takes whomever it
    gets, as an impostor would."""
    guards: list[Any] = [RoleInterceptor(Callers(Current(trusted)))] if trusted is not None else []
    server = grpc.server(futures.ThreadPoolExecutor(2), interceptors=guards)
    add_MemoryServerServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    secured = grpc.ssl_server_credentials([(shown.key, shown.certificate)], shown.ca, trusted is not None)
    port = server.add_secure_port("127.0.0.1:0", secured)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0)


def call(opened: grpc.Channel) -> str:
    """Empty if the call came through; else why not."""
    with opened:
        try:
            MemoryServerStub(opened).CloseVerbs(pb.CloseVerbsRequest(), timeout=20)  # type: ignore[no-untyped-call]
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.PERMISSION_DENIED and "takes the role" in str(error.details()):
                return ""  # the rules of the control plane know who it is
            return str(error.details())
    return ""


HELLO = Frame(Opcode.HELLO, session=7, lane=2).pack()


class Impostor:
    """A data port that shows a certificate and takes everybody, as an impostor would; keeps what it hears first."""

    def __init__(self, shown: Credentials) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.load_cert_chain(shown.certificate_path, shown.key_path)
        self._context, self._socket = context, socket.create_server(("127.0.0.1", 0))
        self.port, self.heard = self._socket.getsockname()[1], b""
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        peer, _ = self._socket.accept()
        with peer, contextlib.suppress(OSError), self._context.wrap_socket(peer, server_side=True) as spoken:
            self.heard = spoken.recv(64)

    def __enter__(self) -> Impostor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(20)
        self._socket.close()


def call_impostor(shown: Credentials, ours: Credentials) -> str:
    """Empty if a call over our channel came through; else why not. Who shows what gRPC does not load shows it without
    gRPC: he gets no call either."""
    try:
        with control_plane(shown, None) as address:
            return call(channel(address, server_name("s1"), ours))
    except RuntimeError:
        with Impostor(shown) as impostor:
            said = call(channel(f"127.0.0.1:{impostor.port}", server_name("s1"), ours))
        assert not impostor.heard
        return said


def is_served(port: int, shown: Credentials) -> bool:
    """Whether a data port answers the HELLO of who shows that."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.load_cert_chain(shown.certificate_path, shown.key_path)
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), 20) as plain,
        context.wrap_socket(plain) as spoken,
    ):
        spoken.sendall(HELLO)
        return len(spoken.recv(64)) == 64
    return False


def is_right(case: Case, control: str, data: str) -> str:
    """Empty, or what is wrong with the verdicts: empty ones, or the reasons of refusals."""
    wrong = [
        f"{plane}: {why or 'taken'}" for plane, why in (("control", control), ("data", data)) if case.good == bool(why)
    ]
    if not case.good and case.why.lower() not in data.lower():
        wrong.append(f"data: {data}")
    return "; ".join(wrong)


def test_servers(lab: Lab) -> None:
    """Whom a client believes."""
    check_servers(lab, SERVERS)


def test_servers_of_an_intermediate_alone(lab: Lab) -> None:
    """Both planes believe the same, and say why not."""
    check_servers(lab.trusting("issuing"), {name: replace(case, names=AS_SERVER) for name, case in BY_ISSUING.items()})


def test_callers(lab: Lab) -> None:
    """Whom a server serves."""
    check_callers(lab, CALLERS, Case(True, AS_SERVER))


def test_callers_of_an_intermediate_alone(lab: Lab) -> None:
    """Both planes serve the same."""
    cases = {name: replace(case, names=AS_CLIENT, purposes=CALLS) for name, case in BY_ISSUING.items()}
    check_callers(lab.trusting("issuing"), cases, Case(True, AS_SERVER, by="issuing", sends="issuing"))


def check_servers(lab: Lab, cases: dict[str, Case]) -> None:
    ours = lab.credentials(Case(True, AS_CLIENT, purposes=CALLS))
    tls, wrong = Tls(ours.ca, ours.certificate, ours.key), {}
    for name, case in cases.items():
        shown = lab.credentials(case)
        control = call_impostor(shown, ours)
        data, client = "", EngineClient(secrets.randbits(63))
        with Impostor(shown) as impostor:
            try:
                client.connect_tls("127.0.0.1", impostor.port, tls, server_name("s1"), Lane.TCP_DATA, 20_000)
            except EngineError as error:
                data = "" if impostor.heard or error.status is not Status.UNTRUSTED else str(error)
        client.close()
        if found := is_right(case, control, data):
            wrong[name] = found
        # The control plane's error has the reason of the data port's.
        elif not case.good and data.partition(": ")[2] not in control.replace(str(ours.ca_path), "our ca.pem"):
            wrong[name] = f"other reasons: {control} / {data}"
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())


def check_callers(lab: Lab, cases: dict[str, Case], server: Case) -> None:
    ours = lab.credentials(server)
    tls, wrong = Tls(ours.ca, ours.certificate, ours.key), {}
    engine = Engine(1, 1, 1 << 20)
    engine.use_tls(tls)
    port = engine.listen_tcp("127.0.0.1", 0)
    with control_plane(ours, ours) as address:
        for name, case in cases.items():
            shown = lab.credentials(case)
            secured = grpc.ssl_channel_credentials(shown.ca, shown.key, shown.certificate)
            options = [("grpc.ssl_target_name_override", server_name("s1"))]
            control = call(grpc.secure_channel(address, secured, options=options))
            data = ""
            if not is_served(port, shown):
                with pytest.raises(PermissionDeniedError) as refused:
                    tls.judge(shown.certificate, ROLES)
                data = str(refused.value)
            if found := is_right(case, control, data):
                wrong[name] = found
    engine.close()
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())
