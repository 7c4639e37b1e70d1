#include "server/loop.h"

#include <sys/epoll.h>

#include "base/assert.h"
#include "server/connection.h"
#include "server/counters.h"
#include "server/inbox.h"
#include "server/server.h"

static void list_remove(struct connection **list, struct connection *connection)
{
    SMB_ASSERT(connection->in_list);
    while (*list != connection)
        list = &(*list)->link;
    *list = connection->link;
    connection->in_list = false;
}

/* A deferred request is tried many times, but counted once. */
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
    /* Closing the descriptor removes it from epoll only when no other process has it. A process
     * that was just forked has it until it executes another program. */
    epoll_ctl(loop->epoll, EPOLL_CTL_DEL, connection->channel.fd, NULL);
    connection_destroy(connection);
}

void loop_arm(struct loop *loop, struct connection *connection)
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

bool loop_move(struct loop *loop, struct connection *connection)
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
        /* a thread that fences the connection now looks for it there */
        loop_give(destination, connection);
    }
    pthread_mutex_unlock(&loop->server->lanes_lock);
    return moves;
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
