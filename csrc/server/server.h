/* server.h: the daemon's inside: registry of segments, event loops, connections.
 *
 * Threads. One loop thread owns each connection from accept to close; nothing else touches it. The control threads (Python)
 * change the registry, under its read-write lock. One thread does what time demands of locks and barriers (waits.c). Counters
 * are relaxed atomics.
 * Locks: the registry's and a chunk's are never held together.
 *
 * Two ways to wait. A change that finds its chunk's lock taken (by a stopped process) holds up its connection: the changes of a lane
 * are made in order (journal and watermark rely on it), so the connection keeps the request, stops reading, and is tried
 * again by its loop. What waits by nature (locks, barriers, versions) is taken off the connection as a struct wait,
 * and answered when its time has come; the connection goes on meanwhile.
 */
#ifndef SMB_SERVER_H
#define SMB_SERVER_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/channel.h"
#include "base/clock.h"
#include "base/frame.h"
#include "base/stats.h"
#include "base/tree.h"
#include "memory/journal.h"
#include "memory/segment.h"
#include "server/grants.h"

enum {
    CONNECTIONS_MAX = 4096,       /* each may hold 2 chunks of staging memory */
    HELLO_DEADLINE_MS = 5000,     /* a silent stranger is closed */
    STRANGERS_MAX = 512,          /* at once: about 10 KiB each, and 40 with a TLS handshake under way */
    ACCEPTS_PER_TURN = 4,         /* then the loop's connections have their turn */
    IN_BYTES = 4096,              /* headers arrive in bursts of up to 64 */
    OUT_BYTES = 4096,             /* as do small replies, each of up to: */
    SMALL_REPLY_BYTES = SMB_FRAME_BYTES + SMB_CHECKSUM_BYTES,
    FRAMES_PER_TURN = 32,         /* then the next connection of the loop has its turn */
    BULK_BYTES = 32768,           /* a request of this size is worth a system call for its answer: */
    READS_PER_SEND = 4,           /* chunks whose locks one answer holds */
    REPLIES_HELD_MAX = 4,         /* at least every so many of them answers are sent */
    PARKED_RETRY_MS = 1,
    WAITS_PER_CONNECTION = 4096,  /* for locks, barriers, versions: one for each thread of a client; each is memory */
    LOOPS_MAX = 64
};

struct listener;

struct entry {                    /* of the registry: an open hash table, chained */
    struct entry *next;
    struct smb_segment *segment;
    char *path;
};
enum { BUCKETS = 4096, LISTENERS_MAX = 4 };

/* What was done for a segment by one loop: it makes it at the first request, and nobody else writes it. */
struct share {
    struct smb_tally done[SMB_TRANSPORT_COUNT];
};

/* What the daemon keeps beside a segment that it serves. */
struct served {
    struct smb_server *server;
    struct share *_Atomic *shares; /* by loop; NULL until its first request. Release when made, acquire by who reads */
    struct smb_segment *segment;
    struct records *records;
    struct sync *sync;
    bool closed;                  /* due_lock: it never becomes due again */
    uint64_t due_ns;              /* of sync_tick; in the server's tree if not UINT64_MAX */
    struct tree_node by_due;
};

struct stranger_source {
    uint8_t bytes[8];
};
struct stranger_count {
    struct stranger_source source;
    uint32_t now;                 /* 0: a free place */
};
/* Loop 0's, but for `now`, which others may read. */
struct strangers {
    struct stranger_count counts[STRANGERS_MAX];
    struct connection *oldest, *newest;
    _Atomic uint64_t now;
};

enum { ENDED_MAX = 65536 };       /* sessions remembered as ended, a power of two; the oldest are forgotten */

/* What a session's closed connections had done: it goes on counting when it connects again. */
struct past {
    struct past *next;
    struct smb_share share;
};
enum { PASTS_MAX = 4096 };        /* a session without one counts from its next connection on */

