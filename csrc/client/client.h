/* client.h: links to servers and the calls that travel on them.
 *
 * Who does the I/O. No thread of ours: of the threads that wait for a call, one is the driver. It moves the bytes of all
 * calls on all links of the client, and when its own call is done it hands the driving to another that waits. A lone caller
 * thus sends and receives by itself, without a wake-up in between; many callers share the links and fill them.
 *
 * Ownership. `mutex` guards: driving, arrivals, waiting, each call's `done`, and which links want a connection. Everything else
 * of links, streams, calls and doubts belongs to the driver. A call, its streams and the caller's memory live on the caller's
 * stack until `done`.
 *
 * A link is a lane, not a connection. When its connection breaks, the frames that were not answered stay; somebody (a thread of
 * the library above) connects again and hands the connection over; the link asks how far each segment has come (WATERMARK),
 * takes what is at or below that as answered, and sends the rest again. A caller whose time is over leaves; the frames that
 * it had sent stay in doubt until they are answered, or until the next resumption tells what became of them. They are not sent again.
 */
#ifndef SMB_CLIENT_H
#define SMB_CLIENT_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "base/access.h"
#include "base/channel.h"
#include "base/clock.h"
#include "base/frame.h"
#include "base/layout.h"
#include "base/stats.h"
#include "memory/segment.h"

enum {
    WINDOW_FRAMES = 64,    /* in flight on one link that carries data: 16 MiB of chunks, past 10 Gb/s x 10 ms */
    ATOMICS_FLYING_MAX = 4, /* fetch_add and compare_swap: a record keeps the results of the last RECORD_RESULTS */
    LINK_IN_BYTES = 4096,
    ANSWERS_AWAITED = 16,  /* reads that are answered in one look at the socket: 4 MiB of chunks */
    LOOK_MS = 100,         /* so often a blocking call sees whether it is wanted still: Ctrl-C */
    STREAM_BURST = 8       /* frames of one stream before the next stream of the link has its turn */
};
_Static_assert((int)ATOMICS_FLYING_MAX <= (int)RECORD_RESULTS, "every result that may be asked for again is kept");

struct call {
    struct smb_outcome *outcome;
    _Atomic uint64_t deadline_ns;
    uint32_t streams_left;         /* streams not yet finished */
    bool done;
    bool waits;                    /* its thread sleeps on `wake` */
    bool stopped;                  /* its caller's: no more local pieces are begun */
    bool has_wake;
    struct call *next;             /* of arrivals, then of the driver's list */
    struct stream *streams;        /* all of it, stream_count */
    uint32_t stream_count;
    struct smb_doubt *settles;     /* done once this is settled */
    pthread_cond_t wake;
};

/* The frames of one call for one segment. */
struct stream {
    struct call *call;
    struct smb_link *link;
    struct stream *next;           /* of the link's queue */
    const struct smb_request *request;
    const struct smb_ask *ask;     /* instead of a request: one frame, no range */
    struct smb_told *told;
    struct smb_cursor cursor;
    struct smb_piece piece;        /* the next to be sent, if have_piece */
    bool have_piece;
    struct smb_piece rest;         /* SMB_WIRE_SPARSE: of the cursor's piece, if its entries are too many for one frame */
    uint64_t first_entry, entries; /* and those of `piece` */
    bool queued;
    uint32_t in_flight;
    uint32_t segment_index;
    uint64_t segment_id;
    uint64_t source_ids[SMB_APPLY_SEGMENTS]; /* of the other buffers' segments: ACCUMULATE_FROM, APPLY */
    uint32_t epoch;
    uint8_t dtype;
};

