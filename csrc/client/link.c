/* One lane to a server: frames in flight, sent in order, answered in any, over as many connections as it takes. */
#include "client/inflight.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    SEND_PARTS = 32,
    FRAME_PARTS = 4,
    TAKE_BACK_NS = 2000000000,
    QUIET_NS = 1000000 /* a link that has said nothing for so long is asked whether its peer is there, before it is used */
};

struct smb_link *link_retain(struct smb_link *link)
{
    atomic_fetch_add_explicit(&link->references, 1, memory_order_relaxed);
    return link;
}

void link_release(struct smb_link *link)
{
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
    flights_free(link->unsent);
    flights_free(link->sent);
    flights_free(link->spare);
    free(link->watermarks);
    free(link->tokens);
    free(link);
    client_release(client);
}

int smb_link_alive(struct smb_link *link)
{
    return atomic_load(&link->state) != LINK_CLOSED && !atomic_load(&link->closing);
}

int smb_link_connected(struct smb_link *link)
{
    return atomic_load(&link->state) == LINK_UP && !atomic_load(&link->closing);
}

uint64_t smb_link_id(struct smb_link *link)
{
    return link->id;
}

void smb_link_close(struct smb_link *link)
{
    atomic_store(&link->closing, true);
    client_want_link(link, false);
    client_wake_driver(link->client);
    link_release(link);
}