struct smb_server {
    uint64_t instance;
    uint64_t capacity_bytes;
    bool guarded;                 /* from before it listens: tokens are asked for */
    struct access_keys keys;
    struct journal *journal;      /* NULL: changes are made without one */
    pthread_mutex_t ended_lock;
    uint64_t *ended;              /* a ring */
    uint64_t ended_count;
    _Atomic bool ended_are_known; /* the coordinator has told, once, of all that have */
    /* waits.c: one thread */
    pthread_mutex_t due_lock;
    pthread_cond_t due_changed;
    struct tree due;                    /* segments, by when time demands something of them */
    uint64_t due_weights;
    pthread_t ticker;
    bool ticking;
    bool stop_ticking;
    pthread_rwlock_t registry_lock;
    struct entry *buckets[BUCKETS];
    uint64_t segments;
    uint64_t used_bytes;          /* file bytes, those being created included */
    uint64_t retired_operations[SMB_OPCODE_COUNT]; /* of deleted segments' local clients */
    uint64_t retired_bytes[SMB_OPCODE_COUNT];
    uint64_t retired_recovered_locks;
    int loop_count;
    struct loop *loops;
    _Atomic uint32_t next_loop;
    struct listener *listeners[LISTENERS_MAX];
    char *unix_path;
    int spare_fd;                 /* given up to turn a peer away when there is no descriptor left */
    _Atomic uint64_t errors[SMB_STATUS_COUNT];
    _Atomic uint64_t opened[SMB_TRANSPORT_COUNT];
    _Atomic uint64_t now[SMB_TRANSPORT_COUNT];
    _Atomic uint64_t turned_away;
    struct strangers strangers;
    _Atomic uint64_t strangers_evicted;
    pthread_mutex_t tls_lock;
    struct smb_tls *tls;                /* tls_lock. What new connections over TCP speak; NULL: no TLS */
    _Atomic uint64_t parked_now;
    _Atomic uint64_t parked_total;
    _Atomic uint64_t waits_now;
    _Atomic uint64_t replayed_total;
    struct sync_counters waited;        /* of all segments */
    pthread_mutex_t lanes_lock;         /* before a connection's `turn` */
    struct connection *lanes;
    struct past *pasts;                 /* lanes_lock */
    uint32_t past_count;
};

struct loop {
    _Alignas(64) struct loop_stats stats; /* on cache lines of its own */
    struct smb_server *server;
    int index;
    uint64_t clock_ns;            /* when this loop last looked: a request taken up now begins then */
    pthread_t thread;
    bool running;
    int epoll;
    int wake;                     /* eventfd: new connections, stop */
    _Atomic bool stop;
    pthread_mutex_t inbox_lock;
    struct connection *inbox;     /* accepted by another loop, to be taken over by this one */
    struct connection *connections;
    struct connection *again;     /* had their turn but have more in hand */
    struct connection *parked;
    _Atomic bool sweep;           /* some connection of the loop was fenced from outside: close it */
    pthread_mutex_t answers_lock;
    struct wait *answers;         /* whose answers came, newest first */
    uint32_t not_greeted;
    bool bulk;                    /* much was moved since it last waited: what comes next takes a while */
};

/* ---- registry (registry.c) */
/* A reference, or NULL. */
struct smb_segment *server_find(struct smb_server *server, uint64_t id);
/* Every segment served now, outside of the registry's lock. SMB_OUT_OF_MEMORY: none. */
int server_each_segment(struct smb_server *server, void (*visit)(void *argument, struct smb_segment *segment), void *argument);
/* Gives all references up; the files stay. The loops have stopped. */
void registry_clear(struct smb_server *server);

