#include "server/input.h"

#include <string.h>
#include <sys/uio.h>

#include "base/assert.h"
#include "channel/channel.h"
#include "server/admit.h"
#include "server/handshake.h"
#include "server/loop.h"
#include "server/output.h"
#include "server/server.h"
#include "server/staging.h"

/* Reads from the socket into the parts. *have: how many bytes. STEP_WAIT: the socket is empty. */
static enum step receive(struct connection *connection, struct iovec *parts, int count,
                         size_t *have)
{
    /* The last call emptied the socket, so another call would only find that it is empty. epoll
     * reports when more has come. */
    if (connection->drained) {
        connection->drained = false;
        return output_wait_for(connection, WAIT_INPUT);
    }
    ssize_t done = channel_read(&connection->channel, parts, count);
    if (done > 0) {
        size_t room = 0;
        for (int i = 0; i < count; i++)
            room += parts[i].iov_len;
        *have = (size_t)done;
        connection->drained = *have < room;
        return STEP_ON;
    }
    if (done < 0 && !channel_failed(done))
        return output_wait_for(connection, WAIT_INPUT);
    return STEP_CLOSE;
}

static enum step receive_more(struct connection *connection)
{
    uint32_t left = connection->in_end - connection->in_start;
    memmove(connection->in, connection->in + connection->in_start, left);
    connection->in_start = 0;
    connection->in_end = left;
    struct iovec part = {connection->in + left, IN_BYTES - left};
    size_t have = 0;
    enum step step = receive(connection, &part, 1, &have);
    if (step == STEP_ON)
        connection->in_end += (uint32_t)have;
    return step;
}

enum step input_next_request(struct connection *connection)
{
    SMB_ASSERT(!connection->have_request && connection->in_start <= connection->in_end &&
               connection->in_end <= IN_BYTES);
    uint32_t here = connection->in_end - connection->in_start;
    bool is_record = connection->slots && connection->greeted;
    uint32_t header_bytes = is_record ? SMB_RECORD_BYTES : SMB_FRAME_BYTES;
    if (here < header_bytes)
        return receive_more(connection);
    struct smb_frame frame;
    const uint8_t *header = connection->in + connection->in_start;
    int status = smb_frame_parse(header, &frame);
    if (status == SMB_VERSION)
        return handshake_refuse_version(connection);
    if (status != SMB_OK || frame.flags & SMB_FLAG_REPLY)
        return output_refuse(connection, SMB_PROTOCOL);
    bool checksum = frame.flags & SMB_FLAG_CHECKSUM;
    bool is_anothers = frame.session != connection->session || frame.lane != connection->lane;
    /* Only the feed of a bundle, from its primary, brings frames of other sessions and lanes. Such
     * frames may still arrive after the feed has ended here: they get SMB_STALE_EPOCH. */
    if (connection->greeted && is_anothers && !connection->peer.feeds)
        return output_refuse(connection, connection->peer.fed ? SMB_STALE_EPOCH : SMB_PROTOCOL);
    if (connection->greeted && checksum != connection->checksums)
        return output_refuse(connection, SMB_PROTOCOL);
    connection->crc = checksum ? smb_crc32c(0, header, SMB_FRAME_BYTES) : 0;
    if (!connection->greeted || frame.opcode == SMB_HELLO) {
        if (frame.opcode == SMB_HELLO && here < SMB_FRAME_BYTES + frame.payload)
            return receive_more(connection); /* the payload is at most a checksum */
        connection->in_start += SMB_FRAME_BYTES + (frame.opcode == SMB_HELLO ? frame.payload : 0);
        if (frame.opcode == SMB_HELLO && checksum &&
            !smb_checksum_is(header + SMB_FRAME_BYTES, connection->crc))
            return output_refuse(connection, SMB_CHECKSUM);
        return handshake_greet(connection, &frame);
    }
    if (frame.opcode == SMB_AUTHORIZE) {
        uint32_t bytes = frame.payload - smb_frame_checksum_bytes(&frame);
        const uint8_t *payload = header + SMB_FRAME_BYTES;
        if (here < SMB_FRAME_BYTES + frame.payload)
            return receive_more(connection);
        /* by reference the 48 bytes are in the record's small part (frame.h), behind the header */
        connection->in_start += is_record ? SMB_RECORD_BYTES : SMB_FRAME_BYTES + frame.payload;
        if (checksum &&
            !smb_checksum_is(payload + bytes, smb_crc32c(connection->crc, payload, bytes)))
            return output_refuse(connection, SMB_CHECKSUM);
        return handshake_authorize(connection, &frame, payload);
    }
    connection->in_start += header_bytes;

