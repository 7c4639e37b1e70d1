#include "server/replica.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/channel.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "memory/format.h"
#include "server/counters.h"
#include "server/lanes.h"
#include "server/server.h"
#include "server/waits.h"

enum {
    GREETING_FRAMES = 2, /* HELLO, REPLICATE */
    GREETING_BYTES = GREETING_FRAMES * SMB_FRAME_BYTES,
    SPARES_MAX = 16,
    SEND_PARTS = 16,
    EVENTS_PER_WAIT = 64,
    FLAGS_AT = 6 /* in a header: frame.c */
};

/* One frame on its way to the backup, or sent and not confirmed. */
struct forward {
    struct forward *next;
    uint64_t order;
    uint64_t asked_ns; /* of a question whether it is still the backup; 0: it is a change */
    uint32_t bytes;
    uint32_t room;
    bool was_sent; /* some of it, over any connection */
    uint8_t frame[];
};

struct replica {
    struct smb_server *server;
    uint64_t id;
    uint64_t chunk_bytes;
    pthread_mutex_t lock;
    _Atomic int role; /* enum smb_replica_role */
    _Atomic uint32_t epoch;
    _Atomic bool paired; /* primary: there is a backup, which has to have all that is told */
    _Atomic uint64_t order, confirmed;
    _Atomic uint64_t *chunk_orders; /* of each chunk the last change; written under its lock too */
    uint64_t asked_at_ns;           /* when the last question that was confirmed was asked */
    bool asking;                    /* one is on its way */
    int fd;                         /* to the backup; -1: none */
    uint64_t backup_instance;
    uint64_t broken_ns; /* since when there is no connection that works; 0: there is */
    uint8_t greeting[GREETING_BYTES];
    uint32_t greeting_sent, greeting_answered;
    struct forward *first, *last; /* what is not confirmed, by order */
    struct forward *unsent;       /* the first of them that is not sent whole */
    uint32_t unsent_done;         /* bytes of it that are */
    uint64_t queued_bytes;        /* prepared ones included */
    struct forward *spare;
    uint32_t spares;
    uint8_t in[SMB_FRAME_BYTES];
    uint32_t in_have;
    struct wait *waiting, *waiting_last; /* by order */
    const struct connection *feeder;     /* backup: the primary's, compared only */
};

/* ---- memory ---------------------------------------------------------------------------------- */

int replica_create(struct smb_server *server, struct smb_segment *segment, struct replica **replica)
{
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
    made->chunk_bytes = info.chunk_bytes;
    made->fd = -1;
    made->broken_ns = smb_now_ns();
    pthread_mutex_init(&made->lock, NULL);
    *replica = made;
    return SMB_OK;
}

static void free_all(struct forward *forward)
{
    while (forward) {
        struct forward *next = forward->next;
        free(forward);
        forward = next;
    }
}

void replica_destroy(struct replica *replica)
{
    SMB_ASSERT(!replica->waiting);
    if (replica->fd >= 0)
        close(replica->fd);
    free_all(replica->first);
    free_all(replica->spare);
    pthread_mutex_destroy(&replica->lock);
    free(replica->chunk_orders);
    free(replica);
}

static struct forward *make_forward(struct replica *replica, uint32_t bytes)
{
    struct forward *made = replica->spare;
    if (made && made->room >= bytes) {
        replica->spare = made->next;
        replica->spares--;
    } else {
        made = malloc(sizeof *made + bytes);
        if (!made)
            return NULL;
        made->room = bytes;
    }
    made->next = NULL;
    made->order = made->asked_ns = 0;
    made->was_sent = false;
    made->bytes = bytes;
    replica->queued_bytes += bytes;
    return made;
}

static void give_back(struct replica *replica, struct forward *forward)
{
    replica->queued_bytes -= forward->bytes;
    if (replica->spares < SPARES_MAX && forward->room > SMB_FRAME_BYTES) {
        forward->next = replica->spare;
        replica->spare = forward;
        replica->spares++;
    } else {
        free(forward);
    }
}

static void append(struct replica *replica, struct forward *forward)
{
    forward->order = atomic_load_explicit(&replica->order, memory_order_relaxed) + 1;
    atomic_store_explicit(&replica->order, forward->order, memory_order_release);
    if (replica->last)
        replica->last->next = forward;
    else
        replica->first = forward;
    replica->last = forward;
    if (!replica->unsent) {
        replica->unsent = forward;
        replica->unsent_done = 0;
    }
}

