/* sync_queue.h: the queues of waiters, ordered by turn, by deadline and by name, and the answers
 * that are sent once the mutex is released. */
#ifndef SMB_SYNC_QUEUE_H
#define SMB_SYNC_QUEUE_H

#include <stddef.h>

#include "sync/sync_state.h"

/* NULL: the queue is empty. */
struct waiter *queue_first(const struct queue *queue);
struct waiter *queue_first_of_session(const struct queue *queue, uint64_t session);
struct waiter *queue_first_deadline(const struct queue *queue);
/* The queue in which the waiter is, or would be. */
struct queue *queue_of(struct sync *sync, const struct waiter *waiter);
void queue_take_out(struct queue *queue, struct waiter *waiter);
/* Adds a waiter. Its turn comes after all waiters of a lower `turn`, and after earlier ones of the
 * same. */
void queue_keep(struct sync *sync, struct waiter *waiter, uint64_t turn, uint64_t timeout_ms,
                uint64_t now_ns, struct news *news);
/* Takes the waiter out of its queue; it is answered when the mutex is released. */
void queue_answer(struct sync *sync, struct waiter *waiter, struct sync_answer ready,
                  struct news *news);
void queue_answer_all(struct sync *sync, struct queue *queue, int status, struct news *news);
void queue_answer_session(struct sync *sync, struct queue *queue, uint64_t session,
                          struct news *news);
/* Answers the waiters whose deadline has passed. */
void queue_time_out(struct sync *sync, struct queue *queue, uint64_t now_ns, struct news *news);
/* Locks the mutex. */
struct news sync_acquire(struct sync *sync);
/* The offset of a lock's expiry in an image. */
size_t sync_expiry_at(int lock);
/* Sends the words to the other copy, if they have changed or `anyway` is set. */
void sync_tell_change(struct sync *sync, bool anyway);
/* Unlocks the mutex, then answers. A waiter's owner may free it then. */
void sync_release(struct sync *sync, struct news *news);

#endif
