/* Encodes frames and parses them. Pure: no I/O, no allocation, no state. */
#include <math.h>
#include <stddef.h>

#include "base/frame.h"

_Static_assert((int)SMB_AT_END == (int)SMB_FRAME_BYTES,
               "the header has no room left and none over");
_Static_assert((int)SMB_COPY + 1 == (int)SMB_OPCODE_COUNT,
               "counters have a place for every opcode");

static void store16(uint8_t *bytes, uint16_t value)
{
    bytes[0] = (uint8_t)value;
    bytes[1] = (uint8_t)(value >> 8);
}

static void store32(uint8_t *bytes, uint32_t value)
{
    store16(bytes, (uint16_t)value);
    store16(bytes + 2, (uint16_t)(value >> 16));
}

static uint16_t load16(const uint8_t *bytes)
{
    return (uint16_t)(bytes[0] | bytes[1] << 8);
}

static uint32_t load32(const uint8_t *bytes)
{
    return load16(bytes) | (uint32_t)load16(bytes + 2) << 16;
}

void smb_frame_encode(const struct smb_frame *frame, uint8_t bytes[SMB_FRAME_BYTES])
{
    store16(bytes + SMB_AT_MAGIC, SMB_FRAME_MAGIC);
    bytes[SMB_AT_VERSION] = SMB_FRAME_VERSION;
    bytes[SMB_AT_OPCODE] = frame->opcode;
    bytes[SMB_AT_DTYPE] = frame->dtype;
    bytes[SMB_AT_OP] = frame->op;
    store16(bytes + SMB_AT_FLAGS, frame->flags);
    store16(bytes + SMB_AT_STATUS, frame->status);
    store16(bytes + SMB_AT_LANE, frame->lane);
    store32(bytes + SMB_AT_EPOCH, frame->epoch);
    smb_store64(bytes + SMB_AT_SESSION, frame->session);
    smb_store64(bytes + SMB_AT_SEQUENCE, frame->sequence);
    smb_store64(bytes + SMB_AT_SEGMENT, frame->segment);
    smb_store64(bytes + SMB_AT_OFFSET, frame->offset);
    store32(bytes + SMB_AT_LENGTH, frame->length);
    store32(bytes + SMB_AT_PAYLOAD, frame->payload);
    smb_store64(bytes + SMB_AT_ARGUMENT, frame->argument);
}

static bool wire_is_sound(const struct smb_frame *frame)
{
    int wire = smb_frame_wire(frame);
    if (wire == SMB_WIRE_SPARSE)
        return frame->opcode == SMB_ACCUMULATE && !(frame->flags & SMB_FLAG_FETCH) &&
               smb_dtype_bytes(frame->dtype) > 0;
    bool carries = frame->opcode == SMB_READ || frame->opcode == SMB_WRITE ||
                   frame->opcode == SMB_ACCUMULATE || frame->opcode == SMB_ACCUMULATE_FROM;
    return wire == SMB_WIRE_EXACT ||
           (smb_wire_is_dense(wire) && carries && frame->dtype == SMB_FLOAT32);
}

/* The only place that computes payload bytes from a range and its wire format. The length was
 * checked before. */
static bool elements_fit(const struct smb_frame *frame, int wire, uint32_t payload)
{
    if (wire == SMB_WIRE_SPARSE) {
        uint32_t element = smb_dtype_bytes(frame->dtype), entry = SMB_WIRE_INDEX_BYTES + element;
        return payload > 0 && payload <= SMB_CHUNK_BYTES_MAX && payload % entry == 0 &&
               payload / entry <= frame->length / element;
    }
    return payload ==
           (wire == SMB_WIRE_EXACT ? frame->length : smb_wire_bytes(wire, frame->length / 4));
}

