/* client.h: links to servers and the calls that travel on them.
 *
 * Who does the I/O. No thread of ours: of the threads that wait for a call, one is the driver. It moves the bytes of all
 * calls on all links of the client, and when its own call is done it hands the driving to another that waits. A lone caller
 * thus sends and receives by itself, without a wake-up in between; many callers share the links and fill them.
 *
 * Ownership. `mutex` guards: driving, arrivals, waiting, and each call's `done`. Everything else of links, streams and calls
 * belongs to the driver. A call, its streams and the caller's memory live on the caller's stack until `done`.
 *
 * A link that fails is broken for good: every call with frames on it is failed, and another link is made by whoever needs one.
 * A call that times out with frames in flight breaks their links, since its memory must not be written to later.
 */
#ifndef SMB_CLIENT_H
#define SMB_CLIENT_H

#include <pthread.h>
#include <stdatomic.h>

#include "layout.h"
#include "segment.h"
#include "wire.h"

enum {
    RING_FRAMES = 64,      /* in flight on one link; a power of two. 16 MiB of chunks: past 10 Gb/s x 10 ms */
    LINK_IN_BYTES = 4096,
    STREAM_BURST = 8       /* frames of one stream before the next stream of the link has its turn */
};

struct call {
    struct smb_outcome *outcome;
    uint64_t deadline_ns;
    uint32_t streams_left;         /* streams not yet finished */
    bool done;
    bool waits;                    /* its thread sleeps on `wake` */
    bool has_wake;
    struct call *next;             /* of arrivals, then of the driver's list */
    struct stream *streams;        /* all of it, stream_count */
    uint32_t stream_count;
    pthread_cond_t wake;
};

/* The frames of one call for one segment. */
struct stream {
    struct call *call;
    struct smb_link *link;
    struct stream *next;           /* of the link's queue */
    const struct smb_request *request;
    struct smb_cursor cursor;
    struct smb_piece piece;        /* the next to be sent, if have_piece */
    bool have_piece;
    bool queued;
    uint32_t in_flight;
    uint32_t segment_index;
    uint64_t segment_id;
    uint64_t source_id;            /* ACCUMULATE_FROM: the other buffer's segment */
    uint32_t epoch;
    uint8_t dtype;
};

/* A request on its way. */
struct flight {
    struct stream *stream;
    void *sink;                    /* where the answer's payload goes */
    uint32_t length;
    bool answered;
    const void *payload;           /* still to be sent after the header */
    uint32_t payload_bytes;
    uint8_t small[SMB_FROM_BYTES]; /* payload that is no caller's memory */
    uint8_t header[SMB_FRAME_BYTES];
};

struct smb_link {
    struct smb_client *client;
    _Atomic uint32_t references;
    _Atomic bool broken;           /* set by the driver or by close; read by anyone */
    int fd;
    uint16_t lane;
    bool active;                   /* in the driver's list */
    struct smb_link *next;
    struct stream *queue_head, *queue_tail;
    /* sequences: [acked, sent) wait for answers, [sent, made) wait to be sent; sent_bytes of frame `sent` are gone */
    uint64_t acked, sent, made;
    uint64_t sent_bytes;
    struct flight ring[RING_FRAMES];
    /* the answer coming in */
    struct flight *reading;        /* whose payload is expected, or NULL */
    uint32_t reading_have;
    uint32_t in_start, in_end;
    uint8_t in[LINK_IN_BYTES];
};

struct smb_client {
    uint64_t session;
    pthread_mutex_t mutex;
    bool driving;
    bool sleeping;                 /* the driver is in poll: wake it */
    _Atomic bool closing;
    struct call *arrivals;
    int wake_fd;
    /* the driver's */
    struct call *calls;            /* in progress */
    struct smb_link *active;
};

/* ---- link.c: one connection. Driver only, but for make and release. */
struct smb_link *link_retain(struct smb_link *link);
void link_release(struct smb_link *link);
void link_enqueue(struct smb_link *link, struct stream *stream);
/* Sends and receives what is possible now. true: something moved. A failure breaks the link and fails its calls. */
bool link_progress(struct smb_link *link);
bool link_busy(const struct smb_link *link);
bool link_wants_output(const struct smb_link *link);
void link_break(struct smb_link *link, int status);
/* Takes a stream that has nothing in flight out of the queue. */
void link_forget(struct smb_link *link, struct stream *stream);

/* ---- client.c */
/* A stream has sent and received all it will. */
void call_stream_finished(struct stream *stream);
void call_failed(struct stream *stream, int status);
/* Runs the call's streams to their end. `work` is done in between, piece by piece, until it returns false. */
void client_run(struct smb_client *client, struct call *call, bool (*work)(void *), void *work_argument);

#endif
