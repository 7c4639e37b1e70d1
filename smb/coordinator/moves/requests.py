"""What operators ask about moves: how far a drain is, and a plan that spreads copies evenly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.moves.copy_maker import CopyMaker
from smb.coordinator.moves.move import Move
from smb.coordinator.moves.rebalance import plan
from smb.coordinator.moves.wanted_copies import copies_to_come
from smb.coordinator.room_to_drain import Staying, staying
from smb.rpc import control_pb2 as pb

STAYS_SHOWN_MAX = 256

_InThread = Callable[[Callable[[], list[Move]]], Awaitable[list[Move]]]


def drain_reply(commit_log: CommitLog, copy_maker: CopyMaker, server: str) -> pb.DrainServerReply:
    """Return how far the drain of a server is."""
    state = commit_log.state
    held = state.allocation(server)
    pool = state.pool(commit_log.now())
    stays = staying(state.buffers.values(), pool, server, copy_maker.bound())
    return pb.DrainServerReply(
        segment_count=held.segments,
        nbytes=held.nbytes,
        moving=held.segments - sum(each.segments for each in stays),
        stays=map(_stays_message, stays[:STAYS_SHOWN_MAX]),
        stays_left_out=max(0, len(stays) - STAYS_SHOWN_MAX),
        copying=copies_to_come(state.buffers.values(), pool, copy_maker.resting()),
    )


async def rebalance(
    request: pb.RebalanceRequest,
    commit_log: CommitLog,
    copy_maker: CopyMaker,
    traffic: Mapping[int, float],
    in_thread: _InThread,
) -> pb.RebalanceReply:
    """Plan moves, and have them made unless it is a dry run. `in_thread` runs the planning, which takes long with very
    many buffers. `traffic`: by segment, of primaries.
    """
    state = commit_log.state
    pool = state.pool(commit_log.now())
    capacity = {name: state.servers[name].capacity_bytes for name in pool.free_bytes}
    records, bound = list(state.buffers.values()), frozenset(copy_maker.bound())

    def planned(single_copies: bool) -> list[Move]:
        return plan(records, pool, capacity, traffic=traffic, single_copies=single_copies, bound=bound)

    moves = await in_thread(lambda: planned(request.single_copies))
    left = 0
    if not request.single_copies:
        all_of_them = await in_thread(lambda: planned(True))
        alone = {segment.id for record in records if record.moves_alone for segment in record.segments}
        left = len({move.segment_id for move in all_of_them} & alone)
    if not request.dry_run:
        copy_maker.audit.rebalance()
        copy_maker.move(moves)
    return pb.RebalanceReply(moves=map(_move_message, moves), single_left=left)


def _stays_message(staying: Staying) -> pb.Stays:
    return pb.Stays(name=staying.record.name, nbytes=staying.nbytes, why=staying.why)


def _move_message(move: Move) -> pb.Move:
    return pb.Move(
        title=move.title, nbytes=move.nbytes, leaving=move.leaving, target=move.target, switches=move.switches
    )
