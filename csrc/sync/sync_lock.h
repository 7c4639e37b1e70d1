/* sync_lock.h: the two locks of a segment: holders, queues, fencing. */
#ifndef SMB_SYNC_LOCK_H
#define SMB_SYNC_LOCK_H

#include "sync/sync_state.h"

uint64_t lock_released_bit(uint64_t token);
bool lock_is_held(const struct sync_lock_words *lock, uint64_t now_ns);
bool lock_is_holder(const struct sync_lock_words *lock, uint64_t token, uint64_t now_ns);
/* Changes the expiry under the fence's write lock, so no fenced change is under way while the lock
 * gets or loses a holder. */
void lock_set_expiry(struct sync *sync, struct sync_lock_words *lock, uint64_t expires_ns);
/* Grants the lock to the first request in the queue if the lock is free; otherwise notes when it is
 * due. */
void lock_grant_next(struct sync *sync, int which, uint64_t now_ns, struct news *news);
/* The answer TIMEOUT to a request for a lock: see sync.h. */
struct sync_answer lock_late(const struct sync *sync, const struct sync_request *request,
                             uint64_t now_ns);
/* Ends the shared holdings of a session, or those whose lease has ended; frees the lock after the
 * last one. */
void lock_end_session(struct sync *sync, uint64_t session, uint64_t now_ns);
void lock_drop_expired(struct sync *sync, uint64_t now_ns);
/* Forgets the shared holders, each of which comes back with its next renewal. */
void lock_forget_holders(struct sync *sync);
void lock_let_go(struct sync *sync, int which, uint64_t now_ns, struct news *news);
/* Requests: see sync.h. */
int lock_ask(struct sync *sync, struct waiter *waiter, uint64_t now_ns, struct sync_answer *reply,
             struct news *news);
int lock_ask_unlock(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                    struct news *news);
int lock_ask_renew(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                   struct news *news);
int lock_ask_fence(struct sync *sync, const struct sync_request *request);

#endif
