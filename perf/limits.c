/* The physical limits: what a C program that does nothing else reaches. A start measures one case and checks its bytes.
 *
 *     limits operation=accumulate transport=tcp bytes=1048576 clients=2 seconds=0.3 polling=1 connections=2 ...
 *
 * shm: client processes copy between private memory and one tmpfs file that all have mapped, or add to it.
 * tcp, unix: client processes talk to a server process that has the array, over one connection or, to use more cores,
 * over several with a part of the array each. A write is the bytes and a 1-byte answer, a read a 1-byte question and
 * the bytes, fetch_add 8 bytes each way. For accumulate the server adds piece by piece, while it receives, under a lock
 * per stripe. Bytes are received straight into the array: of two writes at once an element may have bytes of both, so
 * all clients write the same there.
 *
 * Processes: this one forks the server (a thread for every connection, or one that polls them all) and the clients (a
 * thread for every connection), starts all clients at once and waits. What they count lies in shared memory; children
 * end with this process.
 *
 * Output: a line of JSON (for each client: batches, calls of a batch, calls in all, CPU seconds), then for each client
 * the batches' start times and end times, in seconds of CLOCK_MONOTONIC, as binary doubles. Batches, since a clock
 * takes longer than a small copy. Exit status 1, and why on stderr, where bytes are wrong or a call failed.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { CLIENTS_MAX = 64, CONNECTIONS_MAX = 8 };
#define STRIPE_BYTES ((uint64_t)256 << 10)
#define HUGE_PAGE_BYTES ((uint64_t)2 << 20)
#define WARM_UP_BATCHES 3
/* Above this a batch is one call. Below, a batch's calls move this much, which takes some microseconds. */
#define BATCH_BYTES ((uint64_t)512 << 10)
#define BATCH_CALLS_MAX 4096
/* Sources up to here exist twice, as they are and negated, and batches take turns: sums of millions of calls stay exact
 * in float32 (below 2^24). Longer ones are never added so often. */
#define ALTERNATE_BYTES_MAX ((uint64_t)64 << 10)
#define RECORDS_PER_SECOND 1000000
/* A poller that found nothing so often lets others run: with more pollers than cores they would wait for each other. */
#define POLLS_BEFORE_YIELD 32
#define YIELDS_BEFORE_SLEEP 200

enum operation { WRITE, READ, ACCUMULATE, FETCH_ADD };
enum transport { SHM, TCP, UNIX };

static struct {
    enum operation operation;
    enum transport transport;
    uint64_t bytes;
    unsigned clients;
    double seconds;
    bool nontemporal; /* shm: stores that go around the caches */
    bool locks;       /* shm: a lock for every stripe; accumulate of several clients always has them */
    bool polling;     /* sockets: never sleep */
    unsigned connections;   /* of each client, each with a part of the array and a thread on both sides */
    uint64_t buffer_bytes;  /* SO_SNDBUF and SO_RCVBUF; 0: the system's own */
    uint64_t piece_bytes;   /* what the server adds at once */
} plan = {.clients = 1, .seconds = 0.3, .connections = 1, .piece_bytes = 128 << 10};

/* What all processes share. `ready`, `finished`: released by clients, acquired by the parent; `go` the other way. */
struct shared {
    _Atomic unsigned ready, go, finished;
    _Atomic int64_t counter;
    struct {
        double cpu_seconds;
        uint64_t batches, batch_calls, calls;
        int64_t balance; /* calls that added, less those that took away */
    } clients[CLIENTS_MAX];
};

static struct shared *shared;
static double *records[CLIENTS_MAX]; /* [batches_max] starts, then [batches_max] ends */
static uint64_t batches_max;
static float *array;               /* shm: the file's memory; sockets: the server's own */
static _Atomic unsigned *stripes;  /* 1 while somebody has the lock; each in a cache line of its own */
static union { struct sockaddr any; struct sockaddr_in tcp; struct sockaddr_un unix_; } address;
static socklen_t address_bytes;

_Noreturn __attribute__((format(printf, 1, 2))) static void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

static void *check_map(void *at, const char *what)
{
    if (at == MAP_FAILED) {
        fail("%s: %s", what, strerror(errno));
    }
    return at;
}

static double clock_seconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- memory and what it holds */

