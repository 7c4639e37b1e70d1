/* types.h: the numbers and shapes that every part of the engine shares: statuses, element types,
 * operations, opcodes, limits, tokens, layouts; and what csrc/base answers about them.
 *
 * The headers of csrc/smb are the engine's public face, cut by reader, and all of it that Python
 * sees. Their functions are defined in the folder that is named beside:
 *   types, tls        base
 *   kernels, segment  memory
 *   server            server
 *   client            client
 *
 * Folders, each including only those above it in this list with their public headers, and never its
 * neighbour (tests/unit/engine/test_includes.py):
 *   base      frames, layout, tokens, TLS, clocks: no shared memory
 *   memory    segments: chunk locks, arithmetic, completion records, journal, what waits
 *   server, client   the daemon's loops, connections and its single door; a client's links and
 *                    calls
 *   python    the direct calls from Python's methods
 *
 * Conventions. Functions return enum smb_status as int (0 is success) unless said otherwise;
 * out-parameters come last and are written only on success. Every function may be called without
 * Python's lock. Sizes and offsets are bytes unless the name says `count` (elements) or `chunk`
 * (chunks). Nothing here calls back into Python.
 *
 * The part between the two marks is read by cffi as it stands, in the order of FACE in
 * csrc/build_engine.py: plain declarations only, no preprocessor.
 */
#ifndef SMB_PUBLIC_TYPES_H
#define SMB_PUBLIC_TYPES_H

#include <stdbool.h>
#include <stdint.h>

/* cffi: begin */

/* Numbers that travel in frames stand in csrc/protocol.toml, too: add them there first. */

/* Grouped by what is broken: nothing (0), the request (1..15), the link (16..31), this process or
 * host (32..). */
enum smb_status {
    SMB_OK = 0,
    SMB_NOT_FOUND = 1, /* no such segment here (deleted, or never was); nothing applied */
    /* the request contradicts the segment: bounds, dtype, op, alignment; nothing applied */
    SMB_INVALID = 2,
    /* the layout is older or newer than the segment; nothing applied; open the buffer again */
    SMB_STALE_EPOCH = 3,
    SMB_DENIED = 4,        /* no right; nothing applied */
    SMB_OUT_OF_MEMORY = 5, /* capacity or tmpfs exhausted; nothing left behind */
    SMB_EXISTS = 6,        /* that segment is there already */
    SMB_TIMEOUT = 7,       /* not done in time; outcome of what was sent unknown */
    SMB_BUSY = 8, /* chunk lock held by another; only from the try functions, never on the wire */
    SMB_LOCK_LOST = 9, /* that token is not the lock's any more; nothing applied */
    SMB_BROKEN = 10,   /* a party of the barrier died or gave up: this round is over for all */
    /* the record that would tell a repeated change from a new one is gone: outcome unknown */
    SMB_EVICTED = 11,
    SMB_SESSION_ENDED = 12, /* the session's lease ran out, or it was closed; nothing applied */
    SMB_DEFERRED = 13,      /* will be answered later; only inside the server, never on the wire */
    /* the request's source is not here, or has its primary elsewhere; nothing applied; bring it */
    SMB_APART = 14,
    /* the link was down before anything of this call was sent: not applied */
    SMB_DISCONNECTED = 16,
    SMB_LINK_LOST = 17, /* the link broke with in-flight requests: outcome unknown */
    SMB_PROTOCOL = 18,  /* the peer sent a frame that is none; the link is closed */
    SMB_VERSION = 19,   /* the peer speaks another version of the protocol */
    /* a checksum was wrong; the link gets another connection. Never on the wire */
    SMB_CHECKSUM = 20,
    /* the segment's server is in another PID namespace: nothing applied; reach it over a link.
     * Never on the wire */
    SMB_NAMESPACE = 21,
    /* the peer is not the expected one, or refuses us: no buffer's bytes went there. Never on the
     * wire */
    SMB_UNTRUSTED = 22,
    SMB_SYSTEM = 32 /* a system call failed: errno tells */
};

/* Element types. The numbers travel in frames and lie in segment headers: never reused. */
enum smb_dtype {
    SMB_FLOAT16 = 1,
    SMB_FLOAT32 = 2,
    SMB_FLOAT64 = 3,
    SMB_BFLOAT16 = 4,
    SMB_INT32 = 5,
    SMB_INT64 = 6,
    SMB_UINT8 = 7
};

