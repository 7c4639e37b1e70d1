"""Credentials: the cluster's certificate authority, and this process's certificate and key. All of gRPC's channels and
ports, with credentials or without, are made here.

A directory holds them as `ca.pem`, `cert.pem` and `key.pem` (`smb certs` makes such directories). `deny.txt` and
`crl.pem` beside ca.pem name certificates that are refused: smb/security/denied.py.

Names, not addresses, are verified: the coordinator's certificate is for COORDINATOR_NAME, a memory server's for
server_name(its name). So both may move to another host or port, and neither can pose as the other.

A key is never shown, neither by repr nor in errors or logs.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from smb.config.settings import variables_of
from smb.config.untrusted import open_kept, read_opened
from smb.engine import DamagedListsError, Tls
from smb.errors import InvalidArgumentError
from smb.security.denied import DENY_FILE, LISTS_FILE, entries_of
from smb.security.verified_channels import Belief, BelievedAioChannel, BelievedChannel, belief_of

CREDENTIALS_VARIABLE = "SMB_CREDENTIALS"
CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE = "SMB_TLS_CA", "SMB_TLS_CERT", "SMB_TLS_KEY"
INSECURE_VARIABLE, DENY_VARIABLE = "SMB_INSECURE", "SMB_DENY"
METRICS_TOKEN_VARIABLE = "SMB_METRICS_TOKEN_FILE"  # noqa: S105 - the variable has a file's name, not a token
VARIABLES = (
    CREDENTIALS_VARIABLE, CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE, INSECURE_VARIABLE, DENY_VARIABLE,
    METRICS_TOKEN_VARIABLE,
)  # fmt: skip
# of PKCS#8, and of the older form of RSA and EC keys
_ENCRYPTED = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "cert.pem", "key.pem"

_LIST_BEGIN = b"-----BEGIN X509 CRL-----"
_ABSENT = (0, 0, 0)  # the stamp of a file that does not exist

COORDINATOR_NAME = "coordinator.smb"

# Daemons do not use proxies. Channels do not share connections within the process, because in a forked child a shared
# connection would be its parent's and fail. Reconnection is quick, so that a restarted coordinator is found within 1 s.
CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This also bounds an attempt to connect: a long line, or a busy machine, needs seconds.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 256 << 20),
)


_log = logging.getLogger("smb")


def server_name(name: str) -> str:
    """Return the host name in the certificate of the memory server with that name."""
    return f"{name}.server.smb"


Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Credentials:
    """A certificate authority, a certificate and its key, as PEM, and the paths from which they were read."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    ca_path: Path
    certificate_path: Path
    key_path: Path
    stamp: Stamp = field(compare=False, repr=False)  # identifies the files' state when these bytes were read
    denied: bytes = field(default=b"", repr=False)  # as smb.security.denied.entries_of returns it
    revoked: bytes = field(default=b"", repr=False)  # revocation lists in PEM
    deny: Path | None = None  # the directory of these two, if it is not that of ca_path

    def check(self) -> None:
        """Raise ssl.SSLError or OSError if the three do not belong together."""
        self.context()

    def context(self) -> ssl.SSLContext:
        """Return a context for Python's TLS, made of these bytes, not of the current files. Raises as `check`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with _as_file(self.ca) as ca, _as_file(self.certificate) as certificate, _as_file(self.key) as key:
            context.load_verify_locations(ca)
            context.load_cert_chain(certificate, key, password="")  # no prompt
        return context


@contextlib.contextmanager
def _as_file(text: bytes) -> Iterator[str]:
    """Yield a path to the bytes in memory, because Python's TLS takes certificates and keys only from files."""
    with os.fdopen(os.memfd_create("smb-credentials"), "wb", buffering=0) as file:
        file.write(text)
        yield f"/proc/self/fd/{file.fileno()}"


