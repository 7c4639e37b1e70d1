"""Certificates that do not count any more: denied by name, by serial number or by a revocation list, expired, or of an
authority that was dropped. Calls, connections and waits under them end; all others go on.
"""

from __future__ import annotations

import re
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.engine import ROLES
from smb.errors import InvalidArgumentError
from smb.security.credentials import Credentials, Current, find, load_directory, tls_of
from smb.security.denied import entries_of
from smb.security.lab_ca import Authority, Holder, make_set
from smb.security.roles import Role
from tests.security.test_one_verifier import AS_CLIENT, AS_SERVER, Case, Lab
from tests.support.daemons import wait_for

DAEMONS = ("coordinator", "server-0")
ENDS_S = 30.0  # a certificate is judged again each 5 s, and files are looked at each second
DAY_S = 86_400


def serial_of(certificate: Path) -> str:
    """The line that openssl prints."""
    return said("x509", "-noout", "-serial", "-in", str(certificate)).strip()


def said(*arguments: str, cwd: Path | None = None) -> str:
    done = subprocess.run(["openssl", *arguments], check=True, capture_output=True, text=True, cwd=cwd)
    return done.stdout


def revoke(place: Path, authority: Path, key: Path, *certificates: Path, days: int = 30) -> bytes:
    """A revocation list by `openssl ca`, which keeps its records in that place."""
    place.mkdir(exist_ok=True)
    (place / "ca.cnf").write_text(
        f"[ca]\ndefault_ca=x\n[x]\ndatabase={place}/index.txt\ncrlnumber={place}/number\ndefault_md=sha256\n"
    )
    (place / "index.txt").touch()
    if not (place / "number").exists():
        (place / "number").write_text("01\n")
    own = ("ca", "-config", str(place / "ca.cnf"), "-cert", str(authority), "-keyfile", str(key))
    for certificate in certificates:
        said(*own, "-revoke", str(certificate))
    dates = ("-crldays", str(days)) if days > 0 else ("-crl_lastupdate", "20200101000000Z", "-crlsec", "1")
    said(*own, "-gencrl", *dates, "-out", str(place / "crl.pem"))
    return (place / "crl.pem").read_bytes()


def why_refused(judge: Credentials, shown: Credentials) -> str:
    """Empty if it is taken."""
    try:
        tls_of(judge).judge(shown.certificate, ROLES)
    except smb.PermissionDeniedError as error:
        return str(error)
    return ""


def test_entries_are_lines_of_names_and_serial_numbers() -> None:
    """As openssl prints them, or with colons, in either case; what is neither is an error with its line. So is what
    would be a name that nobody has: with a remark, a space or the whole URI.
    """
    text = b"# stolen\n\n name=alice \r\nserial=00aB:cd\nname=server-0\nname=alice\nname=a:b/c\n"
    assert entries_of(text, "f") == b"name=a:b/c\nname=alice\nname=server-0\nserial=ABCD\n"
    assert entries_of(b"", "f") == b""
    slips = (b"name=alice # left", b"name=alice#", b"name= alice", b"name=a\tb", b"name=smb:name/alice", b"serial=a #x")
    others = (b"alice", b"name=", b"serial=xyz", b"serial=", b"NAME=a", b"name=\xc3\xa9", b"serial=" + b"1" * 65)
    for wrong in (*slips, *others):
        with pytest.raises(InvalidArgumentError, match=r"^f:2: .* is neither name=NAME nor serial=HEX"):
            entries_of(b"name=a\n" + wrong + b"\n", "f")


def test_names_and_serial_numbers_are_denied(tmp_path: Path) -> None:
    """A name counts as a whole, whatever the role; a serial number for the own certificate and for its issuers."""
    lab = Lab(tmp_path)
    ours = lab.credentials(Case(True, AS_SERVER))
    client, other = lab.credentials(Case(True, AS_CLIENT)), lab.credentials(Case(True, AS_CLIENT + "ool"))
    two = lab.credentials(Case(True, "URI:smb:role/client,URI:smb:name/c,URI:smb:name/d"))
    below = lab.credentials(Case(True, AS_CLIENT + "ool", by="issuing", sends="issuing"))
    everybody = (client, other, two, below)
    assert not any(why_refused(ours, each) for each in everybody)

    def refused(*lines: str) -> list[str]:
        judge = replace(ours, denied=entries_of("\n".join(lines).encode(), "f"))
        return [why_refused(judge, each) for each in everybody]

    by_name = refused("name=c")
    assert "is denied: deny.txt has its name" in by_name[0]
    assert 'role "client", name "c"' in by_name[0]
    assert [bool(why) for why in by_name] == [True, False, True, False]
    assert not any(refused("name=C", "name=oo", "serial=1"))
    by_serial = refused(serial_of(other.certificate_path))
    assert [bool(why) for why in by_serial] == [False, True, False, False]
    assert "deny.txt has its serial number" in by_serial[1]
    issuer = tmp_path / "issuing" / "cert.pem"
    by_issuer = refused(serial_of(issuer))
    assert [bool(why) for why in by_issuer] == [False, False, False, True]
    assert "the serial number of an issuer in its chain" in by_issuer[3]


