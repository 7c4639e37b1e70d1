#include "server/bundle.h"

#include <stdlib.h>
#include <sys/epoll.h>

#include "base/assert.h"
#include "base/clock.h"
#include "server/inbox.h"
#include "server/replica_state.h"
#include "server/server.h"
#include "server/waits.h"

enum { SEE_OFF_MS = 1000 };

/* ---- members --------------------------------------------------------------------------------- */

static struct segment_bundle **bucket_of(struct smb_server *server, uint64_t id)
{
    return &server->bundles[id % BUNDLE_BUCKETS];
}

/* Call with forward_lock held. NULL: out of memory. */
static struct segment_bundle *make(struct smb_server *server, uint64_t id)
{
    struct segment_bundle *made = calloc(1, sizeof *made);
    if (!made)
        return NULL;
    made->server = server;
    made->id = id;
    feed_create(&made->feed);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->room, NULL);
    struct segment_bundle **bucket = bucket_of(server, id);
    made->next = *bucket;
    *bucket = made;
    return made;
}

/* Call with the lock held. */
static int take_in(struct segment_bundle *bundle, struct replica *replica)
{
    int count = 0;
    for (struct replica *at = bundle->members; at; at = at->next) {
        if (at->chunk_bytes != replica->chunk_bytes || at->data_bytes != replica->data_bytes)
            return SMB_INVALID;
        count++;
    }
    if (count >= BUNDLE_MEMBERS_MAX)
        return SMB_INVALID;
    replica->next = bundle->members;
    bundle->members = replica;
    return SMB_OK;
}

int bundle_join(struct smb_server *server, uint64_t id, struct replica *replica)
{
    pthread_mutex_lock(&server->forward_lock);
    struct segment_bundle *bundle = *bucket_of(server, id);
    while (bundle && bundle->id != id)
        bundle = bundle->next;
    if (!bundle)
        bundle = make(server, id);
    if (bundle)
        bundle->references++;
    pthread_mutex_unlock(&server->forward_lock);
    if (!bundle)
        return SMB_OUT_OF_MEMORY;
    replica->bundle = bundle;
    pthread_mutex_lock(&bundle->lock);
    int status = take_in(bundle, replica);
    pthread_mutex_unlock(&bundle->lock);
    if (status != SMB_OK)
        bundle_release(bundle);
    return status;
}

bool bundle_watch_feed(struct segment_bundle *bundle, uint64_t id, int how)
{
    /* Edge-triggered: epoll reports when a full socket has room again, and each arrival. */
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.u64 = id};
    bundle->fed_by = id;
    if (epoll_ctl(bundle->server->forward_epoll, how, bundle->feed.channel.fd, &event) == 0)
        return true;
    feed_disconnect(&bundle->feed);
    return false;
}

void bundle_leave(struct replica *replica)
{
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&bundle->lock);
    struct replica **at = &bundle->members;
    while (*at && *at != replica)
        at = &(*at)->next;
    bool was_in = *at == replica;
    if (was_in)
        *at = replica->next;
    replica->left = true;
    if (was_in && !bundle->members) {
        atomic_store_explicit(&bundle->role, SMB_REPLICA_NONE, memory_order_release);
        bundle_stop_forwarding(bundle, SMB_STALE_EPOCH);
    } else if (was_in && bundle->fed_by == replica->id && feed_is_dialled(&bundle->feed)) {
        bundle_watch_feed(bundle, bundle->members->id, EPOLL_CTL_MOD);
    }
    bundle_unlock(bundle);
}

/* Whether the backup still has to confirm changes up to that order, and can: the connection works,
 * and no other server is about to become the primary. */
static bool waits_for(const struct segment_bundle *bundle, uint64_t order)
{
    return bundle->members && is_paired(bundle) && bundle->feed.broken_ns == 0 &&
           !atomic_load_explicit(&bundle->yields, memory_order_relaxed) &&
           atomic_load_explicit(&bundle->confirmed, memory_order_relaxed) < order;
}

/* Changes that name this segment may be on their way to the backup, which could not make them
 * without it. Changes that have not begun by now find the segment deleted. */
