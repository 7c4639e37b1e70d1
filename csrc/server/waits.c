/* Requests that wait, on the daemon's side of sync.h: they leave their connections, and one thread
 * does what is due. An answer may come on any thread. It goes to the loop of its connection, and
 * from there to the peer. */
#include "server/waits.h"

#include <errno.h>
#include <stdlib.h>

#include "base/assert.h"
#include "base/clock.h"
#include "server/connection.h"
#include "server/counters.h"
#include "server/gate.h"
#include "server/inbox.h"
#include "server/lanes.h"
#include "server/loop.h"
#include "server/replica.h"
#include "server/server.h"
#include "server/sessions.h"

static void free_served(void *companion)
{
    struct served *served = companion;
    for (int i = 0; served->shares && i < served->server->loop_count; i++)
        free(atomic_load_explicit(&served->shares[i], memory_order_acquire));
    free(served->shares);
    struct replica *replica = atomic_load_explicit(&served->replica, memory_order_acquire);
    if (replica)
        replica_destroy(replica);
    if (served->sync)
        sync_destroy(served->sync);
    if (served->records)
        records_destroy(served->records);
    free(served);
}

/* ---- time ------------------------------------------------------------------------------------ */

/* Call with the lock held. */
static void take_out(struct smb_server *server, struct served *served)
{
    if (served->due_ns != UINT64_MAX)
        tree_take(&server->due, &served->by_due);
    served->due_ns = UINT64_MAX;
}

static void due_sooner(void *argument, uint64_t at_ns)
{
    struct served *served = argument;
    struct smb_server *server = served->server;
    pthread_mutex_lock(&server->due_lock);
    if (at_ns < served->due_ns && !served->closed) {
        take_out(server, served);
        served->due_ns = at_ns;
        tree_add(&server->due, &served->by_due, at_ns, 0, &server->due_weights);
        if (tree_first(&server->due) == &served->by_due)
            pthread_cond_signal(&server->due_changed);
    }
    pthread_mutex_unlock(&server->due_lock);
}

static struct served *first_due(struct smb_server *server)
{
    return TREE_OWNER(tree_first(&server->due), struct served, by_due);
}

static void *tick(void *argument)
{
    struct smb_server *server = argument;
    pthread_mutex_lock(&server->due_lock);
    while (!server->stop_ticking) {
        struct served *first = first_due(server);
        uint64_t now_ns = smb_boot_ns();
        if (!first) {
            pthread_cond_wait(&server->due_changed, &server->due_lock);
        } else if (first->due_ns > now_ns) {
            uint64_t until_ns = smb_now_ns() + (first->due_ns - now_ns);
            struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000U),
                                     .tv_nsec = (long)(until_ns % 1000000000U)};
            pthread_cond_clockwait(&server->due_changed, &server->due_lock, CLOCK_MONOTONIC,
                                   &until);
        } else {
            /* The segment is in the tree, so not closed yet (waits_close removes it first), and its
             * reference is valid. */
            struct smb_segment *segment = smb_segment_retain(first->segment);
            take_out(server, first);
            pthread_mutex_unlock(&server->due_lock);
            uint64_t next_ns = sync_tick(first->sync, now_ns);
            if (next_ns != UINT64_MAX)
                due_sooner(first, next_ns);
            smb_segment_release(segment);
            pthread_mutex_lock(&server->due_lock);
        }
    }
    pthread_mutex_unlock(&server->due_lock);
    return NULL;
}

int waits_start(struct smb_server *server)
{
    server->due_weights = tree_random();
    int error = pthread_create(&server->ticker, NULL, tick, server);
    server->ticking = error == 0;
    if (!error)
        return SMB_OK;
    errno = error;
    return SMB_SYSTEM;
}

void waits_stop(struct smb_server *server)
{
    if (!server->ticking)
        return;
    pthread_mutex_lock(&server->due_lock);
    server->stop_ticking = true;
    pthread_cond_signal(&server->due_changed);
    pthread_mutex_unlock(&server->due_lock);
    pthread_join(server->ticker, NULL);
    server->ticking = false;
}

