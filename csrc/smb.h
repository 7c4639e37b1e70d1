/* smb.h: the one public header of the engine, and all of it that Python sees.
 *
 * Folders, each including only those above it in this list, and never its neighbour
 * (tests/unit/engine/test_includes.py):
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
 * The part between the two marks is read by cffi as it stands: plain declarations only, no
 * preprocessor.
 */
#ifndef SMB_H
#define SMB_H

#include <stdbool.h>
#include <stdint.h>

/* cffi: begin */

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
/* Counts of one segment, or of one session. */
struct smb_share {
    uint64_t id;
    uint64_t operations[4][26];
    uint64_t bytes[4][26];
};

/* Limits, in one place. */
enum {
    SMB_CHUNK_BYTES_MIN = 4096,       /* a page: mappings and stripes are made of pages */
    SMB_CHUNK_BYTES_MAX = 1048576,    /* bounds a connection's staging memory */
    SMB_CHUNK_BYTES_DEFAULT = 262144, /* measured: stays in L2, 3 times as fast as 4 MiB pieces */
    SMB_SEGMENTS_PER_BUFFER_MAX = 1024
};

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

/* ---- kernels --------------------------------------------------------------------------------- */

/* HMAC-SHA-256 (RFC 2104). */
void smb_hmac_sha256(const void *key, uint64_t key_bytes, const void *text, uint64_t bytes,
                     uint8_t mac[32]);
/* Bytes per element, 0 for a number that is no dtype. */
uint32_t smb_dtype_bytes(int dtype);
/* 1 if op is defined for dtype with this scale (integers: scale integral and in the dtype's
 * range), else 0. */
int smb_op_accepts(int dtype, int op, double scale);
/* target[i] = op(target[i], source[i]) for count elements. Pointers need no alignment beyond the
 * element's. The two ranges may be the same but must not overlap otherwise. */
int smb_kernel_apply(int dtype, int op, void *target, const void *source, uint64_t count,
                     double scale);
/* How many state arrays a rule has; -1 for a number that is no rule. */
int smb_rule_states(int rule);
/* 1 if the rule's numbers are finite as float32, 0 <= beta1, beta2 < 1, eps >= 0, and step is
 * whole and at least 1. */
int smb_rule_accepts(int rule, const struct smb_hyper *hyper);
/* The rule for count elements. m and v are NULL if the rule has none; no two of the arrays
 * overlap. */
int smb_kernel_step(int rule, float *b, const float *g, float *m, float *v, uint64_t count,
                    const struct smb_hyper *hyper);
/* Whether it is one of bfloat16, float16, int8 and int4. */
int smb_wire_is_dense(int wire);
/* Bytes that count float32 elements take on the way; 0 for a number that is no enum smb_wire. */
uint64_t smb_wire_bytes(int wire, uint64_t count);
/* count float32 elements into smb_wire_bytes of them. `to` is aligned to 2 bytes. */
int smb_kernel_encode(int wire, const void *from, uint64_t count, void *to);
/* smb_kernel_apply for float32 with a source that is encoded: elements [first, first + count) of
 * it. */
int smb_kernel_apply_encoded(int wire, int op, void *target, const void *from, uint64_t first,
                             uint64_t count, double scale);
/* Gives count float32 elements at byte `offset` of a buffer the values that they arrive with. They
 * are rounded piece by piece, cut at multiples of chunk_bytes. `to` may be `from`. */
int smb_kernel_round(int wire, const void *from, uint64_t count, uint64_t offset,
                     uint32_t chunk_bytes, void *to);
/* Elements of one part of a delta at most. */
enum { SMB_DELTA_PART_MAX = 16777216 };
struct smb_delta {
    uint64_t bytes;   /* of the part; 0: nothing changed, there is none */
    uint64_t changes; /* elements */
    uint64_t sum;     /* what they add to the state's sum, modulo 2^64 */
};
/* Encodes one part of the delta from `old` to `fresh`: count elements of `width` bytes (1, 2, 4,
 * 8), whole 64-bit words. The first of them is element `first` of the state. `old` becomes `fresh`.
 * Bits are compared, not values. SMB_OUT_OF_MEMORY: it takes more than `room` bytes; `old` has
 * become it all the same. The format is in csrc/memory/delta.h. */
int smb_delta_encode(uint32_t width, void *old, const void *fresh, uint64_t count, uint64_t first,
                     void *to, uint64_t room, struct smb_delta *delta);
/* Applies a delta of any number of parts to a state of count elements, whole 64-bit words.
 * SMB_INVALID: it is none; the state may have changed. Any bytes are safe: nothing outside of the
 * state is touched. *sum becomes what it is by then. */
int smb_delta_apply(uint32_t width, void *state, uint64_t count, const void *delta, uint64_t bytes,
                    uint64_t *sum);
/* The sum of a state of so many 64-bit words. */
uint64_t smb_state_sum(const void *state, uint64_t words);
/* CRC-32C (Castagnoli) of bytes that follow those of which `crc` is it; 0 at first. */
uint32_t smb_crc32c(uint32_t crc, const void *data, uint64_t bytes);
/* Instruction sets compiled in and usable here, widest last. When the library loads, it takes the
 * one that SMB_ISA names; without SMB_ISA the fastest on this processor, as far as that was
 * measured. */
int smb_isa_count(void);
const char *smb_isa_name(int isa);
int smb_isa_current(void);
/* For tests: use another one from now on, in the whole process. */
int smb_isa_select(int isa);

/* ---- layout ---------------------------------------------------------------------------------- */

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

/* ---- segment --------------------------------------------------------------------------------- */

