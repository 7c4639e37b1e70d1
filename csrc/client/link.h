/* link.h: one lane to a server. The progress thread's, except make, retain and release.
 *
 * A link is a lane, not a connection. When its connection breaks, frames without an answer stay. A
 * thread of the library above connects again and hands the connection over. The link then asks how
 * far each segment has come (WATERMARK). Frames at or below the watermark count as answered; the
 * rest is sent again.
 *
 * When a caller's time is over, it leaves. Its sent frames have an unknown outcome until they are
 * answered, or until the next resumption resolves them. They are not sent again.
 */
#ifndef SMB_LINK_H
#define SMB_LINK_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/access.h"
#include "base/channel.h"
#include "base/clock.h"
#include "client/client.h"

struct inflight;
struct stream;
struct watermark;

enum {
    /* in-flight requests of one link that carries data: 16 MiB of chunks, past 10 Gb/s x 10 ms */
    WINDOW_FRAMES = 64,
    LINK_IN_BYTES = 4096,
    ANSWERS_AWAITED = 16 /* reads that are answered in one look at the socket: 4 MiB of chunks */
};

enum link_state { LINK_UP, LINK_RESUMING, LINK_DOWN, LINK_CLOSED };

struct smb_link {
    struct smb_client *client;
    uint64_t id;
    uint64_t identity; /* of the server's memory; mutex, but for who connects the link */
    uint32_t round_trip_us;
    /* enum smb_feature, of the server of its newest connection; written by who connects */
    _Atomic uint32_t features;
    _Atomic uint32_t references;
    _Atomic bool closing;            /* asked for by its owner; the progress thread does it */
    struct channel *_Atomic fresh;   /* a new connection, handed over; NULL: none */
    _Atomic bool fresh_by_reference; /* of what kind; stored before `fresh` */
    _Atomic bool once;               /* nobody connects it again */
    _Atomic int state; /* enum link_state; written by the progress thread, read by anyone */
    /* status of calls on a closed link; before `closing`, by who connects it anew, or the progress
     * thread's */
    _Atomic int closed_why;
    struct access_connection proof; /* mutex: of its newest connection */
    struct smb_token *tokens;       /* mutex: shown on each new connection */
    uint32_t token_count, token_room;
    /* mutex: a server has proved on it that it is the one; each connection after that proves it
     * first */
    bool trusted;
    bool proven; /* mutex: its newest connection's server has proved that it is the one */
    /* mutex: connections that are being made, and have not shown all tokens: `proof` is of the
     * newest of them, and an answer to a token may be of the connection before */
    uint32_t showing;
    /* mutex: it has something to send but no connection; somebody is making one */
    bool wanted, in_hands;
    /* a caller left with frames on their way, and no newer connection has ended those: set where
     * that happens, cleared with the next connection, or once it is closed */
    _Atomic bool given_up;
    struct channel channel; /* its connection */
    bool by_reference;      /* records are sent over it, see frame.h */
    uint16_t lane;
    /* not 0: it is for one segment that has two copies, and this is the epoch of its roles */
    _Atomic uint32_t epoch;
    _Atomic bool local; /* to a server of this host, over its Unix socket */
    uint32_t window;
    bool active;                  /* in the progress thread's list */
    struct smb_link *next;        /* of it */
    struct smb_link *next_of_all; /* mutex */
    struct stream *queue_head, *queue_tail;
    uint64_t made;            /* frames, ever */
    uint32_t in_flight;       /* unsent and sent ones */
    uint64_t in_flight_bytes; /* of ranges, of them */
    uint32_t atomics_in_flight;
    struct inflight *unsent, *sent, *spare;
    struct inflight **unsent_end, **sent_end;
    uint64_t sent_bytes; /* of the first unsent one */
    uint64_t heard_ns;   /* when the peer was heard of last */
    /* the answer coming in */
    struct inflight *reading; /* the request that expects a payload, or NULL */
    uint32_t reading_have;
    uint32_t crc; /* of its header and what is here of its payload */
    uint32_t in_start, in_end;
    uint8_t in[LINK_IN_BYTES];
    /* headers of the answers in one look; of no use between looks */
    uint8_t awaited[ANSWERS_AWAITED][SMB_FRAME_BYTES];
    /* while it resumes */
    struct watermark *watermarks;
    uint32_t watermark_count, watermarks_answered;
    uint64_t watermark_bytes_sent;
};

struct smb_link *link_retain(struct smb_link *link);
void link_release(struct smb_link *link);
/* SMB_UNTRUSTED: nothing but tokens may be sent over the link, as proof is wanted and its server
 * has given none. */
int link_may_use(struct smb_link *link);
/* Somebody should make a connection for the link (or no longer). */
void link_want(struct smb_link *link, bool wanted);
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
/* The stream's call is over: what was not sent is forgotten, what was is left of unknown
 * outcome. */
void link_abandon(struct smb_link *link, struct stream *stream);

static inline uint32_t link_epoch(const struct smb_link *link)
{
    return atomic_load_explicit(&link->epoch, memory_order_acquire);
}

/* An answer that says: not here, or not any more. The link's next connection may lead elsewhere. */
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

/* Of the next frame on any of the client's links. A server takes a lane's change for a repeated one
 * unless its number is above all earlier ones. So numbers go up for as long as the client lives,
 * over all of its links. */
static inline uint64_t link_next_sequence(struct smb_link *link)
{
    link->made++;
    return atomic_fetch_add_explicit(&link->client->sequences, 1, memory_order_relaxed) + 1;
}

#endif
