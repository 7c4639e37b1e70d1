#include "server/gate.h"

#include <string.h>

#include "base/assert.h"
#include "base/failpoint.h"
#include "memory/change.h"
#include "server/counters.h"
#include "server/admit.h"
#include "server/once.h"
#include "server/operands.h"
#include "server/replica.h"
#include "server/server.h"

static bool has_result(int opcode)
{
    return opcode == SMB_FETCH_ADD || opcode == SMB_COMPARE_SWAP;
}

static bool is_journalled(int opcode)
{
    return opcode == SMB_ACCUMULATE || opcode == SMB_ACCUMULATE_FROM || opcode == SMB_APPLY ||
           has_result(opcode);
}

/* Answers a repeated change: with the old value of the first answer, or for an accumulate with the
 * present values, which contain its contribution. */
static int answer_again(struct gate_request *request, uint8_t *sink, uint64_t *result)
{
    const struct smb_frame *frame = &request->frame;
    if (has_result(frame->opcode) && !record_result(request->record, frame->sequence, result))
        return SMB_EVICTED;
    if (!sink)
        return SMB_OK;
    int status = gate_copy(request, sink);
    return status == SMB_DEFERRED ? SMB_OK : status; /* the answer waits for every change so far */
}

/* Called under the lock of the chunk, or of each chunk: changes the bytes and the watermark,
 * between the journal's begin and end if there is a journal. */
static int make_change(struct smb_server *server, struct gate_request *request,
                       const struct slot *slot, struct smb_change *change)
{
    struct smb_segment *segment = request->segment, *targets[SMB_TARGETS_MAX];
    const struct smb_frame *frame = &request->frame;
    struct journal *journal = slot && is_journalled(change->opcode) ? server->journal : NULL;
    if (!smb_segment_change_fits(segment, change))
        return SMB_INVALID;
    int count = smb_segment_targets(segment, change, targets);
    for (int i = 0; i < count; i++) {
        if (smb_segment_deleted(targets[i])) /* one of the states: as gate_missing() */
            return i > 0 && replica_at(segment) ? SMB_APART : SMB_NOT_FOUND;
        if (count > 1 && !replica_at(segment) && smb_segment_moves(targets[i]))
            return SMB_INVALID;
    }
    /* one of them could move to a server that lacks the others */
    for (int i = 0; count > 1 && i < count; i++)
        if (!replica_at(segment) && smb_segment_bind(targets[i]) != SMB_OK)
            return SMB_INVALID;
    if (journal) {
        struct change_name name = {
            .session = frame->session, .sequence = frame->sequence, .lane = frame->lane};
        slot_describe(journal, slot, segment, change, &name);
    }
    int status = smb_segment_lock_each(targets, count, change->offset, gate_patience(request));
    if (status != SMB_OK)
        return status;
    /* the segment was gated meanwhile, so a copy might lack this change */
    if (request->alone && replica_at(segment)) {
        for (int i = 0; i < count; i++)
            smb_segment_unlock(targets[i], change->offset);
        return SMB_STALE_EPOCH;
    }
    if (journal) {
        slot_begin(journal, slot, segment, change);
        slot_run(journal, slot, segment, change);
    } else {
        for (int i = 0; i < count; i++)
            smb_segment_change_begin(targets[i], change->offset);
        smb_segment_change_range(segment, change, 0, change->bytes);
    }
    if (change->sink)
        memcpy(change->sink, (const uint8_t *)smb_segment_data(segment) + change->offset,
               change->bytes);
    FAILPOINT("gate.changed");
    record_note(request->record, frame->sequence, has_result(change->opcode), change->result);
    if (request->forward) {
        status = replica_enqueue(targets, count, request->forward, change->offset,
                                 has_result(change->opcode) ? &change->result : NULL,
                                 &request->order);
        request->forward = NULL;
        FAILPOINT("replica.enqueued");
    }
    if (journal)
        slot_end(journal, slot, segment, change);
    for (int i = 0; i < count; i++) {
        if (!journal)
            smb_segment_change_end(targets[i], change->offset);
        smb_segment_unlock(targets[i], change->offset);
    }
    if (journal)
        slot_rest(journal, slot);
    return status == SMB_OK ? smb_segment_still_there(segment) : status;
}

/* ---- the paths through ----------------------------------------------------------------------- */

/* The change is forwarded with its operands, because their segments may lie elsewhere or change
 * before it reaches the backup. */
static int prepare(struct gate_request *request, const uint8_t *payload,
                   const struct smb_change *change)
{
    struct replica *replica = replica_at(request->segment);
    struct smb_frame frame = request->frame;
    uint8_t words[SMB_APPLY_BYTES];
    frame.payload = smb_frame_body(&frame);
    frame.flags &= SMB_FLAG_WIRE;
    if (frame.opcode == SMB_ACCUMULATE_FROM) {
        frame.opcode = SMB_ACCUMULATE;
        frame.flags = 0;
        frame.payload = frame.length;
        payload = change->source;
    } else if (frame.opcode == SMB_APPLY) {
        memcpy(words, smb_frame_brings(&request->frame) ? payload - SMB_APPLY_BYTES : payload,
               sizeof words);
        smb_store64(words, 0);
        frame.argument = 0; /* the warden's id, if there is one: the fence is checked here alone */
        frame.payload = SMB_APPLY_BYTES + frame.length;
        payload = change->source;
    }
    return replica_prepare(replica, &frame, frame.opcode == SMB_APPLY ? words : NULL, payload,
                           &request->forward);
}

