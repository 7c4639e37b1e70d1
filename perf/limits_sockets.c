/* The limits of sockets, TCP and Unix: the server, and a client's call over its connections. */
#include "limits.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* A poller that found nothing so often lets others run: with more pollers than cores they would
 * wait for each other. */
#define POLLS_BEFORE_YIELD 32
#define YIELDS_BEFORE_SLEEP 200

static union {
    struct sockaddr any;
    struct sockaddr_in tcp;
    struct sockaddr_un unix_;
} address;
static socklen_t address_bytes;

/* Send or receive at most `bytes` at `at`: the bytes moved; 0 where a poller has nothing to do now.
 * `ended` is set where the other side is gone. A blocking call moves all. */
static uint64_t pump(int socket, void *at, uint64_t bytes, bool sending, bool *ended)
{
    int flags = plan.polling ? MSG_DONTWAIT : 0;
    for (;;) {
        ssize_t moved = plan.tls ? tls_move(socket, at, bytes, sending)
                        : sending
                            ? send(socket, at, bytes, flags | MSG_NOSIGNAL)
                            : recv(socket, at, bytes, flags | (plan.polling ? 0 : MSG_WAITALL));
        if (moved > 0) {
            return (uint64_t)moved;
        }
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        if (moved < 0 && plan.polling && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            return 0;
        }
        *ended = true;
        return 0;
    }
}

/* Whole pieces, so that none lies in two stripes. */
uint64_t part_at(unsigned connection)
{
    uint64_t pieces = (plan.bytes + plan.piece_bytes - 1) / plan.piece_bytes;
    uint64_t at = (pieces + plan.connections - 1) / plan.connections * plan.piece_bytes *
                  connection;
    return at < plan.bytes ? at : plan.bytes;
}

/* ---- the server ------------------------------------------------------------------------------ */

struct connection {
    int socket;
    bool answering;          /* read: the question is here, the array goes out */
    uint64_t at, begin, end; /* bytes of the array: the next one, and the connection's part */
    char *staging;           /* accumulate and fetch_add: what was received and is not yet added */
    uint64_t staged;
    bool ended;
};

static struct connection served[CLIENTS_MAX * CONNECTIONS_MAX];

static void answer(struct connection *connection, void *at, uint64_t bytes)
{
    /* Fits into the socket's buffer: nothing else is there. */
    ssize_t moved = plan.tls ? tls_move(connection->socket, at, bytes, true)
                             : send(connection->socket, at, bytes, MSG_NOSIGNAL);
    if (moved != (ssize_t)bytes) {
        connection->ended = true;
    }
}

static void add_piece(struct connection *connection)
{
    if (plan.operation == FETCH_ADD) {
        int64_t value;
        memcpy(&value, connection->staging, sizeof value);
        value = atomic_fetch_add(&shared->counter, value);
        answer(connection, &value, sizeof value);
    } else {
        _Atomic unsigned *lock = lock_stripe(connection->at);
        add(array + connection->at / sizeof(float), (float *)(void *)connection->staging,
            connection->staged);
        unlock_stripe(lock);
    }
    connection->at += connection->staged;
    connection->staged = 0;
}

/* One system call, and what follows from it. False where there was nothing to do. */
static bool serve_step(struct connection *connection)
{
    bool sending = plan.operation == READ;
    if (sending && !connection->answering) {
        char question;
        connection->answering = pump(connection->socket, &question, 1, false, &connection->ended) ==
                                1;
        return connection->answering;
    }
    uint64_t left = connection->end - connection->at, moved;
    if (connection->staging == NULL) {
        moved = pump(connection->socket, (char *)array + connection->at, left, sending,
                     &connection->ended);
        connection->at += moved;
    } else {
        uint64_t piece = left < plan.piece_bytes ? left : plan.piece_bytes;
        moved = pump(connection->socket, connection->staging + connection->staged,
                     piece - connection->staged, false, &connection->ended);
        connection->staged += moved;
        if (connection->staged < piece) {
            return moved > 0;
        }
        add_piece(connection);
    }
    if (connection->at == connection->end) {
        connection->at = connection->begin;
        connection->answering = false;
        if (plan.operation == WRITE || plan.operation == ACCUMULATE) {
            answer(connection, "", 1);
        }
    }
    return moved > 0;
}

/* A poller that found nothing again and again lets others run. */
static void count_idle(unsigned *idle, bool moved)
{
    *idle = moved ? 0 : *idle + 1;
    if (*idle % POLLS_BEFORE_YIELD == POLLS_BEFORE_YIELD - 1) {
        sched_yield();
    }
}

static void *serve_one(void *argument)
{
    struct connection *connection = argument;
    for (unsigned idle = 0; !connection->ended;) {
        count_idle(&idle, serve_step(connection));
    }
    return NULL;
}

static void serve_by_polling(unsigned count)
{
    unsigned open = count;
    for (unsigned idle = 0; open > 0;) {
        bool moved = false;
        open = 0;
        for (unsigned i = 0; i < count; i++) {
            moved |= !served[i].ended && serve_step(&served[i]);
            open += !served[i].ended;
        }
        count_idle(&idle, moved);
    }
}

static void set_socket(int socket)
{
    int on = 1, bytes = (int)plan.buffer_bytes;
    if (plan.transport == TCP) {
        setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }
    if (bytes > 0) {
        /* The second one, for who may, is not bounded by the system's limit. */
        setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
        setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
        setsockopt(socket, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes);
        setsockopt(socket, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes);
    }
}

static int new_socket(void)
{
    int fd = socket(plan.transport == TCP ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        fail("socket: %s", strerror(errno));
    }
    set_socket(fd);
    return fd;
}