void replica_see_off(struct replica *replica)
{
    struct segment_bundle *bundle = replica->bundle;
    uint64_t until_ns = smb_now_ns() + (uint64_t)SEE_OFF_MS * 1000000U;
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000U),
                             .tv_nsec = (long)(until_ns % 1000000000U)};
    pthread_mutex_lock(&bundle->lock);
    if (bundle->members && bundle->in_progress > 0)
        bundle->draining = true;
    int waited = 0;
    while (bundle->draining && waits_for(bundle, UINT64_MAX) && waited == 0)
        waited = pthread_cond_clockwait(&bundle->room, &bundle->lock, CLOCK_MONOTONIC, &until);
    uint64_t order = atomic_load_explicit(&bundle->order, memory_order_relaxed);
    bundle->seen_off++;
    while (waits_for(bundle, order) && waited == 0)
        waited = pthread_cond_clockwait(&bundle->room, &bundle->lock, CLOCK_MONOTONIC, &until);
    bundle->seen_off--;
    pthread_mutex_unlock(&bundle->lock);
}

struct segment_bundle *bundle_hold(struct segment_bundle *bundle)
{
    pthread_mutex_lock(&bundle->server->forward_lock);
    bundle->references++;
    pthread_mutex_unlock(&bundle->server->forward_lock);
    return bundle;
}

void bundle_release(struct segment_bundle *bundle)
{
    struct smb_server *server = bundle->server;
    pthread_mutex_lock(&server->forward_lock);
    bool last = --bundle->references == 0;
    if (last) {
        struct segment_bundle **at = bucket_of(server, bundle->id);
        while (*at != bundle)
            at = &(*at)->next;
        *at = bundle->next;
    }
    pthread_mutex_unlock(&server->forward_lock);
    if (!last)
        return;
    SMB_ASSERT(!bundle->waiting && !bundle->members);
    feed_destroy(&bundle->feed);
    pthread_mutex_destroy(&bundle->lock);
    pthread_cond_destroy(&bundle->room);
    free(bundle);
}

struct replica *replica_of(struct smb_server *server, uint64_t id, struct smb_segment **segment)
{
    *segment = server_find(server, id);
    if (!*segment)
        return NULL;
    struct replica *replica = replica_at(*segment);
    if (!replica)
        smb_segment_release(*segment);
    return replica;
}

int bundle_hold_members(struct segment_bundle *bundle,
                        struct smb_segment *members[BUNDLE_MEMBERS_MAX])
{
    uint64_t ids[BUNDLE_MEMBERS_MAX];
    int count = 0, held = 0;
    pthread_mutex_lock(&bundle->lock);
    for (struct replica *at = bundle->members; at; at = at->next)
        ids[count++] = at->id;
    pthread_mutex_unlock(&bundle->lock);
    for (int i = 0; i < count; i++) {
        struct smb_segment *found = server_find(bundle->server, ids[i]);
        if (found && replica_at(found) && replica_at(found)->bundle == bundle)
            members[held++] = found;
        else if (found)
            smb_segment_release(found);
    }
    return held;
}

void bundle_release_members(struct smb_segment *const *members, int count)
{
    for (int i = 0; i < count; i++)
        smb_segment_release(members[i]);
}

/* ---- order ----------------------------------------------------------------------------------- */

void bundle_encode(const struct replica *replica, struct forward *forward, struct smb_frame frame)
{
    const struct segment_bundle *bundle = replica->bundle;
    frame.epoch = atomic_load_explicit(&bundle->epoch, memory_order_relaxed);
    frame.segment = replica->id;
    frame.status = 0;
    frame.flags &= SMB_FLAG_WIRE;
    frame.payload = forward->bytes - SMB_FRAME_BYTES;
    smb_frame_encode(&frame, forward->frame);
}

void bundle_append(struct replica *replica, struct forward *forward)
{
    struct segment_bundle *bundle = replica->bundle;
    uint64_t order = atomic_load_explicit(&bundle->order, memory_order_relaxed) + 1;
    atomic_store_explicit(&bundle->order, order, memory_order_release);
    if (forward->asked_ns == 0)
        bundle->changed_order = order;
    feed_append(&bundle->feed, forward, order,
                atomic_load_explicit(&bundle->epoch, memory_order_relaxed));
}

void bundle_tell_change(struct smb_server *server)
{
    pthread_mutex_lock(&server->forward_lock);
    server->replica_changes++;
    pthread_cond_broadcast(&server->replica_changed);
    pthread_mutex_unlock(&server->forward_lock);
}

