/* copy.h: how a primary makes a new copy of its segments: docs/decisions/0025-second-copy.md, "A
 * new copy".
 *
 * Threads. See replica.h; parts are sent by one control thread (smb_server_copy). */
#ifndef SMB_COPY_H
#define SMB_COPY_H

#include <stdint.h>

struct forward;
struct replica;

enum {
    COPY_QUEUED_BYTES_MAX = 2 << 20 /* of a copy's parts: changes have to queue up behind them */
};

/* Call with the lock held. The copy has to know that this server has evicted records before a lane
 * of an evicted record gets a new record there. */
void copy_tell_evictions(struct replica *replica);
/* Call with the lock held. Turns the change of a chunk that is still to be copied into a note: the
 * chunk will contain the change, and only its record is missing. */
void copy_make_note(struct replica *replica, struct forward *forward, const uint64_t *result);

#endif
