/* replica_state.h: the structs of replicas and their bundles, for replica.c, bundle.c, copy.c,
 * roles.c and forwarder.c only. replica.h says which locks guard them. */
#ifndef SMB_REPLICA_STATE_H
#define SMB_REPLICA_STATE_H

#include "memory/records.h"
#include "server/feed.h"
#include "server/bundle.h"
#include "server/replica.h"

struct wait;

/* The progress of a bundle's copy for a server that is to become the backup. Chunks are copied in
 * order, each of all members at once. Changes to chunks before `chunks_done` are forwarded whole;
 * of changes to later chunks only a note is sent. docs/decisions/0025-second-copy.md, "A new
 * copy". */
struct copy {
    bool under_way;
    bool begun; /* its members are fixed */
    bool failed;
    bool whole;        /* the coordinator was told that it is complete */
    bool given_up;     /* in this epoch */
    uint64_t sequence; /* the last frame's */
    uint64_t order;    /* the last frame's */
    uint64_t chunks_done;
    bool counted; /* the count of evicted records was sent, after all other parts */
};

/* Segments that move together (docs/decisions.md, 0038). Most bundles have one member. A bundle
 * lives as long as any of its members. */
struct segment_bundle {
    struct smb_server *server;
    uint64_t id;
    struct segment_bundle *next; /* in the server's list; under forward_lock */
    uint32_t references;         /* likewise */
    pthread_mutex_t lock;
    struct replica *members; /* members that are served */
    pthread_cond_t room;     /* less is queued, or what a thread waited for has ended */
    uint32_t in_progress;    /* changes and refusals between replica_prepare and replica_done */
    /* a change of state waits until the requests that were prepared before it have ended */
    bool draining;
    uint32_t seen_off; /* members that leave, and wait for changes that name them */
    /* primary: no change begins before this time, because the backup is about to take over; 0: none
     * is held up */
    uint64_t hands_over_until_ns;
    /* it was the primary, and has changes that the present primary may lack */
    bool strays;
    /* it was the primary, and its backup may lack changes that are here */
    bool uneven;
    struct copy copy; /* primary: the progress of a new backup's copy */
    uint64_t copied;  /* backup: the last part of a copy that was stored here */
    /* a change of a lock's words was not queued for lack of memory: nothing after it may be
     * confirmed in this epoch */
    bool words_lost;
    _Atomic int role; /* enum smb_replica_role */
    _Atomic uint32_t epoch;
    /* primary: there is a backup, which must have everything that clients are told */
    _Atomic bool paired;
    /* primary: its lease does not count, because it may be replaced at any moment; or because the
     * records do not have its role, so that the lease was given without it */
    _Atomic bool yields, unrecorded;
    _Atomic uint64_t order, confirmed;
    uint64_t changed_order; /* of the last frame that is no question */
    uint64_t asked_at_ns;   /* when the last confirmed question was asked */
    bool question_pending;  /* a question has been sent */
    struct feed feed;       /* to the backup */
    uint64_t fed_by;        /* the member by whose id the forwarder finds the connection */
    bool reported_works;    /* what was last reported: whether the connection works */
    struct wait *waiting, *waiting_last; /* waits, by order */
    char peer[SMB_SERVER_NAME_BYTES];    /* name of the other copy's server in this epoch */
    const struct connection *feeder;     /* backup: the primary's connection; only compared */
};

/* One segment of a bundle. */
struct replica {
    struct segment_bundle *bundle;
    struct replica *next; /* in the bundle's members */
    bool left;            /* no longer served; under the bundle's lock */
    uint32_t copy_epoch;  /* of the last copy that it takes part in; under the bundle's lock */
    uint64_t id;
    uint64_t chunk_bytes, data_bytes;
    uint32_t dtype;
    struct records *records;
    struct sync *sync;
    /* for each chunk the order of its last change; written under the chunk's lock, too */
    _Atomic uint64_t *chunk_orders;
    /* for a copy under way: the records that existed at its start, and how many were sent */
    uint32_t *record_indices;
    uint32_t record_count, records_done;
    uint64_t evictions, ended_evictions;
};

static inline bool is_paired(const struct segment_bundle *bundle)
{
    return atomic_load_explicit(&bundle->paired, memory_order_acquire);
}

/* Adds the segment to the bundle. SMB_INVALID: it has another chunk size or length than the
 * members, or the bundle is full. */
int bundle_join(struct smb_server *server, uint64_t id, struct replica *replica);
/* Removes the segment, which is no longer served; the bundle may go on. The segment keeps its
 * reference until bundle_release. */
void bundle_leave(struct replica *replica);
struct segment_bundle *bundle_hold(struct segment_bundle *bundle);
void bundle_release(struct segment_bundle *bundle);
/* Takes references to the members that are served now; returns how many. */
int bundle_hold_members(struct segment_bundle *bundle,
                        struct smb_segment *members[BUNDLE_MEMBERS_MAX]);
void bundle_release_members(struct smb_segment *const *members, int count);
/* Writes the header of a frame; the caller writes the body. */
void bundle_encode(const struct replica *replica, struct forward *forward, struct smb_frame frame);
/* Call with the lock held. Appends the frame as the next in order. */
void bundle_append(struct replica *replica, struct forward *forward);
/* Replaces plain unlocking, after a connection may have begun to work or ceased to. */
void bundle_unlock(struct segment_bundle *bundle);
/* Wakes the control thread that looks after connections. */
void bundle_tell_change(struct smb_server *server);
/* Call with the lock held. Makes the forwarder find the bundle by that member. False: the
 * connection is gone. `how`: the operation of epoll_ctl. */
bool bundle_watch_feed(struct segment_bundle *bundle, uint64_t id, int how);
/* Call with the lock held. Answers the waits up to that order; with another status than SMB_OK they
 * are refused. */
void bundle_answer_waiting(struct segment_bundle *bundle, uint64_t order, int status);
/* Call with the lock held. Frees everything that the last copy left. */
void bundle_end_copy(struct segment_bundle *bundle);
/* Call with the lock held. Ends forwarding, and answers waiting requests. With SMB_OK a primary
 * goes on alone: as the only copy it has every change that it shows. Any other status sends clients
 * elsewhere. */
void bundle_stop_forwarding(struct segment_bundle *bundle, int status);
bool bundle_is_primary(const struct segment_bundle *bundle);
/* Notes that a member has had a role of that epoch. As long as the bundle has no role, it accepts
 * none of an older epoch. */
void bundle_begin_at(struct segment_bundle *bundle, uint32_t epoch);
/* Takes a reference to the segment, in *segment; NULL: not on this server, or it has one copy. */
struct replica *replica_of(struct smb_server *server, uint64_t id, struct smb_segment **segment);

#endif