/* Enters the fence of the lock that the frame names. The token, and the warden's segment, lie
 * before the `payload` of gate_execute. *sync: whose fence it is. */
static int enter_fence(struct smb_server *server, struct gate_request *request,
                       const uint8_t *payload, struct sync **sync)
{
    const struct smb_frame *frame = &request->frame;
    const uint8_t *fence = payload - (smb_frame_brings(frame) ? SMB_APPLY_BYTES : 0) -
                           smb_frame_fence_bytes(frame);
    const struct smb_segment *warden = request->segment;
    if (frame->flags & SMB_FLAG_WARDEN) {
        uint64_t id = frame->opcode == SMB_APPLY ? frame->argument
                                                 : smb_load64(fence + SMB_TOKEN_BYTES);
        int status = gate_find_warden(server, request, id);
        if (status != SMB_OK)
            return status;
        warden = request->warden;
    }
    *sync = served_of(warden)->sync;
    int status = sync_fence_enter(*sync, smb_load64(fence), smb_boot_ns());
    if (status == SMB_NOT_FOUND && request->warden)
        return gate_missing(request, status);
    /* Elsewhere the lock could be granted to the next holder while this change is made. A change
     * that is refused for its token binds nothing. */
    if (status == SMB_OK && request->warden && (status = gate_bind_warden(request)) != SMB_OK)
        sync_fence_leave(*sync);
    return status;
}

/* The record is checked first, then the fence: a change that was made under the lock was made, even
 * if the lock is lost by now. */
int gate_execute(struct smb_server *server, struct gate_request *request, const struct slot *slot,
                 const uint8_t *payload, uint8_t *scratch, uint8_t *sink, uint64_t *result)
{
    SMB_ASSERT(request->segment && (slot == NULL || slot->payload));
    bool fenced = request->frame.flags & SMB_FLAG_FENCED;
    struct sync *sync = NULL;
    struct replica *replica = request->alone ? NULL : replica_at(request->segment);
    bool prepared = false;
    int status = gate_take_record(request);
    if (status == SMB_OK && replica && !request->peer->fed &&
        gate_asks_for_the_past(&request->frame))
        status = SMB_STALE_EPOCH; /* the change was not made, and will not be */
    if (status == SMB_EXISTS) {
        server_count(&server->replayed_total, 1);
        status = answer_again(request, sink, result);
        if (replica && !request->peer->fed)
            request->order = replica_newest(replica);
    } else if (status == SMB_OK) {
        struct smb_change change;
        status = gate_describe(server, request, payload, scratch, sink, &change);
        if (replica && !request->peer->fed && status == SMB_OK) {
            status = prepare(request, payload, &change);
            prepared = status == SMB_OK;
        }
        if (fenced && status == SMB_OK)
            status = enter_fence(server, request, payload, &sync);
        if (status == SMB_OK) {
            status = make_change(server, request, slot, &change);
            if (fenced)
                sync_fence_leave(sync);
        }
        if (status == SMB_OK)
            *result = change.result;
    }
    gate_let_go(request);
    if (prepared)
        replica_done(replica, request->forward);
    request->forward = NULL;
    return status;
}

int gate_copy(struct gate_request *request, uint8_t *to)
{
    SMB_ASSERT(request->segment);
    struct smb_change read = {.opcode = SMB_READ,
                              .offset = request->frame.offset,
                              .bytes = request->frame.length,
                              .sink = to};
    int status = smb_segment_apply(request->segment, &read, gate_patience(request));
    struct replica *replica = replica_at(request->segment);
    if (replica && status == SMB_OK) {
        request->order = replica_newest_of(replica, read.offset);
        if (!gate_may_tell(request, request->order))
            status = SMB_DEFERRED;
    }
    return status;
}

bool gate_may_tell(const struct gate_request *request, uint64_t order)
{
    return replica_check_read(replica_at(request->segment), order, request->tries.begun_ns) ==
           SMB_OK;
}

int gate_open(struct gate_request *request, uint8_t **data)
{
    SMB_ASSERT(request->segment);
    if (smb_segment_deleted(request->segment))
        return SMB_NOT_FOUND;
    int status = smb_segment_lock(request->segment, request->frame.offset, SMB_TRY_ONCE);
    if (status != SMB_OK)
        return status;
    struct replica *replica = replica_at(request->segment);
    if (replica)
        status = replica_check_read(replica, replica_newest_of(replica, request->frame.offset),
                                    request->tries.begun_ns);
    if (status != SMB_OK) {
        smb_segment_unlock(request->segment, request->frame.offset);
        return status;
    }
    *data = (uint8_t *)smb_segment_data(request->segment) + request->frame.offset;
    return SMB_OK;
}

void gate_close(struct gate_request *request)
{
    SMB_ASSERT(request->segment);
    smb_segment_unlock(request->segment, request->frame.offset);
}
