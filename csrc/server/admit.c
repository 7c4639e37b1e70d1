#include "server/admit.h"

#include "base/clock.h"
#include "server/replica.h"
#include "server/server.h"

static bool has_range(const struct smb_frame *frame)
{
    return frame->opcode == SMB_READ || smb_opcode_changes(frame->opcode) ||
           (frame->opcode == SMB_COPY && frame->op == SMB_COPIED_CHUNK);
}

/* The right that an operation needs: reading operations need the right to read, all others the
 * right to write. */
static uint32_t right_for(int opcode)
{
    switch (opcode) {
    case SMB_READ:
    case SMB_WATERMARK:
    case SMB_AWAIT_VERSION:
    case SMB_PIN:
    case SMB_UNPIN: return SMB_RIGHT_READ;
    default: return SMB_RIGHT_WRITE;
    }
}

/* For a guarded server. Another server's connection has the right to the segments that it feeds,
 * after its REPLICATE has named them. A client has the right to the segments for which it has shown
 * a token. */
static bool has_right(const struct gate_request *request, uint64_t id, uint32_t right)
{
    if (request->peer->fed)
        return request->peer->feeds || request->frame.opcode == SMB_REPLICATE;
    const struct grant *grant = grants_find(&request->peer->grants, id);
    return grant && (grant->rights & right) != 0 && grant->expires_ns > smb_now_ns();
}

int gate_find(struct smb_server *server, const struct gate_request *request, uint64_t id,
              uint32_t right, struct smb_segment **segment)
{
    if (server->guarded && !has_right(request, id, right))
        return SMB_DENIED;
    struct smb_segment *found = server_find(server, id);
    if (!found)
        return SMB_NOT_FOUND;
    if (request->peer->feeds &&
        !(replica_at(found) && replica_is_of(replica_at(found), request->peer->feeds))) {
        smb_segment_release(found);
        return SMB_DENIED;
    }
    *segment = found;
    return SMB_OK;
}

bool gate_asks_for_the_past(const struct smb_frame *frame)
{
    return frame->lane < SMB_LANE_OF_SEGMENTS &&
           (frame->opcode == SMB_WATERMARK ||
            (smb_opcode_changes(frame->opcode) && (frame->flags & SMB_FLAG_RETRY)));
}

/* A token is valid for the epoch in which it was made; for a segment with two copies, for the epoch
 * of their roles. */
static bool is_of_epoch(struct smb_server *server, const struct gate_request *request,
                        const struct smb_segment *segment, const struct replica *replica)
{
    uint32_t epoch = request->frame.epoch;
    if (request->peer->fed)
        return replica && replica_serves(replica, epoch, true);
    if (replica && gate_asks_for_the_past(&request->frame))
        return replica_is_primary(replica);
    const struct grant *grant = server->guarded
                                    ? grants_find(&request->peer->grants, request->frame.segment)
                                    : NULL;
    return (replica ? replica_serves(replica, epoch, false)
                    : epoch == smb_segment_epoch(segment)) &&
           (!server->guarded || (grant && grant->epoch == epoch));
}

int gate_admit(struct smb_server *server, const struct smb_frame *frame,
               struct gate_request *request)
{
    *request = (struct gate_request){
        .frame = *frame, .peer = request->peer, .tries = request->tries};
    struct smb_segment *segment;
    int status = gate_find(server, request, frame->segment, right_for(frame->opcode), &segment);
    if (status != SMB_OK)
        return status;
    const struct replica *replica = replica_at(segment);
    request->alone = !replica;
    if (!is_of_epoch(server, request, segment, replica) ||
        (request->peer->sent_away && smb_opcode_changes(frame->opcode)))
        status = SMB_STALE_EPOCH;
    else if (has_range(frame) && (frame->dtype != smb_segment_dtype(segment) ||
                                  !smb_segment_holds(segment, frame->offset, frame->length)))
        status = SMB_INVALID;
    else if (replica && !request->peer->fed && !replica_allows(frame))
        status = SMB_INVALID;
    if (status == SMB_OK)
        request->segment = segment;
    else
        smb_segment_release(segment);
    return status;
}

void gate_done(struct gate_request *request)
{
    if (request->segment)
        smb_segment_release(request->segment);
    request->segment = NULL;
    if (request->warden)
        smb_segment_release(request->warden);
    request->warden = NULL;
    for (int i = 0; i < SMB_SOURCES_MAX; i++) {
        if (request->others[i])
            smb_segment_release(request->others[i]);
        request->others[i] = NULL;
    }
}
