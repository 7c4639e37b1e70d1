#include "server/operands.h"

#include "kernels/kernels.h"
#include "memory/chunk.h"
#include "server/admit.h"
#include "server/registry.h"
#include "server/replica.h"
#include "server/server.h"

int gate_missing(const struct gate_request *request, int status)
{
    bool copies = replica_at(request->segment);
    return status == SMB_NOT_FOUND && copies ? SMB_APART : status;
}

/* Takes a reference to a source that may be read on this server, in request->others. */
static int find_source(struct smb_server *server, struct gate_request *request, int number,
                       uint64_t id)
{
    struct smb_segment **source = &request->others[number];
    int status = *source ? SMB_OK : gate_find(server, request, id, SMB_RIGHT_READ, source);
    if (status != SMB_OK)
        return gate_missing(request, status);
    if (smb_segment_dtype(*source) != request->frame.dtype)
        return SMB_INVALID;
    struct replica *replica = replica_at(*source);
    if (replica && !replica_is_primary(replica))
        return SMB_APART;
    if (replica && server->guarded &&
        !replica_serves(replica, grants_find(&request->peer->grants, id)->epoch, false))
        return SMB_APART; /* the client learns the epoch when it reads the source itself */
    return SMB_OK;
}

/* Whether the source's bytes in scratch may be used: from a segment with two copies, once a client
 * may be told them. */
static int may_use(struct gate_request *request, int number)
{
    struct replica *replica = replica_at(request->others[number]);
    return replica ? replica_check_read(replica, request->tries.gathered[number] - 1,
                                        request->tries.begun_ns)
                   : SMB_OK;
}

/* Copies the source range into scratch, rounded as the frame says, so that no chunk lock is waited
 * for while another is held. The bytes of a source with two copies are kept until they may be used:
 * each further try would read newer bytes, which would have to wait again. */
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
        status = smb_segment_apply(source, &read, gate_patience(request));
        if (status != SMB_OK)
            return gate_missing(request, status);
        int wire = smb_frame_wire(&request->frame);
        if (wire != SMB_WIRE_EXACT)
            smb_kernel_round(wire, scratch, read.bytes / 4, 0, SMB_CHUNK_BYTES_MAX, scratch);
        struct replica *replica = replica_at(source);
        request->tries.gathered[0] = replica ? 1 + replica_newest_of(replica, offset) : 0;
    }
    return may_use(request, 0);
}

/* Adds a source's range, rounded, to the sum in scratch; the first source replaces scratch. Takes
 * the source's chunk lock and no other. */
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
        return gate_missing(request, SMB_NOT_FOUND);
    int status = smb_segment_lock(source, frame->offset, gate_patience(request));
    if (status != SMB_OK)
        return gate_missing(request, status);
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
    return gate_missing(request, smb_segment_still_there(source));
}

/* Computes the sum of several sources in scratch. Done once, and kept for further tries. */
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

/* Whether the state can change together with the weights, or a warden's lock fence the change: both
 * segments have one copy, or both are in one bundle, whose backup makes the step in both, and takes
 * over both. */
static int follows(struct smb_server *server, const struct gate_request *request,
                   const struct smb_segment *beside, uint64_t id)
{
    const struct replica *replica = replica_at(request->segment), *other = replica_at(beside);
    if (!replica && !other)
        return SMB_OK;
    if (!replica || !replica_moves_with(replica, other))
        return SMB_INVALID;
    if (server->guarded && !request->peer->fed &&
        !replica_serves(other, grants_find(&request->peer->grants, id)->epoch, false))
        /* the client asks for a newer token of that segment, which its link would not do */
        return SMB_APART;
    return SMB_OK;
}

/* Reads the words of an APPLY: copies the gradient's bytes and finds the state. All segments must
 * be different. */
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
        int status = id == 0 || *state ? SMB_OK
                                       : gate_find(server, request, id, SMB_RIGHT_WRITE, state);
        if (status != SMB_OK)
            return gate_missing(request, status);
        if (*state && (status = follows(server, request, *state, id)) != SMB_OK)
            return status;
        change->states[i] = *state;
    }
    return brings ? SMB_OK : read_source(server, request, gradient, frame->offset, scratch);
}

int gate_describe(struct smb_server *server, struct gate_request *request, const uint8_t *payload,
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
        change->wire = SMB_WIRE_EXACT; /* the copy is rounded already */
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

int gate_find_warden(struct smb_server *server, struct gate_request *request, uint64_t id)
{
    int status = request->warden
                     ? SMB_OK
                     : gate_find(server, request, id, SMB_RIGHT_WRITE, &request->warden);
    if (status != SMB_OK)
        return gate_missing(request, status);
    status = follows(server, request, request->warden, id);
    if (status != SMB_OK || replica_at(request->segment))
        return status;
    return smb_segment_moves(request->segment) || smb_segment_moves(request->warden) ? SMB_INVALID
                                                                                     : SMB_OK;
}

int gate_bind_warden(struct gate_request *request)
{
    if (replica_at(request->segment))
        return SMB_OK; /* one bundle moves together */
    return smb_segment_bind(request->segment) == SMB_OK &&
                   smb_segment_bind(request->warden) == SMB_OK
               ? SMB_OK
               : SMB_INVALID;
}
