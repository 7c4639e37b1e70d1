/* server.h: the daemon's inside: registry of segments, event loops, connections.
 *
 * Threads. One loop thread owns each connection from accept to close; nothing else touches it. The control threads (Python)
 * change the registry, under its read-write lock. Counters are relaxed atomics.
 * Locks: the registry's and a chunk's are never held together.
 *
 * Parked requests. What can't be done now (a chunk lock held by a stopped process; later: locks, barriers, versions) does not
 * block the loop: the connection keeps the request, stops reading, and stands in the loop's list of parked connections until
 * a retry succeeds or it is dropped.
 */
#ifndef SMB_SERVER_H
#define SMB_SERVER_H

#include <pthread.h>
#include <stdatomic.h>

#include "segment.h"
#include "wire.h"

enum {
    CONNECTIONS_MAX = 4096,       /* each may hold 2 chunks of staging memory */
    HELLO_DEADLINE_MS = 5000,     /* a silent stranger is closed */
    IN_BYTES = 4096,              /* headers arrive in bursts of up to 64 */
    OUT_BYTES = 4096,             /* as do small replies */
    FRAMES_PER_TURN = 32,         /* then the next connection of the loop has its turn */
    BULK_BYTES = 32768,           /* a request of this size is worth a system call for its answer: */
    REPLIES_HELD_MAX = 4,         /* at least every so many of them answers are sent */
    PARKED_RETRY_MS = 1,
    LOOPS_MAX = 64
};

struct listener;

struct entry {                    /* of the registry: an open hash table, chained */
    struct entry *next;
    struct smb_segment *segment;
    char *path;
};
enum { BUCKETS = 4096, LISTENERS_MAX = 4 };

struct smb_server {
    uint64_t instance;
    uint64_t capacity_bytes;
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
    _Atomic uint64_t operations[SMB_TRANSPORT_COUNT][SMB_OPCODE_COUNT];
    _Atomic uint64_t bytes[SMB_TRANSPORT_COUNT][SMB_OPCODE_COUNT];
    _Atomic uint64_t errors[SMB_STATUS_COUNT];
    _Atomic uint64_t opened[SMB_TRANSPORT_COUNT];
    _Atomic uint64_t now[SMB_TRANSPORT_COUNT];
    _Atomic uint64_t parked_now;
    _Atomic uint64_t parked_total;
    pthread_mutex_t lanes_lock;         /* before a connection's `turn` */
    struct connection *lanes;
};

struct loop {
    struct smb_server *server;
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
    uint32_t not_greeted;
};

/* ---- registry (registry.c) */
/* A reference, or NULL. */
struct smb_segment *server_find(struct smb_server *server, uint64_t id);
/* Gives all references up; the files stay. The loops have stopped. */
void registry_clear(struct smb_server *server);

static inline void server_count(_Atomic uint64_t *counter, uint64_t by)
{
    atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

/* ---- gate (gate.c): the single door. Every data request, read or write, over every transport, passes here. */
struct gate_request {
    struct smb_frame frame;
    struct smb_segment *segment;  /* a reference while the request is in hand */
    struct smb_segment *other;    /* ACCUMULATE_FROM: the source */
    bool retried;                 /* was parked before */
};
/* Segment there, epoch, dtype and bounds right. Takes the reference. Once before the payload is received, to know whether it
 * is wanted; once more when it is all here. */
int gate_admit(struct smb_server *server, const struct smb_frame *frame, struct gate_request *request);
/* With the payload in hand: do it. `payload` is the frame's, `sink` a chunk's worth of memory for new values, or NULL.
 * SMB_BUSY: park it. The old value of the 64-bit operations goes to *result. */
int gate_execute(struct smb_server *server, struct gate_request *request, const uint8_t *payload, uint8_t *scratch,
                 uint8_t *sink, uint64_t *result);
/* The other way to do it: the range itself, under its chunk's lock, for the socket to be sent from or received into. Not to
 * be held while anything is waited for. SMB_BUSY: park it, or go another way. */
int gate_open(struct gate_request *request, bool to_change, uint8_t **place);
void gate_close(struct gate_request *request, bool to_change);
void gate_done(struct gate_request *request);

/* ---- connection (connection.c): one peer; called by its loop only. */
struct connection *connection_create(struct loop *loop, int fd, int transport);
/* Reads, executes, answers until nothing more can be done now. false: close it. */
bool connection_turn(struct connection *connection);
void connection_destroy(struct connection *connection);

enum connection_wait { WAIT_INPUT, WAIT_OUTPUT, WAIT_TURN, WAIT_PARKED };

struct connection {
    struct connection *next, *previous; /* all of the loop */
    struct connection *link;            /* inbox, again or parked list */
    struct loop *loop;
    int fd;
    int transport;
    enum connection_wait wait;
    uint32_t armed;                     /* epoll events asked for now */
    bool in_list;                       /* linked in `again` or `parked` */
    bool counted_parked;                /* since the request in hand was parked for the first time */
    bool greeted;
    uint64_t session;
    uint16_t lane;
    _Atomic bool fenced;                /* a newer connection speaks for this lane: nothing of this one may be done any more */
    pthread_mutex_t turn;               /* held while a request is carried out; taken by whoever fences, to wait for its end */
    struct connection *lane_next;       /* of the server's greeted connections */
    uint64_t opened_ns;

    /* the request in hand */
    bool have_request;
    int admitted;                       /* status of gate_admit: not OK means drain the payload, then answer that */
    struct gate_request request;
    uint32_t payload_have;

    uint32_t in_start, in_end;          /* received, not yet parsed */
    uint32_t out_start, out_end;        /* small replies to be sent */
    uint32_t replies_held;
    uint32_t tail_start, tail_end;      /* what is left of a chunk being sent, in `tail` */
    uint8_t *staging;                   /* one chunk: payload on its way in */
    uint8_t *tail;                      /* one chunk: data on its way out */
    int pass_fd;                        /* goes with the one answer in `out`; -1: none */
    struct smb_segment *pass_segment;   /* keeps pass_fd open */
    uint8_t in[IN_BYTES];
    uint8_t out[OUT_BYTES];
};

#endif