    connection->admitted = gate_admit(connection->loop->server, &frame, &connection->request);
    if (connection->admitted == SMB_OK && is_record)
        connection->admitted = staging_take_record(connection, header);
    else if (connection->admitted == SMB_OK && staging_is_needed(&frame))
        connection->admitted = staging_make(connection, staging_bytes(&frame));
    /* The references are not held while the payload arrives: a peer that stops half-way must not
     * keep a deleted segment's memory. */
    gate_done(&connection->request);
    connection->have_request = true;
    connection->request.tries = (struct gate_tries){.begun_ns = connection->loop->clock_ns};
    if (frame.flags & SMB_FLAG_RETRY)
        stats_add(&connection->loop->stats.repeated, 1);
    connection->from_kept = false;
    connection->awaits = 0;
    connection->copied = false;
    connection->payload_have = is_record ? frame.payload : 0;
    return connection->admitted == SMB_PROTOCOL ? output_refuse(connection, SMB_PROTOCOL) : STEP_ON;
}

/* Takes the next `count` bytes of the payload. A request with a wrong checksum is neither executed
 * nor refused nor answered, because its header may be wrong, too. */
static enum step take_payload(struct connection *connection, const uint8_t *bytes, uint32_t count)
{
    SMB_ASSERT(count <= connection->request.frame.payload - connection->payload_have);
    const struct smb_frame *frame = &connection->request.frame;
    uint32_t checksum = smb_frame_checksum_bytes(frame);
    if (checksum > 0 && connection->payload_have < frame->payload - checksum)
        connection->crc = smb_crc32c(connection->crc, bytes, count);
    connection->payload_have += count;
    if (checksum > 0 && connection->payload_have == frame->payload &&
        !smb_checksum_is(connection->checksum, connection->crc))
        return output_refuse(connection, SMB_CHECKSUM);
    return STEP_ON;
}

enum step input_receive_payload(struct connection *connection)
{
    SMB_ASSERT(connection->have_request &&
               connection->payload_have < connection->request.frame.payload);
    const struct smb_frame *frame = &connection->request.frame;
    /* `bulk`: the loop sleeps in epoll at once instead of polling, because the next bytes will take
     * a while. Inside TLS they do not: the peer encrypts a record in the time in which we decrypt
     * the one before. */
    connection->loop->bulk |= frame->payload - connection->payload_have >= SPIN_BYTES_MAX &&
                              !connection->channel.tls;
    uint32_t elements = frame->payload - smb_frame_checksum_bytes(frame);
    bool in_checksum = connection->payload_have >= elements;
    uint32_t missing = (in_checksum ? frame->payload : elements) - connection->payload_have;
    /* The payload of a refused request is read, too, and thrown away. */
    uint8_t nowhere[IN_BYTES];
    bool wanted = connection->admitted == SMB_OK;
    if (!wanted && missing > sizeof nowhere)
        missing = sizeof nowhere;
    uint8_t *to = in_checksum ? connection->checksum + (connection->payload_have - elements)
                  : wanted
                      ? connection->staging - staging_prefix_bytes(frame) + connection->payload_have
                      : nowhere;
    uint32_t here = connection->in_end - connection->in_start;
    if (here > 0) {
        uint32_t take = here < missing ? here : missing;
        memcpy(to, connection->in + connection->in_start, take);
        connection->in_start += take;
        return take_payload(connection, to, take);
    }
    /* Reads the rest of the payload to `to`, and what follows it, the next headers, to the
     * connection's own buffer, in one call. */
    struct iovec parts[2] = {{to, missing}, {connection->in, IN_BYTES}};
    size_t have = 0;
    enum step step = receive(connection, parts, 2, &have);
    if (step != STEP_ON)
        return step;
    uint32_t ours = have < missing ? (uint32_t)have : missing;
    connection->in_start = 0;
    connection->in_end = (uint32_t)have - ours;
    return take_payload(connection, to, ours);
}
