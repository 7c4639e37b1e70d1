#include "client/resume.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/assert.h"
#include "channel/channel.h"
#include "client/answered.h"
#include "smb/kernels.h"

static struct watermark *watermark_of(struct smb_link *link, const struct inflight *inflight)
{
    for (uint32_t i = 0; i < link->watermark_count; i++)
        if (link->watermarks[i].segment_id == inflight->segment_id &&
            link->watermarks[i].epoch == inflight->epoch)
            return &link->watermarks[i];
    return NULL;
}

static bool is_unknown(const struct inflight *inflight)
{
    return inflight->fate != SMB_OUTCOME_NOT_APPLIED && smb_opcode_changes(inflight->opcode);
}

void link_take_epoch(struct smb_link *link)
{
    uint32_t epoch = link_epoch(link);
    for (struct inflight *inflight = link->unsent; inflight && epoch; inflight = inflight->next) {
        struct smb_frame frame;
        if (inflight->epoch == epoch || smb_frame_parse(inflight->header, &frame) != SMB_OK)
            continue;
        inflight->epoch = frame.epoch = epoch;
        smb_frame_encode(&frame, inflight->header);
        inflight_seal(inflight);
    }
}

int link_ask_watermarks(struct smb_link *link)
{
    link->watermark_count = link->watermarks_answered = 0;
    link->watermark_bytes_sent = 0;
    for (struct inflight *inflight = link->unsent; inflight; inflight = inflight->next) {
        if (!is_unknown(inflight) || watermark_of(link, inflight))
            continue;
        if (!link->watermarks)
            link->watermarks = calloc(WINDOW_FRAMES, sizeof *link->watermarks);
        if (!link->watermarks || link->watermark_count == WINDOW_FRAMES)
            return SMB_OUT_OF_MEMORY;
        link->watermarks[link->watermark_count++] = (struct watermark){
            .segment_id = inflight->segment_id,
            .epoch = inflight->epoch,
            .sequence = link_next_sequence(link)};
    }
    return SMB_OK;
}

int link_send_watermarks(struct smb_link *link, bool *moved)
{
    SMB_ASSERT(link->watermark_count > 0);
    uint8_t bytes[SMB_RECORD_BYTES] = {0};
    uint32_t each = watermark_frame_bytes(link);
    while (link->watermark_bytes_sent < link->watermark_count * (uint64_t)each) {
        const struct watermark *watermark = &link->watermarks[link->watermark_bytes_sent / each];
        uint64_t skip = link->watermark_bytes_sent % each;
        struct smb_frame frame = {.opcode = SMB_WATERMARK,
                                  .flags = client_frame_flags(link->client),
                                  .payload = link->by_reference ? 0 : each - SMB_FRAME_BYTES,
                                  .lane = link->lane,
                                  .epoch = watermark->epoch,
                                  .session = link->client->session,
                                  .sequence = watermark->sequence,
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
    /* All bytes are encrypted, but the socket may not have taken all of them. */
    if (channel_unsent_bytes(&link->channel) &&
        channel_failed(channel_write(&link->channel, NULL, 0)))
        return SMB_LINK_LOST;
    return SMB_OK;
}

int link_take_watermark(struct smb_link *link, const struct smb_frame *reply)
{
    /* also from a server that does not know yet whether it still has the segment */
    if (link_is_sent_away(link, reply->status) || reply->status == SMB_STALE_EPOCH)
        return SMB_LINK_LOST;
    for (uint32_t i = 0; i < link->watermark_count; i++) {
        struct watermark *watermark = &link->watermarks[i];
        if (watermark->sequence == reply->sequence && !watermark->answered &&
            reply->opcode == SMB_WATERMARK) {
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

static void mark_repeated(const struct smb_link *link, struct inflight *inflight)
{
    struct smb_frame frame;
    /* The header is our own, so it is valid. */
    if (!inflight->was_sent || smb_frame_parse(inflight->header, &frame) != SMB_OK)
        return;
    atomic_fetch_add_explicit(&link->client->stats.repeated, 1, memory_order_relaxed);
    frame.flags |= SMB_FLAG_RETRY;
    smb_frame_encode(&frame, inflight->header);
    if (inflight->opcode == SMB_LOCK) /* the request keeps its place in the queue */
        smb_store64(inflight->small + 16, smb_load64(inflight->small + 16) +
                                              (smb_now_ns() - inflight->made_ns) / 1000000U);
    inflight->made_ns = smb_now_ns();
    inflight_seal(inflight);
}

/* True if only the outcome of the request is wanted, and it is known now. */
static bool decided(struct smb_link *link, struct inflight *inflight)
{
    if (!is_unknown(inflight))
        return false;
    const struct watermark *watermark = watermark_of(link, inflight);
    if (watermark->status != SMB_OK || inflight->fate == SMB_OUTCOME_UNKNOWN)
        /* once the record is evicted the outcome stays unknown, whatever the lane has done since */
        inflight->fate = SMB_OUTCOME_UNKNOWN;
    else if (inflight->sequence > watermark->value)
        inflight->fate = inflight->opcode == SMB_WRITE && inflight->went_by_reference
                             ? SMB_OUTCOME_UNKNOWN
                             : SMB_OUTCOME_NOT_APPLIED;
    else
        /* the answer to its repetition will tell */
        inflight->fate = inflight->sequence > watermark->refused ? SMB_OUTCOME_APPLIED
                                                                 : SMB_OUTCOME_UNKNOWN;
    return !inflight->stream || (inflight->fate == SMB_OUTCOME_APPLIED && !inflight->sink &&
                                 !opcode_is_atomic(inflight->opcode));
}

void link_resume(struct smb_link *link)
{
    for (struct inflight **at = &link->unsent; *at;) {
        if (decided(link, *at)) {
            struct inflight *inflight = inflight_take_from(at, &link->unsent_end);
            if (inflight->stream) {
                link_take_success(link, inflight, 0, 0);
            } else {
                inflight_resolve(inflight, inflight->fate);
                inflight_landed(link, inflight);
            }
        } else {
            mark_repeated(link, *at);
            at = &(*at)->next;
        }
    }
    link->watermark_count = 0;
    link_enter(link, LINK_UP);
}
