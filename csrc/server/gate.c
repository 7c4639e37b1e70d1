/* The single door between frames and memory: nothing reaches a segment from a socket but through
 * here. */
#include "server/gate.h"

#include <string.h>

#include "base/assert.h"
#include "base/failpoint.h"
#include "memory/change.h"
#include "server/connection.h"
#include "server/counters.h"
#include "server/feed.h"
#include "server/replica.h"
#include "server/server.h"
#include "server/waits.h"

static bool has_range(const struct smb_frame *frame)
{
    return frame->opcode == SMB_READ || smb_opcode_changes(frame->opcode) ||
           (frame->opcode == SMB_COPY && frame->op == SMB_COPIED_CHUNK);
}

/* The operations of a reader. All others need the right to write. */
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

/* Of a guarded server. Another server's connection has the right to the segments that it feeds,
 * once REPLICATE has said which those are; a client's to those of which it has shown a token. */
static bool has_right(const struct gate_request *request, uint64_t id, uint32_t right)
{
    if (request->peer->fed)
        return request->peer->feeds || request->frame.opcode == SMB_REPLICATE;
    const struct grant *grant = grants_find(&request->peer->grants, id);
    return grant && (grant->rights & right) != 0 && grant->expires_ns > smb_now_ns();
}

/* Takes a reference to a segment if the connection has this right to it. A connection without the
 * right does not learn whether the segment is here. */
