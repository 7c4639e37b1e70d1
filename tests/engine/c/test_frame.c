/* The parser: every frame that we send is parsed back, and any other 64 bytes are just refused. */
#include <string.h>

#include "base/frame.h"
#include "check.h"
#include "random.h"

static struct smb_frame request(int opcode)
{
    struct smb_frame frame = {.opcode = (uint8_t)opcode,
                              .lane = 0x1234,
                              .epoch = 7,
                              .session = 0x1122334455667788U,
                              .sequence = 9,
                              .segment = 0xAABBCCDDEEFF0011U};
    if (opcode == SMB_HELLO || opcode == SMB_ATTACH)
        return frame;
    frame.dtype = SMB_INT64;
    frame.offset = 4096;
    frame.length = 8;
    switch (opcode) {
    case SMB_WRITE: frame.payload = 8; break;
    case SMB_ACCUMULATE:
    case SMB_ACCUMULATE_FROM:
        frame.payload = opcode == SMB_ACCUMULATE ? 8 : SMB_FROM_BYTES;
        frame.op = SMB_ELASTIC;
        frame.argument = smb_bits_of(-3.0);
        break;
    case SMB_COMPARE_SWAP: frame.payload = 8; break;
    case SMB_WATERMARK:
    case SMB_REPLICATE:
    case SMB_REFUSED: frame.dtype = 0, frame.length = 0, frame.offset = 0; break;
    case SMB_COPY: frame.payload = 8, frame.op = SMB_COPIED_CHUNK; break;
    }
    if (opcode == SMB_APPLY)
        frame.dtype = SMB_FLOAT32, frame.op = SMB_RULE_ADAM, frame.payload = SMB_APPLY_BYTES;
    if (opcode == SMB_AUTHORIZE)
        frame.dtype = 0, frame.length = 0, frame.offset = 0, frame.payload = SMB_AUTHORIZE_BYTES;
    if (smb_opcode_waits(opcode))
        frame.dtype = 0, frame.length = 0, frame.offset = 0, frame.payload = SMB_SYNC_BYTES;
    return frame;
}

static bool same(const struct smb_frame *a, const struct smb_frame *b)
{
    return a->opcode == b->opcode && a->dtype == b->dtype && a->op == b->op &&
           a->flags == b->flags && a->status == b->status && a->lane == b->lane &&
           a->epoch == b->epoch && a->session == b->session && a->sequence == b->sequence &&
           a->segment == b->segment && a->offset == b->offset && a->length == b->length &&
           a->payload == b->payload && a->argument == b->argument;
}

static int parse(const struct smb_frame *frame, struct smb_frame *found)
{
    uint8_t bytes[SMB_FRAME_BYTES];
    smb_frame_encode(frame, bytes);
    return smb_frame_parse(bytes, found);
}

/* Every request and every reply to it, of success and of each failure, is parsed back unchanged. */
static void round_trip_of_every_opcode(void)
{
    for (int opcode = SMB_HELLO; opcode < SMB_OPCODE_COUNT; opcode++) {
        struct smb_frame sent = request(opcode), found;
        CHECK_EQ(parse(&sent, &found), SMB_OK);
        CHECK(same(&sent, &found));
        for (int status = 0; status < SMB_STATUS_COUNT; status++) {
            struct smb_frame reply = smb_frame_reply(&sent, status);
            if (opcode == SMB_READ && status == SMB_OK)
                reply.length = reply.payload = 8;
            reply.argument = UINT64_MAX;
            CHECK_EQ(parse(&reply, &found), SMB_OK);
            CHECK(same(&reply, &found));
            CHECK(found.sequence == sent.sequence && found.session == sent.session &&
                  found.lane == sent.lane);
        }
    }
}

