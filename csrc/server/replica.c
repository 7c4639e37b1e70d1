#include "server/replica.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "memory/format.h"
#include "server/counters.h"
#include "server/copy.h"
#include "server/lanes.h"
#include "server/replica_state.h"
#include "server/server.h"
#include "server/waits.h"

enum { EVENTS_PER_WAIT = 64 };

/* ---- memory ---------------------------------------------------------------------------------- */

/* A change of a lock's or version's words, in the order of all changes. sync.h has its mutex. */
static void forward_words(void *argument, const uint8_t image[SYNC_IMAGE_BYTES])
{
    struct replica *replica = argument;
    pthread_mutex_lock(&replica->lock);
    if (is_paired(replica) && !replica->words_lost) {
        struct forward *made = feed_make(&replica->feed, SMB_FRAME_BYTES + SYNC_IMAGE_BYTES);
        if (made) {
            replica_encode(replica, made,
                           (struct smb_frame){.opcode = SMB_COPY,
                                              .op = SMB_COPIED_WORDS,
                                              .session = replica->id,
                                              .lane = REPLICA_LANE,
                                              .sequence = 1});
            memcpy(made->frame + SMB_FRAME_BYTES, image, SYNC_IMAGE_BYTES);
            replica_append(replica, made);
            feed_send(&replica->feed);
        } else {
            /* The segment loses its backup: it stays broken until the coordinator says so. */
            replica->words_lost = true;
            replica->copy.failed = true;
            feed_disconnect(&replica->feed);
        }
    }
    replica_unlock(replica);
}

int replica_create(struct smb_server *server, struct smb_segment *segment)
{
    struct served *served = served_of(segment);
    struct smb_segment_info info;
    smb_segment_info(segment, &info);
    struct replica *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    uint64_t chunks = format_chunk_count(info.data_bytes, info.chunk_bytes);
    made->chunk_orders = calloc(chunks, sizeof *made->chunk_orders);
    if (!made->chunk_orders) {
        free(made);
        return SMB_OUT_OF_MEMORY;
    }
    made->server = server;
    made->id = info.id;
    made->records = served->records;
    made->sync = served->sync;
    made->chunk_bytes = info.chunk_bytes;
    made->data_bytes = info.data_bytes;
    made->dtype = (uint32_t)smb_segment_dtype(segment);
    feed_create(&made->feed);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->room, NULL);
    sync_on_change(made->sync, forward_words, made);
    atomic_store_explicit(&served->replica, made, memory_order_release);
    return SMB_OK;
}

void replica_destroy(struct replica *replica)
{
    SMB_ASSERT(!replica->waiting);
    feed_destroy(&replica->feed);
    pthread_mutex_destroy(&replica->lock);
    pthread_cond_destroy(&replica->room);
    free(replica->copy.places);
    free(replica->chunk_orders);
    free(replica);
}

void replica_append(struct replica *replica, struct forward *forward)
{
    uint64_t order = atomic_load_explicit(&replica->order, memory_order_relaxed) + 1;
    atomic_store_explicit(&replica->order, order, memory_order_release);
    feed_append(&replica->feed, forward, order,
                atomic_load_explicit(&replica->epoch, memory_order_relaxed));
}

/* Wakes the thread that looks after connections. */
static void tell_change(struct smb_server *server)
{
    pthread_mutex_lock(&server->forward_lock);
    server->replica_changes++;
    pthread_cond_broadcast(&server->replica_changed);
    pthread_mutex_unlock(&server->forward_lock);
}

void replica_unlock(struct replica *replica)
{
    bool works = replica->feed.broken_ns == 0, changed = works != replica->told_works;
    replica->told_works = works;
    pthread_mutex_unlock(&replica->lock);
    if (changed)
        tell_change(replica->server);
}

/* ---- what waits ------------------------------------------------------------------------------ */

static void unlink_waiting(struct replica *replica, struct wait *wait)
{
    if (wait->before)
        wait->before->after = wait->after;
    else
        replica->waiting = wait->after;
    if (wait->after)
        wait->after->before = wait->before;
    else
        replica->waiting_last = wait->before;
    wait->before = wait->after = NULL;
    wait->in_replica = false;
}