/* A request on its way. */
struct flight {
    struct flight *next;           /* of the link's unsent or sent ones, or of its spare ones */
    struct stream *stream;         /* NULL: its caller has left */
    struct smb_doubt *doubt;       /* then: a reference, for a change */
    uint32_t doubt_index;
    uint64_t sequence;
    uint64_t segment_id;
    uint64_t buffer_offset;
    uint64_t made_ns;
    void *sink;                    /* where the answer's elements go */
    uint8_t *encoded;              /* its own memory: what is sent, as often as it is, or the answer until it is decoded */
    uint32_t answer_bytes;         /* of its payload, if there is one */
    uint32_t epoch;
    uint32_t length;
    uint8_t opcode;
    uint8_t wire;                  /* enum smb_wire */
    bool was_sent;                 /* some of it, over any connection */
    bool went_by_reference;        /* some time: a WRITE may have been made where no record of the server tells of it */
    int fate;                      /* enum smb_doubt_state: what is known of a change by now */
    const void *payload;           /* still to be sent after the header */
    uint32_t payload_bytes;
    uint8_t small[SMB_RECORD_SMALL_BYTES]; /* payload that is no caller's memory, or what comes before it */
    uint32_t small_bytes;
    uint8_t checksum[SMB_CHECKSUM_BYTES]; /* after the payload, if the client uses them */
    uint32_t checksum_bytes;
    uint8_t header[SMB_FRAME_BYTES];
    uint8_t ends[SMB_RECORD_ENDS_BYTES]; /* of its record, on a connection by reference */
};

/* How far a segment has come, asked when a link resumes. */
struct watermark {
    uint64_t segment_id;
    uint64_t sequence;             /* of the question */
    uint64_t value;
    uint64_t refused;              /* up to here some changes were refused: the value alone does not speak for them */
    uint32_t epoch;
    int status;
    bool answered;
};

enum link_state { LINK_UP, LINK_RESUMING, LINK_DOWN, LINK_CLOSED };

struct smb_link {
    struct smb_client *client;
    uint64_t id;
    uint64_t identity;             /* of the server's memory */
    _Atomic uint32_t references;
    _Atomic bool closing;          /* asked for by its owner; the driver does it */
    struct channel *_Atomic fresh; /* a new connection, handed over; NULL: none */
    _Atomic bool fresh_by_reference; /* of what kind; stored before `fresh` */
    _Atomic int state;             /* enum link_state; written by the driver, read by anyone */
    _Atomic int closed_why;        /* status of calls on a closed link; before `closing`, by who connects it anew, or the driver's */
    struct access_connection proof; /* mutex: of its newest connection */
    struct smb_token *tokens;      /* mutex: shown on each new connection */
    uint32_t token_count, token_room;
    bool had_tokens;               /* mutex: ever */
    bool proven;                   /* mutex: its newest connection's server has proved that it is the one */
    bool wanted, in_hands;         /* mutex: it has something to send but no connection; somebody is making one */
    struct channel channel;        /* its connection */
    bool by_reference;             /* records are sent over it, see frame.h */
    uint16_t lane;
    bool local;                    /* to a server of this host, over its Unix socket */
    uint32_t window;
    bool active;                   /* in the driver's list */
    struct smb_link *next;         /* of it */
    struct smb_link *next_of_all;  /* mutex */
    struct stream *queue_head, *queue_tail;
    uint64_t made;                 /* frames, ever */
    uint32_t flying;               /* unsent and sent ones */
    uint64_t flying_bytes;         /* of ranges, of them */
    uint32_t atomics_flying;
    struct flight *unsent, *sent, *spare;
    struct flight **unsent_end, **sent_end;
    uint64_t sent_bytes;           /* of the first unsent one */
    uint64_t heard_ns;             /* when the peer was heard of last */
    /* the answer coming in */
    struct flight *reading;        /* whose payload is expected, or NULL */
    uint32_t reading_have;
    uint32_t crc;                  /* of its header and what is here of its payload */
    uint32_t in_start, in_end;
    uint8_t in[LINK_IN_BYTES];
    uint8_t awaited[ANSWERS_AWAITED][SMB_FRAME_BYTES]; /* headers of the answers in one look; of no use between looks */
    /* while it resumes */
    struct watermark *watermarks;
    uint32_t watermark_count, watermarks_answered;
    uint64_t watermark_bytes_sent;
};

