/* chunk.h: the locks, sequence counts and marks of a segment's chunks.
 *
 * Locking. A writer holds the chunk's lock, and keeps the sequence count odd while it changes
 * bytes: it stores count | 1, then a release fence, changes, and stores (count | 1) + 1 with
 * release. No thread waits for a chunk lock while it holds another, so there is no lock order.
 * APPLY changes the chunk of several segments: it waits for one lock and takes the others if they
 * are free. Otherwise it releases all and waits for the one that was taken.
 *
 * Readers take no lock. They load the count with acquire, copy, and load it again after an acquire
 * fence. They copy again if the count was odd or has moved. A reader that keeps losing takes the
 * lock.
 *
 * The next process to lock finds a dead owner's lock (EOWNERDEAD). The chunk then holds, element by
 * element, the old or the new value of the dead owner's change. The count is made even again.
 *
 * Marks. The daemon marks a chunk with the journal slot of the change that it makes (journal.h). A
 * marked chunk with a free lock was left by a killed daemon. Only the recovery of the next daemon
 * may touch it. Locking such a chunk waits until the mark is gone. Recovery takes no lock: a mark
 * that is gone tells the next holder that all is done.
 */
#ifndef SMB_CHUNK_H
#define SMB_CHUNK_H

#include "base/clock.h"
#include "memory/segment.h"

enum { SMB_TRY = 0, SMB_TRY_ONCE = 1 }; /* as deadline_ns: do not wait; and do not even spin */

/* The chunk's lock in each of them, or SMB_BUSY and none. `deadline_ns` is SMB_TRY or
 * SMB_TRY_ONCE. */
int smb_segment_lock_each(struct smb_segment *const *targets, int count, uint64_t offset,
                          uint64_t deadline_ns);

/* The lock by itself, for a daemon that sends straight from the segment. SMB_OK: held. */
int smb_segment_lock(struct smb_segment *segment, uint64_t offset, uint64_t deadline_ns);
void smb_segment_unlock(struct smb_segment *segment, uint64_t offset);
/* Around a change made under the lock by the caller itself (receiving straight into the segment):
 * the sequence count is odd in between and even afterwards, whatever it was. */
void smb_segment_change_begin(struct smb_segment *segment, uint64_t offset);
void smb_segment_change_end(struct smb_segment *segment, uint64_t offset);

/* The chunk's mark; set under its lock. */
void smb_segment_mark(struct smb_segment *segment, uint64_t offset, uint32_t mark);
uint32_t smb_segment_marked(const struct smb_segment *segment, uint64_t offset);
/* Whether the sequence count is odd. */
bool smb_segment_changing(const struct smb_segment *segment, uint64_t offset);
/* At recovery, when every journal slot has been looked at: chunks still marked lost their journal.
 * Gives them free, as they are; returns how many. */
uint64_t smb_segment_clear_marks(struct smb_segment *segment);

#endif
