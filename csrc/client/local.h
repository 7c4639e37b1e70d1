/* local.h: the part of a call on mapped segments, which the calling thread does. */
#ifndef SMB_LOCAL_H
#define SMB_LOCAL_H

#include "client/buffer.h"
#include "client/call.h"

/* The local part of a call: one piece per step, so that the links can be served in between. */
struct local_work {
    struct smb_buffer *buffer;
    const struct smb_request *request;
    const struct call *call;
    struct smb_outcome *outcome;
    uint64_t deadline_ns;
    /* size of the whole request of which this one is a part; 0: it is not a part */
    uint64_t whole_bytes;
    uint32_t index; /* the segment's index */
    bool walking;
    struct smb_cursor cursor;
    uint64_t bytes_here; /* done on this segment */
    /* of a sparse read: what is left of the cursor's piece, if a run had to wait; 0 bytes: none */
    struct smb_piece rest;
    /* one chunk: the source of ACCUMULATE_FROM, else the piece in its wire format; two chunks if
     * there are several sources */
    uint8_t *scratch;
};

/* Does one piece. False: nothing is left. */
bool local_step(void *argument);

#endif
