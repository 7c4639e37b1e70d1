#include "server/feed.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/channel.h"
#include "base/clock.h"

enum {
    GREETING_BYTES = FEED_GREETING_FRAMES * SMB_FRAME_BYTES,
    SPARES_MAX = 16,
    SEND_PARTS = 16,
    FLAGS_AT = 6, /* in a header: frame.c */
    EPOCH_AT = 12
};

/* ---- memory ---------------------------------------------------------------------------------- */

void feed_create(struct feed *feed)
{
    *feed = (struct feed){.fd = -1, .broken_ns = smb_now_ns()};
}

static void free_all(struct forward *forward)
{
    while (forward) {
        struct forward *next = forward->next;
        free(forward);
        forward = next;
    }
}

void feed_destroy(struct feed *feed)
{
    if (feed->fd >= 0)
        close(feed->fd);
    free_all(feed->first);
    free_all(feed->spare);
}

struct forward *feed_make(struct feed *feed, uint32_t bytes)
{
    struct forward *made = feed->spare;
    if (made && made->room >= bytes) {
        feed->spare = made->next;
        feed->spares--;
    } else {
        made = malloc(sizeof *made + bytes);
        if (!made)
            return NULL;
        made->room = bytes;
    }
    made->next = NULL;
    made->order = made->asked_ns = 0;
    made->was_sent = false;
    made->bytes = bytes;
    feed->queued_bytes += bytes;
    return made;
}

void feed_free(struct feed *feed, struct forward *forward)
{
    feed->queued_bytes -= forward->bytes;
    if (feed->spares < SPARES_MAX && forward->room > SMB_FRAME_BYTES) {
        forward->next = feed->spare;
        feed->spare = forward;
        feed->spares++;
    } else {
        free(forward);
    }
}

static void stamp(struct forward *forward, uint32_t epoch)
{
    for (int i = 0; i < 4; i++)
        forward->frame[EPOCH_AT + i] = (uint8_t)(epoch >> (8 * i));
}

void feed_replace(struct feed *feed, struct forward *forward, const struct smb_frame *frame)
{
    feed->queued_bytes -= forward->bytes - SMB_FRAME_BYTES;
    forward->bytes = SMB_FRAME_BYTES;
    smb_frame_encode(frame, forward->frame);
}

void feed_append(struct feed *feed, struct forward *forward, uint64_t order, uint32_t epoch)
{
    forward->order = order;
    stamp(forward, epoch);
    if (feed->last)
        feed->last->next = forward;
    else
        feed->first = forward;
    feed->last = forward;
    if (!feed->unsent) {
        feed->unsent = forward;
        feed->unsent_done = 0;
    }
}

void feed_enter_epoch(struct feed *feed, uint32_t epoch)
{
    feed_disconnect(feed);
    for (struct forward *forward = feed->first; forward; forward = forward->next)
        stamp(forward, epoch);
}

void feed_clear(struct feed *feed)
{
    feed_disconnect(feed);
    while (feed->first) {
        struct forward *forward = feed->first;
        feed->first = forward->next;
        feed_free(feed, forward);
    }
    feed->last = feed->unsent = NULL;
}

/* ---- the connection -------------------------------------------------------------------------- */

void feed_connect(struct feed *feed, int fd, uint64_t segment, uint32_t epoch, uint64_t instance)
{
    feed_disconnect(feed);
    struct smb_frame hello = {
        .opcode = SMB_HELLO, .session = segment, .lane = REPLICA_LANE, .segment = 0};
    struct smb_frame begin = {.opcode = SMB_REPLICATE,
                              .session = segment,
                              .lane = REPLICA_LANE,
                              .segment = segment,
                              .epoch = epoch};
    smb_frame_encode(&hello, feed->greeting);
    smb_frame_encode(&begin, feed->greeting + SMB_FRAME_BYTES);
    feed->instance = instance;
    feed->fd = fd;
}

