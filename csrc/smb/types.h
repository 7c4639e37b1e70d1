/* types.h: the numbers and structures that all parts of the engine share: statuses, element types,
 * operations, opcodes, limits, tokens and layouts. It also declares what csrc/base computes from
 * them.
 *
 * The headers of csrc/smb are the engine's public interface. Python sees no other header. Each
 * header's functions are defined in one folder:
 *   types             base
 *   tls               channel
 *   kernels           kernels
 *   segment           memory
 *   server            server
 *   client            client
 *   async             async
 *
 * A folder may include the folders above it in this list and the public headers of those folders.
 * Server and client never include each other (tests/unit/engine/test_includes.py):
 *   base      frames, layout, clocks: no shared memory
 *   channel, kernels, sync   TLS and tokens' proofs; arithmetic; the words of locks and versions,
 *             and requests that wait for them. They do not include each other
 *   memory    segments: chunk locks, completion records, journal
 *   server, client   the daemon's loops, connections and gate; a client's links and calls
 *   async     a client's asynchronous operations
 *   python    the direct calls from Python's methods
 *
 * Conventions. Functions return enum smb_status as int (0 is success) unless their comment says
 * otherwise. Out-parameters come last and are written only on success. Every function may be called
 * without Python's lock (the GIL). Sizes and offsets are in bytes unless the name says `count`
 * (elements) or `chunk` (chunks). Nothing here calls back into Python, except smb_set_look's
 * function, which the caller gave.
 *
 * cffi reads the part between the two marks as it stands, in the order of FACE in
 * csrc/build_engine.py. That part must contain plain declarations only and no preprocessor
 * lines. */
#ifndef SMB_PUBLIC_TYPES_H
#define SMB_PUBLIC_TYPES_H

#include <stdbool.h>
#include <stdint.h>

/* cffi: begin */

/* csrc/protocol.toml lists the numbers that travel in frames. Add a new number there first. */

/* A status says by its range what is broken: nothing (0), the request (1..15), the link (16..31),
 * this process or host (32 and above). */
enum smb_status {
    SMB_OK = 0,
    /* this server has no such segment (deleted, or never created); nothing applied */
    SMB_NOT_FOUND = 1,
    /* the request contradicts the segment: bounds, dtype, op, alignment; nothing applied */
    SMB_INVALID = 2,
    /* the layout is older or newer than the segment's; nothing applied; open the buffer again */
    SMB_STALE_EPOCH = 3,
    SMB_DENIED = 4,        /* the session lacks the right; nothing applied */
    SMB_OUT_OF_MEMORY = 5, /* capacity or tmpfs exhausted; nothing left behind */
    SMB_EXISTS = 6,        /* this server already has a segment of that id */
    /* not finished in time; the outcome of requests that were sent is unknown */
    SMB_TIMEOUT = 7,
    SMB_BUSY = 8, /* another holds the chunk lock; only from the try functions, never on the wire */
    SMB_LOCK_LOST = 9, /* the lock has another token by now; nothing applied */
    /* a party of the barrier died or gave up: this round has failed for all parties */
    SMB_BROKEN = 10,
    /* the record that tells a repeated change from a new one is gone: outcome unknown */
    SMB_EVICTED = 11,
    /* the session's lease ran out, or the session was closed; nothing applied */
    SMB_SESSION_ENDED = 12,
    SMB_DEFERRED = 13, /* the answer comes later; only inside the server, never on the wire */
    /* the request's source is not on this server, or has its primary on another; nothing applied;
     * read the source and send its elements instead */
    SMB_APART = 14,
    /* the link was down before anything of this call was sent: not applied */
    SMB_DISCONNECTED = 16,
    SMB_LINK_LOST = 17, /* the link broke with in-flight requests: outcome unknown */
    SMB_PROTOCOL = 18,  /* the peer sent a malformed frame; the link is closed */
    SMB_VERSION = 19,   /* the peer speaks another version of the protocol */
    /* a checksum was wrong; the link is connected again. Never on the wire */
    SMB_CHECKSUM = 20,
    /* the segment's server is in another PID namespace; nothing applied; use a link to the server.
     * Never on the wire */
    SMB_NAMESPACE = 21,
    /* the peer is not the expected one, or the peer refuses us; no data of a buffer was sent there.
     * Never on the wire */
    SMB_UNTRUSTED = 22,
    SMB_SYSTEM = 32 /* a system call failed; see errno */
};

