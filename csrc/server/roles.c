/* The role of a bundle, primary or backup, from an epoch on, as the coordinator gives it. Called by
 * control threads, one at a time (roles_lock). */
#include <string.h>

#include "base/clock.h"
#include "base/failpoint.h"
#include "server/lanes.h"
#include "server/replica_state.h"
#include "server/server.h"
#include "server/waits.h"
#include "sync/sync.h"

enum { HAND_OVER_MS = 1000 };

/* Call with the lock held. Whether the backup has exactly what this primary has. Questions to it do
 * not count: as long as the primary yields, each read asks one. */
static bool is_even(const struct segment_bundle *bundle)
{
    return bundle_is_primary(bundle) && is_paired(bundle) && bundle->in_progress == 0 &&
           !bundle->copy.under_way && !bundle->words_lost &&
           atomic_load_explicit(&bundle->confirmed, memory_order_relaxed) >= bundle->changed_order;
}

/* Call with the lock held. */
static void set_role(struct segment_bundle *bundle, uint32_t epoch, int role, bool paired,
                     bool copying, const char *peer)
{
    int role_now = atomic_load_explicit(&bundle->role, memory_order_relaxed);
    if (role == SMB_REPLICA_PRIMARY || copying) {
        bundle->strays = bundle->uneven = false;
    } else if (role == SMB_REPLICA_NONE && role_now == SMB_REPLICA_PRIMARY) {
        bundle->strays = true;
        bundle->uneven = !is_even(bundle);
    }
    /* Set before `paired`: a reader that finds an unpaired primary takes it for the only copy. */
    if (role != SMB_REPLICA_PRIMARY)
        atomic_store_explicit(&bundle->role, role, memory_order_release);
    bool goes_on = role == SMB_REPLICA_PRIMARY && paired && !copying && bundle->copy.whole;
    if (goes_on) {
        /* The new backup still has to get all queued changes. */
        feed_enter_epoch(&bundle->feed, epoch);
        bundle_end_copy(bundle);
    } else {
        bundle_stop_forwarding(bundle, role == SMB_REPLICA_PRIMARY ? SMB_OK : SMB_STALE_EPOCH);
        bundle->words_lost = false;
    }
    bundle->copied = 0;
    atomic_store_explicit(&bundle->paired, role == SMB_REPLICA_PRIMARY && paired,
                          memory_order_release);
    atomic_store_explicit(&bundle->yields, false, memory_order_release);
    atomic_store_explicit(&bundle->unrecorded, false, memory_order_release);
    bundle->hands_over_until_ns = 0;
    /* The end of its connection says nothing about those of the new role. */
    bundle->feeder = NULL;
    strcpy(bundle->peer, peer);
    atomic_store_explicit(&bundle->epoch, epoch, memory_order_release);
    atomic_store_explicit(&bundle->role, role, memory_order_release);
    if (copying && role == SMB_REPLICA_PRIMARY)
        bundle->copy = (struct copy){.under_way = true};
    if (bundle->copy.under_way)
        bundle->draining = bundle->in_progress > 0;
    bundle->feed.broken_ns = smb_now_ns();
    bundle->reported_works = false;
}

static void take_role(struct segment_bundle *bundle, uint32_t epoch, int role, bool paired,
                      bool copying, const char *peer)
{
    pthread_mutex_lock(&bundle->lock);
    set_role(bundle, epoch, role, paired, copying, peer);
    pthread_mutex_unlock(&bundle->lock);
    bundle_tell_change(bundle->server);
}

/* The two copies switch their roles, and this one was the primary. It can be fed only if the other
 * one has exactly what it has. Otherwise it ends its role, and stays apart until it is copied to or
 * is the primary again. */
static int become_backup(struct segment_bundle *bundle, uint32_t epoch, const char *peer)
{
    pthread_mutex_lock(&bundle->lock);
    bool even = is_even(bundle);
    set_role(bundle, epoch, even ? SMB_REPLICA_BACKUP : SMB_REPLICA_NONE, false, false, peer);
    pthread_mutex_unlock(&bundle->lock);
    bundle_tell_change(bundle->server);
    struct smb_segment *members[BUNDLE_MEMBERS_MAX];
    int count = bundle_hold_members(bundle, members);
    for (int i = 0; i < count; i++)
        sync_send_away(served_of(members[i])->sync, SMB_STALE_EPOCH);
    bundle_release_members(members, count);
    return even ? SMB_OK : SMB_INVALID;
}

/* A segment can have a backup that was not copied to if both are new, if its copy has just become
 * whole, if the two copies switch their roles, or if it is given back a role that ended when both
 * had the same. */
