/* request.h: a request on its way through the gate, and what the gate knows of its connection. */
#ifndef SMB_REQUEST_H
#define SMB_REQUEST_H

#include "base/frame.h"
#include "memory/chunk.h"
#include "memory/journal.h"
#include "memory/segment.h"
#include "server/grants.h"

struct forward;
struct segment_bundle;
struct smb_server;

/* The gate's knowledge of a connection, from one request to the next. */
struct gate_peer {
    struct grants grants; /* what it has shown; not looked at unless the server is guarded */
    uint32_t record_hint;
    /* of segments with two copies (replica.h) */
    bool fed; /* it is a primary's, for its backup here */
    /* for these segments it was taken as their primary's: frames of many sessions; NULL */
    struct segment_bundle *feeds;
    /* a change for the one segment of its lane was sent away: so is every later one, as the lane's
     * watermark would speak for the first one, too */
    bool sent_away;
};

/* The part of a request that stays from one try to the next, if it is deferred. */
struct gate_tries {
    bool retried;      /* this is not the first one */
    uint64_t begun_ns; /* when it came */
    /* 1 + what each source's bytes in `scratch` wait for; 0: none there */
    uint64_t gathered[SMB_SOURCES_MAX];
};

struct gate_request {
    struct smb_frame frame;
    struct gate_peer *peer;
    struct gate_tries tries;
    struct smb_segment *segment; /* a reference while the request is in hand */
    /* references too. ACCUMULATE_FROM: the sources; APPLY: gradient, then state */
    struct smb_segment *others[SMB_SOURCES_MAX];
    struct record *record; /* of the change's lane, while it is carried out */
    /* of a segment with two copies (replica.h) */
    bool alone;              /* it had one copy, and was not gated, when this was begun */
    struct forward *forward; /* what is to go to the backup */
    uint64_t order;          /* what its answer waits for; 0: nothing */
};

/* How long it tries a chunk's lock. A retried request must not spin: many of them, each a
 * millisecond, would keep the loop busy. */
static inline int gate_patience(const struct gate_request *request)
{
    return request->tries.retried ? SMB_TRY_ONCE : SMB_TRY;
}

#endif
