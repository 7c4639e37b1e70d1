/* change.h: reads and changes of a range within one chunk. */
#ifndef SMB_CHANGE_H
#define SMB_CHANGE_H

#include "memory/chunk.h"
#include "memory/kernels.h"
#include "memory/segment.h"

/* One change or read of a range within one chunk; APPLY: within the same chunk of each of several
 * segments. */
struct smb_change {
    int opcode; /* SMB_READ .. SMB_COMPARE_SWAP, SMB_APPLY */
    int op;
    double scale;
    uint64_t offset;
    uint64_t bytes;
    /* enum smb_wire: of the source of WRITE and ACCUMULATE; the range is that of its elements
     * decoded */
    int wire;
    uint32_t source_bytes; /* of SMB_WIRE_SPARSE */
    /* WRITE, ACCUMULATE; ACCUMULATE_FROM, APPLY: a copy of the other segment's bytes */
    const void *source;
    /* APPLY: changed with the segment; NULL if the rule, `op`, has none */
    struct smb_segment *states[SMB_RULE_STATES_MAX];
    struct smb_hyper hyper; /* APPLY */
    struct factors factors; /* of them */
    void *sink;             /* READ; ACCUMULATE: the new values, if not NULL */
    uint64_t argument; /* FILL: element bits; FETCH_ADD: what to add; COMPARE_SWAP: the new value */
    uint64_t expected; /* COMPARE_SWAP */
    bool streaming;    /* part of a call too large for the caches: copy around them */
    uint64_t result;   /* out: FETCH_ADD, COMPARE_SWAP: the old value */
};

/* Does it, as a whole, under the chunk's lock (a read: as it stood at one instant). Waits for the
 * lock until deadline_ns (monotonic): SMB_TIMEOUT then; with SMB_TRY it spins for some microseconds
 * and returns SMB_BUSY, nothing done. SMB_INVALID if the range is not inside one chunk of the
 * segment; SMB_NOT_FOUND once it is deleted; SMB_NAMESPACE once its daemon is in another PID
 * namespace; SMB_STALE_EPOCH once it is gated and this is not its daemon. Nothing was changed with
 * any of them, but that a change that met a deletion may have been made. */
int smb_segment_apply(struct smb_segment *segment, struct smb_change *change, uint64_t deadline_ns);

/* The segments that a change of this one changes, itself first; returns how many. */
enum { SMB_TARGETS_MAX = 1 + SMB_RULE_STATES_MAX };
int smb_segment_targets(struct smb_segment *segment, const struct smb_change *change,
                        struct smb_segment *targets[SMB_TARGETS_MAX]);

/* Under the lock and between begin and end: makes the change to the part [from, from + bytes) of
 * its range. The 64-bit operations have no parts. */
void smb_segment_change_range(struct smb_segment *segment, struct smb_change *change, uint64_t from,
                              uint64_t bytes);

/* Whether the segment can have this change: range, alignment, op. Every change is asked this before
 * it is made. */
bool smb_segment_change_fits(const struct smb_segment *segment, const struct smb_change *change);

/* After a read without the chunk's lock: SMB_NOT_FOUND if the segment was deleted meanwhile: it may
 * have found the zeros of freed memory. SMB_STALE_EPOCH if it was gated: newer bytes may lie on
 * another server. The fence inside orders this check after the copy, and the daemon sets the mark
 * before it frees. */
int smb_segment_still_there(const struct smb_segment *segment);

#endif
