"""Quotas: how many bytes of memory and how many buffers each namespace may take. Pure.

A namespace is the first part of a name that has several parts; other names are in the nameless namespace. Locks and
barriers count as buffers, since they take a server's memory too. Bytes are those of whole segment files, as for a
server's capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from smb.config.parse import format_bytes
from smb.config.quotas import EACH_OTHER, Quota
from smb.coordinator.records import BufferRecord
from smb.errors import OutOfMemoryError
from smb.security.roles import namespace_of


def check_quota(
    quotas: Mapping[str, Quota], there: Iterable[BufferRecord], wanted: Sequence[BufferRecord], asked: str
) -> None:
    """Raise OutOfMemoryError if `wanted`, all of one namespace, beside what is `there` exceeds a quota. The message has
    use and limit.
    """
    namespace = namespace_of(wanted[0].name)
    quota = quotas.get(namespace) or quotas.get(EACH_OTHER)
    if quota is None:
        return
    ours = [record for record in there if namespace_of(record.name) == namespace]
    title = f'namespace "{namespace}"' if namespace else "names without a namespace"
    advice = "delete some, or ask the operator for more (smb coordinator --quota)"
    if quota.buffers is not None and len(ours) + len(wanted) > quota.buffers:
        several = f"; this needs {len(wanted)} more" if len(wanted) > 1 else ""
        raise OutOfMemoryError(
            f"{asked}: {title} may have {quota.buffers} buffers, locks and barriers, and has {len(ours)} already"
            f"{several}; {advice}"
        )
    used, more = sum(map(_file_bytes, ours)), sum(map(_file_bytes, wanted))
    if quota.nbytes is not None and used + more > quota.nbytes:
        raise OutOfMemoryError(
            f"{asked}: {title} may take {format_bytes(quota.nbytes)}, and {format_bytes(used)} are used; this needs "
            f"{format_bytes(more)} more; {advice}"
        )


def _file_bytes(record: BufferRecord) -> int:
    return sum(segment.file_bytes for segment in record.copies)
