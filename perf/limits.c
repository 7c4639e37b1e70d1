/* The physical limits: what a C program that does nothing else reaches. A start measures one case
 * and checks its bytes.
 *
 *     limits operation=accumulate transport=tcp bytes=1048576 clients=2 seconds=0.3 polling=1
 *     connections=2 ...
 *
 * shm: client processes copy between private memory and one tmpfs file that all have mapped, or add
 * to it. tcp, unix: client processes talk to a server process that has the array, over one
 * connection or, to use more cores, over several with a part of the array each. A write is the
 * bytes and a 1-byte answer, a read a 1-byte question and the bytes, fetch_add 8 bytes each way.
 * For accumulate the server adds piece by piece, while it receives, under a lock per stripe. Bytes
 * are received straight into the array: of two writes at once an element may have bytes of both, so
 * all clients write the same there.
 *
 * With tls=1 (tcp) all of that is inside TLS 1.3, of the cipher that smb takes, by OpenSSL's
 * SSL_read and SSL_write on these sockets.
 *
 * With namespace=FILE (as `ip netns` keeps them) and address= of an interface there, the server is
 * in that network namespace and the clients are in the one in which this was started: two hosts, as
 * far as TCP can tell.
 *
 * Processes: this one forks the server (a thread for every connection, or one that polls them all)
 * and the clients (a thread for every connection), starts all clients at once and waits. Their
 * counters lie in shared memory; children end with this process.
 *
 * Output: a line of JSON (for each client: batches, calls of a batch, calls in all, CPU seconds),
 * then for each client the batches' start times and end times, in seconds of CLOCK_MONOTONIC, as
 * binary doubles. Batches, since a clock takes longer than a small copy. Exit status 1, and why on
 * stderr, where bytes are wrong or a call failed.
 */
#include "limits.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define WARM_UP_BATCHES 3
/* Above this a batch is one call. Below, a batch's calls move this much, which takes a hundred
 * microseconds, or are as many as the next line says. */
#define BATCH_BYTES ((uint64_t)4 << 20)
#define BATCH_CALLS_MAX 4096
/* Sources up to here exist twice, as they are and negated, and batches take turns: sums of millions
 * of calls stay exact in float32 (below 2^24). Longer ones are never added so often. */
#define ALTERNATE_BYTES_MAX ((uint64_t)64 << 10)
#define RECORDS_PER_SECOND 1000000

struct plan plan = {.clients = 1, .seconds = 0.3, .connections = 1, .piece_bytes = 128 << 10};
struct shared *shared;
float *array;
_Atomic unsigned *stripes;
static double *records[CLIENTS_MAX]; /* [batches_max] starts, then [batches_max] ends */
static uint64_t batches_max;

void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

static double clock_seconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- what the array holds -------------------------------------------------------------------- */

static uint32_t hash(uint64_t index)
{
    /* Knuth's multiplicative hash: no short period in the upper bits */
    return (uint32_t)index * 2654435761u;
}

/* Values written by each client and read by all: whole numbers below 2^18, exact in float32. */
static float written(uint64_t index, unsigned client)
{
    return (float)((hash(index) >> 21) + (plan.transport == SHM ? 2048 * client : 0) + 1);
}

/* The summand of one accumulate: 1 or 2. */
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
        fail("%lld additions are too many for exact sums in float32: fewer seconds",
             (long long)balance);
    }
    for (uint64_t i = 0; i < plan.bytes / sizeof(float); i++) {
        bool right = false;
        if (plan.operation == ACCUMULATE) {
            right = got[i] == 1 + added(i) * (float)balance;
        }
        for (unsigned c = 0;
             c < (plan.operation == WRITE ? plan.clients : 1) && plan.operation != ACCUMULATE;
             c++) {
            right |= got[i] == written(i, c);
        }
        if (!right) {
            fail("wrong bytes: element %llu is %g", (unsigned long long)i, (double)got[i]);
        }
    }
}

void check_end(void)
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
        fail("wrong bytes: the counter is %lld after %lld additions", (long long)shared->counter,
             (long long)calls);
    }
}