/* The bytes on the wire are the same on every machine. */
static void golden_bytes(void)
{
    static const uint8_t golden[SMB_FRAME_BYTES] = {
        0x53, 0x4d, 0x01, 0x05, 0x02, 0x01, 0x02, 0x00, 0x00, 0x00, 0x03, 0x00, 0x04,
        0x00, 0x00, 0x00, 0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01, 0x2a, 0x00,
        0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23,
        0x01, 0x00, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x08, 0x00, 0x00, 0x00,
        0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xe0, 0x3f,
    };
    struct smb_frame frame = {.opcode = SMB_ACCUMULATE,
                              .dtype = SMB_FLOAT32,
                              .op = SMB_SUM,
                              .flags = SMB_FLAG_FETCH,
                              .lane = 3,
                              .epoch = 4,
                              .session = 0x0102030405060708U,
                              .sequence = 42,
                              .segment = 0x0123456789ABCDEFU,
                              .offset = 4096,
                              .length = 8,
                              .payload = 8,
                              .argument = smb_bits_of(0.5)};
    uint8_t bytes[SMB_FRAME_BYTES];
    smb_frame_encode(&frame, bytes);
    CHECK(memcmp(bytes, golden, sizeof golden) == 0);
    struct smb_frame found;
    CHECK_EQ(smb_frame_parse(golden, &found), SMB_OK);
    CHECK(same(&frame, &found));
}

/* The properties of an accepted frame that its users rely on without checking. */
static void check_promises(const struct smb_frame *frame)
{
    CHECK(frame->opcode >= SMB_HELLO && frame->opcode < SMB_OPCODE_COUNT);
    CHECK(frame->length <= SMB_CHUNK_BYTES_MAX &&
          frame->payload >= smb_frame_checksum_bytes(frame));
    uint32_t payload = frame->payload - smb_frame_checksum_bytes(frame);
    CHECK(payload <= SMB_CHUNK_BYTES_MAX + SMB_TOKEN_BYTES);
    int wire = smb_frame_wire(frame);
    uint32_t entry = SMB_WIRE_INDEX_BYTES + smb_dtype_bytes(frame->dtype);
    if (wire == SMB_WIRE_SPARSE) {
        CHECK(frame->opcode == SMB_ACCUMULATE && smb_dtype_bytes(frame->dtype) > 0);
        if (frame->flags & SMB_FLAG_REPLY) {
            CHECK_EQ(payload, 0);
            return;
        }
        uint32_t body = smb_frame_body(frame);
        CHECK(body > 0 && body <= SMB_CHUNK_BYTES_MAX && body % entry == 0 &&
              body / entry <= frame->length / (entry - 4));
        return;
    }
    CHECK(wire == SMB_WIRE_EXACT ||
          (frame->dtype == SMB_FLOAT32 && smb_wire_is_dense(wire) &&
           (frame->opcode == SMB_READ || frame->opcode == SMB_WRITE ||
            frame->opcode == SMB_ACCUMULATE || frame->opcode == SMB_ACCUMULATE_FROM)));
    uint64_t elements = wire == SMB_WIRE_EXACT ? frame->length
                                               : smb_wire_bytes(wire, frame->length / 4);
    if (frame->flags & SMB_FLAG_REPLY) {
        CHECK(frame->status < SMB_STATUS_COUNT);
        CHECK(payload == 0 || payload == (frame->opcode == SMB_READ ? elements : frame->length));
        return;
    }
    CHECK_EQ(frame->status, 0);
    if (frame->opcode == SMB_HELLO || frame->opcode == SMB_ATTACH ||
        frame->opcode == SMB_WATERMARK || frame->opcode == SMB_AUTHORIZE ||
        frame->opcode == SMB_REPLICATE || frame->opcode == SMB_REFUSED ||
        smb_opcode_waits(frame->opcode)) {
        CHECK_EQ(payload, frame->opcode == SMB_AUTHORIZE    ? SMB_AUTHORIZE_BYTES
                          : smb_opcode_waits(frame->opcode) ? SMB_SYNC_BYTES
                                                            : 0);
        return;
    }
    CHECK(frame->sequence > 0 || frame->opcode == SMB_READ);
    if (frame->opcode == SMB_COPY && frame->op != SMB_COPIED_CHUNK) {
        CHECK_EQ(payload, frame->op == SMB_COPIED_RECORD ? SMB_COPIED_RECORD_BYTES : 0);
        CHECK(frame->length == 0 && frame->op <= SMB_COPIED_NOTE);
        return;
    }
    uint32_t element = smb_dtype_bytes(frame->dtype);
    CHECK(element > 0 && frame->length > 0 && frame->length % element == 0 &&
          frame->offset % element == 0);
    CHECK(frame->offset + frame->length > frame->offset);
    if (frame->opcode == SMB_ACCUMULATE || frame->opcode == SMB_ACCUMULATE_FROM)
        CHECK(smb_op_accepts(frame->dtype, frame->op, smb_double_of(frame->argument)));
    if (frame->opcode == SMB_APPLY) {
        CHECK(frame->dtype == SMB_FLOAT32 && smb_rule_states(frame->op) >= 0);
        CHECK_EQ(smb_frame_body(frame),
                 SMB_APPLY_BYTES + (smb_frame_brings(frame) ? frame->length : 0));
    }
    if (frame->opcode == SMB_WRITE || frame->opcode == SMB_ACCUMULATE)
        CHECK_EQ(payload, elements + (frame->flags & SMB_FLAG_FENCED ? SMB_TOKEN_BYTES : 0));
}