static inline void server_count(_Atomic uint64_t *counter, uint64_t by)
{
    atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

static inline struct served *served_of(const struct smb_segment *segment)
{
    return smb_segment_companion(segment);
}

/* ---- gate (gate.c): the single door. Every data request, read or write, over every transport, passes here. */
struct gate_request {
    struct smb_frame frame;
    struct smb_segment *segment;  /* a reference while the request is in hand */
    struct smb_segment *others[SMB_APPLY_SEGMENTS]; /* references too. ACCUMULATE_FROM: the source; APPLY: gradient, then state */
    struct record *record;        /* of the change's lane, while it is carried out */
    uint32_t record_hint;
    const struct grants *grants;  /* what its connection has shown; not looked at unless the server is guarded */
    bool retried;                 /* was parked before */
};
/* Right to it, segment there, epoch, dtype and bounds right. Takes the reference. Once before the payload is received, to know whether it
 * is wanted; once more when it is all here. */
int gate_admit(struct smb_server *server, const struct smb_frame *frame, struct gate_request *request);
/* With the payload in hand: do the change, unless it was done before. `payload` is the frame's, without the token, which lies before it;
 * `slot` the journal's, whose payload it is, or NULL; `scratch` and `sink` a chunk's worth of memory for the source's bytes and
 * the new values, or NULL. SMB_BUSY: park it. The old value of the 64-bit operations goes to *result. */
int gate_execute(struct smb_server *server, struct gate_request *request, const struct slot *slot, const uint8_t *payload,
                 uint8_t *scratch, uint8_t *sink, uint64_t *result);
/* The range as it was at one instant, copied without its chunk's lock unless changes follow each other without end. SMB_BUSY:
 * park it. For what gate_open found locked. */
int gate_copy(const struct gate_request *request, uint8_t *to);
/* The other way to do it: the range itself, under its chunk's lock, for the socket to be sent from or received into. Not to
 * be held while anything is waited for. SMB_BUSY: park it, or go another way (for a read, the lock is tried once); SMB_EXISTS: this
 * change was made before. */
int gate_open(struct gate_request *request, bool to_change, uint8_t **place);
/* `done`: the change was made, whole. */
void gate_close(struct gate_request *request, bool to_change, bool done);
/* How far the frame's lane has come on its segment, and up to where some changes were refused. */
int gate_watermark(struct gate_request *request, uint64_t *watermark, uint64_t *refused);
/* A change is answered with a failure: a later one of the lane must not make it look applied. Who has no right to change
 * the segment leaves no trace there. */
void gate_refused(struct smb_server *server, const struct gate_request *refused);
void gate_done(struct gate_request *request);

/* ---- waits (waits.c): what waits by nature. */
struct wait {
    struct waiter waiter;
    struct wait *next, *previous;     /* of the connection's; loop thread only */
    struct wait *next_answer;
    struct loop *loop;
    struct connection *connection;    /* NULL: gone */
    struct smb_segment *segment;      /* a reference: sync and words stay */
    struct smb_frame frame;
    struct sync_answer answer;
    uint64_t begun_ns;
};
/* Gives a segment what it needs to be served; before it can be found. `left`: of an earlier run. */
int waits_serve(struct smb_server *server, struct smb_segment *segment, bool left);
/* It is deleted, or the daemon stops: everyone who waits there is told. Before the registry's reference goes. */
void waits_close(struct smb_segment *segment, int status);
int waits_start(struct smb_server *server);
void waits_stop(struct smb_server *server);
/* SMB_PARKED: the connection has one wait more; anything else is the answer. */
int waits_ask(struct connection *connection, struct gate_request *request, const uint8_t *payload, struct sync_answer *answer);
/* The connection's waits are taken back. */
void waits_forget(struct connection *connection);
void wait_free(struct wait *wait);
bool session_has_ended(struct smb_server *server, uint64_t session);
/* ---- counts (counters.c) */
/* By the loop's thread: a request of the connection is answered, in that time. `segment` may be NULL. */
void count_request(struct connection *connection, struct smb_segment *segment, int opcode, uint64_t bytes, uint64_t ns);
/* With the lanes' lock held: what the connection did stays known, as the session's. */
void count_past(struct smb_server *server, const struct connection *connection);
/* The session is over, and nobody asks for what it did. */
void forget_past(struct smb_server *server, uint64_t session);
/* Wakes a loop, from any thread. */
void loop_wake(struct loop *loop);

/* ---- connection (connection.c): one peer; called by its loop only. */
struct connection *connection_create(struct loop *loop, int fd, int transport);
void slots_retain(struct smb_slots *slots);
/* One of them; NULL where there is no such. */
const struct slot *slots_at(const struct smb_slots *slots, uint64_t index);
/* Reads, executes, answers until nothing more can be done now. false: close it. */
bool connection_turn(struct connection *connection);
void connection_destroy(struct connection *connection);
/* TCP's: it is a stranger until it has proved itself, in loop 0. With `tls`, which it keeps a reference to, inside TLS. */
void connection_be_stranger(struct connection *connection, struct smb_tls *tls);
/* It has nothing in hand: another loop may take it over. */
bool connection_is_empty(const struct connection *connection);
/* It has not shown for too long who it is. `now_ns` may be from before it came: others let it in. */
bool connection_is_silent(const struct connection *connection, uint64_t now_ns);
/* One of its waits is answered: the answer goes out at its next turn. */
void connection_take_answer(struct connection *connection, struct wait *wait);

/* ---- strangers (strangers.c): loop 0 only */
/* There are fewer than STRANGERS_MAX. */
void strangers_enter(struct connection *connection);
/* No harm where it is none. */
void strangers_leave(struct connection *connection);
bool strangers_are_many(const struct smb_server *server);
/* The one to go; NULL: there are none. */
struct connection *strangers_least(struct smb_server *server);

/* ---- lanes (lanes.c) */
/* From here on this connection speaks for its lane. An older one may still have requests in its socket that its client gave
 * up: carried out now, they would undo what the client does next. So it is fenced, and a request of it that is being carried
 * out is waited for (microseconds: nothing waits there), before the client hears that it may go on. */
void lanes_enter(struct connection *connection);
void lanes_leave(struct connection *connection);
/* No connection of the session does anything any more; their loops close them. */
void lanes_fence_session(struct smb_server *server, uint64_t session);

enum connection_wait { WAIT_INPUT, WAIT_OUTPUT, WAIT_TURN, WAIT_PARKED };

struct connection {
    struct connection *next, *previous; /* all of the loop */
    struct connection *link;            /* inbox, again or parked list */
    struct loop *loop;                  /* changed, by it, with the lanes' lock held */
    struct loop *destination;           /* so too. Set by HELLO: it is to be served there, where its lane has fewer connections */
    struct channel channel;
    struct smb_tls *secures;            /* a reference: a TLS handshake is to be done, or under way. Else NULL */
    struct stranger_count *counted_at;  /* NULL: no stranger */
    struct connection *older, *newer;   /* of the strangers */
    int transport;
    enum connection_wait wait;
    uint32_t armed;                     /* epoll events asked for now */
    bool in_list;                       /* linked in `again` or `parked` */
    bool counted_parked;                /* since the request in hand was parked for the first time */
    bool retried;                       /* the request in hand was parked before */
    bool from_kept;                     /* its payload, of ACCUMULATE_FROM or APPLY, is in `from` */
    bool greeted;
    bool proven;                        /* it speaks for its session: greeted, and a token of it shown where tokens are asked for */
    bool checksums;                     /* its HELLO had one: so has every frame */
    uint64_t session;
    uint16_t lane;
    uint64_t nonce;                     /* what it was given to prove tokens with */
    uint64_t client_nonce;              /* what we are to prove with that we know their secret */
    struct grants grants;
    _Atomic bool fenced;                /* a newer connection speaks for this lane: nothing of this one may be done any more */
    pthread_mutex_t turn;               /* held while a request is carried out; taken by whoever fences, to wait for its end */
    struct connection *lane_next;       /* of the server's greeted connections */
    uint64_t opened_ns;
    struct smb_tally done;
    uint64_t begun_ns;                  /* the request in hand */
    uint64_t backlog_bytes;             /* as counted in its loop */

    /* the request in hand */
    bool have_request;
    int admitted;                       /* status of gate_admit: not OK means drain the payload, then answer that */
    struct gate_request request;
    uint32_t payload_have;
    uint32_t crc;                       /* of what has arrived of it, if it has a checksum */
    uint8_t checksum[SMB_CHECKSUM_BYTES];

    uint32_t in_start, in_end;          /* received, not yet parsed */
    bool drained;                       /* the last look at the socket took all that was there */
    uint32_t out_start, out_end;        /* small replies to be sent */
    uint32_t replies_held;
    uint32_t tail_start, tail_end;      /* what is left of a chunk being sent, in `tail` */
    uint8_t *staging;                   /* one chunk: payload on its way in; the 8 bytes before it are for a token */
    struct slot slot;                   /* where staging lies, if there is a journal */
    uint8_t *own_staging;               /* else */
    struct smb_slots *slots;            /* by reference: requests are records, whose payloads are in these. Else NULL */
    const struct slot *named;           /* the one of them that the request in hand named, or NULL */
    uint8_t from[SMB_TOKEN_BYTES + SMB_APPLY_BYTES]; /* payload of those two: staging is for the source's bytes then */
    uint8_t *tail;                      /* one chunk and a checksum: data on its way out */
    int pass_fd;                        /* goes with the one answer in `out`; -1: none */
    struct smb_segment *pass_segment;   /* keeps pass_fd open */
    struct wait *waits;                 /* parked, of this connection */
    uint32_t waits_now;                 /* how many */
    struct wait *answered;              /* of which the answer is here, oldest first, and still to be sent */
    struct wait **answered_end;         /* where the next one goes, if there are any */
    struct connection *next_answered;   /* of those with new answers */
    bool has_new_answers;
    uint8_t in[IN_BYTES];
    uint8_t out[OUT_BYTES];
};

#endif
