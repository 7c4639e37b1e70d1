#include "server/feed.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "base/clock.h"

enum { GREETING_BYTES = FEED_GREETING_FRAMES * SMB_FRAME_BYTES, SPARES_MAX = 16, SEND_PARTS = 16 };

/* ---- memory ---------------------------------------------------------------------------------- */

void feed_create(struct feed *feed)
{
    *feed = (struct feed){.channel.fd = -1, .broken_ns = smb_now_ns()};
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
    channel_close(&feed->channel);
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
        forward->frame[SMB_AT_EPOCH + i] = (uint8_t)(epoch >> (8 * i));
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
    feed->at_odds = false; /* another server has the copy from here on */
    feed->refused = SMB_OK;
    for (struct forward *forward = feed->first; forward; forward = forward->next)
        stamp(forward, epoch);
}

void feed_clear(struct feed *feed)
{
    feed_disconnect(feed);
    feed->at_odds = false;
    feed->refused = SMB_OK;
    while (feed->first) {
        struct forward *forward = feed->first;
        feed->first = forward->next;
        feed_free(feed, forward);
    }
    feed->last = feed->unsent = NULL;
}

/* ---- the connection -------------------------------------------------------------------------- */

void feed_connect(struct feed *feed, struct channel channel, uint64_t bundle, uint64_t segment,
                  uint32_t epoch, uint64_t instance)
{
    feed_disconnect(feed);
    struct smb_frame hello = {
        .opcode = SMB_HELLO, .session = bundle, .lane = REPLICA_LANE, .segment = 0};
    struct smb_frame begin = {.opcode = SMB_REPLICATE,
                              .session = bundle,
                              .lane = REPLICA_LANE,
                              .segment = segment,
                              .epoch = epoch};
    smb_frame_encode(&hello, feed->greeting);
    smb_frame_encode(&begin, feed->greeting + SMB_FRAME_BYTES);
    feed->instance = instance;
    feed->channel = channel;
}

void feed_disconnect(struct feed *feed)
{
    channel_close(&feed->channel);
    if (feed->broken_ns == 0)
        feed->broken_ns = smb_now_ns();
    feed->greeting_sent = feed->greeting_answered = 0;
    feed->in_have = 0;
    feed->unsent = feed->first;
    feed->unsent_done = 0;
    for (struct forward *sent = feed->first; sent && sent->was_sent; sent = sent->next)
        sent->frame[SMB_AT_FLAGS] |= SMB_FLAG_RETRY;
}

/* The backup takes what is sent. */
static void work_again(struct feed *feed)
{
    feed->broken_ns = 0;
    feed->refused = SMB_OK;
}

static void fail(struct feed *feed, int status)
{
    feed->refused = status;
    snprintf(feed->why, sizeof feed->why, "%s",
             feed->channel.tls ? tls_why(feed->channel.tls) : "");
    feed_disconnect(feed);
}

/* Whether frames may be sent: both ends have shown who they are. */
static bool is_secured(struct feed *feed)
{
    if (!feed->channel.tls)
        return feed_is_dialled(feed);
    int status = tls_handshake(feed->channel.tls);
    if (status != SMB_OK && status != SMB_BUSY)
        fail(feed, status);
    return status == SMB_OK;
}

/* The socket is closed. Inside TLS the other end may have said that it refuses us. */
static void lose(struct feed *feed)
{
    bool refused = feed->channel.tls && tls_why(feed->channel.tls)[0];
    fail(feed, refused ? SMB_UNTRUSTED : SMB_LINK_LOST);
}

void feed_send(struct feed *feed)
{
    while (is_secured(feed)) {
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
        if (count == 0 && channel_unsent_bytes(&feed->channel) == 0)
            return;
        ssize_t done = channel_write(&feed->channel, parts, count);
        if (done < 0) {
            /* The other end may have said before it closed why it refuses us. The forwarder reads
             * that, and loses the connection at its end. */
            if (channel_failed(done))
                shutdown(feed->channel.fd, SHUT_RDWR);
            return; /* epoll reports when there is room */
        }
        if (count == 0 && channel_unsent_bytes(&feed->channel) > 0)
            return; /* as above */
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

/* *confirmed: the frame that the answer confirms, taken out of the queue; NULL: the answer is to
 * our greeting. Returns the reason why the other end refuses us, or SMB_PROTOCOL. */
static int take_answer(struct feed *feed, struct forward **confirmed)
{
    struct smb_frame reply;
    *confirmed = NULL;
    if (smb_frame_parse(feed->in, &reply) != SMB_OK || !(reply.flags & SMB_FLAG_REPLY))
        return SMB_PROTOCOL;
    if (reply.status != SMB_OK) {
        feed->at_odds |= feed->greeting_answered == FEED_GREETING_FRAMES;
        return reply.status;
    }
    if (feed->greeting_answered < FEED_GREETING_FRAMES) {
        if (reply.opcode == SMB_HELLO && reply.segment != feed->instance)
            return SMB_NOT_FOUND; /* another run of the server */
        if (++feed->greeting_answered == FEED_GREETING_FRAMES && !feed->at_odds)
            work_again(feed);
        return SMB_OK;
    }
    struct smb_frame asked;
    /* The frame is our own, so it is valid. */
    if (!feed->first || feed->first == feed->unsent ||
        smb_frame_parse(feed->first->frame, &asked) != SMB_OK || reply.opcode != asked.opcode ||
        reply.sequence != asked.sequence || reply.session != asked.session)
        return SMB_PROTOCOL;
    if (feed->at_odds)
        work_again(feed);
    feed->at_odds = false;
    *confirmed = feed->first;
    feed->first = feed->first->next;
    if (!feed->first)
        feed->last = NULL;
    return SMB_OK;
}

struct forward *feed_receive(struct feed *feed)
{
    while (is_secured(feed)) {
        struct iovec part = {feed->in + feed->in_have, SMB_FRAME_BYTES - feed->in_have};
        ssize_t done = channel_read(&feed->channel, &part, 1);
        if (done < 0 && !channel_failed(done))
            break;
        if (done <= 0) {
            lose(feed);
            break;
        }
        feed->in_have += (uint32_t)done;
        if (feed->in_have < SMB_FRAME_BYTES)
            continue;
        feed->in_have = 0;
        struct forward *confirmed;
        int status = take_answer(feed, &confirmed);
        if (status != SMB_OK)
            fail(feed, status);
        else if (confirmed)
            return confirmed;
    }
    return NULL;
}
