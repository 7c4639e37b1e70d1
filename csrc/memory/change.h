/* change.h: reads and changes of a range within one chunk. */
#ifndef SMB_CHANGE_H
#define SMB_CHANGE_H

#include "kernels/kernels.h"
#include "memory/chunk.h"
#include "memory/segment.h"

/* One change or read of a range within one chunk; APPLY: within the same chunk of each of several
 * segments. */
struct smb_change {
    int opcode; /* SMB_READ .. SMB_COMPARE_SWAP, SMB_APPLY */
    int op;
    double scale;
    uint64_t offset;
    uint64_t bytes;
    /* enum smb_wire, for the source of WRITE and ACCUMULATE; the range is that of the decoded
     * elements */
    int wire;
    uint32_t source_bytes; /* for SMB_WIRE_SPARSE */
    /* WRITE, ACCUMULATE; ACCUMULATE_FROM, APPLY: a copy of the other segment's bytes */
    const void *source;
    /* APPLY: segments that are changed together with this one; NULL if the rule, `op`, has no such
     * state */
    struct smb_segment *states[SMB_RULE_STATES_MAX];
    struct smb_hyper hyper; /* APPLY */
    struct factors factors; /* derived from hyper */
    void *sink;             /* READ; ACCUMULATE: the new values, if not NULL */
    /* an element's bits in the low bytes. FILL: every element; FETCH_ADD: the addend; COMPARE_SWAP:
     * the new value */
    uint64_t argument;
    uint64_t expected; /* COMPARE_SWAP */
    bool streaming;    /* part of a call too large for the caches: copy around them */
    uint64_t result;   /* out: FETCH_ADD, COMPARE_SWAP: the old value */
};

/* Makes a change, or a read, as a whole under the chunk's lock (a read gives the bytes of one
 * instant). Blocks until deadline_ns (monotonic) for the lock: SMB_TIMEOUT. With SMB_TRY it spins
 * for some microseconds and returns SMB_BUSY if the lock is still held. SMB_INVALID: the range is
 * not inside one chunk of the segment. SMB_NOT_FOUND: the segment is deleted. SMB_NAMESPACE: its
 * daemon is in another PID namespace. SMB_STALE_EPOCH: the segment is gated, and this process is
 * not its daemon. After any of these nothing was changed, except that a change which coincided with
 * the deletion may have been made. */
int smb_segment_apply(struct smb_segment *segment, struct smb_change *change, uint64_t deadline_ns);

/* Lists the segments that a change of this segment changes, this one first; returns how many. */
enum { SMB_TARGETS_MAX = 1 + SMB_RULE_STATES_MAX };
int smb_segment_targets(struct smb_segment *segment, const struct smb_change *change,
                        struct smb_segment *targets[SMB_TARGETS_MAX]);

/* Makes the change to the part [from, from + bytes) of its range. Call it under the lock, between
 * begin and end. FETCH_ADD and COMPARE_SWAP cannot be divided into parts. */
void smb_segment_change_range(struct smb_segment *segment, struct smb_change *change, uint64_t from,
                              uint64_t bytes);

/* Whether the change is valid for the segment: range, alignment, op. Checked before every
 * change. */
bool smb_segment_change_fits(const struct smb_segment *segment, const struct smb_change *change);

/* Checks a read that was made without the chunk's lock. SMB_NOT_FOUND: the segment was deleted
 * meanwhile, so the read may have found the zeros of freed memory. SMB_STALE_EPOCH: it was gated,
 * so newer bytes may lie on another server. The fence inside orders this check after the copy; the
 * daemon sets the mark before it frees the memory. */
int smb_segment_still_there(const struct smb_segment *segment);

#endif