/* Element-wise operations of accumulate; b = buffer, a = array, s = scale, each step rounded to the
 * dtype (as numpy does):
 *   sum b + s*a         min minimum(b, s*a)   max maximum(b, s*a)
 *   prod b * (s*a)      replace s*a           elastic b + s*(a - b)
 * Integers wrap modulo 2^bits; their scale is an integer. minimum and maximum propagate NaN. */
enum smb_op {
    SMB_SUM = 1,
    SMB_MIN = 2,
    SMB_MAX = 3,
    SMB_PROD = 4,
    SMB_REPLACE = 5,
    SMB_ELASTIC = 6
};

/* How elements travel and are rounded on the way; all but the first of float32 only, decoded before
 * they are combined.
 *   bfloat16, float16  to nearest, ties to even
 *   int8               blocks of SMB_WIRE_BLOCK elements, the last one shorter: s = (largest
 *                      magnitude)/127, a float32 (127 s is finite), then of each element x the
 *                      integer nearest to x/s (ties to even, at most 127 in magnitude); decoded:
 *                      that integer times s. A block with an infinity or NaN arrives as NaN, whole.
 *   int4               as int8, with blocks of SMB_WIRE_INT4_BLOCK, s = (largest magnitude)/7 and
 *                      integers of at most 7 in magnitude, two in a byte, the first one in the low
 *                      half
 *   sparse             of any dtype, ACCUMULATE only: some elements of the range, each its index in
 *                      it (uint32) and its value; indices ascend. The others stay as they are */
enum smb_wire {
    SMB_WIRE_EXACT = 0,
    SMB_WIRE_BFLOAT16 = 1,
    SMB_WIRE_FLOAT16 = 2,
    SMB_WIRE_INT8 = 3,
    SMB_WIRE_SPARSE = 4,
    SMB_WIRE_INT4 = 5
};
enum { SMB_WIRE_BLOCK = 256, SMB_WIRE_INT4_BLOCK = 64, SMB_WIRE_INDEX_BYTES = 4 };

/* An optimizer's step with weights b, a gradient g and its state m, v, all float32. With g' =
 * scale*g + weight_decay*b (the last term left out where weight_decay is 0), each step below
 * rounded to float32, from left to right:
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
/* A rule does not look at those that are not in its line. */
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

/* A frame's operation. Retired numbers are never reused. */
enum smb_opcode {
    SMB_HELLO = 1,
    SMB_ATTACH = 2, /* Unix socket only: the reply carries the segment's file descriptor */
    SMB_READ = 3,
    SMB_WRITE = 4,
    SMB_ACCUMULATE = 5,
    SMB_FILL = 6,
    SMB_ACCUMULATE_FROM = 7, /* source is another segment of the same server */
    SMB_FETCH_ADD = 8,
    SMB_COMPARE_SWAP = 9,
    SMB_WATERMARK = 10, /* the last change of this session and lane that the segment has */
    /* Operations that may wait, on the home segment; arguments and answers: sync.h. */
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
    /* an optimizer's step: changes the weights and its state, from another segment as the
     * gradient */
    SMB_APPLY = 21,
    /* shows a token of the coordinator's: the connection may use that segment from here on */
    SMB_AUTHORIZE = 22,
    /* from the primary of a segment to its backup: what follows are its changes */
    SMB_REPLICATE = 23,
    SMB_REFUSED = 24, /* so too: that change was refused */
    SMB_COPY = 25     /* so too: a part of a copy that is being made; `op` is of enum smb_copied */
};
enum smb_copied {
    SMB_COPIED_CHUNK = 0,    /* its bytes */
    SMB_COPIED_RECORD = 1,   /* a completion record */
    SMB_COPIED_COUNTERS = 2, /* of records that were evicted */
    SMB_COPIED_NOTE = 3,     /* a change was made to a chunk that will be copied */
    SMB_COPIED_WORDS = 4     /* of locks and versions; at any time: it has no number */
};
enum { SMB_OPCODE_COUNT = 26, SMB_STATUS_COUNT = 33 };

/* Transports as counted in metrics. SHM: done by local clients on their own mapping; UNIX: frames
 * over the local socket; VERBS: what passes the daemon's gate, and not what the network card reads
 * and writes by itself. */
enum smb_transport {
    SMB_TRANSPORT_SHM = 0,
    SMB_TRANSPORT_TCP = 1,
    SMB_TRANSPORT_UNIX = 2,
    SMB_TRANSPORT_VERBS = 3
};
enum { SMB_TRANSPORT_COUNT = 4 };

