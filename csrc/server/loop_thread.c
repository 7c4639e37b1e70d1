#include "server/loop_thread.h"

#include <errno.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "channel/tls.h"
#include "server/connection.h"
#include "server/counters.h"
#include "server/inbox.h"
#include "server/listener.h"
#include "server/loop.h"
#include "server/server.h"

enum { EVENTS_PER_WAIT = 64, JUDGED_PER_TURN = 16 };

static void serve(struct loop *loop, struct connection *connection)
{
    SMB_ASSERT(connection->loop == loop && !connection->in_list);
    if (!connection_turn(connection)) {
        loop_drop(loop, connection);
        return;
    }
    if (!loop_move(loop, connection))
        loop_arm(loop, connection);
}

static void take_inbox(struct loop *loop)
{
    uint64_t ignored;
    if (read(loop->wake, &ignored, sizeof ignored) < 0 && errno != EAGAIN)
        return;
    pthread_mutex_lock(&loop->inbox_lock);
    struct connection *connection = loop->inbox;
    loop->inbox = NULL;
    pthread_mutex_unlock(&loop->inbox_lock);
    while (connection) {
        struct connection *next = connection->link;
        loop_take_over(loop, connection);
        connection = next;
    }
}

/* Takes the answers to waits, which any thread may have given, and gives each connection one
 * turn. */
static void take_answers(struct loop *loop)
{
    pthread_mutex_lock(&loop->answers_lock);
    struct wait *newest = loop->answers, *oldest = NULL;
    loop->answers = NULL;
    pthread_mutex_unlock(&loop->answers_lock);
    while (newest) {
        struct wait *next = newest->next_answer;
        newest->next_answer = oldest;
        oldest = newest;
        newest = next;
    }
    struct connection *served = NULL;
    while (oldest) {
        struct wait *wait = oldest;
        oldest = wait->next_answer;
        struct connection *connection = wait->connection;
        if (!connection) {
            wait_free(wait);
            continue;
        }
        connection_take_answer(connection, wait);
        if (!connection->has_new_answers) {
            connection->has_new_answers = true;
            connection->next_answered = served;
            served = connection;
        }
    }
    while (served) {
        struct connection *connection = served;
        served = connection->next_answered;
        connection->has_new_answers = false;
        if (!connection->in_list) /* otherwise its turn comes anyway */
            serve(loop, connection);
    }
}

static void drop_fenced(struct loop *loop)
{
    struct connection *connection = loop->connections;
    while (connection) {
        struct connection *next = connection->next;
        if (atomic_load_explicit(&connection->fenced, memory_order_relaxed))
            loop_drop(loop, connection);
        connection = next;
    }
}

/* Closes the connections of peers whose certificate does not count any more. With new credentials
 * each certificate is judged again, which takes long, so connections have their turns between. */
static void judge_peers(struct loop *loop)
{
    struct smb_server *server = loop->server;
    int64_t now_s = (int64_t)time(NULL);
    int asked = 0;
    pthread_mutex_lock(&server->tls_lock);
    struct smb_tls *now = server->tls ? tls_retain(server->tls) : NULL;
    pthread_mutex_unlock(&server->tls_lock);
    struct connection *connection = now ? loop->connections : NULL;
    while (connection && asked < JUDGED_PER_TURN) {
        struct connection *next = connection->next;
        struct tls *tls = connection->channel.tls;
        if (tls && !tls_still_accepts(tls, now, now_s, &asked)) {
            server_count(&server->errors[SMB_UNTRUSTED], 1);
            loop_drop(loop, connection);
        }
        connection = next;
    }
    if (connection) {
        atomic_store_explicit(&loop->judge, true, memory_order_relaxed);
        loop_wake(loop);
    }
    if (now)
        smb_tls_release(now);
}

/* Takes each connection off the list and gives it a turn. The connection may put itself on the list
 * again, for the next round. */
static void serve_list(struct loop *loop, struct connection **list)
{
    struct connection *connection = *list;
    *list = NULL;
    for (struct connection *c = connection; c; c = c->link)
        c->in_list = false;
    while (connection) {
        struct connection *next = connection->link;
        serve(loop, connection);
        connection = next;
    }
}

static void close_the_silent(struct loop *loop, uint64_t now_ns)
{
    struct connection *connection = loop->connections;
    while (connection) {
        struct connection *next = connection->next;
        if (connection_is_silent(connection, now_ns)) {
            server_count(&loop->server->errors[SMB_TIMEOUT], 1);
            loop_drop(loop, connection);
        }
        connection = next;
    }
}