/* ---- segments -------------------------------------------------------------------------------- */

int waits_serve(struct smb_server *server, struct smb_segment *segment, bool left)
{
    struct served *served = calloc(1, sizeof *served);
    if (!served)
        return SMB_OUT_OF_MEMORY;
    served->server = server;
    served->segment = segment;
    served->due_ns = UINT64_MAX;
    served->shares = calloc((size_t)server->loop_count, sizeof *served->shares);
    int status = served->shares ? records_create(smb_segment_records(segment),
                                                 &server->ended_are_known, &served->records)
                                : SMB_OUT_OF_MEMORY;
    if (status == SMB_OK)
        status = sync_create(smb_segment_sync_words(segment), smb_segment_data(segment),
                             smb_segment_data_bytes(segment), left, smb_boot_ns(), &served->sync);
    if (status != SMB_OK) {
        free_served(served);
        return status;
    }
    smb_segment_keep(segment, served, free_served);
    if (smb_segment_replicated(segment) && (status = replica_create(server, segment)) != SMB_OK)
        return status;
    sync_on_sooner(served->sync, due_sooner, served);
    sync_count_into(served->sync, &server->waited);
    uint64_t next_ns = sync_tick(served->sync, smb_boot_ns());
    if (next_ns != UINT64_MAX)
        due_sooner(served, next_ns);
    return SMB_OK;
}

void waits_take_over(struct smb_segment *segment)
{
    struct served *served = served_of(segment);
    struct sync_status now;
    uint64_t now_ns = smb_boot_ns();
    sync_take_over(served->sync, now_ns);
    /* The session may have ended before its lock came here. */
    sync_status(served->sync, now_ns, &now);
    for (uint32_t which = 0; which < SYNC_LOCKS; which++)
        if (now.locks[which].session && session_has_ended(served->server, now.locks[which].session))
            sync_end_session(served->sync, now.locks[which].session, now_ns);
}

void waits_close(struct smb_segment *segment, int status)
{
    SMB_ASSERT(served_of(segment));
    struct served *served = served_of(segment);
    struct replica *replica = replica_at(segment);
    if (replica)
        replica_close(replica);
    sync_close(served->sync, status);
    pthread_mutex_lock(&served->server->due_lock);
    served->closed = true; /* a thread that is about to call due_sooner comes too late */
    take_out(served->server, served);
    pthread_mutex_unlock(&served->server->due_lock);
}

/* ---- requests -------------------------------------------------------------------------------- */

static void answer_came(struct waiter *waiter, struct sync_answer answer)
{
    struct wait *wait = waiter->owner;
    struct replica *replica = replica_at(wait->segment);
    bool tells = answer.status != SMB_SESSION_ENDED && answer.status != SMB_DISCONNECTED &&
                 answer.status != SMB_NOT_FOUND && answer.status != SMB_STALE_EPOCH;
    wait->answer = answer;
    int status = replica && tells ? replica_await(replica, wait, replica_order_of_sync(replica))
                                  : SMB_OK;
    if (status == SMB_DEFERRED)
        return;
    if (status != SMB_OK)
        wait->answer = (struct sync_answer){.status = status};
    wait_answered(wait);
}

static void unlink_wait(struct wait *wait)
{
    wait->connection->waits_now--;
    if (wait->previous)
        wait->previous->next = wait->next;
    else
        wait->connection->waits = wait->next;
    if (wait->next)
        wait->next->previous = wait->previous;
    wait->next = wait->previous = NULL;
}

void wait_free(struct wait *wait)
{
    SMB_ASSERT(atomic_load_explicit(&wait->loop->server->waits_now, memory_order_relaxed) > 0);
    atomic_fetch_sub_explicit(&wait->loop->server->waits_now, 1, memory_order_relaxed);
    uses_give_wait(&wait->loop->server->uses, wait->use);
    smb_segment_release(wait->segment);
    free(wait);
}

