/* waits.h: requests that wait by nature: for locks, barriers, versions. They leave their
 * connections until they are answered. */
#ifndef SMB_WAITS_H
#define SMB_WAITS_H

#include "base/frame.h"
#include "memory/segment.h"
#include "memory/sync.h"
#include "server/request.h"

struct connection;
struct loop;
struct smb_server;

enum {
    /* for locks, barriers, versions: one for each thread of a client; each is memory */
    WAITS_PER_CONNECTION = 4096,
    /* with answers that wait for a backup: then the connection itself waits. More than the above,
     * so that what ends others' waits is never kept waiting by them */
    ANSWERS_PER_CONNECTION = 2 * WAITS_PER_CONNECTION
};

struct wait {
    struct waiter waiter;
    struct wait *next, *previous; /* of the connection's; loop thread only */
    struct wait *next_answer;
    struct loop *loop;
    struct connection *connection; /* NULL: gone */
    struct smb_segment *segment;   /* a reference: sync and words stay */
    struct smb_frame frame;
    struct sync_answer answer;
    uint64_t begun_ns;
    /* of a segment with two copies: answered once this change is confirmed (replica.h) */
    uint64_t order;
    struct wait *before, *after; /* the lock of the replica's bundle */
    bool in_replica;
};

/* Gives a segment what it needs to be served; before it can be found. `left`: of an earlier run. */
int waits_serve(struct smb_server *server, struct smb_segment *segment, bool left);
/* Of a segment with two copies: requests for its locks and versions come here from now on. */
void waits_take_over(struct smb_segment *segment);
/* It is deleted, or the daemon stops: all its waiters are answered. Before the registry's reference
 * goes. */
void waits_close(struct smb_segment *segment, int status);
int waits_start(struct smb_server *server);
void waits_stop(struct smb_server *server);
/* SMB_DEFERRED: the connection has one wait more; anything else is the answer. */
int waits_ask(struct connection *connection, struct gate_request *request, const uint8_t *payload,
              struct sync_answer *answer);
/* The answer of a change that was made, once that order is confirmed (replica.h): SMB_DEFERRED, or
 * what is to be answered now. */
int waits_confirm(struct connection *connection, struct gate_request *request, uint64_t order,
                  struct sync_answer answer);
/* The connection's waits are taken back. */
void waits_forget(struct connection *connection);
void wait_free(struct wait *wait);

#endif
