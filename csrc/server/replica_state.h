/* replica_state.h: the struct of a replica, for replica.c and copy.c alone. replica.h says what
 * guards it.
 */
#ifndef SMB_REPLICA_STATE_H
#define SMB_REPLICA_STATE_H

#include "memory/records.h"
#include "server/feed.h"
#include "server/replica.h"

struct wait;

/* How far a copy is that is being made, for a server that is to be the backup. Chunks are copied
 * in their order; the changes of those before `chunks_done` are forwarded, of the others only
 * that they were made. docs/decisions/0025, "A new copy". */
struct copy {
    bool under_way;
    bool settling; /* changes that were prepared before it began have not ended */
    bool failed;
    bool whole;        /* was said */
    uint64_t sequence; /* of its last frame */
    uint64_t order;    /* of its last frame */
    uint32_t *places;  /* of the records that there were */
    uint32_t place_count, places_done;
    uint64_t chunks_done;
    uint64_t evictions, ended_evictions; /* as sent */
    bool counted;                        /* they were sent after all else */
};

struct replica {
    struct smb_server *server;
    uint64_t id;
    uint64_t chunk_bytes, data_bytes;
    uint32_t dtype;
    pthread_mutex_t lock;
    pthread_cond_t room;  /* for a copy: less is queued, or it has ended */
    uint32_t in_progress; /* changes and refusals between replica_prepare and replica_done */
    struct copy copy;     /* primary: of a backup that is being made */
    uint64_t copied; /* backup: the last part of a copy that was made here; its feeder's loop */
    struct records *records;
    struct sync *sync;
    /* a change of its words was not queued for want of memory: nothing after it may be confirmed in
     * this epoch */
    bool words_lost;
    _Atomic int role; /* enum smb_replica_role */
    _Atomic uint32_t epoch;
    _Atomic bool paired; /* primary: there is a backup, which has to have all that is told */
    _Atomic bool yields; /* primary: its lease does not count: it may be replaced at any moment */
    _Atomic uint64_t order, confirmed;
    _Atomic uint64_t *chunk_orders; /* of each chunk the last change; written under its lock too */
    uint64_t asked_at_ns;           /* when the last question that was confirmed was asked */
    bool asking;                    /* one is on its way */
    struct feed feed;               /* to the backup */
    bool told_works;                /* what was told last: there is a connection that works */
    struct wait *waiting, *waiting_last; /* by order */
    char peer[SMB_SERVER_NAME_BYTES];    /* the server of the other copy, in this epoch */
    const struct connection *feeder;     /* backup: the primary's, compared only */
};

static inline bool is_paired(const struct replica *replica)
{
    return atomic_load_explicit(&replica->paired, memory_order_acquire);
}

/* With the lock: the next in order. */
void replica_append(struct replica *replica, struct forward *forward);
/* Fills the header in; the body is whoever made it's. */
void replica_encode(const struct replica *replica, struct forward *forward, struct smb_frame frame);
/* Instead of plain unlocking, after what may have made or broken a connection. */
void replica_unlock(struct replica *replica);
/* With the lock. Nothing is forwarded any more. Waiting requests are answered. A primary goes on
 * alone: as the only copy it has all that it tells of. Any other status sends clients elsewhere. */
void replica_stop_forwarding(struct replica *replica, int status);
/* A reference to the segment with it; NULL: not here, or it has one copy. */
struct replica *replica_of(struct smb_server *server, uint64_t id, struct smb_segment **segment);

#endif
