/* The single door between frames and memory: nothing reaches a segment from a socket but through here. */
#include "server.h"

int gate_admit(struct smb_server *server, const struct smb_frame *frame, struct gate_request *request)
{
    *request = (struct gate_request){.frame = *frame};
    struct smb_segment *segment = server_find(server, frame->segment);
    if (!segment)
        return SMB_NOT_FOUND;
    int status = SMB_OK;
    if (frame->epoch != smb_segment_epoch(segment))
        status = SMB_STALE_EPOCH;
    else if (frame->opcode != SMB_ATTACH &&
             (frame->dtype != smb_segment_dtype(segment) || !smb_segment_holds(segment, frame->offset, frame->length)))
        status = SMB_INVALID;
    if (status == SMB_OK)
        request->segment = segment;
    else
        smb_segment_release(segment);
    return status;
}

/* What is tried again every millisecond must not spin each time: many of them would take the loop. */
static uint64_t patience(const struct gate_request *request)
{
    return request->retried ? SMB_TRY_ONCE : SMB_TRY;
}

/* Copies the source range into scratch: two chunk locks are never held at once. */
static int read_source(struct smb_server *server, struct gate_request *request, const uint8_t *payload, uint8_t *scratch)
{
    uint64_t offset = smb_load64(payload + 8);
    if (!request->other) {
        struct smb_segment *other = server_find(server, smb_load64(payload));
        if (!other)
            return SMB_NOT_FOUND;
        request->other = other;
    }
    if (smb_segment_dtype(request->other) != request->frame.dtype)
        return SMB_INVALID;
    struct smb_change read = {.opcode = SMB_READ, .offset = offset, .bytes = request->frame.length, .sink = scratch};
    return smb_segment_apply(request->other, &read, patience(request));
}

int gate_execute(struct smb_server *server, struct gate_request *request, const uint8_t *payload, uint8_t *scratch,
                 uint8_t *sink, uint64_t *result)
{
    const struct smb_frame *frame = &request->frame;
    struct smb_change change = {.opcode = frame->opcode, .op = frame->op, .offset = frame->offset, .bytes = frame->length,
                                .source = payload, .sink = sink, .argument = frame->argument};
    switch (frame->opcode) {
    case SMB_ACCUMULATE_FROM: {
        int status = read_source(server, request, payload, scratch);
        if (status != SMB_OK)
            return status;
        change.source = scratch;
        change.scale = smb_double_of(frame->argument);
        break;
    }
    case SMB_ACCUMULATE: change.scale = smb_double_of(frame->argument); break;
    case SMB_COMPARE_SWAP: change.expected = smb_load64(payload); break;
    }
    int status = smb_segment_apply(request->segment, &change, patience(request));
    if (status == SMB_OK)
        *result = change.result;
    return status;
}

int gate_open(struct gate_request *request, bool to_change, uint8_t **place)
{
    if (smb_segment_deleted(request->segment))
        return SMB_NOT_FOUND;
    int status = smb_segment_lock(request->segment, request->frame.offset, patience(request));
    if (status != SMB_OK)
        return status;
    if (to_change)
        smb_segment_change_begin(request->segment, request->frame.offset);
    *place = (uint8_t *)smb_segment_data(request->segment) + request->frame.offset;
    return SMB_OK;
}

void gate_close(struct gate_request *request, bool to_change)
{
    if (to_change)
        smb_segment_change_end(request->segment, request->frame.offset);
    smb_segment_unlock(request->segment, request->frame.offset);
}

void gate_done(struct gate_request *request)
{
    if (request->segment)
        smb_segment_release(request->segment);
    if (request->other)
        smb_segment_release(request->other);
    request->segment = request->other = NULL;
}