static int find(struct smb_server *server, const struct gate_request *request, uint64_t id,
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

/* Whether it asks what became of a change on a lane that the client has left: the segment had one
 * copy then, and had not been gated. Nothing more is made on that lane. */
static bool asks_for_the_past(const struct smb_frame *frame)
{
    return frame->lane < SMB_LANE_OF_SEGMENTS &&
           (frame->opcode == SMB_WATERMARK ||
            (smb_opcode_changes(frame->opcode) && (frame->flags & SMB_FLAG_RETRY)));
}

/* A token is for the epoch that it was made in: of two copies, for that of their roles. */
static bool is_of_epoch(struct smb_server *server, const struct gate_request *request,
                        const struct smb_segment *segment, const struct replica *replica)
{
    uint32_t epoch = request->frame.epoch;
    if (request->peer->fed)
        return replica && replica_serves(replica, epoch, true);
    if (replica && asks_for_the_past(&request->frame))
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
    int status = find(server, request, frame->segment, right_for(frame->opcode), &segment);
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

/* A retried request must not spin. Many of them, each a millisecond, would keep the loop busy. */
static uint64_t patience(const struct gate_request *request)
{
    return request->tries.retried ? SMB_TRY_ONCE : SMB_TRY;
}

/* ---- exactly once ---------------------------------------------------------------------------- */

/* SMB_EXISTS: the change was made before. SMB_OK: it was not; its lane's record is kept until
 * let_go. */
static int take_record(struct gate_request *request)
{
    const struct smb_frame *frame = &request->frame;
    int status = records_take(served_of(request->segment)->records, frame->session, frame->lane,
                              frame->sequence, frame->flags & SMB_FLAG_RETRY,
                              &request->peer->record_hint, &request->record);
    return status == SMB_OK ? record_judge(request->record, frame->sequence) : status;
}

static void let_go(struct gate_request *request)
{
    if (request->record)
        records_release(served_of(request->segment)->records, request->record);
    request->record = NULL;
}

static bool has_result(int opcode)
{
    return opcode == SMB_FETCH_ADD || opcode == SMB_COMPARE_SWAP;
}

static bool is_journalled(int opcode)
{
    return opcode == SMB_ACCUMULATE || opcode == SMB_ACCUMULATE_FROM || opcode == SMB_APPLY ||
           has_result(opcode);
}

int gate_watermark(struct gate_request *request, uint64_t *watermark, uint64_t *refused)
{
    return records_watermark(served_of(request->segment)->records, request->frame.session,
                             request->frame.lane, watermark, refused);
}

/* `replica`: its backup is told too. Its note is made first, so that both know or neither. */
static int note_refused(struct gate_request *request, struct replica *replica)
{
    struct forward *note = NULL;
    int status = replica ? replica_prepare_refusal(replica, &request->frame, &note) : SMB_OK;
    bool prepared = replica && status == SMB_OK;
    if (status == SMB_OK)
        status = take_record(request);
    if (status == SMB_OK) {
        record_refuse(request->record, request->frame.sequence);
        if (note)
            replica_enqueue_refusal(replica, note);
        note = NULL;
    }
    let_go(request);
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
    /* one that has expired was one */
    if (server->guarded && (!grant || (grant->rights & SMB_RIGHT_WRITE) == 0))
        return SMB_DENIED;
    struct smb_segment *segment = server_find(server, frame->segment);
    if (!segment)
        return SMB_NOT_FOUND; /* nor will any later one be applied */
    struct gate_request request = {.frame = *frame, .peer = refused->peer, .segment = segment};
    struct replica *replica = replica_at(segment);
    int status = replica && replica_is_behind(replica, frame->epoch) ? SMB_STALE_EPOCH : SMB_OK;
    /* Of two copies only the primary decides, and its clients ask again elsewhere. */
    if (!replica || (!refused->peer->fed && replica_serves(replica, frame->epoch, false)))
        status = note_refused(&request, replica);
    smb_segment_release(segment);
    return status;
}

int gate_note_refused(struct gate_request *request)
{
    return note_refused(request, NULL);
}

static int copy_chunk(struct gate_request *request, const uint8_t *payload)
{
    const struct smb_frame *frame = &request->frame;
    if (smb_segment_deleted(request->segment))
        return SMB_NOT_FOUND;
    int status = smb_segment_lock(request->segment, frame->offset, patience(request));
    if (status != SMB_OK)
        return status;
    smb_segment_change_begin(request->segment, frame->offset);
    kernel_copy((uint8_t *)smb_segment_data(request->segment) + frame->offset, payload,
                frame->length, false);
    smb_segment_change_end(request->segment, frame->offset);
    smb_segment_unlock(request->segment, frame->offset);
    return SMB_OK;
}

/* A change that the chunk's copy has, or will have. */
static int note_made(struct gate_request *request)
{
    const struct smb_frame *frame = &request->frame;
    int status = take_record(request);
    if (status == SMB_OK)
        record_note(request->record, frame->sequence, frame->offset != 0, frame->argument);
    let_go(request);
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
        /* Sent again, one may be older than what is here: so is what anybody was told of. */
        sync_install(served_of(request->segment)->sync, payload, smb_boot_ns());
        return SMB_OK;
    }
    if (frame->session != frame->segment || frame->lane != REPLICA_LANE)
        return SMB_INVALID;
    /* Sent again, it is older than what came after it. */
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
    return status == SMB_DEFERRED ? SMB_OK : status; /* its answer waits for all that was made */
}

/* Under the chunk's lock, or locks: bytes, watermark, and the journal around both where there is
 * one. */
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
        if (smb_segment_deleted(targets[i])) /* a state: missing() says why */
            return i > 0 && replica_at(segment) ? SMB_APART : SMB_NOT_FOUND;
        if (count > 1 && !replica_at(segment) && smb_segment_moves(targets[i]))
            return SMB_INVALID;
    }
    /* a server that one of them moved to might not have the others */
    for (int i = 0; count > 1 && i < count; i++)
        if (!replica_at(segment) && smb_segment_bind(targets[i]) != SMB_OK)
            return SMB_INVALID;
    if (journal) {
        struct change_name name = {
            .session = frame->session, .sequence = frame->sequence, .lane = frame->lane};
        slot_describe(journal, slot, segment, change, &name);
    }
    int status = smb_segment_lock_each(targets, count, change->offset, patience(request));
    if (status != SMB_OK)
        return status;
    if (request->alone && replica_at(segment)) { /* gated since: a copy might lack it */
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

/* A link to a segment with two copies follows its primary, and would take SMB_NOT_FOUND for being
 * sent away. */
static int missing(const struct gate_request *request, int status)
{
    bool copies = replica_at(request->segment);
    return status == SMB_NOT_FOUND && copies ? SMB_APART : status;
}

/* A source that may be read here, to request->others. */
static int find_source(struct smb_server *server, struct gate_request *request, int number,
                       uint64_t id)
{
    struct smb_segment **source = &request->others[number];
    int status = *source ? SMB_OK : find(server, request, id, SMB_RIGHT_READ, source);
    if (status != SMB_OK)
        return missing(request, status);
    if (smb_segment_dtype(*source) != request->frame.dtype)
        return SMB_INVALID;
    struct replica *replica = replica_at(*source);
    if (replica && !replica_is_primary(replica))
        return SMB_APART;
    if (replica && server->guarded &&
        !replica_serves(replica, grants_find(&request->peer->grants, id)->epoch, false))
        return SMB_APART; /* its reader learns the epoch where it asks the source itself */
    return SMB_OK;
}

/* Whether the source's bytes in scratch may be told. */
static int may_use(struct gate_request *request, int number)
{
    struct replica *replica = replica_at(request->others[number]);
    return replica ? replica_check_read(replica, request->tries.gathered[number] - 1,
                                        request->tries.begun_ns)
                   : SMB_OK;
}

/* Copies the source range into scratch, rounded as the frame says: no chunk lock is waited for
 * while another is held. Of a source with two copies the bytes are kept until they may be told:
 * those of a later try might never be. */
static int read_source(struct smb_server *server, struct gate_request *request, uint64_t id,
                       uint64_t offset, uint8_t *scratch)
{
    int status = find_source(server, request, 0, id);
    if (status != SMB_OK)
        return status;
    struct smb_segment *source = request->others[0];
    if (!replica_at(source) || !request->tries.gathered[0]) {
        struct smb_change read = {
            .opcode = SMB_READ, .offset = offset, .bytes = request->frame.length, .sink = scratch};
        status = smb_segment_apply(source, &read, patience(request));
        if (status != SMB_OK)
            return missing(request, status);
        int wire = smb_frame_wire(&request->frame);
        if (wire != SMB_WIRE_EXACT)
            smb_kernel_round(wire, scratch, read.bytes / 4, 0, SMB_CHUNK_BYTES_MAX, scratch);
        struct replica *replica = replica_at(source);
        request->tries.gathered[0] = replica ? 1 + replica_newest_of(replica, offset) : 0;
    }
    return may_use(request, 0);
}

/* Adds a source's range, rounded, to what is in scratch; the first one takes its place. Under the
 * source's chunk lock, and no other. */
static int add_source(struct gate_request *request, int number, int wire, double scale,
                      uint8_t *scratch)
{
    enum { BLOCK = 4 * SMB_WIRE_BLOCK };
    struct smb_segment *source = request->others[number];
    const struct smb_frame *frame = &request->frame;
    int op = number == 0 ? SMB_REPLACE : SMB_SUM;
    if (!smb_op_accepts(frame->dtype, op, scale) ||
        (wire != SMB_WIRE_EXACT && (!smb_wire_is_dense(wire) || frame->dtype != SMB_FLOAT32)))
        return SMB_INVALID;
    if (!smb_segment_holds(source, frame->offset, frame->length))
        return SMB_INVALID;
    if (smb_segment_deleted(source))
        return missing(request, SMB_NOT_FOUND);
    int status = smb_segment_lock(source, frame->offset, patience(request));
    if (status != SMB_OK)
        return missing(request, status);
    const uint8_t *from = (const uint8_t *)smb_segment_data(source) + frame->offset;
    if (wire == SMB_WIRE_EXACT) {
        smb_kernel_apply(frame->dtype, op, scratch, from,
                         frame->length / smb_dtype_bytes(frame->dtype), scale);
    } else {
        for (uint32_t done = 0, left = frame->length / 4; left > 0;) {
            float rounded[BLOCK];
            uint32_t count = left < BLOCK ? left : BLOCK;
            smb_kernel_round(wire, from + 4 * done, count, 0, SMB_CHUNK_BYTES_MAX, rounded);
            smb_kernel_apply(SMB_FLOAT32, op, scratch + 4 * done, rounded, count, scale);
            done += count, left -= count;
        }
    }
    struct replica *replica = replica_at(source);
    request->tries.gathered[number] = 1 + (replica ? replica_newest_of(replica, frame->offset) : 0);
    smb_segment_unlock(source, frame->offset);
    return missing(request, smb_segment_still_there(source));
}

/* The sum of several sources into scratch, once: it is kept for further tries. */
static int read_sources(struct smb_server *server, struct gate_request *request,
                        const uint8_t *payload, uint8_t *scratch)
{
    int count = (int)smb_frame_sources(&request->frame), status = SMB_OK;
    uint64_t wires = smb_load64(payload);
    bool kept = request->tries.gathered[count - 1] != 0;
    if (wires >> SMB_SOURCE_WIRE_BITS * count != 0)
        return SMB_INVALID;
    for (int s = 0; s < count && status == SMB_OK; s++)
        status = find_source(server, request, s, smb_load64(payload + 8 + SMB_SOURCE_BYTES * s));
    for (int s = 0; s < count && status == SMB_OK && !kept; s++) {
        double scale = smb_double_of(smb_load64(payload + 16 + SMB_SOURCE_BYTES * s));
        status = add_source(request, s, wires >> SMB_SOURCE_WIRE_BITS * s & 7, scale, scratch);
    }
    for (int s = 0; s < count && status == SMB_OK; s++)
        status = may_use(request, s);
    return status;
}

/* Whether the state can change with the weights: both have one copy, or both move together, so that
 * the backup makes the step in both. */
static int follows(struct smb_server *server, const struct gate_request *request,
                   const struct smb_segment *state, uint64_t id)
{
    const struct replica *replica = replica_at(request->segment), *other = replica_at(state);
    if (!replica && !other)
        return SMB_OK;
    if (!replica || !replica_moves_with(replica, other))
        return SMB_INVALID;
    if (server->guarded && !request->peer->fed &&
        !replica_serves(other, grants_find(&request->peer->grants, id)->epoch, false))
        return SMB_APART; /* the client asks for a newer token of it, as its link would not */
    return SMB_OK;
}

/* The words of an APPLY: the gradient's bytes and the state, none of them the weights themselves or
 * each other. */
static int read_step(struct smb_server *server, struct gate_request *request, const uint8_t *words,
                     uint8_t *scratch, struct smb_change *change)
{
    const struct smb_frame *frame = &request->frame;
    bool brings = smb_frame_brings(frame);
    uint64_t gradient = smb_load64(words);
    smb_load_hyper(words + 8 * SMB_APPLY_SEGMENTS, &change->hyper);
    change->factors = kernel_factors_of(frame->op, &change->hyper);
    if (gradient == frame->segment || (brings && gradient != 0))
        return SMB_INVALID;
    for (int i = 0; i < SMB_RULE_STATES_MAX; i++) {
        uint64_t id = smb_load64(words + 8 * (1 + i));
        struct smb_segment **state = &request->others[1 + i];
        if ((id != 0) != (i < smb_rule_states(frame->op)) || (id != 0 && id == gradient))
            return SMB_INVALID;
        int status = id == 0 || *state ? SMB_OK : find(server, request, id, SMB_RIGHT_WRITE, state);
        if (status != SMB_OK)
            return missing(request, status);
        if (*state && (status = follows(server, request, *state, id)) != SMB_OK)
            return status;
        change->states[i] = *state;
    }
    return brings ? SMB_OK : read_source(server, request, gradient, frame->offset, scratch);
}

/* The change, from its frame. The operands of other segments are in `scratch` by then. */
static int describe(struct smb_server *server, struct gate_request *request, const uint8_t *payload,
                    uint8_t *scratch, uint8_t *sink, struct smb_change *change)
{
    const struct smb_frame *frame = &request->frame;
    bool brings = smb_frame_brings(frame);
    int status = SMB_OK;
    *change = (struct smb_change){.opcode = frame->opcode,
                                  .op = frame->op,
                                  .offset = frame->offset,
                                  .bytes = frame->length,
                                  .wire = smb_frame_wire(frame),
                                  .source_bytes = smb_frame_body(frame),
                                  .source = payload,
                                  .sink = sink,
                                  .argument = frame->argument};
    switch (frame->opcode) {
    case SMB_ACCUMULATE_FROM:
        status = smb_frame_sources(frame) > 0 ? read_sources(server, request, payload, scratch)
                                              : read_source(server, request, smb_load64(payload),
                                                            smb_load64(payload + 8), scratch);
        change->source = scratch;
        change->wire = SMB_WIRE_EXACT; /* it is rounded */
        change->scale = smb_double_of(frame->argument);
        break;
    case SMB_APPLY:
        status = read_step(server, request, brings ? payload - SMB_APPLY_BYTES : payload, scratch,
                           change);
        change->source = brings ? payload : scratch;
        break;
    case SMB_ACCUMULATE: change->scale = smb_double_of(frame->argument); break;
    case SMB_COMPARE_SWAP: change->expected = smb_load64(payload); break;
    }
    return status;
}

/* The backup gets the operands with the change: their segments may be elsewhere, or change
 * before it gets there. */
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
        frame.payload = SMB_APPLY_BYTES + frame.length;
        payload = change->source;
    }
    return replica_prepare(replica, &frame, frame.opcode == SMB_APPLY ? words : NULL, payload,
                           &request->forward);
}

