"""The parts of a coordinator that exist while it leads: the commit log, and all that works on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from smb.coordinator import dashboard_interface
from smb.coordinator.commit_log import CommitLog, Committed
from smb.coordinator.dashboard.server import DashboardServer
from smb.coordinator.events import Event, Instant, LeaseShortened, SaveBuffer, TellEnded, Ticked, UnexplainedJudged
from smb.coordinator.front import Front
from smb.coordinator.health import Health
from smb.coordinator.idle_names import IdleNames
from smb.coordinator.known_pages import KnownPages
from smb.coordinator.memserver_client import MemoryServers
from smb.coordinator.metrics import LeaseMetrics, StateMetrics
from smb.coordinator.mirrors.filling import Mirrors
from smb.coordinator.moves.balancer import Balancer
from smb.coordinator.moves.copy_maker import CopyMaker
from smb.coordinator.options import CoordinatorOptions, OwnPorts
from smb.coordinator.outside import Outside
from smb.coordinator.replica_role_changes import RoleChanges
from smb.coordinator.segment_maker import SegmentMaker
from smb.coordinator.service import CoordinatorService
from smb.coordinator.session_end_notifier import SessionEndNotifier
from smb.coordinator.state import State
from smb.coordinator.store import DeposedError, Store, StoreError
from smb.coordinator.token_issuer import TokenIssuer
from smb.coordinator.traffic import Traffic
from smb.daemon.process import Answer
from smb.errors import Error
from smb.rpc import control_pb2 as pb

TICK_S = 0.5  # the end of a lease is noticed at most this late

_log = logging.getLogger("coordinator")


@dataclass(frozen=True, slots=True)
class Around:
    """The parts that outlive changes of the leader: the front of the port, the log lines and the counters of this
    process."""

    options: CoordinatorOptions
    front: Front
    health: Health
    registry: CollectorRegistry
    leases: LeaseMetrics
    pages_address: Callable[[], str]  # the pages' address, as others reach it
    outside: Outside = field(default_factory=Outside)
    ports: OwnPorts = field(default_factory=OwnPorts)


@dataclass(slots=True)
class ShownLeader:
    """The source of the pages, which changes with the leader."""

    leading: Leading | None = None
    known: KnownPages = field(default_factory=KnownPages)  # what etcd says of the other daemons


class Leading:
    """One period of leading. Made by `open`, which registers the end of its parts with the given exit stack."""

    def __init__(self, commit_log: CommitLog, dashboard: dashboard_interface.Dashboard, around: Around) -> None:
        self.commit_log = commit_log
        self.watch = dashboard.watch
        self._dashboard = dashboard
        self._around = around

    @staticmethod
    async def open(
        around: Around, store: Store, holds: Callable[[], bool], term: int, leaving: AsyncExitStack
    ) -> Leading:
        """Read the store, and from then on answer calls while `holds` returns True. `leaving` stops the parts in
        reverse order.

        Raises StoreError, DeposedError.
        """
        options, outside = around.options, around.outside
        tokens = None if options.credentials is None else await TokenIssuer.open(store, options.token_lifetime_s)
        begun = outside.now().monotonic
        commit_log = await CommitLog.open(
            store,
            outside.new_id(),
            session_lease_s=options.session_lease_s,
            server_lease_s=options.server_lease_s,
            stripe_bytes=options.stripe_bytes,
            quotas=options.quotas,
            clock=outside.now,
        )
        state_metrics = StateMetrics(lambda: (commit_log.state, commit_log.now()), outside.now().monotonic - begun)
        term = commit_log.state.lineage.stamp.term
        servers = MemoryServers(options.credentials, outside.connections, term, outside.draw)
        leaving.push_async_callback(servers.close)
        endings = SessionEndNotifier(commit_log, servers)
        leaving.push_async_callback(endings.close)
        around.registry.register(state_metrics)
        leaving.callback(around.registry.unregister, state_metrics)
        mirrors = Mirrors()
        dashboard = DashboardServer(
            lambda: (commit_log.state, commit_log.now()),
            lambda: (around.health.store_error, around.health.state_free_bytes()),
            around.front.address,
            mirrors,
        )

        def saw(event: Event, before: State, committed: Committed, now: Instant) -> None:
            around.leases.saw(event, before, committed, now)
            dashboard.watch.saw(event, before, committed, now)

        commit_log.on_commit = saw
        shared = pb.SharedSettings(checksum=options.checksum)
        segments = SegmentMaker(commit_log, servers, outside.new_id, outside.draw)
        leaving.push_async_callback(segments.finish)
        roles = RoleChanges(commit_log, servers, endings)
        copy_maker = CopyMaker(commit_log, servers, roles.tell_roles, segments.drop)
        roles.on_copies, roles.on_apart = copy_maker.look_now, copy_maker.keep_apart
        traffic = Traffic()
        copy_maker.on_switched = traffic.switched
        service = CoordinatorService(
            commit_log,
            servers,
            segments,
            roles,
            copy_maker,
            endings,
            dashboard.watch,
            dashboard.overview,
            mirrors,
            shared,
            tokens,
            outside,
            around.ports,
            traffic,
        )
        around.health.lead(commit_log, store, holds)
        around.front.lead(service, holds, term)
        leaving.callback(around.front.stand_by)
        leaving.callback(commit_log.stop_waiting)
        idle_names = IdleNames(commit_log, servers, segments.drop, options.idle_s)

        ticks = _tick(commit_log, endings, around.health, roles.seen_survivors)
        judging = _judge(commit_log, roles, copy_maker, segments)
        balancer = Balancer(commit_log, copy_maker, traffic, outside.in_thread, options.balance_after_s)
        for beginning in (_run(commit_log), ticks, judging, idle_names.run(), copy_maker.run(), balancer.run()):
            task = asyncio.create_task(beginning)
            task.add_done_callback(partial(end_if_failed, outside))
            leaving.push_async_callback(cancel, task)
        return Leading(commit_log, dashboard, around)

    def page(self, path: str, query: str) -> Answer | None:
        """Return the answer to GET path?query; None if no such page exists."""
        return self._dashboard(path, query)


async def _run(commit_log: CommitLog) -> None:
    while True:
        commit_log.runs()
        await asyncio.sleep(TICK_S)


async def _tick(
    commit_log: CommitLog,
    endings: SessionEndNotifier,
    health: Health,
    seen: Callable[[], Awaitable[frozenset[str]]],
) -> None:
    # One change has two records for each session (an old one may be forgotten), one for each server, and one for each
    # buffer that lost a copy.
    most = None if commit_log.changes_max is None else commit_log.changes_max // 4
    said = ""
    while True:
        more = False
        try:
            committed = await commit_log.commit(Ticked(most, await seen()))
            endings.tell(committed)
            more = most is not None and any(isinstance(effect, TellEnded | SaveBuffer) for effect in committed.effects)
            if committed.state.former_lease_s > committed.state.server_leases.duration_s:
                await commit_log.commit(LeaseShortened())
        except (StoreError, DeposedError):
            pass  # the commit log has logged it once; the next tick tries again
        except Error as error:
            if str(error) != said:
                said = str(error)
                _log.error("cannot end the leases that have run out; trying again: %s", said)
        health.ticked()
        await asyncio.sleep(0 if more else TICK_S)


async def _judge(commit_log: CommitLog, roles: RoleChanges, copy_maker: CopyMaker, segments: SegmentMaker) -> None:
    """Judge again and again what servers hold beside the records."""
    said = ""
    while True:
        await asyncio.sleep(TICK_S)
        unexplained = commit_log.state.unexplained.values()
        if not any(unexplained) and not commit_log.state.interrupted:
            continue
        try:
            unproven = await roles.unproven_copies({number for held in unexplained for number in held})
            await roles.mark_contested()
            making = copy_maker.making_anywhere()
            committed = await commit_log.commit(UnexplainedJudged(making, commit_log.changes_max, unproven))
            await roles.end_quarantine(committed)
            await segments.drop(committed)
        except (StoreError, DeposedError):
            pass  # the commit log has logged it once
        except Error as error:
            if str(error) != said:
                said = str(error)
                _log.warning("cannot judge the memory that servers hold beside the records; trying again: %s", said)


def end_if_failed(outside: Outside, task: asyncio.Task[None]) -> None:
    """End the process if a task that should run as long as this coordinator leads has failed because of a bug. Without
    the task the coordinator would do half of its work, and a supervisor's restart helps.
    """
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("the coordinator ends, because a part of it failed", exc_info=error)
        outside.end_process(1)


@asynccontextmanager
async def cancelled_at_end(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run the coroutine beside the block, and cancel it at the block's end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await cancel(task)


async def cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
