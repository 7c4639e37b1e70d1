"""Takes over the segments of an earlier run: complete segments are served again, unfinished ones are removed, and
interrupted additions are finished."""

from __future__ import annotations

import logging
import time

from memserver.engine import Engine, Recovery
from memserver.life import Life
from memserver.memory_dir import MemoryDirectory
from memserver.segments import Segments
from smb.config.parse import format_bytes
from smb.daemon.own_files import fault_at
from smb.errors import Error, InvalidArgumentError, NotFoundError, OutOfMemoryError, PermissionDeniedError

_log = logging.getLogger("memserver")


def recover(engine: Engine, memory_dir: MemoryDirectory, segments: Segments, capacity_bytes: int) -> Life:
    """Adopt each segment file of this server's name. A file that is not a segment is reported and left in place.
    Returns what was found, for metrics.

    Raises InvalidArgumentError if the segments take more than the capacity: they are users' data, so none is given up.
    """
    begun = time.monotonic()
    complete, unfinished = memory_dir.segment_files()
    for path in unfinished:
        if memory_dir.make_way(path, must=False):
            _log.info("removed %s: a creation that was not finished", path)
    adopted = 0
    for path in complete:
        try:
            segments.adopt(engine.adopt_segment(path))
            adopted += 1
        except NotFoundError:
            path.unlink()
            _log.info("removed %s: its segment was deleted", path)
        except OutOfMemoryError:
            held = sum(other.lstat().st_size for other in complete if not fault_at(other))
            raise InvalidArgumentError(
                f'--capacity {format_bytes(capacity_bytes)} is less than what the segments of "{memory_dir.name}" in '
                f"{memory_dir.directory} take ({format_bytes(held)}); offer more, or remove their files to give that "
                f"data up"
            ) from None
        except PermissionDeniedError:
            _log.error("%s; the file stays and is not served", memory_dir.refusal(path, fault_at(path)))
        except Error as error:
            _log.error("%s; the file stays and is not served", error)
    if adopted:
        _log.info("found %d segments of an earlier run, %s", adopted, format_bytes(segments.used_bytes()))
    found = _recover_journal(engine, memory_dir)
    return Life(
        recovery_s=time.monotonic() - begun,
        recovered_segments=adopted,
        recovered_changes=found.finished,
        torn_chunks=found.torn_chunks,
    )


def _recover_journal(engine: Engine, memory_dir: MemoryDirectory) -> Recovery:
    """Finish the changes that a kill interrupted. Returning clients learn that the changes were made."""
    found = engine.open_journal(memory_dir.journal_path)
    if found.journal_lost:
        _log.warning("%s was not a journal of this program; it was replaced", memory_dir.journal_path)
    if found.finished:
        _log.info("finished %d changes that an earlier run was making", found.finished)
    if found.torn_chunks:
        _log.error(
            "%d chunks were being changed by an earlier run whose journal is gone: each element holds the old or the "
            "new value",
            found.torn_chunks,
        )
    return found
