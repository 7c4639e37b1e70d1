#include "server/copied.h"

#include "base/clock.h"
#include "memory/records.h"
#include "server/feed.h"
#include "server/once.h"
#include "server/registry.h"
#include "server/replica.h"
#include "sync/sync.h"

static int copy_chunk(struct gate_request *request, const uint8_t *payload)
{
    const struct smb_frame *frame = &request->frame;
    if (smb_segment_deleted(request->segment))
        return SMB_NOT_FOUND;
    int status = smb_segment_lock(request->segment, frame->offset, gate_patience(request));
    if (status != SMB_OK)
        return status;
    smb_segment_change_begin(request->segment, frame->offset);
    kernel_copy((uint8_t *)smb_segment_data(request->segment) + frame->offset, payload,
                frame->length, false);
    smb_segment_change_end(request->segment, frame->offset);
    smb_segment_unlock(request->segment, frame->offset);
    return SMB_OK;
}

/* A change that the chunk's copy contains, or will contain. */
static int note_made(struct gate_request *request)
{
    const struct smb_frame *frame = &request->frame;
    int status = gate_take_record(request);
    if (status == SMB_OK)
        record_note(request->record, frame->sequence, frame->offset != 0, frame->argument);
    gate_let_go(request);
    return status == SMB_EXISTS ? SMB_OK : status;
}

int gate_copied(struct gate_request *request, const uint8_t *payload)
{
    const struct smb_frame *frame = &request->frame;
    struct replica *replica = replica_at(request->segment);
    struct records *records = served_of(request->segment)->records;
    if (!request->peer->fed)
        return SMB_INVALID;
    if (frame->op == SMB_COPIED_NOTE)
        return note_made(request);
    if (frame->op == SMB_COPIED_WORDS) {
        /* A repeated image may be older than the words here, but no older than what clients were
         * told. */
        sync_install(served_of(request->segment)->sync, payload, smb_boot_ns());
        return SMB_OK;
    }
    if (frame->session != frame->segment || frame->lane != REPLICA_LANE)
        return SMB_INVALID;
    /* A repeated part is older than the parts that followed it. */
    if (replica_has_copied(replica, frame->sequence))
        return SMB_OK;
    int status = SMB_OK;
    switch (frame->op) {
    case SMB_COPIED_CHUNK: status = copy_chunk(request, payload); break;
    case SMB_COPIED_RECORD: status = records_install(records, payload); break;
    case SMB_COPIED_COUNTERS: records_have_evicted(records, frame->argument, frame->offset); break;
    }
    if (status == SMB_OK)
        replica_note_copied(replica, frame->epoch, frame->sequence);
    return status;
}
