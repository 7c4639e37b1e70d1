/* registry.h: the segments that a daemon serves, by id, and its capacity. Control threads change
 * it; loops look up in it. */
#ifndef SMB_REGISTRY_H
#define SMB_REGISTRY_H

#include <stdatomic.h>

#include "base/stats.h"
#include "base/tree.h"
#include "memory/segment.h"

struct replica;
struct smb_server;

struct entry { /* of the registry: an open hash table, chained */
    struct entry *next;
    struct smb_segment *segment;
    char *path;
};
enum { BUCKETS = 4096 };

/* One loop's counts for a segment. The loop makes it at its first request, and is the only
 * writer. */
struct share {
    struct smb_tally done[SMB_TRANSPORT_COUNT];
};

/* A segment that the daemon serves, and what belongs to it. */
struct served {
    struct smb_server *server;
    /* by loop; NULL until its first request. Release when made, acquire by readers */
    struct share *_Atomic *shares;
    struct smb_segment *segment;
    struct records *records;
    struct sync *sync;
    /* NULL: there is one copy, and local clients change it, too. Once it is there it stays. Release
     * when made, acquire by everyone */
    _Atomic(struct replica *) replica;
    bool closed;     /* due_lock: it never becomes due again */
    uint64_t due_ns; /* of sync_tick; in the server's tree if not UINT64_MAX */
    struct tree_node by_due;
};

/* A reference, or NULL. */
struct smb_segment *server_find(struct smb_server *server, uint64_t id);
/* Every segment served now, outside of the registry's lock. SMB_OUT_OF_MEMORY: none. */
int server_each_segment(struct smb_server *server,
                        void (*visit)(void *argument, struct smb_segment *segment), void *argument);
/* Capacity is taken before the memory, under the lock, so that two creations can't both fit into
 * the last gap. SMB_EXISTS, SMB_OUT_OF_MEMORY. */
int registry_reserve(struct smb_server *server, uint64_t id, uint64_t bytes);
void registry_give_back(struct smb_server *server, uint64_t bytes);
/* From here on it is found. false: one of its id is there. */
bool registry_enter(struct smb_server *server, struct entry *entry);
/* Its capacity is given back, and its counts are kept. NULL: it is not there. */
struct entry *registry_take_out(struct smb_server *server, uint64_t id);

static inline struct served *served_of(const struct smb_segment *segment)
{
    return smb_segment_companion(segment);
}

static inline struct replica *replica_at(const struct smb_segment *segment)
{
    return atomic_load_explicit(&served_of(segment)->replica, memory_order_acquire);
}

#endif
