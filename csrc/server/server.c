#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "server/server.h"
#include "base/address.h"

enum {
    EVENTS_PER_WAIT = 64
};

struct listener {
    int fd;
    int transport;
    struct smb_server *server;
};

/* ---- loop --------------------------------------------------------------------------------------------------------- */

static void list_remove(struct connection **list, struct connection *connection)
{
    while (*list != connection)
        list = &(*list)->link;
    *list = connection->link;
    connection->in_list = false;
}

/* A parked request is tried again and again, but counted once. */
static void count_parked(struct connection *connection, bool parked)
{
    struct smb_server *server = connection->loop->server;
    if (parked && !connection->counted_parked) {
        server_count(&server->parked_now, 1);
        server_count(&server->parked_total, 1);
    } else if (!parked && connection->counted_parked) {
        atomic_fetch_sub_explicit(&server->parked_now, 1, memory_order_relaxed);
    }
    connection->counted_parked = parked;
}

/* What it can't send now, where it waits for room. */
static void count_backlog(struct connection *connection, bool waits)
{
    struct loop_stats *stats = &connection->loop->stats;
    uint64_t bytes = (connection->out_end - connection->out_start) + (uint64_t)(connection->tail_end - connection->tail_start);
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

static void drop_connection(struct loop *loop, struct connection *connection)
{
    if (connection->in_list) {
        list_remove(connection->wait == WAIT_PARKED ? &loop->parked : &loop->again, connection);
    }
    count_parked(connection, false);
    if (!connection->proven)
        loop->not_greeted--;
    unlink_connection(loop, connection);
    connection_destroy(connection); /* closing the descriptor takes it out of epoll */
}

/* Asks epoll for what the connection waits for, and lists it where the loop itself must come back to it. */
static void arm(struct loop *loop, struct connection *connection)
{
    static const uint32_t wanted[] = {
        [WAIT_INPUT] = EPOLLIN, [WAIT_OUTPUT] = EPOLLOUT, [WAIT_TURN] = EPOLLRDHUP, [WAIT_PARKED] = EPOLLRDHUP};
    uint32_t events = wanted[connection->wait];
    if (events != connection->armed) {
        struct epoll_event event = {.events = events, .data.ptr = connection};
        epoll_ctl(loop->epoll, EPOLL_CTL_MOD, connection->channel.fd, &event);
        connection->armed = events;
    }
    if (connection->wait == WAIT_TURN || connection->wait == WAIT_PARKED) {
        struct connection **list = connection->wait == WAIT_PARKED ? &loop->parked : &loop->again;
        connection->link = *list;
        *list = connection;
        connection->in_list = true;
    }
    count_parked(connection, connection->wait == WAIT_PARKED);
    count_backlog(connection, connection->wait == WAIT_OUTPUT);
}

static void put_into_inbox(struct loop *loop, struct connection *connection)
{
    pthread_mutex_lock(&loop->inbox_lock);
    connection->link = loop->inbox;
    loop->inbox = connection;
    pthread_mutex_unlock(&loop->inbox_lock);
    loop_wake(loop);
}

/* To the loop where it is to be served. One that was fenced stays: its loop is about to close it. */
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
        put_into_inbox(destination, connection); /* whoever fences it now finds it there */
    }
    pthread_mutex_unlock(&loop->server->lanes_lock);
    return moves;
}

static void serve(struct loop *loop, struct connection *connection)
{
    if (!connection_turn(connection)) {
        drop_connection(loop, connection);
        return;
    }
    if (!move_connection(loop, connection))
        arm(loop, connection);
}

static void take_over(struct loop *loop, struct connection *connection)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    connection->armed = EPOLLIN;
    connection->next = loop->connections;
    if (loop->connections)
        loop->connections->previous = connection;
    loop->connections = connection;
    loop->not_greeted += !connection->proven;
    if (epoll_ctl(loop->epoll, EPOLL_CTL_ADD, connection->channel.fd, &event) != 0)
        drop_connection(loop, connection);
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
        take_over(loop, connection);
        connection = next;
    }
}

void loop_wake(struct loop *loop)
{
    uint64_t one = 1;
    /* The counter of an eventfd can't be full here; a failed write would only mean that the loop is awake anyway. */
    if (write(loop->wake, &one, sizeof one) < 0)
        return;
}

