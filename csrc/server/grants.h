/* grants.h: a server's keys, and the tokens that a connection has shown (channel/access.h).
 *
 * Threads. A connection's grants belong to its loop. The keys have their own lock; they change a
 * few times a day. */
#ifndef SMB_GRANTS_H
#define SMB_GRANTS_H

#include <pthread.h>

#include "channel/access.h"

enum {
    ACCESS_KEYS = SMB_KEYS_MAX, /* the previous generation, the present and the next */
    /* for one connection: the coordinator made each of its tokens for a segment of this server */
    GRANTS_MAX = 1 << 20
};

struct access_keys {
    pthread_mutex_t lock;
    struct access_key {
        bool there;
        uint32_t generation;
        uint8_t bytes[SMB_KEY_BYTES];
    } keys[ACCESS_KEYS];
    uint64_t known_at_ns; /* when `known_ms` was received; 0: not yet */
    uint64_t known_ms;
};

struct grant {
    uint64_t segment;    /* 0: a free entry */
    uint64_t expires_ns; /* by smb_now_ns */
    uint32_t epoch;
    uint32_t rights;
};
struct grants {
    struct grant *entries; /* an open hash table; `room` is a power of two */
    uint32_t room, count;
};

/* Checks an AUTHORIZE. SMB_OK: it proves that the coordinator made the token; *grant is what the
 * token gives. SMB_DENIED: *why is of enum smb_denied. SMB_DENIED_EXPIRED is only given for a token
 * that was proved. */
int access_check(struct access_keys *keys, const struct access_connection *connection,
                 const struct smb_frame *frame, const uint8_t *payload, struct grant *grant,
                 struct access_answer *answer, uint64_t *why);

/* Whether the server has any key. */
bool access_ready(struct access_keys *keys);

/* Adds a grant, or replaces an older one of the same segment. SMB_OUT_OF_MEMORY. */
int grants_put(struct grants *grants, const struct grant *grant);
/* The grant for the segment, also if it has expired, or NULL. */
const struct grant *grants_find(const struct grants *grants, uint64_t segment);
void grants_clear(struct grants *grants);

#endif
