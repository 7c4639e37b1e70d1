/* frame.h: the frame, which has one format on TCP, on the local Unix socket and (as SEND payload)
 * on verbs. docs/protocol.md describes it.
 *
 * A frame is this header, little-endian, then `payload` bytes. The requests of one lane have
 * growing sequence numbers from 1 on. A reply repeats opcode, lane, session and sequence, and may
 * overtake other replies. A data frame never leaves one chunk: a chunk is the unit of atomicity, of
 * locking and of staging memory, so every limit follows from SMB_CHUNK_BYTES_MAX.
 *
 * csrc/protocol.toml says what each field means and why the header has it, and lists all numbers of
 * the protocol. tests/engine/wire/test_protocol_table.py compares this file with that list. */
#ifndef SMB_FRAME_H
#define SMB_FRAME_H

#include "smb/types.h"

enum { SMB_FRAME_BYTES = 64, SMB_FRAME_MAGIC = 0x4D53, SMB_FRAME_VERSION = 1 };

/* The features of a server beyond the first version, sent in `length` of its answer to HELLO. Older
 * servers send 0. */
enum smb_feature {
    SMB_FEATURE_INT4 = 1 << 0,
    SMB_FEATURE_BRINGS = 1 << 1,  /* an APPLY may contain its gradient */
    SMB_FEATURE_SOURCES = 1 << 2, /* an ACCUMULATE_FROM may have several sources, and round them */
    SMB_FEATURE_BONDS = 1 << 3,   /* proofs cover the connection: bond.h */
    SMB_FEATURE_ATOMICS = 1 << 4, /* FETCH_ADD and COMPARE_SWAP of other dtypes than int64 */
    SMB_FEATURE_BITS = 1 << 5,    /* the operations band, bor, bxor */
    SMB_FEATURE_WARDENS = 1 << 6, /* a change may be fenced by another segment's lock */
    SMB_FEATURES = SMB_FEATURE_INT4 | SMB_FEATURE_BRINGS | SMB_FEATURE_SOURCES | SMB_FEATURE_BONDS |
        SMB_FEATURE_ATOMICS | SMB_FEATURE_BITS | SMB_FEATURE_WARDENS
};
/* Sent beside the features, but true of this connection only: it is a Unix socket whose client is
 * in the server's namespaces. No higher bit is possible: a length is at most
 * SMB_CHUNK_BYTES_MAX. */
enum { SMB_BOND_HAS_IDS = 1 << 19 };

enum smb_frame_flag {
    SMB_FLAG_REPLY = 1 << 0,
    SMB_FLAG_FETCH = 1 << 1, /* accumulate: send the new values back */
    /* the request was sent before over a link that broke, so it may have been applied */
    SMB_FLAG_RETRY = 1 << 2,
    /* the payload begins with a lock's token: refused once the lock has another token */
    SMB_FLAG_FENCED = 1 << 3,
    SMB_FLAG_WIRE_SHIFT = 4, /* enum smb_wire, 3 bits */
    SMB_FLAG_WIRE = 7 << SMB_FLAG_WIRE_SHIFT,
    /* the payload ends with the crc32c of header and payload before it */
    SMB_FLAG_CHECKSUM = 1 << 7,
    /* with FENCED: the lock is another segment's, the warden */
    SMB_FLAG_WARDEN = 1 << 8,
    SMB_FLAGS_KNOWN = SMB_FLAG_REPLY | SMB_FLAG_FETCH | SMB_FLAG_RETRY | SMB_FLAG_FENCED |
        SMB_FLAG_WIRE | SMB_FLAG_CHECKSUM | SMB_FLAG_WARDEN
};

/* Where a header's fields lie, in bytes from its start. */
enum {
    SMB_AT_MAGIC = 0,
    SMB_AT_VERSION = 2,
    SMB_AT_OPCODE = 3,
    SMB_AT_DTYPE = 4,
    SMB_AT_OP = 5,
    SMB_AT_FLAGS = 6,
    SMB_AT_STATUS = 8,
    SMB_AT_LANE = 10,
    SMB_AT_EPOCH = 12,
    SMB_AT_SESSION = 16,
    SMB_AT_SEQUENCE = 24,
    SMB_AT_SEGMENT = 32,
    SMB_AT_OFFSET = 40,
    SMB_AT_LENGTH = 48,
    SMB_AT_PAYLOAD = 52,
    SMB_AT_ARGUMENT = 56,
    SMB_AT_END = 64
};

