/* replica_state.h: the structs of replicas and their bundles, for replica.c, bundle.c, copy.c,
 * roles.c and forwarder.c alone. replica.h says what guards them.
 */
#ifndef SMB_REPLICA_STATE_H
#define SMB_REPLICA_STATE_H

#include "memory/records.h"
#include "server/feed.h"
#include "server/bundle.h"
#include "server/replica.h"

struct wait;

/* How far a copy of a bundle is that is being made, for a server that is to be the backup. Chunks
 * are copied in their order, each of all members at once; the changes of those before `chunks_done`
 * are forwarded, of the others only that they were made. docs/decisions/0025, "A new copy". */
struct copy {
    bool under_way;
    bool failed;
    bool whole;        /* was said */
    bool given_up;     /* in this epoch */
    uint64_t sequence; /* of its last frame */
    uint64_t order;    /* of its last frame */
    uint64_t chunks_done;
    bool counted; /* evicted records were counted after all else */
};

/* Segments that move together (docs/decisions.md, 0038). Most bundles have one member. A bundle
 * lives as long as any of its members. */
struct segment_bundle {
    struct smb_server *server;
    uint64_t id;
    struct segment_bundle *next; /* in the server's list: forward_lock */
    uint32_t references;         /* likewise */
    pthread_mutex_t lock;
    struct replica *members; /* those that are served */
    pthread_cond_t room;     /* less is queued, or what was waited for has ended */
    uint32_t in_progress;    /* changes and refusals between replica_prepare and replica_done */
    bool draining;           /* those that were prepared before something began have to end first */
    uint32_t seen_off;       /* members that leave, and wait for what names them */
    struct copy copy;        /* primary: of a backup that is being made */
    uint64_t copied;         /* backup: the last part of a copy that was made here */
    /* a change of a lock's words was not queued for want of memory: nothing after it may be
     * confirmed in this epoch */
    bool words_lost;
    _Atomic int role; /* enum smb_replica_role */
    _Atomic uint32_t epoch;
    _Atomic bool paired; /* primary: there is a backup, which has to have all that is told */
    _Atomic bool yields; /* primary: its lease does not count: it may be replaced at any moment */
    _Atomic uint64_t order, confirmed;
    uint64_t asked_at_ns;  /* when the last question that was confirmed was asked */
    bool question_pending; /* one is on its way */
    struct feed feed;      /* to the backup */
    uint64_t fed_by;       /* the member by which the forwarder finds its connection */
    bool reported_works;   /* what was told last: there is a connection that works */
    struct wait *waiting, *waiting_last; /* by order */
    char peer[SMB_SERVER_NAME_BYTES];    /* the server of the other copy, in this epoch */
    const struct connection *feeder;     /* backup: the primary's, compared only */
};

/* One segment of a bundle. */
struct replica {
    struct segment_bundle *bundle;
    struct replica *next; /* of the bundle's members */
    bool left;            /* it is served no more; the bundle's lock */
    uint64_t id;
    uint64_t chunk_bytes, data_bytes;
    uint32_t dtype;
    struct records *records;
    struct sync *sync;
    _Atomic uint64_t *chunk_orders; /* of each chunk the last change; written under its lock too */
    /* of the copy that is being made: the records that there were, and what was sent */
    uint32_t *record_indices;
    uint32_t record_count, records_done;
    uint64_t evictions, ended_evictions;
};

static inline bool is_paired(const struct segment_bundle *bundle)
{
    return atomic_load_explicit(&bundle->paired, memory_order_acquire);
}

/* Takes the segment in. SMB_INVALID: it is cut in another way than the others, or these are as many
 * as may be. */
int bundle_join(struct smb_server *server, uint64_t id, struct replica *replica);
/* It is served no more; the bundle may go on. It keeps its reference until bundle_release. */
void bundle_leave(struct replica *replica);
struct segment_bundle *bundle_hold(struct segment_bundle *bundle);
void bundle_release(struct segment_bundle *bundle);
/* References to the members that are served now; returns how many. */
int bundle_hold_members(struct segment_bundle *bundle,
                        struct smb_segment *members[BUNDLE_MEMBERS_MAX]);
void bundle_release_members(struct smb_segment *const *members, int count);
/* Fills the header in; the body is whoever made it's. */
void bundle_encode(const struct replica *replica, struct forward *forward, struct smb_frame frame);
/* With the lock: the next in order. */
void bundle_append(struct replica *replica, struct forward *forward);
/* Instead of plain unlocking, after what may have made or broken a connection. */
void bundle_unlock(struct segment_bundle *bundle);
/* Wakes the control thread that looks after connections. */
void bundle_tell_change(struct smb_server *server);
/* With the lock: the forwarder finds the bundle by that member. false: there is no connection any
 * more. `how`: of epoll_ctl. */
bool bundle_watch_feed(struct segment_bundle *bundle, uint64_t id, int how);
/* With the lock: those up to that order are answered; with another status than SMB_OK, refused. */
void bundle_answer_waiting(struct segment_bundle *bundle, uint64_t order, int status);
/* With the lock. Nothing of the last copy stays. */
void bundle_end_copy(struct segment_bundle *bundle);
/* With the lock. Nothing is forwarded any more. Waiting requests are answered. A primary goes on
 * alone: as the only copy it has all that it tells of. Any other status sends clients elsewhere. */
void bundle_stop_forwarding(struct segment_bundle *bundle, int status);
bool bundle_is_primary(const struct segment_bundle *bundle);
/* A member has had a role of that epoch. As long as the bundle has none, it takes no older one. */
void bundle_begin_at(struct segment_bundle *bundle, uint32_t epoch);
/* A reference to the segment with it; NULL: not here, or it has one copy. */
struct replica *replica_of(struct smb_server *server, uint64_t id, struct smb_segment **segment);

#endif
