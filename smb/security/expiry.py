"""The ends of certificates, for a daemon's metrics and for `smb doctor`. It parses only the needed part of X.509, and
no decision depends on it: the certificates were verified when the credentials were loaded.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from smb.daemon.metric_names import gauge
from smb.errors import InvalidArgumentError
from smb.security.bond import first_of
from smb.security.credentials import Credentials

if TYPE_CHECKING:
    from prometheus_client.core import Metric

DAY_S = 86_400
SOON_DAYS, NOW_DAYS = 30, 7  # deploy/prometheus/alerts.yml has the same
_SEQUENCE, _CERTIFICATE_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


def expires_at(pem: bytes) -> float:
    """Return when the first certificate in a PEM text ends, in seconds since 1970. Raises InvalidArgumentError."""
    try:
        (_, certificate), *_ = _parts(first_of(pem))
        (_, signed), *_ = _parts(certificate)
        # The order is: version (optional), serial number, algorithm, issuer, validity.
        parts = [part for part in _parts(signed) if part[0] != _CERTIFICATE_VERSION]
        _, (kind, moment), *_ = _parts(parts[3][1])
        year = moment[:-11] if kind == _GENERALIZED_TIME else (b"19" if moment[:2] >= b"50" else b"20") + moment[:2]
        if kind not in (_UTC_TIME, _GENERALIZED_TIME):
            raise ValueError(kind)
        found = datetime.datetime.strptime((year + moment[-11:]).decode(), "%Y%m%d%H%M%SZ")
    except (IndexError, ValueError) as error:
        raise InvalidArgumentError(f"the end of the certificate cannot be read: {error}") from None
    return found.replace(tzinfo=datetime.timezone.utc).timestamp()


def ends_of(credentials: Credentials) -> dict[str, float]:
    """Return when the own certificate and its authority's end, in seconds since 1970, if that can be read."""
    found = {}
    for whose, pem in (("own", credentials.certificate), ("authority", credentials.ca)):
        try:
            found[whose] = expires_at(pem)
        except InvalidArgumentError:
            continue
    return found


class ExpiryMetrics:
    """A collector for prometheus_client: the ends of the certificates in use, as of each scrape."""

    def __init__(self, look: Callable[[], Credentials]) -> None:
        """`look` returns the credentials in use."""
        self._look = look

    def collect(self) -> Iterator[Metric]:
        family = gauge("smb_certificate_expiry_timestamp_seconds")
        for whose, end in ends_of(self._look()).items():
            family.add_metric([whose], end)
        yield family


def days_left(end: float, now: Callable[[], float] = time.time) -> float:
    """Return the number of days until the end; negative if the certificate has expired."""
    return (end - now()) / DAY_S


def _parts(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (tag, content) of each of the elements side by side. Raises IndexError if an element is cut off."""
    at = 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length & 0x80:
            count = length & 0x7F
            length = int.from_bytes(der[at : at + count], "big")
            at += count
        if at + length > len(der):
            raise IndexError("an element is cut off")
        yield tag, der[at : at + length]
        at += length