static bool peer_is_ours(int fd)
{
    struct ucred peer;
    socklen_t length = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && (peer.uid == geteuid() || peer.uid == 0);
}

/* Out of descriptors: a listener that stays ready would keep the loop spinning, so the peer is let in and closed at once. */
static bool turn_away(struct listener *listener)
{
    struct smb_server *server = listener->server;
    server_count(&server->errors[SMB_SYSTEM], 1);
    server_count(&server->turned_away, 1);
    if (server->spare_fd >= 0)
        close(server->spare_fd);
    int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0)
        close(fd);
    server->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return fd >= 0;
}

static uint64_t connections_now(const struct smb_server *server)
{
    uint64_t now = 0;
    for (int t = 0; t < SMB_TRANSPORT_COUNT; t++)
        now += atomic_load_explicit(&server->now[t], memory_order_relaxed);
    return now;
}

/* Gives a connected descriptor to one of the loops, which closes it with the connection. */
static int let_in(struct smb_server *server, int fd, int transport, struct smb_slots *slots)
{
    struct loop *loop = &server->loops[atomic_fetch_add(&server->next_loop, 1) % (uint32_t)server->loop_count];
    struct connection *connection = connections_now(server) < CONNECTIONS_MAX ? connection_create(loop, fd, transport) : NULL;
    if (!connection)
        return SMB_OUT_OF_MEMORY;
    connection->slots = slots;
    if (slots)
        slots_retain(slots);
    put_into_inbox(loop, connection);
    return SMB_OK;
}

/* Somebody over TCP. Loop 0 has it until it is known who it is; and gives another stranger up for it, if need be. */
static int let_stranger_in(struct smb_server *server, int fd)
{
    struct loop *loop = &server->loops[0];
    struct connection *least = strangers_are_many(server) || connections_now(server) >= CONNECTIONS_MAX ? strangers_least(server) : NULL;
    if (least) {
        server_count(&server->strangers_evicted, 1);
        drop_connection(loop, least);
    }
    struct connection *connection = connections_now(server) < CONNECTIONS_MAX ? connection_create(loop, fd, SMB_TRANSPORT_TCP) : NULL;
    if (!connection)
        return SMB_OUT_OF_MEMORY;
    pthread_mutex_lock(&server->tls_lock);
    struct smb_tls *tls = server->tls ? tls_retain(server->tls) : NULL;
    pthread_mutex_unlock(&server->tls_lock);
    connection_be_stranger(connection, tls);
    take_over(loop, connection);
    return SMB_OK;
}

/* As many as there are, up to a bound: epoll tells again of those that are left. */
static void accept_some(struct listener *listener)
{
    struct smb_server *server = listener->server;
    for (int i = 0; i < ACCEPTS_PER_TURN; i++) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if ((errno == EMFILE || errno == ENFILE) && turn_away(listener))
                continue;
            return;
        }
        int status = listener->transport == SMB_TRANSPORT_TCP ? let_stranger_in(server, fd)
                     : peer_is_ours(fd) ? let_in(server, fd, listener->transport, NULL) : SMB_DENIED;
        if (status != SMB_OK) {
            server_count(&server->errors[status], 1);
            close(fd);
        }
    }
}

void smb_server_use_tls(struct smb_server *server, struct smb_tls *tls)
{
    tls_retain(tls);
    pthread_mutex_lock(&server->tls_lock);
    struct smb_tls *before = server->tls;
    server->tls = tls;
    pthread_mutex_unlock(&server->tls_lock);
    if (before)
        smb_tls_release(before);
}

static int adopt(struct smb_server *server, int fd, int transport, struct smb_slots *slots)
{
    int flags = fcntl(fd, F_GETFL);
    int status = transport < 0 || transport >= SMB_TRANSPORT_COUNT ? SMB_INVALID
                 : flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 ? SMB_SYSTEM : let_in(server, fd, transport, slots);
    if (status != SMB_OK) {
        int saved = errno;
        close(fd);
        errno = saved;
    }
    return status;
}

int smb_server_adopt(struct smb_server *server, int fd, int transport)
{
    return adopt(server, fd, transport, NULL);
}

int smb_server_adopt_reference(struct smb_server *server, int fd, struct smb_slots *slots)
{
    return adopt(server, fd, SMB_TRANSPORT_VERBS, slots);
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
            drop_connection(loop, connection);
        connection = next;
    }
}

