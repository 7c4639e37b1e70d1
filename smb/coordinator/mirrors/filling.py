"""The plans by which mirrors are filled, computed from what relays reported and which servers are alive.

Nothing here is stored. A coordinator that was restarted hears the reports again with the next renewals, and with them
which plans are in use. Until then it gives no plans, and relays continue with those that they have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from smb.coordinator.beside_loop import BesideLoop
from smb.coordinator.events import Instant
from smb.coordinator.mirrors.link_rates import Flow
from smb.coordinator.mirrors.plans import MirrorPlan, MirrorPlans
from smb.coordinator.mirrors.trees import RelayTree, TreeNode, rate_of
from smb.coordinator.records import BufferRecord
from smb.coordinator.state import State
from smb.rpc import control_pb2 as pb

Trees: TypeAlias = Sequence[RelayTree]
Pack: TypeAlias = Callable[[], Trees]
Adopt: TypeAlias = Callable[[Trees], None]
_KEY = "mirrors"  # the place of all plans in the queue of long computations
_log = logging.getLogger("coordinator")
_BEGINS_S = 15.0  # upper bound of a relay's start; until then readers assume that a report will come
_RATE_MIN, _RATE_MAX = 1.0, 1e15  # bytes per second
_FASTER = 1.1  # a new plan for the same relays must be so many times as fast: measured rates vary


@dataclass(frozen=True, slots=True)
class _ReportTaken:
    at: float  # monotonic
    report: pb.MirrorReport


class Mirrors:
    """The last report of each mirror's relay, and the plans. Used in the coordinator's loop only."""

    def __init__(self) -> None:
        # Packs trees, and gives them to the function that it gets. Here: at once, in the loop.
        self._pack: Callable[[Pack, Adopt], None] = lambda pack, adopt: adopt(pack())
        self._reports: dict[
            int, _ReportTaken
        ] = {}  # by the mirror's id, since a mirror may be made anew under its name
        self._plans: dict[int, MirrorPlans] = {}  # by the source's id

    def pack_beside(self, beside: BesideLoop) -> None:
        """From now on pack trees in another thread: with 64 relays in several zones that takes up to 0.25 s. Until it
        is done, the plan before goes on.
        """
        under_way: set[asyncio.Task[None]] = set()

        async def packed(pack: Pack, adopt: Adopt) -> None:
            try:
                adopt(await beside.run(_KEY, pack))
            except Exception:  # noqa: BLE001 - a bug of ours: mirrors go on with the plan that they have
                _log.exception("cannot plan trees for mirrors")

        def begin(pack: Pack, adopt: Adopt) -> None:
            task = asyncio.get_running_loop().create_task(packed(pack, adopt))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

        self._pack = begin

    def record(self, state: State, server: str, request: pb.RenewServerRequest, now: Instant) -> None:
        """Store a server's reports of the mirrors that it has."""
        for report in request.mirrors:
            record = state.buffers.get(report.name)
            if record is None or report.id not in (0, record.id):
                continue
            if record.mirror_of and record.segments[0].server == server:
                self._reports[record.id] = _ReportTaken(now.monotonic, report)
                plans = self._plans.setdefault(record.mirror_of, MirrorPlans(now.monotonic))
                plans.hear(report.published, report.plan_number, report.plan_last_version, now.monotonic)
        if len(self._reports) + len(self._plans) > 2 * len(state.buffers):
            ids = {record.id for record in state.buffers.values()}
            self._reports = {id_: last for id_, last in self._reports.items() if id_ in ids}
            self._plans = {id_: plans for id_, plans in self._plans.items() if id_ in ids}

    def tasks(self, state: State, server: str, now: Instant) -> list[pb.MirrorTask]:
        """Return which mirrors this server's relay must fill, and from which servers."""
        tasks = []
        for record in state.buffers.at(server):
            if record.mirror_of and record.ready and record.segments[0].server == server:
                source = state.source(record)
                if source is not None:
                    tasks.append(self._task(state, source, record, now))
        return tasks

    def messages(self, state: State, source: BufferRecord, now: Instant) -> list[pb.Mirror]:
        """Return the messages that describe a published buffer's mirrors to readers and operators."""
        messages = []
        mirrors = state.mirrors(source)
        last_of = {each.id: self._reports[each.id] for each in mirrors if each.id in self._reports}
        published = max((last.report.published for last in last_of.values()), default=0)
        for record in mirrors:
            server = state.servers.get(record.segments[0].server)
            last = last_of.get(record.id)
            message = pb.Mirror(
                name=record.name,
                id=record.id,
                server=record.segments[0].server,
                zone=server.zone if server is not None else "",
                alive=self._is_alive(state, record, now),
            )
            if last is None and now.wall - record.created_at < _BEGINS_S:
                message.alive = state.alive(message.server, now)
            if last is not None:
                message.version = last.report.version
                message.arrived_bytes = last.report.arrived_bytes
                message.published = published
                message.feeds.extend(last.report.feeds)
            messages.append(message)
        return messages

    def _is_alive(self, state: State, record: BufferRecord, now: Instant) -> bool:
        last = self._reports.get(record.id)
        heard = last is not None and now.monotonic - last.at < state.server_leases.duration_s
        return heard and state.alive(record.segments[0].server, now)

    def _task(self, state: State, source: BufferRecord, mirror: BufferRecord, now: Instant) -> pb.MirrorTask:
        task = pb.MirrorTask(name=mirror.name, source=source.name, id=mirror.id)
        plans = self._plans.get(source.id)
        if plans is not None:
            relays = [each for each in state.mirrors(source) if self._is_alive(state, each, now)]
            self._decide(state, source, relays, plans, now)
            plans.extend()
            alive = {each.name for each in relays}
            task.plans.extend(_plan_message(each, mirror.name, source.name, alive) for each in plans.plans)
        return task

    def _decide(
        self, state: State, source: BufferRecord, relays: list[BufferRecord], plans: MirrorPlans, now: Instant
    ) -> None:
        """Make a new plan if relays came or went, or if it is much faster than the present one."""
        if not relays or self._is_early(state, source, plans, now):
            return
        names = frozenset(each.name for each in relays)
        versions = [self._reports[each.id].report.version for each in relays]
        version = min(each for each in versions if each + 1 >= max(versions))  # a stuck relay delays no plan
        if (names, version) == plans.planned_for or (plans.plans and not plans.is_in_force):
            return
        if plans.plans and plans.plans[-1].relays == names and not plans.is_measured(version):
            return
        plans.planned_for = (names, version)
        latest: tuple[RelayTree, ...] = plans.plans[-1].trees if plans.plans else ()
        edges = {(parent, name) for tree in latest for name, parent in tree.parents.items()}
        weighted = [_node(state, each) for each in (source, *relays)]
        nodes, pairs = plans.link_rates.estimate(weighted, self._flows(relays), edges)
        asked = plans.planned_for

        def pack() -> Trees:
            from smb.coordinator.mirrors.tree_packing import (
                pack as packed,  # imports numpy, which few coordinators need
            )

            return packed(nodes[0], nodes[1:], pairs)

        def adopt(trees: Trees) -> None:
            if plans.planned_for is not asked or (plans.plans and not plans.is_in_force):
                return  # another decision came between
            if (
                not latest
                or plans.plans[-1].relays != names
                or rate_of(trees, nodes, pairs) >= _FASTER * rate_of(latest, nodes, pairs)
            ):
                plans.begin(trees)

        self._pack(pack, adopt)

    def _is_early(self, state: State, source: BufferRecord, plans: MirrorPlans, now: Instant) -> bool:
        """Return True while more relays may report soon: each plan holds for a version at least, so one for some of
        them would delay the plan for all.
        """
        if not plans.plans and plans.number and now.monotonic - plans.since < state.server_leases.duration_s:
            heard = state.mirrors(source)  # after a restart: which plans are in use?
        else:
            heard = [each for each in state.mirrors(source) if now.wall - each.created_at < _BEGINS_S]
        servers = [each.segments[0].server for each in heard if each.id not in self._reports]
        return any(state.alive(server, now) for server in servers)

    def _flows(self, relays: list[BufferRecord]) -> list[Flow]:
        """Return what the relays measured, as far as it can be a rate."""
        return [
            Flow(feed.name, relay.name, feed.bytes_per_s, feed.limited)
            for relay in relays
            for feed in self._reports[relay.id].report.feeds
            if _RATE_MIN <= feed.bytes_per_s <= _RATE_MAX
        ]


def _plan_message(plan: MirrorPlan, mirror: str, source: str, alive: set[str]) -> pb.MirrorPlan:
    message = pb.MirrorPlan(number=plan.number, first_version=plan.first_version, last_version=plan.last_version)
    for end, name in plan.parents_of(mirror, source, alive):
        message.parents.add(end=end, name=name)
    return message


def _node(state: State, record: BufferRecord) -> TreeNode:
    """Return the node of a buffer, with the weight of its servers as its rate."""
    names = {segment.server for segment in record.segments}
    weight = sum(state.servers[name].weight for name in names if name in state.servers) or 1.0
    server = state.servers.get(record.segments[0].server)
    return TreeNode(record.name, weight, server.zone if server is not None else "")