def test_revocation_lists_of_openssl_count(tmp_path: Path) -> None:
    """Also one that is out of date, and one of an issuing authority; one by another authority of the same name does
    not. Several in one file all count."""
    place = tmp_path / "lab"
    make_set(place, [Holder(role, name) for role, name in ((Role.CLIENT, "a"), (Role.CLIENT, "b"), (Role.SERVER, "s"))])
    make_set(tmp_path / "other", [Holder(Role.CLIENT, "x")])
    judge, a, b = (load_directory(place / name) for name in ("s", "a", "b"))
    ca, key = place / "ca" / "ca.pem", place / "ca" / "ca-key.pem"
    none = revoke(tmp_path / "none", ca, key)
    one = revoke(tmp_path / "one", ca, key, a.certificate_path)
    old = revoke(tmp_path / "old", ca, key, b.certificate_path, days=0)
    theirs = tmp_path / "other" / "ca"
    forged = revoke(tmp_path / "forged", theirs / "ca.pem", theirs / "ca-key.pem", a.certificate_path)

    def refused(lists: bytes) -> tuple[str, str]:
        now = replace(judge, revoked=lists)
        return why_refused(now, a), why_refused(now, b)

    assert refused(none) == refused(forged) == ("", "")
    assert "is denied: a list in crl.pem revokes it" in refused(one)[0]
    assert not refused(one)[1]
    assert [bool(why) for why in refused(old)] == [False, True]
    assert [bool(why) for why in refused(none + one + old)] == [True, True]

    (tmp_path / "deep").mkdir()
    lab = Lab(tmp_path / "deep")
    shown = lab.credentials(Case(True, AS_CLIENT, by="issuing", sends="issuing"))
    root, issuer = tmp_path / "deep" / "root", tmp_path / "deep" / "issuing" / "cert.pem"
    lists = revoke(tmp_path / "deep-list", root / "cert.pem", root / "key.pem", issuer)
    ours = lab.credentials(Case(True, AS_SERVER))
    assert not why_refused(ours, shown)
    assert "revokes an issuer in its chain" in why_refused(replace(ours, revoked=lists), shown)


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("deny.txt", b"name=a\nalice\n", r'deny.txt:2: "alice" is neither'),
        ("crl.pem", b"nothing", "crl.pem is not a revocation list"),
        ("crl.pem", b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", "crl.pem is damaged"),
    ],
)
def test_bad_files_are_named_and_not_used(tmp_path: Path, file: str, text: bytes, why: str) -> None:
    """A daemon does not start with them; one that runs keeps what it has."""
    make_set(tmp_path, [Holder(Role.CLIENT, "a"), Holder(Role.OPERATOR, "o")])
    place = tmp_path / "o"
    current = Current(load_directory(place))
    before = current.now()
    (place / file).write_bytes(text)
    with pytest.raises(InvalidArgumentError, match=why):
        load_directory(place)
    assert current.now() is before
    (place / file).write_bytes(b"")
    if file == "deny.txt":
        assert current.now() is not before
    (place / file).unlink()
    assert current.now().denied == b""
    (place / file).symlink_to(tmp_path / "nowhere")
    assert load_directory(place).denied == b""


