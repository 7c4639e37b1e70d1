/* loop.h: an event loop: one thread, one epoll, and the connections that it owns from accept to
 * close. Other threads reach a loop through its inbox and its answers, each under its own lock:
 * inbox.h. loop_thread.c has the thread's work. */
#ifndef SMB_LOOP_H
#define SMB_LOOP_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/stats.h"

struct connection;
struct smb_server;
struct wait;

enum { LOOPS_MAX = 64, DEFERRED_RETRY_MS = 1 };

struct loop {
    _Alignas(64) struct loop_stats stats; /* on separate cache lines */
    struct smb_server *server;
    int index;
    /* when the loop last read the clock: the begin of requests that are taken up now */
    uint64_t clock_ns;
    pthread_t thread;
    bool running;
    int epoll;
    int wake; /* eventfd: new connections, answers, stop */
    _Atomic bool stop;
    pthread_mutex_t inbox_lock;
    /* connections that another loop accepted or had, for this one to take over */
    struct connection *inbox;
    struct connection *connections;
    struct connection *again; /* connections that had their turn but have more to do */
    struct connection *deferred;
    /* a connection of the loop was fenced by another thread and must be closed */
    _Atomic bool sweep;
    /* peers' certificates must be looked at: time has passed, or the server has new credentials */
    _Atomic bool judge;
    pthread_mutex_t answers_lock;
    struct wait *answers; /* waits whose answers came, newest first */
    uint32_t not_greeted;
    bool bulk; /* much was moved since the loop last waited, so the next event takes a while */
};

/* Called by the loop's thread: serves the connection from now on. */
void loop_take_over(struct loop *loop, struct connection *connection);
/* Called by the loop's thread: makes epoll report what the connection waits for, or lists the
 * connection if the loop itself must come back to it. */
void loop_arm(struct loop *loop, struct connection *connection);
/* Called by the loop's thread: gives the connection to the loop that shall serve it, if that is
 * another one. A fenced connection stays, because its loop is about to close it. */
bool loop_move(struct loop *loop, struct connection *connection);
/* Called by the loop's thread: closes the connection. */
void loop_drop(struct loop *loop, struct connection *connection);

#endif
