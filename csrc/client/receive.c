#include "client/receive.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/assert.h"
#include "channel/channel.h"
#include "client/answered.h"
#include "client/resume.h"
#include "smb/kernels.h"

/* Answers mostly come in the order of the requests, so the first comparison usually finds the
 * request. */
static struct inflight **find_sent(struct smb_link *link, uint64_t sequence)
{
    struct inflight **at = &link->sent;
    while (*at && (*at)->sequence != sequence)
        at = &(*at)->next;
    return at;
}

static bool wants_data(const struct inflight *inflight, const struct smb_frame *reply)
{
    return inflight->stream ? inflight->sink != NULL
                            : reply->payload > smb_frame_checksum_bytes(reply);
}

/* The header of an answer. */
static int take_reply(struct smb_link *link, const struct smb_frame *reply)
{
    struct inflight **at = find_sent(link, reply->sequence);
    struct inflight *inflight = *at;
    uint32_t elements = reply->payload - smb_frame_checksum_bytes(reply);
    if (!inflight || reply->opcode != inflight->opcode || smb_frame_wire(reply) != inflight->wire ||
        (elements > 0 &&
         (elements != inflight->answer_bytes || (inflight->stream && !inflight->sink))))
        return SMB_PROTOCOL;
    if (link_is_sent_away(link, reply->status))
        return SMB_LINK_LOST; /* still in the list, so it is sent again */
    bool data = reply->status == SMB_OK && wants_data(inflight, reply);
    if (data && elements == 0)
        return SMB_PROTOCOL; /* the request asked for data, so success without data is invalid */
    if (data) {
        /* still in the list: if the connection breaks now, the request is sent again */
        link->reading = inflight;
        /* by reference: the data has arrived already */
        link->reading_have = link->by_reference ? inflight->answer_bytes : 0;
        return SMB_OK;
    }
    inflight_take_from(at, &link->sent_end);
    if (reply->status == SMB_OK)
        link_take_success(link, inflight, reply->argument, reply->offset);
    else {
        /* for AUTHORIZE: why the token is refused; for LOCK: who is in the way */
        if (inflight->stream && inflight->stream->reply) {
            inflight->stream->reply->a = reply->argument;
            inflight->stream->reply->b = reply->offset;
        }
        link_take_failure(link, inflight, reply->status);
    }
    return SMB_OK;
}

int link_spoilt(struct smb_link *link)
{
    atomic_fetch_add_explicit(&link->client->spoilt, 1, memory_order_relaxed);
    return SMB_LINK_LOST;
}

/* Takes a header from `here` bytes, and its checksum if no data lies between the two. *taken is 0
 * if they are incomplete. A header is used only if its checksum is right. The checksum of data is
 * checked before the call is completed. */
static int take_header(struct smb_link *link, const uint8_t *bytes, uint32_t here, uint32_t *taken)
{
    struct smb_frame reply;
    int status = smb_frame_parse(bytes, &reply);
    *taken = 0;
    if (status != SMB_OK)
        return status;
    if (!(reply.flags & SMB_FLAG_REPLY) ||
        (reply.flags & SMB_FLAG_CHECKSUM) != client_frame_flags(link->client))
        return SMB_PROTOCOL;
    uint32_t checksum = smb_frame_checksum_bytes(&reply);
    uint32_t whole = SMB_FRAME_BYTES + (reply.payload == checksum ? checksum : 0);
    if (here < whole)
        return SMB_OK;
    link->crc = checksum > 0 ? smb_crc32c(0, bytes, SMB_FRAME_BYTES) : 0;
    if (whole > SMB_FRAME_BYTES && !smb_checksum_is(bytes + SMB_FRAME_BYTES, link->crc))
        return link_spoilt(link);
    *taken = whole;
    return link->watermark_count > 0 ? link_take_watermark(link, &reply) : take_reply(link, &reply);
}