/* Element types. The numbers travel in frames and are stored in segment headers, so a number is
 * never reused. */
enum smb_dtype {
    SMB_FLOAT16 = 1,
    SMB_FLOAT32 = 2,
    SMB_FLOAT64 = 3,
    SMB_BFLOAT16 = 4,
    SMB_INT32 = 5,
    SMB_INT64 = 6,
    SMB_UINT8 = 7,
    /* For storage: there is no arithmetic on these, only replace with scale 1, and for integers and
     * bool the operations on bits. The atomics also take uint32 and uint64. */
    SMB_INT8 = 8,
    SMB_INT16 = 9,
    SMB_UINT16 = 10,
    SMB_UINT32 = 11,
    SMB_UINT64 = 12,
    SMB_COMPLEX64 = 13,
    SMB_BOOL = 14, /* one byte, 0 or 1 */
    SMB_FLOAT8_E4M3FN = 15,
    SMB_FLOAT8_E5M2 = 16
};

/* Element-wise operations of accumulate; b = buffer, a = array, s = scale, each step rounded to the
 * dtype (as numpy does):
 *   sum b + s*a         min minimum(b, s*a)   max maximum(b, s*a)
 *   prod b * (s*a)      replace s*a           elastic b + s*(a - b)
 *   band b & a          bor b | a             bxor b ^ a
 * Integers wrap modulo 2^bits; their scale is an integer. minimum and maximum propagate NaN. The
 * operations on bits are for integers and bool, with scale 1. */
enum smb_op {
    SMB_SUM = 1,
    SMB_MIN = 2,
    SMB_MAX = 3,
    SMB_PROD = 4,
    SMB_REPLACE = 5,
    SMB_ELASTIC = 6,
    SMB_BAND = 7,
    SMB_BOR = 8,
    SMB_BXOR = 9
};

/* Wire formats: how elements are encoded, and so rounded, on their way. All but the first and the
 * last are for float32 only. Elements are decoded before they are combined.
 *   bfloat16, float16  rounded to nearest, ties to even
 *   int8               blocks of SMB_WIRE_BLOCK elements (the last block may be shorter): the scale
 *                      s = (largest magnitude)/127 as a float32 (127 s is finite), then for each
 *                      element x the integer nearest to x/s (ties to even, at most 127 in
 *                      magnitude). It is decoded as that integer times s. All elements of a block
 *                      with an infinity or NaN arrive as NaN.
 *   int4               as int8, with blocks of SMB_WIRE_INT4_BLOCK, s = (largest magnitude)/7 and
 *                      integers of at most 7 in magnitude, two in a byte, the first one in the low
 *                      half
 *   sparse             any dtype; on the wire for ACCUMULATE only: some elements of the range, each
 *                      as its index in the range (uint32) and its value; indices ascend. Other
 *                      elements stay unchanged */
enum smb_wire {
    SMB_WIRE_EXACT = 0,
    SMB_WIRE_BFLOAT16 = 1,
    SMB_WIRE_FLOAT16 = 2,
    SMB_WIRE_INT8 = 3,
    SMB_WIRE_SPARSE = 4,
    SMB_WIRE_INT4 = 5
};
enum { SMB_WIRE_BLOCK = 256, SMB_WIRE_INT4_BLOCK = 64, SMB_WIRE_INDEX_BYTES = 4 };

/* An optimizer's step with weights b, gradient g and state m, v, all float32. With g' = scale*g +
 * weight_decay*b (without the last term if weight_decay is 0), each step below is rounded to
 * float32, from left to right:
 *   sgd       b - lr*g'
 *   momentum  m' = mu*m + g'; b - lr*m'
 *   nesterov  m' = mu*m + g'; b - lr*(g' + mu*m')
 *   adam      m' = beta1*m + (1 - beta1)*g'; v' = beta2*v + (1 - beta2)*(g'*g'); b - (lr/(1 -
 *             beta1^step)) * (m' / (sqrt(v')*(1/sqrt(1 - beta2^step)) + eps))
 *   adamw     the same with g' = scale*g, after b is multiplied by 1 - lr*weight_decay
 *   elastic   b + alpha*(g - b)
 * Terms without an element (1 - beta1, lr/(1 - beta1^step), ...) are computed in float64 and
 * rounded once. These are torch.optim's rules (dampening 0), Adam of Kingma and Ba 2015, decoupled
 * decay of Loshchilov and Hutter 2019. */
