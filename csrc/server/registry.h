/* registry.h: the segments that a daemon serves, by id, and its capacity. Control threads change
 * the registry; loops look up segments in it. */
#ifndef SMB_REGISTRY_H
#define SMB_REGISTRY_H

#include <stdatomic.h>

#include "base/stats.h"
#include "base/tree.h"
#include "memory/segment.h"

struct replica;
struct smb_server;

struct entry { /* an entry of the registry, which is a chained hash table */
    struct entry *next;
    struct smb_segment *segment;
    char *path;
};
enum { BUCKETS = 4096 };

/* One loop's counts for a segment. The loop allocates it at its first request, and is the only
 * writer. */
struct share {
    struct smb_tally done[SMB_TRANSPORT_COUNT];
};

/* A segment that the daemon serves, with its companion objects. */
struct served {
    struct smb_server *server;
    /* by loop; NULL until the loop's first request. Release when set, acquire by readers */
    struct share *_Atomic *shares;
    struct smb_segment *segment;
    struct records *records;
    struct sync *sync;
    /* NULL: the segment has one copy, and local clients change it, too. Once set it stays. Release
     * when set, acquire by everyone */
    _Atomic(struct replica *) replica;
    bool closed;     /* under due_lock: the segment never becomes due again */
    uint64_t due_ns; /* the result of sync_tick; in the server's tree if not UINT64_MAX */
    struct tree_node by_due;
};

/* Takes a reference to the segment; NULL: not found. */
struct smb_segment *server_find(struct smb_server *server, uint64_t id);
/* Calls `visit` for every segment served now, without the registry's lock. SMB_OUT_OF_MEMORY: for
 * none. */
int server_each_segment(struct smb_server *server,
                        void (*visit)(void *argument, struct smb_segment *segment), void *argument);
/* Reserves capacity, before the memory is allocated and under the lock, so that two creations
 * cannot both fit into the last gap. SMB_EXISTS, SMB_OUT_OF_MEMORY. */
int registry_reserve(struct smb_server *server, uint64_t id, uint64_t bytes);
void registry_give_back(struct smb_server *server, uint64_t bytes);
/* From here on the segment is found. False: a segment of that id exists. */
bool registry_enter(struct smb_server *server, struct entry *entry);
/* Removes a segment, gives its capacity back and keeps its counts. NULL: not found. */
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