/* Takes each connection off the list and gives it a turn; it may put itself there again, for the next round. */
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
            drop_connection(loop, connection);
        }
        connection = next;
    }
}

static int wait_ms(const struct loop *loop)
{
    if (loop->again)
        return 0;
    if (loop->parked)
        return PARKED_RETRY_MS;
    return loop->not_greeted ? 1000 : -1;
}

/* `served`: it has just had something to do. */
static int wait_for_events(struct loop *loop, struct epoll_event *events, bool served)
{
    int timeout = wait_ms(loop);
    bool spins = served && !loop->bulk && timeout != 0;
    uint64_t until_ns = spins ? smb_now_ns() + SPIN_NS : 0; /* from here on: what it had to do may have taken longer than that */
    int count = epoll_wait(loop->epoll, events, EVENTS_PER_WAIT, spins ? 0 : timeout);
    while (spins && count == 0) {
        sched_yield(); /* the peer that we wait for may have been put on this very core: measured 6 times the latency */
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
                woken = true; /* what is to be done may close connections that are among these events */
            } else if ((uintptr_t)source & 1U) {
                knocked[knocks++] = (struct listener *)((uintptr_t)source - 1U); /* may close connections, too */
            } else {
                struct connection *connection = source;
                if (!connection->in_list)
                    serve(loop, connection);
                else if (events[i].events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP))
                    drop_connection(loop, connection);
            }
        }
        while (knocks > 0)
            accept_some(knocked[--knocks]);
        if (woken) {
            take_inbox(loop);
            take_answers(loop);
            if (atomic_exchange_explicit(&loop->sweep, false, memory_order_acquire))
                drop_fenced(loop);
        }
        if (loop->again)
            serve_list(loop, &loop->again);
        if (loop->parked && now_ns - last_retry_ns >= PARKED_RETRY_MS * 1000000U) {
            last_retry_ns = now_ns;
            serve_list(loop, &loop->parked);
        }
        if (loop->not_greeted && now_ns - last_check_ns >= 500000000U) {
            last_check_ns = now_ns;
            close_the_silent(loop, now_ns);
        }
    }
    return NULL;
}

static int start_loop(struct smb_server *server, int index)
{
    struct loop *loop = &server->loops[index];
    loop->server = server;
    loop->index = index;
    loop->epoll = epoll_create1(EPOLL_CLOEXEC);
    loop->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&loop->inbox_lock, NULL);
    pthread_mutex_init(&loop->answers_lock, NULL);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = loop};
    if (loop->epoll < 0 || loop->wake < 0 || epoll_ctl(loop->epoll, EPOLL_CTL_ADD, loop->wake, &event) != 0)
        return SMB_SYSTEM;
    int failure = pthread_create(&loop->thread, NULL, run_loop, loop);
    if (failure != 0) {
        errno = failure;
        return SMB_SYSTEM;
    }
    loop->running = true;
    return SMB_OK;
}

/* ---- server ------------------------------------------------------------------------------------------------------- */

int smb_server_create(uint64_t instance, int loops, uint64_t capacity_bytes, struct smb_server **server)
{
    if (loops < 1 || loops > LOOPS_MAX)
        return SMB_INVALID;
    struct smb_server *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->instance = instance;
    made->capacity_bytes = capacity_bytes;
    made->loops = aligned_alloc(64, (size_t)loops * sizeof *made->loops);
    made->ended = calloc(ENDED_MAX, sizeof *made->ended);
    if (!made->loops || !made->ended) {
        free(made->loops);
        free(made->ended);
        free(made);
        return SMB_OUT_OF_MEMORY;
    }
    memset(made->loops, 0, (size_t)loops * sizeof *made->loops);
    made->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    pthread_rwlock_init(&made->registry_lock, NULL);
    pthread_mutex_init(&made->lanes_lock, NULL);
    pthread_mutex_init(&made->keys.lock, NULL);
    pthread_mutex_init(&made->tls_lock, NULL);
    pthread_mutex_init(&made->ended_lock, NULL);
    pthread_mutex_init(&made->due_lock, NULL);
    pthread_cond_init(&made->due_changed, NULL);
    int status = waits_start(made);
    while (made->loop_count < loops && status == SMB_OK)
        status = start_loop(made, made->loop_count++);
    if (status != SMB_OK) {
        smb_server_destroy(made);
        return status;
    }
    *server = made;
    return SMB_OK;
}

