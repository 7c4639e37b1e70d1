/* access.h: tokens of the data plane, and what a connection has shown of them. docs/protocol.md, "Access"; docs/decisions/0013.
 *
 * A token is a few words that anybody may read (whose session, which segment, what for, until when), and a secret that only the
 * coordinator and the segment's server can make of them, with the key that the two share. The secret reaches the client over
 * TLS and never travels here: on each connection the client shows the words and proves the secret with an HMAC over what the
 * server said in its HELLO there. What somebody records is of no use on another connection.
 *
 * Threads. A connection's grants belong to its loop. The keys are under their lock; they change a few times a day. */
#ifndef SMB_ACCESS_H
#define SMB_ACCESS_H

#include <pthread.h>
#include <stdatomic.h>

#include "smb.h"
#include "wire.h"

enum {
    ACCESS_KEYS = SMB_KEYS_MAX, /* of the generation before, of this one, and of the next */
    GRANTS_MAX = 1 << 20      /* of one connection: each was made by the coordinator for a segment that is there */
};

/* What a connection is: a proof for one is none for another. */
struct access_connection {
    uint64_t nonce;           /* the server's */
    uint64_t client_nonce;
    uint64_t instance;
    uint64_t session;
    uint16_t lane;
};
/* The lane of proofs for the control plane, which TLS keeps from others; there is no such connection. Nonce and instance are 0. */
enum { ACCESS_CONTROL_LANE = 0xFFFF };

/* What the server answers to a token that is good: only who can make the token's secret can make it, and on this connection alone. In
 * argument and offset of the reply. */
struct access_answer { uint64_t words[2]; };
struct access_answer access_answer(const struct smb_token *token, const struct access_connection *connection);
bool access_same_answer(const struct access_answer *one, const struct access_answer *other);

/* The payload of AUTHORIZE. The token's segment and epoch, and the session, are the frame's. */
void access_store(const struct smb_token *token, const struct access_connection *connection, uint8_t payload[SMB_AUTHORIZE_BYTES]);

struct access_keys {
    pthread_mutex_t lock;
    struct access_key {
        bool there;
        uint32_t generation;
        uint8_t bytes[SMB_KEY_BYTES];
    } keys[ACCESS_KEYS];
    uint64_t known_at_ns;     /* what the coordinator's clock said then; 0: never told */
    uint64_t known_ms;
};

struct grant {
    uint64_t segment;         /* 0: none */
    uint64_t expires_ns;      /* of smb_now_ns */
    uint32_t epoch;
    uint32_t rights;
};
struct grants {
    struct grant *entries;    /* an open hash table, `room` a power of two */
    uint32_t room, count;
};

/* SMB_OK: the frame, an AUTHORIZE, proves that the coordinator made it; *grant is what it gives. Else SMB_DENIED, and *why is of
 * enum smb_denied; that a token has expired is said of one that is proved. */
int access_check(struct access_keys *keys, const struct access_connection *connection, const struct smb_frame *frame,
                 const uint8_t *payload, struct grant *grant, struct access_answer *answer, uint64_t *why);

/* Whether any key is known. */
bool access_ready(struct access_keys *keys);

/* In the place of an older one of the same segment. SMB_OUT_OF_MEMORY. */
int grants_put(struct grants *grants, const struct grant *grant);
/* The segment's, also one that has expired, or NULL. */
const struct grant *grants_find(const struct grants *grants, uint64_t segment);
void grants_clear(struct grants *grants);

#endif
