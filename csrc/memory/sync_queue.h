/* sync_queue.h: those who wait: by turn, by deadline, by name; and what is answered once the mutex
 * is released. */
#ifndef SMB_SYNC_QUEUE_H
#define SMB_SYNC_QUEUE_H

#include <stddef.h>

#include "memory/sync_state.h"

/* NULL: nobody. */
struct waiter *queue_first(const struct queue *queue);
struct waiter *queue_first_of_session(const struct queue *queue, uint64_t session);
struct waiter *queue_first_deadline(const struct queue *queue);
/* The queue that the waiter is in, or would be. */
struct queue *queue_of(struct sync *sync, const struct waiter *waiter);
void queue_take_out(struct queue *queue, struct waiter *waiter);
/* Its turn comes after all of a lower `turn`, and those of the same that came before. */
void queue_keep(struct sync *sync, struct waiter *waiter, uint64_t turn, uint64_t timeout_ms,
                uint64_t now_ns, struct news *news);
/* Out of its queue; answered when the mutex is released. */
void queue_answer(struct sync *sync, struct waiter *waiter, struct sync_answer ready,
                  struct news *news);
void queue_answer_all(struct sync *sync, struct queue *queue, int status, struct news *news);
void queue_answer_session(struct sync *sync, struct queue *queue, uint64_t session,
                          struct news *news);
/* Those whose deadline has come. */
void queue_time_out(struct sync *sync, struct queue *queue, uint64_t now_ns, struct news *news);
/* Locks. */
struct news sync_acquire(struct sync *sync);
/* Where a lock's expiry is in an image. */
size_t sync_expiry_at(int lock);
/* Tells the other copy of the words, if they have changed or `anyway`. */
void sync_tell_change(struct sync *sync, bool anyway);
/* Unlocks, then answers. A waiter's owner may free it then. */
void sync_release(struct sync *sync, struct news *news);

#endif
