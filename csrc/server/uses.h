/* uses.h: how much one certificate of a client or reader takes of a server: proven TCP
 * connections, and requests that wait. So nobody takes the share of all others. Memory servers,
 * operators, and connections without TLS are not counted.
 *
 * Any thread. The lock is the last one that is taken. */
#ifndef SMB_USES_H
#define SMB_USES_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/sha256.h"

struct tls;

enum {
    CONNECTIONS_PER_CERTIFICATE = 3072, /* three quarters of CONNECTIONS_MAX */
    WAITS_PER_CERTIFICATE = 65536,      /* of 300 bytes; 16 connections' full share */
    USE_BUCKETS = 256
};

struct use {
    struct use *next;
    uint8_t certificate[SHA256_BYTES];
    uint32_t connections, waits; /* it is freed with the last of them */
};
struct uses {
    pthread_mutex_t lock;
    struct use *buckets[USE_BUCKETS];
};

void uses_init(struct uses *uses);
void uses_destroy(struct uses *uses);
/* Counts a connection after its handshake. *use is NULL if the connection is not counted.
 * SMB_OUT_OF_MEMORY: its certificate has CONNECTIONS_PER_CERTIFICATE already. */
int uses_enter(struct uses *uses, const struct tls *tls, struct use **use);
void uses_leave(struct uses *uses, struct use *use);
/* False: the certificate has WAITS_PER_CERTIFICATE already. Always true without a use. */
bool uses_take_wait(struct uses *uses, struct use *use);
void uses_give_wait(struct uses *uses, struct use *use);

#endif
