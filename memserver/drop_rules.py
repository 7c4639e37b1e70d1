"""Retention: all code in this daemon that destroys a segment asks here first.

Invariant: a segment is destroyed only if another server has a whole copy of its epoch or a later one, if its deletion
or the end of its creation was acknowledged, or if an operator gave it up. A quarantined copy that may be whole is
destroyed only if it was deleted or given up, because a whole copy elsewhere may be of another history. The end of its
creation is a reason only for a segment that nobody has written to. Coordinators of versions without quarantine give no
reason, and cannot end a quarantine.
"""

from __future__ import annotations

from memserver.engine import FoundSegment
from smb.drop_reasons import Ground


def why_not(held: FoundSegment, ground: Ground, epoch: int, *, quarantined: bool) -> str:
    """Return why the segment must stay; empty if it may go. `epoch`: of the whole copy elsewhere, for SUPERSEDED."""
    if ground in (Ground.DELETED, Ground.FORGOTTEN):
        return ""
    if quarantined and held.whole is not False:
        return "it is in quarantine; free it with: smb forget"
    if ground is Ground.NEVER_MADE and held.whole is not False and not held.untouched:
        return "its creation is said to have failed, but clients have written to it"
    if ground is Ground.SUPERSEDED and held.whole is not False and held.epoch > epoch:
        return f"its copy here is of epoch {held.epoch}, later than the whole copy of epoch {epoch} elsewhere"
    return ""