/* Put into the connection's list before sync_ask, because the answer may come at once, on another
 * thread. `counted`: it may wait for long, so it counts for the peer's certificate, and NULL may
 * mean that the certificate has too many. */
static struct wait *wait_create(struct connection *connection, struct gate_request *request,
                                bool counted)
{
    struct uses *uses = &connection->loop->server->uses;
    struct wait *wait = calloc(1, sizeof *wait);
    if (!wait)
        return NULL;
    if (counted && !uses_take_wait(uses, connection->use)) {
        free(wait);
        return NULL;
    }
    wait->loop = connection->loop;
    wait->use = counted ? connection->use : NULL;
    wait->connection = connection;
    wait->segment = smb_segment_retain(request->segment);
    wait->frame = request->frame;
    wait->begun_ns = connection->request.tries.begun_ns;
    wait->next = connection->waits;
    if (wait->next)
        wait->next->previous = wait;
    connection->waits = wait;
    connection->waits_now++;
    server_count(&wait->loop->server->waits_now, 1);
    return wait;
}

int waits_confirm(struct connection *connection, struct gate_request *request, uint64_t order,
                  struct sync_answer answer)
{
    struct wait *wait = wait_create(connection, request, false);
    if (!wait)
        return SMB_OUT_OF_MEMORY;
    wait->answer = answer;
    int status = replica_await(replica_at(wait->segment), wait, order);
    if (status != SMB_DEFERRED) {
        unlink_wait(wait);
        wait_free(wait);
    }
    return status;
}

int waits_ask(struct connection *connection, struct gate_request *request, const uint8_t *payload,
              struct sync_answer *answer)
{
    uint8_t opcode = request->frame.opcode;
    bool may_wait = opcode == SMB_LOCK || opcode == SMB_AWAIT_BARRIER ||
                    opcode == SMB_AWAIT_VERSION;
    struct wait *wait = may_wait && connection->waits_now >= WAITS_PER_CONNECTION
                            ? NULL
                            : wait_create(connection, request, may_wait);
    if (!wait)
        return SMB_OUT_OF_MEMORY;
    wait->waiter.owner = wait;
    wait->waiter.answer = answer_came;
    struct sync_request ask = {.opcode = request->frame.opcode,
                               .session = request->frame.session,
                               .sequence = request->frame.sequence,
                               .argument = request->frame.argument};
    for (int i = 0; i < SMB_SYNC_WORDS; i++)
        ask.words[i] = smb_load64(payload + 8 * i);
    int status = sync_ask(served_of(wait->segment)->sync, &ask, &wait->waiter, smb_boot_ns(),
                          answer);
    if (status != SMB_DEFERRED) {
        unlink_wait(wait);
        wait_free(wait);
    }
    return status;
}

void connection_take_answer(struct connection *connection, struct wait *wait)
{
    unlink_wait(wait);
    *(connection->answered ? connection->answered_end : &connection->answered) = wait;
    connection->answered_end = &wait->next;
}

void waits_forget(struct connection *connection)
{
    uint64_t now_ns = smb_boot_ns();
    while (connection->waits) {
        struct wait *wait = connection->waits;
        unlink_wait(wait);
        wait->connection = NULL; /* only this loop will see it, if the answer is under way */
        struct replica *replica = replica_at(wait->segment);
        if ((replica && replica_forget(replica, wait)) ||
            (wait->waiter.sync && sync_forget(&wait->waiter, now_ns)))
            wait_free(wait);
    }
    while (connection->answered) {
        struct wait *wait = connection->answered;
        connection->answered = wait->next;
        wait_free(wait);
    }
}

/* ---- sessions -------------------------------------------------------------------------------- */