/* Of a fenced frame: where `payload` is what gate_execute takes. */
static uint64_t token_before(const struct smb_frame *frame, const uint8_t *payload)
{
    return smb_load64(payload - (smb_frame_brings(frame) ? SMB_APPLY_BYTES : 0) - SMB_TOKEN_BYTES);
}

/* The record first, then the fence: what was made under the lock was made, though the lock be lost
 * by now. */
int gate_execute(struct smb_server *server, struct gate_request *request, const struct slot *slot,
                 const uint8_t *payload, uint8_t *scratch, uint8_t *sink, uint64_t *result)
{
    SMB_ASSERT(request->segment && (slot == NULL || slot->payload));
    bool fenced = request->frame.flags & SMB_FLAG_FENCED;
    struct sync *sync = served_of(request->segment)->sync;
    struct replica *replica = request->alone ? NULL : replica_at(request->segment);
    bool prepared = false;
    int status = take_record(request);
    if (status == SMB_OK && replica && !request->peer->fed && asks_for_the_past(&request->frame))
        status = SMB_STALE_EPOCH; /* it was not made, and is not any more */
    if (status == SMB_EXISTS) {
        server_count(&server->replayed_total, 1);
        status = answer_again(request, sink, result);
        if (replica && !request->peer->fed)
            request->order = replica_newest(replica);
    } else if (status == SMB_OK) {
        struct smb_change change;
        status = describe(server, request, payload, scratch, sink, &change);
        if (replica && !request->peer->fed && status == SMB_OK) {
            status = prepare(request, payload, &change);
            prepared = status == SMB_OK;
        }
        if (fenced && status == SMB_OK)
            status = sync_fence_enter(sync, token_before(&request->frame, payload), smb_boot_ns());
        if (status == SMB_OK) {
            status = make_change(server, request, slot, &change);
            if (fenced)
                sync_fence_leave(sync);
        }
        if (status == SMB_OK)
            *result = change.result;
    }
    let_go(request);
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
    int status = smb_segment_apply(request->segment, &read, patience(request));
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

int gate_open(struct gate_request *request, uint8_t **place)
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
    *place = (uint8_t *)smb_segment_data(request->segment) + request->frame.offset;
    return SMB_OK;
}

void gate_close(struct gate_request *request)
{
    SMB_ASSERT(request->segment);
    smb_segment_unlock(request->segment, request->frame.offset);
}

void gate_done(struct gate_request *request)
{
    if (request->segment)
        smb_segment_release(request->segment);
    request->segment = NULL;
    for (int i = 0; i < SMB_SOURCES_MAX; i++) {
        if (request->others[i])
            smb_segment_release(request->others[i]);
        request->others[i] = NULL;
    }
}
