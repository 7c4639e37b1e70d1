/* replica.h: the second copy of a segment: what the primary forwards, and which answers wait until
 * the backup has it. docs/decisions/0025-second-copy.md. Segments that move together are a bundle,
 * which has the order, the connection and the roles: docs/decisions.md, 0038.
 *
 * Order. A change gets its bundle's next order number under its chunk's lock. Changes go to the
 * backup in that order over one connection, each with its client's session, lane and sequence. The
 * backup answers in that order. `confirmed` is the last order that it has answered.
 *
 * Invariant: while the bundle is paired, no answer shows a change that is not confirmed: not the
 * change's own answer, no watermark, no answer to a repetition, and no read of its chunk.
 *
 * Threads. The bundle's `lock` guards all of it except the words marked _Atomic, which are written
 * under the lock. It is taken after a chunk's lock, and before a loop's answers and `forward_lock`.
 * The thread that enqueues also sends. One thread of the server, the forwarder, reads the backups'
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

/* Creates the replica of a segment that is served, or is about to be; replica_at then finds it. It
 * has no role yet. */
int replica_create(struct smb_server *server, struct smb_segment *segment);
void replica_destroy(struct replica *replica);
/* Called once the segment can be found by its id. The forwarder looks for a connection by a member,
 * which may be this one if the others left meanwhile: what arrived is reported again. */
void replica_entered(struct replica *replica);
/* Called when the segment is deleted, or the daemon stops. If it is its bundle's last member,
 * waiting requests are answered. */
void replica_close(struct replica *replica);
/* Called after that for a segment that was marked deleted: blocks, at most a second, until the
 * backup has every change that may name it. The backup must not delete its copy before. */
void replica_see_off(struct replica *replica);

/* Whether frames of that epoch are valid here: clients' frames at the primary, the primary's at the
 * backup. */
bool replica_serves(const struct replica *replica, uint32_t epoch, bool fed);
/* Whether a client may send this request to a segment with two copies. */
bool replica_allows(const struct smb_frame *frame);

bool replica_is_primary(const struct replica *replica);
/* enum smb_replica_role. SMB_REPLICA_NONE also if the segment, whose last role was of that epoch,
 * was left out when its bundle got the present one. */
int replica_role(const struct replica *replica, uint32_t epoch);
/* Whether a role of that epoch would be newer than the present one. */
bool replica_is_behind(const struct replica *replica, uint32_t epoch);
/* Whether one change may cover both segments. */
bool replica_moves_with(const struct replica *replica, const struct replica *other);

/* Call before a change at the primary. *forward becomes the frame for the backup, NULL without a
 * backup. `words`, or NULL, are SMB_APPLY_BYTES of the frame's body, before the payload. SMB_BUSY:
 * too much is in flight, or a copy has just begun; defer the request. SMB_STALE_EPOCH: no longer
 * the primary. After SMB_OK replica_done must follow. */
int replica_prepare(struct replica *replica, const struct smb_frame *frame, const uint8_t *words,
                    const uint8_t *payload, struct forward **forward);
/* Ends a change after replica_prepare, whether or not it was made. `forward`: the frame, if it was
 * not enqueued; else NULL. Sends what can be sent. */
void replica_done(struct replica *replica, struct forward *forward);
/* Enqueues the frame of a change. Call it under the chunk's lock, after the change and its record
 * are made, and before readers without the lock see the change. `targets`: the frame's segment, and
 * those of the bundle that change with it. `result`: for a change that has one. *order: the order
 * that the answer must wait for; 0: it need not wait. SMB_STALE_EPOCH: this is no longer the
 * primary, and no client may be told of the change. */
int replica_enqueue(struct smb_segment *const *targets, int count, struct forward *forward,
                    uint64_t offset, const uint64_t *result, uint64_t *order);
/* Call before a change is refused. *forward becomes the note for the backup, or NULL without a
 * backup. SMB_BUSY: no room for it. SMB_STALE_EPOCH as replica_prepare. */
int replica_prepare_refusal(struct replica *replica, const struct smb_frame *frame,
                            struct forward **forward);
/* Call while the lane's record with the refusal is held, so that the lane's order is kept. */
void replica_enqueue_refusal(struct replica *replica, struct forward *forward);

/* Surrounds a request for a lock or version at the primary, as replica_prepare and replica_done do
 * for a change. The changed words are forwarded by sync_on_change. */
int replica_prepare_sync(struct replica *replica);
/* The order that the request's answer waits for. Once that order is confirmed, the backup has
 * everything that the answer shows, and this is still the primary. */
uint64_t replica_order_of_sync(struct replica *replica);

/* The order of the last change so far, for which a watermark and the answer to a repetition wait.
 * 0: nothing to wait for. */
uint64_t replica_newest(struct replica *replica);
bool replica_has_confirmed(struct replica *replica, uint64_t order);
/* The order of the chunk's last change, for which a read of the chunk waits. Call it under the
 * chunk's lock, or after its bytes were copied. */
uint64_t replica_newest_of(const struct replica *replica, uint64_t offset);
/* Whether the bytes of a read may be sent; SMB_BUSY: not yet. `begun_ns`: when the request came. */
int replica_check_read(struct replica *replica, uint64_t order, uint64_t begun_ns);

/* SMB_DEFERRED: the wait is answered once that order is confirmed. SMB_OK: it is confirmed already.
 * SMB_STALE_EPOCH: it will not be confirmed on this server. */
int replica_await(struct replica *replica, struct wait *wait, uint64_t order);
/* Takes a wait back. True: it was waiting. */
bool replica_forget(struct replica *replica, struct wait *wait);

/* At the backup: whether that part of a copy was stored before, and noting that it was stored
 * now. */
bool replica_has_copied(const struct replica *replica, uint64_t sequence);
void replica_note_copied(struct replica *replica, uint32_t epoch, uint64_t sequence);
/* At the backup: whether the server of that name may send the changes of that epoch. */
bool replica_is_peer(struct replica *replica, uint32_t epoch, const char *name);
/* At the backup: notes that this connection brings the changes of the replica's bundle. Returns the
 * bundle, with which the caller must end the feed. */
struct segment_bundle *replica_feed_begins(struct replica *replica,
                                           const struct connection *feeder);
void replica_feed_ends(struct segment_bundle *bundle, const struct connection *feeder);
bool replica_is_of(const struct replica *replica, const struct segment_bundle *bundle);
/* The session number of the bundle's feed. */
uint64_t replica_bundle_id(const struct replica *replica);

#endif