/* Parses any bytes. They are accepted only if valid, and then the fields are those bytes. */
static int parse_anything(const uint8_t *bytes)
{
    struct smb_frame found;
    int status = smb_frame_parse(bytes, &found);
    CHECK(status == SMB_OK || status == SMB_PROTOCOL || status == SMB_VERSION);
    if (status == SMB_OK) {
        uint8_t again[SMB_FRAME_BYTES];
        check_promises(&found);
        smb_frame_encode(&found, again);
        CHECK(memcmp(again, bytes, sizeof again) == 0);
    }
    return status;
}

/* Each header byte with 256 values, in a request and a reply of every opcode, alone and with a
 * second byte changed at random. */
static void every_byte_value(void)
{
    struct random random = random_make(20260301);
    int accepted = 0, refused = 0;
    for (int opcode = SMB_HELLO; opcode < SMB_OPCODE_COUNT; opcode++) {
        for (int reply = 0; reply < 2; reply++) {
            struct smb_frame frame = request(opcode);
            if (reply)
                frame = smb_frame_reply(&frame, opcode == SMB_READ ? SMB_NOT_FOUND : SMB_OK);
            uint8_t good[SMB_FRAME_BYTES];
            smb_frame_encode(&frame, good);
            CHECK_EQ(parse_anything(good), SMB_OK);
            for (int at = 0; at < SMB_FRAME_BYTES; at++) {
                for (int value = at % check_thinned(); value < 256; value += check_thinned()) {
                    uint8_t bytes[SMB_FRAME_BYTES];
                    memcpy(bytes, good, sizeof bytes);
                    bytes[at] = (uint8_t)value;
                    int status = parse_anything(bytes);
                    if (at < 2 && bytes[at] != good[at])
                        CHECK_EQ(status, SMB_PROTOCOL);
                    if (at == 2 && bytes[at] != good[at])
                        CHECK_EQ(status, SMB_VERSION);
                    *(status == SMB_OK ? &accepted : &refused) += 1;
                    bytes[random_below(&random, SMB_FRAME_BYTES)] = (uint8_t)random_next(&random);
                    parse_anything(bytes);
                }
            }
        }
    }
    int often = 10000 / check_thinned();
    CHECK(accepted > often && refused > often);
}

/* Random bytes behind the right magic and version: always a result, and nearly always a refusal. */
static void random_frames(void)
{
    struct random random = random_make(20260302);
    for (int i = 0; i < 300000; i++) {
        uint8_t bytes[SMB_FRAME_BYTES];
        for (int at = 0; at < SMB_FRAME_BYTES; at += 8)
            smb_store64(bytes + at, random_next(&random));
        if (i % 4) {
            memcpy(bytes, (const uint8_t[]){0x53, 0x4d, 1}, 3);
            bytes[3] %= SMB_OPCODE_COUNT + 1;
            bytes[4] %= 9;
            bytes[6] &= SMB_FLAGS_KNOWN & 0xff, bytes[7] &= SMB_FLAGS_KNOWN >> 8;
            memset(bytes + 8, 0, 2);
            memset(bytes + 50, 0, 2);
            memset(bytes + 54, 0, 2);
        }
        parse_anything(bytes);
    }
}