struct smb_segment;
struct smb_segment_info {
    uint64_t id;
    uint32_t epoch;
    uint32_t dtype;
    uint32_t chunk_bytes;
    uint64_t data_bytes;
    uint64_t file_bytes;
    uint32_t deleted;
    uint64_t recovered_locks;
};

/* File size of a segment that holds data_bytes, header and chunk table included; 0 on overflow or
 * bad arguments. This is what counts against a server's capacity. */
uint64_t smb_segment_file_bytes(uint64_t data_bytes, uint32_t chunk_bytes);
/* Creates the file (all pages allocated, zeroed), maps it. SMB_EXISTS, SMB_OUT_OF_MEMORY,
 * SMB_INVALID, SMB_SYSTEM. */
int smb_segment_create(const char *path, uint64_t id, uint32_t epoch, int dtype,
                       uint64_t data_bytes, uint32_t chunk_bytes, struct smb_segment **segment);
/* Maps an existing file; every field of its header is checked against the file's real size before
 * it is used. SMB_UNTRUSTED if it is not a file that this user alone can change. */
int smb_segment_open(const char *path, struct smb_segment **segment);
/* The same from a descriptor, which is duplicated, of a file that `owner` alone can change.
 * SMB_VERSION if another build's locks make sharing impossible, SMB_NAMESPACE if another PID
 * namespace than the server's does. */
int smb_segment_open_fd(int fd, uint32_t owner, struct smb_segment **segment);
/* Whether a client believes the listener of a Unix socket, which is of that user: its own user and
 * root. Not others as root either: it would take locks in memory that they can write to, and what
 * they put there in place of a lock's list is written through. */
bool smb_believes(uint32_t uid);
/* 0 once its server has been started in another PID namespace, or the segment may move to another
 * server, or was deleted: every operation gets SMB_NAMESPACE, SMB_STALE_EPOCH or SMB_NOT_FOUND. */
int smb_segment_is_shared(const struct smb_segment *segment);
/* It stays on its server for good: somebody uses it who could not follow. SMB_BUSY: it may move. */
int smb_segment_bind(struct smb_segment *segment);
/* Drops one reference; the last one unmaps. */
void smb_segment_release(struct smb_segment *segment);
void smb_segment_info(const struct smb_segment *segment, struct smb_segment_info *info);
void *smb_segment_data(struct smb_segment *segment);
/* The descriptor, owned by the segment; and where in the file the data starts (page aligned). */
int smb_segment_fd(const struct smb_segment *segment);
uint64_t smb_segment_data_offset(const struct smb_segment *segment);
/* The chunks' states, 64 bytes each: a reader from outside (RDMA) looks at the chunk's sequence
 * count before and after. It is a uint32_t at *sequence_at of each state, odd while the chunk
 * changes. */
const void *smb_segment_states(const struct smb_segment *segment, uint64_t *bytes,
                               uint32_t *sequence_at);
/* Of the buffer whose first segment this is: the copy in which a version lies (UINT64_MAX: the one
 * published last), -1 once it is being overwritten; and which was published last. */
int smb_segment_find_version(const struct smb_segment *segment, uint64_t sought,
                             uint64_t *published);
/* Marks it deleted: every later operation, from any process that maps it, gets SMB_NOT_FOUND. */
void smb_segment_mark_deleted(struct smb_segment *segment);
/* Adds what local clients have done on their own mapping to operations[opcode] and
 * bytes[opcode]. */
void smb_segment_counters(const struct smb_segment *segment, uint64_t *operations, uint64_t *bytes);

/* ---- TLS ------------------------------------------------------------------------------------- */

/* An authority's certificates, an own one with its chain, and its key. Counted references; it never
 * changes. */
struct smb_tls;
enum { SMB_WHY_BYTES = 400 };
/* Of texts in PEM form. SMB_INVALID: what they hold does not belong together; why[] says it. */
int smb_tls_create(const char *ca, const char *certificate, const char *key, struct smb_tls **tls,
                   char why[400]);
void smb_tls_release(struct smb_tls *tls);

enum { SMB_HOST_BYTES = 256, SMB_CERTIFICATE_BYTES = 32768 };
/* What a certificate is for. smb/security/roles.py says what each may. */
enum smb_role {
    SMB_ROLE_CLIENT = 1,
    SMB_ROLE_READER = 2,
    SMB_ROLE_OPERATOR = 4,
    SMB_ROLE_SERVER = 8,
    SMB_ROLE_COORDINATOR = 16
};
enum { SMB_ROLES_OF_DATA = 15 }; /* all but the coordinator: it has nothing to do with data */
/* As its certificate says. The name may be empty but of a memory server. */
struct smb_holder {
    char role[32];
    char name[256];
};
/* Judges a certificate that gRPC was shown, by the rules of the engine's own connections
 * (base/certificate.h). `chain`: PEM, the peer's own first. `host`: the name of whom we called, in
 * one of these roles; empty: it has called us. SMB_UNTRUSTED: why[] says what is wrong with it.
 * SMB_INVALID: too long. */
int smb_tls_judge(struct smb_tls *tls, const char *chain, uint32_t roles, const char *host,
                  struct smb_holder *holder, char why[400]);
/* Looks who serves the control plane at a numeric address, by a connection of its own, blocking up
 * to timeout_ms. SMB_OK: it is of that role and name; its certificate is in certificate[], as PEM.
 * Else, or if why[] is not empty (it does not take our certificate), why[] is the end of a sentence
 * about it, empty where the network is to blame. SMB_UNTRUSTED, SMB_DISCONNECTED, SMB_TIMEOUT. */
int smb_tls_meet(struct smb_tls *tls, const char *address, uint16_t port, uint32_t role,
                 const char *host, uint32_t timeout_ms, char certificate[32768], char why[400]);

