/* link.h: one lane to a server. Only the progress thread uses it, except to make, retain and
 * release it.
 *
 * A link is a lane, not a connection. When its connection breaks, the link keeps the frames without
 * an answer. A thread of the Python library makes a new connection and hands it over. The link then
 * asks each segment for its watermark (resume.c). A change at or below the watermark, and above the
 * highest number that was refused, counts as answered, unless its caller needs a result. All other
 * frames are sent again.
 *
 * A caller whose timeout has passed leaves. Its sent changes have an unknown outcome until they are
 * answered, or until the next resumption resolves them. They are not sent again. */
#ifndef SMB_LINK_H
#define SMB_LINK_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "channel/access.h"
#include "channel/channel.h"
#include "client/client.h"

struct inflight;
struct stream;
struct watermark;

enum {
    /* in-flight requests of one data link: 16 MiB of chunks, past 10 Gb/s x 10 ms */
    WINDOW_FRAMES = 64,
    LINK_IN_BYTES = 4096,
    ANSWERS_AWAITED = 16 /* answers to reads that are received in one call: 4 MiB of chunks */
};

enum link_state { LINK_UP, LINK_RESUMING, LINK_DOWN, LINK_CLOSED };

struct smb_link {
    struct smb_client *client;
    uint64_t id;
    /* identifies the server's memory; under the mutex, except for the thread that connects the
     * link */
    uint64_t identity;
    uint32_t round_trip_us;
    /* enum smb_feature, of the server of the newest connection; written by the thread that
     * connects */
    _Atomic uint32_t features;
    _Atomic uint32_t references;
    _Atomic bool closing; /* the owner wants the link closed; the progress thread closes it */
    struct channel *_Atomic fresh;   /* a new connection that was handed over; NULL: none */
    _Atomic bool fresh_by_reference; /* the kind of that connection; stored before `fresh` */
    _Atomic bool once;               /* the link is not connected again */
    _Atomic int state; /* enum link_state; written by the progress thread, read by anyone */
    /* status of calls on a closed link; written before `closing` by the thread that connects the
     * link again, or by the progress thread */
    _Atomic int closed_why;
    struct access_connection proof; /* mutex: of the newest connection */
    struct smb_token *tokens;       /* mutex: shown on each new connection */
    uint32_t token_count, token_room;
    /* mutex: a server has proved itself on this link; each later connection must do so first */
    bool trusted;
    bool proven; /* mutex: the newest connection's server has proved itself */
    /* mutex: how many new connections are still showing the link's tokens, before they are handed
     * over. `proof` is already that of the newest one, while the link may still be using an older
     * connection: the answer to a token that was sent there does not fit `proof`. */
    uint32_t showing;
    bool wanted;   /* mutex: the link has something to send, but no connection */
    bool in_hands; /* mutex: a thread is making a connection for it */
    /* A caller left, and the server may still execute frames of that caller that were sent over an
     * older connection. Cleared once the next connection is made, which ends the older one at the
     * server, or when the link is closed. */
    _Atomic bool given_up;
    struct channel channel; /* the present connection */
    bool by_reference;      /* of `channel`: requests are sent as records, see base/frame.h */
    uint16_t lane;
    /* for a link to one segment with two copies: the epoch of its roles; 0 for other links */
    _Atomic uint32_t epoch;
    _Atomic bool local; /* leads to a server of this host, over its Unix socket */
    uint32_t window;
    bool active;                  /* in the progress thread's list */
    struct smb_link *next;        /* in the progress thread's list */
    struct smb_link *next_of_all; /* under the mutex */
    struct stream *queue_head, *queue_tail;
    uint64_t made;            /* number of frames made so far */
    uint32_t in_flight;       /* number of unsent and sent frames */
    uint64_t in_flight_bytes; /* the bytes of their ranges */
    uint32_t atomics_in_flight;
    struct inflight *unsent, *sent, *spare;
    struct inflight **unsent_end, **sent_end;
    uint64_t sent_bytes; /* bytes sent of the first unsent frame */
    uint64_t heard_ns;   /* when the peer last sent anything */
    /* the answer coming in */
    struct inflight *reading; /* the request whose answer's payload is being received, or NULL */
    uint32_t reading_have;
    uint32_t crc; /* covers the answer's header and the received part of its payload */
    uint32_t in_start, in_end;
    uint8_t in[LINK_IN_BYTES];
    /* headers of the answers that are received in one call; not used between calls */
    uint8_t awaited[ANSWERS_AWAITED][SMB_FRAME_BYTES];
    /* while the link resumes */
    struct watermark *watermarks;
    uint32_t watermark_count, watermarks_answered;
    uint64_t watermark_bytes_sent;
};

struct smb_link *link_retain(struct smb_link *link);
void link_release(struct smb_link *link);
/* SMB_UNTRUSTED: only tokens may be sent over the link, because the client requires proof and the
 * link's server has given none. */
int link_may_use(struct smb_link *link);
/* Notes that the link needs a connection, or no longer does. */
void link_want(struct smb_link *link, bool wanted);
/* Sends and receives what is possible now. Returns true if anything moved. */
bool link_progress(struct smb_link *link);
bool link_busy(const struct smb_link *link);
/* Whether the progress thread should sleep at once instead of polling: much is under way, so the
 * next event takes a while, or somebody needs this core to cause it. */
bool link_sleeps_at_once(const struct smb_link *link);
bool link_wants_output(const struct smb_link *link);
/* The descriptor to poll; -1: none. */
int link_fd(const struct smb_link *link);
/* Fails all requests of the link, for good. */
void link_shut(struct smb_link *link, int status);
/* Ends the stream, whose call is over: what was not sent is dropped, what was sent has an unknown
 * outcome. */
void link_abandon(struct smb_link *link, struct stream *stream);

static inline uint32_t link_epoch(const struct smb_link *link)
{
    return atomic_load_explicit(&link->epoch, memory_order_acquire);
}

/* Whether the answer says that the segment is not on this server, or no longer. The link's next
 * connection may lead elsewhere. */
static inline bool link_is_sent_away(const struct smb_link *link, int status)
{
    return (status == SMB_STALE_EPOCH || status == SMB_NOT_FOUND) && link_epoch(link) != 0;
}

static inline bool link_was_given_up(const struct smb_link *link)
{
    return atomic_load_explicit(&link->given_up, memory_order_acquire);
}

static inline int link_state_of(const struct smb_link *link)
{
    return atomic_load_explicit(&link->state, memory_order_relaxed);
}

static inline void link_enter(struct smb_link *link, enum link_state state)
{
    atomic_store_explicit(&link->state, state, memory_order_release);
}

/* The sequence number of the next frame. A server takes a lane's change for a repeated one unless
 * its number is above all earlier ones. So the numbers grow for as long as the client lives, over
 * all of its links. */
static inline uint64_t link_next_sequence(struct smb_link *link)
{
    link->made++;
    return atomic_fetch_add_explicit(&link->client->sequences, 1, memory_order_relaxed) + 1;
}

#endif
