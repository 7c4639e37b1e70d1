"""Decides whether servers have room for copies: for those that leave a drained server, and for missing ones. Says which
buffers cannot leave. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass, replace

from smb.config.parse import format_bytes
from smb.coordinator.bundles import Bundles, bundle_of
from smb.coordinator.placement import SERVERS_SHOWN_MAX, Pool, place_copy
from smb.coordinator.records import BufferRecord, Kind, SegmentRecord
from smb.coordinator.replicas import stays_on
from smb.errors import OutOfMemoryError, UnavailableError

BOUND = (
    "it has one copy, which is bound to its server: a view of it was taken, a rule with state changes it, a lock "
    "fences it beside others, or a client reached it over RDMA or with transport='shm'. Stop its users, then: "
    "smb cp NAME NAME --replace. Do not do so with weights that have an optimizer state, because the copies would be "
    "on different servers: create both anew with replicas=2"
)
MIRROR = "it is a mirror; end it with: smb relay SOURCE --stop --to SERVER, where SOURCE is the published buffer's name"


@dataclass(frozen=True, slots=True)
class Staying:
    """A buffer that would leave bytes on a drained server: how many, and why."""

    record: BufferRecord
    segments: int
    nbytes: int
    why: str


def check_room(records: Collection[BufferRecord], pool: Pool, name: str) -> None:
    """Check that the other servers have room for the copies on this one. Raises UnavailableError if no other server can
    take copies, and OutOfMemoryError with the copies that do not fit.
    """
    free = {other: nbytes for other, nbytes in pool.free_bytes.items() if other != name}
    if not free:
        raise UnavailableError(
            "there is no other live memory server to take the copies; start one first (smb-memserver)"
        )
    pool = replace(pool, free_bytes=free)
    refused: dict[str, int] = {}
    for record, segment in sorted(_copies(records, name, Bundles(records)), key=lambda each: -each[1].file_bytes):
        title, wanted = record.title, record.replicas
        source = stays_on(segment, name) or segment.server
        # A segment with one copy left needs two new ones: a second copy, and one in place of the copy that leaves.
        for _ in range(1 if segment.backup or wanted == 1 else 2):
            target = place_copy(pool, source, segment.file_bytes)
            if not target:
                refused[title] = refused.get(title, 0) + segment.file_bytes
                break
            free[target] -= segment.file_bytes
            source = target
    if refused:
        worst = sorted(refused.items(), key=lambda each: -each[1])[:SERVERS_SHOWN_MAX]
        listed = ", ".join(f"{title} ({format_bytes(nbytes)})" for title, nbytes in worst)
        more = f" and {len(refused) - len(worst)} more" if len(refused) > len(worst) else ""
        raise OutOfMemoryError(
            f"the other servers have no room for copies of {listed}{more}; free: {_shown(pool, name)}. The copies "
            f"of a segment need one server each. Delete buffers (smb rm) or start another memory server (smb-memserver)"
        )


def staying(
    records: Collection[BufferRecord], pool: Pool, name: str, bound: Container[int] = frozenset()
) -> list[Staying]:
    """Return the buffers that will not leave a server, by name. Locks and barriers leave a while after their last use.
    `bound`: segments that their servers reported as unable to move.
    """
    found = []
    bundles = Bundles(records)
    for record in sorted(records, key=lambda record: record.name):
        ours = [segment for segment in record.copies if segment.server == name]
        if ours and record.ready and record.kind is Kind.BUFFER and (why := _why(record, pool, name, bound, bundles)):
            found.append(Staying(record, len(ours), sum(segment.file_bytes for segment in ours), why))
    return found


def without_room(record: BufferRecord, pool: Pool, bundles: Bundles) -> bool:
    """Whether some segment has one copy, and no other live server has room for a second one."""
    return any(
        not segment.backup
        and not segment.copying_to
        and pool.alive(segment.server)
        and not place_copy(pool, segment.server, bundles.file_bytes(record, segment))
        for segment in record.segments
    )


def _why(record: BufferRecord, pool: Pool, name: str, bound: Container[int], bundles: Bundles) -> str:
    if record.mirror_of:
        return MIRROR
    if any(segment.server == name and segment.id in bound for segment in record.segments):
        return BOUND
    stuck = [
        segment
        for _, segment in _copies((record,), name, bundles)
        if not place_copy(pool, stays_on(segment, name) or segment.server, segment.file_bytes)
    ]
    if not stuck:
        return ""
    return f"no other server has room for {format_bytes(stuck[0].file_bytes)}; free: {_shown(pool, name)}"


def _copies(
    records: Iterable[BufferRecord], name: str, bundles: Bundles
) -> Iterator[tuple[BufferRecord, SegmentRecord]]:
    """Yield the segments whose copy on a server can move and is not about to leave already. One segment stands for its
    bundle, with the bytes of the whole bundle.
    """
    seen: set[int] = set()
    for record in records:
        for segment in record.segments if record.replicas > 1 or record.moves_alone else ():
            here = (segment.server, segment.backup) if record.replicas > 1 else (segment.server,)
            moved = record.replicas == 1 and segment.backup
            if name in here and not segment.copying_to and not moved and bundle_of(segment) not in seen:
                seen.add(bundle_of(segment))
                yield record, replace(segment, file_bytes=bundles.file_bytes(record, segment))


def _shown(pool: Pool, name: str) -> str:
    free = sorted(((nbytes, other) for other, nbytes in pool.free_bytes.items() if other != name), reverse=True)
    shown = ", ".join(f"{other} {format_bytes(max(nbytes, 0))}" for nbytes, other in free[:SERVERS_SHOWN_MAX])
    return shown or "nowhere"