/* ---- server ---------------------------------------------------------------------------------- */

struct smb_server;
struct smb_server_counters {
    /* [transport][opcode]; SHM sums the segments', deleted ones included */
    uint64_t operations[4][26];
    uint64_t bytes[4][26];
    uint64_t errors[33]; /* by status as answered, or as the reason to close a connection */
    uint64_t connections_opened[4];
    uint64_t connections_now[4];
    /* connections closed at once, as there was no descriptor left for them */
    uint64_t turned_away_total;
    uint64_t strangers_now;           /* that came over TCP, and have not shown yet who they are */
    uint64_t strangers_evicted_total; /* of them closed early, as too many others came */
    uint64_t deferred_now;            /* requests that wait for a chunk lock */
    uint64_t deferred_total;
    uint64_t waits_now;      /* requests deferred at locks, barriers and versions */
    uint64_t repeated_total; /* requests that were sent again after a connection broke */
    /* of them changes that had been made, and were answered without being made again */
    uint64_t replayed_total;
    uint64_t backlog_bytes; /* of answers that wait for their peers to read */
    uint64_t backlog_total; /* times that a connection had to wait for that */
    uint64_t journal_slots; /* in use: a connection that ever changed something has one */
    uint64_t journal_slots_most;
    uint64_t locks_granted; /* user's and publishers' alike */
    uint64_t locks_waited;  /* requests for them that had to wait */
    uint64_t locks_timed_out;
    uint64_t locks_expired; /* whose holder did not renew them */
    uint64_t locks_revoked; /* whose holder's session ended */
    uint64_t barriers_broken;
    uint64_t recovered_locks; /* chunk locks found held by a dead process */
    uint64_t segments;
    uint64_t segment_bytes; /* file bytes, as counted against the capacity */
};

/* `instance` identifies this run of the daemon in HELLO replies; loops >= 1 event-loop threads are
 * started. */
int smb_server_create(uint64_t instance, int loops, uint64_t capacity_bytes,
                      struct smb_server **server);
/* Listens; port 0 picks a free one, written to *bound_port. Address is numeric IPv4 or IPv6. */
int smb_server_listen_tcp(struct smb_server *server, const char *address, uint16_t port,
                          uint16_t *bound_port);
/* From here on TCP connections must speak TLS. They show a certificate of that authority, of a role
 * that uses data (tls.h). Again: for those that come from now on. Takes a reference. */
void smb_server_use_tls(struct smb_server *server, struct smb_tls *tls);
/* Only peers of the same uid, and root, are let in. The file takes the place of what was there, so
 * there is always one. It stays when the server is destroyed: clients see by it that a server's
 * memory is on this host, and the caller knows whether it still is. */
int smb_server_listen_unix(struct smb_server *server, const char *path);
/* Memory that a peer's payloads are put into from outside, and answers' data fetched from: `count`
 * places of SMB_CHUNK_BYTES_MAX, each page aligned, slots of the journal if there is one. All of it
 * is allocated. SMB_OUT_OF_MEMORY. Counted references: the last one gives them back, before the
 * server is destroyed, and when nobody outside can reach them any more. */
struct smb_slots;
int smb_server_take_slots(struct smb_server *server, uint32_t count, struct smb_slots **slots);
void *smb_slots_payload(const struct smb_slots *slots, uint32_t index);
void smb_slots_release(struct smb_slots *slots);
/* Serves one more peer, which sends records: its payloads are in these slots. Takes a reference to
 * them. fd is an end of a socketpair. The descriptor is closed with the connection, or at once
 * unless SMB_OK. The holder of the other end carries its bytes to a client, and has checked that
 * client. SMB_OUT_OF_MEMORY: there are as many connections as may be. */
int smb_server_adopt_reference(struct smb_server *server, int fd, struct smb_slots *slots);
/* A reference to a segment that is served, for smb_segment_release: as long as it is held the
 * segment's memory is not given back, though it be deleted. SMB_NOT_FOUND. */
int smb_server_hold_segment(struct smb_server *server, uint64_t id, struct smb_segment **segment);
/* Before it listens: from here on a connection may use no segment that it has shown no token
 * for. */
void smb_server_guard(struct smb_server *server);
/* The keys of so many generations of tokens, 1 to SMB_KEYS_MAX, in the place of all known before.
 * The coordinator has the same. now_ms: what its clock says, in milliseconds since 1970. That clock
 * may have been put back: no generation is older by its number. SMB_INVALID for another count. */
struct smb_key {
    uint32_t generation;
    uint8_t bytes[32];
};
int smb_server_set_keys(struct smb_server *server, uint32_t count, const struct smb_key *set,
                        uint64_t now_ms);
/* A client's proof on the control plane, for keys of RDMA: `shown->secret` is its proof (access.h),
 * and `bond` says whose certificate was shown there (smb/security/bond.py).
 * SMB_OK: the coordinator gave the session that token, and it is good for *left_ns from now.
 * SMB_DENIED; SMB_BUSY before a key is known. */
int smb_server_check_proof(struct smb_server *server, uint64_t session,
                           const struct smb_token *shown, const uint8_t bond[32],
                           uint64_t *left_ns);
/* Creates the segment's file at path and serves it. SMB_OUT_OF_MEMORY past the capacity, nothing is
 * left then. */
int smb_server_create_segment(struct smb_server *server, const char *path, uint64_t id,
                              uint32_t epoch, int dtype, uint64_t data_bytes, uint32_t chunk_bytes);
/* Serves a file left by an earlier run. */
int smb_server_adopt_segment(struct smb_server *server, const char *path,
                             struct smb_segment_info *info);