/* Payloads.
 *   ACCUMULATE_FROM  one source: where to read. Several sources: a word with the wire formats (3
 *                    bits each, from the lowest on), then segment and scale (float64) of each
 *   APPLY            the segments of the gradient and of the state (0: none), then the members of
 *                    struct smb_hyper as float64. If the request contains its gradient, the
 *                    gradient's segment is 0 and the elements follow
 *   requests that wait  four words (sync/sync.h)
 *   AUTHORIZE        rights and generation (32 bits each), expiry, proof (access.h)
 * The payload of a fenced change follows the lock's token. The token's lowest bit says to which of
 * the segment's locks it belongs (enum sync_lock). The warden's segment follows the token, except
 * in an APPLY: that has it in `argument`, because a record has no room for more words. */
enum {
    SMB_FROM_BYTES = 16,
    SMB_SOURCE_BYTES = 16,
    SMB_SOURCE_WIRE_BITS = 3,
    SMB_SYNC_WORDS = 4,
    SMB_SYNC_BYTES = 8 * SMB_SYNC_WORDS,
    SMB_TOKEN_BYTES = 8,
    SMB_WARDEN_BYTES = 8,
    SMB_CHECKSUM_BYTES = 4,
    SMB_COPIED_RECORD_BYTES = 128, /* records.h */
    SMB_COPIED_WORDS_BYTES = 272,  /* sync.h */
    SMB_APPLY_SEGMENTS = 1 + SMB_RULE_STATES_MAX,
    SMB_HYPER_WORDS = 9,
    SMB_APPLY_BYTES = 8 * (SMB_APPLY_SEGMENTS + SMB_HYPER_WORDS),
    SMB_AUTHORIZE_WORDS = 6,
    SMB_AUTHORIZE_BYTES = 8 * SMB_AUTHORIZE_WORDS
};
_Static_assert(sizeof(struct smb_hyper) == 8 * SMB_HYPER_WORDS, "it travels word for word");

/* Operations that change a segment's bytes. Their sequence numbers count, and they may be
 * fenced. */
static inline bool smb_opcode_changes(int opcode)
{
    return (opcode >= SMB_WRITE && opcode <= SMB_COMPARE_SWAP) || opcode == SMB_APPLY;
}

/* Operations that may wait at the server. They have no range, and four words of payload. */
static inline bool smb_opcode_waits(int opcode)
{
    return opcode >= SMB_LOCK && opcode <= SMB_UNPIN;
}

/* A request by reference is a record of SMB_RECORD_BYTES. All records have one size, so that many
 * can be read at once:
 *   offset size
 *        0   64  the header, as in a frame: its `payload` is the size of the payload
 *       64  104  the small part of the payload: token, words; the rest is zeros
 *      168    8  where the elements of a WRITE or ACCUMULATE lie: an address of the client. On the
 *                way to the server: the slot for them and for the reply's data, or SMB_NO_SLOT
 *      176    8  where the reply's data goes: an address of the client; 0 on the way to the server
 *      184    4  bytes of the elements
 *      188    4  bytes of the reply's data; the server relies on neither number of bytes
 * HELLO and replies are headers only. The data of a reply is in the slot that its request named,
 * and has as many bytes as the reply's `payload` says. Checksums are not used: the network card has
 * its own. */
enum {
    SMB_RECORD_SMALL_AT = SMB_FRAME_BYTES,
    SMB_RECORD_SMALL_BYTES = SMB_TOKEN_BYTES + SMB_APPLY_BYTES,
    SMB_RECORD_ENDS_AT = SMB_RECORD_SMALL_AT + SMB_RECORD_SMALL_BYTES,
    SMB_RECORD_ENDS_BYTES = 24
};
_Static_assert(SMB_TOKEN_BYTES + SMB_WARDEN_BYTES + 8 + SMB_SOURCE_BYTES * SMB_SOURCES_MAX <=
                   SMB_RECORD_SMALL_BYTES,
               "a record has room for all sources of a fenced addition");
_Static_assert(SMB_RECORD_ENDS_AT + SMB_RECORD_ENDS_BYTES == SMB_RECORD_BYTES,
               "a record has no gaps");
static const uint64_t SMB_NO_SLOT = UINT64_MAX;

