#include "client/link.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/assert.h"
#include "client/inflight.h"
#include "client/receive.h"
#include "client/resume.h"
#include "client/send.h"

enum {
    TAKE_BACK_NS = 2000000000,
    /* a link that was silent for this long is checked before it is used: its peer may be gone */
    QUIET_NS = 1000000
};

struct smb_link *link_retain(struct smb_link *link)
{
    SMB_ASSERT(atomic_load_explicit(&link->references, memory_order_relaxed) > 0);
    atomic_fetch_add_explicit(&link->references, 1, memory_order_relaxed);
    return link;
}

void link_release(struct smb_link *link)
{
    SMB_ASSERT(atomic_load_explicit(&link->references, memory_order_relaxed) > 0);
    if (atomic_fetch_sub_explicit(&link->references, 1, memory_order_acq_rel) != 1)
        return;
    struct smb_client *client = link->client;
    pthread_mutex_lock(&client->mutex);
    struct smb_link **at = &client->links;
    while (*at != link)
        at = &(*at)->next_of_all;
    *at = link->next_of_all;
    pthread_mutex_unlock(&client->mutex);
    struct channel *fresh = atomic_load(&link->fresh);
    if (fresh)
        channel_close(fresh);
    free(fresh);
    channel_close(&link->channel);
    inflight_free_all(link->unsent);
    inflight_free_all(link->sent);
    inflight_free_all(link->spare);
    free(link->watermarks);
    free(link->tokens);
    free(link);
    client_release(client);
}

int link_may_use(struct smb_link *link)
{
    pthread_mutex_lock(&link->client->mutex);
    bool may = link->trusted || !link->client->wants_proof;
    pthread_mutex_unlock(&link->client->mutex);
    return may ? SMB_OK : SMB_UNTRUSTED;
}

void link_want(struct smb_link *link, bool wanted)
{
    struct smb_client *client = link->client;
    pthread_mutex_lock(&client->mutex);
    if (wanted && !link->wanted)
        pthread_cond_broadcast(&client->link_wanted);
    link->wanted = wanted; /* the thread in charge of the link may still be connecting it */
    pthread_mutex_unlock(&client->mutex);
}

static struct smb_link *find_wanted(const struct smb_client *client)
{
    struct smb_link *link = client->links;
    while (link && (!link->wanted || link->in_hands))
        link = link->next_of_all;
    return link;
}

int smb_client_wait_down(struct smb_client *client, uint32_t timeout_ms, uint64_t *link_id)
{
    uint64_t until_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000U),
                             .tv_nsec = (long)(until_ns % 1000000000U)};
    int failure = 0;
    pthread_mutex_lock(&client->mutex);
    struct smb_link *link = find_wanted(client);
    while (!link && failure == 0 && !atomic_load(&client->closing)) {
        failure = pthread_cond_clockwait(&client->link_wanted, &client->mutex, CLOCK_MONOTONIC,
                                         &until);
        link = find_wanted(client);
    }
    if (link) {
        link->in_hands = true;
        *link_id = link->id;
    }
    pthread_mutex_unlock(&client->mutex);
    return atomic_load(&client->closing) ? SMB_DISCONNECTED : link ? SMB_OK : SMB_TIMEOUT;
}

int smb_link_alive(struct smb_link *link)
{
    return atomic_load(&link->state) != LINK_CLOSED && !atomic_load(&link->closing);
}

int smb_link_connected(struct smb_link *link)
{
    return atomic_load(&link->state) == LINK_UP && !atomic_load(&link->closing);
}

uint32_t smb_link_round_trip_us(struct smb_link *link)
{
    return link->round_trip_us;
}

uint64_t smb_link_id(struct smb_link *link)
{
    return link->id;
}

void smb_link_close(struct smb_link *link)
{
    if (!client_is_ours(link->client))
        return;
    atomic_store(&link->closing, true);
    link_want(link, false);
    client_wake_progress(link->client);
    link_release(link);
}

