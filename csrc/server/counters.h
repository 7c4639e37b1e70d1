/* counters.h: the daemon's counters, besides those of each loop (base/stats.h). */
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

enum { PASTS_MAX = 4096 }; /* further sessions lose the counts of their closed connections */

/* Called by the loop's thread: counts an answered request of the connection, which took `ns`.
 * `segment` may be NULL. */
void count_request(struct connection *connection, struct smb_segment *segment, int opcode,
                   uint64_t bytes, uint64_t ns);
/* Call with the lanes' lock held. Adds the connection's counts to those of its session. */
void count_past(struct smb_server *server, const struct connection *connection);
/* Forgets the counts of a session that has ended. */
void forget_past(struct smb_server *server, uint64_t session);

/* kinds of denials, for the log, between two calls of smb_server_take_denials */
enum { DENIALS_MAX = 64 };
struct denials {
    pthread_mutex_t lock; /* taken after all other locks */
    uint32_t count;
    uint64_t left_out;
    struct smb_denial of[DENIALS_MAX];
};
/* Called by the loop's thread: notes a request that is answered SMB_DENIED. */
void note_denied(const struct connection *connection, const struct smb_frame *frame);

static inline void server_count(_Atomic uint64_t *counter, uint64_t by)
{
    atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

#endif
