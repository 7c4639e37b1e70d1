"""The coordinators of a cluster, and where each daemon serves its pages, as far as a coordinator knows it from etcd.

Each coordinator has a key below PREFIX/coordinators/, under a lease, with the address of its pages. So each one can
list all daemons for Prometheus, whether it leads or stands by. Nothing is decided by these keys.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

from smb.config.parse import parse_address
from smb.config.untrusted import parse_json
from smb.coordinator.commit_log import SERVER
from smb.coordinator.etcd import etcd_pb2 as pb
from smb.coordinator.etcd.connection import Etcd, EtcdLocation, RefusedError, SilentError
from smb.coordinator.etcd.store import read_records
from smb.coordinator.known_pages import KnownPages
from smb.coordinator.store import StoreError
from smb.errors import InvalidArgumentError

LOOK_S = 5.0  # between two looks; Prometheus asks every 15 s
# A coordinator that was killed stays listed for so long, so that an alert can fire. One that stops leaves at once.
LISTED_S = 3600
COORDINATORS_MAX = 64
_PARTS_MAX = 1024  # brackets and commas in the value of a key
_ASK_S = 5.0

_log = logging.getLogger("coordinator")


def coordinators_range(location: EtcdLocation) -> tuple[bytes, bytes]:
    """Return the first possible key of a coordinator, and the first key after all of them."""
    return f"{location.prefix}/coordinators/".encode(), f"{location.prefix}/coordinators0".encode()


class Roster:
    """Keeps `known` up to date. `run` it until cancelled, then `close` it."""

    def __init__(
        self,
        etcd: Etcd,
        location: EtcdLocation,
        address: str,
        pages: Callable[[], str],
        leads: Callable[[], bool],
        known: KnownPages,
    ) -> None:
        """`pages` returns the address of this coordinator's pages. While `leads` returns True, its own records say more
        about the memory servers than a look into etcd."""
        self._etcd = etcd
        self._location = location
        self._key = coordinators_range(location)[0] + address.encode()
        self._pages = pages
        self._leads = leads
        self._known = known
        self._lease_id = 0
        self._complained = ""

    async def run(self) -> None:
        """Look again and again."""
        while True:
            try:
                await self._enter()
                await self._look()
                self._complained = ""
            except (SilentError, RefusedError, StoreError) as error:
                if str(error) != self._complained:
                    self._complained = str(error)
                    _log.warning("cannot list the cluster's daemons for Prometheus; trying again: %s", error)
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Leave the list, also if only an earlier run at this address has entered it."""
        delete = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=self._key))
        try:
            await self._etcd.transact(pb.TxnRequest(success=[delete]), 1.0)
            if self._lease_id:
                await self._etcd.revoke(self._lease_id, 1.0)
        except (SilentError, RefusedError) as error:
            _log.info("this coordinator stays in the list of daemons until its lease runs out: %s", error)

    async def _enter(self) -> None:
        if self._lease_id and await self._etcd.keep_alive(self._lease_id, _ASK_S):
            return
        lease_id = (await self._etcd.grant(LISTED_S, _ASK_S)).ID
        value = json.dumps({"pages": self._pages()}).encode()
        put = pb.RequestOp(request_put=pb.PutRequest(key=self._key, value=value, lease=lease_id))
        await self._etcd.transact(pb.TxnRequest(success=[put]), _ASK_S)
        self._lease_id = lease_id

    async def _look(self) -> None:
        begin, end = coordinators_range(self._location)
        found = await self._etcd.range(pb.RangeRequest(key=begin, range_end=end, limit=COORDINATORS_MAX), _ASK_S)
        pages = {each.key[len(begin) :]: _address_in(each.value, "pages") for each in found.kvs}
        self._known.coordinators = {address.decode(errors="replace"): each for address, each in pages.items() if each}
        if self._leads():
            return
        records = await read_records(self._etcd, self._location, below=SERVER)
        servers = {key.removeprefix(SERVER): _address_in(text, "metrics_address") for key, text in records.items()}
        self._known.servers = {name: pages for name, pages in servers.items() if pages}


def _address_in(text: str | bytes, field: str) -> str:
    """Return the address in a field of a JSON object; empty if there is none. Only this field is read, because a
    coordinator of another release may have written more fields than this one knows."""
    try:
        pages = str(parse_json(text, _PARTS_MAX)[field])
        parse_address(pages)
    except (ValueError, TypeError, KeyError, InvalidArgumentError):
        return ""
    return pages
