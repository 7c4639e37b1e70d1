#include "server/forwarder.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "memory/sync.h"
#include "server/copy.h"
#include "server/replica_state.h"
#include "server/server.h"

enum { EVENTS_PER_WAIT = 64 };

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
    group_answer_waiting(group, order, SMB_OK);
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

void forwarder_stop(struct smb_server *server)
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
        if (group_watch_feed(group, id, EPOLL_CTL_ADD))
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
    group_answer_waiting(replica->group, UINT64_MAX, SMB_STALE_EPOCH);
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
    group_tell_change(server);
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
