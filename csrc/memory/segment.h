/* segment.h: a shared mapping with chunk locks. The only code that touches shared memory, in the daemon and in clients.
 *
 * The file (tmpfs):
 *   [0, 4096)             header: who it is; written once, except the words marked _Atomic
 *   [2048, 2560) of it    what waits: sync.h
 *   [chunks_offset, ..)   one 64-byte state per chunk: robust process-shared lock, sequence count, mark
 *   [records_offset, ..)  completion records: records.h
 *   [data_offset, ..)     the bytes, page aligned
 *
 * Locking. Whoever changes bytes of a chunk holds its lock and makes the sequence count odd meanwhile. No thread waits
 * for a chunk lock while it holds another, so there is no order to keep: what changes a chunk of several segments (APPLY) waits
 * for one lock, takes the others where they are free, else lets go of all and waits for the one that was not. Readers take none: they copy, and copy again if the count was
 * odd or moved; a reader that keeps losing takes the lock. A lock whose holder died is found by the next one to lock
 * (EOWNERDEAD): the chunk then holds, element by element, the old or the new value of the change that was under way, and the
 * count is made even again.
 *
 * Namespaces. A robust lock holds the thread id that its owner has in its PID namespace, and the kernel tells a dead owner by that
 * alone. So the header says in which namespace the locks hold: no process of another one maps the segment. A daemon that is
 * started in another one than its earlier run takes its segments along; clients of the old one, mapped as they are, get
 * SMB_NAMESPACE from their next operation. docs/decisions/0019.
 *
 * Marks. While the daemon makes a journalled change (journal.h) the chunk is marked with the slot it is made from. A marked chunk
 * whose lock is free was left by a daemon that was killed: nobody but the recovery of the next one touches it, and it is
 * not marked afterwards. Locking one waits for that. Recovery has no lock: that the mark is gone tells the next holder that all is done.
 *
 * Trust. Bounds come from a private copy of the header, checked against the file's size when it is mapped; nothing that
 * another process writes later can make us leave the mapping. A process that may map a segment can write anything into it,
 * locks included: mapping is given to processes of the daemon's own user only.
 */
#ifndef SMB_SEGMENT_H
#define SMB_SEGMENT_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "memory/kernels.h"
#include "memory/records.h"
#include "memory/sync.h"
#include "smb.h"

/* One change or read of a range within one chunk; APPLY: within the same chunk of each of several segments. */
struct smb_change {
    int opcode;            /* SMB_READ .. SMB_COMPARE_SWAP, SMB_APPLY */
    int op;
    double scale;
    uint64_t offset;
    uint64_t bytes;
    int wire;              /* enum smb_wire: of the source of WRITE and ACCUMULATE; the range is that of its elements decoded */
    uint32_t source_bytes; /* of SMB_WIRE_SPARSE */
    const void *source;    /* WRITE, ACCUMULATE; ACCUMULATE_FROM, APPLY: a copy of the other segment's bytes */
    struct smb_segment *states[SMB_RULE_STATES_MAX]; /* APPLY: changed with the segment; NULL where the rule, `op`, has none */
    struct smb_hyper hyper; /* APPLY */
    struct factors factors; /* of them */
    void *sink;            /* READ; ACCUMULATE: the new values, if not NULL */
    uint64_t argument;     /* FILL: element bits; FETCH_ADD: what to add; COMPARE_SWAP: the new value */
    uint64_t expected;     /* COMPARE_SWAP */
    bool streaming;        /* part of a call too large for the caches: copy around them */
    uint64_t result;       /* out: FETCH_ADD, COMPARE_SWAP: the old value */
};

enum { SMB_TRY = 0, SMB_TRY_ONCE = 1 }; /* as deadline_ns: do not wait; and do not even spin */

/* Does it, as a whole, under the chunk's lock (a read: as it stood at one instant). Waits for the lock until deadline_ns
 * (monotonic): SMB_TIMEOUT then; with SMB_TRY it spins for some microseconds and returns SMB_BUSY, nothing done.
 * SMB_INVALID where the range is not inside one chunk of the segment; SMB_NOT_FOUND once it is deleted; SMB_NAMESPACE once its
 * daemon is in another PID namespace. */