def test_another_directory_may_have_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an argument or a variable; it must be there, and if it goes away, who was denied stays denied."""
    make_set(tmp_path, [Holder(Role.OPERATOR, "o")])
    elsewhere = tmp_path / "elsewhere"
    with pytest.raises(InvalidArgumentError, match=r"--deny .*elsewhere is not a directory"):
        find(tmp_path / "o", deny=elsewhere)
    elsewhere.mkdir()
    (tmp_path / "o" / "deny.txt").write_text("name=beside\n")
    found = find(tmp_path / "o", deny=elsewhere)
    assert found is not None
    assert found.denied == b""
    current = Current(found)
    (elsewhere / "deny.txt").write_text("name=a\n")
    assert current.now().denied == b"name=a\n"
    elsewhere.rename(tmp_path / "gone")
    assert current.now().denied == b"name=a\n"
    monkeypatch.setenv("SMB_DENY", str(tmp_path / "gone"))
    for again in (
        find(tmp_path / "o"),
        find(None, {"SMB_CREDENTIALS": str(tmp_path / "o"), "SMB_DENY": str(tmp_path / "gone")}),
    ):
        assert again is not None
        assert again.denied == b"name=a\n"


def test_files_that_others_may_write_are_refused(tmp_path: Path) -> None:
    """Who could write there could shut everybody out."""
    make_set(tmp_path, [Holder(Role.OPERATOR, "o")])
    (tmp_path / "o" / "deny.txt").write_text("name=a\n")
    (tmp_path / "o" / "deny.txt").chmod(0o666)
    with pytest.raises(InvalidArgumentError, match=r"deny.txt may be changed by others"):
        load_directory(tmp_path / "o")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Certificates with names."""
    roles = ((Role.COORDINATOR, "coordinator"), (Role.CLIENT, "alice"), (Role.CLIENT, "bob"), (Role.OPERATOR, "ann"))
    make_set(tmp_path, [Holder(role, name) for role, name in roles] + [Holder(Role.SERVER, "server-0")])
    return tmp_path


@pytest.fixture
def cluster(place: Path) -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=1, capacity="32MiB", credentials=place) as running:
        yield running


def deny(place: Path, line: str) -> None:
    """Add a line to the list of each daemon, as an operator's script does."""
    for daemon in DAEMONS:
        with (place / daemon / "deny.txt").open("a") as file:
            file.write(line + "\n")


