"""Moves a coordinator's records from one store to another, and checks them there, record by record.

At no moment can both stores be served: the old one is marked as moved before the new one is released. If it is cut off
anywhere, the same call starts again from the beginning.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from smb.coordinator.etcd.connection import Access, Etcd, EtcdLocation, RefusedError, SilentError
from smb.coordinator.etcd.election import campaign, leader_of
from smb.coordinator.etcd.store import CHANGES_MAX, TRANSACTION_BYTES_MAX, EtcdStore
from smb.coordinator.leader import cancelled_at_end
from smb.coordinator.options import ETCD, LEADER_LEASE_S
from smb.coordinator.store import MIGRATION, Store, StoreError, open_store
from smb.errors import Error, InvalidArgumentError, UnavailableError

_COMING = "records are on their way here from {}"
_MOVED = "moved to {}"
_OWN_NAME = "smb coordinator migrate"


async def migrate(source: str, target: str, etcd_credentials: Path | None) -> int:
    """Move all records from one place to the other, both given as for --state. Return the number of records.

    Raises UnavailableError if a coordinator runs on either store, InvalidArgumentError if the target has records of its
    own, and StoreError if a store cannot be read or written.
    """
    access = Access.of(etcd_credentials)
    if not source.startswith(ETCD) and not Path(source).is_dir():
        raise InvalidArgumentError(f"--from {source}: this directory does not exist")
    async with _opened(source, access) as old, _opened(target, access) as new:
        there, records = await new.load(), await old.load()
        mark = records.pop(MIGRATION, "")
        if not records:
            raise InvalidArgumentError(f"--from {source}: there are no records in this store; nothing was changed")
        if mark and not (mark == _MOVED.format(target) and there.get(MIGRATION) == _COMING.format(source)):
            raise InvalidArgumentError(f"--from {source}: its records are not the current ones: {mark}")
        if there and MIGRATION not in there:
            raise InvalidArgumentError(f"--to {target}: it has records of a cluster already; nothing was changed")
        for part in _parts({MIGRATION: _COMING.format(source)}):
            await new.change(part)
        gone = dict.fromkeys(key for key in there if key not in records and key != MIGRATION)
        for part in _parts({**gone, **records}):
            await new.change(part)
        await _check(new, records, target)
        await old.change({MIGRATION: _MOVED.format(target)})
        await new.change({MIGRATION: None})
    return len(records)


async def _check(store: Store, records: Mapping[str, str], target: str) -> None:
    found = await store.load()
    found.pop(MIGRATION, None)
    wrong = [key for key in found.keys() | records.keys() if found.get(key) != records.get(key)]
    if wrong:
        raise StoreError(
            f"{target}: {len(wrong)} records differ from what was written, such as {min(wrong)}; repeat the command"
        )


def _parts(changes: Mapping[str, str | None]) -> Iterator[dict[str, str | None]]:
    """Split the changes into parts that each fit into one transaction."""
    part: dict[str, str | None] = {}
    nbytes = 0
    for key, text in changes.items():
        size = len(key.encode()) + len((text or "").encode())
        if part and (len(part) == CHANGES_MAX or nbytes + size > TRANSACTION_BYTES_MAX):
            yield part
            part, nbytes = {}, 0
        part[key] = text
        nbytes += size
    if part:
        yield part


@asynccontextmanager
async def _opened(where: str, access: Access) -> AsyncIterator[Store]:
    if not where.startswith(ETCD):
        store = open_store(where)
        try:
            yield store
        finally:
            await store.close()
        return
    location = EtcdLocation.of(where)
    etcd = Etcd(location.endpoints, access)
    try:
        lead = await campaign(etcd, location, _OWN_NAME, LEADER_LEASE_S)
        if lead is None:
            leader = await leader_of(etcd, location)
            name = leader.address if leader else "another one"
            raise UnavailableError(f"{where} is in use: {name} leads; stop all of its coordinators first")
        async with cancelled_at_end(lead.keep()):
            try:
                yield EtcdStore(etcd, location, lead)
            finally:
                await lead.close()
    except (SilentError, RefusedError) as error:
        raise Error(str(error)) from None
    finally:
        await etcd.close()