static int wait_ms(const struct loop *loop)
{
    if (loop->again)
        return 0;
    if (loop->deferred)
        return DEFERRED_RETRY_MS;
    return loop->not_greeted ? 1000 : -1;
}

/* `served`: the loop has just served a connection. */
static int wait_for_events(struct loop *loop, struct epoll_event *events, bool served)
{
    int timeout = wait_ms(loop);
    bool spins = served && !loop->bulk && timeout != 0;
    /* the clock is read here, because serving may have taken longer than SPIN_NS */
    uint64_t until_ns = spins ? smb_now_ns() + SPIN_NS : 0;
    int count = epoll_wait(loop->epoll, events, EVENTS_PER_WAIT, spins ? 0 : timeout);
    while (spins && count == 0) {
        /* the peer that we wait for may have to run on this core: without this, 6 times the latency
         * was measured */
        sched_yield();
        spins = smb_now_ns() < until_ns;
        count = epoll_wait(loop->epoll, events, EVENTS_PER_WAIT, spins ? 0 : timeout);
    }
    return count;
}

static void *run_loop(void *argument)
{
    struct loop *loop = argument;
    struct epoll_event events[EVENTS_PER_WAIT];
    uint64_t last_retry_ns = 0, last_check_ns = smb_now_ns();
    bool served = false;
    while (!atomic_load_explicit(&loop->stop, memory_order_acquire)) {
        int count = wait_for_events(loop, events, served);
        loop->bulk = false;
        uint64_t now_ns = loop->clock_ns = smb_now_ns();
        served = count > 0 || loop->again;
        bool woken = false;
        struct listener *knocked[LISTENERS_MAX];
        int knocks = 0;
        for (int i = 0; i < count; i++) {
            void *source = events[i].data.ptr;
            if (source == loop) {
                /* handled later, because it may close connections that are among these events */
                woken = true;
            } else if ((uintptr_t)source & 1U) {
                /* likewise */
                knocked[knocks++] = (struct listener *)((uintptr_t)source - 1U);
            } else {
                struct connection *connection = source;
                if (!connection->in_list)
                    serve(loop, connection);
                else if (events[i].events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP))
                    loop_drop(loop, connection);
            }
        }
        while (knocks > 0)
            listener_accept(knocked[--knocks]);
        if (woken) {
            take_inbox(loop);
            take_answers(loop);
            if (atomic_exchange_explicit(&loop->sweep, false, memory_order_acquire))
                drop_fenced(loop);
            if (atomic_exchange_explicit(&loop->judge, false, memory_order_acquire))
                judge_peers(loop);
        }
        if (loop->again)
            serve_list(loop, &loop->again);
        if (loop->deferred && now_ns - last_retry_ns >= DEFERRED_RETRY_MS * 1000000U) {
            last_retry_ns = now_ns;
            serve_list(loop, &loop->deferred);
        }
        if (loop->not_greeted && now_ns - last_check_ns >= 500000000U) {
            last_check_ns = now_ns;
            close_the_silent(loop, now_ns);
        }
    }
    return NULL;
}

int loop_start(struct smb_server *server, int index)
{
    struct loop *loop = &server->loops[index];
    loop->server = server;
    loop->index = index;
    loop->epoll = epoll_create1(EPOLL_CLOEXEC);
    loop->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&loop->inbox_lock, NULL);
    pthread_mutex_init(&loop->answers_lock, NULL);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = loop};
    if (loop->epoll < 0 || loop->wake < 0 ||
        epoll_ctl(loop->epoll, EPOLL_CTL_ADD, loop->wake, &event) != 0)
        return SMB_SYSTEM;
    int failure = pthread_create(&loop->thread, NULL, run_loop, loop);
    if (failure != 0) {
        errno = failure;
        return SMB_SYSTEM;
    }
    loop->running = true;
    return SMB_OK;
}

void loop_stop(struct loop *loop)
{
    if (!loop->running)
        return;
    atomic_store_explicit(&loop->stop, true, memory_order_release);
    loop_wake(loop);
    pthread_join(loop->thread, NULL);
}

void loop_empty(struct loop *loop)
{
    if (loop->wake >= 0)
        take_inbox(loop);
    while (loop->connections)
        loop_drop(loop, loop->connections);
    take_answers(loop); /* nobody is left to receive them */
    if (loop->epoll >= 0)
        close(loop->epoll);
    if (loop->wake >= 0)
        close(loop->wake);
    pthread_mutex_destroy(&loop->inbox_lock);
    pthread_mutex_destroy(&loop->answers_lock);
}
