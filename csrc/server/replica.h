/* replica.h: the second copy of a segment: what the primary forwards, and what waits until the
 * backup has it. docs/decisions/0025. Segments that move together are a bundle, which has the
 * order, the connection and the roles: docs/decisions.md, 0038.
 *
 * Order. A change gets its bundle's next order number under its chunk's lock. Changes go to the
 * backup in that order over one connection, each with its client's session, lane and sequence. The
 * backup answers in that order. `confirmed` is the last one that it has answered.
 *
 * Invariant: while the bundle is paired, no answer tells of a change that is not confirmed: not its
 * own answer, no watermark, no repetition's, and no read of its chunk.
 *
 * Threads. The bundle's `lock` guards all of it but the words marked _Atomic, which are written
 * with it. It is taken after a chunk's lock, and before a loop's answers and `forward_lock`. The
 * thread that enqueues also sends. One thread of the server, the forwarder, reads the backups'
 * answers and sends what sockets did not take. */
#ifndef SMB_REPLICA_H
#define SMB_REPLICA_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/frame.h"
#include "server/request.h"

struct connection;
struct forward;
struct replica;
struct segment_bundle;
struct smb_server;
struct sync;
struct wait;

enum { REPLICA_QUEUED_BYTES_MAX = 16 << 20 };

/* Of a segment that is served, or is about to be: replica_at finds it. It has no role yet. */
int replica_create(struct smb_server *server, struct smb_segment *segment);
void replica_destroy(struct replica *replica);
/* The segment is deleted, or the daemon stops. If it is its bundle's last one, waiting requests are
 * answered. */
void replica_close(struct replica *replica);
/* After that, of one that was marked deleted: waits a second at most until the backup has every
 * change that may name it. Nothing is to be dropped there before. */
void replica_see_off(struct replica *replica);

/* Whether frames of that epoch are for it: clients' at the primary, the primary's at the backup. */
bool replica_serves(const struct replica *replica, uint32_t epoch, bool fed);
/* Whether a client may send this request to a segment with two copies. */
bool replica_allows(const struct smb_frame *frame);

bool replica_is_primary(const struct replica *replica);
/* enum smb_replica_role */
int replica_role(const struct replica *replica);
/* Whether it may get the role in that epoch yet. */
bool replica_is_behind(const struct replica *replica, uint32_t epoch);
/* Whether a change may be made in both as one. */
bool replica_moves_with(const struct replica *replica, const struct replica *other);

/* Before a change at the primary: what is to be forwarded, to *forward; NULL if there is no
 * backup. `words`, NULL for none, are SMB_APPLY_BYTES of the frame's body, before the payload.
 * SMB_BUSY: too much is in flight, or a copy is just begun: defer it. SMB_STALE_EPOCH: no
 * longer the primary. After SMB_OK there has to be a replica_done. */
int replica_prepare(struct replica *replica, const struct smb_frame *frame, const uint8_t *words,
                    const uint8_t *payload, struct forward **forward);
/* It was made, or will not be; `forward`, where it was not enqueued. Sends what can be sent. */
void replica_done(struct replica *replica, struct forward *forward);
/* Under the chunk's lock, once the change and its record are made, and before readers without the
 * lock see it. `targets`: the frame's segment, and those of the bundle that change with it. *order:
 * what its answer waits for; 0: it need not wait. SMB_STALE_EPOCH: it is the primary no more, and
 * nobody may hear of the change. `result`: of a change that has one. */
int replica_enqueue(struct smb_segment *const *targets, int count, struct forward *forward,
                    uint64_t offset, const uint64_t *result, uint64_t *order);
/* A change is about to be refused: the note of it for the backup, to *forward, or NULL where there
 * is none. SMB_BUSY: there is no room for it. SMB_STALE_EPOCH as replica_prepare. */
int replica_prepare_refusal(struct replica *replica, const struct smb_frame *frame,
                            struct forward **forward);
/* While the lane's record that says so is held: in the order of the lane's changes. */
void replica_enqueue_refusal(struct replica *replica, struct forward *forward);

/* Around a request for a lock or version at the primary, as replica_prepare and replica_done: what
 * it changes goes to the backup by itself (sync_on_change). */
int replica_prepare_sync(struct replica *replica);
/* The order that its answer waits for. Once that is confirmed, the backup has all that the answer
 * tells of, and this is still the primary. */
uint64_t replica_order_of_sync(struct replica *replica);

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

/* At the backup: whether that part of a copy was made here before, and that it was now. */
bool replica_has_copied(const struct replica *replica, uint64_t sequence);
void replica_note_copied(struct replica *replica, uint32_t epoch, uint64_t sequence);
/* At the backup: whether the server of that name may bring the changes of that epoch. */
bool replica_is_peer(struct replica *replica, uint32_t epoch, const char *name);
/* At the backup: which connection brings the changes of that replica's bundle, by what is returned.
 * It has to end. */
struct segment_bundle *replica_feed_begins(struct replica *replica,
                                           const struct connection *feeder);
void replica_feed_ends(struct segment_bundle *bundle, const struct connection *feeder);
bool replica_is_of(const struct replica *replica, const struct segment_bundle *bundle);
/* The session of its feed. */
uint64_t replica_bundle_id(const struct replica *replica);

#endif
