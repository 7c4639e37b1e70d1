#include "server/forwarder.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "server/copy.h"
#include "server/replica_state.h"
#include "server/server.h"
#include "sync/sync.h"

enum { EVENTS_PER_WAIT = 64 };

/* Call with the lock held. */
static void confirm(struct segment_bundle *bundle, struct forward *done)
{
    if (done->asked_ns) {
        bundle->asked_at_ns = done->asked_ns;
        bundle->question_pending = false;
    }
    atomic_store_explicit(&bundle->confirmed, done->order, memory_order_release);
    uint64_t order = done->order;
    feed_free(&bundle->feed, done);
    if (bundle->seen_off > 0 ||
        (bundle->copy.under_way &&
         (bundle->feed.queued_bytes < COPY_QUEUED_BYTES_MAX || order >= bundle->copy.order)))
        pthread_cond_broadcast(&bundle->room);
    bundle_answer_waiting(bundle, order, SMB_OK);
}

static void receive_answers(struct segment_bundle *bundle)
{
    pthread_mutex_lock(&bundle->lock);
    struct forward *done;
    while ((done = feed_receive(&bundle->feed)))
        confirm(bundle, done);
    feed_send(&bundle->feed);
    bundle_unlock(bundle);
}

static void *run_forwarder(void *argument)
{
    struct smb_server *server = argument;
    struct epoll_event events[EVENTS_PER_WAIT];
    while (!atomic_load_explicit(&server->stop_forwarding, memory_order_acquire)) {
        int count = epoll_wait(server->forward_epoll, events, EVENTS_PER_WAIT, -1);
        for (int i = 0; i < count; i++) {
            /* The event has the segment's id, as the segment may have been deleted meanwhile. 0 is
             * a wakeup. */
            struct smb_segment *segment;
            struct replica *replica = events[i].data.u64
                                          ? replica_of(server, events[i].data.u64, &segment)
                                          : NULL;
            if (!replica)
                continue;
            receive_answers(replica->bundle);
            smb_segment_release(segment);
        }
    }
    return NULL;
}

/* Started for the first segment with two copies, so that other servers pay for no thread. */
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
        if (error) { /* the caller will try again, so everything must be undone */
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
    pthread_mutex_lock(&replica->bundle->lock);
    memcpy(why, replica->bundle->feed.why, SMB_WHY_BYTES);
    bundle_unlock(replica->bundle);
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
    struct segment_bundle *bundle = replica->bundle;
    int status = server->guarded && !tls ? SMB_DENIED : start_forwarder(server);
    if (status == SMB_OK && tls && !(channel.tls = tls_begin(tls, fd, expected)))
        status = SMB_OUT_OF_MEMORY;
    pthread_mutex_lock(&bundle->lock);
    /* The forwarder looks for a feed by its member's id. It would not find a member that has left,
     * so nobody would read the answers. */
    if (status == SMB_OK && (!is_paired(bundle) || replica->left ||
                             epoch != atomic_load_explicit(&bundle->epoch, memory_order_relaxed)))
        status = SMB_STALE_EPOCH;
    if (status == SMB_OK && bundle->words_lost)
        status = SMB_OUT_OF_MEMORY;
    if (status == SMB_OK) {
        feed_connect(&bundle->feed, channel, bundle->id, id, epoch, instance);
        if (bundle_watch_feed(bundle, id, EPOLL_CTL_ADD))
            feed_send(&bundle->feed);
        else
            status = SMB_SYSTEM;
    } else {
        channel_close(&channel);
    }
    bundle_unlock(bundle);
    smb_segment_release(segment);
    return status;
}

int smb_server_suspend(struct smb_server *server, uint64_t id)
{
    struct smb_segment *segment;
    struct replica *replica = replica_of(server, id, &segment);
    if (!replica)
        return SMB_NOT_FOUND;
    pthread_mutex_lock(&replica->bundle->lock);
    /* Sends their clients elsewhere. The changes stay here, unconfirmed. */
    bundle_answer_waiting(replica->bundle, UINT64_MAX, SMB_STALE_EPOCH);
    pthread_mutex_unlock(&replica->bundle->lock);
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
    bundle_tell_change(server);
}

struct replica_list {
    struct smb_replica_status *replicas;
    uint64_t most, found;
};

static void look_at(void *argument, struct smb_segment *segment)
{
    struct replica_list *list = argument;
    struct replica *replica = replica_at(segment);
    if (!replica)
        return;
    if (list->found < list->most) {
        struct segment_bundle *bundle = replica->bundle;
        pthread_mutex_lock(&bundle->lock);
        uint64_t order = atomic_load_explicit(&bundle->order, memory_order_relaxed);
        list->replicas[list->found] = (struct smb_replica_status){
            .segment = replica->id,
            .group = bundle->id,
            .epoch = atomic_load_explicit(&bundle->epoch, memory_order_relaxed),
            .role = atomic_load_explicit(&bundle->role, memory_order_relaxed),
            .paired = is_paired(bundle),
            .dialled = feed_is_dialled(&bundle->feed),
            .broken_ms = bundle->feed.broken_ns
                             ? 1 + (uint32_t)((smb_now_ns() - bundle->feed.broken_ns) / 1000000U)
                             : 0,
            .unconfirmed = order - atomic_load_explicit(&bundle->confirmed, memory_order_relaxed),
            .queued_bytes = bundle->feed.queued_bytes,
            .refused = bundle->feed.refused};
        pthread_mutex_unlock(&bundle->lock);
    }
    list->found++;
}

uint64_t smb_server_replicas(struct smb_server *server, struct smb_replica_status *replicas,
                             uint64_t most)
{
    struct replica_list list = {.replicas = replicas, .most = most};
    server_each_segment(server, look_at, &list);
    return list.found;
}