int smb_link_let_go(struct smb_link *link)
{
    pthread_mutex_lock(&link->client->mutex);
    link->in_hands = false;
    bool wanted = link->wanted;
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

/* ---- carrying calls ----------------------------------------------------------------------------------------------- */

bool link_busy(const struct smb_link *link)
{
    return link->queue_head || link->unsent || link->sent || link->watermark_count > 0;
}

bool link_sleeps_at_once(const struct smb_link *link)
{
    return link->flying_bytes >= SPIN_BYTES_MAX && !link->channel.tls; /* whose next record is never far */
}

bool link_wants_output(const struct smb_link *link)
{
    if (channel_has_unsent(&link->channel))
        return true;
    return link->watermark_count > 0 ? link->watermark_bytes_sent < link->watermark_count * (uint64_t)watermark_frame_bytes(link)
                                     : link->unsent != NULL;
}

int link_fd(const struct smb_link *link)
{
    return link_state_of(link) == LINK_UP || link_state_of(link) == LINK_RESUMING ? link->channel.fd : -1;
}

void link_enqueue(struct smb_link *link, struct stream *stream)
{
    stream->next = NULL;
    stream->queued = true;
    if (link->queue_tail)
        link->queue_tail->next = stream;
    else
        link->queue_head = stream;
    link->queue_tail = stream;
}

static void dequeue(struct smb_link *link)
{
    struct stream *stream = link->queue_head;
    link->queue_head = stream->next;
    if (!link->queue_head)
        link->queue_tail = NULL;
    stream->queued = false;
}

static void take_out_of_queue(struct smb_link *link, struct stream *stream)
{
    struct stream *before = NULL;
    for (struct stream *s = link->queue_head; s != stream; s = s->next)
        before = s;
    if (before)
        before->next = stream->next;
    else
        link->queue_head = stream->next;
    if (link->queue_tail == stream)
        link->queue_tail = before;
    stream->queued = false;
}

static bool may_make(const struct smb_link *link, const struct stream *stream)
{
    /* Waits are answered when their time comes: they leave no room for each other to take. */
    return stream->ask || (link->flying < link->window &&
                           (!opcode_is_atomic(stream->request->opcode) || link->atomics_flying < ATOMICS_FLYING_MAX));
}

/* Streams take turns, so that a small call is not held up behind a large one. */
static void fill_window(struct smb_link *link)
{
    while (link->queue_head && may_make(link, link->queue_head)) {
        struct stream *stream = link->queue_head;
        for (int i = 0; i < STREAM_BURST && stream->have_piece && may_make(link, stream); i++)
            if (!flight_make(link, stream))
                return;
        if (!stream->have_piece || stream->next) {
            dequeue(link);
            if (stream->have_piece)
                link_enqueue(link, stream);
        }
    }
}

/* ---- sending */

/* Of a record: where the payload is, and where the answer's data goes. */
static void write_ends(struct flight *flight)
{
    uintptr_t sink = (uintptr_t)flight_landing(flight);
    smb_store64(flight->ends, (uintptr_t)flight->payload);
    smb_store64(flight->ends + 8, sink);
    smb_store64(flight->ends + 16, flight->payload_bytes | (sink ? (uint64_t)flight->answer_bytes << 32 : 0));
}

/* What is left of the frame to be sent, `skip` bytes of it having gone; returns how many parts. */
static int frame_parts(const struct smb_link *link, struct flight *flight, uint64_t skip, struct iovec *parts)
{
    const struct iovec record[FRAME_PARTS] = {{flight->header, SMB_FRAME_BYTES},
                                              {flight->small, SMB_RECORD_SMALL_BYTES},
                                              {flight->ends, SMB_RECORD_ENDS_BYTES}};
    const struct iovec bytes[FRAME_PARTS] = {{flight->header, SMB_FRAME_BYTES},
                                             {flight->small, flight->small_bytes},
                                             {(void *)(uintptr_t)flight->payload, flight->payload_bytes},
                                             {flight->checksum, flight->checksum_bytes}};
    const struct iovec *whole = link->by_reference ? record : bytes;
    if (link->by_reference && skip == 0)
        write_ends(flight);
    int count = 0;
    for (int i = 0; i < FRAME_PARTS; i++) {
        if (whole[i].iov_len > skip)
            parts[count++] = (struct iovec){(uint8_t *)whole[i].iov_base + skip, whole[i].iov_len - skip};
        skip -= skip < whole[i].iov_len ? skip : whole[i].iov_len;
    }
    return count;
}

static uint64_t frame_bytes(const struct smb_link *link, const struct flight *flight)
{
    if (link->by_reference)
        return SMB_RECORD_BYTES;
    return SMB_FRAME_BYTES + (uint64_t)flight->small_bytes + flight->payload_bytes + flight->checksum_bytes;
}

static void note_sent(const struct smb_link *link, struct flight *flight)
{
    flight->was_sent = true;
    flight->went_by_reference |= link->by_reference;
    if (flight->fate == SMB_DOUBT_NOT_APPLIED)
        flight->fate = SMB_DOUBT_PENDING;
    if (!flight->stream)
        return;
    if (flight->stream->told)
        flight->stream->told->sent = 1;
    else
        call_note_sent(flight->stream->call);
}

/* Unsent frames from the callers' memory straight to the socket. */
static int send_some(struct smb_link *link, bool *moved)
{
    struct iovec parts[SEND_PARTS];
    int count = 0;
    uint64_t skip = link->sent_bytes;
    for (struct flight *flight = link->unsent; flight && count + FRAME_PARTS <= SEND_PARTS; flight = flight->next) {
        count += frame_parts(link, flight, skip, parts + count);
        skip = 0;
    }
    ssize_t done = channel_write(&link->channel, parts, count);
    if (done < 0)
        return channel_failed(done) ? SMB_LINK_LOST : SMB_OK;
    *moved |= done > 0;
    link->sent_bytes += (uint64_t)done;
    while (link->unsent && link->sent_bytes > 0) {
        note_sent(link, link->unsent); /* at least its first byte */
        uint64_t whole = frame_bytes(link, link->unsent);
        if (link->sent_bytes < whole)
            break;
        link->sent_bytes -= whole;
        flight_append(&link->sent_end, flight_take_from(&link->unsent, &link->unsent_end));
    }
    return SMB_OK;
}

/* ---- breaking and resuming */

/* What was sent goes back to what is to be sent, in order: (sent, unsent). Reads and waits that nobody waits for are dropped. */
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
    for (struct flight **at = &link->unsent; *at;) {
        if (!(*at)->stream && !(*at)->doubt)
            flight_put_back(link, flight_take_from(at, &link->unsent_end));
        else
            at = &(*at)->next;
    }
}

/* Memory named in records may be read and written by somebody else: not once this returns. Short, as whoever has the other end waits
 * for nothing else; a process in which that thread is dead has lost its senses, and goes on. */
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

/* A new connection was handed over. */
static int adopt_connection(struct smb_link *link, struct channel *fresh)
{
    if (link_state_of(link) != LINK_DOWN)
        break_connection(link);
    link->channel = *fresh;
    free(fresh);
    link->by_reference = atomic_load(&link->fresh_by_reference);
    int status = link_ask_watermarks(link);
    if (status == SMB_OK && link->watermark_count == 0)
        link_resume(link);
    else
        link_enter(link, LINK_RESUMING);
    return status;
}

