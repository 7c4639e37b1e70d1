#include "server/once.h"

#include "memory/records.h"
#include "server/registry.h"
#include "server/replica.h"
#include "server/server.h"

int gate_take_record(struct gate_request *request)
{
    const struct smb_frame *frame = &request->frame;
    int status = records_take(served_of(request->segment)->records, frame->session, frame->lane,
                              frame->sequence, frame->flags & SMB_FLAG_RETRY,
                              &request->peer->record_hint, &request->record);
    return status == SMB_OK ? record_judge(request->record, frame->sequence) : status;
}

void gate_let_go(struct gate_request *request)
{
    if (request->record)
        records_release(served_of(request->segment)->records, request->record);
    request->record = NULL;
}

int gate_watermark(struct gate_request *request, uint64_t *watermark, uint64_t *refused)
{
    return records_watermark(served_of(request->segment)->records, request->frame.session,
                             request->frame.lane, watermark, refused);
}

/* Notes the refusal, and with `replica` tells its backup. The backup's note is allocated first, so
 * that both copies know of the refusal or neither. */
static int note_refused(struct gate_request *request, struct replica *replica)
{
    struct forward *note = NULL;
    int status = replica ? replica_prepare_refusal(replica, &request->frame, &note) : SMB_OK;
    bool prepared = replica && status == SMB_OK;
    if (status == SMB_OK)
        status = gate_take_record(request);
    if (status == SMB_OK) {
        record_refuse(request->record, request->frame.sequence);
        if (note)
            replica_enqueue_refusal(replica, note);
        note = NULL;
    }
    gate_let_go(request);
    if (prepared)
        replica_done(replica, note);
    return status == SMB_EXISTS ? SMB_OK : status;
}

int gate_refused(struct smb_server *server, const struct gate_request *refused)
{
    const struct smb_frame *frame = &refused->frame;
    const struct grant *grant = server->guarded
                                    ? grants_find(&refused->peer->grants, frame->segment)
                                    : NULL;
    /* an expired token counts here */
    if (server->guarded && (!grant || (grant->rights & SMB_RIGHT_WRITE) == 0))
        return SMB_DENIED;
    struct smb_segment *segment = server_find(server, frame->segment);
    if (!segment)
        return SMB_NOT_FOUND; /* no later change will be applied either */
    struct gate_request request = {.frame = *frame, .peer = refused->peer, .segment = segment};
    struct replica *replica = replica_at(segment);
    int status = replica && replica_is_behind(replica, frame->epoch) ? SMB_STALE_EPOCH : SMB_OK;
    /* Only the primary of two copies may refuse for good; clients of the backup ask elsewhere. */
    if (!replica || (!refused->peer->fed && replica_serves(replica, frame->epoch, false)))
        status = note_refused(&request, replica);
    smb_segment_release(segment);
    return status;
}

int gate_note_refused(struct gate_request *request)
{
    return note_refused(request, NULL);
}
