"""A process's proof of identity: the cluster's certificate authority, its own certificate and key. And the one way in
which channels and ports of gRPC are made, with credentials and without.

A directory holds them as `ca.pem`, `cert.pem` and `key.pem` (`smb certs` makes such directories). Names, not addresses,
are verified: the coordinator's certificate is for COORDINATOR_NAME, a memory server's for server_name(its name). So
both may move to another host or port, and neither can stand for the other.

A key is never shown: not by repr, nor in errors or logs.
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
from smb.engine import Tls
from smb.errors import InvalidArgumentError
from smb.security.verified_channels import Belief, BelievedAioChannel, BelievedChannel, belief_of

CREDENTIALS_VARIABLE = "SMB_CREDENTIALS"
CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE = "SMB_TLS_CA", "SMB_TLS_CERT", "SMB_TLS_KEY"
INSECURE_VARIABLE = "SMB_INSECURE"
METRICS_TOKEN_VARIABLE = "SMB_METRICS_TOKEN_FILE"  # noqa: S105 - a file's name stands there
VARIABLES = (
    CREDENTIALS_VARIABLE, CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE, INSECURE_VARIABLE, METRICS_TOKEN_VARIABLE,
)  # fmt: skip
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "cert.pem", "key.pem"

COORDINATOR_NAME = "coordinator.smb"

# No proxy between daemons; no connection shared with other channels of the process, which in a child of fork would be
# its parent's and fail; and quick reconnection: a restarted coordinator is found within a second.
CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also how long an attempt to connect may take: a long line, or a machine with much to do, needs seconds.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 256 << 20),
)


_log = logging.getLogger("smb")


def server_name(name: str) -> str:
    """Return what the certificate of the memory server of that name is for."""
    return f"{name}.server.smb"


Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Credentials:
    """A certificate authority, a certificate and its key, as PEM; and where they were read."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    ca_path: Path
    certificate_path: Path
    key_path: Path
    stamp: Stamp = field(compare=False, repr=False)  # of the files when these bytes were read

    def check(self) -> None:
        """Raise ssl.SSLError or OSError if they do not belong together."""
        self.context()

    def context(self) -> ssl.SSLContext:
        """Return what Python's TLS takes: of these very bytes, whatever the files are by now. Raises as `check`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with _as_file(self.ca) as ca, _as_file(self.certificate) as certificate, _as_file(self.key) as key:
            context.load_verify_locations(ca)
            context.load_cert_chain(certificate, key, password="")  # nobody is asked
        return context


@contextlib.contextmanager
def _as_file(text: bytes) -> Iterator[str]:
    """A path to the bytes in memory: for certificates and keys Python's TLS takes no others."""
    with os.fdopen(os.memfd_create("smb-credentials"), "wb", buffering=0) as file:
        file.write(text)
        yield f"/proc/self/fd/{file.fileno()}"