/* Requests by reference (RDMA): what travels is a record, the payload stays where it is until it is
 * fetched. See frame.h. */
enum { SMB_RECORD_BYTES = 192 };

/* How long something took: buckets of powers of two. Bucket i has what took at most 2^(10 + i) ns,
 * the last one what took longer. */
enum { SMB_LATENCY_BUCKETS = 27 };
struct smb_latency {
    uint64_t buckets[27];
    uint64_t sum_ns;
};
/* By [transport][opcode]. */
struct smb_latencies {
    struct smb_latency of[4][26];
};

/* Limits, in one place. */
enum {
    SMB_CHUNK_BYTES_MIN = 4096,       /* a page: mappings and stripes are made of pages */
    SMB_CHUNK_BYTES_MAX = 1048576,    /* bounds a connection's staging memory */
    SMB_CHUNK_BYTES_DEFAULT = 262144, /* measured: stays in L2, 3 times as fast as 4 MiB pieces */
    SMB_SEGMENTS_PER_BUFFER_MAX = 1024
};
enum { SMB_SOURCES_MAX = 5 }; /* of ACCUMULATE_FROM that sums several */
/* Lanes from here on are of one segment with two copies each. */
enum { SMB_LANE_OF_SEGMENTS = 256 };
/* These carry what lane 0 carries, over further connections to the same server. */
enum { SMB_LANE_FURTHER = 16, SMB_LANES_FURTHER_MAX = 7 };

/* A session's rights to a segment, by token. */
enum smb_right { SMB_RIGHT_READ = 1, SMB_RIGHT_WRITE = 2 };
enum { SMB_KEY_BYTES = 32, SMB_KEYS_MAX = 3 };
/* Why a token is not taken, in the argument of the answer to AUTHORIZE; 0: from a server that does
 * not tell. GENERATION: its key is not known there. PROOF: it does not prove that the coordinator
 * made it for this session and segment, or was made for another connection. UNBOUND, with
 * SMB_VERSION: a client of before, whose proofs are good for whoever hands them on. */
enum smb_denied {
    SMB_DENIED_GENERATION = 1,
    SMB_DENIED_PROOF = 2,
    SMB_DENIED_EXPIRED = 3,
    SMB_DENIED_UNBOUND = 4
};
/* Made by the coordinator for one session and one segment (access.h). `secret` never travels on the
 * data plane. */
struct smb_token {
    uint64_t segment;
    uint32_t epoch;
    uint32_t rights;
    uint32_t generation;
    uint64_t expires_ms; /* since 1970, by the coordinator's clock */
    uint8_t secret[32];
};

const char *smb_status_name(int status);

/* HMAC-SHA-256 (RFC 2104). */
void smb_hmac_sha256(const void *key, uint64_t key_bytes, const void *text, uint64_t bytes,
                     uint8_t mac[32]);
/* Bytes per element, 0 for a number that is no dtype. */
uint32_t smb_dtype_bytes(int dtype);
/* 1 if op is defined for dtype with this scale (integers: scale integral and in the dtype's
 * range), else 0. */
int smb_op_accepts(int dtype, int op, double scale);
/* How many state arrays a rule has; -1 for a number that is no rule. */
int smb_rule_states(int rule);
/* 1 if the rule's numbers are finite as float32, 0 <= beta1, beta2 < 1, eps >= 0, and step is
 * whole and at least 1. */
int smb_rule_accepts(int rule, const struct smb_hyper *hyper);
/* Whether it is one of bfloat16, float16, int8 and int4. */
int smb_wire_is_dense(int wire);
/* Bytes that count float32 elements take on the way; 0 for a number that is no enum smb_wire. */
uint64_t smb_wire_bytes(int wire, uint64_t count);

/* A buffer of `bytes` is cut into stripes of `stripe_bytes`; stripe i lives on segment i modulo
 * segment_count. Inside a segment its stripes follow each other without gaps. stripe_bytes is a
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

int smb_layout_check(const struct smb_layout *layout);
/* Bytes of the buffer that live on one segment. */
uint64_t smb_layout_segment_bytes(const struct smb_layout *layout, uint32_t segment);
/* The piece that starts at buffer_offset: as long as it is contiguous in the segment, at most
 * bytes_max. */
int smb_layout_piece(const struct smb_layout *layout, uint64_t buffer_offset, uint64_t bytes_max,
                     struct smb_piece *piece);

/* cffi: end */

#endif
