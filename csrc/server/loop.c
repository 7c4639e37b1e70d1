#include "server/loop.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "server/connection.h"
#include "server/counters.h"
#include "server/listener.h"
#include "server/server.h"

enum { EVENTS_PER_WAIT = 64 };

static void list_remove(struct connection **list, struct connection *connection)
{
    SMB_ASSERT(connection->in_list);
    while (*list != connection)
        list = &(*list)->link;
    *list = connection->link;
    connection->in_list = false;
}

/* A deferred request is tried again and again, but counted once. */
static void count_deferred(struct connection *connection, bool deferred)
{
    struct smb_server *server = connection->loop->server;
    if (deferred && !connection->counted_deferred) {
        server_count(&server->deferred_now, 1);
        server_count(&server->deferred_total, 1);
    } else if (!deferred && connection->counted_deferred) {
        atomic_fetch_sub_explicit(&server->deferred_now, 1, memory_order_relaxed);
    }
    connection->counted_deferred = deferred;
}

/* Counts the unsent bytes of a connection that waits for room in its socket. */
static void count_backlog(struct connection *connection, bool waits)
{
    struct loop_stats *stats = &connection->loop->stats;
    uint64_t bytes = (connection->out_end - connection->out_start) +
                     (uint64_t)(connection->tail_end - connection->tail_start) +
                     channel_unsent_bytes(&connection->channel);
    if (!waits)
        bytes = 0;
    else if (connection->backlog_bytes == 0)
        stats_add(&stats->backlog_total, 1);
    if (bytes != connection->backlog_bytes)
        stats_add(&stats->backlog_bytes, bytes - connection->backlog_bytes);
    connection->backlog_bytes = bytes;
}

static void unlink_connection(struct loop *loop, struct connection *connection)
{
    count_backlog(connection, false);
    if (connection->previous)
        connection->previous->next = connection->next;
    else
        loop->connections = connection->next;
    if (connection->next)
        connection->next->previous = connection->previous;
    connection->next = connection->previous = NULL;
}

void loop_drop(struct loop *loop, struct connection *connection)
{
    SMB_ASSERT(connection->loop == loop);
    if (connection->in_list) {
        list_remove(connection->wait == WAIT_DEFERRED ? &loop->deferred : &loop->again, connection);
    }
    count_deferred(connection, false);
    if (!connection->proven)
        loop->not_greeted--;
    unlink_connection(loop, connection);
    /* Closing the descriptor takes it out of epoll only once nobody else has it: a process that was
     * forked just now has it until it becomes another program. */
    epoll_ctl(loop->epoll, EPOLL_CTL_DEL, connection->channel.fd, NULL);
    connection_destroy(connection);
}

/* Asks epoll for what the connection waits for, and lists it where the loop itself must come back
 * to it. */
static void arm(struct loop *loop, struct connection *connection)
{
    SMB_ASSERT(!connection->in_list);
    static const uint32_t wanted[] = {[WAIT_INPUT] = EPOLLIN,
                                      [WAIT_OUTPUT] = EPOLLOUT,
                                      [WAIT_TURN] = EPOLLRDHUP,
                                      [WAIT_DEFERRED] = EPOLLRDHUP};
    uint32_t events = wanted[connection->wait];
    if (events != connection->armed) {
        struct epoll_event event = {.events = events, .data.ptr = connection};
        epoll_ctl(loop->epoll, EPOLL_CTL_MOD, connection->channel.fd, &event);
        connection->armed = events;
    }
    if (connection->wait == WAIT_TURN || connection->wait == WAIT_DEFERRED) {
        struct connection **list = connection->wait == WAIT_DEFERRED ? &loop->deferred
                                                                     : &loop->again;
        connection->link = *list;
        *list = connection;
        connection->in_list = true;
    }
    count_deferred(connection, connection->wait == WAIT_DEFERRED);
    count_backlog(connection, connection->wait == WAIT_OUTPUT);
}

void loop_give(struct loop *loop, struct connection *connection)
{
    pthread_mutex_lock(&loop->inbox_lock);
    connection->link = loop->inbox;
    loop->inbox = connection;
    pthread_mutex_unlock(&loop->inbox_lock);
    loop_wake(loop);
}

/* To the loop where it is to be served. One that was fenced stays: its loop is about to close
 * it. */
static bool move_connection(struct loop *loop, struct connection *connection)
{
    struct loop *destination = connection->destination;
    if (!destination)
        return false;
    bool may_go = destination != loop && connection_is_empty(connection);
    pthread_mutex_lock(&loop->server->lanes_lock);
    connection->destination = NULL;
    bool moves = may_go && !atomic_load_explicit(&connection->fenced, memory_order_relaxed);
    if (moves) {
        epoll_ctl(loop->epoll, EPOLL_CTL_DEL, connection->channel.fd, NULL);
        unlink_connection(loop, connection);
        connection->loop = destination;
        loop_give(destination, connection); /* a thread that fences it now finds it there */
    }
    pthread_mutex_unlock(&loop->server->lanes_lock);
    return moves;
}

static void serve(struct loop *loop, struct connection *connection)
{
    SMB_ASSERT(connection->loop == loop && !connection->in_list);
    if (!connection_turn(connection)) {
        loop_drop(loop, connection);
        return;
    }
    if (!move_connection(loop, connection))
        arm(loop, connection);
}

void loop_take_over(struct loop *loop, struct connection *connection)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    connection->armed = EPOLLIN;
    connection->next = loop->connections;
    if (loop->connections)
        loop->connections->previous = connection;
    loop->connections = connection;
    loop->not_greeted += !connection->proven;
    if (epoll_ctl(loop->epoll, EPOLL_CTL_ADD, connection->channel.fd, &event) != 0)
        loop_drop(loop, connection);
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

void loop_wake(struct loop *loop)
{
    uint64_t one = 1;
    /* The counter of an eventfd can't be full here; a failed write would only mean that the loop is
     * awake anyway. */
    if (write(loop->wake, &one, sizeof one) < 0)
        return;
}

/* Answers to waits, which any thread may have given; each connection then has one turn. */
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
        if (!connection->in_list) /* else its turn comes anyway */
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

/* Takes each connection off the list and gives it a turn; it may put itself there again, for the
 * next round. */
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

/* `served`: it has just had something to do. */
static int wait_for_events(struct loop *loop, struct epoll_event *events, bool served)
{
    int timeout = wait_ms(loop);
    bool spins = served && !loop->bulk && timeout != 0;
    /* from here on: what it had to do may have taken longer than that */
    uint64_t until_ns = spins ? smb_now_ns() + SPIN_NS : 0;
    int count = epoll_wait(loop->epoll, events, EVENTS_PER_WAIT, spins ? 0 : timeout);
    while (spins && count == 0) {
        /* the peer that we wait for may have been put on this very core: measured 6 times the
         * latency */
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
                /* what is to be done may close connections that are among these events */
                woken = true;
            } else if ((uintptr_t)source & 1U) {
                /* may close connections, too */
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
    take_answers(loop); /* that nobody is left to hear */
    if (loop->epoll >= 0)
        close(loop->epoll);
    if (loop->wake >= 0)
        close(loop->wake);
    pthread_mutex_destroy(&loop->inbox_lock);
    pthread_mutex_destroy(&loop->answers_lock);
}