static void expect(struct smb_frame frame, int status)
{
    struct smb_frame found;
    CHECK_EQ(parse(&frame, &found), status);
}

/* Each rule by itself: a frame that breaks it is refused, and one that differs in one field is
 * accepted. */
static void each_rule(void)
{
    struct smb_frame frame = request(SMB_READ);
    frame.offset = UINT64_MAX - 7, expect(frame, SMB_PROTOCOL);
    frame.offset = UINT64_MAX - 15, expect(frame, SMB_OK);
    frame.offset = 4, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_READ), frame.length = 0, expect(frame, SMB_PROTOCOL);
    frame.length = 12, expect(frame, SMB_PROTOCOL);
    frame.length = SMB_CHUNK_BYTES_MAX, expect(frame, SMB_OK);
    frame.length = SMB_CHUNK_BYTES_MAX + 8, expect(frame, SMB_PROTOCOL);
    frame.length = UINT32_MAX - 7, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_READ), frame.payload = 8, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_READ), frame.dtype = 0, expect(frame, SMB_PROTOCOL);
    frame.dtype = SMB_FLOAT8_E5M2 + 1, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_READ), frame.status = 1, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_READ), frame.flags = SMB_FLAG_FETCH, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_ACCUMULATE), frame.flags = SMB_FLAG_FETCH, expect(frame, SMB_OK);
    frame.flags = SMB_FLAG_RETRY, expect(frame, SMB_OK);
    frame.flags = SMB_FLAGS_KNOWN + 1, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_READ), frame = smb_frame_reply(&frame, SMB_TIMEOUT), expect(frame, SMB_OK);
    frame = request(SMB_ACCUMULATE);
    frame.flags = SMB_FLAG_FENCED, expect(frame, SMB_PROTOCOL);
    frame.payload += SMB_TOKEN_BYTES, expect(frame, SMB_OK);
    frame = request(SMB_FILL), frame.flags = SMB_FLAG_FENCED, expect(frame, SMB_PROTOCOL);
    frame.payload = SMB_TOKEN_BYTES, expect(frame, SMB_OK);
    frame.sequence = 0, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_READ), frame.sequence = 0, expect(frame, SMB_OK);
    frame.flags = SMB_FLAG_FENCED, frame.payload = SMB_TOKEN_BYTES, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_LOCK), frame.payload -= 8, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_UNPIN), frame.length = 8, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_WATERMARK), frame.payload = 8, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_ACCUMULATE), frame.payload = 16, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_ACCUMULATE), frame.op = 0, expect(frame, SMB_PROTOCOL);
    frame.op = SMB_BXOR + 1, expect(frame, SMB_PROTOCOL);
    /* int64 */
    frame = request(SMB_ACCUMULATE), frame.argument = smb_bits_of(0.5), expect(frame, SMB_PROTOCOL);
    frame.dtype = SMB_FLOAT64, expect(frame, SMB_OK);
    frame = request(SMB_ACCUMULATE_FROM), frame.payload = 8, expect(frame, SMB_PROTOCOL);
    for (uint32_t bytes = 0; bytes < 200; bytes++) {
        bool several = bytes == 40 || bytes == 56 || bytes == 72 || bytes == 88;
        frame = request(SMB_ACCUMULATE_FROM), frame.payload = bytes;
        expect(frame, bytes == SMB_FROM_BYTES ? SMB_OK : SMB_PROTOCOL);
        frame.op = SMB_REPLACE, frame.argument = smb_bits_of(1.0);
        expect(frame, several || bytes == SMB_FROM_BYTES ? SMB_OK : SMB_PROTOCOL);
        if (several)
            CHECK_EQ(smb_frame_sources(&frame), (bytes - 8) / SMB_SOURCE_BYTES);
        frame.argument = smb_bits_of(2.0);
        expect(frame, bytes == SMB_FROM_BYTES ? SMB_OK : SMB_PROTOCOL);
        frame.argument = smb_bits_of(1.0), frame.dtype = SMB_FLOAT32;
        frame.flags = SMB_WIRE_INT8 << SMB_FLAG_WIRE_SHIFT;
        expect(frame, bytes == SMB_FROM_BYTES ? SMB_OK : SMB_PROTOCOL);
        frame.flags = SMB_FLAG_FENCED, frame.payload += SMB_TOKEN_BYTES;
        expect(frame, several || bytes == SMB_FROM_BYTES ? SMB_OK : SMB_PROTOCOL);
        frame.flags |= SMB_FLAG_WARDEN, frame.payload += SMB_WARDEN_BYTES;
        expect(frame, several || bytes == SMB_FROM_BYTES ? SMB_OK : SMB_PROTOCOL);
        CHECK(!several || frame.payload <= SMB_RECORD_SMALL_BYTES);
        frame.flags = SMB_FLAG_WARDEN, expect(frame, SMB_PROTOCOL);
    }
    for (int rule = 0; rule < 256; rule++)
        frame = request(SMB_APPLY), frame.op = (uint8_t)rule,
        expect(frame, rule >= 1 && rule <= 6 ? SMB_OK : SMB_PROTOCOL);
    for (int dtype = 0; dtype <= SMB_FLOAT8_E5M2 + 1; dtype++)
        frame = request(SMB_APPLY), frame.dtype = (uint8_t)dtype,
        expect(frame, dtype == SMB_FLOAT32 ? SMB_OK : SMB_PROTOCOL);
    frame = request(SMB_APPLY), frame.payload -= 8, expect(frame, SMB_PROTOCOL);
    frame.length = 16;
    frame.payload += 16, expect(frame, SMB_PROTOCOL); /* as long as with a token */
    frame.flags = SMB_FLAG_FENCED, expect(frame, SMB_OK);
    frame.payload += 16, expect(frame, SMB_OK); /* with the gradient */
    CHECK(smb_frame_brings(&frame));
    frame.flags = SMB_FLAG_FENCED | SMB_FLAG_CHECKSUM, expect(frame, SMB_PROTOCOL);
    frame.payload += SMB_CHECKSUM_BYTES, expect(frame, SMB_OK);
    frame.payload += 4, expect(frame, SMB_PROTOCOL);
    frame.flags = 0, frame.payload = SMB_APPLY_BYTES + 16, expect(frame, SMB_OK);
    frame.length = 12, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_APPLY), frame.flags = SMB_FLAG_FENCED, frame.payload += SMB_TOKEN_BYTES;
    CHECK(!smb_frame_brings(&frame));
    frame.flags |= SMB_FLAG_WARDEN, expect(frame, SMB_OK); /* which `argument` names */
    CHECK(!smb_frame_brings(&frame));
    frame.payload += SMB_WARDEN_BYTES, expect(frame, frame.length == 8 ? SMB_OK : SMB_PROTOCOL);
    frame.payload -= SMB_WARDEN_BYTES;
    frame.flags |= SMB_FLAG_FETCH, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_APPLY), frame.sequence = 0, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_APPLY), frame.length = 0, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_FETCH_ADD), frame.length = 16, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_FETCH_ADD), frame.dtype = SMB_FLOAT64, expect(frame, SMB_OK);
    frame.dtype = SMB_COMPLEX64, expect(frame, SMB_PROTOCOL);
    frame.dtype = SMB_INT32, expect(frame, SMB_PROTOCOL);
    frame.length = 4, expect(frame, SMB_OK);
    frame = request(SMB_COMPARE_SWAP), frame.dtype = SMB_FLOAT32, expect(frame, SMB_PROTOCOL);
    frame.length = 4, expect(frame, SMB_OK);
    frame.payload = 4, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_ACCUMULATE), frame.op = SMB_BXOR, expect(frame, SMB_PROTOCOL);
    frame.argument = smb_bits_of(1.0), expect(frame, SMB_OK);
    frame.dtype = SMB_FLOAT64, expect(frame, SMB_PROTOCOL);
    frame.op = SMB_REPLACE, expect(frame, SMB_OK);
    frame.dtype = SMB_UINT64, expect(frame, SMB_OK);
    frame.op = SMB_SUM, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_COMPARE_SWAP), frame.payload = 0, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_HELLO), frame.length = 8, expect(frame, SMB_PROTOCOL);
    frame = smb_frame_reply(&frame, SMB_OK), expect(frame, SMB_OK);
    frame.status = SMB_STATUS_COUNT, expect(frame, SMB_PROTOCOL);
    frame = request(SMB_READ), frame = smb_frame_reply(&frame, SMB_OK);
    frame.length = 8, expect(frame, SMB_PROTOCOL);
    frame.payload = 8, expect(frame, SMB_OK);
    frame.status = SMB_NOT_FOUND, expect(frame, SMB_PROTOCOL);
}