/* With the lock: those up to that order are answered; with another status than SMB_OK, refused. */
static void answer_waiting(struct replica *replica, uint64_t order, int status)
{
    while (replica->waiting && replica->waiting->order <= order) {
        struct wait *wait = replica->waiting;
        unlink_waiting(replica, wait);
        if (status != SMB_OK)
            wait->answer = (struct sync_answer){.status = status};
        wait_answered(wait);
    }
}

int replica_await(struct replica *replica, struct wait *wait, uint64_t order)
{
    pthread_mutex_lock(&replica->lock);
    int status = !replica_is_primary(replica) ? SMB_STALE_EPOCH
                 : atomic_load_explicit(&replica->confirmed, memory_order_relaxed) < order
                     ? SMB_DEFERRED
                     : SMB_OK;
    if (status == SMB_DEFERRED) {
        /* Nearly always the last: orders are given in turn. */
        struct wait *before = replica->waiting_last;
        while (before && before->order > order)
            before = before->before;
        wait->order = order;
        wait->in_replica = true;
        wait->before = before;
        wait->after = before ? before->after : replica->waiting;
        *(before ? &before->after : &replica->waiting) = wait;
        *(wait->after ? &wait->after->before : &replica->waiting_last) = wait;
    }
    pthread_mutex_unlock(&replica->lock);
    return status;
}

bool replica_forget(struct replica *replica, struct wait *wait)
{
    pthread_mutex_lock(&replica->lock);
    bool waited = wait->in_replica;
    if (waited)
        unlink_waiting(replica, wait);
    pthread_mutex_unlock(&replica->lock);
    return waited;
}

/* ---- roles ----------------------------------------------------------------------------------- */

void replica_stop_forwarding(struct replica *replica, int status)
{
    feed_clear(&replica->feed);
    free(replica->copy.places);
    replica->copy = (struct copy){0};
    pthread_cond_broadcast(&replica->room);
    replica->asking = false;
    atomic_store_explicit(&replica->paired, false, memory_order_release);
    if (status == SMB_OK)
        atomic_store_explicit(&replica->confirmed,
                              atomic_load_explicit(&replica->order, memory_order_relaxed),
                              memory_order_release);
    answer_waiting(replica, UINT64_MAX, status);
}