/* Private memory, zeroed, in huge pages where the system gives them. */
static void *allocate(uint64_t bytes)
{
    uint64_t unit = bytes < HUGE_PAGE_BYTES ? 4096 : HUGE_PAGE_BYTES;
    bytes = (bytes + unit - 1) / unit * unit;
    void *at = NULL;
    if (posix_memalign(&at, unit, bytes) != 0) {
        fail("no memory for %llu bytes", (unsigned long long)bytes);
    }
    madvise(at, bytes, MADV_HUGEPAGE);
    memset(at, 0, bytes);
    return at;
}

static void *share(uint64_t bytes)
{
    int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE;
    return check_map(mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0), "shared memory");
}

/* A mapping of a file in tmpfs that nobody can name. */
static void *share_file(uint64_t bytes)
{
    int fd = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0 || posix_fallocate(fd, 0, (off_t)bytes) != 0) {
        fail("a file of %llu bytes in /dev/shm: %s", (unsigned long long)bytes, strerror(errno));
    }
    void *at = check_map(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), "the file in /dev/shm");
    close(fd);
    madvise(at, bytes, MADV_HUGEPAGE);
    madvise(at, bytes, MADV_POPULATE_WRITE);
    return at;
}

static uint32_t hash(uint64_t index)
{
    return (uint32_t)index * 2654435761u; /* Knuth's multiplicative hash: no short period in the upper bits */
}

/* What is written by each client and read by all: whole numbers below 2^18, exact in float32. */
static float written(uint64_t index, unsigned client)
{
    return (float)((hash(index) >> 21) + (plan.transport == SHM ? 2048 * client : 0) + 1);
}

/* What one accumulate adds: 1 or 2. */
static float added(uint64_t index)
{
    return (float)((hash(index) >> 31) + 1);
}

static void check_array(const float *got)
{
    int64_t balance = 0;
    for (unsigned c = 0; c < plan.clients; c++) {
        balance += shared->clients[c].balance;
    }
    if (plan.operation == ACCUMULATE && balance >= 1 << 23) {
        fail("%lld additions are too many for exact sums in float32: fewer seconds", (long long)balance);
    }
    for (uint64_t i = 0; i < plan.bytes / sizeof(float); i++) {
        bool right = false;
        if (plan.operation == ACCUMULATE) {
            right = got[i] == 1 + added(i) * (float)balance;
        }
        for (unsigned c = 0; c < (plan.operation == WRITE ? plan.clients : 1) && plan.operation != ACCUMULATE; c++) {
            right |= got[i] == written(i, c);
        }
        if (!right) {
            fail("wrong bytes: element %llu is %g", (unsigned long long)i, (double)got[i]);
        }
    }
}

static void check_end(void)
{
    if (plan.operation != FETCH_ADD) {
        check_array(array);
        return;
    }
    int64_t calls = 0;
    for (unsigned c = 0; c < plan.clients; c++) {
        calls += shared->clients[c].balance;
    }
    if (atomic_load(&shared->counter) != calls) {
        fail("wrong bytes: the counter is %lld after %lld additions", (long long)shared->counter, (long long)calls);
    }
}

static void fill_array(void)
{
    for (uint64_t i = 0; i < plan.bytes / sizeof(float); i++) {
        array[i] = plan.operation == READ ? written(i, 0) : plan.operation == ACCUMULATE ? 1 : 0;
    }
}

/* ---- kernels: bytes are a multiple of 4, both sides begin at a cache line */

typedef float vector __attribute__((vector_size(64), may_alias));

static void add(float *restrict sum, const float *restrict source, uint64_t bytes)
{
    vector *s = (vector *)sum;
    const vector *x = (const vector *)source;
    uint64_t blocks = bytes / sizeof(vector) / 4;
    for (uint64_t i = 0; i < 4 * blocks; i += 4) {
        s[i] += x[i];
        s[i + 1] += x[i + 1];
        s[i + 2] += x[i + 2];
        s[i + 3] += x[i + 3];
    }
    for (uint64_t i = 4 * blocks * (sizeof(vector) / sizeof(float)); i < bytes / sizeof(float); i++) {
        sum[i] += source[i];
    }
}

