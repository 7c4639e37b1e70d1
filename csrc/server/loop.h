/* loop.h: an event loop: one thread, one epoll, and the connections that it owns from accept to
 * close.
 *
 * Other threads reach a loop by its inbox and its answers, each under its own lock: inbox.h. What
 * the thread does is in loop_thread.c.
 */
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
    _Alignas(64) struct loop_stats stats; /* on cache lines of its own */
    struct smb_server *server;
    int index;
    uint64_t clock_ns; /* when this loop last looked: a request taken up now begins then */
    pthread_t thread;
    bool running;
    int epoll;
    int wake; /* eventfd: new connections, stop */
    _Atomic bool stop;
    pthread_mutex_t inbox_lock;
    struct connection *inbox; /* accepted by another loop, to be taken over by this one */
    struct connection *connections;
    struct connection *again; /* had their turn but have more in hand */
    struct connection *deferred;
    _Atomic bool sweep; /* some connection of the loop was fenced from outside: close it */
    pthread_mutex_t answers_lock;
    struct wait *answers; /* whose answers came, newest first */
    uint32_t not_greeted;
    bool bulk; /* much was moved since it last waited: what comes next takes a while */
};

/* The loop's thread: from now on the connection is served here. */
void loop_take_over(struct loop *loop, struct connection *connection);
/* The loop's thread: asks epoll for what the connection waits for, and lists it where the loop
 * itself must come back to it. */
void loop_arm(struct loop *loop, struct connection *connection);
/* The loop's thread: to the loop where it is to be served, if that is another one. One that was
 * fenced stays: its loop is about to close it. */
bool loop_move(struct loop *loop, struct connection *connection);
/* The loop's thread: closes it. */
void loop_drop(struct loop *loop, struct connection *connection);

#endif