struct smb_client {
    struct client_stats stats;
    _Atomic uint32_t references;   /* its owner's and one for each link: whoever collects objects may free them in any order */
    uint64_t session;
    bool checksums;                /* from before its first link */
    bool wants_proof;              /* likewise */
    _Atomic uint64_t spoilt;
    pthread_mutex_t mutex;
    pthread_cond_t link_wanted;
    bool driving;
    bool sleeping;                 /* the driver is in poll: wake it */
    _Atomic bool closing;
    _Atomic uint64_t links_made;
    _Atomic uint64_t sequences;    /* numbers used, by all links: one lane's later link goes on above what its earlier ones used */
    struct smb_link *links;        /* all that are not freed */
    struct call *arrivals;
    int wake_fd;
    /* the driver's */
    struct call *calls;            /* in progress */
    struct smb_link *active;
};

/* Pieces of a call whose caller left, and what became of them. */
struct doubt_piece {
    uint64_t buffer_offset;
    uint32_t bytes;
    int state;                     /* enum smb_doubt_state */
};
struct smb_doubt {
    _Atomic uint32_t references;
    uint32_t pending;              /* the driver's; so are the pieces, until it is 0 */
    uint32_t count, room;
    struct doubt_piece *pieces;
    struct call *settler;
};

/* ---- link.c: one lane. Driver only, but for make, retain and release. */
struct smb_link *link_retain(struct smb_link *link);
void link_release(struct smb_link *link);
void link_enqueue(struct smb_link *link, struct stream *stream);
/* Sends and receives what is possible now. true: something moved. */
bool link_progress(struct smb_link *link);
bool link_busy(const struct smb_link *link);
/* Much is under way: what comes next takes a while, or needs this core. */
bool link_sleeps_at_once(const struct smb_link *link);
bool link_wants_output(const struct smb_link *link);
/* The descriptor to be polled, -1 for none. */
int link_fd(const struct smb_link *link);
/* Fails everything on it, for good. */
void link_shut(struct smb_link *link, int status);
/* The stream's call is over: what was not sent is forgotten, what was is left in doubt. */
void link_abandon(struct smb_link *link, struct stream *stream);

/* ---- client.c */
/* Goes on to the stream's next piece: have_piece, or not. */
void stream_advance(struct stream *stream);
/* Cuts off *rest the part from the first of its entries on, at most entries_max of them: false if there is none. */
bool sparse_cut(const struct smb_request *request, uint32_t element, uint64_t entries_max, struct smb_piece *rest,
                struct smb_piece *piece, uint64_t *first, uint64_t *entries);
/* Writes the piece's entries as they travel: 4 + element bytes each. */
void sparse_encode(const struct smb_request *request, uint32_t element, const struct smb_piece *piece, uint64_t first,
                   uint64_t entries, uint8_t *to);
/* A stream has sent and received all it will. */
void call_stream_finished(struct stream *stream);
void call_failed(struct stream *stream, int status);
/* A piece of a change that is not confirmed; returns its index, or UINT32_MAX where there is no memory to note it. */
uint32_t call_doubt(struct call *call, uint64_t buffer_offset, uint32_t bytes, int state);
void call_applied(struct stream *stream, uint32_t bytes, uint64_t result);
void call_note_sent(struct call *call);
bool call_was_sent(const struct stream *stream);
void doubt_settled(struct smb_doubt *doubt, uint32_t index, int state);
/* Whether the call of this thread is to be given up; see smb_set_look. Nothing is locked. */
bool client_look(void);
/* Runs the call's streams to their end. `work` is done in between, piece by piece, until it returns false; it may be called again then. */
void client_run(struct smb_client *client, struct call *call, bool (*work)(void *), void *work_argument);
/* The same in parts: submit once, then wait, as often as one likes, until it returns true: done. */
void client_submit(struct smb_client *client, struct call *call);
bool client_wait(struct smb_client *client, struct call *call, uint64_t until_ns, bool (*work)(void *), void *work_argument);
struct smb_client *client_retain(struct smb_client *client);
void client_release(struct smb_client *client);
/* Somebody should make a connection for the link (or no longer). */
void client_want_link(struct smb_link *link, bool wanted);
void client_wake_driver(struct smb_client *client);

#endif