#if defined(__AVX512F__)
typedef __m512 lane;
#define LANE_LOAD(at) _mm512_load_ps(at)
#define LANE_ADD(a, b) _mm512_add_ps(a, b)
#define LANE_STREAM(at, value) _mm512_stream_ps(at, value)
#elif defined(__AVX__)
typedef __m256 lane;
#define LANE_LOAD(at) _mm256_load_ps(at)
#define LANE_ADD(a, b) _mm256_add_ps(a, b)
#define LANE_STREAM(at, value) _mm256_stream_ps(at, value)
#elif defined(__x86_64__)
typedef __m128 lane;
#define LANE_LOAD(at) _mm_load_ps(at)
#define LANE_ADD(a, b) _mm_add_ps(a, b)
#define LANE_STREAM(at, value) _mm_stream_ps(at, value)
#endif

static void stream(float *restrict to, const float *restrict source, uint64_t bytes, bool adding)
{
#ifdef LANE_STREAM
    uint64_t step = sizeof(lane) / sizeof(float), count = bytes / sizeof(lane) * step;
    if (adding) {
        for (uint64_t i = 0; i < count; i += step) {
            LANE_STREAM(to + i, LANE_ADD(LANE_LOAD(to + i), LANE_LOAD(source + i)));
        }
    } else {
        for (uint64_t i = 0; i < count; i += step) {
            LANE_STREAM(to + i, LANE_LOAD(source + i));
        }
    }
    for (uint64_t i = count; i < bytes / sizeof(float); i++) {
        to[i] = adding ? to[i] + source[i] : source[i];
    }
    _mm_sfence();
#else
    (void)to, (void)source, (void)bytes, (void)adding;
    fail("no non-temporal stores here");
#endif
}

static void move(float *restrict to, const float *restrict source, uint64_t bytes)
{
    bool adding = plan.operation == ACCUMULATE;
    if (plan.nontemporal) {
        stream(to, source, bytes, adding);
    } else if (adding) {
        add(to, source, bytes);
    } else {
        memcpy(to, source, bytes);
    }
}

/* ---- stripe locks, between processes or threads */

static void pause_briefly(unsigned turn)
{
    if (turn % 64 == 63) {
        sched_yield(); /* its owner may have no core */
    }
#ifdef __x86_64__
    _mm_pause();
#endif
}

static _Atomic unsigned *lock_stripe(uint64_t offset)
{
    _Atomic unsigned *lock = stripes + offset / STRIPE_BYTES * 16;
    for (unsigned turn = 0;; turn++) {
        if (!atomic_load_explicit(lock, memory_order_relaxed) &&
            !atomic_exchange_explicit(lock, 1, memory_order_acquire)) { /* pairs with unlock_stripe's store */
            return lock;
        }
        pause_briefly(turn);
    }
}

static void unlock_stripe(_Atomic unsigned *lock)
{
    atomic_store_explicit(lock, 0, memory_order_release);
}

/* ---- a client's call, over shared memory */

struct client {
    unsigned index;
    float *own;      /* what is written or added; where reads go */
    float *negated;  /* of `own`, or NULL */
    float *source;   /* one of the two */
    int sockets[CONNECTIONS_MAX];
};

static void call_memory(struct client *client)
{
    if (plan.operation == FETCH_ADD) {
        atomic_fetch_add_explicit(&shared->counter, client->source == client->own ? 1 : -1, memory_order_acq_rel);
    } else if (plan.operation == READ) {
        move(client->own, array, plan.bytes);
    } else if (!plan.locks) {
        move(array, client->source, plan.bytes);
    } else {
        /* Clients begin at different stripes, so that they follow each other without meeting. */
        uint64_t count = (plan.bytes + STRIPE_BYTES - 1) / STRIPE_BYTES;
        for (uint64_t i = 0; i < count; i++) {
            uint64_t at = (client->index * count / plan.clients + i) % count * STRIPE_BYTES;
            uint64_t bytes = plan.bytes - at < STRIPE_BYTES ? plan.bytes - at : STRIPE_BYTES;
            _Atomic unsigned *lock = lock_stripe(at);
            move(array + at / sizeof(float), client->source + at / sizeof(float), bytes);
            unlock_stripe(lock);
        }
    }
}

/* ---- sockets */

