/* local.h: the part of a call on mapped segments, carried out by the calling thread. */
#ifndef SMB_LOCAL_H
#define SMB_LOCAL_H

#include "client/buffer.h"
#include "client/call.h"

/* The local part of a call, one piece per step, so that the links can be looked after in
 * between. */
struct local_work {
    struct smb_buffer *buffer;
    const struct smb_request *request;
    const struct call *call;
    struct smb_outcome *outcome;
    uint64_t deadline_ns;
    uint64_t whole_bytes; /* of what the request is a part of, 0: of nothing else */
    uint32_t index;       /* of the segment */
    bool walking;
    struct smb_cursor cursor;
    uint64_t bytes_here; /* done on this segment */
    /* one chunk: of ACCUMULATE_FROM the source, else the piece as it would travel; two chunks of
     * several sources */
    uint8_t *scratch;
};

/* false: nothing left. */
bool local_step(void *argument);

#endif
