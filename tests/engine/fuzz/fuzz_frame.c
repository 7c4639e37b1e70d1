/* The one parser, with any 64 bytes, and with frames that were right before some bytes changed:
 * what it accepts is sound, its payload is what docs/protocol.md says, and it is what the bytes
 * say. */
#include <string.h>

#include "base/frame.h"
#include "fuzz.h"

/* Bytes of a range's elements as they travel; of some of them, of one. */
static uint32_t elements_of(const struct smb_frame *frame)
{
    uint32_t count = frame->length / 4;
    switch (frame->flags >> 4 & 7) {
    case 0: return frame->length;
    case 1:
    case 2: return 2 * count;
    case 3: return count + (count + 255) / 256 * 4;
    case 5: return count / 64 * 36 + (count % 64 ? 4 + (count % 64 + 1) / 2 : 0);
    default: return 4 + smb_dtype_bytes(frame->dtype);
    }
}

/* A beginning from which a few changed bytes are a frame, or nearly one. */
static struct smb_frame nearly(struct input *input)
{
    static const uint32_t lengths[] = {
        8, 8, 16, 24, 4096, SMB_CHUNK_BYTES_MAX, SMB_CHUNK_BYTES_MAX + 8, 0};
    static const uint32_t payloads[] = {0, 8, 16, 24, SMB_SYNC_BYTES};
    bool steps;
    struct smb_frame frame = {.opcode = (uint8_t)(take(input, 1) % (SMB_OPCODE_COUNT + 1)),
                              .lane = 1,
                              .epoch = 1,
                              .session = 1,
                              .segment = 1,
                              .dtype = SMB_INT64,
                              .op = SMB_SUM,
                              .argument = smb_bits_of(1.0)};
    uint64_t what = take(input, 1), how = take(input, 1);
    frame.sequence = what % 8 != 0;
    frame.flags = how % 2 ? 0 : (uint16_t)(how / 2 % 16);
    uint64_t wire = take(input, 1); /* and a checksum */
    if (wire % 2) {
        frame.flags |= (uint16_t)((wire / 2 % 6) << SMB_FLAG_WIRE_SHIFT |
                                  (wire & 16 ? SMB_FLAG_CHECKSUM : 0));
        frame.dtype = SMB_FLOAT32;
    }
    steps = frame.opcode == SMB_APPLY;
    if (steps && how % 8 != 7) {
        frame.dtype = SMB_FLOAT32;
        frame.op = (uint8_t)(what % 8);
    }
    bool several = frame.opcode == SMB_ACCUMULATE_FROM && how & 64;
    if (several && how & 32)
        frame.op = SMB_REPLACE;
    frame.length = frame.opcode == SMB_HELLO || (frame.opcode >= SMB_WATERMARK && !steps)
                       ? 0
                       : lengths[what / 8 % 8];
    if (frame.opcode == SMB_FETCH_ADD || frame.opcode == SMB_COMPARE_SWAP)
        frame.length = how & 64 ? 4 : 8;
    frame.offset = what >> 6 == 3 ? UINT64_MAX - 7 - take(input, 1) * 8 : 64;
    frame.payload = steps && how & 64                           ? 96 + (how & 32 ? frame.length : 0)
                    : several                                   ? 8 + 16 * (uint32_t)(what % 8)
                    : frame.opcode == SMB_AUTHORIZE && how & 64 ? 48
                    : how & 128                                 ? frame.length
                                                                : payloads[how / 32 % 5];
    if (wire % 2 && wire & 128)
        frame.payload = (frame.opcode == SMB_READ ? 0 : elements_of(&frame)) +
                        (frame.flags & SMB_FLAG_CHECKSUM ? 4 : 0);
    if (frame.flags & SMB_FLAG_FENCED && take(input, 1) % 4)
        frame.payload += SMB_TOKEN_BYTES;
    if (frame.flags & SMB_FLAG_WARDEN && take(input, 1) % 4)
        frame.payload += SMB_WARDEN_BYTES;
    return frame;
}

/* The page's table, said once more. */
static uint32_t payload_of(const struct smb_frame *frame)
{
    uint32_t checksum = frame->flags & SMB_FLAG_CHECKSUM ? 4 : 0;
    bool warden = frame->flags & SMB_FLAG_WARDEN && frame->opcode != SMB_APPLY;
    uint32_t token = (frame->flags & SMB_FLAG_FENCED ? 8 : 0) + (warden ? 8 : 0) + checksum;
    switch (frame->opcode) {
    case SMB_WRITE:
    case SMB_ACCUMULATE: return token + elements_of(frame);
    case SMB_ACCUMULATE_FROM: return token + 16;
    case SMB_COMPARE_SWAP: return token + 8;
    case SMB_APPLY: return token + 96;
    case SMB_FILL:
    case SMB_FETCH_ADD: return token;
    case SMB_AUTHORIZE: return checksum + 48;
    case SMB_REPLICATE:
    case SMB_REFUSED: return checksum;
    case SMB_COPY:
        return checksum + (frame->op == SMB_COPIED_CHUNK    ? frame->length
                           : frame->op == SMB_COPIED_RECORD ? 128
                           : frame->op == SMB_COPIED_WORDS  ? 272
                                                            : 0);
    default: return checksum + (frame->opcode >= SMB_LOCK ? 32 : 0);
    }
}