/* From here on additions are journalled in the file at path (made if it is not there), so that a
 * kill does not tear them. Call it when every segment of an earlier run is adopted and before the
 * server listens: it finishes what that run left half done. */
struct smb_recovery {
    uint64_t finished;     /* changes that were under way, and are made now */
    uint64_t torn_chunks;  /* whose journal is gone: element by element old or new */
    uint32_t journal_lost; /* what lay at path was no journal of ours */
};
int smb_server_open_journal(struct smb_server *server, const char *path,
                            struct smb_recovery *recovery);
/* Everything that the session holds here is given up: connections, locks, seats, pins, waits. It is
 * not let in again. */
void smb_server_end_session(struct smb_server *server, uint64_t session);
/* `all`: every session that ended before now, also during earlier runs, has been ended here. Until
 * this server forgets one of them, a session that is let in never lost a record because it had
 * ended. */
void smb_server_know_ended(struct smb_server *server, bool all);
/* Segments with two copies: docs/decisions/0025. */
enum { SMB_SERVER_NAME_BYTES = 65 /* a memory server's name, and its end */ };
enum smb_replica_role { SMB_REPLICA_NONE = 0, SMB_REPLICA_PRIMARY = 1, SMB_REPLICA_BACKUP = 2 };
/* Lanes from here on are of one such segment each. */
enum { SMB_LANE_OF_SEGMENTS = 256 };
/* These carry what lane 0 carries, over further connections to the same server. */
enum { SMB_LANE_FURTHER = 16, SMB_LANES_FURTHER_MAX = 7 };
struct smb_replica_status {
    uint64_t segment;
    uint64_t group; /* all that follows is of the group */
    uint32_t epoch;
    int role;
    bool paired;
    bool dialled;         /* primary: a connection to the backup was handed over, and is open */
    uint32_t broken_ms;   /* for how long the two have had no connection that works; 0: they have */
    uint64_t unconfirmed; /* changes */
    uint64_t queued_bytes;
    int refused; /* primary: the status with which the last connection ended; SMB_OK: none such */
};
/* As smb_server_create_segment, of one of them: nobody is let in until it has a role. `group`: it
 * moves with the segments that were made with this number, and has their role; 0: its own id.
 * SMB_INVALID: those are cut in another way, or are 16 already. */
int smb_server_create_replica(struct smb_server *server, const char *path, uint64_t id,
                              uint64_t group, uint32_t epoch, int dtype, uint64_t data_bytes,
                              uint32_t chunk_bytes);
/* Its role, and that of its group, from an epoch on; an older one than is known is left.
 * `paired`: the primary of a segment that has a backup, or (`copying`) one that gets it:
 * smb_server_copy. `peer`: the name of the server of the other copy; a guarded backup takes
 * changes from that server alone. A segment that has been made with one copy is gated: clients
 * that have it mapped get SMB_STALE_EPOCH, and all they do passes this server. SMB_INVALID: it
 * cannot have a backup without being copied, or stays (smb_server_bind), or the name is too
 * long. */
int smb_server_set_replica(struct smb_server *server, uint64_t id, uint32_t epoch, int role,
                           bool paired, bool copying, const char *peer);
/* Sends about so many bytes more to the new backup, for one of a group's members; of the others
 * it says how far they are. SMB_OK: *copied of *total bytes of this one went there so far.
 * SMB_BUSY: nothing can be sent now; waits a little before it says so. SMB_EXISTS: all is there
 * and confirmed. SMB_STALE_EPOCH: that copy is not wanted any more, or was given up. */
int smb_server_copy(struct smb_server *server, uint64_t id, uint32_t epoch, uint64_t bytes,
                    uint64_t *copied, uint64_t *total);
/* Goes on without the copy. SMB_STALE_EPOCH: there is none under way, or it is whole. */
int smb_server_abandon_copy(struct smb_server *server, uint64_t id, uint32_t epoch);
/* To the primary of that epoch: each read asks the backup from here on, whatever the lease says,
 * until the segment gets other roles. Once this has returned the backup may be promoted at any
 * moment. SMB_STALE_EPOCH: it is not the primary of a pair in that epoch. */
int smb_server_yield(struct smb_server *server, uint64_t id, uint32_t epoch);
/* A segment with one copy may be gated, and move, from here on: nobody gets a view of it any more.
 * SMB_BUSY: it stays. */
int smb_server_let_move(struct smb_server *server, uint64_t id);
/* The other way round: somebody uses it who could not follow. SMB_BUSY: it may move. */
int smb_server_bind(struct smb_server *server, uint64_t id);
/* Until when this server may take itself for the primary unasked: of CLOCK_BOOTTIME. */
void smb_server_serve_until(struct smb_server *server, uint64_t boot_ns);
/* To the primary: a connected stream socket to the backup's data address, which is the engine's
 * from here on, also if this fails; and that server's instance. With `tls` it goes inside TLS, to
 * the server whose certificate is for the name `expected`, and to no other. SMB_DENIED: a guarded
 * server feeds nobody without TLS. */
int smb_server_feed(struct smb_server *server, uint64_t id, uint32_t epoch, int fd,
                    uint64_t instance, struct smb_tls *tls, const char *expected);
/* What TLS had against the last connection of a segment's primary to its backup, as the end of a
 * sentence about the backup; empty: nothing. SMB_NOT_FOUND. */
int smb_server_feed_why(struct smb_server *server, uint64_t id, char why[400]);
/* Requests that wait for the backup are sent elsewhere. */
int smb_server_suspend(struct smb_server *server, uint64_t id);
/* Waits until roles or connections have changed since they were at `seen`; returns where they are
 * now. timeout_ms 0: for ever. */