enum smb_rule {
    SMB_RULE_SGD = 1,
    SMB_RULE_MOMENTUM = 2,
    SMB_RULE_NESTEROV = 3,
    SMB_RULE_ADAM = 4,
    SMB_RULE_ADAMW = 5,
    SMB_RULE_ELASTIC = 6
};
enum { SMB_RULE_STATES_MAX = 2 };
/* The parameters of all rules. A rule ignores parameters that its formula above does not
 * contain. */
struct smb_hyper {
    double lr;
    double scale;
    double weight_decay;
    double mu;
    double beta1;
    double beta2;
    double eps;
    double step;
    double alpha;
};

/* A frame's operation. The number of a retired operation is never reused. */
enum smb_opcode {
    SMB_HELLO = 1,
    SMB_ATTACH = 2, /* Unix socket only: the reply carries the segment's file descriptor */
    SMB_READ = 3,
    SMB_WRITE = 4,
    SMB_ACCUMULATE = 5,
    SMB_FILL = 6,
    SMB_ACCUMULATE_FROM = 7, /* the source is another segment of the same server */
    SMB_FETCH_ADD = 8,
    SMB_COMPARE_SWAP = 9,
    /* the sequence number of the last change of this session and lane in the segment */
    SMB_WATERMARK = 10,
    /* Operations that may wait, on the home segment. Arguments and answers: sync/sync.h. */
    SMB_LOCK = 11,
    SMB_UNLOCK = 12,
    SMB_RENEW = 13,
    SMB_FENCE = 14,
    SMB_ARRIVE = 15,
    SMB_AWAIT_BARRIER = 16,
    SMB_AWAIT_VERSION = 17,
    SMB_PUBLISH = 18,
    SMB_PIN = 19,
    SMB_UNPIN = 20,
    /* an optimizer's step: changes the weights and the state; the gradient is in another segment or
     * in the request */
    SMB_APPLY = 21,
    /* shows a token of the coordinator: from here on the connection may use the token's segment */
    SMB_AUTHORIZE = 22,
    /* from a segment's primary to its backup: the segment's changes follow */
    SMB_REPLICATE = 23,
    SMB_REFUSED = 24, /* from primary to backup: a change was refused */
    /* from primary to backup: a part of a copy under way; `op` is of enum smb_copied */
    SMB_COPY = 25
};
enum smb_copied {
    SMB_COPIED_CHUNK = 0,    /* the bytes of a chunk */
    SMB_COPIED_RECORD = 1,   /* a completion record */
    SMB_COPIED_COUNTERS = 2, /* the counters of evicted records */
    SMB_COPIED_NOTE = 3,     /* a chunk that is still to be copied has changed */
    /* the words of locks and versions; sent at any time, without a sequence number */
    SMB_COPIED_WORDS = 4
};
enum { SMB_OPCODE_COUNT = 26, SMB_STATUS_COUNT = 33 };

/* Transports as counted in metrics. SHM: operations of local clients on their own mapping. UNIX:
 * frames over the local socket. VERBS: requests that pass the daemon's gate, without the reads and
 * writes that the network card does by itself. */
enum smb_transport {
    SMB_TRANSPORT_SHM = 0,
    SMB_TRANSPORT_TCP = 1,
    SMB_TRANSPORT_UNIX = 2,
    SMB_TRANSPORT_VERBS = 3
};
enum { SMB_TRANSPORT_COUNT = 4 };

/* Requests by reference (RDMA): only a record is sent, and the payload stays in the sender's memory
 * until the receiver fetches it. See base/frame.h. */
enum { SMB_RECORD_BYTES = 192 };

/* A histogram of durations. Bucket i counts durations of at most 2^(10 + i) ns that are in no
 * earlier bucket; the last bucket also counts all longer ones. */
enum { SMB_LATENCY_BUCKETS = 27 };
struct smb_latency {
    uint64_t buckets[27];
    uint64_t sum_ns;
};
/* By [transport][opcode]. */
struct smb_latencies {
    struct smb_latency of[4][26];
};

