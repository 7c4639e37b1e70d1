#include "server/answer.h"

#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "server/admit.h"
#include "server/copied.h"
#include "server/counters.h"
#include "server/gate.h"
#include "server/handshake.h"
#include "server/loop.h"
#include "server/once.h"
#include "server/output.h"
#include "server/read.h"
#include "server/replica.h"
#include "server/reply.h"
#include "server/server.h"
#include "server/staging.h"

static enum step answer_attach(struct connection *connection)
{
    if (connection->transport != SMB_TRANSPORT_UNIX)
        return reply_failure(connection, SMB_DENIED);
    if (smb_segment_deleted(connection->request.segment))
        return reply_failure(connection, SMB_NOT_FOUND);
    /* A descriptor arrives with the first byte that is sent along with it, so earlier answers must
     * be sent first. */
    if (output_flush(connection) == STEP_CLOSE)
        return STEP_CLOSE;
    if (!output_all_sent(connection)) {
        connection->wait = WAIT_OUTPUT;
        return STEP_WAIT;
    }
    struct smb_frame reply = smb_frame_reply(&connection->request.frame, SMB_OK);
    output_put(connection, &reply);
    connection->pass_segment = smb_segment_retain(connection->request.segment);
    connection->pass_fd = smb_segment_fd(connection->pass_segment);
    reply_finish(connection, true);
    return output_flush(connection);
}

static void put_answer(struct connection *connection, const struct smb_frame *request,
                       struct smb_segment *segment, uint64_t begun_ns, struct sync_answer answer)
{
    if (answer.status == SMB_OK)
        count_request(connection, segment, request->opcode, request->length,
                      smb_now_ns() - begun_ns);
    else
        server_count(&connection->loop->server->errors[answer.status], 1);
    struct smb_frame reply = smb_frame_reply(request, answer.status);
    reply.argument = answer.a;
    reply.offset = answer.b;
    output_put(connection, &reply);
}

/* The change was made. Its answer leaves the connection until the backup has confirmed that order,
 * and the connection turns to its next request. */
static enum step answer_confirmed(struct connection *connection, uint64_t order,
                                  struct sync_answer answer)
{
    struct gate_request *request = &connection->request;
    int status = waits_confirm(connection, request, order, answer);
    if (status == SMB_OUT_OF_MEMORY)
        return output_refuse(connection, status);
    if (status != SMB_DEFERRED) {
        if (status != SMB_OK)
            answer.status = status;
        put_answer(connection, &request->frame, request->segment,
                   connection->request.tries.begun_ns, answer);
    }
    uint32_t held = connection->replies_held;
    reply_finish(connection, false);
    if (status == SMB_DEFERRED)
        connection->replies_held = held; /* there is no reply yet */
    return STEP_ON;
}

static enum step answer_fetched(struct connection *connection, struct smb_frame *reply)
{
    reply->length = connection->request.frame.length;
    output_put_with_tail(connection, reply, reply->length);
    reply_finish(connection, true);
    return STEP_ON;
}

static enum step answer_change(struct connection *connection)
{
    struct gate_request *request = &connection->request;
    const struct smb_frame *frame = &request->frame;
    bool fetch = frame->flags & SMB_FLAG_FETCH;
    struct smb_frame made = smb_frame_reply(frame, SMB_OK);
    if (connection->awaits)
        return replica_has_confirmed(replica_at(request->segment), connection->awaits)
                   ? answer_fetched(connection, &made)
                   : reply_defer(connection);
    if (fetch && !reply_chunk_memory(&connection->tail))
        return output_refuse(connection, SMB_OUT_OF_MEMORY);
    uint64_t result = 0;
    const uint8_t *payload = connection->staging;
    if (staging_is_from_segments(frame)) {
        uint32_t fence = smb_frame_fence_bytes(frame);
        if (!connection->from_kept)
            memcpy(connection->from, connection->staging - fence, fence + smb_frame_body(frame));
        connection->from_kept = true;
        payload = connection->from + fence;
    }
    int status = gate_execute(connection->loop->server, request, staging_slot(connection), payload,
                              connection->staging, fetch ? connection->tail : NULL, &result);
    if (status == SMB_BUSY)
        return reply_defer(connection);
    if (status != SMB_OK)
        return reply_failure(connection, status);
    FAILPOINT("connection.changed");
    if (request->order && fetch) {
        connection->awaits = request->order;
        return reply_defer(connection);
    }
    if (request->order)
        return answer_confirmed(connection, request->order, (struct sync_answer){.a = result});
    struct smb_frame reply = made;
    reply.argument = result;
    /* the payload has been used, so its slot may hold the answer's data */
    if (fetch && connection->named) {
        reply.length = frame->length;
        memcpy(connection->named->payload, connection->tail, frame->length);
        output_put_by_reference(connection, &reply, frame->length);
    } else if (fetch) {
        return answer_fetched(connection, &reply);
    } else {
        output_put(connection, &reply);
    }
    reply_finish(connection, true);
    return STEP_ON;
}

static enum step answer_watermark(struct connection *connection)
{
    uint64_t watermark, refused;
    struct replica *replica = replica_at(connection->request.segment);
    if (replica && connection->waits_now >= ANSWERS_PER_CONNECTION)
        return reply_defer(connection);
    int status = gate_watermark(&connection->request, &watermark, &refused);
    if (status != SMB_OK)
        return reply_failure(connection, status);
    uint64_t order = replica ? replica_newest(replica) : 0;
    if (order)
        return answer_confirmed(connection, order,
                                (struct sync_answer){.a = watermark, .b = refused});
    struct smb_frame reply = smb_frame_reply(&connection->request.frame, SMB_OK);
    reply.argument = watermark;
    reply.offset = refused;
    output_put(connection, &reply);
    reply_finish(connection, true);
    return STEP_ON;
}