void bundle_unlock(struct segment_bundle *bundle)
{
    struct smb_server *server = bundle->server;
    bool works = bundle->feed.broken_ns == 0, changed = works != bundle->reported_works;
    bundle->reported_works = works;
    pthread_mutex_unlock(&bundle->lock);
    if (changed)
        bundle_tell_change(server);
}

/* ---- what waits ------------------------------------------------------------------------------ */

static void unlink_waiting(struct segment_bundle *bundle, struct wait *wait)
{
    if (wait->before)
        wait->before->after = wait->after;
    else
        bundle->waiting = wait->after;
    if (wait->after)
        wait->after->before = wait->before;
    else
        bundle->waiting_last = wait->before;
    wait->before = wait->after = NULL;
    wait->in_replica = false;
}

void bundle_answer_waiting(struct segment_bundle *bundle, uint64_t order, int status)
{
    while (bundle->waiting && bundle->waiting->order <= order) {
        struct wait *wait = bundle->waiting;
        unlink_waiting(bundle, wait);
        if (status != SMB_OK)
            wait->answer = (struct sync_answer){.status = status};
        wait_answered(wait);
    }
}

int replica_await(struct replica *replica, struct wait *wait, uint64_t order)
{
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&bundle->lock);
    int status = !bundle_is_primary(bundle) ? SMB_STALE_EPOCH
                 : atomic_load_explicit(&bundle->confirmed, memory_order_relaxed) < order
                     ? SMB_DEFERRED
                     : SMB_OK;
    if (status == SMB_DEFERRED) {
        /* Searches from the end, because orders are given in turn, so the last one is nearly always
         * lower. */
        struct wait *before = bundle->waiting_last;
        while (before && before->order > order)
            before = before->before;
        wait->order = order;
        wait->in_replica = true;
        wait->before = before;
        wait->after = before ? before->after : bundle->waiting;
        *(before ? &before->after : &bundle->waiting) = wait;
        *(wait->after ? &wait->after->before : &bundle->waiting_last) = wait;
    }
    pthread_mutex_unlock(&bundle->lock);
    return status;
}

bool replica_forget(struct replica *replica, struct wait *wait)
{
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&bundle->lock);
    bool waited = wait->in_replica;
    if (waited)
        unlink_waiting(bundle, wait);
    pthread_mutex_unlock(&bundle->lock);
    return waited;
}

/* ---- forwarding ------------------------------------------------------------------------------ */

/* Call with the lock held. Frees everything that the last copy left. */
static void forget_copy(struct replica *replica)
{
    free(replica->record_indices);
    replica->record_indices = NULL;
    replica->record_count = replica->records_done = 0;
    replica->evictions = replica->ended_evictions = 0;
}

void bundle_end_copy(struct segment_bundle *bundle)
{
    for (struct replica *at = bundle->members; at; at = at->next)
        forget_copy(at);
    bundle->copy = (struct copy){0};
}

void bundle_begin_at(struct segment_bundle *bundle, uint32_t epoch)
{
    pthread_mutex_lock(&bundle->lock);
    if (atomic_load_explicit(&bundle->role, memory_order_relaxed) == SMB_REPLICA_NONE &&
        epoch > atomic_load_explicit(&bundle->epoch, memory_order_relaxed))
        atomic_store_explicit(&bundle->epoch, epoch, memory_order_release);
    pthread_mutex_unlock(&bundle->lock);
}

void bundle_stop_forwarding(struct segment_bundle *bundle, int status)
{
    feed_clear(&bundle->feed);
    bundle_end_copy(bundle);
    pthread_cond_broadcast(&bundle->room);
    bundle->question_pending = false;
    atomic_store_explicit(&bundle->paired, false, memory_order_release);
    if (status == SMB_OK)
        atomic_store_explicit(&bundle->confirmed,
                              atomic_load_explicit(&bundle->order, memory_order_relaxed),
                              memory_order_release);
    bundle_answer_waiting(bundle, UINT64_MAX, status);
}

bool bundle_is_primary(const struct segment_bundle *bundle)
{
    return atomic_load_explicit(&bundle->role, memory_order_acquire) == SMB_REPLICA_PRIMARY;
}