/* An idle link says nothing; if it can be read now, its server is gone, and to know that before the first byte is sent is
 * the difference between "not applied" and "unknown". */
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
        if (link->flying == 0 && smb_now_ns() - link->heard_ns > QUIET_NS && peer_is_gone(link))
            return SMB_LINK_LOST;
        fill_window(link);
        awaits = link->sent; /* what is sent just now is not answered yet */
        if (link->unsent || channel_has_unsent(&link->channel))
            status = send_some(link, moved);
    }
    if (status == SMB_OK && (awaits || link->watermark_count > 0))
        status = link_receive(link, moved);
    if (status == SMB_OK)
        status = link_digest(link);
    if (status == SMB_OK && link_state_of(link) == LINK_RESUMING && link->watermarks_answered == link->watermark_count)
        link_resume(link);
    return status;
}

bool link_progress(struct smb_link *link)
{
    bool moved = false;
    if (atomic_load_explicit(&link->closing, memory_order_acquire)) { /* pairs with hand_over_connection: and why */
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
    /* It will not do better the next time; unless its bytes were spoilt on the way. */
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
    if (link_state_of(link) == LINK_DOWN)
        client_want_link(link, link_busy(link));
    return moved;
}

/* What of the stream was never made into frames. */
static void note_unmade(struct stream *stream)
{
    while (stream->have_piece && !stream->ask) {
        if (smb_opcode_changes(stream->request->opcode))
            call_doubt(stream->call, stream->piece.buffer_offset, (uint32_t)stream->piece.bytes, SMB_DOUBT_NOT_APPLIED);
        stream_advance(stream);
    }
    stream->have_piece = false;
}

static void fail_flights(struct smb_link *link, int status)
{
    while (link->unsent) {
        struct flight *flight = flight_take_from(&link->unsent, &link->unsent_end);
        struct stream *stream = flight->stream;
        int fate = flight->fate == SMB_DOUBT_PENDING ? SMB_DOUBT_UNKNOWN : flight->fate;
        flight_settle(flight, fate);
        if (stream) {
            if (smb_opcode_changes(flight->opcode))
                call_doubt(stream->call, flight->buffer_offset, flight->length, fate);
            call_failed(stream, status == SMB_LINK_LOST && !call_was_sent(stream) ? SMB_DISCONNECTED : status);
            note_unmade(stream);
        }
        flight_landed(link, flight);
    }
}

void link_shut(struct smb_link *link, int status)
{
    if (link_state_of(link) != LINK_CLOSED)
        break_connection(link);
    atomic_store_explicit(&link->closed_why, status, memory_order_relaxed);
    link_enter(link, LINK_CLOSED);
    client_want_link(link, false);
    fail_flights(link, status);
    while (link->queue_head) {
        struct stream *stream = link->queue_head;
        dequeue(link);
        call_failed(stream, status == SMB_LINK_LOST && !call_was_sent(stream) ? SMB_DISCONNECTED : status);
        note_unmade(stream);
        if (stream->in_flight == 0)
            call_stream_finished(stream);
    }
}

/* ---- callers that leave */

static void leave(struct flight *flight)
{
    struct stream *stream = flight->stream;
    flight->stream = NULL;
    flight->sink = NULL;
    stream->in_flight--;
    if (!smb_opcode_changes(flight->opcode))
        return;
    flight->doubt_index = call_doubt(stream->call, flight->buffer_offset, flight->length, flight->fate);
    if (flight->fate != SMB_DOUBT_PENDING || flight->doubt_index == UINT32_MAX)
        return;
    flight->doubt = stream->call->outcome->doubt;
    atomic_fetch_add_explicit(&flight->doubt->references, 1, memory_order_relaxed);
}

/* One that is half sent takes its connection along: its caller's memory can't be used any more. So does one of a data lane that
 * was sent: it may be parked at the server, and all that comes after it with it; on the next connection it is not there. */
void link_abandon(struct smb_link *link, struct stream *stream)
{
    if (stream->queued)
        take_out_of_queue(link, stream);
    note_unmade(stream);
    bool half_sent = link->unsent && link->unsent->stream == stream && link->sent_bytes > 0;
    bool parked = false;
    for (struct flight *flight = link->sent; flight; flight = flight->next) {
        if (flight->stream == stream) {
            leave(flight);
            parked |= !stream->ask;
        }
    }
    for (struct flight **at = &link->unsent; *at;) {
        struct flight *flight = *at;
        if (flight->stream == stream) {
            leave(flight);
            if (!flight->doubt && !(half_sent && at == &link->unsent)) {
                flight_put_back(link, flight_take_from(at, &link->unsent_end));
                continue;
            }
        }
        at = &flight->next;
    }
    if (half_sent || (parked && link_state_of(link) == LINK_UP)) {
        break_connection(link);
        client_want_link(link, link_busy(link)); /* now: the driver may be about to sleep, and others' calls wait here */
    }
    call_stream_finished(stream);
}
