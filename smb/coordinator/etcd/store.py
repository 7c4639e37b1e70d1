"""A Store in etcd, for the coordinator that leads.

Default limits of etcd: 128 operations in a transaction, 1.5 MiB in a request. A record that does not fit is refused by
name before anything is stored.
"""

from __future__ import annotations

from collections.abc import Mapping

from smb.config.parse import format_bytes
from smb.coordinator.etcd import etcd_pb2 as pb
from smb.coordinator.etcd.connection import Etcd, EtcdLocation, RefusedError, SilentError
from smb.coordinator.etcd.election import Lead
from smb.coordinator.store import SEQUENCE, StoreError
from smb.errors import OutOfMemoryError

CHANGES_MAX = 127  # in one transaction; the 128th operation is the head's
RECORDS_MAX = CHANGES_MAX - 1  # one operation is the number of the change
TRANSACTION_BYTES_MAX = 1_500_000  # of etcd's 1.5 MiB; the rest is for the request's own frame
_PAGE = 1000  # records in one read
_READ_S = 30.0


def records_range(location: EtcdLocation) -> tuple[bytes, bytes]:
    """Return the range of the records' keys: the first possible key, and the first key after the range."""
    return f"{location.prefix}/r/".encode(), f"{location.prefix}/r0".encode()


async def read_records(etcd: Etcd, location: EtcdLocation, page: int = _PAGE, below: str = "") -> dict[str, str]:
    """Return all texts by key, or those whose keys begin with `below`, which ends with a slash. They are read by pages,
    which fit together if only the caller may write. Raises StoreError.
    """
    texts: dict[str, str] = {}
    begin, end = records_range(location)
    at = begin
    if below:
        at = begin + below.encode()
        end = at[:-1] + b"0"  # the character after the slash
    while True:
        try:
            found = await etcd.range(pb.RangeRequest(key=at, range_end=end, limit=page), _READ_S)
        except (SilentError, RefusedError) as error:
            raise StoreError(f"cannot read {location}: {error}") from None
        for each in found.kvs:
            texts[each.key[len(begin) :].decode()] = each.value.decode()
        if not found.more:
            return texts
        at = found.kvs[-1].key + b"\0"


class EtcdStore:
    """The records, for as long as this coordinator leads."""

    changes_max = RECORDS_MAX

    def __init__(self, etcd: Etcd, location: EtcdLocation, lead: Lead) -> None:
        self._etcd = etcd
        self._location = location
        self._lead = lead

    async def load(self) -> dict[str, str]:
        """Return all texts by key. Raises StoreError, and DeposedError if another coordinator leads by now."""
        texts = await read_records(self._etcd, self._location)
        try:
            await self._lead.check()
        except (SilentError, RefusedError) as error:
            raise StoreError(f"cannot read {self._location}: {error}") from None
        return texts

    async def change(self, changes: Mapping[str, str | None], *, urgent: bool = False) -> None:  # noqa: ARG002
        """See Store; no room is reserved for urgent changes. Also raises OutOfMemoryError for a change that is too
        large for a transaction of etcd.
        """
        _check_size(changes)
        begin, _ = records_range(self._location)
        await self._lead.change(
            [
                pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=begin + key.encode()))
                if text is None
                else pb.RequestOp(request_put=pb.PutRequest(key=begin + key.encode(), value=text.encode()))
                for key, text in changes.items()
            ]
        )

    def free_bytes(self) -> int | None:
        """Return None: etcd does not report its quota."""
        return None

    async def close(self) -> None:
        """Let another coordinator lead."""
        await self._lead.close()


def _check_size(changes: Mapping[str, str | None]) -> None:
    if len(changes) > CHANGES_MAX:
        records = sum(key != SEQUENCE for key in changes)
        raise OutOfMemoryError(
            f"the change has {records} records, and etcd takes {CHANGES_MAX} in a transaction (a renamed buffer takes "
            f"two); nothing was changed: rename fewer at a time"
        )
    sizes = {key: len(key.encode()) + len((text or "").encode()) for key, text in changes.items()}
    if sum(sizes.values()) > TRANSACTION_BYTES_MAX:
        largest = max(sizes, key=lambda key: sizes[key])
        raise OutOfMemoryError(
            f'the record of "{largest}" has {format_bytes(sizes[largest])} with its metadata, and the whole change '
            f"{format_bytes(sum(sizes.values()))}; etcd takes {format_bytes(TRANSACTION_BYTES_MAX)} in a request; "
            f"nothing was changed: keep large metadata in a buffer"
        )
