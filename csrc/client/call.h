/* call.h: a call of one thread, and its streams: the frames of the call for one segment each.
 *
 * A call and its streams live on the caller's stack until `done`, and so does the caller's memory.
 * A thread that has several calls at once waits for a bell: a call without streams that is done
 * when one of them is, or when somebody rings. Unless noted otherwise, functions are the progress
 * thread's.
 */
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
    bool waits;   /* its thread sleeps on `wake` */
    bool stopped; /* its caller's: no more local pieces are begun */
    bool has_wake;
    bool failed; /* some of it */
    bool is_bell;
    _Atomic bool rung; /* of a bell: from when a call is done, or call_ring, until call_rearm */
    struct call *bell; /* rung when this is done, or NULL */
    struct call *next; /* of arrivals, then of the progress thread's list */
    struct stream *streams; /* all of it, stream_count */
    uint32_t stream_count;
    struct smb_unknown *resolves; /* done once this is resolved */
    pthread_cond_t wake;
};

/* The frames of one call for one segment. */
struct stream {
    struct call *call;
    struct smb_link *link;
    struct stream *next; /* of the link's queue */
    const struct smb_request *request;
    const struct smb_ask *ask; /* instead of a request: one frame, no range */
    struct smb_reply *reply;
    struct smb_cursor cursor;
    /* Of several lanes to a segment, else NULL: the path, and the first stream's cursor, of which
     * each takes its next piece once its lane has room. */
    const struct path *path;
    struct smb_cursor *shared;
    struct smb_piece piece; /* the next to be sent, if have_piece */
    bool have_piece;
    /* SMB_WIRE_SPARSE: of the cursor's piece, if its entries are too many for one frame */
    struct smb_piece rest;
    uint64_t first_entry, entries; /* and those of `piece` */
    bool queued;
    uint32_t in_flight;
    uint32_t segment_index;
    uint64_t segment_id;
    /* of the other buffers' segments: ACCUMULATE_FROM, APPLY */
    uint64_t source_ids[SMB_SOURCES_MAX];
    uint32_t epoch;
    uint8_t dtype;
};

/* A step whose gradient is the caller's memory. */
static inline bool request_brings(const struct smb_request *request)
{
    return request->opcode == SMB_APPLY && !request->other && request->source;
}

/* A stream has sent and received all it will. */
void call_stream_finished(struct stream *stream);
void call_failed(struct stream *stream, int status);
void call_applied(struct stream *stream, uint32_t bytes, uint64_t result);
void call_note_sent(struct call *call);
bool call_was_sent(const struct stream *stream);

/* The caller's thread: hands the call over; wait.h waits for it. Once. */
void call_submit(struct smb_client *client, struct call *call);
/* Any thread: the bell is done, now or as soon as it is submitted. */
void call_ring(struct smb_client *client, struct call *bell);
/* The bell's thread, which may then submit it again. After this it looks for what has rung
 * before. */
void call_rearm(struct call *bell);

#endif