static bool may_take(struct segment_bundle *bundle, uint32_t epoch, int role, bool paired,
                     bool copying, const char *peer)
{
    pthread_mutex_lock(&bundle->lock);
    int role_now = atomic_load_explicit(&bundle->role, memory_order_relaxed);
    bool next = epoch == atomic_load_explicit(&bundle->epoch, memory_order_relaxed) + 1;
    bool may = copying || role == SMB_REPLICA_NONE;
    if (!may && role == SMB_REPLICA_BACKUP)
        may = !bundle->strays;
    else if (!may)
        may = !paired || (role_now == SMB_REPLICA_NONE && !bundle->uneven) || bundle->copy.whole ||
              (role_now == SMB_REPLICA_BACKUP && next && strcmp(bundle->peer, peer) == 0);
    pthread_mutex_unlock(&bundle->lock);
    return may;
}

/* Gates a segment with one copy that may get another: from here on all reads and changes pass this
 * server. Waiting requests are sent again, in the epoch of the new role. */
static int gate_segment(struct smb_server *server, struct smb_segment *segment)
{
    int status = smb_segment_let_move(segment) == SMB_OK ? replica_create(server, segment)
                                                         : SMB_INVALID;
    if (status == SMB_OK && !smb_segment_gate(segment)) {
        replica_close(replica_at(segment));
        status = SMB_NOT_FOUND;
    }
    if (status == SMB_OK)
        sync_ask_again(served_of(segment)->sync, smb_boot_ns());
    return status;
}

/* For a former backup: the old primary's requests here must end before another primary's begin. */
static void stop_following(struct segment_bundle *bundle, uint32_t epoch, int role)
{
    take_role(bundle, epoch, SMB_REPLICA_NONE, false, false, "");
    lanes_fence_session(bundle->server, bundle->id);
    FAILPOINT("replica.fenced");
    if (role != SMB_REPLICA_PRIMARY)
        return;
    struct smb_segment *members[BUNDLE_MEMBERS_MAX];
    int count = bundle_hold_members(bundle, members);
    for (int i = 0; i < count; i++)
        waits_take_over(members[i]);
    bundle_release_members(members, count);
}

/* Returns the last epoch in which a segment of the bundle had a role. */
static uint32_t last_role_of_members(struct segment_bundle *bundle)
{
    struct smb_segment *members[BUNDLE_MEMBERS_MAX];
    int count = bundle_hold_members(bundle, members);
    uint32_t newest = 0;
    for (int i = 0; i < count; i++) {
        uint32_t of_role;
        smb_segment_copy(members[i], &of_role);
        newest = of_role > newest ? of_role : newest;
    }
    bundle_release_members(members, count);
    return newest;
}

/* Ends a role whose members were all deleted, if a segment that it had left out gets a newer role
 * than it ever had: records that were restored may know of no later epoch. */
static void end_role_of_nobody(struct segment_bundle *bundle, uint32_t epoch)
{
    uint32_t newest = last_role_of_members(bundle);
    if (newest == 0 || newest >= epoch)
        return;
    if (atomic_load_explicit(&bundle->role, memory_order_relaxed) == SMB_REPLICA_BACKUP)
        stop_following(bundle, newest, SMB_REPLICA_NONE);
    else
        take_role(bundle, newest, SMB_REPLICA_NONE, false, false, "");
}

static void forget_end(void *unused, struct smb_segment *segment)
{
    (void)unused;
    struct replica *replica = replica_at(segment);
    if (!replica)
        return;
    struct segment_bundle *bundle = replica->bundle;
    if (atomic_load_explicit(&bundle->role, memory_order_relaxed) != SMB_REPLICA_NONE)
        return;
    uint32_t newest = last_role_of_members(bundle);
    pthread_mutex_lock(&bundle->lock);
    if (newest < atomic_load_explicit(&bundle->epoch, memory_order_relaxed))
        atomic_store_explicit(&bundle->epoch, newest, memory_order_release);
    pthread_mutex_unlock(&bundle->lock);
}

int smb_server_forget_ends(struct smb_server *server)
{
    pthread_mutex_lock(&server->roles_lock);
    int status = server_each_segment(server, forget_end, NULL);
    pthread_mutex_unlock(&server->roles_lock);
    return status;
}

