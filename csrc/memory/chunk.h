/* chunk.h: the locks, sequence counts and marks of a segment's chunks.
 *
 * Locking. A writer holds the chunk's lock, and keeps the sequence count odd while it changes
 * bytes: it stores count | 1, then a release fence, changes, and stores (count | 1) + 1 with
 * release. No thread waits for a chunk lock while it holds another, so there is no lock order.
 * APPLY changes the chunk of several segments: it waits for one lock and tries the others. If one
 * of the others is held, APPLY releases all and next waits for the lock that was held.
 *
 * Readers take no lock. They load the count with acquire, copy, and load the count again after an
 * acquire fence. They copy again if the count was odd or has moved. A reader that fails repeatedly
 * takes the lock.
 *
 * The next process to lock finds a dead owner's lock (EOWNERDEAD). The chunk then holds, element by
 * element, the old or the new value of the dead owner's change. The count is made even again.
 *
 * Marks. The daemon marks a chunk with the journal slot of the change that it makes (journal.h). If
 * a marked chunk's lock is free, a daemon was killed there, and only the recovery of the next
 * daemon may touch the chunk. Whoever locks such a chunk waits until the mark is gone. Recovery
 * takes no lock: the missing mark tells the next holder that recovery is complete. */
#ifndef SMB_CHUNK_H
#define SMB_CHUNK_H

#include "base/clock.h"
#include "memory/segment.h"

/* values of deadline_ns. SMB_TRY: do not sleep. SMB_TRY_ONCE: do not spin either */
enum { SMB_TRY = 0, SMB_TRY_ONCE = 1 };

/* Takes the chunk's lock in all of the segments, or in none: SMB_BUSY. `deadline_ns` is SMB_TRY or
 * SMB_TRY_ONCE. */
int smb_segment_lock_each(struct smb_segment *const *targets, int count, uint64_t offset,
                          uint64_t deadline_ns);

/* Takes the lock alone, for a daemon that sends directly from the segment. SMB_OK: the lock is
 * held. */
int smb_segment_lock(struct smb_segment *segment, uint64_t offset, uint64_t deadline_ns);
void smb_segment_unlock(struct smb_segment *segment, uint64_t offset);
/* Surround a change that the caller makes itself under the lock (receiving directly into the
 * segment). The sequence count is odd in between and even afterwards, whatever it was before. */
void smb_segment_change_begin(struct smb_segment *segment, uint64_t offset);
void smb_segment_change_end(struct smb_segment *segment, uint64_t offset);

/* Whether no chunk has ever changed, and nobody has held the bytes, by a view or RDMA, who changes
 * them without a count. Reads up to a cache line of each chunk. */
bool smb_segment_untouched(const struct smb_segment *segment);

/* Sets the chunk's mark, under its lock. */
void smb_segment_mark(struct smb_segment *segment, uint64_t offset, uint32_t mark);
uint32_t smb_segment_marked(const struct smb_segment *segment, uint64_t offset);
/* Whether the sequence count is odd. */
bool smb_segment_changing(const struct smb_segment *segment, uint64_t offset);
/* For recovery, after every journal slot has been looked at: chunks that are still marked have lost
 * their journal. Releases them as they are; returns how many. */
uint64_t smb_segment_clear_marks(struct smb_segment *segment);

#endif