/* The rules for wire formats and checksums: the payload must have exactly the size that they
 * demand. */
static void encoded_and_checked(void)
{
    static const struct {
        int wire;
        uint32_t length, payload;
    } sound[] = {{SMB_WIRE_BFLOAT16, 4, 2},  {SMB_WIRE_FLOAT16, 1048576, 524288},
                 {SMB_WIRE_INT8, 4, 5},      {SMB_WIRE_INT8, 1024, 260},
                 {SMB_WIRE_INT8, 1028, 265}, {SMB_WIRE_INT8, 1048576, 266240},
                 {SMB_WIRE_INT4, 4, 5},      {SMB_WIRE_INT4, 256, 36},
                 {SMB_WIRE_INT4, 268, 42},   {SMB_WIRE_INT4, 1048576, 147456}};
    for (size_t i = 0; i < sizeof sound / sizeof *sound; i++) {
        for (int checked = 0; checked < 2; checked++) {
            struct smb_frame frame = request(SMB_ACCUMULATE), reply;
            frame.dtype = SMB_FLOAT32;
            frame.flags = (uint16_t)(sound[i].wire << SMB_FLAG_WIRE_SHIFT |
                                     (checked ? SMB_FLAG_CHECKSUM : 0));
            frame.length = sound[i].length;
            frame.payload = sound[i].payload + (checked ? SMB_CHECKSUM_BYTES : 0);
            expect(frame, SMB_OK);
            CHECK_EQ(smb_frame_body(&frame), sound[i].payload);
            frame.payload++, expect(frame, SMB_PROTOCOL), frame.payload -= 2,
                expect(frame, SMB_PROTOCOL), frame.payload++;
            frame.length += 2, expect(frame, SMB_PROTOCOL), frame.length -= 2;
            frame.dtype = SMB_FLOAT64, expect(frame, SMB_PROTOCOL);
            frame.dtype = SMB_INT32, expect(frame, SMB_PROTOCOL), frame.dtype = SMB_FLOAT32;
            frame.flags |= SMB_FLAG_FENCED, expect(frame, SMB_PROTOCOL);
            frame.payload += SMB_TOKEN_BYTES, expect(frame, SMB_OK);
            CHECK_EQ(smb_frame_body(&frame), sound[i].payload);
            frame.flags |= SMB_FLAG_WARDEN, expect(frame, SMB_PROTOCOL);
            frame.payload += SMB_WARDEN_BYTES, expect(frame, SMB_OK);
            CHECK_EQ(smb_frame_body(&frame), sound[i].payload);
            frame.flags &= (uint16_t)~SMB_FLAG_WARDEN, frame.payload -= SMB_WARDEN_BYTES;
            frame.opcode = SMB_WRITE, expect(frame, SMB_OK);
            frame.opcode = SMB_FILL, expect(frame, SMB_PROTOCOL);
            /* An ACCUMULATE_FROM has no elements, because its source is rounded on the server. */
            struct smb_frame from = frame;
            from.opcode = SMB_ACCUMULATE_FROM, expect(from, SMB_PROTOCOL);
            from.payload = SMB_TOKEN_BYTES + SMB_FROM_BYTES + (checked ? SMB_CHECKSUM_BYTES : 0);
            expect(from, SMB_OK);
            from.dtype = SMB_FLOAT64, from.length = 8, expect(from, SMB_PROTOCOL);
            /* The answer to READ is encoded, the answer to ACCUMULATE with FETCH is not. */
            frame.flags &= (uint16_t)~SMB_FLAG_FENCED;
            frame.opcode = SMB_READ, frame.payload = checked ? SMB_CHECKSUM_BYTES : 0,
            expect(frame, SMB_OK);
            reply = smb_frame_reply(&frame, SMB_OK), reply.length = frame.length;
            reply.payload = sound[i].payload + (checked ? SMB_CHECKSUM_BYTES : 0),
            expect(reply, SMB_OK);
            reply.payload = reply.length + (checked ? SMB_CHECKSUM_BYTES : 0),
            expect(reply, SMB_PROTOCOL);
            reply.opcode = SMB_ACCUMULATE, reply.flags |= SMB_FLAG_FETCH, expect(reply, SMB_OK);
        }
    }
    struct smb_frame frame = request(SMB_HELLO);
    frame.flags = SMB_FLAG_CHECKSUM, expect(frame, SMB_PROTOCOL);
    frame.payload = SMB_CHECKSUM_BYTES, expect(frame, SMB_OK);
    frame.flags = 0, expect(frame, SMB_PROTOCOL);
    for (int wire = SMB_WIRE_SPARSE; wire < 8; wire += wire == SMB_WIRE_SPARSE ? 2 : 1)
        frame = request(SMB_READ), frame.dtype = SMB_FLOAT32,
        frame.flags = (uint16_t)(wire << SMB_FLAG_WIRE_SHIFT), expect(frame, SMB_PROTOCOL);
}