/* Takes fd over. Loop 0 accepts for all. */
static int add_listener(struct smb_server *server, int fd, int transport)
{
    int index = 0;
    while (index < LISTENERS_MAX && server->listeners[index])
        index++;
    struct listener *listener = index < LISTENERS_MAX ? malloc(sizeof *listener) : NULL;
    if (!listener) {
        close(fd);
        return SMB_OUT_OF_MEMORY;
    }
    *listener = (struct listener){.fd = fd, .transport = transport, .server = server};
    server->listeners[index] = listener;
    /* Told from connections by the lowest bit, which is free in a pointer to either. */
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = (void *)((uintptr_t)listener + 1U)};
    return epoll_ctl(server->loops[0].epoll, EPOLL_CTL_ADD, fd, &event) == 0 ? SMB_OK : SMB_SYSTEM;
}

static int close_failed(int fd)
{
    int saved = errno;
    close(fd);
    errno = saved;
    return SMB_SYSTEM;
}

int smb_server_listen_tcp(struct smb_server *server, const char *address, uint16_t port, uint16_t *bound_port)
{
    struct address here;
    if (!address_parse(address, port, &here))
        return SMB_INVALID;
    int fd = socket(here.name.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return SMB_SYSTEM;
    int on = 1; /* a restarted daemon gets its old port although old connections linger */
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, &here.name.any, here.length) != 0 || listen(fd, SOMAXCONN) != 0 ||
        getsockname(fd, &here.name.any, &here.length) != 0)
        return close_failed(fd);
    int status = add_listener(server, fd, SMB_TRANSPORT_TCP);
    if (status == SMB_OK)
        *bound_port = address_port(&here);
    return status;
}

int smb_server_listen_unix(struct smb_server *server, const char *path)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof name.sun_path || server->unix_path)
        return SMB_INVALID;
    strcpy(name.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return SMB_SYSTEM;
    unlink(path); /* left by an earlier run; the caller holds the lock that says so */
    if (bind(fd, (struct sockaddr *)&name, sizeof name) != 0)
        return close_failed(fd);
    server->unix_path = strdup(path);
    if (!server->unix_path || listen(fd, SOMAXCONN) != 0)
        return close_failed(fd);
    return add_listener(server, fd, SMB_TRANSPORT_UNIX);
}

/* A loop hands connections to others: all are stopped before the first one is emptied. */
static void stop_loop(struct loop *loop)
{
    if (!loop->running)
        return;
    atomic_store_explicit(&loop->stop, true, memory_order_release);
    loop_wake(loop);
    pthread_join(loop->thread, NULL);
}

static void empty_loop(struct loop *loop)
{
    if (loop->wake >= 0)
        take_inbox(loop);
    while (loop->connections)
        drop_connection(loop, loop->connections);
    take_answers(loop); /* that nobody is left to hear */
    if (loop->epoll >= 0)
        close(loop->epoll);
    if (loop->wake >= 0)
        close(loop->wake);
    pthread_mutex_destroy(&loop->inbox_lock);
    pthread_mutex_destroy(&loop->answers_lock);
}

void smb_server_destroy(struct smb_server *server)
{
    waits_stop(server);
    for (int i = 0; i < server->loop_count; i++)
        stop_loop(&server->loops[i]);
    for (int i = 0; i < server->loop_count; i++)
        empty_loop(&server->loops[i]);
    for (int i = 0; i < LISTENERS_MAX; i++) {
        if (server->listeners[i])
            close(server->listeners[i]->fd);
        free(server->listeners[i]);
    }
    if (server->unix_path)
        unlink(server->unix_path);
    free(server->unix_path);
    if (server->spare_fd >= 0)
        close(server->spare_fd);
    registry_clear(server);
    if (server->journal)
        journal_close(server->journal);
    while (server->pasts) {
        struct past *past = server->pasts;
        server->pasts = past->next;
        free(past);
    }
    pthread_rwlock_destroy(&server->registry_lock);
    pthread_mutex_destroy(&server->lanes_lock);
    pthread_mutex_destroy(&server->ended_lock);
    pthread_mutex_destroy(&server->due_lock);
    pthread_mutex_destroy(&server->tls_lock);
    if (server->tls)
        smb_tls_release(server->tls);
    pthread_cond_destroy(&server->due_changed);
    free(server->ended);
    free(server->loops);
    free(server);
}
