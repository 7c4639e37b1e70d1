#include "server/read.h"

#include <string.h>

#include "server/admit.h"
#include "server/gate.h"
#include "server/loop.h"
#include "server/output.h"
#include "server/reply.h"
#include "server/server.h"
#include "server/staging.h"

enum { READS_PER_SEND = 4 }; /* most chunks whose locks one answer holds */

/* The read in hand, and the reads right behind it that have arrived and whose chunks' locks are
 * free. One large call into the kernel is up to 1.5 times as fast as several of a chunk each.
 * Several locks are held then, but none was waited for, so they need no order. Segments are found
 * before the first lock is taken and released after the last, because finding and releasing may do
 * more work that must not happen under these locks. */
struct batch {
    uint32_t admitted, count; /* number of reads found; number of chunks locked */
    struct gate_request requests[READS_PER_SEND];
    uint8_t headers[READS_PER_SEND][SMB_FRAME_BYTES];
    /* earlier replies; then header and data of each read */
    struct iovec parts[1 + 2 * READS_PER_SEND];
};

static bool is_plain_read(const struct connection *connection, const uint8_t *bytes,
                          struct smb_frame *frame)
{
    return smb_frame_parse(bytes, frame) == SMB_OK && !(frame->flags & SMB_FLAG_REPLY) &&
           frame->opcode == SMB_READ && !(frame->flags & (SMB_FLAG_WIRE | SMB_FLAG_CHECKSUM)) &&
           frame->session == connection->session && frame->lane == connection->lane &&
           frame->length >= BULK_BYTES;
}

/* The reads behind the one in hand stay in `in` until they are answered. */
static void batch_admit(struct connection *connection, struct batch *batch)
{
    batch->requests[0] = connection->request;
    batch->admitted = 1;
    if (connection->request.frame.length < BULK_BYTES)
        return;
    for (uint32_t at = connection->in_start;
         batch->admitted < READS_PER_SEND && connection->in_end - at >= SMB_FRAME_BYTES;
         at += SMB_FRAME_BYTES) {
        struct gate_request *request = &batch->requests[batch->admitted];
        struct smb_frame frame;
        *request = (struct gate_request){
            .peer = &connection->peer,
            .tries.begun_ns = UINT64_MAX, /* this read came after the one in hand */
        };
        if (!is_plain_read(connection, connection->in + at, &frame) ||
            gate_admit(connection->loop->server, &frame, request) != SMB_OK)
            return;
        batch->admitted++;
    }
}

/* SMB_OK: at least the first chunk is locked. */
static int batch_open(struct batch *batch)
{
    for (uint32_t i = batch->count = 0; i < batch->admitted; i++) {
        const struct smb_frame *frame = &batch->requests[i].frame;
        uint8_t *data;
        int status = gate_open(&batch->requests[i], &data);
        if (status != SMB_OK)
            return i == 0 ? status : SMB_OK;
        struct smb_frame reply = smb_frame_reply(frame, SMB_OK);
        reply.length = reply.payload = frame->length;
        smb_frame_encode(&reply, batch->headers[i]);
        batch->parts[1 + 2 * i] = (struct iovec){batch->headers[i], SMB_FRAME_BYTES};
        batch->parts[2 + 2 * i] = (struct iovec){data, frame->length};
        batch->count++;
    }
    return SMB_OK;
}

/* The first request is the connection's, and is released elsewhere. */
static void batch_done(struct batch *batch)
{
    for (uint32_t i = 1; i < batch->admitted; i++)
        gate_done(&batch->requests[i]);
}

/* Copies the range of the read in hand, plain or encoded. If another reader has the chunk's lock,
 * it copies without the lock. */