int listen_somewhere(void)
{
    int listener = new_socket();
    address_bytes = sizeof address.tcp;
    if (plan.transport == TCP) {
        address.tcp = (struct sockaddr_in){.sin_family = AF_INET,
                                           .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        if (plan.address && inet_pton(AF_INET, plan.address, &address.tcp.sin_addr) != 1) {
            fail("%s is no IPv4 address", plan.address);
        }
    } else {
        /* the system picks a name outside the file system */
        address_bytes = sizeof address.unix_.sun_family;
        address.unix_.sun_family = AF_UNIX;
    }
    if (bind(listener, &address.any, address_bytes) != 0 ||
        listen(listener, CLIENTS_MAX * CONNECTIONS_MAX) != 0) {
        fail("listen: %s", strerror(errno));
    }
    address_bytes = sizeof address;
    getsockname(listener, &address.any, &address_bytes);
    return listener;
}

void serve(int listener)
{
    array = allocate(plan.bytes);
    fill_array();
    unsigned count = plan.clients * plan.connections;
    for (unsigned i = 0; i < count; i++) {
        int fd = accept(listener, NULL, NULL);
        unsigned char index;
        if (fd < 0 || recv(fd, &index, 1, 0) != 1) {
            fail("accept: %s", strerror(errno));
        }
        set_socket(fd);
        if (plan.tls) {
            tls_begin(fd, true);
        }
        uint64_t begin = part_at(index);
        served[i] = (struct connection){
            .socket = fd, .at = begin, .begin = begin, .end = part_at(index + 1u)};
        if (plan.operation == ACCUMULATE || plan.operation == FETCH_ADD) {
            served[i].staging = allocate(plan.piece_bytes);
        }
        char hello = 0;
        answer(&served[i], &hello, 1);
    }
    if (plan.polling && 2 * count > (unsigned)sysconf(_SC_NPROCESSORS_ONLN)) {
        serve_by_polling(count); /* a core for each poller there is not */
    } else {
        pthread_t threads[CLIENTS_MAX * CONNECTIONS_MAX];
        for (unsigned i = 0; i < count; i++) {
            if (pthread_create(&threads[i], NULL, serve_one, &served[i]) != 0) {
                fail("no thread for a connection");
            }
        }
        for (unsigned i = 0; i < count; i++) {
            pthread_join(threads[i], NULL);
        }
    }
    if (plan.operation != READ) {
        check_end(); /* all clients have hung up: their counts are complete */
    }
}

/* ---- a client's call, over its connections --------------------------------------------------- */

/* Move `bytes` over the connection, whatever it takes. */
static void pump_all(int socket, void *memory, uint64_t bytes, bool sending)
{
    bool ended = false;
    unsigned idle = 0;
    for (uint64_t done = 0; done < bytes;) {
        uint64_t moved = pump(socket, (char *)memory + done, bytes - done, sending, &ended);
        if (ended) {
            fail("the server ended early");
        }
        done += moved;
        count_idle(&idle, moved > 0);
    }
}

/* One connection's part of a call. */
static void call_over(struct client *client, unsigned connection)
{
    int socket = client->sockets[connection];
    bool sending = plan.operation != READ;
    char byte = 0;
    if (!sending) {
        pump_all(socket, &byte, 1, true);
    }
    float *memory = sending ? client->source : client->own;
    uint64_t at = part_at(connection);
    pump_all(socket, (char *)memory + at, part_at(connection + 1) - at, sending);
    if (sending) {
        pump_all(socket, &byte, 1, false);
    }
}

/* A thread for each of the client's connections but the first one. */
struct helper {
    struct client *client;
    unsigned connection;
    sem_t called, done;
};

static struct helper helpers[CONNECTIONS_MAX];

/* Sleeping and waking would take longer than a small call. */
static void take(sem_t *semaphore)
{
    for (unsigned turn = 0; turn < YIELDS_BEFORE_SLEEP; turn++) {
        if (sem_trywait(semaphore) == 0) {
            return;
        }
        sched_yield();
    }
    while (sem_wait(semaphore) != 0) {
    }
}

static void *help(void *argument)
{
    struct helper *helper = argument;
    for (;;) {
        take(&helper->called);
        call_over(helper->client, helper->connection);
        sem_post(&helper->done);
    }
    return NULL;
}

void connect_all(struct client *client)
{
    for (unsigned i = 0; i < plan.connections; i++) {
        int fd = client->sockets[i] = new_socket();
        unsigned char index = (unsigned char)i, hello;
        bool ended = false;
        if (connect(fd, &address.any, address_bytes) != 0 ||
            send(fd, &index, 1, MSG_NOSIGNAL) != 1) {
            fail("connect: %s", strerror(errno));
        }
        if (plan.tls) {
            tls_begin(fd, false);
        }
        while (pump(fd, &hello, 1, false, &ended) != 1) {
            if (ended) {
                fail("connect: the server ended");
            }
        }
    }
    for (unsigned i = 1; i < plan.connections; i++) {
        helpers[i] = (struct helper){.client = client, .connection = i};
        sem_init(&helpers[i].called, 0, 0);
        sem_init(&helpers[i].done, 0, 0);
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, &helpers[i]) != 0) {
            fail("no thread for a connection");
        }
    }
}

void call_server(struct client *client)
{
    if (plan.operation == FETCH_ADD) {
        int64_t value = client->source == client->own ? 1 : -1;
        pump_all(client->sockets[0], &value, sizeof value, true);
        pump_all(client->sockets[0], &value, sizeof value, false);
        return;
    }
    for (unsigned i = 1; i < plan.connections; i++) {
        sem_post(&helpers[i].called);
    }
    call_over(client, 0);
    for (unsigned i = 1; i < plan.connections; i++) {
        take(&helpers[i].done);
    }
}