uint64_t smb_server_await_replicas(struct smb_server *server, uint64_t seen, uint32_t timeout_ms);
/* Ends such a wait. */
void smb_server_wake_replicas(struct smb_server *server);
/* Whether a segment has all that its copies have. */
enum smb_copy {
    SMB_COPY_BEGUN = 0, /* it is being made from another one, or was to be */
    SMB_COPY_WHOLE = 1,
    SMB_COPY_UNKNOWN =
        2 /* the file is of an earlier version, or its daemon was killed right after making it */
};
/* A segment that is here, as its file says it. */
struct smb_held {
    uint64_t id;
    uint64_t file_bytes;
    uint32_t epoch; /* of its last role; of one without a role, in which it was made */
    uint32_t copy;  /* enum smb_copy */
    int role;       /* enum smb_replica_role, which this run was given */
};
/* Fills in at most `most`; returns how many there are. */
uint64_t smb_server_held(struct smb_server *server, struct smb_held *held, uint64_t most);
/* One of them. SMB_NOT_FOUND if it is not here. */
int smb_server_holds(struct smb_server *server, uint64_t id, struct smb_held *held);
/* Fills in at most `most`; returns how many there are. */
uint64_t smb_server_replicas(struct smb_server *server, struct smb_replica_status *replicas,
                             uint64_t most);
/* Marks it deleted, unlinks its file, stops serving it. SMB_NOT_FOUND if it is not here. */
int smb_server_delete_segment(struct smb_server *server, uint64_t id);
/* Nothing that waits is asked of it any more, also after a restart: such requests get
 * SMB_NOT_FOUND. Only if it is idle (sync.h's sync_retire); else SMB_BUSY. *token is the last one
 * of its lock. Repeating it is harmless. SMB_NOT_FOUND if it is not here. */
int smb_server_retire_segment(struct smb_server *server, uint64_t id, uint64_t idle_ms,
                              uint64_t *token);
/* The next token of its lock will be higher than this one, an even number (SMB_INVALID).
 * SMB_NOT_FOUND if it is not here. */
int smb_server_raise_token(struct smb_server *server, uint64_t id, uint64_t token);
void smb_server_counters(struct smb_server *server, struct smb_server_counters *counters);
/* From when a request was taken up until its answer was ready, by [transport][opcode]; of what
 * waits until it was answered. */
struct smb_latencies {
    struct smb_latency of[4][26];
};
void smb_server_latencies(struct smb_server *server, struct smb_latencies *latencies);
/* Counts for each segment (SHM: by local clients on their own mapping), and over the connections of
 * each session that has not ended. Writes at most `most`, in no order; returns how many. */
uint64_t smb_server_segment_shares(struct smb_server *server, struct smb_share *shares,
                                   uint64_t most);
uint64_t smb_server_session_shares(struct smb_server *server, struct smb_share *shares,
                                   uint64_t most);
/* Requests of one kind that were answered SMB_DENIED. `proven`: a token was shown of that session;
 * else anybody may have named it. */
struct smb_denial {
    uint64_t session;
    uint64_t segment;
    uint64_t count;
    uint32_t opcode;
    uint32_t proven;
};
/* Writes those since the last call, at most `most`, oldest kind first, and forgets all. Of many
 * kinds the first 64 are kept; *left_out counts the requests of all others. Returns how many. */
uint64_t smb_server_take_denials(struct smb_server *server, struct smb_denial *denials,
                                 uint64_t most, uint64_t *left_out);
/* Locks held, and waits, at one segment, now. */
enum smb_wait_kind {
    SMB_WAIT_LOCK = 0,
    SMB_WAIT_PUBLISHER = 1,
    SMB_WAIT_BARRIER = 2,
    SMB_WAIT_VERSION = 3
};
struct smb_wait {
    uint64_t segment;
    uint64_t session; /* of the holder of LOCK and PUBLISHER; 0: nobody holds it */
    uint64_t token;   /* of this holding */
    uint64_t left_ms; /* until it runs out, unless it is renewed */
    uint32_t kind;    /* enum smb_wait_kind */
    uint32_t waiting; /* requests */
    uint32_t arrived; /* at the barrier's round under way */
    uint32_t parties;
};
/* Writes those of all segments, at most `most`, in no order; returns how many there are, written or
 * not. */
uint64_t smb_server_waits(struct smb_server *server, struct smb_wait *waits, uint64_t most);
/* Stops the loops, closes every connection, unmaps (files stay, for the next run). */
void smb_server_destroy(struct smb_server *server);

/* ---- client ---------------------------------------------------------------------------------- */

struct smb_client;
struct smb_link;

int smb_client_create(uint64_t session, struct smb_client **client);
/* Before its first link is made: every frame of every link carries a checksum, in both
 * directions. */
void smb_client_use_checksums(struct smb_client *client);
/* Before its first link is made: servers are to prove, too, that they know what a token's secret is
 * made with. A connection carries nothing but HELLO and AUTHORIZE until its server has. */
void smb_client_want_proof(struct smb_client *client);
/* Answers that arrived spoilt, so far. Servers count requests that did. */
uint64_t smb_client_spoilt(struct smb_client *client);
/* Counts of this client since smb_client_count (before that nothing is counted, and nothing is lost
 * to counting). SHM: on its own mapping; TCP and UNIX: calls over links of that kind, counted once,
 * also if they took several frames or several servers. Latencies are of whole calls; of those
 * that took no wait at all one in 64 is timed, and stands for 64. */
