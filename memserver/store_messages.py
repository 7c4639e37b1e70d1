"""Conversions between this daemon's values and control.proto's messages about segments and records."""

from __future__ import annotations

from memserver.engine import FoundSegment
from memserver.stamps import ServerStamp
from smb.rpc import control_pb2 as pb

WHOLE, PRIMARY, BACKUP, QUARANTINED, UNKNOWN, UNTOUCHED = 1, 2, 4, 8, 16, 32
_ROLES = {0: 0, 1: PRIMARY, 2: BACKUP}


def inventory_message(held: FoundSegment, quarantined: bool) -> pb.HeldSegment:
    """Return the message that reports a segment to the coordinator."""
    flags = {True: WHOLE, False: 0, None: UNKNOWN}[held.whole] | _ROLES[held.role]
    flags |= (QUARANTINED if quarantined else 0) | (UNTOUCHED if held.untouched else 0)
    return pb.HeldSegment(id=held.id, epoch=held.epoch, flags=flags, file_bytes=held.file_bytes)


def stamp_message(stamp: ServerStamp) -> pb.StoreStamp:
    return pb.StoreStamp(cluster=stamp.cluster, term=stamp.term, sequence=stamp.sequence)


def stamp_of(message: pb.StoreStamp) -> ServerStamp:
    return ServerStamp(message.cluster, message.term, message.sequence)