class Current:
    """Credentials that follow their files: what is replaced there counts from the next connection on. So does what was
    replaced since `credentials` were loaded, however long ago that was.

    Files that do not belong together, as in the middle of a replacement, change nothing. Any thread may ask.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._lock = threading.Lock()
        self._credentials = credentials
        self._complained: object = None

    def now(self) -> Credentials:
        """Return what the files hold now: the same object until they change."""
        with self._lock:
            before = self._credentials
            stamp = _stamp_of_files(before)
            if stamp == before.stamp or stamp is None:
                return before
            try:
                found = load(before.ca_path, before.certificate_path, before.key_path)
            except InvalidArgumentError as error:
                if stamp != self._complained:
                    _log.warning("the new credentials are not taken: %s", error)
                self._complained = stamp
                return before
            if found.stamp != stamp:
                return before  # replaced while they were read
            self._credentials = found
            _log.info("credentials were read again from %s", before.certificate_path.parent)
            return self._credentials


def _stamp(of: os.stat_result) -> tuple[int, int, int]:
    return of.st_mtime_ns, of.st_size, of.st_ino


def _stamp_of_files(credentials: Credentials) -> Stamp | None:
    """A value that changes with the files; None while one is missing."""
    try:
        paths = (credentials.ca_path, credentials.certificate_path, credentials.key_path)
        return tuple(_stamp(path.stat()) for path in paths)
    except OSError:
        return None


def load(ca: Path, certificate: Path, key: Path) -> Credentials:
    """Read the three files. Raises InvalidArgumentError if one is missing, if others than this user and root can change
    or replace it, or if everybody may read the key.
    """
    parts: list[bytes] = []
    stamps: list[tuple[int, int, int]] = []
    for path in (ca, certificate, key):
        try:
            with os.fdopen(open_kept(path, "the key " if path is key else ""), "rb", buffering=0) as opened:
                # Before the bytes: what is written meanwhile gives the file another stamp than they have.
                before = os.fstat(opened.fileno())
                parts.append(read_opened(opened, path))
                stamps.append(_stamp(before))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"credentials: {error}") from None
        except OSError as error:
            sets = sorted(found.parent.name for found in path.parent.glob("*/cert.pem"))
            hint = f"name one of its directories: {', '.join(sets)}" if sets else "`smb certs` makes a set for a lab"
            raise InvalidArgumentError(f"credentials: cannot read {path}: {error.strerror}; {hint}") from None
        if b"-----BEGIN" not in parts[-1]:
            raise InvalidArgumentError(f"credentials: {path} is not in PEM form")
    credentials = Credentials(parts[0], parts[1], parts[2], ca, certificate, key, tuple(stamps))
    try:
        credentials.check()
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or error.strerror or "not what they should be"
        raise InvalidArgumentError(
            f"credentials: {ca}, {certificate} and {key} do not belong together ({reason})"
        ) from None
    return credentials


def load_directory(directory: Path | str) -> Credentials:
    """Read `ca.pem`, `cert.pem` and `key.pem` of a directory. Raises as `load` does."""
    path = Path(directory)
    return load(path / CA_FILE, path / CERTIFICATE_FILE, path / KEY_FILE)


def find(directory: Path | str | None = None, variables: Mapping[str, str] | None = None) -> Credentials | None:
    """Return the credentials that a process was given, None if nothing is said: those in `directory`; else in
    $SMB_CREDENTIALS, a directory, of which $SMB_TLS_CA, $SMB_TLS_CERT and $SMB_TLS_KEY may replace a file each, or
    stand alone. If a variable is not set, the configuration file may say it.

    Raises InvalidArgumentError for what is incomplete or cannot be read.
    """
    if directory is not None and str(directory):
        return load_directory(directory)
    values = variables_of("cluster") if variables is None else variables
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
            f"credentials: {' and '.join(missing)} is not set; or set {CREDENTIALS_VARIABLE}=DIR"
        )
    return load(*paths)


@functools.lru_cache(maxsize=16)
def tls_of(credentials: Credentials) -> Tls:
    """Return them as the engine takes them. Raises InvalidArgumentError where it does not: keys that are too short."""
    return Tls(credentials.ca, credentials.certificate, credentials.key)


# ---- channels and ports: all that there are


def belief(address: str, peer: str, credentials: Credentials) -> Belief:
    """Return what this process knows of who serves at an address, where it wants whom a certificate calls `peer`."""
    role = "coordinator" if peer == COORDINATOR_NAME else "server"
    return belief_of(address, role, peer, tls_of(credentials), credentials)


def channel(address: str, peer: str, credentials: Credentials | None) -> grpc.Channel:
    """Return a channel to an address, behind which is whom a certificate calls `peer`; in the clear without
    credentials.
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
    """Have the server listen; return the port, 0 if it can't. With credentials, only for who shows a certificate of
    the same authority; files that change count from the next connection on.
    """
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        current, used = Current(credentials), [credentials]

        def look() -> grpc.ServerCertificateConfiguration | None:  # for each connection, by a thread of gRPC's
            found = current.now()
            if found is used[0]:
                return None
            used[0] = found
            return _server_configuration(found)

        # None is what a fetcher returns where nothing has changed, which the stubs do not know.
        secured = grpc.dynamic_ssl_server_credentials(_server_configuration(credentials), look, True)  # type: ignore[arg-type]
        return int(server.add_secure_port(address, secured))
    except RuntimeError:
        return 0


# ---- on by default


def is_loopback(host: str) -> bool:
    """Whether nobody else can reach what listens at the host: it is this machine's alone, or is no host at all."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return True  # listening there will say why it can't be
    return all(ipaddress.ip_address(str(entry[4][0]).split("%")[0]).is_loopback for entry in found)


def check_exposure(what: str, host: str, credentials: Credentials | None, insecure: bool) -> None:
    """Raise InvalidArgumentError where `what` would listen to other machines without knowing who they are."""
    if credentials is not None or insecure or is_loopback(host):
        return
    raise InvalidArgumentError(
        f"{what} at {host}, without credentials: everybody who reaches it could read, change and delete. Give it some "
        f"(--credentials DIR or {CREDENTIALS_VARIABLE}; `smb certs DIR` makes a set), listen on 127.0.0.1, or say "
        f"--insecure where the network is trusted"
    )
