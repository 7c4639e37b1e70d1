"""Retention: whatever destroys a segment in this daemon asks here first.

Invariant: a segment goes only if another server has a whole copy of its epoch or a later one, if its deletion or the
end of its creation was acknowledged, or if an operator gave it up. A copy in quarantine that may be whole goes only if
it was deleted or given up, as a whole copy elsewhere may be of another history. A coordinator of before the quarantine
gives no reason, and cannot end it.
"""

from __future__ import annotations

from memserver.engine import FoundSegment
from smb.drop_reasons import Ground


def why_not(held: FoundSegment, ground: Ground, epoch: int, *, quarantined: bool) -> str:
    """Return why this segment must stay; empty if it may go. `epoch`: of the whole copy elsewhere, if SUPERSEDED."""
    if ground in (Ground.DELETED, Ground.FORGOTTEN):
        return ""
    if quarantined and held.whole is not False:
        return "it is in quarantine; free it with: smb forget"
    if ground is Ground.SUPERSEDED and held.whole is not False and held.epoch > epoch:
        return f"its copy here is of epoch {held.epoch}, later than the whole copy of epoch {epoch} elsewhere"
    return ""