void smb_link_once(struct smb_link *link)
{
    atomic_store(&link->once, true);
    client_wake_progress(link->client); /* it may have broken already */
}

int smb_link_let_go(struct smb_link *link)
{
    pthread_mutex_lock(&link->client->mutex);
    link->in_hands = false;
    bool wanted = link->wanted;
    if (wanted) /* wanted again since a thread last took charge of it */
        pthread_cond_broadcast(&link->client->link_wanted);
    pthread_mutex_unlock(&link->client->mutex);
    return wanted;
}

int smb_link_wanted(struct smb_link *link)
{
    pthread_mutex_lock(&link->client->mutex);
    bool wanted = link->wanted;
    pthread_mutex_unlock(&link->client->mutex);
    return wanted;
}

void smb_link_set_epoch(struct smb_link *link, uint32_t epoch)
{
    atomic_store_explicit(&link->epoch, epoch, memory_order_release);
}

void smb_link_fail(struct smb_link *link, int status)
{
    atomic_store_explicit(&link->closed_why, status, memory_order_relaxed);
    /* pairs with link_progress */
    atomic_store_explicit(&link->closing, true, memory_order_release);
    link_want(link, false);
    client_wake_progress(link->client);
}

bool link_busy(const struct smb_link *link)
{
    return link->queue_head || link->unsent || link->sent || link->watermark_count > 0 ||
           link_was_given_up(link);
}

bool link_sleeps_at_once(const struct smb_link *link)
{
    /* inside TLS the next record is never far */
    return link->in_flight_bytes >= SPIN_BYTES_MAX && !link->channel.tls;
}

bool link_wants_output(const struct smb_link *link)
{
    if (channel_unsent_bytes(&link->channel))
        return true;
    return link->watermark_count > 0
               ? link->watermark_bytes_sent <
                     link->watermark_count * (uint64_t)watermark_frame_bytes(link)
               : link->unsent != NULL;
}

int link_fd(const struct smb_link *link)
{
    return link_state_of(link) == LINK_UP || link_state_of(link) == LINK_RESUMING ? link->channel.fd
                                                                                  : -1;
}

/* Puts sent requests back before the unsent ones, in order. Reads and waiting requests whose
 * callers have left are dropped. */
static void gather(struct smb_link *link)
{
    *link->sent_end = link->unsent;
    if (!link->unsent)
        link->unsent_end = link->sent_end;
    if (link->sent)
        link->unsent = link->sent;
    if (!link->unsent)
        link->unsent_end = &link->unsent;
    link->sent = NULL;
    link->sent_end = &link->sent;
    for (struct inflight **at = &link->unsent; *at;) {
        if (!(*at)->stream && !(*at)->unknown)
            inflight_put_back(link, inflight_take_from(at, &link->unsent_end));
        else
            at = &(*at)->next;
    }
}

/* The other end may read and write memory named in records, but not after this returns. The wait is
 * short, because the other end's thread waits for nothing else. If that thread is dead, its process
 * is broken, and we go on. */
static void take_memory_back(struct smb_link *link)
{
    uint64_t until_ns = smb_now_ns() + TAKE_BACK_NS;
    shutdown(link->channel.fd, SHUT_WR);
    for (ssize_t n = 1; n != 0;) {
        struct pollfd poller = {.fd = link->channel.fd, .events = POLLIN};
        if (smb_now_ns() >= until_ns)
            return;
        if (poll(&poller, 1, 100) <= 0)
            continue;
        n = recv(link->channel.fd, link->in, sizeof link->in, MSG_DONTWAIT);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return;
    }
}

static void break_connection(struct smb_link *link)
{
    if (link->channel.fd >= 0 && link->by_reference)
        take_memory_back(link);
    channel_close(&link->channel);
    link->reading = NULL;
    link->in_start = link->in_end = 0;
    link->sent_bytes = 0;
    link->watermark_count = 0;
    gather(link);
    link_enter(link, LINK_DOWN);
}