/* The request is answered now, or leaves the connection and is answered later. In both cases the
 * connection turns to its next request. */
static enum step answer_sync(struct connection *connection)
{
    struct sync_answer answer = {0};
    struct replica *replica = replica_at(connection->request.segment);
    if (replica && connection->waits_now >= ANSWERS_PER_CONNECTION)
        return reply_defer(connection);
    int status = replica ? replica_prepare_sync(replica) : SMB_OK;
    if (status == SMB_BUSY)
        return reply_defer(connection);
    if (status != SMB_OK)
        return reply_failure(connection, status);
    status = waits_ask(connection, &connection->request, connection->staging, &answer);
    if (replica)
        replica_done(replica, NULL);
    answer.status = status;
    if (replica && status != SMB_DEFERRED)
        return answer_confirmed(connection, replica_order_of_sync(replica), answer);
    if (status != SMB_DEFERRED) {
        put_answer(connection, &connection->request.frame, connection->request.segment,
                   connection->request.tries.begun_ns, answer);
    }
    gate_done(&connection->request);
    connection->have_request = false;
    return STEP_ON;
}

void answer_put_late(struct connection *connection)
{
    /* Nothing may come between a header and its data, or before an answer that passes a
     * descriptor. */
    if (connection->tail_end > 0 || connection->pass_fd >= 0)
        return;
    while (connection->answered && connection->out_end <= OUT_BYTES - SMALL_REPLY_BYTES) {
        struct wait *wait = connection->answered;
        connection->answered = wait->next;
        put_answer(connection, &wait->frame, wait->segment, wait->begun_ns, wait->answer);
        wait_free(wait);
    }
}

/* With credentials, only the server that the coordinator has named may change the copy here. The
 * connection speaks for the lane from here on, and the peer is checked once more after that: if the
 * roles change meanwhile, either the connection is fenced, or this check sees the new roles. */
static bool take_feeder(struct connection *connection, struct replica *replica)
{
    uint32_t epoch = connection->request.frame.epoch;
    const char *name = connection->channel.tls ? tls_server_name(connection->channel.tls) : "";
    if (!replica_is_peer(replica, epoch, name))
        return false;
    if (!connection->proven)
        handshake_speak_for_lane(connection);
    return replica_is_peer(replica, epoch, name);
}

/* REPLICATE from the primary: its changes come over this connection. A later REPLICATE asks whether
 * this server is still the backup. */
static enum step answer_feed(struct connection *connection)
{
    struct gate_request *request = &connection->request;
    struct replica *replica = replica_at(request->segment);
    if (!request->peer->fed || connection->session != replica_bundle_id(replica))
        return output_refuse(connection, SMB_PROTOCOL);
    if (!connection->peer.feeds) {
        if (connection->loop->server->guarded && !take_feeder(connection, replica))
            return handshake_refuse(connection, &request->frame, SMB_DENIED);
        connection->peer.feeds = replica_feed_begins(replica, connection);
    }
    struct smb_frame reply = smb_frame_reply(&request->frame, SMB_OK);
    output_put(connection, &reply);
    reply_finish(connection, true);
    return STEP_ON;
}

void answer_end_feed(struct connection *connection)
{
    if (connection->peer.feeds)
        replica_feed_ends(connection->peer.feeds, connection);
    connection->peer.feeds = NULL;
}

static enum step answer_refused(struct connection *connection)
{
    int status = connection->peer.fed ? gate_note_refused(&connection->request) : SMB_INVALID;
    if (status != SMB_OK)
        return reply_failure(connection, status);
    struct smb_frame reply = smb_frame_reply(&connection->request.frame, SMB_OK);
    output_put(connection, &reply);
    reply_finish(connection, true);
    return STEP_ON;
}

static enum step answer_copied(struct connection *connection)
{
    int status = gate_copied(&connection->request, connection->staging);
    if (status == SMB_BUSY)
        return reply_defer(connection);
    if (status != SMB_OK)
        return reply_failure(connection, status);
    struct smb_frame reply = smb_frame_reply(&connection->request.frame, SMB_OK);
    output_put(connection, &reply);
    reply_finish(connection, true);
    return STEP_ON;
}

enum step answer_request(struct connection *connection)
{
    SMB_ASSERT(connection->have_request &&
               connection->payload_have == connection->request.frame.payload);
    if (connection->admitted == SMB_OK && !connection->request.segment)
        connection->admitted = gate_admit(connection->loop->server, &connection->request.frame,
                                          &connection->request);
    uint8_t opcode = connection->request.frame.opcode;
    /* The change was made and waits for the backup's confirmation. Refusing it because its token
     * has expired meanwhile would say that it was not made. A client that comes back learns its
     * outcome. */
    if (connection->admitted != SMB_OK && connection->admitted != SMB_STALE_EPOCH &&
        connection->awaits && smb_opcode_changes(opcode))
        return output_refuse(connection, connection->admitted);
    if (connection->admitted != SMB_OK)
        return reply_failure(connection, connection->admitted);
    switch (opcode) {
    case SMB_READ: return answer_read(connection);
    case SMB_ATTACH: return answer_attach(connection);
    case SMB_WATERMARK: return answer_watermark(connection);
    case SMB_REPLICATE: return answer_feed(connection);
    case SMB_REFUSED: return answer_refused(connection);
    case SMB_COPY: return answer_copied(connection);
    default:
        return smb_opcode_changes(opcode) ? answer_change(connection) : answer_sync(connection);
    }
}