struct smb_client_counters {
    uint64_t operations[4][26];
    uint64_t bytes[4][26];
    uint64_t failed[33];     /* calls, by status */
    uint64_t repeated_total; /* frames sent again after a connection broke */
    uint64_t spoilt_total;
    struct smb_latencies latencies;
};
void smb_client_count(struct smb_client *client);
void smb_client_counters(struct smb_client *client, struct smb_client_counters *counters);
/* Connects and shakes hands, blocking up to timeout_ms. The server answers with its instance. A
 * link is one lane of the session: to each server at most one link of a lane number at any time. */
int smb_client_connect_tcp(struct smb_client *client, const char *address, uint16_t port,
                           uint16_t lane, uint32_t timeout_ms, struct smb_link **link,
                           uint64_t *instance);
int smb_client_connect_unix(struct smb_client *client, const char *path, uint16_t lane,
                            uint32_t timeout_ms, struct smb_link **link, uint64_t *instance);
/* Over TCP inside TLS, to the memory server whose certificate is for the name `expected`.
 * SMB_UNTRUSTED: another name answers (why[] has it), or the server refuses us. */
int smb_client_connect_tls(struct smb_client *client, const char *address, uint16_t port,
                           struct smb_tls *tls, const char *expected, uint16_t lane,
                           uint32_t timeout_ms, struct smb_link **link, uint64_t *instance,
                           char why[400]);
/* Makes another link to the same server: a lane of its own, still without a connection. It gets one
 * as a link does whose connection broke, once a call needs one. The server must prove on it, if
 * ever, what it proved on the first. `follows`: an earlier link of the lane was closed, of which
 * something may still be on its way. Then calls wait until this one has a connection. */
int smb_link_beside(struct smb_link *link, uint16_t lane, int follows, struct smb_link **beside);
/* The shortest round trip that the kernel saw as the link got its first connection; 0: no TCP. */
uint32_t smb_link_round_trip_us(struct smb_link *link);
/* Asks a Unix link for a segment's descriptor and maps it. One thread at a time, and no buffer uses
 * the link for calls. SMB_UNTRUSTED as smb_buffer_set_link. */
int smb_link_attach(struct smb_link *link, uint64_t segment_id, uint32_t epoch, uint32_t timeout_ms,
                    struct smb_segment **segment);
/* Shows a token on the link's connection, blocking up to timeout_ms, and on every later one; in the
 * place of an older one of the same segment. SMB_DENIED: the server does not take it, and *why is
 * of enum smb_denied. SMB_UNTRUSTED: it does, but could not prove that it is the segment's server;
 * the link is closed. Not at the same time as smb_link_attach. */
int smb_link_authorize(struct smb_link *link, const struct smb_token *token, uint32_t timeout_ms,
                       uint64_t *why);
/* As smb_link_authorize, but shows it from the next connection on. For a link that is about to get
 * one. SMB_OUT_OF_MEMORY. */
int smb_link_keep_token(struct smb_link *link, const struct smb_token *token);
/* 1 unless it was closed, by either side of the library. One whose connection broke is alive: it is
 * waiting for another. */
int smb_link_alive(struct smb_link *link);
/* 1 while it has a connection, as far as is known. */
int smb_link_connected(struct smb_link *link);
uint64_t smb_link_id(struct smb_link *link);
void smb_link_close(struct smb_link *link);
/* Waits until some link has calls but no connection, and puts it into the caller's hands: resume
 * it, or let it go. SMB_TIMEOUT; SMB_DISCONNECTED once the client is closed. */
int smb_client_wait_down(struct smb_client *client, uint32_t timeout_ms, uint64_t *link_id);
/* Connects again, for a link that smb_client_wait_down named, blocking up to timeout_ms.
 * SMB_NOT_FOUND: another server, or one that lost its memory, answers there (`instance` is its;
 * with accept_instance equal to it, it is taken). SMB_SESSION_ENDED closes the link. The link stays
 * in the caller's hands unless SMB_OK. */
int smb_link_resume_tcp(struct smb_link *link, const char *address, uint16_t port,
                        uint64_t accept_instance, uint32_t timeout_ms, uint64_t *instance);
int smb_link_resume_unix(struct smb_link *link, const char *path, uint64_t accept_instance,
                         uint32_t timeout_ms, uint64_t *instance);
int smb_link_resume_tls(struct smb_link *link, const char *address, uint16_t port,
                        struct smb_tls *tls, const char *expected, uint64_t accept_instance,
                        uint32_t timeout_ms, uint64_t *instance, char why[400]);
/* On a stream socket that is connected already, an end of a socketpair: fd is closed with the link,
 * or at once unless SMB_OK. Requests travel as records. The holder of the other end moves payloads
 * and answers' data by the addresses in them. The engine takes the connection back by shutting down
 * its direction of the socket. It then waits until the other end is closed, which must not be
 * before all memory named in records is left alone. SMB_INVALID for a client with checksums. */
int smb_client_connect_reference(struct smb_client *client, int fd, uint16_t lane,
                                 uint32_t timeout_ms, struct smb_link **link, uint64_t *instance);
int smb_link_resume_reference(struct smb_link *link, int fd, uint64_t accept_instance,
                              uint32_t timeout_ms, uint64_t *instance);
/* It gets no other connection: once this one breaks, the link is closed, and its calls end. */
void smb_link_once(struct smb_link *link);
/* Out of the caller's hands, without a connection; 1 if it still wants one. */
int smb_link_let_go(struct smb_link *link);
/* Of a link for one segment that has two copies: its frames carry this epoch from its next
 * connection on. A server that does not serve the segment then costs the link its connection. */
