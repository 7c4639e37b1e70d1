"""The room of certificates: an authority for a lab, and certificates with roles, which `smb certs` makes.

It uses the names and roles of smb.security. smb/tools/cli/certs.py imports it, and `smb up --hosts` if it gets no
certificates. It needs the package `cryptography` (its extra is `certs`), which no other part needs.

Any other authority can be used instead if its certificates contain the same: smb.security.roles says which URIs are
read, smb.security.credentials which names the coordinator's and the memory servers' certificates have.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smb.config.untrusted import check_directory, open_kept, read_opened
from smb.errors import Error, InvalidArgumentError
from smb.security.credentials import CA_FILE, CERTIFICATE_FILE, COORDINATOR_NAME, KEY_FILE, server_name
from smb.security.roles import NAME_URI, NAMESPACE_URI, ROLE_URI, Role

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise Error('certificates need the package cryptography: pip install "cryptography>=42"') from None

CA_KEY_FILE = "ca-key.pem"
CA_DAYS = 3650
DAYS_DEFAULT = 365
_CLOCK_SKEW = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Holder:
    """The owner of a certificate: its role, name and namespaces."""

    role: Role
    name: str
    namespaces: tuple[str, ...] = ()


class Authority:
    """Signs certificates. Its key is only in its directory."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate

    @staticmethod
    def make(days: int = CA_DAYS) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Soft Memory Box lab authority")])
        builder = (
            _builder(name, name, key, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return Authority(key, builder.sign(key, hashes.SHA256()))

    @staticmethod
    def load(directory: Path) -> Authority:
        """Read the authority in a directory. Raises InvalidArgumentError if it is incomplete, or if users other than
        this one and root can change or replace it.
        """
        try:
            key = serialization.load_pem_private_key(_read(directory / CA_KEY_FILE, "the key "), None)
            certificate = x509.load_pem_x509_certificate(_read(directory / CA_FILE))
        except (OSError, ValueError, TypeError) as error:
            raise InvalidArgumentError(
                f"{directory} does not hold a certificate authority made by `smb certs`: {error}"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InvalidArgumentError(f"{directory / CA_KEY_FILE} is not an elliptic-curve key, as `smb certs` makes")
        return Authority(key, certificate)

    def save(self, directory: Path) -> None:
        """Write certificate and key into a directory that only its owner may enter."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(directory / CA_KEY_FILE, _pem_of(self._key), 0o600)
        _write(directory / CA_FILE, self._certificate.public_bytes(serialization.Encoding.PEM), 0o644)

    def issue(self, holder: Holder, directory: Path, days: float = DAYS_DEFAULT) -> None:
        """Write a new key, its certificate and the authority's into a directory, for use as SMB_CREDENTIALS. A negative
        number of days makes an expired certificate.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, (holder.name or holder.role.value)[:64])])
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(ROLE_URI + holder.role.value)]
        if holder.name:
            names.append(x509.UniformResourceIdentifier(NAME_URI + holder.name))
        names += [x509.UniformResourceIdentifier(NAMESPACE_URI + namespace) for namespace in holder.namespaces]
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if holder.role in (Role.COORDINATOR, Role.SERVER):
            own = COORDINATOR_NAME if holder.role is Role.COORDINATOR else server_name(holder.name)
            names.append(x509.DNSName(own))
            purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            _builder(subject, self._certificate.subject, key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(issuer, critical=False)
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(directory / KEY_FILE, _pem_of(key), 0o600)
        _write(directory / CERTIFICATE_FILE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        _write(directory / CA_FILE, self._certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def make_set(directory: Path, holders: Sequence[Holder], days: float = DAYS_DEFAULT) -> list[Path]:
    """Make an authority in `directory`/ca, and beside it a directory of credentials for each holder, unless they exist.
    Returns the new directories. Raises InvalidArgumentError, also if others can make or replace files in one of these
    directories, because planted files would be used to sign, or be given out.
    """
    ca_directory = directory / "ca"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_directory(directory)
        if os.path.lexists(ca_directory):
            check_directory(ca_directory)
        if not (ca_directory / CA_KEY_FILE).exists():
            Authority.make().save(ca_directory)
        authority = Authority.load(ca_directory)
        made = []
        for holder in holders:
            own = directory / (holder.name or holder.role.value)
            if os.path.lexists(own):
                check_directory(own)
            else:
                authority.issue(holder, own, days)
                made.append(own)
    except OSError as error:
        raise InvalidArgumentError(f"cannot write into {directory}: {error.strerror}") from None
    return made


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    ends = now + datetime.timedelta(days=days)
    begins = min(now, ends - datetime.timedelta(days=1)) - _CLOCK_SKEW
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _read(path: Path, secret: str = "") -> bytes:
    with os.fdopen(open_kept(path, secret), "rb", buffering=0) as file:
        return read_opened(file, path)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, text: bytes, mode: int) -> None:
    """Write a file that others cannot read at any moment."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(text)