static void check_reply(const struct smb_frame *frame)
{
    bool data = frame->status == SMB_OK &&
                (frame->opcode == SMB_READ ||
                 (frame->opcode == SMB_ACCUMULATE && frame->flags & SMB_FLAG_FETCH));
    uint32_t checksum = frame->flags & SMB_FLAG_CHECKSUM ? 4 : 0;
    uint32_t elements = !data ? 0 : frame->opcode == SMB_READ ? elements_of(frame) : frame->length;
    MUST(frame->payload == elements + checksum && frame->status < SMB_STATUS_COUNT);
}

/* Of ACCUMULATE_FROM: a sum replaces the elements. `more`: bytes than one source has. */
static bool is_of_several_sources(const struct smb_frame *frame, uint32_t more)
{
    return frame->opcode == SMB_ACCUMULATE_FROM && (more + 8) % 16 == 0 && more >= 2 * 16 - 8 &&
           more <= SMB_SOURCES_MAX * 16 - 8 && frame->op == SMB_REPLACE &&
           frame->argument == smb_bits_of(1.0) && (frame->flags >> 4 & 7) == 0;
}

static void check_request(const struct smb_frame *frame)
{
    bool changes = (frame->opcode >= SMB_WRITE && frame->opcode <= SMB_COMPARE_SWAP) ||
                   frame->opcode == SMB_APPLY;
    bool ranged = frame->opcode == SMB_READ || changes ||
                  (frame->opcode == SMB_COPY && frame->op == SMB_COPIED_CHUNK);
    uint32_t element = smb_dtype_bytes(frame->dtype);
    bool sparse = (frame->flags >> 4 & 7) == SMB_WIRE_SPARSE;
    MUST(frame->status == 0 && frame->payload >= payload_of(frame));
    uint32_t more = frame->payload - payload_of(frame); /* entries, after the first */
    MUST(sparse ? more % (4 + element) == 0 && more / (4 + element) < frame->length / element
                : more == 0 || (frame->opcode == SMB_APPLY && more == frame->length) ||
                      is_of_several_sources(frame, more));
    MUST(sparse ? frame->opcode == SMB_ACCUMULATE
                : !(frame->flags >> 4 & 7) || frame->dtype == SMB_FLOAT32);
    MUST(!(frame->flags & SMB_FLAG_FENCED) || changes);
    MUST(!(frame->flags & SMB_FLAG_WARDEN) || frame->flags & SMB_FLAG_FENCED);
    MUST(!(frame->flags & SMB_FLAG_FETCH) || frame->opcode == SMB_ACCUMULATE);
    MUST((!changes && frame->opcode != SMB_COPY) || frame->sequence > 0);
    MUST(frame->opcode != SMB_COPY || frame->op <= SMB_COPIED_WORDS);
    MUST(ranged == (frame->length > 0));
    if (!ranged)
        return;
    MUST(element > 0 && frame->length % element == 0 && frame->offset % element == 0);
    MUST(frame->offset <= UINT64_MAX - frame->length);
    if (frame->opcode == SMB_FETCH_ADD || frame->opcode == SMB_COMPARE_SWAP)
        MUST(frame->length == element && smb_dtype_is_atomic(frame->dtype));
    if (frame->opcode == SMB_APPLY)
        MUST(frame->dtype == SMB_FLOAT32 && frame->op >= 1 && frame->op <= 6);
    if (frame->opcode == SMB_ACCUMULATE || frame->opcode == SMB_ACCUMULATE_FROM)
        MUST(smb_op_accepts(frame->dtype, frame->op, smb_double_of(frame->argument)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t bytes[SMB_FRAME_BYTES], again[SMB_FRAME_BYTES];
    struct input input = {data, data + size};
    if (take(&input, 1) % 8 == 0) {
        for (int i = 0; i < SMB_FRAME_BYTES; i++)
            bytes[i] = (uint8_t)take(&input, 1);
    } else {
        struct smb_frame begin = nearly(&input);
        smb_frame_encode(&begin, bytes);
        for (uint64_t left = take(&input, 1) % 4; left > 0; left--) {
            uint64_t at = take(&input, 1);
            bytes[at % SMB_FRAME_BYTES] = (uint8_t)take(&input, 1);
        }
    }
    struct smb_frame frame;
    if (smb_frame_parse(bytes, &frame) != SMB_OK)
        return 0;
    smb_frame_encode(&frame, again);
    MUST(memcmp(bytes, again, sizeof bytes) == 0);
    MUST(frame.opcode >= SMB_HELLO && frame.opcode < SMB_OPCODE_COUNT &&
         frame.length <= SMB_CHUNK_BYTES_MAX);
    MUST(!(frame.flags & ~SMB_FLAGS_KNOWN));
    if (frame.flags & SMB_FLAG_REPLY)
        check_reply(&frame);
    else
        check_request(&frame);
    return 0;
}