static void take_role(struct replica *replica, uint32_t epoch, int role, bool paired, bool copying,
                      const char *peer)
{
    pthread_mutex_lock(&replica->lock);
    /* Before `paired`: whoever finds it unpaired and a primary takes it for the only copy. */
    if (role != SMB_REPLICA_PRIMARY)
        atomic_store_explicit(&replica->role, role, memory_order_release);
    bool goes_on = role == SMB_REPLICA_PRIMARY && paired && !copying && replica->copy.whole;
    if (goes_on) {
        /* The new backup still has to get all that is queued. */
        feed_enter_epoch(&replica->feed, epoch);
        free(replica->copy.places);
        replica->copy = (struct copy){0};
    } else {
        replica_stop_forwarding(replica, role == SMB_REPLICA_PRIMARY ? SMB_OK : SMB_STALE_EPOCH);
        replica->words_lost = false;
    }
    atomic_store_explicit(&replica->paired, role == SMB_REPLICA_PRIMARY && paired,
                          memory_order_release);
    atomic_store_explicit(&replica->yields, false, memory_order_release);
    strcpy(replica->peer, peer);
    atomic_store_explicit(&replica->epoch, epoch, memory_order_release);
    atomic_store_explicit(&replica->role, role, memory_order_release);
    if (copying && role == SMB_REPLICA_PRIMARY)
        replica->copy = (struct copy){.under_way = true, .settling = replica->in_progress > 0};
    replica->feed.broken_ns = smb_now_ns();
    replica->told_works = false;
    pthread_mutex_unlock(&replica->lock);
    tell_change(replica->server);
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

/* It can have a backup that was not copied to if both are new, or if the copy has just become
 * whole. */
static bool may_take(struct replica *replica, int role_now, int role, bool paired, bool copying)
{
    if (role != SMB_REPLICA_PRIMARY || !paired || copying || role_now == SMB_REPLICA_NONE)
        return true;
    pthread_mutex_lock(&replica->lock);
    bool whole = replica->copy.whole;
    pthread_mutex_unlock(&replica->lock);
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

int smb_server_set_replica(struct smb_server *server, uint64_t id, uint32_t epoch, int role,
                           bool paired, bool copying, const char *peer)
{
    if (strnlen(peer, SMB_SERVER_NAME_BYTES) == SMB_SERVER_NAME_BYTES)
        return SMB_INVALID;
    struct smb_segment *segment = server_find(server, id);
    if (!segment)
        return SMB_NOT_FOUND;
    pthread_mutex_lock(&server->roles_lock);
    int gated = replica_at(segment)           ? SMB_OK
                : role == SMB_REPLICA_PRIMARY ? gate_segment(server, segment)
                                              : SMB_INVALID;
    struct replica *replica = replica_at(segment);
    if (gated != SMB_OK) {
        pthread_mutex_unlock(&server->roles_lock);
        smb_segment_release(segment);
        return gated;
    }
    uint32_t epoch_now = atomic_load_explicit(&replica->epoch, memory_order_relaxed);
    int role_now = atomic_load_explicit(&replica->role, memory_order_relaxed);
    int status = SMB_OK;
    if (epoch > epoch_now || (epoch == epoch_now && role_now == SMB_REPLICA_NONE)) {
        if (!may_take(replica, role_now, role, paired, copying)) {
            status = SMB_INVALID;
        } else {
            if (role_now == SMB_REPLICA_BACKUP) {
                /* The old primary's requests here end before another primary's begin. */
                take_role(replica, epoch, SMB_REPLICA_NONE, false, false, "");
                lanes_fence_session(server, id);
                FAILPOINT("replica.fenced");
                if (role == SMB_REPLICA_PRIMARY)
                    waits_take_over(segment);
            }
            take_role(replica, epoch, role, paired, copying, peer);
        }
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
    pthread_mutex_lock(&server->roles_lock);
    int status = replica_is_primary(replica) && is_paired(replica) &&
                         atomic_load_explicit(&replica->epoch, memory_order_relaxed) == epoch
                     ? SMB_OK
                     : SMB_STALE_EPOCH;
    if (status == SMB_OK)
        atomic_store_explicit(&replica->yields, true, memory_order_release);
    pthread_mutex_unlock(&server->roles_lock);
    smb_segment_release(segment);
    return status;
}

void smb_server_serve_until(struct smb_server *server, uint64_t boot_ns)
{
    atomic_store_explicit(&server->serving_until_ns, boot_ns, memory_order_release);
}

bool replica_serves(const struct replica *replica, uint32_t epoch, bool fed)
{
    /* The role last: it is given after the epoch. */
    int role = atomic_load_explicit(&replica->role, memory_order_acquire);
    return role == (fed ? SMB_REPLICA_BACKUP : SMB_REPLICA_PRIMARY) &&
           atomic_load_explicit(&replica->epoch, memory_order_acquire) == epoch;
}

bool replica_is_primary(const struct replica *replica)
{
    return atomic_load_explicit(&replica->role, memory_order_acquire) == SMB_REPLICA_PRIMARY;
}

bool replica_allows(const struct smb_frame *frame)
{
    switch (frame->opcode) {
    case SMB_READ:
    case SMB_WRITE:
    case SMB_ACCUMULATE:
    case SMB_FILL:
    case SMB_ACCUMULATE_FROM:
    case SMB_FETCH_ADD:
    case SMB_COMPARE_SWAP:
    case SMB_WATERMARK:
    case SMB_LOCK:
    case SMB_UNLOCK:
    case SMB_RENEW:
    case SMB_FENCE:
    case SMB_AWAIT_VERSION:
    case SMB_PUBLISH:
    case SMB_PIN:
    case SMB_UNPIN: return true;
    case SMB_APPLY: return smb_rule_states(frame->op) == 0;
    default: return false;
    }
}

/* ---- changes --------------------------------------------------------------------------------- */

void replica_encode(const struct replica *replica, struct forward *forward, struct smb_frame frame)
{
    frame.epoch = atomic_load_explicit(&replica->epoch, memory_order_relaxed);
    frame.segment = replica->id;
    frame.status = 0;
    frame.flags &= SMB_FLAG_WIRE;
    frame.payload = forward->bytes - SMB_FRAME_BYTES;
    smb_frame_encode(&frame, forward->frame);
}

/* With the lock. */
static int may_begin(struct replica *replica)
{
    if (!replica_is_primary(replica))
        return SMB_STALE_EPOCH;
    return replica->copy.settling ||
                   (is_paired(replica) && replica->feed.queued_bytes > REPLICA_QUEUED_BYTES_MAX)
               ? SMB_BUSY
               : SMB_OK;
}

int replica_prepare_sync(struct replica *replica)
{
    pthread_mutex_lock(&replica->lock);
    int status = may_begin(replica);
    replica->in_progress += status == SMB_OK;
    pthread_mutex_unlock(&replica->lock);
    return status;
}

int replica_prepare(struct replica *replica, const struct smb_frame *frame, const uint8_t *words,
                    const uint8_t *payload, struct forward **forward)
{
    uint32_t body = smb_frame_body(frame);
    struct forward *made = NULL;
    pthread_mutex_lock(&replica->lock);
    bool paired = is_paired(replica);
    int status = may_begin(replica);
    if (status == SMB_OK && paired && !(made = feed_make(&replica->feed, SMB_FRAME_BYTES + body)))
        status = SMB_OUT_OF_MEMORY;
    replica->in_progress += status == SMB_OK;
    pthread_mutex_unlock(&replica->lock);
    *forward = made;
    if (!made)
        return status;
    replica_encode(replica, made, *frame);
    uint32_t before = words ? SMB_APPLY_BYTES : 0;
    if (words)
        memcpy(made->frame + SMB_FRAME_BYTES, words, before);
    if (payload && body > before)
        memcpy(made->frame + SMB_FRAME_BYTES + before, payload, body - before);
    return SMB_OK;
}

void replica_done(struct replica *replica, struct forward *forward)
{
    pthread_mutex_lock(&replica->lock);
    if (forward)
        feed_free(&replica->feed, forward);
    if (--replica->in_progress == 0)
        replica->copy.settling = false;
    feed_send(&replica->feed);
    replica_unlock(replica);
}

int replica_enqueue(struct replica *replica, struct forward *forward, uint64_t offset,
                    const uint64_t *result, uint64_t *order)
{
    int status = SMB_OK;
    *order = 0;
    pthread_mutex_lock(&replica->lock);
    if (is_paired(replica)) {
        if (replica->copy.under_way) {
            copy_tell_evictions(replica);
            if (offset / replica->chunk_bytes >= replica->copy.chunks_done)
                copy_make_note(replica, forward, result);
        }
        replica_append(replica, forward);
        *order = forward->order;
        /* Release: pairs with replica_check_read, of readers that do not take the chunk's lock. */
        atomic_store_explicit(&replica->chunk_orders[offset / replica->chunk_bytes], *order,
                              memory_order_release);
    } else {
        feed_free(&replica->feed, forward); /* it lost its backup, or its role, in between */
        status = replica_is_primary(replica) ? SMB_OK : SMB_STALE_EPOCH;
    }
    pthread_mutex_unlock(&replica->lock);
    return status;
}

int replica_prepare_refusal(struct replica *replica, const struct smb_frame *frame,
                            struct forward **forward)
{
    struct smb_frame note = {.opcode = SMB_REFUSED,
                             .session = frame->session,
                             .lane = frame->lane,
                             .sequence = frame->sequence};
    int status = replica_prepare(replica, &note, NULL, NULL, forward);
    return status == SMB_OUT_OF_MEMORY ? SMB_BUSY : status; /* a refusal cannot be refused */
}

void replica_enqueue_refusal(struct replica *replica, struct forward *forward)
{
    pthread_mutex_lock(&replica->lock);
    if (is_paired(replica) && replica->copy.under_way)
        copy_tell_evictions(replica);
    if (is_paired(replica))
        replica_append(replica, forward);
    else
        feed_free(&replica->feed, forward); /* it lost its backup, or its role, in between */
    pthread_mutex_unlock(&replica->lock);
}

/* ---- what may be told ------------------------------------------------------------------------ */

uint64_t replica_newest(struct replica *replica)
{
    pthread_mutex_lock(&replica->lock);
    uint64_t order = is_paired(replica)
                         ? atomic_load_explicit(&replica->order, memory_order_relaxed)
                     : replica_is_primary(replica) ? 0
                                                   : UINT64_MAX;
    pthread_mutex_unlock(&replica->lock);
    return order;
}

bool replica_has_confirmed(struct replica *replica, uint64_t order)
{
    return atomic_load_explicit(&replica->confirmed, memory_order_acquire) >= order;
}

/* With the lock: a question whether it is still the backup is on its way after this, unless memory
 * is out. */
static bool ask_backup(struct replica *replica)
{
    struct forward *question = feed_make(&replica->feed, SMB_FRAME_BYTES);
    if (!question)
        return false;
    replica_encode(replica, question, (struct smb_frame){.opcode = SMB_REPLICATE});
    question->asked_ns = smb_now_ns();
    replica->asking = true;
    replica_append(replica, question);
    feed_send(&replica->feed);
    return true;
}

/* Acquire: pairs with smb_server_yield. */
static bool lease_runs(const struct replica *replica)
{
    return !atomic_load_explicit(&replica->yields, memory_order_acquire) &&
           smb_boot_ns() <
               atomic_load_explicit(&replica->server->serving_until_ns, memory_order_acquire);
}

uint64_t replica_told_by_sync(struct replica *replica)
{
    uint64_t order = 0;
    pthread_mutex_lock(&replica->lock);
    /* Without memory it waits until the segment has other roles. */
    if (!replica_is_primary(replica) || replica->words_lost ||
        (is_paired(replica) && !lease_runs(replica) && !ask_backup(replica)))
        order = UINT64_MAX;
    else if (is_paired(replica))
        order = atomic_load_explicit(&replica->order, memory_order_relaxed);
    replica_unlock(replica);
    return order;
}

uint64_t replica_newest_of(const struct replica *replica, uint64_t offset)
{
    /* Acquire: pairs with replica_enqueue. Bytes of a change were read: then its order is seen. */
    return atomic_load_explicit(&replica->chunk_orders[offset / replica->chunk_bytes],
                                memory_order_acquire);
}

int replica_check_read(struct replica *replica, uint64_t order, uint64_t begun_ns)
{
    bool paired = is_paired(replica); /* before the role: take_role */
    if (!replica_is_primary(replica) || !replica_has_confirmed(replica, order))
        return SMB_BUSY; /* the next try of one that is none is refused at the gate */
    if (!paired || lease_runs(replica))
        return SMB_OK;
    /* The backup may have been promoted. It says that it was not, after the read began. */
    pthread_mutex_lock(&replica->lock);
    bool fresh = !is_paired(replica) || replica->asked_at_ns > begun_ns;
    if (!fresh && !replica->asking)
        ask_backup(replica);
    replica_unlock(replica);
    return fresh ? SMB_OK : SMB_BUSY;
}

/* ---- the forwarder --------------------------------------------------------------------------- */

/* With the lock. */
static void confirm(struct replica *replica, struct forward *done)
{
    if (done->asked_ns) {
        replica->asked_at_ns = done->asked_ns;
        replica->asking = false;
    }
    atomic_store_explicit(&replica->confirmed, done->order, memory_order_release);
    uint64_t order = done->order;
    feed_free(&replica->feed, done);
    if (replica->copy.under_way &&
        (replica->feed.queued_bytes < COPY_QUEUED_BYTES_MAX || order >= replica->copy.order))
        pthread_cond_broadcast(&replica->room);
    answer_waiting(replica, order, SMB_OK);
}

static void receive_answers(struct replica *replica)
{
    pthread_mutex_lock(&replica->lock);
    struct forward *done;
    while ((done = feed_receive(&replica->feed)))
        confirm(replica, done);
    feed_send(&replica->feed);
    replica_unlock(replica);
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
            receive_answers(replica);
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
        server->forwarding = server->forward_epoll >= 0 && server->forward_wake >= 0 &&
                             epoll_ctl(server->forward_epoll, EPOLL_CTL_ADD, server->forward_wake,
                                       &event) == 0 &&
                             pthread_create(&server->forwarder, NULL, run_forwarder, server) == 0;
        if (!server->forwarding)
            status = SMB_SYSTEM;
    }
    pthread_mutex_unlock(&server->forward_lock);
    return status;
}

void replica_stop_forwarder(struct smb_server *server)
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
    int status = server->guarded && !tls ? SMB_DENIED : start_forwarder(server);
    if (status == SMB_OK && tls && !(channel.tls = tls_begin(tls, fd, expected)))
        status = SMB_OUT_OF_MEMORY;
    pthread_mutex_lock(&replica->lock);
    if (status == SMB_OK && (!is_paired(replica) ||
                             epoch != atomic_load_explicit(&replica->epoch, memory_order_relaxed)))
        status = SMB_STALE_EPOCH;
    if (status == SMB_OK && replica->words_lost)
        status = SMB_OUT_OF_MEMORY;
    if (status == SMB_OK) {
        feed_connect(&replica->feed, channel, id, epoch, instance);
        /* Told at each change: a socket that was full and has room again, and each arrival. */
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.u64 = id};
        if (epoll_ctl(server->forward_epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
            feed_disconnect(&replica->feed);
            status = SMB_SYSTEM;
        } else {
            feed_send(&replica->feed);
        }
    } else {
        channel_close(&channel);
    }
    replica_unlock(replica);
    smb_segment_release(segment);
    return status;
}

int smb_server_suspend(struct smb_server *server, uint64_t id)
{
    struct smb_segment *segment;
    struct replica *replica = replica_of(server, id, &segment);
    if (!replica)
        return SMB_NOT_FOUND;
    pthread_mutex_lock(&replica->lock);
    /* Their clients ask elsewhere. The changes stay here, not confirmed. */
    answer_waiting(replica, UINT64_MAX, SMB_STALE_EPOCH);
    pthread_mutex_unlock(&replica->lock);
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
        pthread_mutex_lock(&replica->lock);
        uint64_t order = atomic_load_explicit(&replica->order, memory_order_relaxed);
        look->replicas[look->found] = (struct smb_replica_status){
            .segment = replica->id,
            .epoch = atomic_load_explicit(&replica->epoch, memory_order_relaxed),
            .role = atomic_load_explicit(&replica->role, memory_order_relaxed),
            .paired = is_paired(replica),
            .dialled = feed_is_dialled(&replica->feed),
            .broken_ms = replica->feed.broken_ns
                             ? 1 + (uint32_t)((smb_now_ns() - replica->feed.broken_ns) / 1000000U)
                             : 0,
            .unconfirmed = order - atomic_load_explicit(&replica->confirmed, memory_order_relaxed),
            .queued_bytes = replica->feed.queued_bytes,
            .refused = replica->feed.refused};
        pthread_mutex_unlock(&replica->lock);
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

/* ---- at the backup --------------------------------------------------------------------------- */

bool replica_has_copied(const struct replica *replica, uint64_t sequence)
{
    return sequence <= replica->copied;
}

void replica_note_copied(struct replica *replica, uint64_t sequence)
{
    replica->copied = sequence;
}

bool replica_is_peer(struct replica *replica, uint32_t epoch, const char *name)
{
    pthread_mutex_lock(&replica->lock);
    bool is = replica_serves(replica, epoch, true) && name[0] && strcmp(replica->peer, name) == 0;
    pthread_mutex_unlock(&replica->lock);
    return is;
}

void replica_feed_begins(struct replica *replica, const struct connection *feeder)
{
    pthread_mutex_lock(&replica->lock);
    replica->feeder = feeder;
    replica->feed.broken_ns = 0;
    replica_unlock(replica);
}

void replica_feed_ends(struct replica *replica, const struct connection *feeder)
{
    pthread_mutex_lock(&replica->lock);
    if (replica->feeder == feeder) {
        replica->feeder = NULL;
        replica->feed.broken_ns = smb_now_ns();
    }
    replica_unlock(replica);
}

void replica_close(struct replica *replica)
{
    pthread_mutex_lock(&replica->lock);
    atomic_store_explicit(&replica->role, SMB_REPLICA_NONE, memory_order_release);
    replica_stop_forwarding(replica, SMB_STALE_EPOCH);
    pthread_mutex_unlock(&replica->lock);
}