int smb_server_set_replica(struct smb_server *server, uint64_t id, uint32_t epoch, int role,
                           bool paired, bool copying, const char *peer)
{
    if (strnlen(peer, SMB_SERVER_NAME_BYTES) == SMB_SERVER_NAME_BYTES)
        return SMB_INVALID;
    struct smb_segment *segment = server_find(server, id);
    if (!segment)
        return SMB_NOT_FOUND;
    pthread_mutex_lock(&server->roles_lock);
    int status = replica_at(segment)           ? SMB_OK
                 : role == SMB_REPLICA_PRIMARY ? gate_segment(server, segment)
                                               : SMB_INVALID;
    if (status == SMB_OK) {
        struct segment_bundle *bundle = replica_at(segment)->bundle;
        if (epoch < atomic_load_explicit(&bundle->epoch, memory_order_relaxed) &&
            atomic_load_explicit(&bundle->role, memory_order_relaxed) != SMB_REPLICA_NONE)
            end_role_of_nobody(bundle, epoch);
        uint32_t epoch_now = atomic_load_explicit(&bundle->epoch, memory_order_relaxed);
        int role_now = atomic_load_explicit(&bundle->role, memory_order_relaxed);
        /* The other members' roles change with the first one's. */
        bool anew = role_now == SMB_REPLICA_NONE
                        ? role != SMB_REPLICA_NONE
                        : role_now == SMB_REPLICA_PRIMARY && role == SMB_REPLICA_NONE;
        if (epoch > epoch_now || (epoch == epoch_now && anew)) {
            if (!may_take(bundle, epoch, role, paired, copying, peer)) {
                status = SMB_INVALID;
            } else if (role_now == SMB_REPLICA_PRIMARY && role == SMB_REPLICA_BACKUP && !copying) {
                status = become_backup(bundle, epoch, peer);
            } else {
                if (role_now == SMB_REPLICA_BACKUP)
                    stop_following(bundle, epoch, role);
                take_role(bundle, epoch, role, paired, copying, peer);
            }
        }
        /* Noted for each member separately: if the daemon is killed in between, the coordinator
         * gives the role again. */
        if (status == SMB_OK && role != SMB_REPLICA_NONE &&
            atomic_load_explicit(&bundle->epoch, memory_order_relaxed) == epoch &&
            atomic_load_explicit(&bundle->role, memory_order_relaxed) == role)
            smb_segment_note_copy(segment, epoch, role == SMB_REPLICA_PRIMARY || !copying);
    }
    pthread_mutex_unlock(&server->roles_lock);
    smb_segment_release(segment);
    return status;
}

int smb_server_let_move(struct smb_server *server, uint64_t id)
{
    struct smb_segment *segment = server_find(server, id);
    if (!segment)
        return SMB_NOT_FOUND;
    int status = smb_segment_let_move(segment);
    smb_segment_release(segment);
    return status;
}

int smb_server_bind(struct smb_server *server, uint64_t id)
{
    struct smb_segment *segment = server_find(server, id);
    if (!segment)
        return SMB_NOT_FOUND;
    int status = smb_segment_bind(segment);
    smb_segment_release(segment);
    return status;
}

int smb_server_yield(struct smb_server *server, uint64_t id, uint32_t epoch)
{
    struct smb_segment *segment;
    struct replica *replica = replica_of(server, id, &segment);
    if (!replica)
        return SMB_NOT_FOUND;
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&server->roles_lock);
    int status = bundle_is_primary(bundle) && is_paired(bundle) &&
                         atomic_load_explicit(&bundle->epoch, memory_order_relaxed) == epoch
                     ? SMB_OK
                     : SMB_STALE_EPOCH;
    if (status == SMB_OK)
        atomic_store_explicit(&bundle->yields, true, memory_order_release);
    pthread_mutex_unlock(&server->roles_lock);
    smb_segment_release(segment);
    return status;
}

int smb_server_note_unrecorded(struct smb_server *server, uint64_t id, bool unrecorded)
{
    struct smb_segment *segment;
    struct replica *replica = replica_of(server, id, &segment);
    if (!replica)
        return SMB_NOT_FOUND;
    pthread_mutex_lock(&server->roles_lock);
    atomic_store_explicit(&replica->bundle->unrecorded, unrecorded, memory_order_release);
    pthread_mutex_unlock(&server->roles_lock);
    smb_segment_release(segment);
    return SMB_OK;
}

int smb_server_hand_over(struct smb_server *server, uint64_t id, uint32_t epoch)
{
    int status = smb_server_yield(server, id, epoch);
    struct smb_segment *segment;
    struct replica *replica = status == SMB_OK ? replica_of(server, id, &segment) : NULL;
    if (!replica)
        return status == SMB_OK ? SMB_NOT_FOUND : status;
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&server->roles_lock);
    pthread_mutex_lock(&bundle->lock);
    bundle->hands_over_until_ns = smb_now_ns() + (uint64_t)HAND_OVER_MS * 1000000U;
    pthread_mutex_unlock(&bundle->lock);
    /* With nobody in a queue, no lock is granted here from now on. */
    struct smb_segment *members[BUNDLE_MEMBERS_MAX];
    int count = bundle_hold_members(bundle, members);
    for (int i = 0; i < count; i++)
        sync_ask_again(served_of(members[i])->sync, smb_boot_ns());
    bundle_release_members(members, count);
    pthread_mutex_lock(&bundle->lock);
    if (atomic_load_explicit(&bundle->epoch, memory_order_relaxed) != epoch)
        status = SMB_STALE_EPOCH;
    else
        status = is_even(bundle) ? SMB_OK : SMB_BUSY;
    pthread_mutex_unlock(&bundle->lock);
    pthread_mutex_unlock(&server->roles_lock);
    smb_segment_release(segment);
    return status;
}

void smb_server_serve_until(struct smb_server *server, uint64_t boot_ns)
{
    atomic_store_explicit(&server->serving_until_ns, boot_ns, memory_order_release);
}
