"""How much of the cluster each namespace may take: bytes of memory, and how many buffers. Pure.

A namespace is the first part of a name of several parts; names of one part are in the nameless one. Locks and barriers
count as buffers do: they are memory of a server too. Bytes are of whole segment files, as against a server's capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from smb.config.parse import format_bytes
from smb.config.quotas import EACH_OTHER, Quota
from smb.coordinator.records import BufferRecord
from smb.errors import OutOfMemoryError
from smb.security.roles import namespace_of


def check_quota(quotas: Mapping[str, Quota], there: Iterable[BufferRecord], wanted: BufferRecord, asked: str) -> None:
    """Raise OutOfMemoryError where `wanted` beside what is `there` is too much; it says what is used and allowed."""
    namespace = namespace_of(wanted.name)
    quota = quotas.get(namespace) or quotas.get(EACH_OTHER)
    if quota is None:
        return
    ours = [record for record in there if namespace_of(record.name) == namespace]
    title = f'namespace "{namespace}"' if namespace else "names without a namespace"
    advice = "delete some, or ask the operator for more (smb coordinator --quota)"
    if quota.buffers is not None and len(ours) >= quota.buffers:
        raise OutOfMemoryError(
            f"{asked}: {title}: {len(ours)} buffers, locks and barriers are there, "
            f"{quota.buffers} are allowed; {advice}"
        )
    used, more = sum(map(_file_bytes, ours)), _file_bytes(wanted)
    if quota.nbytes is not None and used + more > quota.nbytes:
        raise OutOfMemoryError(
            f"{asked}: {title}: {format_bytes(used)} of {format_bytes(quota.nbytes)} allowed are used, and this takes "
            f"{format_bytes(more)}; {advice}"
        )


def _file_bytes(record: BufferRecord) -> int:
    return sum(segment.file_bytes for segment in record.copies)