/* Send or receive at most `bytes` at `at`: the bytes moved; 0 where a poller has nothing to do now. `ended` is set
 * where the other side is gone. A blocking call moves all. */
static uint64_t pump(int socket, void *at, uint64_t bytes, bool sending, bool *ended)
{
    int flags = plan.polling ? MSG_DONTWAIT : 0;
    for (;;) {
        ssize_t moved = sending ? send(socket, at, bytes, flags | MSG_NOSIGNAL)
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

/* Where the part of a connection begins; that of the one behind the last one is where the array ends. Whole pieces, so
 * that none lies in two stripes. */
static uint64_t part_at(unsigned connection)
{
    uint64_t pieces = (plan.bytes + plan.piece_bytes - 1) / plan.piece_bytes;
    uint64_t at = (pieces + plan.connections - 1) / plan.connections * plan.piece_bytes * connection;
    return at < plan.bytes ? at : plan.bytes;
}

/* ---- the server */

struct connection {
    int socket;
    bool answering; /* read: the question is here, the array goes out */
    uint64_t at, begin, end; /* bytes of the array: the next one, and the connection's part */
    char *staging;  /* accumulate and fetch_add: what was received and is not yet added */
    uint64_t staged;
    bool ended;
};

static struct connection served[CLIENTS_MAX * CONNECTIONS_MAX];

static void answer(struct connection *connection, void *at, uint64_t bytes)
{
    /* Fits into the socket's buffer: nothing else is there. */
    if (send(connection->socket, at, bytes, MSG_NOSIGNAL) != (ssize_t)bytes) {
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
        add(array + connection->at / sizeof(float), (float *)(void *)connection->staging, connection->staged);
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
        connection->answering = pump(connection->socket, &question, 1, false, &connection->ended) == 1;
        return connection->answering;
    }
    uint64_t left = connection->end - connection->at, moved;
    if (connection->staging == NULL) {
        moved = pump(connection->socket, (char *)array + connection->at, left, sending, &connection->ended);
        connection->at += moved;
    } else {
        uint64_t piece = left < plan.piece_bytes ? left : plan.piece_bytes;
        moved = pump(connection->socket, connection->staging + connection->staged, piece - connection->staged, false,
                     &connection->ended);
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

static int listen_somewhere(void)
{
    int listener = new_socket();
    address_bytes = sizeof address.tcp;
    if (plan.transport == TCP) {
        address.tcp = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    } else {
        address_bytes = sizeof address.unix_.sun_family; /* the system picks a name outside the file system */
        address.unix_.sun_family = AF_UNIX;
    }
    if (bind(listener, &address.any, address_bytes) != 0 || listen(listener, CLIENTS_MAX * CONNECTIONS_MAX) != 0) {
        fail("listen: %s", strerror(errno));
    }
    address_bytes = sizeof address;
    getsockname(listener, &address.any, &address_bytes);
    return listener;
}

static void server(int listener)
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
        uint64_t begin = part_at(index);
        served[i] = (struct connection){.socket = fd, .at = begin, .begin = begin, .end = part_at(index + 1u)};
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

/* ---- a client's call, over its connections */

static void connect_all(struct client *client)
{
    for (unsigned i = 0; i < plan.connections; i++) {
        int fd = client->sockets[i] = new_socket();
        unsigned char index = (unsigned char)i, hello;
        if (connect(fd, &address.any, address_bytes) != 0 || send(fd, &index, 1, MSG_NOSIGNAL) != 1 ||
            recv(fd, &hello, 1, 0) != 1) {
            fail("connect: %s", strerror(errno));
        }
    }
}

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

static void call_server(struct client *client)
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

/* ---- a client process */

static void prepare_client(struct client *client)
{
    uint64_t count = plan.bytes / sizeof(float);
    client->source = client->own = allocate(plan.bytes);
    for (uint64_t i = 0; i < count && plan.operation != READ; i++) {
        client->own[i] = plan.operation == WRITE ? written(i, client->index) : added(i);
    }
    if (plan.operation == FETCH_ADD || (plan.operation == ACCUMULATE && plan.bytes <= ALTERNATE_BYTES_MAX)) {
        client->negated = allocate(plan.bytes);
        for (uint64_t i = 0; i < count; i++) {
            client->negated[i] = -client->own[i];
        }
    }
    if (plan.transport != SHM) {
        connect_all(client);
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
}

static void run_batch(struct client *client, uint64_t batch_calls)
{
    for (uint64_t i = 0; i < batch_calls; i++) {
        if (plan.transport == SHM) {
            call_memory(client);
        } else {
            call_server(client);
        }
        __asm__ volatile("" ::: "memory"); /* every call is made */
    }
    shared->clients[client->index].calls += batch_calls;
    int64_t sign = client->source == client->own ? 1 : -1;
    shared->clients[client->index].balance += sign * (int64_t)batch_calls;
    if (client->negated) {
        client->source = client->source == client->own ? client->negated : client->own;
    }
}

/* Whole numbers of calls of which the last one added, so that a lost one shows. */
static void end_on_added(struct client *client, uint64_t batch_calls)
{
    if (client->negated && client->source == client->own) {
        run_batch(client, batch_calls);
    }
}

static void run_client(unsigned index)
{
    struct client client = {.index = index};
    uint64_t batch_calls = plan.transport == SHM ? BATCH_BYTES / plan.bytes : 1;
    batch_calls = batch_calls < 1 ? 1 : batch_calls > BATCH_CALLS_MAX ? BATCH_CALLS_MAX : batch_calls;
    prepare_client(&client);
    for (int i = 0; i < WARM_UP_BATCHES; i++) {
        run_batch(&client, batch_calls);
    }
    atomic_fetch_add_explicit(&shared->ready, 1, memory_order_release);
    while (!atomic_load_explicit(&shared->go, memory_order_acquire)) {
        sched_yield();
    }
    double *starts = records[index], *ends = starts + batches_max;
    double cpu = clock_seconds(CLOCK_PROCESS_CPUTIME_ID);
    double now = clock_seconds(CLOCK_MONOTONIC), deadline = now + plan.seconds;
    uint64_t batch = 0;
    while ((now < deadline || batch < 3) && batch < batches_max) {
        starts[batch] = now;
        run_batch(&client, batch_calls);
        now = clock_seconds(CLOCK_MONOTONIC);
        ends[batch++] = now;
    }
    shared->clients[index].cpu_seconds = clock_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    shared->clients[index].batches = batch;
    shared->clients[index].batch_calls = batch_calls;
    atomic_fetch_add_explicit(&shared->finished, 1, memory_order_release);
    end_on_added(&client, batch_calls);
    if (plan.operation == READ) {
        check_array(client.own);
    }
}

/* ---- the parent */

static pid_t start(void (*what)(unsigned), unsigned argument)
{
    pid_t parent = getpid(), child = fork();
    if (child < 0) {
        fail("fork: %s", strerror(errno));
    }
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) {
            _exit(1);
        }
        what((unsigned)argument);
        exit(0);
    }
    return child;
}

static void run_server(unsigned listener)
{
    server((int)listener);
}

/* Wait until `count` clients are so far. Where a process fails, all end: it has said why. */
static void wait_for(_Atomic unsigned *counter)
{
    const struct timespec moment = {.tv_nsec = 200000};
    while (atomic_load_explicit(counter, memory_order_acquire) < plan.clients) {
        int status;
        pid_t ended = waitpid(-1, &status, WNOHANG);
        if (ended > 0 && status != 0) {
            exit(1); /* the others die with us */
        }
        nanosleep(&moment, NULL);
    }
}

static double server_cpu(pid_t server)
{
    clockid_t clock;
    return server > 0 && clock_getcpuclockid(server, &clock) == 0 ? clock_seconds(clock) : 0;
}

static void read_plan(int count, char **words)
{
    for (int i = 1; i < count; i++) {
        const char *names[] = {"write", "read", "accumulate", "fetch_add", "shm", "tcp", "unix"};
        char *value = strchr(words[i], '=');
        if (value == NULL) {
            fail("%s: arguments are name=value", words[i]);
        }
        *value++ = 0;
        uint64_t number = strtoull(value, NULL, 10), choice = 0;
        while (choice < 7 && strcmp(value, names[choice]) != 0) {
            choice++;
        }
        const char *name = words[i];
        if (!strcmp(name, "operation") && choice < 4) {
            plan.operation = (enum operation)choice;
        } else if (!strcmp(name, "transport") && choice >= 4 && choice < 7) {
            plan.transport = (enum transport)(choice - 4);
        } else if (!strcmp(name, "bytes")) {
            plan.bytes = number;
        } else if (!strcmp(name, "clients")) {
            plan.clients = (unsigned)number;
        } else if (!strcmp(name, "seconds")) {
            plan.seconds = strtod(value, NULL);
        } else if (!strcmp(name, "nontemporal")) {
            plan.nontemporal = number != 0;
        } else if (!strcmp(name, "locks")) {
            plan.locks = number != 0;
        } else if (!strcmp(name, "polling")) {
            plan.polling = number != 0;
        } else if (!strcmp(name, "connections")) {
            plan.connections = (unsigned)number;
        } else if (!strcmp(name, "buffer_bytes")) {
            plan.buffer_bytes = number;
        } else if (!strcmp(name, "piece_bytes")) {
            plan.piece_bytes = number;
        } else {
            fail("no such argument: %s=%s", name, value);
        }
    }
    if (plan.bytes == 0 || plan.bytes % sizeof(float) != 0 || plan.clients == 0 || plan.clients > CLIENTS_MAX ||
        plan.connections == 0 || plan.connections > CONNECTIONS_MAX || plan.seconds <= 0 || plan.seconds > 60 ||
        plan.piece_bytes == 0 || STRIPE_BYTES % plan.piece_bytes != 0 || plan.buffer_bytes > 1 << 30) {
        fail("bytes (of float32), clients, connections, seconds (at most 60), buffer_bytes and piece_bytes (a part of "
             "256 KiB) are needed");
    }
    if (plan.operation == FETCH_ADD && plan.bytes != 8) {
        fail("fetch_add is of 8 bytes");
    }
    plan.locks |= plan.operation == ACCUMULATE && plan.clients > 1;
    if (plan.bytes <= part_at(plan.connections - 1)) {
        fail("%llu bytes are too few for %u connections", (unsigned long long)plan.bytes, plan.connections);
    }
}

static void print_results(double server_cpu_seconds)
{
    printf("{\"server_cpu_seconds\": %.9f, \"clients\": [", server_cpu_seconds);
    for (unsigned c = 0; c < plan.clients; c++) {
        printf("%s{\"batches\": %llu, \"batch_calls\": %llu, \"calls\": %llu, \"cpu_seconds\": %.9f}", c ? ", " : "",
               (unsigned long long)shared->clients[c].batches, (unsigned long long)shared->clients[c].batch_calls,
               (unsigned long long)shared->clients[c].calls, shared->clients[c].cpu_seconds);
    }
    printf("]}\n");
    for (unsigned c = 0; c < plan.clients; c++) {
        fwrite(records[c], sizeof(double), shared->clients[c].batches, stdout);
        fwrite(records[c] + batches_max, sizeof(double), shared->clients[c].batches, stdout);
    }
    if (fflush(stdout) != 0) {
        fail("stdout: %s", strerror(errno));
    }
}

int main(int count, char **words)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    read_plan(count, words);
    shared = share(sizeof *shared);
    stripes = share((plan.bytes / STRIPE_BYTES + 1) * 64);
    batches_max = (uint64_t)(plan.seconds * RECORDS_PER_SECOND) + 100;
    for (unsigned c = 0; c < plan.clients; c++) {
        records[c] = share(2 * batches_max * sizeof(double));
    }
    pid_t server_pid = 0;
    if (plan.transport == SHM) {
        array = share_file(plan.bytes);
        fill_array();
    } else {
        int listener = listen_somewhere();
        server_pid = start(run_server, (unsigned)listener);
        close(listener);
    }
    for (unsigned c = 0; c < plan.clients; c++) {
        start(run_client, c);
    }
    wait_for(&shared->ready);
    double cpu = server_cpu(server_pid);
    atomic_store_explicit(&shared->go, 1, memory_order_release);
    wait_for(&shared->finished);
    cpu = server_cpu(server_pid) - cpu;
    for (int status; wait(&status) > 0;) {
        if (status != 0) {
            return 1;
        }
    }
    if (plan.transport == SHM && plan.operation != READ) {
        check_end();
    }
    print_results(cpu);
    return 0;
}