static void end_on_segment(void *argument, struct smb_segment *segment)
{
    uint64_t session = *(uint64_t *)argument;
    records_end_session(served_of(segment)->records, session);
    sync_end_session(served_of(segment)->sync, session, smb_boot_ns());
}

void smb_server_end_session(struct smb_server *server, uint64_t session)
{
    /* First refuse new connections, then close the present ones, then release what the session
     * held. */
    session_note_ended(server, session);
    lanes_fence_session(server, session);
    server_each_segment(server, end_on_segment, &session);
    forget_past(server, session);
}

/* ---- for metrics and `smb status`
 * --------------------------------------------------------------- */

struct look {
    struct smb_wait *waits;
    uint64_t most, found;
};

static void see(struct look *look, struct smb_wait wait)
{
    if (wait.session == 0 && wait.waiting == 0)
        return;
    if (look->found < look->most)
        look->waits[look->found] = wait;
    look->found++;
}

struct look_at_lock {
    struct look *look;
    uint64_t segment, waiting;
};

static void see_holder(void *argument, uint64_t session, uint64_t token, uint64_t left_ms)
{
    struct look_at_lock *lock = argument;
    see(lock->look, (struct smb_wait){.segment = lock->segment,
                                      .kind = SMB_WAIT_SHARED,
                                      .session = session,
                                      .token = token,
                                      .left_ms = left_ms,
                                      .waiting = (uint32_t)lock->waiting});
    lock->waiting = 0; /* so that the sum of all is the number of waiting requests */
}

static void look_at_segment(void *argument, struct smb_segment *segment)
{
    struct sync_status now;
    uint64_t id = smb_segment_id(segment);
    sync_status(served_of(segment)->sync, smb_boot_ns(), &now);
    struct look_at_lock shared = {argument, id, now.locks[SYNC_USER].waiting};
    sync_each_holder(served_of(segment)->sync, smb_boot_ns(), see_holder, &shared);
    now.locks[SYNC_USER].waiting = shared.waiting;
    for (uint32_t which = 0; which < SYNC_LOCKS; which++)
        see(argument,
            (struct smb_wait){.segment = id,
                              .kind = which == SYNC_USER ? SMB_WAIT_LOCK : SMB_WAIT_PUBLISHER,
                              .session = now.locks[which].session,
                              .token = now.locks[which].token,
                              .left_ms = now.locks[which].left_ms,
                              .waiting = (uint32_t)now.locks[which].waiting});
    see(argument, (struct smb_wait){.segment = id,
                                    .kind = SMB_WAIT_BARRIER,
                                    .waiting = (uint32_t)now.barrier_waiting,
                                    .arrived = (uint32_t)now.arrived,
                                    .parties = (uint32_t)now.parties});
    see(argument, (struct smb_wait){.segment = id,
                                    .kind = SMB_WAIT_VERSION,
                                    .waiting = (uint32_t)now.versions_waiting});
}

uint64_t smb_server_waits(struct smb_server *server, struct smb_wait *waits, uint64_t most)
{
    struct look look = {.waits = waits, .most = most};
    server_each_segment(server, look_at_segment, &look);
    return look.found;
}

int smb_server_retire_segment(struct smb_server *server, uint64_t id, uint64_t idle_ms,
                              uint64_t *token)
{
    struct smb_segment *segment = server_find(server, id);
    if (!segment)
        return SMB_NOT_FOUND;
    uint64_t idle_ns = idle_ms > UINT64_MAX / 1000000 ? UINT64_MAX : idle_ms * 1000000;
    int status = sync_retire(served_of(segment)->sync, idle_ns, smb_boot_ns(), token);
    smb_segment_release(segment);
    return status;
}

int smb_server_raise_token(struct smb_server *server, uint64_t id, uint64_t token)
{
    struct smb_segment *segment = server_find(server, id);
    if (!segment)
        return SMB_NOT_FOUND;
    int status = sync_raise_token(served_of(segment)->sync, token);
    smb_segment_release(segment);
    return status;
}