/* For ACCUMULATE_FROM: the payload names one source or several. */
static bool sources_are_sound(const struct smb_frame *frame, uint32_t payload)
{
    double scale = smb_double_of(frame->argument);
    if (payload == SMB_FROM_BYTES)
        return smb_op_accepts(frame->dtype, frame->op, scale);
    uint32_t count = payload < 8 || payload % SMB_SOURCE_BYTES != 8
                         ? 0
                         : (payload - 8) / SMB_SOURCE_BYTES;
    return count >= 2 && count <= SMB_SOURCES_MAX && frame->op == SMB_REPLACE && scale == 1.0 &&
           smb_frame_wire(frame) == SMB_WIRE_EXACT;
}

static bool reply_is_sound(const struct smb_frame *frame)
{
    if (frame->status >= SMB_STATUS_COUNT || frame->length > SMB_CHUNK_BYTES_MAX ||
        frame->payload < smb_frame_checksum_bytes(frame))
        return false;
    uint32_t payload = frame->payload - smb_frame_checksum_bytes(frame);
    if (frame->status == SMB_OK && frame->opcode == SMB_READ)
        return elements_fit(frame, smb_frame_wire(frame), payload) &&
               (smb_frame_wire(frame) == SMB_WIRE_EXACT || frame->length % 4 == 0);
    if (frame->status == SMB_OK && frame->opcode == SMB_ACCUMULATE && frame->flags & SMB_FLAG_FETCH)
        return elements_fit(frame, SMB_WIRE_EXACT, payload);
    return payload == 0;
}

static bool request_is_sound(const struct smb_frame *frame)
{
    if (frame->status != 0 || frame->payload < smb_frame_checksum_bytes(frame))
        return false;
    uint32_t payload = frame->payload - smb_frame_checksum_bytes(frame);
    if (frame->flags & SMB_FLAG_FETCH && frame->opcode != SMB_ACCUMULATE)
        return false;
    bool fenced = frame->flags & SMB_FLAG_FENCED;
    bool changes = smb_opcode_changes(frame->opcode);
    /* 0 means that a lane has changed nothing yet */
    if ((fenced && !changes) || (!fenced && frame->flags & SMB_FLAG_WARDEN) ||
        (changes && frame->sequence == 0))
        return false;
    if (frame->opcode == SMB_HELLO || frame->opcode == SMB_ATTACH ||
        frame->opcode == SMB_WATERMARK || frame->opcode == SMB_REPLICATE ||
        frame->opcode == SMB_REFUSED)
        return frame->length == 0 && payload == 0;
    if (smb_opcode_waits(frame->opcode))
        return frame->length == 0 && payload == SMB_SYNC_BYTES;
    if (frame->opcode == SMB_AUTHORIZE)
        return frame->length == 0 && payload == SMB_AUTHORIZE_BYTES;
    if (frame->opcode == SMB_COPY && (frame->sequence == 0 || frame->op > SMB_COPIED_WORDS))
        return false;
    if (frame->opcode == SMB_COPY && frame->op != SMB_COPIED_CHUNK)
        return frame->length == 0 &&
               payload == (frame->op == SMB_COPIED_RECORD  ? SMB_COPIED_RECORD_BYTES
                           : frame->op == SMB_COPIED_WORDS ? SMB_COPIED_WORDS_BYTES
                                                           : 0);

    /* All other opcodes have a range: inside 64 bits, not empty, of whole elements, at most a
     * chunk. */
    uint32_t element = smb_dtype_bytes(frame->dtype);
    if (element == 0 || frame->length == 0 || frame->length > SMB_CHUNK_BYTES_MAX ||
        frame->length % element != 0 || frame->offset % element != 0 ||
        frame->offset > UINT64_MAX - frame->length)
        return false;
    if (payload < smb_frame_fence_bytes(frame))
        return false;
    payload -= smb_frame_fence_bytes(frame);
    switch (frame->opcode) {
    case SMB_READ:
    case SMB_FILL: return payload == 0;
    case SMB_COPY: return payload == frame->length;
    case SMB_WRITE: return elements_fit(frame, smb_frame_wire(frame), payload);
    case SMB_ACCUMULATE:
        return elements_fit(frame, smb_frame_wire(frame), payload) &&
               smb_op_accepts(frame->dtype, frame->op, smb_double_of(frame->argument));
    case SMB_ACCUMULATE_FROM: return sources_are_sound(frame, payload);
    case SMB_APPLY:
        return (payload == SMB_APPLY_BYTES || payload == SMB_APPLY_BYTES + frame->length) &&
               smb_rule_states(frame->op) >= 0 && frame->dtype == SMB_FLOAT32;
    case SMB_FETCH_ADD:
        return frame->length == element && payload == 0 && smb_dtype_is_atomic(frame->dtype);
    case SMB_COMPARE_SWAP:
        return frame->length == element && payload == 8 && smb_dtype_is_atomic(frame->dtype);
    default: return false;
    }
}