static uint32_t take_data(struct smb_link *link, const uint8_t *bytes, uint32_t count)
{
    SMB_ASSERT(link->reading && link->reading_have <= link->reading->answer_bytes);
    struct inflight *inflight = link->reading;
    uint32_t missing = inflight->answer_bytes - link->reading_have;
    uint32_t take = count < missing ? count : missing;
    if (inflight->stream && bytes)
        memcpy(inflight_landing(inflight) + link->reading_have, bytes, take);
    if (link->client->checksums)
        link->crc = smb_crc32c(
            link->crc, bytes ? bytes : inflight_landing(inflight) + link->reading_have, take);
    link->reading_have += take;
    return take;
}

static void finish_reading(struct smb_link *link)
{
    SMB_ASSERT(link->reading);
    struct inflight *inflight = link->reading;
    link->reading = NULL;
    inflight_take_from(find_sent(link, inflight->sequence), &link->sent_end);
    if (inflight->stream && inflight->opcode == SMB_READ && inflight->encoded)
        smb_kernel_apply_encoded(inflight->wire, SMB_REPLACE, inflight->sink, inflight->encoded, 0,
                                 inflight->length / 4, 1.0);
    link_take_success(link, inflight, 0, 0);
}

/* ---- several answers in one call: data is placed before headers are parsed
 * -------------------- */

/* Whether no earlier answer has the same destination: two threads may read to one place. */
static bool lands_apart(const struct smb_link *link, const struct inflight *inflight)
{
    const uint8_t *landing = inflight_landing(inflight);
    for (const struct inflight *before = link->sent; before != inflight; before = before->next) {
        const uint8_t *other = inflight_landing(before);
        if (other && landing < other + before->answer_bytes &&
            other < landing + inflight->answer_bytes)
            return false;
    }
    return true;
}

/* Prepares a destination for each of the next reads to be answered, behind the data that is being
 * received, as if they were answered in order and with data. One system call for all of them,
 * without a copy through `in`, is up to a quarter faster within a host: each call that ends tells
 * the peer of new room, and lets it run before the rest is taken. Until all answers have come,
 * their callers' memory may hold bytes of other answers. Returns the number of parts. */
static int await_answers(struct smb_link *link, struct iovec *parts)
{
    int count = 0;
    if (link->in_end > 0 || link->by_reference || link->client->checksums ||
        (link->reading && link->reading != link->sent))
        return 0;
    const struct inflight *inflight = link->reading ? link->reading->next : link->sent;
    while (count < 2 * ANSWERS_AWAITED && inflight && inflight->opcode == SMB_READ &&
           inflight->stream && inflight->answer_bytes >= LINK_IN_BYTES &&
           lands_apart(link, inflight)) {
        parts[count] = (struct iovec){link->awaited[count / 2], SMB_FRAME_BYTES};
        parts[count + 1] = (struct iovec){inflight_landing(inflight), inflight->answer_bytes};
        count += 2;
        inflight = inflight->next;
    }
    return count;
}

/* Other answers came than those that were prepared for: `left` bytes, from parts[0] on, are not
 * where they belong, and may lie where other bytes belong. All are copied before the first is
 * looked at, because that may end a call and give its memory back to its caller. */
static int take_unawaited(struct smb_link *link, const struct iovec *parts, uint64_t left)
{
    uint8_t *bytes = malloc(left);
    if (!bytes)
        return SMB_LINK_LOST; /* the request is sent again */
    for (uint64_t at = 0; at < left; parts++) {
        uint64_t take = parts->iov_len < left - at ? parts->iov_len : left - at;
        memcpy(bytes + at, parts->iov_base, take);
        at += take;
    }
    int status = SMB_OK;
    for (uint64_t at = 0; at < left && status == SMB_OK;) {
        uint64_t room = LINK_IN_BYTES - link->in_end, take = room < left - at ? room : left - at;
        memcpy(link->in + link->in_end, bytes + at, take);
        link->in_end += (uint32_t)take;
        at += take;
        status = link_digest(link);
    }
    free(bytes);
    return status;
}

