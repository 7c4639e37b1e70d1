/* A lane goes on over a new connection: how far each segment has come, and what is to be sent again. Driver only. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "client/inflight.h"

static struct watermark *watermark_of(struct smb_link *link, const struct flight *flight)
{
    for (uint32_t i = 0; i < link->watermark_count; i++)
        if (link->watermarks[i].segment_id == flight->segment_id && link->watermarks[i].epoch == flight->epoch)
            return &link->watermarks[i];
    return NULL;
}

static bool in_doubt(const struct flight *flight)
{
    return flight->fate != SMB_DOUBT_NOT_APPLIED && smb_opcode_changes(flight->opcode);
}

int link_ask_watermarks(struct smb_link *link)
{
    link->watermark_count = link->watermarks_answered = 0;
    link->watermark_bytes_sent = 0;
    for (struct flight *flight = link->unsent; flight; flight = flight->next) {
        if (!in_doubt(flight) || watermark_of(link, flight))
            continue;
        if (!link->watermarks)
            link->watermarks = calloc(WINDOW_FRAMES, sizeof *link->watermarks);
        if (!link->watermarks || link->watermark_count == WINDOW_FRAMES)
            return SMB_OUT_OF_MEMORY;
        link->watermarks[link->watermark_count++] =
            (struct watermark){.segment_id = flight->segment_id, .epoch = flight->epoch, .sequence = link_next_sequence(link)};
    }
    return SMB_OK;
}

int link_send_watermarks(struct smb_link *link, bool *moved)
{
    uint8_t bytes[SMB_RECORD_BYTES] = {0};
    uint32_t each = watermark_frame_bytes(link);
    while (link->watermark_bytes_sent < link->watermark_count * (uint64_t)each) {
        const struct watermark *watermark = &link->watermarks[link->watermark_bytes_sent / each];
        uint64_t skip = link->watermark_bytes_sent % each;
        struct smb_frame frame = {.opcode = SMB_WATERMARK, .flags = client_frame_flags(link->client),
                                  .payload = link->by_reference ? 0 : each - SMB_FRAME_BYTES, .lane = link->lane, .epoch = watermark->epoch,
                                  .session = link->client->session, .sequence = watermark->sequence,
                                  .segment = watermark->segment_id};
        smb_frame_encode(&frame, bytes);
        if (!link->by_reference)
            smb_store_checksum(bytes + SMB_FRAME_BYTES, smb_crc32c(0, bytes, SMB_FRAME_BYTES));
        struct iovec part = {bytes + skip, each - skip};
        ssize_t done = channel_write(&link->channel, &part, 1);
        if (done < 0)
            return channel_failed(done) ? SMB_LINK_LOST : SMB_OK;
        *moved = true;
        link->watermark_bytes_sent += (uint64_t)done;
    }
    /* All are encrypted; the socket may not have taken all of that. */
    if (channel_has_unsent(&link->channel) && channel_failed(channel_write(&link->channel, NULL, 0)))
        return SMB_LINK_LOST;
    return SMB_OK;
}

int link_take_watermark(struct smb_link *link, const struct smb_frame *reply)
{
    for (uint32_t i = 0; i < link->watermark_count; i++) {
        struct watermark *watermark = &link->watermarks[i];
        if (watermark->sequence == reply->sequence && !watermark->answered && reply->opcode == SMB_WATERMARK) {
            watermark->answered = true;
            watermark->status = reply->status;
            watermark->value = reply->argument;
            watermark->refused = reply->offset;
            link->watermarks_answered++;
            return SMB_OK;
        }
    }
    return SMB_PROTOCOL;
}

static void mark_repeated(const struct smb_link *link, struct flight *flight)
{
    struct smb_frame frame;
    /* Our own header: it parses. */
    if (!flight->was_sent || smb_frame_parse(flight->header, &frame) != SMB_OK)
        return;
    atomic_fetch_add_explicit(&link->client->stats.repeated, 1, memory_order_relaxed);
    frame.flags |= SMB_FLAG_RETRY;
    smb_frame_encode(&frame, flight->header);
    if (flight->opcode == SMB_LOCK) /* it keeps its place in the queue */
        smb_store64(flight->small + 16, smb_load64(flight->small + 16) + (smb_now_ns() - flight->made_ns) / 1000000U);
    flight->made_ns = smb_now_ns();
    flight_seal(flight);
}

/* true: its fate is all that anybody wants of it. */
static bool decided(struct smb_link *link, struct flight *flight)
{
    if (!in_doubt(flight))
        return false;
    const struct watermark *watermark = watermark_of(link, flight);
    if (watermark->status != SMB_OK || flight->fate == SMB_DOUBT_UNKNOWN)
        flight->fate = SMB_DOUBT_UNKNOWN; /* once forgotten, whatever the lane has done since */
    else if (flight->sequence > watermark->value)
        flight->fate = flight->opcode == SMB_WRITE && flight->went_by_reference ? SMB_DOUBT_UNKNOWN : SMB_DOUBT_NOT_APPLIED;
    else
        flight->fate = flight->sequence > watermark->refused ? SMB_DOUBT_APPLIED : SMB_DOUBT_UNKNOWN; /* its repetition tells */
    return !flight->stream || (flight->fate == SMB_DOUBT_APPLIED && !flight->sink && !opcode_is_atomic(flight->opcode));
}

void link_resume(struct smb_link *link)
{
    for (struct flight **at = &link->unsent; *at;) {
        if (decided(link, *at)) {
            struct flight *flight = flight_take_from(at, &link->unsent_end);
            if (flight->stream) {
                link_take_success(link, flight, 0, 0);
            } else {
                flight_settle(flight, flight->fate);
                flight_landed(link, flight);
            }
        } else {
            mark_repeated(link, *at);
            at = &(*at)->next;
        }
    }
    link->watermark_count = 0;
    link_enter(link, LINK_UP);
}