void smb_link_set_epoch(struct smb_link *link, uint32_t epoch);
/* Ends every call on it with that status, and every later one. */
void smb_link_fail(struct smb_link *link, int status);
int smb_link_wanted(struct smb_link *link);
/* Wakes and fails every call in progress, with SMB_LINK_LOST if it had in-flight requests, and
 * every later one, with SMB_DISCONNECTED; connecting ends so, too, within 0.1 s. Local segments go
 * on working. */
void smb_client_close(struct smb_client *client);
/* Frees it. No call is in progress, no buffer or link of it will be used again. */
void smb_client_destroy(struct smb_client *client);

/* One request of those that wait, see sync.h for what the words mean. */
struct smb_ask {
    int opcode;
    uint64_t segment;
    uint32_t epoch;
    uint64_t argument;
    uint64_t words[6];
};
struct smb_reply {
    int status;
    int sent;
    uint64_t a;
    uint64_t b;
};
struct smb_pending;
/* Sends it; wait as often as you like: SMB_BUSY means not yet. The link's lane is one that is used
 * for nothing else. SMB_UNTRUSTED as smb_buffer_set_link, but for AUTHORIZE. */
int smb_ask_start(struct smb_link *link, const struct smb_ask *ask, struct smb_pending **pending);
int smb_ask_wait(struct smb_pending *pending, uint32_t timeout_ms, struct smb_reply *reply);
/* Frees it; one that is not answered yet is given up. */
void smb_ask_end(struct smb_pending *pending);

/* The outcomes of the parts of a failed call. */
struct smb_unknown;
enum smb_outcome_state {
    SMB_OUTCOME_PENDING = 0,
    SMB_OUTCOME_APPLIED = 1,
    SMB_OUTCOME_NOT_APPLIED = 2,
    SMB_OUTCOME_UNKNOWN = 3
};
/* Blocks until every part's outcome is known, at most timeout_ms: SMB_TIMEOUT. A part that is not
 * applied by then never will be. */
int smb_unknown_resolve(struct smb_client *client, struct smb_unknown *unknown,
                        uint32_t timeout_ms);
/* Once resolved. Part `index`, false past the last. */
bool smb_unknown_part(const struct smb_unknown *unknown, uint32_t index, uint64_t *offset,
                      uint32_t *bytes, int *state);
void smb_unknown_release(struct smb_unknown *unknown);

/* ---- transfer -------------------------------------------------------------------------------- */

struct smb_buffer;

int smb_buffer_create(struct smb_client *client, const struct smb_layout *layout, int dtype,
                      struct smb_buffer **buffer);
/* Sets how segment `index` is reached: over a link, or through a local mapping (a reference is
 * taken). Set before the first call; after a reconnect make another smb_buffer, and destroy this
 * one when no call uses it any more. SMB_UNTRUSTED: the client wants proof and the link's server
 * has given none (smb_link_authorize), so nothing may be sent there. */
int smb_buffer_set_link(struct smb_buffer *buffer, uint32_t index, uint64_t segment_id,
                        uint32_t epoch, struct smb_link *link);
/* One more lane to the server of a segment whose first link is set. A call's chunks take the lanes
 * that have room. While something is on its way that a caller gave up, on one of them, nothing is
 * sent over any: that may not come later. SMB_INVALID past 1 + SMB_LANES_FURTHER_MAX; SMB_UNTRUSTED
 * as smb_buffer_set_link. */
int smb_buffer_add_lane(struct smb_buffer *buffer, uint32_t index, struct smb_link *link);
int smb_buffer_set_local(struct smb_buffer *buffer, uint32_t index, struct smb_segment *segment);
void smb_buffer_destroy(struct smb_buffer *buffer);

enum { SMB_SOURCES_MAX = 5 };

/* One call. Range in bytes of the buffer, both multiples of the element size.
 *   READ            sink
 *   WRITE           source
 *   ACCUMULATE      source, op, scale; sink too if the new values are wanted
 *   FILL            argument: the element's bits in its low bytes
 *   ACCUMULATE_FROM other: a buffer with equal layout on the same servers. Or op SMB_REPLACE, scale
 *                   1 and several sources: the sum of each times its scale, added from the first on
 *   FETCH_ADD       8 bytes; argument: what to add; outcome.result: the old value
 *   COMPARE_SWAP    8 bytes; argument: new, expected: expected; outcome.result: the old value
 *   APPLY           op: the rule; hyper; other: the gradient, or source: its elements; states: as
 *                   many as the rule has; all of equal layout on the same servers and no buffer
 *                   twice; every segment of each is reached over a link */
struct smb_request {
    int opcode;
    int op;
    double scale;
    uint64_t offset;
    uint64_t bytes;
    const void *source;
    void *sink;
    uint64_t argument;
    uint64_t expected;
    struct smb_buffer *other;
    /* of ACCUMULATE_FROM, source_count > 0: in place of `other` and `wire` */
    struct smb_buffer *sources[SMB_SOURCES_MAX];
    double scales[SMB_SOURCES_MAX];
    int wires[SMB_SOURCES_MAX];
    uint32_t source_count;
    struct smb_buffer *states[2];
    struct smb_hyper hyper;
    /* of a lock of this buffer, if fenced: all segments are reached over links then */
    uint64_t token;
    bool fenced;
    /* of SMB_WIRE_SPARSE: elements of the buffer, ascending, `count` of them, whose values are in
     * source; */
    const int64_t *indices;
    uint64_t count; /* offset and bytes are from the first to the last. No sink */
    /* enum smb_wire; READ, WRITE, ACCUMULATE and the source of ACCUMULATE_FROM, of float32: each
     * piece is rounded so, also if it is local. The new values that an ACCUMULATE fetches are
     * exact */
    int wire;
    uint32_t timeout_ms;
};
struct smb_outcome {
    int status;             /* SMB_OK, or the first failure */
    uint32_t segment;       /* index of the segment where it happened */
    uint64_t result;        /* FETCH_ADD, COMPARE_SWAP */
    uint64_t bytes_applied; /* acknowledged or done locally */
    /* 1 if any frame of this call may have reached a server or a local segment was changed */
    int sent;
    /* the caller's to release, or NULL: parts of a change that are not confirmed */
    struct smb_unknown *unknown;
};

