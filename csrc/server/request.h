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

/* The gate's knowledge of a connection, which lasts from one request to the next. */
struct gate_peer {
    struct grants grants; /* shown tokens; used only if the server is guarded */
    uint32_t record_hint;
    /* for segments with two copies (replica.h) */
    bool fed; /* this is a primary's connection for its backup here */
    /* the bundle whose primary the peer is, with frames of many sessions; else NULL */
    struct segment_bundle *feeds;
    /* A change on a lane of one segment got SMB_STALE_EPOCH, because this server does not have the
     * role of that epoch yet. Every later change on the connection gets it, too, even if the server
     * takes the role meanwhile: if a later one was applied, the lane's watermark would also cover
     * the first, which was not. */
    bool sent_away;
};

/* The part of a deferred request that is kept from one try to the next. */
struct gate_tries {
    bool retried;      /* this is not the first try */
    uint64_t begun_ns; /* when the request came */
    /* 1 + the order that each source's bytes in `scratch` wait for; 0: no bytes there */
    uint64_t gathered[SMB_SOURCES_MAX];
};

struct gate_request {
    struct smb_frame frame;
    struct gate_peer *peer;
    struct gate_tries tries;
    struct smb_segment *segment; /* a reference while the request is in hand */
    /* references, too. ACCUMULATE_FROM: the sources; APPLY: gradient, then state */
    struct smb_segment *others[SMB_SOURCES_MAX];
    /* the segment whose lock fences the change, a reference, too; NULL: the own one */
    struct smb_segment *warden;
    struct record *record; /* the lane's record, while the change is executed */
    /* for a segment with two copies (replica.h) */
    /* when the request began, the segment had one copy and was not gated */
    bool alone;
    struct forward *forward; /* the frame for the backup */
    uint64_t order;          /* the order that the answer waits for; 0: none */
};

/* For how long to try a chunk's lock. A retried request must not spin: many retried requests, each
 * for a millisecond, would keep the loop busy. */
static inline int gate_patience(const struct gate_request *request)
{
    return request->tries.retried ? SMB_TRY_ONCE : SMB_TRY;
}

#endif
