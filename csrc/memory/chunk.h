/* chunk.h: the locks, sequence counts and marks of a segment's chunks.
 *
 * Locking. Whoever changes bytes of a chunk holds its lock and makes the sequence count odd meanwhile. No thread waits
 * for a chunk lock while it holds another, so there is no order to keep: what changes a chunk of several segments (APPLY) waits
 * for one lock, takes the others where they are free, else lets go of all and waits for the one that was not. Readers take none: they copy, and copy again if the count was
 * odd or moved; a reader that keeps losing takes the lock. A lock whose holder died is found by the next one to lock
 * (EOWNERDEAD): the chunk then holds, element by element, the old or the new value of the change that was under way, and the
 * count is made even again.
 *
 * Marks. While the daemon makes a journalled change (journal.h) the chunk is marked with the slot it is made from. A marked chunk
 * whose lock is free was left by a daemon that was killed: nobody but the recovery of the next one touches it, and it is
 * not marked afterwards. Locking one waits for that. Recovery has no lock: that the mark is gone tells the next holder that all is done.
 */
#ifndef SMB_CHUNK_H
#define SMB_CHUNK_H

#include "base/clock.h"
#include "memory/segment.h"

enum { SMB_TRY = 0, SMB_TRY_ONCE = 1 }; /* as deadline_ns: do not wait; and do not even spin */

/* The chunk's lock in each of them, or SMB_BUSY and none. `deadline_ns` is SMB_TRY or SMB_TRY_ONCE. */
int smb_segment_lock_each(struct smb_segment *const *targets, int count, uint64_t offset, uint64_t deadline_ns);

/* The lock by itself, for the daemon's way of sending straight from the segment. SMB_OK: held. */
int smb_segment_lock(struct smb_segment *segment, uint64_t offset, uint64_t deadline_ns);
void smb_segment_unlock(struct smb_segment *segment, uint64_t offset);
/* Around a change made under the lock by the caller itself (receiving straight into the segment): the sequence count is odd in
 * between and even afterwards, whatever it was. */
void smb_segment_change_begin(struct smb_segment *segment, uint64_t offset);
void smb_segment_change_end(struct smb_segment *segment, uint64_t offset);

/* The chunk's mark; set under its lock. */
void smb_segment_mark(struct smb_segment *segment, uint64_t offset, uint32_t mark);
uint32_t smb_segment_marked(const struct smb_segment *segment, uint64_t offset);
/* Whether the sequence count is odd. */
bool smb_segment_changing(const struct smb_segment *segment, uint64_t offset);
/* At recovery, when every journal slot has been looked at: chunks still marked lost their journal. Gives them free, as they
 * are; returns how many. */
uint64_t smb_segment_clear_marks(struct smb_segment *segment);

#endif
