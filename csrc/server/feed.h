/* feed.h: the frames that a primary sends to its backup, in order, over one connection at a time.
 * When a connection breaks, unanswered frames are sent again over the next one, marked as
 * repetitions. docs/decisions/0025-second-copy.md.
 *
 * Frames. The primary connects to the backup's data address. It says HELLO with the bundle's number
 * as session and REPLICA_LANE as lane, then REPLICATE with any segment of the bundle and the epoch.
 * STALE_EPOCH: that server is not the backup in that epoch. Then the changes of all segments of the
 * bundle follow in one order, each with its segment and its client's session, lane and sequence,
 * without checksum and FETCH. ACCUMULATE_FROM is sent as an ACCUMULATE with the source's elements,
 * and APPLY with its gradient's elements, because the backup may have neither segment. An APPLY
 * with state is made in all its segments as one. The backup answers in that order, each change once
 * it has applied it, and DENIED for a segment of another bundle. In place of a change there may be
 *   REFUSED    says that the primary refused the change
 *   REPLICATE  asks whether the server is still the backup
 *   COPY       has a part of a copy that is being made (copy.h). By `op`: 0 a whole chunk; 1 the
 *              image of a completion record; 2 in argument and offset how many records were
 *              evicted, of sessions that go on and of ended ones; 3 that a change was made to a
 *              chunk that is not copied yet, with its client's session, lane and sequence, and in
 *              argument its result if offset is 1; 4, also between changes and without a number,
 *              the words of locks and versions, with the remaining nanoseconds of each lease. 0 to
 *              2 have their segment's id as session and a sequence that counts over the bundle: a
 *              part that is not above the last is answered and ignored. Chunks are sent in turn,
 *              one of each segment before the next one of any. A record's image has 16 words: those
 *              of struct record (memory/records.h), but in place of used_ns whether the session
 *              goes on.
 * With credentials the connection is inside TLS. Lane 65535 is for the role of a memory server,
 * which may use no other lane. REPLICATE is accepted from the server that the coordinator named as
 * the primary of that epoch. Other servers get DENIED, as does each frame before REPLICATE.
 *
 * Threads. The bundle's lock guards a feed: every function here is called with that lock held. */
#ifndef SMB_FEED_H
#define SMB_FEED_H

#include <stdbool.h>
#include <stdint.h>

#include "base/frame.h"
#include "channel/channel.h"

enum { FEED_GREETING_FRAMES = 2 /* HELLO, REPLICATE */, REPLICA_LANE = 65535 };

/* One frame that is queued, or sent and not confirmed. */
struct forward {
    struct forward *next;
    uint64_t order;
    /* for a question whether the server is still the backup, when it was asked; 0: another frame */
    uint64_t asked_ns;
    uint32_t bytes;
    uint32_t room;
    bool was_sent; /* part of the frame was sent, over any connection */
    uint8_t frame[];
};

struct feed {
    struct channel channel;  /* to the other server, inside TLS if there are credentials */
    int refused;             /* how the last connection that ended did so; SMB_OK: one works */
    char why[SMB_WHY_BYTES]; /* TLS's reason for that; empty: none */
    uint64_t instance;
    uint64_t broken_ns; /* since when no connection has worked; 0: the present one works */
    /* The other end refused one of our frames. It may still answer our greeting, so a new
     * connection counts as working only when a frame is confirmed. */
    bool at_odds;
    uint8_t greeting[FEED_GREETING_FRAMES * SMB_FRAME_BYTES];
    uint32_t greeting_sent, greeting_answered;
    struct forward *first, *last; /* frames that are not confirmed, by order */
    struct forward *unsent;       /* the first of them that is not sent completely */
    uint32_t unsent_done;         /* how many bytes of it are sent */
    uint64_t queued_bytes;        /* frames that were made and not freed */
    struct forward *spare;
    uint32_t spares;
    uint8_t in[SMB_FRAME_BYTES];
    uint32_t in_have;
};

void feed_create(struct feed *feed);
/* Closes the connection and frees everything, also queued frames. */
void feed_destroy(struct feed *feed);

/* Makes a frame to be filled in; NULL: out of memory. */
struct forward *feed_make(struct feed *feed, uint32_t bytes);
/* Frees a frame that is confirmed, or not needed after all. */
void feed_free(struct feed *feed, struct forward *forward);
/* Appends a frame, in that epoch, behind all others. */
void feed_append(struct feed *feed, struct forward *forward, uint64_t order, uint32_t epoch);
/* Replaces a prepared frame by this header without a payload. */
void feed_replace(struct feed *feed, struct forward *forward, const struct smb_frame *frame);
/* Breaks the connection; queued frames are sent over the next one, in that epoch. */
void feed_enter_epoch(struct feed *feed, uint32_t epoch);

/* Uses this channel from here on, and continues its TLS handshake if it needs one. The other end
 * must be the run `instance` of its server. `segment`: any member of that bundle. */
void feed_connect(struct feed *feed, struct channel channel, uint64_t bundle, uint64_t segment,
                  uint32_t epoch, uint64_t instance);
static inline bool feed_is_dialled(const struct feed *feed)
{
    return feed->channel.fd >= 0;
}
void feed_disconnect(struct feed *feed);
/* Frees all queued frames: none will be confirmed. */
void feed_clear(struct feed *feed);
/* Sends as much as the socket takes. */
void feed_send(struct feed *feed);
/* Returns the next confirmed frame, which the caller frees; NULL: no more for now. */
struct forward *feed_receive(struct feed *feed);

#endif
