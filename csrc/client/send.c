#include "client/send.h"

#include <sys/uio.h>

#include "base/assert.h"
#include "channel/channel.h"
#include "client/buffer.h"

enum {
    SEND_PARTS = 32,
    FRAME_PARTS = 4,
    STREAM_BURST = 8, /* frames of one stream before the next stream of the link has its turn */
    /* With several lanes, each has so much on its way: 16 MiB over eight, past 1 Gb/s x 100 ms. A
     * fast lane then takes more pieces, and a slow one has little left at the end. */
    LANE_BYTES = 2 << 20
};

void link_enqueue(struct smb_link *link, struct stream *stream)
{
    SMB_ASSERT(!stream->queued);
    stream->next = NULL;
    stream->queued = true;
    if (link->queue_tail)
        link->queue_tail->next = stream;
    else
        link->queue_head = stream;
    link->queue_tail = stream;
}

void link_dequeue(struct smb_link *link)
{
    SMB_ASSERT(link->queue_head && link->queue_head->queued);
    struct stream *stream = link->queue_head;
    link->queue_head = stream->next;
    if (!link->queue_head)
        link->queue_tail = NULL;
    stream->queued = false;
}

void link_take_out_of_queue(struct smb_link *link, struct stream *stream)
{
    SMB_ASSERT(stream->queued);
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

/* With several lanes: whether no lane has a request on its way that its caller gave up. The server
 * might execute such a request after what is sent next over another lane. */
static bool is_clear(const struct path *path)
{
    for (uint32_t lane = 0; lane <= path->further_count; lane++)
        if (link_was_given_up(path_link(path, lane)))
            return false;
    return true;
}

static bool may_make(const struct smb_link *link, const struct stream *stream)
{
    /* Waiting requests are answered when their time comes, so they do not share the window's
     * room. */
    return stream->ask ||
           (link->in_flight < link->window &&
            (!stream->shared || (link->in_flight_bytes < LANE_BYTES && is_clear(stream->path))) &&
            (!opcode_is_atomic(stream->request->opcode) ||
             link->atomics_in_flight < ATOMICS_IN_FLIGHT_MAX));
}

/* Removes a stream without further pieces. */
static void leave_queue(struct smb_link *link, struct stream *stream)
{
    link_take_out_of_queue(link, stream);
    if (stream->in_flight == 0) /* other lanes have taken all pieces */
        call_stream_finished(stream);
}

void send_fill_window(struct smb_link *link)
{
    while (link->queue_head && may_make(link, link->queue_head)) {
        struct stream *stream = link->queue_head;
        for (int i = 0; i < STREAM_BURST && may_make(link, stream) && stream_take(stream); i++)
            if (!inflight_make(link, stream))
                return;
        bool more = stream->have_piece || (stream->shared && !stream_is_empty(stream));
        if (more && stream->next) {
            link_dequeue(link);
            link_enqueue(link, stream);
        } else if (!more) {
            leave_queue(link, stream);
        }
    }
}

void send_drop_empty(struct smb_link *link)
{
    for (struct stream *stream = link->queue_head; stream;) {
        struct stream *next = stream->next; /* the stream may be gone once its call is done */
        if (stream_is_empty(stream))
            leave_queue(link, stream);
        stream = next;
    }
}

/* Writes the end of a record: where the payload is, and where the answer's data goes. */
static void write_ends(struct inflight *inflight)
{
    uintptr_t sink = (uintptr_t)inflight_landing(inflight);
    smb_store64(inflight->ends, (uintptr_t)inflight->payload);
    smb_store64(inflight->ends + 8, sink);
    smb_store64(inflight->ends + 16,
                inflight->payload_bytes | (sink ? (uint64_t)inflight->answer_bytes << 32 : 0));
}

/* Sets `parts` to the frame without its first `skip` bytes. Returns the number of parts. */
static int frame_parts(const struct smb_link *link, struct inflight *inflight, uint64_t skip,
                       struct iovec *parts)
{
    const struct iovec record[FRAME_PARTS] = {{inflight->header, SMB_FRAME_BYTES},
                                              {inflight->small, SMB_RECORD_SMALL_BYTES},
                                              {inflight->ends, SMB_RECORD_ENDS_BYTES}};
    const struct iovec bytes[FRAME_PARTS] = {
        {inflight->header, SMB_FRAME_BYTES},
        {inflight->small, inflight->small_bytes},
        {(void *)(uintptr_t)inflight->payload, inflight->payload_bytes},
        {inflight->checksum, inflight->checksum_bytes}};
    const struct iovec *whole = link->by_reference ? record : bytes;
    if (link->by_reference && skip == 0)
        write_ends(inflight);
    int count = 0;
    for (int i = 0; i < FRAME_PARTS; i++) {
        if (whole[i].iov_len > skip)
            parts[count++] = (struct iovec){(uint8_t *)whole[i].iov_base + skip,
                                            whole[i].iov_len - skip};
        skip -= skip < whole[i].iov_len ? skip : whole[i].iov_len;
    }
    return count;
}

static uint64_t frame_bytes(const struct smb_link *link, const struct inflight *inflight)
{
    if (link->by_reference)
        return SMB_RECORD_BYTES;
    return SMB_FRAME_BYTES + (uint64_t)inflight->small_bytes + inflight->payload_bytes +
           inflight->checksum_bytes;
}

static void note_sent(const struct smb_link *link, struct inflight *inflight)
{
    inflight->was_sent = true;
    inflight->went_by_reference |= link->by_reference;
    if (inflight->fate == SMB_OUTCOME_NOT_APPLIED)
        inflight->fate = SMB_OUTCOME_PENDING;
    if (!inflight->stream)
        return;
    if (inflight->stream->reply)
        inflight->stream->reply->sent = 1;
    else
        call_note_sent(inflight->stream->call);
}

int send_some(struct smb_link *link, bool *moved)
{
    struct iovec parts[SEND_PARTS];
    int count = 0;
    uint64_t skip = link->sent_bytes;
    for (struct inflight *inflight = link->unsent; inflight && count + FRAME_PARTS <= SEND_PARTS;
         inflight = inflight->next) {
        count += frame_parts(link, inflight, skip, parts + count);
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
        inflight_append(&link->sent_end, inflight_take_from(&link->unsent, &link->unsent_end));
    }
    return SMB_OK;
}