int smb_segment_apply(struct smb_segment *segment, struct smb_change *change, uint64_t deadline_ns);

/* The segments that a change of this one changes, itself first; returns how many. */
enum { SMB_TARGETS_MAX = 1 + SMB_RULE_STATES_MAX };
int smb_segment_targets(struct smb_segment *segment, const struct smb_change *change, struct smb_segment *targets[SMB_TARGETS_MAX]);
/* The chunk's lock in each of them, or SMB_BUSY and none. `deadline_ns` is SMB_TRY or SMB_TRY_ONCE. */
int smb_segment_lock_each(struct smb_segment *const *targets, int count, uint64_t offset, uint64_t deadline_ns);

/* The lock by itself, for the daemon's way of sending straight from the segment. SMB_OK: held. */
int smb_segment_lock(struct smb_segment *segment, uint64_t offset, uint64_t deadline_ns);
void smb_segment_unlock(struct smb_segment *segment, uint64_t offset);
/* Around a change made under the lock by the caller itself (receiving straight into the segment): the sequence count is odd in
 * between and even afterwards, whatever it was. */
void smb_segment_change_begin(struct smb_segment *segment, uint64_t offset);
void smb_segment_change_end(struct smb_segment *segment, uint64_t offset);

/* Under the lock and between begin and end: makes the change to the part [from, from + bytes) of its range. The 64-bit
 * operations have no parts. */
void smb_segment_change_range(struct smb_segment *segment, struct smb_change *change, uint64_t from, uint64_t bytes);
/* Whether the segment can have this change: range, alignment, op. Every change is asked this before it is made. */
bool smb_segment_change_fits(const struct smb_segment *segment, const struct smb_change *change);
/* After a read or change: SMB_NOT_FOUND where the segment was deleted meanwhile. What was read may be the zeros of memory
 * that was given back; the fence inside orders the look after the copy, and the daemon marks before it gives back. */
int smb_segment_still_there(const struct smb_segment *segment);

/* The chunk's mark; set under its lock. */
void smb_segment_mark(struct smb_segment *segment, uint64_t offset, uint32_t mark);
uint32_t smb_segment_marked(const struct smb_segment *segment, uint64_t offset);
/* Whether the sequence count is odd. */
bool smb_segment_changing(const struct smb_segment *segment, uint64_t offset);
/* At recovery, when every journal slot has been looked at: chunks still marked lost their journal. Gives them free, as they
 * are; returns how many. */
uint64_t smb_segment_clear_marks(struct smb_segment *segment);

struct record_table smb_segment_records(struct smb_segment *segment);
struct sync_words *smb_segment_sync_words(struct smb_segment *segment);
uint64_t smb_segment_data_bytes(const struct smb_segment *segment);
/* Keeps something beside it, freed with the last reference. */
void smb_segment_keep(struct smb_segment *segment, void *companion, void (*free_companion)(void *));
void *smb_segment_companion(const struct smb_segment *segment);

struct smb_segment *smb_segment_retain(struct smb_segment *segment);
/* Counts an operation of a local client where the daemon can read it. */
void smb_segment_count(struct smb_segment *segment, int opcode, uint64_t bytes);
/* Whether [offset, offset + bytes) lies in the segment and within one of its chunks. */
bool smb_segment_holds(const struct smb_segment *segment, uint64_t offset, uint64_t bytes);
/* As smb_segment_open, for the daemon: one that an earlier run left, in another PID namespace maybe, or in the format before. */
int smb_segment_take_over(const char *path, struct smb_segment **segment);
bool smb_segment_deleted(const struct smb_segment *segment);
uint64_t smb_segment_id(const struct smb_segment *segment);
uint32_t smb_segment_epoch(const struct smb_segment *segment);
int smb_segment_dtype(const struct smb_segment *segment);

#endif
