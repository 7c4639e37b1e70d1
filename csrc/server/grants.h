/* grants.h: a server's keys, and the tokens that a connection has shown (base/access.h).
 *
 * Threads. A connection's grants belong to its loop. The keys have a lock of their own; they change
 * a few times a day.
 */
#ifndef SMB_GRANTS_H
#define SMB_GRANTS_H

#include <pthread.h>

#include "base/access.h"

enum {
    ACCESS_KEYS = SMB_KEYS_MAX, /* of the generation before, of this one, and of the next */
    /* of one connection: each was made by the coordinator for a segment that is there */
    GRANTS_MAX = 1 << 20
};

struct access_keys {
    pthread_mutex_t lock;
    struct access_key {
        bool there;
        uint32_t generation;
        uint8_t bytes[SMB_KEY_BYTES];
    } keys[ACCESS_KEYS];
    uint64_t known_at_ns; /* when `known_ms` was received; 0: never */
    uint64_t known_ms;
};

struct grant {
    uint64_t segment;    /* 0: none */
    uint64_t expires_ns; /* of smb_now_ns */
    uint32_t epoch;
    uint32_t rights;
};
struct grants {
    struct grant *entries; /* an open hash table, `room` a power of two */
    uint32_t room, count;
};

/* SMB_OK: the frame, an AUTHORIZE, proves that the coordinator made it; *grant is what it gives.
 * Else SMB_DENIED, and *why is of enum smb_denied; that a token has expired is said of one that is
 * proved. */
int access_check(struct access_keys *keys, const struct access_connection *connection,
                 const struct smb_frame *frame, const uint8_t *payload, struct grant *grant,
                 struct access_answer *answer, uint64_t *why);

/* Whether any key is known. */
bool access_ready(struct access_keys *keys);

/* In the place of an older one of the same segment. SMB_OUT_OF_MEMORY. */
int grants_put(struct grants *grants, const struct grant *grant);
/* The segment's, also one that has expired, or NULL. */
const struct grant *grants_find(const struct grants *grants, uint64_t segment);
void grants_clear(struct grants *grants);

#endif