/* Sparse entries: whole entries, at least one, no more than elements, never more than a chunk's
 * bytes. */
static void sparse_entries(void)
{
    struct smb_frame frame = request(SMB_ACCUMULATE); /* int64 */
    frame.flags = SMB_WIRE_SPARSE << SMB_FLAG_WIRE_SHIFT;
    frame.length = 32;
    frame.payload = 12, expect(frame, SMB_OK);
    frame.payload = 48, expect(frame, SMB_OK);
    frame.payload = 60, expect(frame, SMB_PROTOCOL);
    frame.payload = 0, expect(frame, SMB_PROTOCOL);
    frame.payload = 16, expect(frame, SMB_PROTOCOL);
    frame.payload = 12, frame.flags |= SMB_FLAG_CHECKSUM, expect(frame, SMB_PROTOCOL);
    frame.payload = 16, expect(frame, SMB_OK);
    frame.flags |= SMB_FLAG_FENCED, expect(frame, SMB_PROTOCOL), frame.payload = 24,
                                                                 expect(frame, SMB_OK);
    frame.flags = SMB_WIRE_SPARSE << SMB_FLAG_WIRE_SHIFT | SMB_FLAG_FETCH, frame.payload = 12,
    expect(frame, SMB_PROTOCOL);
    frame.flags = SMB_WIRE_SPARSE << SMB_FLAG_WIRE_SHIFT, frame.opcode = SMB_WRITE,
    expect(frame, SMB_PROTOCOL);
    frame.opcode = SMB_ACCUMULATE, frame.length = SMB_CHUNK_BYTES_MAX, frame.payload = 87381 * 12,
    expect(frame, SMB_OK);
    frame.payload = 87382 * 12, expect(frame, SMB_PROTOCOL);
    frame.dtype = SMB_UINT8, frame.argument = smb_bits_of(1.0), frame.length = 8;
    frame.payload = 40, expect(frame, SMB_OK), frame.payload = 45, expect(frame, SMB_PROTOCOL);
}

int main(void)
{
    static const struct test tests[] = {TEST(round_trip_of_every_opcode),
                                        TEST(golden_bytes),
                                        TEST(every_byte_value),
                                        TEST(random_frames),
                                        TEST(each_rule),
                                        TEST(encoded_and_checked),
                                        TEST(sparse_entries)};
    return RUN_TESTS(tests);
}