void fill_array(void)
{
    for (uint64_t i = 0; i < plan.bytes / sizeof(float); i++) {
        array[i] = plan.operation == READ ? written(i, 0) : plan.operation == ACCUMULATE ? 1 : 0;
    }
}

/* ---- a client process ------------------------------------------------------------------------ */

static void prepare_client(struct client *client)
{
    uint64_t count = plan.bytes / sizeof(float);
    client->source = client->own = allocate(plan.bytes);
    for (uint64_t i = 0; i < count && plan.operation != READ; i++) {
        client->own[i] = plan.operation == WRITE ? written(i, client->index) : added(i);
    }
    if (plan.operation == FETCH_ADD ||
        (plan.operation == ACCUMULATE && plan.bytes <= ALTERNATE_BYTES_MAX)) {
        client->negated = allocate(plan.bytes);
        for (uint64_t i = 0; i < count; i++) {
            client->negated[i] = -client->own[i];
        }
    }
    if (plan.transport != SHM) {
        connect_all(client);
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
    batch_calls = batch_calls < 1                 ? 1
                  : batch_calls > BATCH_CALLS_MAX ? BATCH_CALLS_MAX
                                                  : batch_calls;
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

/* ---- the parent ------------------------------------------------------------------------------ */

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
    serve((int)listener);
}

/* From now on sockets, and children, are in the network namespace of that file. */
static void enter(const char *namespace)
{
    int fd = open(namespace, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) {
        fail("network namespace %s: %s", namespace, strerror(errno));
    }
    close(fd);
}

static pid_t start_server(void)
{
    int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (plan.namespace) {
        enter(plan.namespace);
    }
    int listener = listen_somewhere();
    pid_t server = start(run_server, (unsigned)listener);
    close(listener);
    if (plan.namespace && setns(own, CLONE_NEWNET) != 0) {
        fail("back from network namespace %s: %s", plan.namespace, strerror(errno));
    }
    close(own);
    return server;
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
        } else if (!strcmp(name, "tls")) {
            plan.tls = number != 0;
        } else if (!strcmp(name, "connections")) {
            plan.connections = (unsigned)number;
        } else if (!strcmp(name, "buffer_bytes")) {
            plan.buffer_bytes = number;
        } else if (!strcmp(name, "piece_bytes")) {
            plan.piece_bytes = number;
        } else if (!strcmp(name, "address")) {
            plan.address = value;
        } else if (!strcmp(name, "namespace")) {
            plan.namespace = value;
        } else {
            fail("no such argument: %s=%s", name, value);
        }
    }
    if (plan.bytes == 0 || plan.bytes % sizeof(float) != 0 || plan.clients == 0 ||
        plan.clients > CLIENTS_MAX || plan.connections == 0 || plan.connections > CONNECTIONS_MAX ||
        plan.seconds <= 0 || plan.seconds > 60 || plan.piece_bytes == 0 ||
        STRIPE_BYTES % plan.piece_bytes != 0 || plan.buffer_bytes > 1 << 30) {
        fail("bytes (of float32), clients, connections, seconds (at most 60), buffer_bytes and "
             "piece_bytes (a part of 256 KiB) are needed");
    }
    if (plan.operation == FETCH_ADD && plan.bytes != 8) {
        fail("fetch_add is of 8 bytes");
    }
    plan.locks |= plan.operation == ACCUMULATE && plan.clients > 1;
    if (plan.bytes <= part_at(plan.connections - 1)) {
        fail("%llu bytes are too few for %u connections", (unsigned long long)plan.bytes,
             plan.connections);
    }
}

static void print_results(double server_cpu_seconds)
{
    printf("{\"server_cpu_seconds\": %.9f, \"clients\": [", server_cpu_seconds);
    for (unsigned c = 0; c < plan.clients; c++) {
        printf(
            "%s{\"batches\": %llu, \"batch_calls\": %llu, \"calls\": %llu, \"cpu_seconds\": %.9f}",
            c ? ", " : "", (unsigned long long)shared->clients[c].batches,
            (unsigned long long)shared->clients[c].batch_calls,
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
    if (plan.tls) {
        tls_prepare();
    }
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
        server_pid = start_server();
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
