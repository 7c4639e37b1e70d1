"""Certificates of every kind, good and bad, for tests of whom is believed. `smb certs` makes only good ones."""

from __future__ import annotations

import datetime
import functools
import ipaddress
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

_CURVES: dict[str, Any] = {
    "P-256": ec.SECP256R1, "P-384": ec.SECP384R1, "P-521": ec.SECP521R1, "secp256k1": ec.SECP256K1,
}  # fmt: skip
_KINDS = {"email": 0x81, "DNS": 0x82, "URI": 0x86, "IP": 0x87}
_PURPOSES = {
    "serverAuth": x509.ExtendedKeyUsageOID.SERVER_AUTH,
    "clientAuth": x509.ExtendedKeyUsageOID.CLIENT_AUTH,
    "codeSigning": x509.ExtendedKeyUsageOID.CODE_SIGNING,
}
_USAGES = (
    "digitalSignature",
    "contentCommitment",
    "keyEncipherment",
    "dataEncipherment",
    "keyAgreement",
    "keyCertSign",
)
_ALT_NAME = x509.ObjectIdentifier("2.5.29.17")


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, and what they are in."""

    certificate: Path  # with its chain
    key: Path
    own: x509.Certificate
    own_key: Any


def _tlv(tag: int, body: bytes) -> bytes:
    length = len(body)
    if length < 128:
        return bytes([tag, length]) + body
    size = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size)]) + size + body


def alt_names(text: str) -> x509.UnrecognizedExtension:
    """Return "URI:a,DNS:b" as the extension, byte for byte: libraries refuse to write some of what others must refuse
    to read."""
    names = []
    for each in text.split(","):
        kind, _, value = each.partition(":")
        body = ipaddress.ip_address(value).packed if kind == "IP" else value.encode("latin-1")
        names.append(_tlv(_KINDS[kind], body))
    return x509.UnrecognizedExtension(_ALT_NAME, _tlv(0x30, b"".join(names)))


def _usage(text: str) -> tuple[x509.KeyUsage, bool]:
    wanted = text.split(",")
    said = [name in wanted for name in _USAGES]
    return x509.KeyUsage(
        *said, crl_sign="cRLSign" in wanted, encipher_only=False, decipher_only=False
    ), "critical" in wanted


@functools.cache
def _rsa(bits: int, number: int) -> Any:
    return rsa.generate_private_key(65537, bits)


def make_key(kind: str, number: int = 0) -> Any:
    """Return a new one; of RSA, which takes long, the same for the same number."""
    if kind.startswith("rsa:"):
        return _rsa(int(kind[4:]), number)
    return ed25519.Ed25519PrivateKey.generate() if kind == "ed25519" else ec.generate_private_key(_CURVES[kind]())


def _name(subject: str) -> x509.Name:
    text = subject.removeprefix("/CN=").replace("\\/", "/")
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)] if text != "/" else [])


class Authority:
    """One that signs what it is asked to."""

    def __init__(self, place: Path, name: str, key: str = "P-256") -> None:
        issued = issue(None, place, subject=f"/CN={name}", key=key, ca=True, names=None, purposes=None, days=(-5, 20))
        self.issued, self.certificate = issued, issued.certificate

    @staticmethod
    def _of(issued: Issued) -> Authority:
        made = Authority.__new__(Authority)
        made.issued, made.certificate = issued, issued.certificate
        return made

    def below(self, place: Path, name: str, **words: Any) -> Authority:
        """Return one that this one has signed."""
        words = {"ca": True, "names": None, "purposes": None, "usage": None, **words}
        return Authority._of(issue(self, place, subject=f"/CN={name}", **words))


def issue(
    by: Authority | None,
    place: Path,
    *,
    names: str | None,
    key: str = "P-256",
    purposes: str | None = "serverAuth,clientAuth",
    usage: str | None = None,
    subject: str = "/CN=x",
    days: tuple[int, int] = (-1, 9),
    digest: str = "sha256",
    chain: Sequence[Authority] = (),
    ca: bool | None = False,
    pathlen: int | None = None,
    permitted: str = "",
    unknown: str = "",
) -> Issued:
    """Write a key and a certificate, with its chain, into a directory. `by` None: it signs itself. `unknown`: number of
    a critical extension."""
    place.mkdir()
    own_key = make_key(key, 0 if ca is False else 1)
    signer = own_key if by is None else by.issued.own_key
    now = datetime.datetime.now(datetime.timezone.utc)
    if usage is None and ca:
        usage = "critical,keyCertSign,cRLSign"
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .public_key(own_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=days[0]))
        .not_valid_after(now + datetime.timedelta(days=days[1]))
    )
    if digest not in ("sha1", "md5"):
        builder = builder.issuer_name(_name(subject) if by is None else by.issued.own.subject)
    if ca is not None:
        builder = builder.add_extension(x509.BasicConstraints(ca, pathlen), critical=True)
    if usage:
        said, critical = _usage(usage)
        builder = builder.add_extension(said, critical)
    if purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage([_PURPOSES[each] for each in purposes.split(",")]), False)
    if names is not None:
        builder = builder.add_extension(alt_names(names), critical=not _name(subject).rdns)
    if permitted:
        builder = builder.add_extension(x509.NameConstraints([x509.DNSName(permitted)], None), critical=True)
    if unknown:
        extension = x509.UnrecognizedExtension(x509.ObjectIdentifier(unknown), b"\5\0")
        builder = builder.add_extension(extension, critical=True)
    weak = digest in ("sha1", "md5")  # openssl signs so; it takes what has signed itself
    if weak:
        signer, builder = own_key, builder.issuer_name(_name(subject))
    algorithm = None if isinstance(signer, ed25519.Ed25519PrivateKey) else _digest(digest)
    made = builder.sign(signer, algorithm)
    key_path, certificate = place / "key.pem", place / "cert.pem"
    _write_key(key_path, own_key)
    own = made.public_bytes(serialization.Encoding.PEM)
    if weak:
        own = _signed_weakly(place, own, by, digest)
        made = x509.load_pem_x509_certificate(own)
    certificate.write_bytes(own + b"".join(_first(each) for each in chain))
    return Issued(certificate, key_path, made, own_key)


def _first(authority: Authority) -> bytes:
    return authority.issued.own.public_bytes(serialization.Encoding.PEM)


def _digest(name: str) -> hashes.HashAlgorithm:
    return hashes.SHA384() if name == "sha384" else hashes.SHA256()


def _write_key(path: Path, key: Any) -> None:
    path.touch(0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _signed_weakly(place: Path, own: bytes, by: Authority | None, digest: str) -> bytes:
    """The same certificate, signed by openssl: the library does not sign with such digests."""
    assert by is not None
    (place / "before.pem").write_bytes(own)
    _write_key(place / "signer.pem", by.issued.own_key)
    done = subprocess.run(
        ["openssl", "x509", "-in", place / "before.pem", "-CA", by.certificate, "-CAkey", place / "signer.pem",
         f"-{digest}", "-days", "9", "-set_serial", "77"],
        check=True, capture_output=True,
    )  # fmt: skip
    return done.stdout
