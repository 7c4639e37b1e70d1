#include "sync/sync_queue.h"

#include <stddef.h>

#include "base/assert.h"
#include "base/frame.h"
#include "sync/sync_lock.h"
#include "sync/sync_version.h"

struct waiter *queue_first(const struct queue *queue)
{
    return TREE_OWNER(tree_first(&queue->turns), struct waiter, by_turn);
}

struct waiter *queue_first_of_session(const struct queue *queue, uint64_t session)
{
    struct waiter *waiter = TREE_OWNER(tree_from(&queue->names, session, 0), struct waiter,
                                       by_name);
    return waiter && waiter->request.session == session ? waiter : NULL;
}

struct waiter *queue_first_deadline(const struct queue *queue)
{
    return TREE_OWNER(tree_first(&queue->deadlines), struct waiter, by_deadline);
}

void queue_take_out(struct queue *queue, struct waiter *waiter)
{
    SMB_ASSERT(waiter->kept);
    tree_take(&queue->turns, &waiter->by_turn);
    tree_take(&queue->deadlines, &waiter->by_deadline);
    tree_take(&queue->names, &waiter->by_name);
    waiter->kept = false;
}

struct queue *queue_of(struct sync *sync, const struct waiter *waiter)
{
    switch (waiter->request.opcode) {
    case SMB_LOCK: return &sync->locks[waiter->request.argument];
    case SMB_AWAIT_BARRIER: return &sync->barrier;
    default: return &sync->versions;
    }
}

void queue_keep(struct sync *sync, struct waiter *waiter, uint64_t turn, uint64_t timeout_ms,
                uint64_t now_ns, struct news *news)
{
    SMB_ASSERT(!waiter->kept);
    struct queue *queue = queue_of(sync, waiter);
    const struct sync_request *request = &waiter->request;
    waiter->deadline_ns = timeout_ms == UINT64_MAX ? UINT64_MAX : clock_later(now_ns, timeout_ms);
    waiter->kept = true;
    waiter->sync = sync;
    tree_add(&queue->turns, &waiter->by_turn, turn, sync->kept++, &sync->weights);
    tree_add(&queue->deadlines, &waiter->by_deadline, waiter->deadline_ns, 0, &sync->weights);
    tree_add(&queue->names, &waiter->by_name, request->session, request->sequence, &sync->weights);
    news_due(news, waiter->deadline_ns);
}

void queue_answer(struct sync *sync, struct waiter *waiter, struct sync_answer ready,
                  struct news *news)
{
    queue_take_out(queue_of(sync, waiter), waiter);
    waiter->ready = ready;
    waiter->next = NULL;
    *(news->last ? &news->last->next : &news->answered) = waiter;
    news->last = waiter;
}

void queue_answer_all(struct sync *sync, struct queue *queue, int status, struct news *news)
{
    for (struct waiter *waiter = queue_first(queue); waiter; waiter = queue_first(queue))
        queue_answer(sync, waiter, (struct sync_answer){.status = status}, news);
}

void queue_answer_session(struct sync *sync, struct queue *queue, uint64_t session,
                          struct news *news)
{
    struct waiter *waiter = queue_first_of_session(queue, session);
    for (; waiter; waiter = queue_first_of_session(queue, session))
        queue_answer(sync, waiter, (struct sync_answer){.status = SMB_SESSION_ENDED}, news);
}

void queue_time_out(struct sync *sync, struct queue *queue, uint64_t now_ns, struct news *news)
{
    struct waiter *waiter = queue_first_deadline(queue);
    for (; waiter && waiter->deadline_ns <= now_ns; waiter = queue_first_deadline(queue)) {
        struct sync_answer late = version_answer(sync, SMB_TIMEOUT);
        if (waiter->request.opcode == SMB_LOCK) {
            counter_add(&sync->counters->timed_out);
            late = lock_late(sync, &waiter->request, now_ns);
        }
        queue_answer(sync, waiter, late, news);
    }
    if (waiter)
        news_due(news, waiter->deadline_ns);
}

enum { WORDS = SYNC_IMAGE_BYTES / 8 };
_Static_assert((int)SYNC_IMAGE_BYTES == (int)SMB_COPIED_WORDS_BYTES, "they travel as they are");

size_t sync_expiry_at(int lock)
{
    return offsetof(struct sync_words, locks) + (size_t)lock * sizeof(struct sync_lock_words) +
           offsetof(struct sync_lock_words, expires_ns);
}

void sync_tell_change(struct sync *sync, bool anyway)
{
    if (!sync->changed)
        return;
    uint8_t image[SYNC_IMAGE_BYTES];
    const _Atomic uint64_t *words = (const _Atomic uint64_t *)sync->words;
    _Atomic uint64_t *shown = (_Atomic uint64_t *)&sync->shown;
    bool changed = anyway;
    for (int i = 0; i < WORDS; i++) {
        uint64_t word = word_get(&words[i]);
        changed |= word != word_get(&shown[i]);
        word_put(&shown[i], word);
        smb_store64(image + 8 * i, word);
    }
    if (!changed)
        return;
    for (int i = 0; i < SYNC_LOCKS; i++) {
        uint64_t expires_ns = word_get(&sync->shown.locks[i].expires_ns);
        uint64_t left_ns = expires_ns > sync->now_ns ? expires_ns - sync->now_ns : 0;
        smb_store64(image + sync_expiry_at(i), left_ns);
    }
    sync->changed(sync->changed_argument, image);
}

void sync_release(struct sync *sync, struct news *news)
{
    sync_tell_change(sync, false);
    bool sooner = sync->sooner && news->due_ns < sync->due_ns && !sync->closed;
    if (sooner)
        sync->due_ns = news->due_ns;
    pthread_mutex_unlock(&sync->mutex);
    if (sooner)
        sync->sooner(sync->sooner_argument, news->due_ns);
    for (struct waiter *waiter = news->answered; waiter;) {
        struct waiter *next = waiter->next;
        waiter->answer(waiter, waiter->ready);
        waiter = next;
    }
}

struct news sync_acquire(struct sync *sync)
{
    pthread_mutex_lock(&sync->mutex);
    return (struct news){.due_ns = UINT64_MAX};
}
