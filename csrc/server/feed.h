/* feed.h: what a primary sends to another server: frames, in order, over one connection at a time.
 * Once a connection breaks, what was not answered is sent again over the next one, and said to be a
 * repetition. docs/decisions/0025.
 *
 * Frames. The primary connects to the backup's data address. It says HELLO with the group's number
 * as session and REPLICA_LANE as lane, then REPLICATE with any segment of the group and the epoch.
 * STALE_EPOCH: that server is not the backup in that epoch. Then the changes of all segments of
 * the group follow in one order, each with its segment and its client's session, lane and sequence,
 * without checksum and FETCH. ACCUMULATE_FROM travels as an ACCUMULATE with the source's elements,
 * and APPLY brings its gradient: the backup may have neither segment. An APPLY with state is made
 * in all its segments as one. The backup answers in that order, each change once it has applied it,
 * and DENIED for a segment of another group. In place of a change,
 *   REFUSED    says that the primary refused it
 *   REPLICATE  asks whether the server is still the backup
 *   COPY       has a part of a copy that is being made (copy.h). By `op`: 0 a whole chunk; 1 the
 *              image of a completion record; 2 in argument and offset how many records were
 *              evicted, of sessions that go on and of ended ones; 3 that a change was made to a
 *              chunk that is not copied yet, with its client's session, lane and sequence, and in
 *              argument its result if offset is 1; 4, also between changes and without a number,
 *              the words of locks and versions, of leases the nanoseconds that are left. 0 to 2
 *              have their segment's id as session and a sequence that counts over the group: one
 *              that is not above the last is answered and ignored. Chunks are sent in turn, one of
 *              each segment before the next one of any.
 * A record's image has 16 words: those of struct record (memory/records.h), but in place of used_ns
 * whether the session goes on.
 *
 * With credentials the connection is inside TLS. Lane 65535 is for the role of a memory server,
 * which gets no other lane. REPLICATE is taken from the server that the coordinator named as the
 * primary of that epoch. Other servers get DENIED, as does each frame before REPLICATE.
 *
 * Threads. The replica's lock guards it: every function here is called with that lock.
 */
#ifndef SMB_FEED_H
#define SMB_FEED_H

#include <stdbool.h>
#include <stdint.h>

#include "base/channel.h"
#include "base/frame.h"

enum { FEED_GREETING_FRAMES = 2 /* HELLO, REPLICATE */, REPLICA_LANE = 65535 };

/* One frame on its way, or sent and not confirmed. */
struct forward {
    struct forward *next;
    uint64_t order;
    uint64_t asked_ns; /* of a question whether it is still the backup; 0: it is none */
    uint32_t bytes;
    uint32_t room;
    bool was_sent; /* some of it, over any connection */
    uint8_t frame[];
};

struct feed {
    struct channel channel;  /* to the other server, inside TLS where there are credentials */
    int refused;             /* how the last one ended: smb/types.h */
    char why[SMB_WHY_BYTES]; /* and what TLS said of it; empty: nothing */
    uint64_t instance;
    uint64_t broken_ns; /* since when there is no connection that works; 0: there is */
    /* The other end refused a frame of ours. It greets us all the same: a connection works again
     * when a frame is confirmed. */
    bool at_odds;
    uint8_t greeting[FEED_GREETING_FRAMES * SMB_FRAME_BYTES];
    uint32_t greeting_sent, greeting_answered;
    struct forward *first, *last; /* what is not confirmed, by order */
    struct forward *unsent;       /* the first of them that is not sent whole */
    uint32_t unsent_done;         /* bytes of it that are */
    uint64_t queued_bytes;        /* made and not freed */
    struct forward *spare;
    uint32_t spares;
    uint8_t in[SMB_FRAME_BYTES];
    uint32_t in_have;
};

void feed_create(struct feed *feed);
/* Closes the connection and frees all, what is queued too. */
void feed_destroy(struct feed *feed);

/* A frame to be filled in; NULL: no memory. */
struct forward *feed_make(struct feed *feed, uint32_t bytes);
/* It is confirmed, or not wanted after all. */
void feed_free(struct feed *feed, struct forward *forward);
/* Behind all others, in that epoch. */
void feed_append(struct feed *feed, struct forward *forward, uint64_t order, uint32_t epoch);
/* A prepared frame gets this header in place of its own, and no payload. */
void feed_replace(struct feed *feed, struct forward *forward, const struct smb_frame *frame);
/* Breaks the connection; what is queued goes over the next one in that epoch. */
void feed_enter_epoch(struct feed *feed, uint32_t epoch);

/* Over this channel from here on; a handshake that it needs is done on the way. The other end is to
 * be that run of its server. `segment`: any one of that bundle. */
void feed_connect(struct feed *feed, struct channel channel, uint64_t bundle, uint64_t segment,
                  uint32_t epoch, uint64_t instance);
static inline bool feed_is_dialled(const struct feed *feed)
{
    return feed->channel.fd >= 0;
}
void feed_disconnect(struct feed *feed);
/* Nothing of what is queued is to be confirmed any more. */
void feed_clear(struct feed *feed);
/* As much as the socket takes. */
void feed_send(struct feed *feed);
/* The next one that was confirmed, for the caller to free; NULL: no more have been for now. */
struct forward *feed_receive(struct feed *feed);

#endif