class Current:
    """Credentials that follow their files: replaced files are used from the next connection on. Files that were
    replaced after `credentials` were loaded count too, however long ago that was.

    Files that do not belong together, as in the middle of a replacement, change nothing. For any thread.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._lock = threading.Lock()
        self._credentials = credentials
        self._complained: object = None

    def now(self) -> Credentials:
        """Return the credentials in the files now: the same object until they change."""
        with self._lock:
            before = self._credentials
            stamp = _stamp_of_files(before)
            if stamp == before.stamp or stamp is None:
                return before
            try:
                found = load(before.ca_path, before.certificate_path, before.key_path, before.deny)
            except InvalidArgumentError as error:
                if stamp != self._complained:
                    _log.warning("the new credentials are not used: %s", error)
                self._complained = stamp
                return before
            if found.stamp != stamp:
                return before  # the files were replaced while they were read
            self._credentials = found
            _log.info("credentials were read again from %s", before.certificate_path.parent)
            if (found.denied, found.revoked) != (before.denied, before.revoked):
                _log.warning(
                    "%s and %s in %s: now %d denied names and serial numbers, and %d revocation lists",
                    DENY_FILE, LISTS_FILE, found.deny or found.ca_path.parent, found.denied.count(b"\n"),
                    found.revoked.count(_LIST_BEGIN),
                )  # fmt: skip
            return self._credentials


def _stamp(of: os.stat_result) -> tuple[int, int, int]:
    return of.st_mtime_ns, of.st_size, of.st_ino


def _stamp_of_files(credentials: Credentials) -> Stamp | None:
    """Return a value that changes with the files; None while one is missing."""
    found = []
    ca, deny = credentials.ca_path, credentials.deny
    if deny is not None and not deny.is_dir():
        return None
    for path in (ca, credentials.certificate_path, credentials.key_path, *_of_denied(ca, deny)):
        try:
            found.append(_stamp(path.stat()))
        except FileNotFoundError:
            if path.name not in (DENY_FILE, LISTS_FILE):
                return None
            found.append(_ABSENT)
        except OSError:
            return None
    return tuple(found)


def _of_denied(ca: Path, deny: Path | None) -> tuple[Path, Path]:
    place = ca.parent if deny is None else deny
    return place / DENY_FILE, place / LISTS_FILE


def load(ca: Path, certificate: Path, key: Path, deny: Path | None = None) -> Credentials:
    """Read the three files, and deny.txt and crl.pem, if they are there, in the directory `deny`, or beside `ca`.

    Raises InvalidArgumentError if one of the three or that directory is missing, if users other than this one and root
    can change or replace a file, if everybody may read the key, or if a file has something wrong in it.
    """
    if deny is not None and not deny.is_dir():
        raise InvalidArgumentError(f"credentials: --deny {deny} is not a directory; make it, for deny.txt and crl.pem")
    parts: list[bytes] = []
    stamps: list[tuple[int, int, int]] = []
    names, lists = _of_denied(ca, deny)
    for path in (ca, certificate, key, names, lists):
        try:
            with os.fdopen(open_kept(path, "the key " if path is key else ""), "rb", buffering=0) as opened:
                # Before the bytes are read, so that a file that is written meanwhile has another stamp.
                before = os.fstat(opened.fileno())
                parts.append(read_opened(opened, path))
                stamps.append(_stamp(before))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"credentials: {error}") from None
        except OSError as error:
            if path in (names, lists) and isinstance(error, FileNotFoundError):
                parts.append(b"")
                stamps.append(_ABSENT)
                continue
            sets = sorted(found.parent.name for found in path.parent.glob("*/cert.pem"))
            hint = f"name one of its directories: {', '.join(sets)}" if sets else "`smb certs` makes a set for a lab"
            raise InvalidArgumentError(f"credentials: cannot read {path}: {error.strerror}; {hint}") from None
        if path is not names and (_LIST_BEGIN if path is lists else b"-----BEGIN") not in parts[-1]:
            what = "a revocation list (CRL) in PEM form" if path is lists else "in PEM form"
            raise InvalidArgumentError(f"credentials: {path} is not {what}")
    if any(mark in parts[2] for mark in _ENCRYPTED):
        raise InvalidArgumentError(
            f"credentials: the key {key} has a password, which a daemon cannot ask for; take it off with `openssl pkey "
            f"-in {key.name} -out plain.pem`, and keep the file readable for its user alone"
        )
    denied = entries_of(parts[3], f"credentials: {names}")
    credentials = Credentials(parts[0], parts[1], parts[2], ca, certificate, key, tuple(stamps), denied, parts[4], deny)
    try:
        credentials.check()
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or error.strerror or "not what they should be"
        raise InvalidArgumentError(
            f"credentials: {ca}, {certificate} and {key} do not belong together ({reason})"
        ) from None
    if parts[4]:
        _check_lists(credentials, lists)
    return credentials


def _check_lists(credentials: Credentials, lists: Path) -> None:
    """Raise InvalidArgumentError for damaged revocation lists."""
    try:
        tls_of(credentials)
    except DamagedListsError as error:
        raise InvalidArgumentError(f"credentials: {lists} is damaged: {error}") from None
    except InvalidArgumentError:
        pass  # of the certificate or the key: the engine says so where they are used


def load_directory(directory: Path | str, deny: Path | None = None) -> Credentials:
    """Read `ca.pem`, `cert.pem` and `key.pem` of a directory. Raises as `load` does."""
    path = Path(directory)
    return load(path / CA_FILE, path / CERTIFICATE_FILE, path / KEY_FILE, deny)


def find(
    directory: Path | str | None = None, variables: Mapping[str, str] | None = None, deny: Path | None = None
) -> Credentials | None:
    """Return the credentials that this process was given, or None. They are the directory in `directory`, or else in
    $SMB_CREDENTIALS; $SMB_TLS_CA, $SMB_TLS_CERT and $SMB_TLS_KEY may each replace one of its files, or stand alone.
    Variables that are not set may be set by the configuration file. `deny`, or else $SMB_DENY: see `load`.

    Raises InvalidArgumentError for credentials that are incomplete or cannot be read.
    """
    values = variables_of("cluster") if variables is None else variables
    if deny is None and values.get(DENY_VARIABLE):
        deny = Path(values[DENY_VARIABLE])
    if directory is not None and str(directory):
        return load_directory(directory, deny)
    base = values.get(CREDENTIALS_VARIABLE, "")
    paths: list[Path] = []
    missing: list[str] = []
    for variable, file in ((CA_VARIABLE, CA_FILE), (CERTIFICATE_VARIABLE, CERTIFICATE_FILE), (KEY_VARIABLE, KEY_FILE)):
        if values.get(variable):
            paths.append(Path(values[variable]))
        elif base:
            paths.append(Path(base) / file)
        else:
            missing.append(variable)
    if len(missing) == 3:
        return None
    if missing:
        raise InvalidArgumentError(
            f"credentials: {' and '.join(missing)} is not set; set it, or set {CREDENTIALS_VARIABLE}=DIR"
        )
    return load(paths[0], paths[1], paths[2], deny)


@functools.lru_cache(maxsize=16)
def tls_of(credentials: Credentials) -> Tls:
    """Return the credentials as the engine takes them. Raises InvalidArgumentError for keys that are too short."""
    made = Tls(credentials.ca, credentials.certificate, credentials.key)
    made.deny(credentials.revoked, credentials.denied)
    return made


# ---- all channels and ports


def belief(address: str, peer: str, credentials: Credentials) -> Belief:
    """Return what this process knows of the server at an address whose certificate must have the name `peer`."""
    role = "coordinator" if peer == COORDINATOR_NAME else "server"
    return belief_of(address, role, peer, tls_of(credentials), credentials)


def channel(address: str, peer: str, credentials: Credentials | None) -> grpc.Channel:
    """Return a channel to the server at an address whose certificate has the name `peer`. Without credentials the
    channel is not encrypted.
    """
    if credentials is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return BelievedChannel(belief(address, peer, credentials), CHANNEL_OPTIONS)


def aio_channel(address: str, peer: str, credentials: Credentials | None) -> grpc.aio.Channel:
    """As `channel`, for asyncio."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return BelievedAioChannel(belief(address, peer, credentials), CHANNEL_OPTIONS)


