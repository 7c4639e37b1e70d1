/* gate.h: the single door. Every data request, read or write, over every transport, passes here.
 *
 * Threads. A connection's loop, with the connection's `turn` held.
 */
#ifndef SMB_GATE_H
#define SMB_GATE_H

#include "base/frame.h"
#include "memory/journal.h"
#include "memory/segment.h"
#include "server/grants.h"

struct forward;
struct replica_group;
struct smb_server;

/* The gate's knowledge of a connection, from one request to the next. */
struct gate_peer {
    struct grants grants; /* what it has shown; not looked at unless the server is guarded */
    uint32_t record_hint;
    /* of segments with two copies (replica.h) */
    bool fed; /* it is a primary's, for its backup here */
    /* for these segments it was taken as their primary's: frames of many sessions; NULL */
    struct replica_group *feeds;
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

/* Right to it, segment there, epoch, dtype and bounds right. Takes the reference. Once before the
 * payload is received, to know whether it is wanted; once more when it is all here. */
int gate_admit(struct smb_server *server, const struct smb_frame *frame,
               struct gate_request *request);
/* With the payload in hand: do the change, unless it was done before. `payload` is the frame's,
 * without what lies before it: a token, and words that elements follow. `slot` is the journal's
 * slot that holds it, or NULL. `scratch` and `sink` are a chunk's worth of memory for the source's
 * bytes and the new values, or NULL. `scratch` stays as it is until the next try. SMB_BUSY: defer
 * it. SMB_APART: smb.h. The old value of the 64-bit operations goes to *result. */
int gate_execute(struct smb_server *server, struct gate_request *request, const struct slot *slot,
                 const uint8_t *payload, uint8_t *scratch, uint8_t *sink, uint64_t *result);
/* The range as it was at one instant, copied without its chunk's lock unless changes follow each
 * other without end. For a chunk that gate_open found locked. SMB_BUSY: defer it. SMB_DEFERRED: of
 * a segment with two copies, the range was copied. The reply waits until gate_may_tell allows it
 * for request->order. Copying again might never end: others may change the chunk all the while. */
int gate_copy(struct gate_request *request, uint8_t *to);
bool gate_may_tell(const struct gate_request *request, uint64_t order);
/* The other path of a read: the range itself, under its chunk's lock, for the socket to be sent
 * from. Not to be held while anything is waited for. The lock is tried once: with SMB_BUSY defer
 * it, or take another path. */
int gate_open(struct gate_request *request, uint8_t **place);
void gate_close(struct gate_request *request);
/* From the primary: a part of a copy that is being made here. SMB_BUSY: defer it. */
int gate_copied(struct gate_request *request, const uint8_t *payload);
/* A note of the primary's: that change was refused there. */
int gate_note_refused(struct gate_request *request);
/* How far the frame's lane has come on its segment, and up to where some changes were refused. */
int gate_watermark(struct gate_request *request, uint64_t *watermark, uint64_t *refused);
/* A change is about to be answered with a failure: a later one of the lane must not make it look
 * applied. A client without the right to change the segment leaves no trace there. SMB_BUSY: that
 * cannot be noted now, so it must not be answered; defer it. SMB_STALE_EPOCH: it was not noted, and
 * a later one of that epoch may be served here. */
int gate_refused(struct smb_server *server, const struct gate_request *refused);
void gate_done(struct gate_request *request);

#endif