void feed_disconnect(struct feed *feed)
{
    if (feed->fd >= 0)
        close(feed->fd);
    if (feed->broken_ns == 0)
        feed->broken_ns = smb_now_ns();
    feed->fd = -1;
    feed->greeting_sent = feed->greeting_answered = 0;
    feed->in_have = 0;
    feed->unsent = feed->first;
    feed->unsent_done = 0;
    for (struct forward *sent = feed->first; sent && sent->was_sent; sent = sent->next)
        sent->frame[FLAGS_AT] |= SMB_FLAG_RETRY;
}

void feed_send(struct feed *feed)
{
    while (feed->fd >= 0) {
        struct iovec parts[SEND_PARTS];
        int count = 0;
        if (feed->greeting_sent < GREETING_BYTES)
            parts[count++] = (struct iovec){feed->greeting + feed->greeting_sent,
                                            GREETING_BYTES - feed->greeting_sent};
        uint32_t skip = feed->unsent_done;
        for (struct forward *at = feed->unsent; at && count < SEND_PARTS; at = at->next) {
            parts[count++] = (struct iovec){at->frame + skip, at->bytes - skip};
            at->was_sent = true;
            skip = 0;
        }
        if (count == 0)
            return;
        struct channel channel = {.fd = feed->fd};
        ssize_t done = channel_write(&channel, parts, count);
        if (done < 0) {
            if (channel_failed(done))
                feed_disconnect(feed);
            return; /* epoll tells when there is room */
        }
        uint64_t left = (uint64_t)done;
        uint32_t greeting = GREETING_BYTES - feed->greeting_sent;
        uint32_t of_greeting = left < greeting ? (uint32_t)left : greeting;
        feed->greeting_sent += of_greeting;
        left -= of_greeting;
        while (left > 0) {
            uint32_t missing = feed->unsent->bytes - feed->unsent_done;
            if (left < missing) {
                feed->unsent_done += (uint32_t)left;
                break;
            }
            left -= missing;
            feed->unsent = feed->unsent->next;
            feed->unsent_done = 0;
        }
    }
}

/* *confirmed: what it confirms, taken out; NULL: it answers our greeting. false: the other end does
 * not take us, or does not speak our protocol. */
static bool take_answer(struct feed *feed, struct forward **confirmed)
{
    struct smb_frame reply;
    *confirmed = NULL;
    if (smb_frame_parse(feed->in, &reply) != SMB_OK || !(reply.flags & SMB_FLAG_REPLY) ||
        reply.status != SMB_OK)
        return false;
    if (feed->greeting_answered < FEED_GREETING_FRAMES) {
        if (reply.opcode == SMB_HELLO && reply.segment != feed->instance)
            return false;
        if (++feed->greeting_answered == FEED_GREETING_FRAMES)
            feed->broken_ns = 0;
        return true;
    }
    struct smb_frame asked;
    /* Our own frame: it parses. */
    if (!feed->first || feed->first == feed->unsent ||
        smb_frame_parse(feed->first->frame, &asked) != SMB_OK || reply.opcode != asked.opcode ||
        reply.sequence != asked.sequence || reply.session != asked.session)
        return false;
    *confirmed = feed->first;
    feed->first = feed->first->next;
    if (!feed->first)
        feed->last = NULL;
    return true;
}

struct forward *feed_receive(struct feed *feed)
{
    while (feed->fd >= 0) {
        ssize_t done = recv(feed->fd, feed->in + feed->in_have, SMB_FRAME_BYTES - feed->in_have,
                            MSG_DONTWAIT);
        if (done < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        if (done <= 0) {
            feed_disconnect(feed);
            break;
        }
        feed->in_have += (uint32_t)done;
        if (feed->in_have < SMB_FRAME_BYTES)
            continue;
        feed->in_have = 0;
        struct forward *confirmed;
        if (!take_answer(feed, &confirmed))
            feed_disconnect(feed);
        else if (confirmed)
            return confirmed;
    }
    return NULL;
}