/* All limits of the engine's interface. */
enum {
    SMB_CHUNK_BYTES_MIN = 4096,       /* a page: mappings and stripes consist of pages */
    SMB_CHUNK_BYTES_MAX = 1048576,    /* bounds a connection's staging memory */
    SMB_CHUNK_BYTES_DEFAULT = 262144, /* measured: stays in L2, 3 times as fast as 4 MiB pieces */
    SMB_SEGMENTS_PER_BUFFER_MAX = 1024
};
enum { SMB_SOURCES_MAX = 5 }; /* most sources of one ACCUMULATE_FROM */
/* Each lane from this number on is for one segment with two copies. */
enum { SMB_LANE_OF_SEGMENTS = 256 };
/* The further lanes carry the same requests as lane 0, over more connections to the same server. */
enum { SMB_LANE_FURTHER = 16, SMB_LANES_FURTHER_MAX = 7 };

/* The rights of a session to a segment, given by a token. */
enum smb_right { SMB_RIGHT_READ = 1, SMB_RIGHT_WRITE = 2 };
enum { SMB_KEY_BYTES = 32, SMB_KEYS_MAX = 3 };
/* Why a server refused a token. Sent in the argument of the answer to AUTHORIZE; servers of older
 * versions send 0. GENERATION: the server does not know the key of that generation. PROOF: the
 * proof does not show that the coordinator made the token for this session and segment, or the
 * proof was made for another connection. UNBOUND, with SMB_VERSION: the client is of an older
 * version, whose proofs are not bound to a connection, so that whoever receives a proof could use
 * it. */
enum smb_denied {
    SMB_DENIED_GENERATION = 1,
    SMB_DENIED_PROOF = 2,
    SMB_DENIED_EXPIRED = 3,
    SMB_DENIED_UNBOUND = 4
};
/* A token, made by the coordinator for one session and one segment (channel/access.h). `secret` is
 * never sent on the data plane. */
struct smb_token {
    uint64_t segment;
    uint32_t epoch;
    uint32_t rights;
    uint32_t generation;
    uint64_t expires_ms; /* milliseconds since 1970, by the coordinator's clock */
    uint8_t secret[32];
};

/* A static string such as "not_found"; NULL for an unknown status. */
const char *smb_status_name(int status);

/* HMAC-SHA-256 (RFC 2104). */
void smb_hmac_sha256(const void *key, uint64_t key_bytes, const void *text, uint64_t bytes,
                     uint8_t mac[32]);
/* Bytes per element; 0 for an unknown dtype. */
uint32_t smb_dtype_bytes(int dtype);
/* 1 if FETCH_ADD and COMPARE_SWAP take elements of this dtype, else 0. */
int smb_dtype_is_atomic(int dtype);
/* 1 if op is defined for dtype with this scale, else 0. For integers with arithmetic the scale must
 * be integral and in the dtype's range. */
int smb_op_accepts(int dtype, int op, double scale);
/* The number of state arrays of a rule; -1 for an unknown rule. */
int smb_rule_states(int rule);
/* 1 if the rule's parameters are finite as float32, 0 <= beta1, beta2 < 1, eps >= 0, and step is a
 * whole number of at least 1; else 0. */
int smb_rule_accepts(int rule, const struct smb_hyper *hyper);
/* 1 for bfloat16, float16, int8 and int4, else 0. */
int smb_wire_is_dense(int wire);
/* Encoded size of `count` float32 elements; 0 for an unknown wire format. */
uint64_t smb_wire_bytes(int wire, uint64_t count);

/* A buffer of `bytes` is cut into stripes of `stripe_bytes`; stripe i lies on segment i modulo
 * segment_count. Inside a segment the stripes follow each other without gaps. stripe_bytes is a
 * multiple of chunk_bytes. */
struct smb_layout {
    uint64_t bytes;
    uint64_t stripe_bytes;
    uint32_t chunk_bytes;
    uint32_t segment_count;
};
struct smb_piece {
    uint32_t segment;
    uint64_t segment_offset;
    uint64_t buffer_offset;
    uint64_t bytes;
};

/* SMB_OK, or SMB_INVALID for a layout that breaks these rules or a limit. */
int smb_layout_check(const struct smb_layout *layout);
/* Bytes of the buffer that lie on one segment. */
uint64_t smb_layout_segment_bytes(const struct smb_layout *layout, uint32_t segment);
/* Finds the piece that starts at buffer_offset: as long as it is contiguous in its segment, at most
 * bytes_max. */
int smb_layout_piece(const struct smb_layout *layout, uint64_t buffer_offset, uint64_t bytes_max,
                     struct smb_piece *piece);

/* cffi: end */

#endif