/* ---- the connection to the backup ------------------------------------------------------------ */

static bool is_paired(const struct replica *replica)
{
    return atomic_load_explicit(&replica->paired, memory_order_acquire);
}

static bool is_primary(const struct replica *replica)
{
    return atomic_load_explicit(&replica->role, memory_order_acquire) == SMB_REPLICA_PRIMARY;
}

/* With the lock. Frames that are sent and not confirmed are sent again over the next one, marked as
 * repetitions. */
static void disconnect(struct replica *replica)
{
    if (replica->fd >= 0)
        close(replica->fd);
    if (replica->broken_ns == 0)
        replica->broken_ns = smb_now_ns();
    replica->fd = -1;
    replica->greeting_sent = replica->greeting_answered = 0;
    replica->in_have = 0;
    replica->unsent = replica->first;
    replica->unsent_done = 0;
    for (struct forward *sent = replica->first; sent && sent->was_sent; sent = sent->next)
        sent->frame[FLAGS_AT] |= SMB_FLAG_RETRY;
}

/* With the lock. As much as the socket takes. */
static void send_some(struct replica *replica)
{
    while (replica->fd >= 0) {
        struct iovec parts[SEND_PARTS];
        int count = 0;
        if (replica->greeting_sent < GREETING_BYTES)
            parts[count++] = (struct iovec){replica->greeting + replica->greeting_sent,
                                            GREETING_BYTES - replica->greeting_sent};
        uint32_t skip = replica->unsent_done;
        for (struct forward *at = replica->unsent; at && count < SEND_PARTS; at = at->next) {
            parts[count++] = (struct iovec){at->frame + skip, at->bytes - skip};
            at->was_sent = true;
            skip = 0;
        }
        if (count == 0)
            return;
        struct channel channel = {.fd = replica->fd};
        ssize_t done = channel_write(&channel, parts, count);
        if (done < 0) {
            if (channel_failed(done))
                disconnect(replica);
            return; /* the forwarder is told when there is room */
        }
        uint64_t left = (uint64_t)done;
        uint32_t greeting = GREETING_BYTES - replica->greeting_sent;
        uint32_t of_greeting = left < greeting ? (uint32_t)left : greeting;
        replica->greeting_sent += of_greeting;
        left -= of_greeting;
        while (left > 0) {
            uint32_t missing = replica->unsent->bytes - replica->unsent_done;
            if (left < missing) {
                replica->unsent_done += (uint32_t)left;
                break;
            }
            left -= missing;
            replica->unsent = replica->unsent->next;
            replica->unsent_done = 0;
        }
    }
}