/* Whether the caller wants a blocking call of this thread to end: asked every 100 ms or so by calls
 * that move data, settle or connect, while they hold nothing. Nonzero, from then on until the call
 * has returned: it ends as if its time was over. Set once, before the first call; may call the
 * engine. */
void smb_set_look(int (*look)(void));

/* Blocks until every piece is answered, failed, or timeout_ms passed. All servers of the range work
 * at once: frames are sent to all of them before the first answer is awaited, local pieces are done
 * in between. Returns outcome->status. */
int smb_transfer(struct smb_buffer *buffer, const struct smb_request *request,
                 struct smb_outcome *outcome);
/* 1: done, without waiting for anything, not even spinning: a call within one chunk that this
 * process has mapped and whose lock is free, in the time of its copy. 0: nothing was done. */
int smb_transfer_at_once(struct smb_buffer *buffer, const struct smb_request *request,
                         struct smb_outcome *outcome);
/* The same as smb_transfer for calls that are neither fenced nor from another buffer: handing
 * numbers over is cheaper for Python than filling a structure in. */
int smb_call(struct smb_buffer *buffer, int opcode, uint64_t offset, uint64_t bytes,
             const void *source, void *sink, int op, double scale, uint64_t argument,
             uint64_t expected, uint32_t timeout_ms, struct smb_outcome *outcome);

/* ---- async operations ------------------------------------------------------------------------ */

/* A client's async operations: see csrc/client/async.h. Operations of all windows that conflict
 * (overlap, and one changes the buffer) take effect in the order of their submission. */
struct smb_async;
/* How many bytes of its operations may be in flight. */
struct smb_window;
struct smb_operation;

int smb_async_create(struct smb_client *client, struct smb_async **async);
/* Once nothing is left of it: waits for its thread. Nothing in a child of fork. */
void smb_async_destroy(struct smb_async *async);
/* Credit in bytes; 0: measured. counts_calls: credit is a number of operations instead. */
int smb_window_create(struct smb_async *async, uint64_t credit, bool counts_calls,
                      struct smb_window **window);
uint64_t smb_window_credit(struct smb_window *window);
/* No operation of it is known any more. */
void smb_window_destroy(struct smb_window *window);
/* READ, WRITE or ACCUMULATE as smb_transfer, whose timeout counts for each part from when it
 * begins; `key` is the buffer's number, the same for all its handles, and a larger priority goes
 * first. Buffer NULL: a call of the caller's, of which the range is known and whether it changes
 * it (opcode). SMB_INVALID: unsound, or of memory that is a view of the buffer; smb_transfer does
 * or refuses it. SMB_DISCONNECTED: stopped. SMB_BUSY: too many. */
int smb_async_submit(struct smb_async *async, struct smb_window *window, struct smb_buffer *buffer,
                     int opcode, uint64_t offset, uint64_t bytes, const void *source, void *sink,
                     int op, double scale, int wire, uint64_t token, uint32_t timeout_ms,
                     uint64_t key, int priority, uint64_t tag);
enum smb_async_event_kind {
    SMB_ASYNC_DONE = 0,   /* the operation is no more */
    SMB_ASYNC_FAILED = 1, /* the caller may go on with it; then smb_async_end */
    SMB_ASYNC_BEGIN = 2,  /* the caller's call: it is its turn; then smb_async_end */
    /* by smb_async_stop, before it began; then smb_async_end */
    SMB_ASYNC_CANCELLED = 3
};
struct smb_async_event {
    struct smb_operation *operation;
    uint64_t tag;               /* as submitted */
    int what;                   /* enum smb_async_event_kind */
    struct smb_outcome outcome; /* the caller's, as after smb_transfer */
};
/* Waits until there is something to be taken: 1; 0 after timeout_ms. */
int smb_async_await_event(struct smb_async *async, uint32_t timeout_ms);
/* Takes events, the oldest first; returns how many. Does not block. */
uint32_t smb_async_take(struct smb_async *async, struct smb_async_event *events, uint32_t most);
/* Of an event that was taken, other than DONE: its turn is over. */
void smb_async_end(struct smb_async *async, struct smb_operation *operation);
/* 1: the operation of that tag had not begun, and is no more. 0: it has, or there is none. */
int smb_async_cancel(struct smb_async *async, uint64_t tag);
/* Waits until no earlier operation conflicts with a call on that range: SMB_TIMEOUT. *last: 0, and
 * then the last of the earlier ones: who waits again waits for the same. */
int smb_async_wait(struct smb_async *async, uint64_t key, uint64_t offset, uint64_t bytes,
                   bool changes, uint32_t timeout_ms, uint64_t *last);
/* Cancels what has not begun; nothing is submitted any more. */
void smb_async_stop(struct smb_async *async);

/* A contiguous view of a buffer all of whose segments are local: stripes mapped side by side. bytes
 * = the layout's, rounded up to pages. SMB_INVALID if a segment is not local. SMB_BUSY if one may
 * move to another server: a view could not follow. */
int smb_buffer_map(struct smb_buffer *buffer, void **address, uint64_t *bytes);
void smb_buffer_unmap(void *address, uint64_t bytes);

/* cffi: end */

#endif
