/* counters.h: what the daemon counts, beside what each loop counts for itself (base/stats.h). */
#ifndef SMB_COUNTERS_H
#define SMB_COUNTERS_H

#include <pthread.h>
#include <stdatomic.h>

#include "smb/server.h"

struct connection;
struct smb_frame;
struct smb_server;

/* The sums of a session's closed connections. They stay when the session connects again. */
struct past {
    struct past *next;
    struct smb_share share;
};

enum { PASTS_MAX = 4096 }; /* a session without one counts from its next connection on */

/* By the loop's thread: a request of the connection is answered, in that time. `segment` may be
 * NULL. */
void count_request(struct connection *connection, struct smb_segment *segment, int opcode,
                   uint64_t bytes, uint64_t ns);
/* With the lanes' lock held: what the connection did stays known, as the session's. */
void count_past(struct smb_server *server, const struct connection *connection);
/* The session is over, and nobody asks for what it did. */
void forget_past(struct smb_server *server, uint64_t session);

enum { DENIALS_MAX = 64 }; /* kinds between two looks, of which a log tells */
struct denials {
    pthread_mutex_t lock; /* after all others */
    uint32_t count;
    uint64_t left_out;
    struct smb_denial of[DENIALS_MAX];
};
/* By the loop's thread: a request of the connection is answered SMB_DENIED. */
void note_denied(const struct connection *connection, const struct smb_frame *frame);

static inline void server_count(_Atomic uint64_t *counter, uint64_t by)
{
    atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

#endif
