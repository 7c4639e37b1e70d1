#include "server/group.h"

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

static struct replica_group **bucket_of(struct smb_server *server, uint64_t id)
{
    return &server->groups[id % GROUP_BUCKETS];
}

/* With forward_lock. NULL: no memory. */
static struct replica_group *make(struct smb_server *server, uint64_t id)
{
    struct replica_group *made = calloc(1, sizeof *made);
    if (!made)
        return NULL;
    made->server = server;
    made->id = id;
    feed_create(&made->feed);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->room, NULL);
    struct replica_group **bucket = bucket_of(server, id);
    made->next = *bucket;
    *bucket = made;
    return made;
}

/* With the lock. */
static int take_in(struct replica_group *group, struct replica *replica)
{
    int count = 0;
    for (struct replica *at = group->members; at; at = at->next) {
        if (at->chunk_bytes != replica->chunk_bytes || at->data_bytes != replica->data_bytes)
            return SMB_INVALID;
        count++;
    }
    if (count >= GROUP_MEMBERS_MAX)
        return SMB_INVALID;
    replica->next = group->members;
    group->members = replica;
    return SMB_OK;
}

int group_join(struct smb_server *server, uint64_t id, struct replica *replica)
{
    pthread_mutex_lock(&server->forward_lock);
    struct replica_group *group = *bucket_of(server, id);
    while (group && group->id != id)
        group = group->next;
    if (!group)
        group = make(server, id);
    if (group)
        group->references++;
    pthread_mutex_unlock(&server->forward_lock);
    if (!group)
        return SMB_OUT_OF_MEMORY;
    replica->group = group;
    pthread_mutex_lock(&group->lock);
    int status = take_in(group, replica);
    pthread_mutex_unlock(&group->lock);
    if (status != SMB_OK)
        group_release(group);
    return status;
}

bool group_watch_feed(struct replica_group *group, uint64_t id, int how)
{
    /* Told at each change: a socket that was full and has room again, and each arrival. */
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.u64 = id};
    group->fed_by = id;
    if (epoll_ctl(group->server->forward_epoll, how, group->feed.channel.fd, &event) == 0)
        return true;
    feed_disconnect(&group->feed);
    return false;
}

void group_leave(struct replica *replica)
{
    struct replica_group *group = replica->group;
    pthread_mutex_lock(&group->lock);
    struct replica **at = &group->members;
    while (*at && *at != replica)
        at = &(*at)->next;
    bool was_in = *at == replica;
    if (was_in)
        *at = replica->next;
    replica->left = true;
    if (was_in && !group->members) {
        atomic_store_explicit(&group->role, SMB_REPLICA_NONE, memory_order_release);
        group_stop_forwarding(group, SMB_STALE_EPOCH);
    } else if (was_in && group->fed_by == replica->id && feed_is_dialled(&group->feed)) {
        group_watch_feed(group, group->members->id, EPOLL_CTL_MOD);
    }
    group_unlock(group);
}

/* Whether the backup still has to get what comes up to that order, and can: a connection works, and
 * nobody else is about to be the primary. */
static bool waits_for(const struct replica_group *group, uint64_t order)
{
    return group->members && is_paired(group) && group->feed.broken_ns == 0 &&
           !atomic_load_explicit(&group->yields, memory_order_relaxed) &&
           atomic_load_explicit(&group->confirmed, memory_order_relaxed) < order;
}

/* Steps that name it may be on their way to the backup, which could not make them without it. Those
 * that have not begun by now find it deleted. */
void replica_see_off(struct replica *replica)
{
    struct replica_group *group = replica->group;
    uint64_t until_ns = smb_now_ns() + (uint64_t)SEE_OFF_MS * 1000000U;
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000U),
                             .tv_nsec = (long)(until_ns % 1000000000U)};
    pthread_mutex_lock(&group->lock);
    if (group->members && group->in_progress > 0)
        group->settling = true;
    int waited = 0;
    while (group->settling && waits_for(group, UINT64_MAX) && waited == 0)
        waited = pthread_cond_clockwait(&group->room, &group->lock, CLOCK_MONOTONIC, &until);
    uint64_t order = atomic_load_explicit(&group->order, memory_order_relaxed);
    group->seen_off++;
    while (waits_for(group, order) && waited == 0)
        waited = pthread_cond_clockwait(&group->room, &group->lock, CLOCK_MONOTONIC, &until);
    group->seen_off--;
    pthread_mutex_unlock(&group->lock);
}

struct replica_group *group_hold(struct replica_group *group)
{
    pthread_mutex_lock(&group->server->forward_lock);
    group->references++;
    pthread_mutex_unlock(&group->server->forward_lock);
    return group;
}