def _server_configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    pairs = [(credentials.key, credentials.certificate)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=credentials.ca)


def add_port(server: grpc.Server | grpc.aio.Server, address: str, credentials: Credentials | None) -> int:
    """Have the server listen, and return the port, or 0 if it cannot. With credentials, only clients with a certificate
    of the same authority are accepted; changed files are used from the next connection on.
    """
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        current, used = Current(credentials), [credentials]

        def look() -> grpc.ServerCertificateConfiguration | None:  # called by a thread of gRPC for each connection
            found = current.now()
            if found is used[0]:
                return None
            used[0] = found
            return _server_configuration(found)

        # None means that nothing has changed, which the stubs do not know.
        secured = grpc.dynamic_ssl_server_credentials(_server_configuration(credentials), look, True)  # type: ignore[arg-type]
        return int(server.add_secure_port(address, secured))
    except RuntimeError:
        return 0


# ---- secure by default


def is_loopback(host: str) -> bool:
    """Whether no other machine can reach a listener on the host: it is a loopback address, or not a host at all."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return True  # listening there will fail with the reason
    return all(ipaddress.ip_address(str(entry[4][0]).split("%")[0]).is_loopback for entry in found)


def check_exposure(what: str, host: str, credentials: Credentials | None, insecure: bool) -> None:
    """Raise InvalidArgumentError if `what` would listen to other machines without credentials."""
    if credentials is not None or insecure or is_loopback(host):
        return
    raise InvalidArgumentError(
        f"{what} at {host}, without credentials: everybody who reaches it could read, change and delete. Give it "
        f"credentials (--credentials DIR or {CREDENTIALS_VARIABLE}; `smb certs DIR` makes a set), listen on 127.0.0.1, "
        f"or use --insecure if the network is trusted"
    )
