"""A coordinator with its records in etcd: it stands by, is elected, leads, and stands by again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from smb.config.backoff import Backoff
from smb.coordinator.etcd.connection import Access, Etcd, EtcdLocation, RefusedError, SilentError
from smb.coordinator.etcd.election import Lead, campaign, leader_of
from smb.coordinator.etcd.roster import Roster
from smb.coordinator.etcd.store import EtcdStore
from smb.coordinator.known_pages import pages_of
from smb.coordinator.leader import Around, Leading, ShownLeader, cancel, end_if_failed
from smb.coordinator.options import ETCD, CoordinatorOptions
from smb.coordinator.store import DeposedError, StoreError
from smb.daemon.process import notify

LOOK_S = 0.5  # how often a coordinator that stands by looks for a leader
_TROUBLE_FIRST_S, _TROUBLE_MAX_S = 0.25, 1.0  # pauses before etcd is asked again after a failure

_log = logging.getLogger("coordinator")


def contender_of(options: CoordinatorOptions) -> Callable[[Around, ShownLeader], Contender] | None:
    """Return a function that makes the contender for these options; None if the records are not in etcd. Raises
    InvalidArgumentError, also for invalid credentials.
    """
    access = Access.of(options.etcd_credentials)
    if not options.state.startswith(ETCD):
        return None
    return partial(Contender, EtcdLocation.of(options.state), access, options.leader_lease_s)


class Contender:
    """One of several coordinators. `run` it until cancelled, then `close` it."""

    def __init__(
        self, location: EtcdLocation, access: Access, lease_s: int, around: Around, shown: ShownLeader
    ) -> None:
        self._location = location
        self._draw = around.outside.draw
        around.health.heard_etcd()  # its silence counts from now on
        self._etcd = Etcd(location.endpoints, access, around.outside.connections, self._draw, around.health.heard_etcd)
        self._roster = Roster(
            self._etcd,
            location,
            around.front.address,
            around.pages_address,
            lambda: shown.leading is not None,
            shown.known,
        )
        self._lease_s = lease_s
        self._around = around
        self._shown = shown
        self._complained = ""
        self.leader_known = asyncio.Event()  # set once this coordinator leads or knows the leader

    async def run(self) -> None:
        """Stand by and lead, in turns."""
        listing = asyncio.create_task(self._roster.run())
        listing.add_done_callback(partial(end_if_failed, self._around.outside))
        try:
            await self._contend()
        finally:
            await cancel(listing)

    async def _contend(self) -> None:
        backoff = self._new_backoff()
        while True:
            try:
                lead = await self._stand_by()
                backoff = self._new_backoff()
                await self._lead(lead)
            except (SilentError, RefusedError, StoreError) as error:
                self._trouble(str(error))
                await asyncio.sleep(backoff.next_s())

    def _new_backoff(self) -> Backoff:
        return Backoff(_TROUBLE_FIRST_S, _TROUBLE_MAX_S, draw=self._draw)

    async def close(self) -> None:
        await self._roster.close()
        await self._etcd.close()

    async def _stand_by(self) -> Lead | None:
        """Stand by until this coordinator is elected, and return its lead."""
        around, announced = self._around, ""
        while True:
            leader = await leader_of(self._etcd, self._location)
            around.health.ticked()
            if leader is None:
                lead = await campaign(self._etcd, self._location, around.front.address, self._lease_s, around.outside)
                if lead is not None:
                    return lead
                continue
            around.front.stand_by(leader.address, leader.term)
            around.health.stand_by(leader.address)
            self._complained = ""
            self.leader_known.set()
            if announced != leader.address:
                announced = leader.address
                _log.info("stands by: %s leads", announced)
                notify(f"STATUS=stands by: {announced} leads")
            await asyncio.sleep(LOOK_S)

    async def _lead(self, lead: Lead | None) -> None:
        assert lead is not None
        around = self._around
        async with AsyncExitStack() as leaving:
            leaving.push_async_callback(lead.close)
            leaving.push_async_callback(cancel, asyncio.create_task(lead.keep()))
            store = EtcdStore(self._etcd, self._location, lead)
            try:
                leading = await Leading.open(around, store, lambda: lead.holds, lead.term, leaving)
            except DeposedError as error:
                _log.warning("%s", error)
                return
            self._shown.leading = leading
            leaving.callback(self._step_down, leading)
            self.leader_known.set()
            self._complained = ""
            _log.info("leads, from revision %d of etcd on", lead.term)
            notify(f"STATUS=leads at {around.front.address}")
            reason = await lead.lost
            _log.error("does not lead any more: %s", reason)
            around.health.stand_by("", reason)

    def _step_down(self, leading: Leading) -> None:
        self._shown.known.servers = pages_of(leading.commit_log.state)
        self._shown.leading = None

    def _trouble(self, text: str) -> None:
        self._around.front.stand_by()
        self._around.health.stand_by("", text)
        self._around.health.ticked()
        if text != self._complained:
            self._complained = text
            _log.error("%s", text)
