#include "server/group.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "memory/sync.h"
#include "server/copy.h"
#include "server/lanes.h"
#include "server/replica_state.h"
#include "server/server.h"
#include "server/waits.h"

enum { EVENTS_PER_WAIT = 64, SEE_OFF_MS = 1000 };

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

/* With the lock: the forwarder finds the group by that member. false: there is no connection any
 * more. */
static bool watch_feed(struct replica_group *group, uint64_t id, int how)
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
        watch_feed(group, group->members->id, EPOLL_CTL_MOD);
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

void group_append(struct replica *replica, struct forward *forward)
{
    struct replica_group *group = replica->group;
    uint64_t order = atomic_load_explicit(&group->order, memory_order_relaxed) + 1;
    atomic_store_explicit(&group->order, order, memory_order_release);
    feed_append(&group->feed, forward, order,
                atomic_load_explicit(&group->epoch, memory_order_relaxed));
}

/* Wakes the thread that looks after connections. */
static void tell_change(struct smb_server *server)
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
        tell_change(server);
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

/* With the lock: those up to that order are answered; with another status than SMB_OK, refused. */
static void answer_waiting(struct replica_group *group, uint64_t order, int status)
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

/* ---- roles ----------------------------------------------------------------------------------- */

/* With the lock. */
static void end_copy(struct replica_group *group)
{
    for (struct replica *at = group->members; at; at = at->next)
        replica_forget_copy(at);
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
    end_copy(group);
    pthread_cond_broadcast(&group->room);
    group->question_pending = false;
    atomic_store_explicit(&group->paired, false, memory_order_release);
    if (status == SMB_OK)
        atomic_store_explicit(&group->confirmed,
                              atomic_load_explicit(&group->order, memory_order_relaxed),
                              memory_order_release);
    answer_waiting(group, UINT64_MAX, status);
}

static void take_role(struct replica_group *group, uint32_t epoch, int role, bool paired,
                      bool copying, const char *peer)
{
    pthread_mutex_lock(&group->lock);
    /* Before `paired`: whoever finds it unpaired and a primary takes it for the only copy. */
    if (role != SMB_REPLICA_PRIMARY)
        atomic_store_explicit(&group->role, role, memory_order_release);
    bool goes_on = role == SMB_REPLICA_PRIMARY && paired && !copying && group->copy.whole;
    if (goes_on) {
        /* The new backup still has to get all that is queued. */
        feed_enter_epoch(&group->feed, epoch);
        end_copy(group);
    } else {
        group_stop_forwarding(group, role == SMB_REPLICA_PRIMARY ? SMB_OK : SMB_STALE_EPOCH);
        group->words_lost = false;
    }
    group->copied = 0;
    atomic_store_explicit(&group->paired, role == SMB_REPLICA_PRIMARY && paired,
                          memory_order_release);
    atomic_store_explicit(&group->yields, false, memory_order_release);
    strcpy(group->peer, peer);
    atomic_store_explicit(&group->epoch, epoch, memory_order_release);
    atomic_store_explicit(&group->role, role, memory_order_release);
    if (copying && role == SMB_REPLICA_PRIMARY)
        group->copy = (struct copy){.under_way = true};
    if (group->copy.under_way)
        group->settling = group->in_progress > 0;
    group->feed.broken_ns = smb_now_ns();
    group->told_works = false;
    pthread_mutex_unlock(&group->lock);
    tell_change(group->server);
}

/* It can have a backup that was not copied to if both are new, or if the copy has just become
 * whole. */
static bool may_take(struct replica_group *group, int role_now, int role, bool paired, bool copying)
{
    if (role != SMB_REPLICA_PRIMARY || !paired || copying || role_now == SMB_REPLICA_NONE)
        return true;
    pthread_mutex_lock(&group->lock);
    bool whole = group->copy.whole;
    pthread_mutex_unlock(&group->lock);
    return whole;
}

/* Of a segment with one copy, that may have another one from here on: nothing reads or changes it
 * but through this server. Requests that wait are made again, in the epoch that comes with its
 * role. */
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

