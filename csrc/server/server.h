/* server.h: the daemon's life, and the state that its parts share.
 *
 * Threads. One loop thread owns each connection from accept to close. The control threads (Python)
 * change the registry, under its read-write lock. One thread, of waits.c, acts when time ends a
 * lock, a wait or a pin. Counters are relaxed atomics. Locks: the registry's lock and a chunk's
 * lock are never held together.
 *
 * Two ways to wait. A change may find its chunk's lock taken, by a stopped process for example. It
 * is deferred: its connection keeps the request and stops reading, and its loop tries again.
 * Journal and watermark rely on the order of a lane's changes, so no later request of the lane
 * overtakes it. A request for a lock, barrier or version leaves the connection as a struct wait. It
 * is answered when its time has come, and meanwhile the connection goes on. */
#ifndef SMB_SERVER_H
#define SMB_SERVER_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/tree.h"
#include "server/bundle.h"
#include "server/counters.h"
#include "server/grants.h"
#include "server/listener.h"
#include "server/registry.h"
#include "server/strangers.h"
#include "server/uses.h"
#include "sync/sync.h"

struct connection;
struct journal;
struct loop;
struct past;
struct smb_tls;

/* number of ended sessions that are remembered, a power of two; older ones are forgotten */
enum { ENDED_MAX = 65536 };

struct smb_server {
    uint64_t instance;
    uint64_t capacity_bytes;
    bool guarded; /* set before the server listens: tokens are required */
    struct access_keys keys;
    struct journal *journal; /* NULL: changes are made without a journal */
    pthread_mutex_t ended_lock;
    uint64_t *ended; /* a ring */
    uint64_t ended_count;
    /* the coordinator has named all ended sessions, and none of them was forgotten */
    _Atomic bool ended_are_known;
    /* waits.c, which has one thread */
    pthread_mutex_t due_lock;
    pthread_cond_t due_changed;
    struct tree due; /* segments, by when they are due */
    uint64_t due_weights;
    pthread_t ticker;
    bool ticking;
    bool stop_ticking;
    pthread_rwlock_t registry_lock;
    struct entry *buckets[BUCKETS];
    uint64_t segments;
    /* file bytes, including those of segments being created */
    uint64_t used_bytes;
    uint64_t retired_operations[SMB_OPCODE_COUNT]; /* by local clients of deleted segments */
    uint64_t retired_bytes[SMB_OPCODE_COUNT];
    uint64_t retired_recovered_locks;
    int loop_count;
    struct loop *loops;
    _Atomic uint32_t next_loop;
    struct listener *listeners[LISTENERS_MAX];
    bool listens_unix;
    /* closed for a moment when no descriptor is left, so that a peer can be turned away */
    int spare_fd;
    _Atomic uint64_t errors[SMB_STATUS_COUNT];
    struct denials denials;
    _Atomic uint64_t opened[SMB_TRANSPORT_COUNT];
    _Atomic uint64_t now[SMB_TRANSPORT_COUNT];
    _Atomic uint64_t turned_away;
    struct strangers strangers;
    struct uses uses;
    _Atomic uint64_t strangers_evicted;
    pthread_mutex_t tls_lock;
    struct smb_tls *tls; /* under tls_lock. TLS of new TCP connections; NULL: no TLS */
    _Atomic uint64_t deferred_now;
    _Atomic uint64_t deferred_total;
    _Atomic uint64_t waits_now;
    _Atomic uint64_t replayed_total;
    struct sync_counters waited; /* summed over all segments */
    pthread_mutex_t lanes_lock;  /* taken before a connection's `turn` */
    struct connection *lanes;
    struct past *pasts; /* under lanes_lock */
    uint32_t past_count;
    /* forwarder.c, which has one thread from the first segment with two copies on */
    pthread_mutex_t roles_lock;   /* one change of roles at a time; taken before all other locks */
    pthread_mutex_t forward_lock; /* taken after a bundle's lock */
    struct segment_bundle *bundles[BUNDLE_BUCKETS]; /* under forward_lock */
    pthread_cond_t replica_changed;
    uint64_t replica_changes; /* number of changes of roles and connections; under forward_lock */
    pthread_t forwarder;
    bool forwarding;
    _Atomic bool stop_forwarding;
    int forward_epoll, forward_wake;
    /* until when, by CLOCK_BOOTTIME, the coordinator has promised not to replace this server as a
     * primary */
    _Atomic uint64_t serving_until_ns;
};

#endif