/* Takes over a new connection. */
static int adopt_connection(struct smb_link *link, struct channel *fresh)
{
    if (link_state_of(link) != LINK_DOWN)
        break_connection(link);
    link->channel = *fresh;
    free(fresh);
    link->by_reference = atomic_load(&link->fresh_by_reference);
    atomic_store_explicit(&link->given_up, false, memory_order_release);
    link_take_epoch(link);
    int status = link_ask_watermarks(link);
    if (status == SMB_OK && link->watermark_count == 0)
        link_resume(link);
    else
        link_enter(link, LINK_RESUMING);
    return status;
}

/* An idle link is silent; if it can be read now, its server is gone. Finding this out before the
 * first byte is sent makes the outcome "not applied" instead of "unknown". */
static bool peer_is_gone(const struct smb_link *link)
{
    uint8_t byte;
    ssize_t n = recv(link->channel.fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n >= 0 || (errno != EAGAIN && errno != EINTR);
}

static int move(struct smb_link *link, bool *moved)
{
    int status = SMB_OK;
    bool awaits = false;
    if (link_state_of(link) == LINK_RESUMING) {
        status = link_send_watermarks(link, moved);
    } else {
        if (link->in_flight == 0 && smb_now_ns() - link->heard_ns > QUIET_NS && peer_is_gone(link))
            return SMB_LINK_LOST;
        send_fill_window(link);
        awaits = link->sent; /* what was sent just now cannot be answered yet */
        if (link->unsent || channel_unsent_bytes(&link->channel))
            status = send_some(link, moved);
    }
    if (status == SMB_OK && (awaits || link->watermark_count > 0))
        status = link_receive(link, moved);
    if (status == SMB_OK)
        status = link_digest(link);
    if (status == SMB_OK && link_state_of(link) == LINK_RESUMING &&
        link->watermarks_answered == link->watermark_count)
        link_resume(link);
    return status;
}

bool link_progress(struct smb_link *link)
{
    bool moved = false;
    if (atomic_load_explicit(&link->closing, memory_order_acquire)) {
        /* pairs with resume_over, which stores the reason first */
        int why = atomic_load_explicit(&link->closed_why, memory_order_relaxed);
        link_shut(link, why ? why : SMB_LINK_LOST);
        return true;
    }
    if (link_state_of(link) == LINK_CLOSED) {
        link_shut(link, atomic_load_explicit(&link->closed_why, memory_order_relaxed));
        return true;
    }
    struct channel *fresh = atomic_exchange(&link->fresh, NULL);
    int status = fresh ? adopt_connection(link, fresh) : SMB_OK;
    if (status == SMB_OK && link_state_of(link) != LINK_DOWN)
        status = move(link, &moved);
    send_drop_empty(link);
    /* Trying again would not help, unless checksums are in use and the bytes were changed on the
     * way. */
    if ((status == SMB_PROTOCOL || status == SMB_VERSION) && !link->client->checksums) {
        link_shut(link, status);
        return true;
    }
    if (status != SMB_OK) {
        if (status == SMB_PROTOCOL || status == SMB_VERSION)
            link_spoilt(link);
        break_connection(link);
        moved = true;
    }
    if (link_state_of(link) == LINK_DOWN && atomic_load(&link->once))
        link_shut(link, SMB_LINK_LOST);
    else if (link_state_of(link) == LINK_DOWN)
        link_want(link, link_busy(link));
    return moved;
}

/* Notes the part of the stream that was never made into frames. */
static void note_unmade(struct stream *stream)
{
    while (stream_take(stream) && !stream->ask) {
        if (smb_opcode_changes(stream->request->opcode))
            call_note_unknown(stream->call, stream->piece.buffer_offset,
                              (uint32_t)stream->piece.bytes, SMB_OUTCOME_NOT_APPLIED);
        stream_advance(stream);
    }
    stream->have_piece = false;
}

static void fail_inflight(struct smb_link *link, int status)
{
    while (link->unsent) {
        struct inflight *inflight = inflight_take_from(&link->unsent, &link->unsent_end);
        struct stream *stream = inflight->stream;
        int fate = inflight->fate == SMB_OUTCOME_PENDING ? SMB_OUTCOME_UNKNOWN : inflight->fate;
        inflight_resolve(inflight, fate);
        if (stream) {
            if (smb_opcode_changes(inflight->opcode))
                call_note_unknown(stream->call, inflight->buffer_offset, inflight->length, fate);
            call_failed(stream, status == SMB_LINK_LOST && !call_was_sent(stream) ? SMB_DISCONNECTED
                                                                                  : status);
            note_unmade(stream);
        }
        inflight_landed(link, inflight);
    }
}

void link_shut(struct smb_link *link, int status)
{
    if (link_state_of(link) != LINK_CLOSED)
        break_connection(link);
    atomic_store_explicit(&link->closed_why, status, memory_order_relaxed);
    link_enter(link, LINK_CLOSED);
    atomic_store_explicit(&link->given_up, false, memory_order_release);
    link_want(link, false);
    send_drop_empty(link);
    fail_inflight(link, status);
    while (link->queue_head) {
        struct stream *stream = link->queue_head;
        link_dequeue(link);
        call_failed(stream,
                    status == SMB_LINK_LOST && !call_was_sent(stream) ? SMB_DISCONNECTED : status);
        note_unmade(stream);
        if (stream->in_flight == 0)
            call_stream_finished(stream);
    }
}

static void leave(struct inflight *inflight)
{
    SMB_ASSERT(inflight->stream->in_flight > 0);
    struct stream *stream = inflight->stream;
    inflight->stream = NULL;
    inflight->sink = NULL;
    stream->in_flight--;
    if (!smb_opcode_changes(inflight->opcode))
        return;
    inflight->unknown_index = call_note_unknown(stream->call, inflight->buffer_offset,
                                                inflight->length, inflight->fate);
    if (inflight->fate != SMB_OUTCOME_PENDING || inflight->unknown_index == UINT32_MAX)
        return;
    inflight->unknown = stream->call->outcome->unknown;
    atomic_fetch_add_explicit(&inflight->unknown->references, 1, memory_order_relaxed);
}

/* A half-sent frame breaks its connection, because its caller's memory may not be used any more. So
 * does a sent frame of a data lane: the server may have deferred it, and with it all that follows.
 * The next connection does not have this problem. */
void link_abandon(struct smb_link *link, struct stream *stream)
{
    if (stream->queued)
        link_take_out_of_queue(link, stream);
    note_unmade(stream);
    bool half_sent = link->unsent && link->unsent->stream == stream && link->sent_bytes > 0;
    bool deferred = false, was_sent = false;
    for (struct inflight *inflight = link->sent; inflight; inflight = inflight->next) {
        if (inflight->stream == stream) {
            leave(inflight);
            deferred |= !stream->ask;
        }
    }
    for (struct inflight **at = &link->unsent; *at;) {
        struct inflight *inflight = *at;
        if (inflight->stream == stream) {
            leave(inflight);
            was_sent |= inflight->was_sent;
            if (!inflight->unknown && !(half_sent && at == &link->unsent)) {
                inflight_put_back(link, inflight_take_from(at, &link->unsent_end));
                continue;
            }
        }
        at = &inflight->next;
    }
    bool breaks = half_sent || (deferred && link_state_of(link) == LINK_UP);
    /* Other lanes wait until the next connection. A connection before the present one has ended
     * already, with everything that was sent over it. */
    if (stream->shared && (breaks || (was_sent && link_state_of(link) == LINK_DOWN)))
        atomic_store_explicit(&link->given_up, true, memory_order_release);
    if (breaks) {
        break_connection(link);
        /* called now, because the progress thread may be about to sleep while other calls wait for
         * this link */
        link_want(link, link_busy(link));
    }
    call_stream_finished(stream);
}