static int copy_range(struct connection *connection, uint8_t *to)
{
    struct gate_request *request = &connection->request;
    uint32_t length = request->frame.length;
    int wire = smb_frame_wire(&request->frame);
    uint8_t *from;
    int status = gate_open(request, &from);
    if (status == SMB_OK) {
        if (wire == SMB_WIRE_EXACT)
            memcpy(to, from, length);
        else
            smb_kernel_encode(wire, from, length / 4, to);
        gate_close(request);
    }
    if (status != SMB_BUSY)
        return status;
    if (wire == SMB_WIRE_EXACT)
        return gate_copy(request, to);
    status = staging_make(connection, length);
    if (status == SMB_OK)
        status = gate_copy(request, connection->staging);
    if (status == SMB_OK || status == SMB_DEFERRED)
        smb_kernel_encode(wire, connection->staging, length / 4, to);
    return status;
}

/* Answers from copied bytes: the read is encoded, has a checksum or goes by reference, or the
 * chunk's lock is taken. */
static enum step answer_read_by_copy(struct connection *connection)
{
    struct gate_request *request = &connection->request;
    uint32_t length = request->frame.length;
    int wire = smb_frame_wire(&request->frame);
    int status = connection->copied
                     ? SMB_OK
                     : copy_range(connection, connection->named ? connection->named->payload
                                                                : connection->tail);
    if (status == SMB_DEFERRED) {
        connection->copied = true;
        connection->awaits = request->order;
    }
    if (status == SMB_BUSY || status == SMB_DEFERRED ||
        (connection->copied && !gate_may_tell(request, connection->awaits)))
        return reply_defer(connection);
    if (status != SMB_OK)
        return reply_failure(connection, status);
    struct smb_frame reply = smb_frame_reply(&request->frame, SMB_OK);
    reply.length = length;
    uint32_t bytes = wire == SMB_WIRE_EXACT ? length : (uint32_t)smb_wire_bytes(wire, length / 4);
    if (connection->named)
        output_put_by_reference(connection, &reply, bytes);
    else
        output_put_with_tail(connection, &reply, bytes);
    reply_finish(connection, true);
    return STEP_ON;
}

enum step answer_read(struct connection *connection)
{
    struct batch batch;
    if (connection->slots)
        return answer_read_by_copy(connection);
    if (!reply_chunk_memory(&connection->tail))
        return output_refuse(connection, SMB_OUT_OF_MEMORY);
    if (connection->copied || connection->checksums ||
        smb_frame_wire(&connection->request.frame) != SMB_WIRE_EXACT)
        return answer_read_by_copy(connection);
    batch_admit(connection, &batch);
    int status = batch_open(&batch);
    if (status != SMB_OK) {
        batch_done(&batch);
        return status == SMB_BUSY ? answer_read_by_copy(connection)
                                  : reply_failure(connection, status);
    }
    uint64_t sent = 0;
    enum step step = output_send(connection, batch.parts, 1 + 2 * batch.count, &sent);
    uint32_t begun = 0;
    for (uint32_t i = 0; i < batch.count; i++) {
        struct gate_request *request = &batch.requests[i];
        uint32_t length = request->frame.length;
        /* the first is the request in hand, which is answered in any case */
        bool answered = i == 0 || sent > 0;
        if (answered && sent < SMB_FRAME_BYTES + (uint64_t)length) {
            uint32_t of_header = sent < SMB_FRAME_BYTES ? (uint32_t)sent : SMB_FRAME_BYTES;
            uint32_t of_data = (uint32_t)sent - of_header;
            memcpy(connection->out + connection->out_end, batch.headers[i] + of_header,
                   SMB_FRAME_BYTES - of_header);
            connection->out_end += SMB_FRAME_BYTES - of_header;
            memcpy(connection->tail, (const uint8_t *)batch.parts[2 + 2 * i].iov_base + of_data,
                   length - of_data);
            connection->tail_start = 0;
            connection->tail_end = length - of_data;
            sent = 0;
        } else if (answered) {
            sent -= SMB_FRAME_BYTES + (uint64_t)length;
        }
        gate_close(request);
        if (answered) {
            reply_count(connection, request);
            begun++;
        }
    }
    batch_done(&batch);
    connection->in_start += (begun - 1) * SMB_FRAME_BYTES;
    reply_finish(connection, false);
    return step;
}
