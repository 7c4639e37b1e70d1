/* Shared by the files of the measuring program; limits.c says what it does. */
#ifndef LIMITS_H
#define LIMITS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { CLIENTS_MAX = 64, CONNECTIONS_MAX = 8 };
#define STRIPE_BYTES ((uint64_t)256 << 10)

enum operation { WRITE, READ, ACCUMULATE, FETCH_ADD };
enum transport { SHM, TCP, UNIX };

struct plan {
    enum operation operation;
    enum transport transport;
    uint64_t bytes;
    unsigned clients;
    double seconds;
    bool nontemporal; /* shm: stores that go around the caches */
    bool locks;   /* shm: a lock for every stripe; accumulate of several clients always has them */
    bool polling; /* sockets: never sleep */
    bool tls;     /* tcp: inside TLS 1.3 */
    /* of each client, each with a part of the array and a thread on both sides */
    unsigned connections;
    uint64_t buffer_bytes; /* SO_SNDBUF and SO_RCVBUF; 0: the system's own */
    uint64_t piece_bytes;  /* what the server adds at once */
    const char *address;   /* TCP: where the server listens, IPv4; NULL: on loopback */
    /* the file of the network namespace in which the server is; NULL: the clients' own */
    const char *namespace;
};

/* Shared by all processes. `ready`, `finished`: released by clients, acquired by the parent; `go`
 * the other way. */
struct shared {
    _Atomic unsigned ready, go, finished;
    _Atomic int64_t counter;
    struct {
        double cpu_seconds;
        uint64_t batches, batch_calls, calls;
        int64_t balance; /* calls that added, less those that took away */
    } clients[CLIENTS_MAX];
};

extern struct plan plan;
extern struct shared *shared;
extern float *array; /* shm: the file's memory; sockets: the server's own */
/* 1 while somebody has the lock; each in a cache line of its own */
extern _Atomic unsigned *stripes;

struct client {
    unsigned index;
    float *own;     /* what is written or added; where reads go */
    float *negated; /* of `own`, or NULL */
    float *source;  /* one of the two */
    int sockets[CONNECTIONS_MAX];
};

/* limits.c. fail: say why on stderr, and end with status 1. */
_Noreturn __attribute__((format(printf, 1, 2))) void fail(const char *format, ...);
void fill_array(void);
void check_end(void);

/* limits_memory.c. Private memory (zeroed, in huge pages where the system gives them), memory
 * shared with children, and a mapping of a file in tmpfs that nobody can name. */
void *allocate(uint64_t bytes);
void *share(uint64_t bytes);
void *share_file(uint64_t bytes);
/* sum += source. Bytes are a multiple of 4, both sides begin at a cache line. */
void add(float *restrict sum, const float *restrict source, uint64_t bytes);
_Atomic unsigned *lock_stripe(uint64_t offset);
void unlock_stripe(_Atomic unsigned *lock);
void call_memory(struct client *client);

/* limits_sockets.c. part_at: where the part of a connection begins; that of the one behind the
 * last one is where the array ends. serve: what the server process does, until all clients have
 * hung up. */
uint64_t part_at(unsigned connection);
int listen_somewhere(void);
void serve(int listener);
void connect_all(struct client *client);
void call_server(struct client *client);

/* limits_tls.c. Before anybody is forked; then each end of a connection, known by its descriptor.
 * tls_move: send or receive at most `bytes`, as send and recv do; -1 with errno EAGAIN where the
 * socket does not block and has nothing to do. */
void tls_prepare(void);
void tls_begin(int socket, bool server);
ssize_t tls_move(int socket, void *at, uint64_t bytes, bool sending);

#endif