struct smb_frame {
    uint8_t opcode;
    uint8_t dtype;
    uint8_t op;
    uint16_t flags;
    uint16_t status;
    uint16_t lane;
    uint32_t epoch;
    uint64_t session;
    uint64_t sequence;
    uint64_t segment;
    uint64_t offset;
    uint32_t length;
    uint32_t payload;
    uint64_t argument;
};

/* The wire format of the payload's elements. The elements in the answer to an ACCUMULATE are exact
 * nevertheless. */
static inline int smb_frame_wire(const struct smb_frame *frame)
{
    return (frame->flags & SMB_FLAG_WIRE) >> SMB_FLAG_WIRE_SHIFT;
}

static inline uint32_t smb_frame_checksum_bytes(const struct smb_frame *frame)
{
    return frame->flags & SMB_FLAG_CHECKSUM ? SMB_CHECKSUM_BYTES : 0;
}

/* Bytes of the token, and of the warden's segment, at the beginning of the payload. */
static inline uint32_t smb_frame_fence_bytes(const struct smb_frame *frame)
{
    bool warden = frame->flags & SMB_FLAG_WARDEN && frame->opcode != SMB_APPLY;
    return frame->flags & SMB_FLAG_FENCED ? SMB_TOKEN_BYTES + (warden ? SMB_WARDEN_BYTES : 0U) : 0;
}

/* Bytes between those and the checksum in the payload of a valid request. */
static inline uint32_t smb_frame_body(const struct smb_frame *frame)
{
    return frame->payload - smb_frame_fence_bytes(frame) - smb_frame_checksum_bytes(frame);
}

/* Whether a valid request is an APPLY that contains its gradient. */
static inline bool smb_frame_brings(const struct smb_frame *frame)
{
    return frame->opcode == SMB_APPLY && smb_frame_body(frame) > SMB_APPLY_BYTES;
}

/* The number of sources of a valid ACCUMULATE_FROM if it has several, else 0. */
static inline uint32_t smb_frame_sources(const struct smb_frame *frame)
{
    uint32_t body = smb_frame_body(frame);
    return body > SMB_FROM_BYTES ? (body - 8) / SMB_SOURCE_BYTES : 0;
}

void smb_frame_encode(const struct smb_frame *frame, uint8_t bytes[SMB_FRAME_BYTES]);

/* The only parser of frames. SMB_OK: every field is in its range, and `payload` is the size that
 * opcode, flags, status and length demand. Bounds, dtype and epoch depend on the segment, and the
 * gate checks them. SMB_VERSION: a frame of another protocol version. SMB_PROTOCOL: not a frame.
 * *frame may be used only after SMB_OK. */
int smb_frame_parse(const uint8_t bytes[SMB_FRAME_BYTES], struct smb_frame *frame);

/* The reply to a request: the same identifying fields, without a range. */
struct smb_frame smb_frame_reply(const struct smb_frame *request, int status);

static inline void smb_store64(uint8_t *bytes, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
}

static inline uint64_t smb_load64(const uint8_t *bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value |= (uint64_t)bytes[i] << (8 * i);
    return value;
}

static inline void smb_store_checksum(uint8_t *bytes, uint32_t crc)
{
    for (int i = 0; i < SMB_CHECKSUM_BYTES; i++)
        bytes[i] = (uint8_t)(crc >> (8 * i));
}

static inline bool smb_checksum_is(const uint8_t *bytes, uint32_t crc)
{
    uint8_t right[SMB_CHECKSUM_BYTES];
    smb_store_checksum(right, crc);
    return __builtin_memcmp(bytes, right, sizeof right) == 0;
}

static inline uint64_t smb_bits_of(double value)
{
    uint64_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline double smb_double_of(uint64_t bits)
{
    double value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

/* The parameters in an APPLY's payload. */
static inline void smb_store_hyper(uint8_t *bytes, const struct smb_hyper *hyper)
{
    double words[SMB_HYPER_WORDS];
    __builtin_memcpy(words, hyper, sizeof words);
    for (int i = 0; i < SMB_HYPER_WORDS; i++)
        smb_store64(bytes + 8 * i, smb_bits_of(words[i]));
}

static inline void smb_load_hyper(const uint8_t *bytes, struct smb_hyper *hyper)
{
    double words[SMB_HYPER_WORDS];
    for (int i = 0; i < SMB_HYPER_WORDS; i++)
        words[i] = smb_double_of(smb_load64(bytes + 8 * i));
    __builtin_memcpy(hyper, words, sizeof words);
}

#endif
