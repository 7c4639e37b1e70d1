/* replica.h: the second copy of a segment: what the primary forwards, and what waits until the
 * backup has it. docs/decisions/0025.
 *
 * Order. A change gets the segment's next order number under its chunk's lock. Changes go to the
 * backup in that order over one connection, each with its client's session, lane and sequence. The
 * backup answers in that order. `confirmed` is the last one that it has answered.
 *
 * Invariant: while the segment is paired, no answer tells of a change that is not confirmed: not
 * its own answer, no watermark, no repetition's, and no read of its chunk.
 *
 * Threads. `lock` guards all but the words marked _Atomic, which are written with it. It is taken
 * after a chunk's lock, and before a loop's answers. The thread that enqueues also sends. One
 * thread of the server, the forwarder, reads the backups' answers and sends what sockets did not
 * take. */
#ifndef SMB_REPLICA_H
#define SMB_REPLICA_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/frame.h"
#include "server/gate.h"

struct connection;
struct forward;
struct replica;
struct smb_server;
struct wait;

/* The lane of connections between servers; their session is the segment's id. */
enum { REPLICA_LANE = 65535, REPLICA_QUEUED_BYTES_MAX = 16 << 20 };

/* Of a segment that is being served; it has no role yet. */
int replica_create(struct smb_server *server, struct smb_segment *segment,
                   struct replica **replica);
void replica_destroy(struct replica *replica);
/* The segment is deleted, or the daemon stops. Waiting requests are answered. */
void replica_close(struct replica *replica);
/* Ends the forwarder, if there is one. */
void replica_stop_forwarder(struct smb_server *server);

/* Whether frames of that epoch are for it: clients' at the primary, the primary's at the backup. */
bool replica_serves(const struct replica *replica, uint32_t epoch, bool fed);
/* Whether a client may send this request to a segment with two copies. */
bool replica_allows(const struct smb_frame *frame);

/* Before a change at the primary: what is to be forwarded, to *forward; NULL if there is no
 * backup. SMB_BUSY: too much is in flight, defer it. SMB_STALE_EPOCH: no longer the primary. */
int replica_prepare(struct replica *replica, const struct smb_frame *frame, const uint8_t *payload,
                    struct forward **forward);
/* It was not made after all. */
void replica_take_back(struct replica *replica, struct forward *forward);
/* Under the chunk's lock, once the change and its record are made, and before readers without the
 * lock see it. *order: what its answer waits for; 0: it need not wait. SMB_STALE_EPOCH: it is the
 * primary no more, and nobody may hear of the change. */
int replica_enqueue(struct replica *replica, struct forward *forward, uint64_t offset,
                    uint64_t *order);
/* A change was refused: the backup notes it too. */
void replica_refuse(struct replica *replica, const struct smb_frame *frame);
/* Sends what can be sent now. Outside of chunks' locks. */
void replica_send(struct replica *replica);

/* Every change up to now: what a watermark and a repetition wait for. 0: nothing to wait for. */
uint64_t replica_newest(struct replica *replica);
bool replica_has_confirmed(struct replica *replica, uint64_t order);
/* The last change of the chunk: what a read of it waits for. Under the chunk's lock, or after its
 * bytes were copied. */
uint64_t replica_newest_of(const struct replica *replica, uint64_t offset);
/* Whether bytes that were read may be told: SMB_BUSY, not yet. `begun_ns`: when the read came. */
int replica_check_read(struct replica *replica, uint64_t order, uint64_t begun_ns);

/* SMB_DEFERRED: the wait is answered once that order is confirmed. SMB_OK: it is by now.
 * SMB_STALE_EPOCH: it will not be, here. */
int replica_await(struct replica *replica, struct wait *wait, uint64_t order);
/* true: it waited, and does so no more. */
bool replica_forget(struct replica *replica, struct wait *wait);

/* At the backup: which connection brings the primary's changes. */
void replica_feed_begins(struct replica *replica, const struct connection *feeder);
void replica_feed_ends(struct replica *replica, const struct connection *feeder);

#endif