void replica_send(struct replica *replica)
{
    pthread_mutex_lock(&replica->lock);
    send_some(replica);
    pthread_mutex_unlock(&replica->lock);
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
    int status = !is_primary(replica) ? SMB_STALE_EPOCH
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

/* With the lock. Nothing is forwarded any more. Waiting requests are answered. A primary goes on
 * alone: as the only copy it has all that it tells of. Any other status sends clients elsewhere. */
static void stop_forwarding(struct replica *replica, int status)
{
    disconnect(replica);
    while (replica->first) {
        struct forward *forward = replica->first;
        replica->first = forward->next;
        give_back(replica, forward);
    }
    replica->last = replica->unsent = NULL;
    replica->asking = false;
    atomic_store_explicit(&replica->paired, false, memory_order_release);
    if (status == SMB_OK)
        atomic_store_explicit(&replica->confirmed,
                              atomic_load_explicit(&replica->order, memory_order_relaxed),
                              memory_order_release);
    answer_waiting(replica, UINT64_MAX, status);
}

static void take_role(struct replica *replica, uint32_t epoch, int role, bool paired)
{
    pthread_mutex_lock(&replica->lock);
    /* Before `paired`: whoever finds it unpaired and a primary takes it for the only copy. */
    if (role != SMB_REPLICA_PRIMARY)
        atomic_store_explicit(&replica->role, role, memory_order_release);
    if (role != SMB_REPLICA_PRIMARY || !paired)
        stop_forwarding(replica, role == SMB_REPLICA_PRIMARY ? SMB_OK : SMB_STALE_EPOCH);
    atomic_store_explicit(&replica->paired, role == SMB_REPLICA_PRIMARY && paired,
                          memory_order_release);
    atomic_store_explicit(&replica->epoch, epoch, memory_order_release);
    atomic_store_explicit(&replica->role, role, memory_order_release);
    replica->broken_ns = smb_now_ns();
    pthread_mutex_unlock(&replica->lock);
}

static struct replica *replica_of(struct smb_server *server, uint64_t id,
                                  struct smb_segment **segment)
{
    *segment = server_find(server, id);
    if (!*segment)
        return NULL;
    struct replica *replica = served_of(*segment)->replica;
    if (!replica)
        smb_segment_release(*segment);
    return replica;
}

int smb_server_set_replica(struct smb_server *server, uint64_t id, uint32_t epoch, int role,
                           bool paired)
{
    struct smb_segment *segment;
    struct replica *replica = replica_of(server, id, &segment);
    if (!replica)
        return SMB_NOT_FOUND;
    uint32_t epoch_now = atomic_load_explicit(&replica->epoch, memory_order_relaxed);
    int role_now = atomic_load_explicit(&replica->role, memory_order_relaxed);
    if (epoch > epoch_now || (epoch == epoch_now && role_now == SMB_REPLICA_NONE)) {
        if (role_now == SMB_REPLICA_BACKUP) {
            /* The old primary's requests here end before another primary's begin. */
            take_role(replica, epoch, SMB_REPLICA_NONE, false);
            lanes_fence_session(server, id);
            FAILPOINT("replica.fenced");
        }
        take_role(replica, epoch, role, paired);
    }
    smb_segment_release(segment);
    return SMB_OK;
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

bool replica_allows(const struct smb_frame *frame)
{
    switch (frame->opcode) {
    case SMB_READ:
    case SMB_WRITE:
    case SMB_ACCUMULATE:
    case SMB_FILL:
    case SMB_FETCH_ADD:
    case SMB_COMPARE_SWAP: return !(frame->flags & SMB_FLAG_FENCED);
    case SMB_WATERMARK: return true;
    default: return false;
    }
}

/* ---- changes --------------------------------------------------------------------------------- */

static void encode(const struct replica *replica, struct forward *forward, struct smb_frame frame)
{
    frame.epoch = atomic_load_explicit(&replica->epoch, memory_order_relaxed);
    frame.segment = replica->id;
    frame.status = 0;
    frame.flags &= SMB_FLAG_WIRE;
    frame.payload = forward->bytes - SMB_FRAME_BYTES;
    smb_frame_encode(&frame, forward->frame);
}

int replica_prepare(struct replica *replica, const struct smb_frame *frame, const uint8_t *payload,
                    struct forward **forward)
{
    uint32_t body = smb_frame_body(frame);
    struct forward *made = NULL;
    int status = SMB_OK;
    pthread_mutex_lock(&replica->lock);
    bool paired = is_paired(replica);
    if (!is_primary(replica))
        status = SMB_STALE_EPOCH;
    else if (paired && replica->queued_bytes > REPLICA_QUEUED_BYTES_MAX)
        status = SMB_BUSY;
    else if (paired && !(made = make_forward(replica, SMB_FRAME_BYTES + body)))
        status = SMB_OUT_OF_MEMORY;
    pthread_mutex_unlock(&replica->lock);
    *forward = made;
    if (!made)
        return status;
    encode(replica, made, *frame);
    if (body > 0)
        memcpy(made->frame + SMB_FRAME_BYTES, payload, body);
    return SMB_OK;
}

void replica_take_back(struct replica *replica, struct forward *forward)
{
    pthread_mutex_lock(&replica->lock);
    give_back(replica, forward);
    pthread_mutex_unlock(&replica->lock);
}

int replica_enqueue(struct replica *replica, struct forward *forward, uint64_t offset,
                    uint64_t *order)
{
    int status = SMB_OK;
    *order = 0;
    pthread_mutex_lock(&replica->lock);
    if (is_paired(replica)) {
        append(replica, forward);
        *order = forward->order;
        /* Release: pairs with replica_check_read, of readers that do not take the chunk's lock. */
        atomic_store_explicit(&replica->chunk_orders[offset / replica->chunk_bytes], *order,
                              memory_order_release);
    } else {
        give_back(replica, forward); /* it lost its backup, or its role, in between */
        status = is_primary(replica) ? SMB_OK : SMB_STALE_EPOCH;
    }
    pthread_mutex_unlock(&replica->lock);
    return status;
}

void replica_refuse(struct replica *replica, const struct smb_frame *frame)
{
    struct smb_frame note = {.opcode = SMB_REFUSED,
                             .session = frame->session,
                             .lane = frame->lane,
                             .sequence = frame->sequence};
    pthread_mutex_lock(&replica->lock);
    struct forward *forward = is_paired(replica) ? make_forward(replica, SMB_FRAME_BYTES) : NULL;
    if (forward) {
        encode(replica, forward, note);
        append(replica, forward);
        send_some(replica);
    }
    pthread_mutex_unlock(&replica->lock);
}

/* ---- what may be told ------------------------------------------------------------------------ */

uint64_t replica_newest(struct replica *replica)
{
    pthread_mutex_lock(&replica->lock);
    uint64_t order = is_paired(replica)
                         ? atomic_load_explicit(&replica->order, memory_order_relaxed)
                     : is_primary(replica) ? 0
                                           : UINT64_MAX;
    pthread_mutex_unlock(&replica->lock);
    return order;
}

bool replica_has_confirmed(struct replica *replica, uint64_t order)
{
    return atomic_load_explicit(&replica->confirmed, memory_order_acquire) >= order;
}

/* With the lock. */
static void ask_backup(struct replica *replica)
{
    struct forward *question = replica->asking ? NULL : make_forward(replica, SMB_FRAME_BYTES);
    if (!question)
        return;
    encode(replica, question, (struct smb_frame){.opcode = SMB_REPLICATE});
    question->asked_ns = smb_now_ns();
    replica->asking = true;
    append(replica, question);
    send_some(replica);
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
    if (!is_primary(replica) || !replica_has_confirmed(replica, order))
        return SMB_BUSY; /* the next try of one that is none is refused at the gate */
    if (!paired || smb_boot_ns() < atomic_load_explicit(&replica->server->serving_until_ns,
                                                        memory_order_acquire))
        return SMB_OK;
    /* The backup may have been promoted. It says that it was not, after the read began. */
    pthread_mutex_lock(&replica->lock);
    bool fresh = !is_paired(replica) || replica->asked_at_ns > begun_ns;
    if (!fresh)
        ask_backup(replica);
    pthread_mutex_unlock(&replica->lock);
    return fresh ? SMB_OK : SMB_BUSY;
}

/* ---- the forwarder --------------------------------------------------------------------------- */

/* With the lock. */
static void confirm(struct replica *replica)
{
    struct forward *done = replica->first;
    replica->first = done->next;
    if (!replica->first)
        replica->last = NULL;
    if (done->asked_ns) {
        replica->asked_at_ns = done->asked_ns;
        replica->asking = false;
    }
    atomic_store_explicit(&replica->confirmed, done->order, memory_order_release);
    uint64_t order = done->order;
    give_back(replica, done);
    answer_waiting(replica, order, SMB_OK);
}

/* With the lock. false: the backup does not take us, or does not speak our protocol. */
static bool take_answer(struct replica *replica)
{
    struct smb_frame reply;
    if (smb_frame_parse(replica->in, &reply) != SMB_OK || !(reply.flags & SMB_FLAG_REPLY) ||
        reply.status != SMB_OK)
        return false;
    if (replica->greeting_answered < GREETING_FRAMES) {
        if (reply.opcode == SMB_HELLO && reply.segment != replica->backup_instance)
            return false;
        if (++replica->greeting_answered == GREETING_FRAMES)
            replica->broken_ns = 0;
        return true;
    }
    struct smb_frame asked;
    /* Our own frame: it parses. */
    if (!replica->first || replica->first == replica->unsent ||
        smb_frame_parse(replica->first->frame, &asked) != SMB_OK || reply.opcode != asked.opcode ||
        reply.sequence != asked.sequence || reply.session != asked.session)
        return false;
    confirm(replica);
    return true;
}

static void receive_answers(struct replica *replica)
{
    pthread_mutex_lock(&replica->lock);
    while (replica->fd >= 0) {
        ssize_t done = recv(replica->fd, replica->in + replica->in_have,
                            SMB_FRAME_BYTES - replica->in_have, MSG_DONTWAIT);
        if (done < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        if (done <= 0) {
            disconnect(replica);
            break;
        }
        replica->in_have += (uint32_t)done;
        if (replica->in_have < SMB_FRAME_BYTES)
            continue;
        replica->in_have = 0;
        if (!take_answer(replica))
            disconnect(replica);
    }
    send_some(replica);
    pthread_mutex_unlock(&replica->lock);
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

int smb_server_replicate(struct smb_server *server, uint64_t id)
{
    struct smb_segment *segment = server_find(server, id);
    if (!segment)
        return SMB_NOT_FOUND;
    struct served *served = served_of(segment);
    int status = served->replica ? SMB_OK : start_forwarder(server);
    if (status == SMB_OK && !served->replica) {
        status = replica_create(server, segment, &served->replica);
        if (status == SMB_OK)
            smb_segment_mark_replicated(segment);
    }
    smb_segment_release(segment);
    return status;
}

int smb_server_feed(struct smb_server *server, uint64_t id, uint32_t epoch, int fd,
                    uint64_t instance)
{
    struct smb_segment *segment;
    struct replica *replica = replica_of(server, id, &segment);
    if (!replica) {
        close(fd);
        return SMB_NOT_FOUND;
    }
    int status = start_forwarder(server);
    pthread_mutex_lock(&replica->lock);
    if (status == SMB_OK && (!is_paired(replica) ||
                             epoch != atomic_load_explicit(&replica->epoch, memory_order_relaxed)))
        status = SMB_STALE_EPOCH;
    if (status == SMB_OK) {
        disconnect(replica);
        struct smb_frame hello = {
            .opcode = SMB_HELLO, .session = id, .lane = REPLICA_LANE, .segment = 0};
        struct smb_frame begin = {.opcode = SMB_REPLICATE,
                                  .session = id,
                                  .lane = REPLICA_LANE,
                                  .segment = id,
                                  .epoch = epoch};
        smb_frame_encode(&hello, replica->greeting);
        smb_frame_encode(&begin, replica->greeting + SMB_FRAME_BYTES);
        replica->backup_instance = instance;
        replica->fd = fd;
        /* Told at each change: a socket that was full and has room again, and each arrival. */
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.u64 = id};
        if (epoll_ctl(server->forward_epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
            disconnect(replica);
            status = SMB_SYSTEM;
        } else {
            send_some(replica);
        }
    } else {
        close(fd);
    }
    pthread_mutex_unlock(&replica->lock);
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
    smb_segment_release(segment);
    return SMB_OK;
}

struct look {
    struct smb_replica_status *replicas;
    uint64_t most, found;
};

static void look_at(void *argument, struct smb_segment *segment)
{
    struct look *look = argument;
    struct replica *replica = served_of(segment)->replica;
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
            .dialled = replica->fd >= 0,
            .broken_ms = replica->broken_ns
                             ? (uint32_t)((smb_now_ns() - replica->broken_ns) / 1000000U)
                             : 0,
            .unconfirmed = order - atomic_load_explicit(&replica->confirmed, memory_order_relaxed),
            .queued_bytes = replica->queued_bytes};
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

void replica_feed_begins(struct replica *replica, const struct connection *feeder)
{
    pthread_mutex_lock(&replica->lock);
    replica->feeder = feeder;
    replica->broken_ns = 0;
    pthread_mutex_unlock(&replica->lock);
}

void replica_feed_ends(struct replica *replica, const struct connection *feeder)
{
    pthread_mutex_lock(&replica->lock);
    if (replica->feeder == feeder) {
        replica->feeder = NULL;
        replica->broken_ns = smb_now_ns();
    }
    pthread_mutex_unlock(&replica->lock);
}

void replica_close(struct replica *replica)
{
    pthread_mutex_lock(&replica->lock);
    atomic_store_explicit(&replica->role, SMB_REPLICA_NONE, memory_order_release);
    stop_forwarding(replica, SMB_STALE_EPOCH);
    pthread_mutex_unlock(&replica->lock);
}
