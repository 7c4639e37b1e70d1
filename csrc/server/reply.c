#include "server/reply.h"

#include <stdlib.h>

#include "base/assert.h"
#include "base/clock.h"
#include "server/admit.h"
#include "server/counters.h"
#include "server/loop.h"
#include "server/once.h"
#include "server/output.h"
#include "server/server.h"

void reply_count(struct connection *connection, const struct gate_request *request)
{
    struct loop *loop = connection->loop;
    loop->clock_ns = smb_now_ns();
    count_request(connection, request->segment, request->frame.opcode, request->frame.length,
                  loop->clock_ns - connection->request.tries.begun_ns);
}

void reply_finish(struct connection *connection, bool done)
{
    SMB_ASSERT(connection->have_request);
    const struct smb_frame *frame = &connection->request.frame;
    if (done)
        reply_count(connection, &connection->request);
    connection->replies_held += frame->length >= BULK_BYTES;
    connection->loop->bulk |= frame->length >= SPIN_BYTES_MAX;
    gate_done(&connection->request);
    connection->have_request = false;
}

uint8_t *reply_chunk_memory(uint8_t **memory)
{
    if (!*memory)
        *memory = aligned_alloc(4096, SMB_CHUNK_BYTES_MAX + 4096);
    return *memory;
}

enum step reply_defer(struct connection *connection)
{
    connection->request.tries.retried = true;
    gate_done(&connection->request);
    return output_wait_for(connection, WAIT_DEFERRED);
}

enum step reply_failure(struct connection *connection, int status)
{
    int noted = smb_opcode_changes(connection->request.frame.opcode)
                    ? gate_refused(connection->loop->server, &connection->request)
                    : SMB_OK;
    if (noted == SMB_BUSY)
        return reply_defer(connection);
    /* The client asks the coordinator, and comes back over another connection. Its next changes may
     * already be on this one, and this server may get the role meanwhile. Lanes below
     * SMB_LANE_OF_SEGMENTS also carry other segments, and their frames have no epoch of roles. */
    if (noted == SMB_STALE_EPOCH && connection->lane >= SMB_LANE_OF_SEGMENTS &&
        !connection->peer.fed)
        connection->peer.sent_away = true;
    server_count(&connection->loop->server->errors[status], 1);
    if (status == SMB_DENIED)
        note_denied(connection, &connection->request.frame);
    struct smb_frame reply = smb_frame_reply(&connection->request.frame, status);
    output_put(connection, &reply);
    reply_finish(connection, false);
    return STEP_ON;
}