/* It was the backup: the old primary's requests here end before another primary's begin. */
static void stop_following(struct replica_group *group, uint32_t epoch, int role)
{
    take_role(group, epoch, SMB_REPLICA_NONE, false, false, "");
    lanes_fence_session(group->server, group->id);
    FAILPOINT("replica.fenced");
    if (role != SMB_REPLICA_PRIMARY)
        return;
    struct smb_segment *members[GROUP_MEMBERS_MAX];
    int count = group_hold_members(group, members);
    for (int i = 0; i < count; i++)
        waits_take_over(members[i]);
    group_release_members(members, count);
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
        struct replica_group *group = replica_at(segment)->group;
        uint32_t epoch_now = atomic_load_explicit(&group->epoch, memory_order_relaxed);
        int role_now = atomic_load_explicit(&group->role, memory_order_relaxed);
        /* The other members' roles change with the first one's. */
        if (epoch > epoch_now || (epoch == epoch_now && role_now == SMB_REPLICA_NONE)) {
            if (!may_take(group, role_now, role, paired, copying)) {
                status = SMB_INVALID;
            } else {
                if (role_now == SMB_REPLICA_BACKUP)
                    stop_following(group, epoch, role);
                take_role(group, epoch, role, paired, copying, peer);
            }
        }
        /* Of each member by itself: a daemon that is killed in between told of all of them. */
        if (status == SMB_OK &&
            atomic_load_explicit(&group->epoch, memory_order_relaxed) == epoch &&
            atomic_load_explicit(&group->role, memory_order_relaxed) == role)
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
    struct replica_group *group = replica->group;
    pthread_mutex_lock(&server->roles_lock);
    int status = group_is_primary(group) && is_paired(group) &&
                         atomic_load_explicit(&group->epoch, memory_order_relaxed) == epoch
                     ? SMB_OK
                     : SMB_STALE_EPOCH;
    if (status == SMB_OK)
        atomic_store_explicit(&group->yields, true, memory_order_release);
    pthread_mutex_unlock(&server->roles_lock);
    smb_segment_release(segment);
    return status;
}

void smb_server_serve_until(struct smb_server *server, uint64_t boot_ns)
{
    atomic_store_explicit(&server->serving_until_ns, boot_ns, memory_order_release);
}

bool group_is_primary(const struct replica_group *group)
{
    return atomic_load_explicit(&group->role, memory_order_acquire) == SMB_REPLICA_PRIMARY;
}

/* ---- the forwarder --------------------------------------------------------------------------- */

/* With the lock. */
static void confirm(struct replica_group *group, struct forward *done)
{
    if (done->asked_ns) {
        group->asked_at_ns = done->asked_ns;
        group->question_pending = false;
    }
    atomic_store_explicit(&group->confirmed, done->order, memory_order_release);
    uint64_t order = done->order;
    feed_free(&group->feed, done);
    if (group->seen_off > 0 ||
        (group->copy.under_way &&
         (group->feed.queued_bytes < COPY_QUEUED_BYTES_MAX || order >= group->copy.order)))
        pthread_cond_broadcast(&group->room);
    answer_waiting(group, order, SMB_OK);
}

static void receive_answers(struct replica_group *group)
{
    pthread_mutex_lock(&group->lock);
    struct forward *done;
    while ((done = feed_receive(&group->feed)))
        confirm(group, done);
    feed_send(&group->feed);
    group_unlock(group);
}

static void *run_forwarder(void *argument)
{
    struct smb_server *server = argument;
    struct epoll_event events[EVENTS_PER_WAIT];
    while (!atomic_load_explicit(&server->stop_forwarding, memory_order_acquire)) {
        int count = epoll_wait(server->forward_epoll, events, EVENTS_PER_WAIT, -1);
        for (int i = 0; i < count; i++) {
            /* By id: it may have been deleted meanwhile. 0 is the wake. */
            struct smb_segment *segment;
            struct replica *replica = events[i].data.u64
                                          ? replica_of(server, events[i].data.u64, &segment)
                                          : NULL;
            if (!replica)
                continue;
            receive_answers(replica->group);
            smb_segment_release(segment);
        }
    }
    return NULL;
}

/* At the first segment with two copies: others cost no thread. */
static int start_forwarder(struct smb_server *server)
{
    int status = SMB_OK;
    pthread_mutex_lock(&server->forward_lock);
    if (!server->forwarding) {
        server->forward_epoll = epoll_create1(EPOLL_CLOEXEC);
        server->forward_wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0};
        bool opened = server->forward_epoll >= 0 && server->forward_wake >= 0 &&
                      epoll_ctl(server->forward_epoll, EPOLL_CTL_ADD, server->forward_wake,
                                &event) == 0;
        int error = opened ? pthread_create(&server->forwarder, NULL, run_forwarder, server)
                           : errno;
        server->forwarding = error == 0;
        if (error) { /* it is tried again and again: nothing of it may stay */
            if (server->forward_epoll >= 0)
                close(server->forward_epoll);
            if (server->forward_wake >= 0)
                close(server->forward_wake);
            errno = error;
            status = SMB_SYSTEM;
        }
    }
    pthread_mutex_unlock(&server->forward_lock);
    return status;
}

void group_stop_forwarder(struct smb_server *server)
{
    if (!server->forwarding)
        return;
    uint64_t one = 1;
    atomic_store_explicit(&server->stop_forwarding, true, memory_order_release);
    if (write(server->forward_wake, &one, sizeof one) == sizeof one)
        pthread_join(server->forwarder, NULL);
    close(server->forward_epoll);
    close(server->forward_wake);
    server->forwarding = false;
}

/* ---- for the control threads ----------------------------------------------------------------- */

