"""Parses a namespace's quota. smb/coordinator/quotas.py enforces it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from smb.config.parse import parse_bytes
from smb.errors import InvalidArgumentError

EACH_OTHER = "*"


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of a namespace; None: unlimited."""

    nbytes: int | None = None
    buffers: int | None = None


def parse_quotas(texts: Iterable[str]) -> dict[str, Quota]:
    """Return the quotas in texts such as "team=10GiB,100", "team=10GiB" or "*=1GiB,20": bytes, and optionally a number
    of buffers. "*" stands for each namespace that is not named. Raises InvalidArgumentError.
    """
    quotas: dict[str, Quota] = {}
    for text in texts:
        namespace, equals, limits = text.partition("=")
        nbytes, comma, count = limits.partition(",")
        if not equals or not namespace or "/" in namespace or (comma and not count.strip().isdecimal()):
            raise InvalidArgumentError(
                f"--quota {text}: write NAMESPACE=BYTES or NAMESPACE=BYTES,BUFFERS, such as team=10GiB,100"
            )
        if namespace in quotas:
            raise InvalidArgumentError(f"--quota {text}: {namespace} has a quota already; give each namespace one")
        quotas[namespace] = Quota(parse_bytes(nbytes), int(count) if comma else None)
    return quotas