def connections(cluster: smb.LocalCluster) -> int:
    """Open TCP connections of the memory server."""

    with urllib.request.urlopen(f"http://{cluster.servers[0].metrics}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if line.startswith('smb_server_connections{transport="tcp"}')]
    return int(float(lines[0].split()[-1])) if lines else 0


def ends(use: Callable[[], object], match: str) -> None:
    """Wait until the call fails, with that text."""

    def failed() -> str:
        try:
            use()
        except smb.Error as error:
            return str(error)
        return ""

    text = wait_for(failed, "refusal", ENDS_S)
    assert re.search(match, text), text


def test_denied_clients_are_out_within_seconds(cluster: smb.LocalCluster, place: Path) -> None:
    """By name, by serial number and by a revocation list: connections, waiting calls and new calls end, with an error
    that says so; another client goes on without an error; and once the entries are gone they may connect again.

    It takes 10 s because a judgement counts for 5 s."""
    at, stop, who = cluster.address, threading.Event(), ("alice", "carol", "dave")
    make_set(place, [Holder(Role.CLIENT, name) for name in who])
    certificates = {name: place / name / "cert.pem" for name in who}
    with smb.connect(at, transport="tcp", credentials=place / "bob") as bob, ThreadPoolExecutor(4) as threads:
        counter = bob.create("counter", (1,), dtype="int64")
        assert counter.fetch_add(0, 0) == 0
        before = connections(cluster)
        clients = {name: smb.connect(at, transport="tcp", credentials=place / name, timeout=3) for name in who}
        buffers = {name: client.create(name, (1000,)) for name, client in clients.items()}
        for buffer in buffers.values():
            buffer.write(np.ones(1000, np.float32))
        waiting = [threads.submit(client.open, "later", timeout=300.0) for client in clients.values()]

        def count() -> int:
            done = 0
            while not stop.is_set():
                counter.fetch_add(0, 1)
                done += 1
            return done

        counting = threads.submit(count)
        try:
            deny(place, f"name=alice\n{serial_of(certificates['carol'])}")
            lists = revoke(place / "db", place / "ca/ca.pem", place / "ca/ca-key.pem", certificates["dave"])
            for daemon in DAEMONS:
                (place / daemon / "crl.pem").write_bytes(lists)
            for name, wait in zip(who, waiting, strict=True):
                with pytest.raises(smb.PermissionDeniedError, match=f'role "client", name "{name}".* is denied: '):
                    wait.result(ENDS_S)
            wait_for(lambda: connections(cluster) <= before, "end of their connections", ENDS_S)
            for name, client in clients.items():
                ends(buffers[name].read, "is denied: |certificate revoked")
                ends(partial(client.create, "more", (1,)), "is denied: ")
                with pytest.raises(smb.Error, match="is denied: "):
                    smb.connect(at, credentials=place / name, timeout=3)
                client.close()
            for daemon in DAEMONS:
                (place / daemon / "crl.pem").unlink()
                (place / daemon / "deny.txt").unlink()

            def are_in() -> bool:
                try:
                    for name in who:
                        smb.connect(at, transport="tcp", credentials=place / name, timeout=3).close()
                except smb.Error:
                    return False
                return True

            wait_for(are_in, "their way back", ENDS_S)
        finally:
            stop.set()
        assert counting.result() == counter.fetch_add(0, 0)


def test_a_denied_memory_server_is_gone(cluster: smb.LocalCluster, place: Path) -> None:
    """It renews nothing any more, so its lease runs out; the coordinator says why in its log."""
    (place / "coordinator" / "deny.txt").write_text("name=server-0\n")
    with smb.connect(cluster.address, credentials=place / "ann") as operator:
        wait_for(lambda: not operator.servers()[0].alive, "end of its lease", ENDS_S)
    assert "deny.txt has its name" in cluster.coordinator.log.read_text()
    assert "deny.txt has its name" in cluster.servers[0].log.read_text()


def test_a_connection_ends_when_its_certificate_does(place: Path) -> None:
    """A certificate of seconds: data and a waiting call end with it. A client whose files were replaced in time goes on
    over a new connection, and each addition counts once. It takes the certificate's 12 s, of which a busy machine needs
    some to connect."""
    authority = Authority.load(place / "ca")
    for name in ("short", "renewed"):
        authority.issue(Holder(Role.CLIENT, name), place / name, days=12 / DAY_S)
    with (
        smb.LocalCluster(servers=1, capacity="32MiB", credentials=place) as cluster,
        smb.connect(cluster.address, transport="tcp", credentials=place / "short", timeout=3) as short,
        smb.connect(cluster.address, transport="tcp", credentials=place / "renewed") as renewed,
        smb.connect(cluster.address, transport="tcp", credentials=place / "bob") as bob,
        ThreadPoolExecutor(1) as thread,
    ):
        weights = short.create("weights", (10,))
        weights.write(np.ones(10, np.float32))
        counter = renewed.create("counter", (1,), dtype="int64")
        waiting = thread.submit(short.open, "later", timeout=300.0)
        authority.issue(Holder(Role.CLIENT, "renewed"), place / "next")
        for file in ("key.pem", "cert.pem"):
            (place / "next" / file).rename(place / "renewed" / file)
        added = 0

        def is_over() -> bool:
            nonlocal added
            counter.fetch_add(0, 1)
            added += 1
            return waiting.done()

        wait_for(is_over, "end of the certificate", 60.0)
        with pytest.raises(smb.PermissionDeniedError, match="certificate has expired"):
            waiting.result()
        ends(weights.read, "certificate (has )?expired")
        assert counter.fetch_add(0, 0) == added
        assert bob.open("counter").fetch_add(0, 0) == added


def test_a_dropped_authority_ends_those_it_signed(place: Path, tmp_path: Path) -> None:
    """Data connections, too: both authorities are trusted first, then the daemons drop the other one."""
    make_set(tmp_path / "other", [Holder(Role.CLIENT, "guest")])
    ours = {daemon: (place / daemon / "ca.pem").read_bytes() for daemon in DAEMONS}
    both = ours["server-0"] + (tmp_path / "other/guest/ca.pem").read_bytes()
    for daemon in (*DAEMONS, "../" + place.name + "/other/guest"):
        (place / daemon / "ca.pem").write_bytes(both)
    with (
        smb.LocalCluster(servers=1, capacity="32MiB", credentials=place) as cluster,
        smb.connect(cluster.address, transport="tcp", credentials=place / "bob") as bob,
        smb.connect(cluster.address, transport="tcp", credentials=tmp_path / "other/guest", timeout=3) as guest,
    ):
        weights = guest.create("weights", (10,))
        weights.write(np.ones(10, np.float32))
        kept = bob.open("weights")
        for daemon in DAEMONS:
            (place / daemon / "ca.new").write_bytes(ours[daemon])
            (place / daemon / "ca.new").rename(place / daemon / "ca.pem")
        ends(weights.read, "it does not accept us")
        assert kept.read().sum() == 10
