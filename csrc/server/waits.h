/* waits.h: requests for locks, barriers and versions, which leave their connections until they are
 * answered. */
#ifndef SMB_WAITS_H
#define SMB_WAITS_H

#include "base/frame.h"
#include "memory/segment.h"
#include "server/request.h"
#include "sync/sync.h"

struct connection;
struct use;
struct loop;
struct smb_server;

enum {
    /* most waits for locks, barriers and versions: a client has one for each of its threads, and
     * each takes memory */
    WAITS_PER_CONNECTION = 4096, /* uses.h has the bound for a certificate */
    /* including answers that wait for a backup; at this number the connection itself waits. It is
     * larger than the above, so that requests which end others' waits are never held up by them */
    ANSWERS_PER_CONNECTION = 2 * WAITS_PER_CONNECTION
};

struct wait {
    struct waiter waiter;
    struct wait *next, *previous; /* in the connection's list; loop thread only */
    struct wait *next_answer;
    struct loop *loop;
    struct connection *connection; /* NULL: the connection is gone */
    struct use *use;               /* counts this wait; NULL: nobody does */
    struct smb_segment *segment;   /* a reference, which keeps sync and words alive */
    struct smb_frame frame;
    struct sync_answer answer;
    uint64_t begun_ns;
    /* for a segment with two copies: answered once this order is confirmed (replica.h) */
    uint64_t order;
    struct wait *before, *after; /* under the lock of the replica's bundle */
    bool in_replica;
};

/* Gives a segment what it needs to be served, before requests can find it. `left`: of an earlier
 * run. */
int waits_serve(struct smb_server *server, struct smb_segment *segment, bool left);
/* For a segment with two copies: requests for its locks and versions come to this server from now
 * on. */
void waits_take_over(struct smb_segment *segment);
/* Called when the segment is deleted, or the daemon stops, before the registry releases it: answers
 * all its waiters. */
void waits_close(struct smb_segment *segment, int status);
int waits_start(struct smb_server *server);
void waits_stop(struct smb_server *server);
/* SMB_DEFERRED: the connection has one more wait. Any other status is the answer. */
int waits_ask(struct connection *connection, struct gate_request *request, const uint8_t *payload,
              struct sync_answer *answer);
/* The answer of a change that was made, once that order is confirmed (replica.h): SMB_DEFERRED, or
 * the answer if it can be sent now. */
int waits_confirm(struct connection *connection, struct gate_request *request, uint64_t order,
                  struct sync_answer answer);
/* Takes the connection's waits back. */
void waits_forget(struct connection *connection);
void wait_free(struct wait *wait);

#endif