int smb_frame_parse(const uint8_t bytes[SMB_FRAME_BYTES], struct smb_frame *frame)
{
    if (load16(bytes + SMB_AT_MAGIC) != SMB_FRAME_MAGIC)
        return SMB_PROTOCOL;
    if (bytes[SMB_AT_VERSION] != SMB_FRAME_VERSION)
        return SMB_VERSION;
    *frame = (struct smb_frame){
        .opcode = bytes[SMB_AT_OPCODE],
        .dtype = bytes[SMB_AT_DTYPE],
        .op = bytes[SMB_AT_OP],
        .flags = load16(bytes + SMB_AT_FLAGS),
        .status = load16(bytes + SMB_AT_STATUS),
        .lane = load16(bytes + SMB_AT_LANE),
        .epoch = load32(bytes + SMB_AT_EPOCH),
        .session = smb_load64(bytes + SMB_AT_SESSION),
        .sequence = smb_load64(bytes + SMB_AT_SEQUENCE),
        .segment = smb_load64(bytes + SMB_AT_SEGMENT),
        .offset = smb_load64(bytes + SMB_AT_OFFSET),
        .length = load32(bytes + SMB_AT_LENGTH),
        .payload = load32(bytes + SMB_AT_PAYLOAD),
        .argument = smb_load64(bytes + SMB_AT_ARGUMENT),
    };
    if (frame->opcode < SMB_HELLO || frame->opcode >= SMB_OPCODE_COUNT ||
        frame->flags & ~SMB_FLAGS_KNOWN || !wire_is_sound(frame))
        return SMB_PROTOCOL;
    bool sound = frame->flags & SMB_FLAG_REPLY ? reply_is_sound(frame) : request_is_sound(frame);
    return sound ? SMB_OK : SMB_PROTOCOL;
}

struct smb_frame smb_frame_reply(const struct smb_frame *request, int status)
{
    return (struct smb_frame){
        .opcode = request->opcode,
        .dtype = request->dtype,
        .op = request->op,
        .flags = (uint16_t)(request->flags | SMB_FLAG_REPLY),
        .status = (uint16_t)status,
        .lane = request->lane,
        .epoch = request->epoch,
        .session = request->session,
        .sequence = request->sequence,
        .segment = request->segment,
    };
}

const char *smb_status_name(int status)
{
    switch (status) {
    case SMB_OK: return "ok";
    case SMB_NOT_FOUND: return "not_found";
    case SMB_INVALID: return "invalid";
    case SMB_STALE_EPOCH: return "stale_epoch";
    case SMB_DENIED: return "denied";
    case SMB_OUT_OF_MEMORY: return "out_of_memory";
    case SMB_EXISTS: return "exists";
    case SMB_TIMEOUT: return "timeout";
    case SMB_BUSY: return "busy";
    case SMB_LOCK_LOST: return "lock_lost";
    case SMB_BROKEN: return "broken";
    case SMB_EVICTED: return "evicted";
    case SMB_SESSION_ENDED: return "session_ended";
    case SMB_DEFERRED: return "deferred";
    case SMB_APART: return "apart";
    case SMB_DISCONNECTED: return "disconnected";
    case SMB_LINK_LOST: return "link_lost";
    case SMB_PROTOCOL: return "protocol";
    case SMB_VERSION: return "version";
    case SMB_CHECKSUM: return "checksum";
    case SMB_NAMESPACE: return "namespace";
    case SMB_UNTRUSTED: return "untrusted";
    case SMB_SYSTEM: return "system";
    default: return NULL;
    }
}