int smb_server_feed_why(struct smb_server *server, uint64_t id, char why[SMB_WHY_BYTES])
{
    struct smb_segment *segment;
    struct replica *replica = replica_of(server, id, &segment);
    why[0] = 0;
    if (!replica)
        return SMB_NOT_FOUND;
    pthread_mutex_lock(&replica->group->lock);
    memcpy(why, replica->group->feed.why, SMB_WHY_BYTES);
    group_unlock(replica->group);
    smb_segment_release(segment);
    return SMB_OK;
}

int smb_server_feed(struct smb_server *server, uint64_t id, uint32_t epoch, int fd,
                    uint64_t instance, struct smb_tls *tls, const char *expected)
{
    struct smb_segment *segment;
    struct replica *replica = replica_of(server, id, &segment);
    struct channel channel = {.fd = fd};
    if (!replica) {
        channel_close(&channel);
        return SMB_NOT_FOUND;
    }
    struct replica_group *group = replica->group;
    int status = server->guarded && !tls ? SMB_DENIED : start_forwarder(server);
    if (status == SMB_OK && tls && !(channel.tls = tls_begin(tls, fd, expected)))
        status = SMB_OUT_OF_MEMORY;
    pthread_mutex_lock(&group->lock);
    /* One that has left is not found by its name: nobody would read the answers. */
    if (status == SMB_OK && (!is_paired(group) || replica->left ||
                             epoch != atomic_load_explicit(&group->epoch, memory_order_relaxed)))
        status = SMB_STALE_EPOCH;
    if (status == SMB_OK && group->words_lost)
        status = SMB_OUT_OF_MEMORY;
    if (status == SMB_OK) {
        feed_connect(&group->feed, channel, group->id, id, epoch, instance);
        if (watch_feed(group, id, EPOLL_CTL_ADD))
            feed_send(&group->feed);
        else
            status = SMB_SYSTEM;
    } else {
        channel_close(&channel);
    }
    group_unlock(group);
    smb_segment_release(segment);
    return status;
}

int smb_server_suspend(struct smb_server *server, uint64_t id)
{
    struct smb_segment *segment;
    struct replica *replica = replica_of(server, id, &segment);
    if (!replica)
        return SMB_NOT_FOUND;
    pthread_mutex_lock(&replica->group->lock);
    /* Their clients ask elsewhere. The changes stay here, not confirmed. */
    answer_waiting(replica->group, UINT64_MAX, SMB_STALE_EPOCH);
    pthread_mutex_unlock(&replica->group->lock);
    sync_send_away(replica->sync, SMB_STALE_EPOCH);
    smb_segment_release(segment);
    return SMB_OK;
}

uint64_t smb_server_await_replicas(struct smb_server *server, uint64_t seen, uint32_t timeout_ms)
{
    uint64_t until_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000U),
                             .tv_nsec = (long)(until_ns % 1000000000U)};
    pthread_mutex_lock(&server->forward_lock);
    while (server->replica_changes == seen &&
           (timeout_ms == 0
                ? pthread_cond_wait(&server->replica_changed, &server->forward_lock)
                : pthread_cond_clockwait(&server->replica_changed, &server->forward_lock,
                                         CLOCK_MONOTONIC, &until)) == 0)
        ;
    uint64_t changes = server->replica_changes;
    pthread_mutex_unlock(&server->forward_lock);
    return changes;
}

void smb_server_wake_replicas(struct smb_server *server)
{
    tell_change(server);
}

struct look {
    struct smb_replica_status *replicas;
    uint64_t most, found;
};

static void look_at(void *argument, struct smb_segment *segment)
{
    struct look *look = argument;
    struct replica *replica = replica_at(segment);
    if (!replica)
        return;
    if (look->found < look->most) {
        struct replica_group *group = replica->group;
        pthread_mutex_lock(&group->lock);
        uint64_t order = atomic_load_explicit(&group->order, memory_order_relaxed);
        look->replicas[look->found] = (struct smb_replica_status){
            .segment = replica->id,
            .group = group->id,
            .epoch = atomic_load_explicit(&group->epoch, memory_order_relaxed),
            .role = atomic_load_explicit(&group->role, memory_order_relaxed),
            .paired = is_paired(group),
            .dialled = feed_is_dialled(&group->feed),
            .broken_ms = group->feed.broken_ns
                             ? 1 + (uint32_t)((smb_now_ns() - group->feed.broken_ns) / 1000000U)
                             : 0,
            .unconfirmed = order - atomic_load_explicit(&group->confirmed, memory_order_relaxed),
            .queued_bytes = group->feed.queued_bytes,
            .refused = group->feed.refused};
        pthread_mutex_unlock(&group->lock);
    }
    look->found++;
}

uint64_t smb_server_replicas(struct smb_server *server, struct smb_replica_status *replicas,
                             uint64_t most)
{
    struct look look = {.replicas = replicas, .most = most};
    server_each_segment(server, look_at, &look);
    return look.found;
}