void group_release(struct replica_group *group)
{
    struct smb_server *server = group->server;
    pthread_mutex_lock(&server->forward_lock);
    bool last = --group->references == 0;
    if (last) {
        struct replica_group **at = bucket_of(server, group->id);
        while (*at != group)
            at = &(*at)->next;
        *at = group->next;
    }
    pthread_mutex_unlock(&server->forward_lock);
    if (!last)
        return;
    SMB_ASSERT(!group->waiting && !group->members);
    feed_destroy(&group->feed);
    pthread_mutex_destroy(&group->lock);
    pthread_cond_destroy(&group->room);
    free(group);
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

int group_hold_members(struct replica_group *group, struct smb_segment *members[GROUP_MEMBERS_MAX])
{
    uint64_t ids[GROUP_MEMBERS_MAX];
    int count = 0, held = 0;
    pthread_mutex_lock(&group->lock);
    for (struct replica *at = group->members; at; at = at->next)
        ids[count++] = at->id;
    pthread_mutex_unlock(&group->lock);
    for (int i = 0; i < count; i++) {
        struct smb_segment *found = server_find(group->server, ids[i]);
        if (found && replica_at(found) && replica_at(found)->group == group)
            members[held++] = found;
        else if (found)
            smb_segment_release(found);
    }
    return held;
}

void group_release_members(struct smb_segment *const *members, int count)
{
    for (int i = 0; i < count; i++)
        smb_segment_release(members[i]);
}

/* ---- order ----------------------------------------------------------------------------------- */

void group_encode(const struct replica *replica, struct forward *forward, struct smb_frame frame)
{
    const struct replica_group *group = replica->group;
    frame.epoch = atomic_load_explicit(&group->epoch, memory_order_relaxed);
    frame.segment = replica->id;
    frame.status = 0;
    frame.flags &= SMB_FLAG_WIRE;
    frame.payload = forward->bytes - SMB_FRAME_BYTES;
    smb_frame_encode(&frame, forward->frame);
}

void group_append(struct replica *replica, struct forward *forward)
{
    struct replica_group *group = replica->group;
    uint64_t order = atomic_load_explicit(&group->order, memory_order_relaxed) + 1;
    atomic_store_explicit(&group->order, order, memory_order_release);
    feed_append(&group->feed, forward, order,
                atomic_load_explicit(&group->epoch, memory_order_relaxed));
}

void group_tell_change(struct smb_server *server)
{
    pthread_mutex_lock(&server->forward_lock);
    server->replica_changes++;
    pthread_cond_broadcast(&server->replica_changed);
    pthread_mutex_unlock(&server->forward_lock);
}

void group_unlock(struct replica_group *group)
{
    struct smb_server *server = group->server;
    bool works = group->feed.broken_ns == 0, changed = works != group->told_works;
    group->told_works = works;
    pthread_mutex_unlock(&group->lock);
    if (changed)
        group_tell_change(server);
}

/* ---- what waits ------------------------------------------------------------------------------ */

static void unlink_waiting(struct replica_group *group, struct wait *wait)
{
    if (wait->before)
        wait->before->after = wait->after;
    else
        group->waiting = wait->after;
    if (wait->after)
        wait->after->before = wait->before;
    else
        group->waiting_last = wait->before;
    wait->before = wait->after = NULL;
    wait->in_replica = false;
}

void group_answer_waiting(struct replica_group *group, uint64_t order, int status)
{
    while (group->waiting && group->waiting->order <= order) {
        struct wait *wait = group->waiting;
        unlink_waiting(group, wait);
        if (status != SMB_OK)
            wait->answer = (struct sync_answer){.status = status};
        wait_answered(wait);
    }
}

int replica_await(struct replica *replica, struct wait *wait, uint64_t order)
{
    struct replica_group *group = replica->group;
    pthread_mutex_lock(&group->lock);
    int status = !group_is_primary(group) ? SMB_STALE_EPOCH
                 : atomic_load_explicit(&group->confirmed, memory_order_relaxed) < order
                     ? SMB_DEFERRED
                     : SMB_OK;
    if (status == SMB_DEFERRED) {
        /* Nearly always the last: orders are given in turn. */
        struct wait *before = group->waiting_last;
        while (before && before->order > order)
            before = before->before;
        wait->order = order;
        wait->in_replica = true;
        wait->before = before;
        wait->after = before ? before->after : group->waiting;
        *(before ? &before->after : &group->waiting) = wait;
        *(wait->after ? &wait->after->before : &group->waiting_last) = wait;
    }
    pthread_mutex_unlock(&group->lock);
    return status;
}

bool replica_forget(struct replica *replica, struct wait *wait)
{
    struct replica_group *group = replica->group;
    pthread_mutex_lock(&group->lock);
    bool waited = wait->in_replica;
    if (waited)
        unlink_waiting(group, wait);
    pthread_mutex_unlock(&group->lock);
    return waited;
}

/* ---- forwarding ------------------------------------------------------------------------------ */

/* With the lock. Nothing of the last copy stays. */
static void forget_copy(struct replica *replica)
{
    free(replica->places);
    replica->places = NULL;
    replica->place_count = replica->places_done = 0;
    replica->evictions = replica->ended_evictions = 0;
}

void group_end_copy(struct replica_group *group)
{
    for (struct replica *at = group->members; at; at = at->next)
        forget_copy(at);
    group->copy = (struct copy){0};
}

void group_begin_at(struct replica_group *group, uint32_t epoch)
{
    pthread_mutex_lock(&group->lock);
    if (atomic_load_explicit(&group->role, memory_order_relaxed) == SMB_REPLICA_NONE &&
        epoch > atomic_load_explicit(&group->epoch, memory_order_relaxed))
        atomic_store_explicit(&group->epoch, epoch, memory_order_release);
    pthread_mutex_unlock(&group->lock);
}

void group_stop_forwarding(struct replica_group *group, int status)
{
    feed_clear(&group->feed);
    group_end_copy(group);
    pthread_cond_broadcast(&group->room);
    group->question_pending = false;
    atomic_store_explicit(&group->paired, false, memory_order_release);
    if (status == SMB_OK)
        atomic_store_explicit(&group->confirmed,
                              atomic_load_explicit(&group->order, memory_order_relaxed),
                              memory_order_release);
    group_answer_waiting(group, UINT64_MAX, status);
}

bool group_is_primary(const struct replica_group *group)
{
    return atomic_load_explicit(&group->role, memory_order_acquire) == SMB_REPLICA_PRIMARY;
}