/* Whether it answers the first sent request, with success: then take_header finds the data where it
 * belongs. */
static bool is_awaited(const struct smb_link *link, const uint8_t *header)
{
    struct smb_frame reply;
    return smb_frame_parse(header, &reply) == SMB_OK && reply.status == SMB_OK &&
           reply.sequence == link->sent->sequence;
}

/* `left` bytes have come into the prepared parts, and into `in` behind them. */
static int take_awaited(struct smb_link *link, const struct iovec *parts, int count, uint64_t left)
{
    for (int i = 0; i < count; i += 2) {
        if (left < SMB_FRAME_BYTES) {
            memcpy(link->in, parts[i].iov_base, left);
            break;
        }
        if (!is_awaited(link, parts[i].iov_base))
            return take_unawaited(link, parts + i, left);
        uint32_t taken;
        int status = take_header(link, parts[i].iov_base, SMB_FRAME_BYTES, &taken);
        if (status != SMB_OK)
            return status;
        left -= SMB_FRAME_BYTES;
        left -= take_data(link, NULL,
                          left < parts[i + 1].iov_len ? (uint32_t)left
                                                      : (uint32_t)parts[i + 1].iov_len);
        if (link->reading_have < link->reading->answer_bytes)
            break;
        finish_reading(link);
    }
    link->in_end += (uint32_t)left;
    return SMB_OK;
}

int link_receive(struct smb_link *link, bool *moved)
{
    struct iovec parts[2 + 2 * ANSWERS_AWAITED];
    int count = 0, awaited = 0;
    uint32_t missing = 0;
    if (link->reading && link->reading->stream) {
        /* directly into the caller's memory, and what follows into `in` */
        missing = link->reading->answer_bytes - link->reading_have;
        parts[count++] = (struct iovec){inflight_landing(link->reading) + link->reading_have,
                                        missing};
    }
    if (!link->reading || missing > 0)
        awaited = await_answers(link, parts + count);
    const struct iovec *behind = parts + count;
    count += awaited;
    parts[count++] = (struct iovec){link->in + link->in_end, LINK_IN_BYTES - link->in_end};
    ssize_t done = channel_read(&link->channel, parts, count);
    if (done < 0)
        return channel_failed(done) ? SMB_LINK_LOST : SMB_OK;
    if (done == 0)
        return SMB_LINK_LOST;
    *moved = true;
    link->heard_ns = smb_now_ns();
    uint32_t ours = (uint64_t)done < missing ? (uint32_t)done : missing;
    if (ours > 0)
        take_data(link, NULL, ours);
    if (awaited > 0 && ours == missing) {
        if (link->reading)
            finish_reading(link);
        return take_awaited(link, behind, awaited, (uint64_t)done - ours);
    }
    link->in_end += (uint32_t)done - ours;
    return SMB_OK;
}

int link_digest(struct smb_link *link)
{
    int status = SMB_OK;
    while (status == SMB_OK) {
        uint32_t here = link->in_end - link->in_start;
        if (link->reading) {
            link->in_start += take_data(link, link->in + link->in_start, here);
            if (link->reading_have < link->reading->answer_bytes)
                break;
            if (link->client->checksums) {
                if (link->in_end - link->in_start < SMB_CHECKSUM_BYTES)
                    break;
                link->in_start += SMB_CHECKSUM_BYTES;
                if (!smb_checksum_is(link->in + link->in_start - SMB_CHECKSUM_BYTES, link->crc))
                    return link_spoilt(link);
            }
            finish_reading(link);
        } else if (here >= SMB_FRAME_BYTES) {
            uint32_t taken;
            status = take_header(link, link->in + link->in_start, here, &taken);
            link->in_start += taken;
            if (taken == 0)
                break;
        } else {
            break;
        }
    }
    uint32_t left = link->in_end - link->in_start;
    memmove(link->in, link->in + link->in_start, left);
    link->in_start = 0;
    link->in_end = left;
    return status;
}
