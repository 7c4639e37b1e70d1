/* call.h: a thread's call, and its streams. A stream has the frames of the call for one segment.
 *
 * A call and its streams live on the caller's stack until `done`, and so does the caller's memory.
 * A thread that has several calls at once waits for a bell: a call without streams that is done as
 * soon as one of those calls is done, or when somebody rings. Unless noted otherwise, only the
 * progress thread calls these functions. */
#ifndef SMB_CALL_H
#define SMB_CALL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/frame.h"
#include "base/layout.h"
#include "smb/client.h"

struct smb_unknown;
struct smb_link;
struct path;

struct call {
    struct smb_outcome *outcome;
    _Atomic uint64_t deadline_ns;
    uint32_t streams_left; /* streams not yet finished */
    bool done;
    bool waits;   /* the call's thread sleeps on `wake` */
    bool stopped; /* the calling thread's: no more local pieces are begun */
    bool has_wake;
    bool failed; /* part of the call failed */
    bool is_bell;
    _Atomic bool rung; /* for a bell: set when a call is done, or by call_ring, until call_rearm */
    struct call *bell; /* the bell to ring when this is done, or NULL */
    struct call *next; /* in the list of arrivals, then in the progress thread's list */
    struct stream *streams; /* all stream_count of them */
    uint32_t stream_count;
    struct smb_unknown *resolves; /* the call is done once this is resolved */
    pthread_cond_t wake;
};

/* The frames of one call for one segment. */
struct stream {
    struct call *call;
    struct smb_link *link;
    struct stream *next; /* in the link's queue */
    const struct smb_request *request;
    const struct smb_ask *ask; /* in place of a request: one frame without a range */
    struct smb_reply *reply;
    struct smb_cursor cursor;
    /* With several lanes to a segment: the path, and the first stream's cursor, from which each
     * stream takes its next piece once its lane has room. Otherwise NULL. */
    const struct path *path;
    struct smb_cursor *shared;
    struct smb_piece piece; /* the next piece to send, if have_piece */
    bool have_piece;
    /* SMB_WIRE_SPARSE: the rest of the cursor's piece, if its entries are too many for one frame */
    struct smb_piece rest;
    uint64_t first_entry, entries; /* the entries of `piece` */
    bool queued;
    uint32_t in_flight;
    uint32_t segment_index;
    uint64_t segment_id;
    /* ids of the other buffers' segments: ACCUMULATE_FROM, APPLY */
    uint64_t source_ids[SMB_SOURCES_MAX];
    uint64_t warden_id; /* 0: the segment's own lock fences the change, or none does */
    uint32_t epoch;
    uint8_t dtype;
};

/* Whether the request is an APPLY whose gradient is the caller's memory. */
static inline bool request_brings(const struct smb_request *request)
{
    return request->opcode == SMB_APPLY && !request->other && request->source;
}

/* Notes that a stream has sent and received everything. */
void call_stream_finished(struct stream *stream);
void call_failed(struct stream *stream, int status);
void call_applied(struct stream *stream, uint32_t bytes, uint64_t result);
void call_note_sent(struct call *call);
bool call_was_sent(const struct stream *stream);

/* Called by the caller's thread, once: hands the call over. wait.h waits for it. */
void call_submit(struct smb_client *client, struct call *call);
/* Called by any thread: the bell is done, now or as soon as it is submitted. */
void call_ring(struct smb_client *client, struct call *bell);
/* Called by the bell's thread, which may then submit it again. After this the thread must look for
 * what has rung before. */
void call_rearm(struct call *bell);

#endif
